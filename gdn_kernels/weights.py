"""BlockWeights: the weights of one GDN layer as `gdn_block_tkg` takes them, read from a checkpoint folder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.dims import BlockDims
from gdn_kernels.dtypes import bfloat16, to_fp32

Array = npt.NDArray[Any]

# Qwen3.5 publishes multimodal checkpoints (dimensions in text_config) and text-only ones.
PREFIXES = ("model.language_model.layers.{}.", "model.layers.{}.")
PROJECTIONS = ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight")


class CheckpointError(ValueError):
    """A checkpoint folder lacks something, or holds something else than a GDN layer of Qwen3.5 has there."""


@dataclass(frozen=True)
class BlockWeights:
    """The weights of one GDN layer.

    W_in_qkv [H, conv_dim], W_in_z [H, value_dim], W_in_a and W_in_b [H, Hv]: all bf16, or all fp32 (the fp32 form);
    conv_weight [conv_dim, K_win], A_log [Hv], dt_bias [Hv], norm_weight [V]: fp32;
    out_proj [value_dim, H] in a checkpoint's dtype, or None: the block stops before it.
    All are contiguous, and the matrices are in (in, out) order.
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

    @classmethod
    def from_checkpoint(cls, path: str | PathLike[str], layer: int) -> BlockWeights:
        """Layer number `layer` of the Qwen3.5 checkpoint in the folder `path`.

        The folder holds config.json and either model.safetensors or the shards that model.safetensors.index.json
        lists. Only this layer's tensors are read. A_log stored in bf16 is read with a warning.

        Raises:
            CheckpointError: a ValueError that names the file, the tensor and what was expected there; also for a
                layer out of range, a full-attention layer, and Qwen3-Next's packed projections.
        """
        config = _Config.read(Path(path))
        config.check_is_gdn(layer)
        tensors = _LayerTensors.find(Path(path), layer)
        return _assemble(tensors, config)

    def arguments(self) -> dict[str, Array]:
        """The eight weight arguments of `gdn_block_tkg`, by name."""
        names = ("W_in_qkv", "W_in_z", "W_in_a", "W_in_b", "conv_weight", "A_log", "dt_bias", "norm_weight")
        return {name: getattr(self, name) for name in names}

    def astype_fp32(self) -> BlockWeights:
        """The same values for the fp32 form: every array in fp32."""
        fp32: dict[str, Any] = {name: to_fp32(array) for name, array in self.arguments().items()}
        return replace(self, **fp32, out_proj=None if self.out_proj is None else to_fp32(self.out_proj))


@dataclass(frozen=True)
class _Config:
    """What config.json says about the GDN layers."""

    dims: BlockDims
    norm_eps: float
    layer_types: list[str]

    @classmethod
    def read(cls, folder: Path) -> _Config:
        file = folder / "config.json"
        outer = _read_json(file)
        config = outer.get("text_config", outer)

        def value(name: str) -> Any:
            if not isinstance(config.get(name), (int, float)):
                raise CheckpointError(f"{file}: expected a number under {name!r}, found {config.get(name)!r}")
            return config[name]

        try:
            dims = BlockDims(
                H=value("hidden_size"),
                Hk=value("linear_num_key_heads"),
                Hv=value("linear_num_value_heads"),
                K=value("linear_key_head_dim"),
                V=value("linear_value_head_dim"),
                K_win=value("linear_conv_kernel_dim"),
            )
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{file}: {error}") from error
        layer_types = config.get("layer_types")
        if layer_types is None:  # transformers' own default: every fourth layer is full attention
            interval = config.get("full_attention_interval", 4)
            layers = range(1, value("num_hidden_layers") + 1)
            layer_types = ["linear_attention" if i % interval else "full_attention" for i in layers]
        return cls(dims=dims, norm_eps=float(value("rms_norm_eps")), layer_types=layer_types)

    def check_is_gdn(self, layer: int) -> None:
        count = len(self.layer_types)
        if not 0 <= layer < count:
            raise CheckpointError(f"layer: expected 0 to {count - 1}, this checkpoint has {count} layers, got {layer}")
        if self.layer_types[layer] != "linear_attention":
            gdn = [str(i) for i, kind in enumerate(self.layer_types) if kind == "linear_attention"]
            some = ", ".join(gdn if len(gdn) <= 6 else [*gdn[:5], "..."])
            raise CheckpointError(
                f"layer {layer} is a {self.layer_types[layer]} layer; "
                f"GDN layers of this checkpoint are {some or 'none'}"
            )


@dataclass(frozen=True)
class _LayerTensors:
    """Where one layer's linear_attn tensors are: name after `linear_attn.` -> file."""

    prefix: str
    files: Mapping[str, Path]
    source: Path  # the file that lists the tensors, for messages

    @classmethod
    def find(cls, folder: Path, layer: int) -> _LayerTensors:
        source, files = _tensor_files(folder)
        for prefix in (p.format(layer) + "linear_attn." for p in PREFIXES):
            found = {name.removeprefix(prefix): file for name, file in files.items() if name.startswith(prefix)}
            if found:
                return cls(prefix, found, source)
        expected = " or ".join(p.format(layer) + "linear_attn.*" for p in PREFIXES)
        raise CheckpointError(f"{source}: expected tensors named {expected}, found none")

    def check_packing(self) -> None:
        if "in_proj_qkvz.weight" in self.files:
            raise CheckpointError(
                f"{self.source}: {self.prefix}in_proj_qkvz.weight packs q, k, v and z per key head, as Qwen3-Next "
                "does; expected the separate in_proj_qkv, in_proj_z, in_proj_a and in_proj_b of Qwen3.5"
            )

    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        """The tensor `name` as stored, bf16 or fp32; its shape and dtype are checked before its bytes are read."""
        full_name = self.prefix + name
        if name not in self.files:
            raise CheckpointError(f"{self.source}: expected {full_name} of shape {list(shape)}, found no such tensor")
        file = self.files[name]
        bfloat16()  # safetensors finds bf16 by NumPy's name for it, which exists once ml_dtypes is imported
        with _open(file) as tensors:
            if full_name not in tensors.keys():  # noqa: SIM118 - the reader has no `in`
                raise CheckpointError(f"{file}: expected {full_name}, as {self.source.name} says, found no such tensor")
            header = tensors.get_slice(full_name)
            if tuple(header.get_shape()) != shape:
                raise CheckpointError(
                    f"{file}: {full_name}: expected shape {list(shape)} by config.json, found {header.get_shape()}"
                )
            if header.get_dtype() not in ("BF16", "F32"):
                raise CheckpointError(f"{file}: {full_name}: expected dtype BF16 or F32, found {header.get_dtype()}")
            return tensors.get_tensor(full_name)


def _assemble(tensors: _LayerTensors, config: _Config) -> BlockWeights:
    dims = config.dims
    tensors.check_packing()

    def linear(name: str, features_out: int, features_in: int) -> Array:
        return np.ascontiguousarray(tensors.read(name, (features_out, features_in)).T)  # [in, out]

    outs = (dims.conv_dim, dims.value_dim, dims.Hv, dims.Hv)
    projections = [linear(name, out, dims.H) for name, out in zip(PROJECTIONS, outs, strict=True)]
    if len({w.dtype for w in projections}) > 1:
        found = ", ".join(f"{name} {w.dtype}" for name, w in zip(PROJECTIONS, projections, strict=True))
        raise CheckpointError(
            f"{tensors.source}: {tensors.prefix}: expected one dtype for all projections, found {found}"
        )
    W_in_qkv, W_in_z, W_in_a, W_in_b = projections
    A_log = tensors.read("A_log", (dims.Hv,))
    if A_log.dtype == bfloat16():
        warnings.warn(
            f"{tensors.files['A_log']}: {tensors.prefix}A_log is stored in bf16, so the decay was rounded when the "
            "checkpoint was written (by up to 3 % for a head that forgets slowly); published ones store fp32",
            stacklevel=3,
        )
    return BlockWeights(
        W_in_qkv=W_in_qkv,
        W_in_z=W_in_z,
        W_in_a=W_in_a,
        W_in_b=W_in_b,
        conv_weight=to_fp32(tensors.read("conv1d.weight", (dims.conv_dim, 1, dims.K_win))[:, 0]),  # [conv_dim, K_win]
        A_log=to_fp32(A_log),
        dt_bias=to_fp32(tensors.read("dt_bias", (dims.Hv,))),
        norm_weight=to_fp32(tensors.read("norm.weight", (dims.V,))),
        norm_eps=config.norm_eps,
        out_proj=linear("out_proj.weight", dims.H, dims.value_dim),
        dims=dims,
    )


def _tensor_files(folder: Path) -> tuple[Path, dict[str, Path]]:
    """The file that lists the checkpoint's tensors, and the file each tensor is in."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():  # first, as in transformers
        with _open(single) as tensors:
            return single, dict.fromkeys(tensors.keys(), single)
    if not index.is_file():
        raise CheckpointError(f"{folder}: expected model.safetensors or model.safetensors.index.json, found neither")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: expected an object under 'weight_map', found {weight_map!r}")
    return index, {name: folder / file for name, file in weight_map.items()}


def _open(file: Path) -> Any:
    """An open safetensors file; CheckpointError when there is none or it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="numpy")
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: expected a safetensors file, found none") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: expected a whole safetensors file, could not read it: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{file}: expected a checkpoint's JSON file, could not read it: {error.strerror}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file}: expected JSON, could not parse it: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value
