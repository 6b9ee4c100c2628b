"""BlockWeights: the weights of one GDN layer as `gdn_block_tkg` takes them, from a checkpoint or a model's layer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gdn_kernels.checkpoint import CheckpointConfig, CheckpointError, LayerTensors, model_preset
from gdn_kernels.dims import BlockDims
from gdn_kernels.dtypes import is_bfloat16, to_fp32
from gdn_kernels.packing import FP8_BLOCK, dequantise, packed_shapes, scale_shape, unpack_ba, unpack_qkvz
from gdn_kernels.sharding import shard_dims, split_channels, split_heads
from gdn_kernels.torch_layer import ModuleTensors

__all__ = ["BlockWeights", "CheckpointError", "PrecisionWarning", "model_preset"]

Array = npt.NDArray[Any]

PLAIN = ("bfloat16", "float32")
FP8 = ("float8_e4m3fn",)


class PrecisionWarning(UserWarning):
    """A tensor that the contract has in fp32 comes in bf16: its values were rounded before they got here."""


@dataclass(frozen=True)
class BlockWeights:
    """The weights of one GDN layer.

    W_in_qkv [H, conv_dim], W_in_z [H, value_dim], W_in_a and W_in_b [H, Hv]: all bf16, or all fp32 (the fp32 form);
    conv_weight [conv_dim, K_win], A_log [Hv], dt_bias [Hv], norm_weight [V]: fp32;
    out_proj [value_dim, H] bf16 or fp32, or None: the block stops before it.
    All are contiguous, and the matrices are in (in, out) order. rank and world say which part of a layer this is, the
    whole one unless `shard` made it; dims are those of the part.
    """

    W_in_qkv: Array
    W_in_z: Array
    W_in_a: Array
    W_in_b: Array
    conv_weight: Array
    A_log: Array
    dt_bias: Array
    norm_weight: Array
    norm_eps: float
    out_proj: Array | None
    dims: BlockDims
    rank: int = 0
    world: int = 1

    @classmethod
    def from_checkpoint(cls, path: str | PathLike[str], layer: int) -> BlockWeights:
        """Layer number `layer` of the Qwen3.5 or Qwen3-Next checkpoint in the folder `path`.

        The folder holds config.json and either model.safetensors or the shards that model.safetensors.index.json
        lists. Only this layer's bytes are read. Qwen3-Next's packed projections are unpacked, block-scaled FP8 ones
        (`weight_scale_inv`) become bf16. A_log or norm.weight stored in bf16 is read with a PrecisionWarning.

        Raises:
            CheckpointError: a ValueError that names the file, the tensor and what was expected there; also for a
                layer out of range and for a full-attention layer.
        """
        config = CheckpointConfig.read(Path(path))
        config.check_is_gdn(layer)
        tensors = LayerTensors.find(Path(path), layer)
        return _assemble(tensors, config.dims, config.norm_eps, config.fp8_block)

    @classmethod
    def from_layer(cls, module: Any) -> BlockWeights:
        """The weights of a transformers module: Qwen3_5, Qwen3_5Moe or Qwen3NextGatedDeltaNet, copied.

        A bf16 module gives bf16 projections, an fp32 module the fp32 form. Loading a model in bf16 rounds A_log and
        norm.weight, which checkpoints hold in fp32; that brings a PrecisionWarning here, and only a read of the
        checkpoint brings the lost digits back.

        Raises:
            ValueError: for any other module and for one that the block can't stand for, with the reason: a bias,
                another activation than silu, a dtype beside bf16, fp32 and block-scaled FP8, dimensions out of range,
                tensors without values.
        """
        tensors = ModuleTensors.of(module)
        return _assemble(tensors, tensors.dims, tensors.norm_eps, FP8_BLOCK)

    def arguments(self) -> dict[str, Array]:
        """The eight weight arguments of `gdn_block_tkg`, by name."""
        names = ("W_in_qkv", "W_in_z", "W_in_a", "W_in_b", "conv_weight", "A_log", "dt_bias", "norm_weight")
        return {name: getattr(self, name) for name in names}

    def astype_fp32(self) -> BlockWeights:
        """The same values for the fp32 form: every array in fp32."""
        fp32: dict[str, Any] = {name: to_fp32(array) for name, array in self.arguments().items()}
        return replace(self, **fp32, out_proj=None if self.out_proj is None else to_fp32(self.out_proj))

    def shard(self, rank: int, world: int) -> BlockWeights:
        """The part of one rank of tensor parallelism: its key heads with their value heads, contiguous copies.

        W_in_* lose columns, out_proj rows, and conv_weight, A_log and dt_bias elements; `dims` are those of the part.
        The ranks' outputs, core_out times their rows of out_proj, add up to the layer's (`gdn_kernels.parallel`).

        Raises:
            ValueError: when `world` does not divide the key heads, `rank` is not 0 to world - 1, or these weights are
                a part already.
        """
        if self.world > 1:
            raise ValueError(f"shard must be called on a whole layer, got rank {self.rank} of world = {self.world}")
        dims = shard_dims(self.dims, rank, world)
        return BlockWeights(
            W_in_qkv=split_channels(self.W_in_qkv, 1, self.dims, rank, world),
            W_in_z=split_heads(self.W_in_z, 1, rank, world),
            W_in_a=split_heads(self.W_in_a, 1, rank, world),
            W_in_b=split_heads(self.W_in_b, 1, rank, world),
            conv_weight=split_channels(self.conv_weight, 0, self.dims, rank, world),
            A_log=split_heads(self.A_log, 0, rank, world),
            dt_bias=split_heads(self.dt_bias, 0, rank, world),
            norm_weight=self.norm_weight.copy(),
            norm_eps=self.norm_eps,
            out_proj=None if self.out_proj is None else split_heads(self.out_proj, 0, rank, world),
            dims=dims,
            rank=int(rank),
            world=int(world),
        )


class _Source(Protocol):
    """Where a layer's tensors come from, under the names that they have in a checkpoint after `linear_attn.`."""

    def has(self, name: str) -> bool: ...

    def read(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Array: ...

    def place(self, name: str) -> str: ...

    def error(self, name: str, message: str) -> ValueError: ...


def _assemble(source: _Source, dims: BlockDims, norm_eps: float, fp8_block: tuple[int, int]) -> BlockWeights:
    qkv, z, a, b = _projections(source, dims, fp8_block)  # each [out, in]
    A_log = source.read("A_log", (dims.Hv,), PLAIN)
    norm_weight = source.read("norm.weight", (dims.V,), PLAIN)
    _warn_of_rounding(source, {"A_log": A_log, "norm.weight": norm_weight})
    return BlockWeights(
        W_in_qkv=np.ascontiguousarray(qkv.T),
        W_in_z=np.ascontiguousarray(z.T),
        W_in_a=np.ascontiguousarray(a.T),
        W_in_b=np.ascontiguousarray(b.T),
        conv_weight=to_fp32(source.read("conv1d.weight", (dims.conv_dim, 1, dims.K_win), PLAIN)[:, 0]),
        A_log=to_fp32(A_log),
        dt_bias=to_fp32(source.read("dt_bias", (dims.Hv,), PLAIN)),
        norm_weight=to_fp32(norm_weight),
        norm_eps=norm_eps,
        out_proj=np.ascontiguousarray(_matrix(source, "out_proj", (dims.H, dims.value_dim), fp8_block).T),
        dims=dims,
    )


def _projections(source: _Source, dims: BlockDims, fp8_block: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """qkv, z, a and b, of one dtype, each [out, H]; Qwen3-Next's two matrices are taken apart."""
    shapes: dict[str, tuple[int, int]]
    if source.has("in_proj_qkvz.weight"):
        shapes = dict(zip(("in_proj_qkvz", "in_proj_ba"), packed_shapes(dims), strict=True))
    else:
        outs = {"qkv": dims.conv_dim, "z": dims.value_dim, "a": dims.Hv, "b": dims.Hv}
        shapes = {f"in_proj_{name}": (out, dims.H) for name, out in outs.items()}
    matrices = {name: _matrix(source, name, shape, fp8_block) for name, shape in shapes.items()}
    if len({matrix.dtype for matrix in matrices.values()}) > 1:
        found = ", ".join(f"{name}.weight {matrix.dtype}" for name, matrix in matrices.items())
        raise source.error("in_proj_*", f"expected one dtype for all projections, found {found}")
    if "in_proj_qkvz" in matrices:
        qkv, z = unpack_qkvz(matrices["in_proj_qkvz"], dims)
        b, a = unpack_ba(matrices["in_proj_ba"], dims)
        return qkv, z, a, b
    return matrices["in_proj_qkv"], matrices["in_proj_z"], matrices["in_proj_a"], matrices["in_proj_b"]


def _matrix(source: _Source, name: str, shape: tuple[int, int], fp8_block: tuple[int, int]) -> Array:
    """A linear layer's weight [out, in], bf16 or fp32; FP8 where its scales are stored beside it."""
    scale = f"{name}.weight_scale_inv"
    if not source.has(scale):
        return source.read(f"{name}.weight", shape, PLAIN)
    quantised = source.read(f"{name}.weight", shape, FP8)
    return dequantise(quantised, source.read(scale, scale_shape(*shape, fp8_block), PLAIN), fp8_block)


def _warn_of_rounding(source: _Source, tensors: Mapping[str, Array]) -> None:
    """A PrecisionWarning that names those of `tensors`, which published checkpoints hold in fp32, that are in bf16."""
    rounded = [name for name, tensor in tensors.items() if is_bfloat16(tensor.dtype)]
    if rounded:
        decay = ", and with A_log the decay, by up to 3 % for a head that forgets slowly" if "A_log" in rounded else ""
        warnings.warn(
            f"{source.place(' and '.join(rounded))}: stored in bf16, published checkpoints hold fp32; the values were "
            f"rounded before they were read{decay}",
            PrecisionWarning,
            stacklevel=4,
        )
