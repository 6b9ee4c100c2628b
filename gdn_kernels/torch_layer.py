"""The tensors of a transformers Gated DeltaNet module, under the names that they have in a checkpoint.

torch is imported when a module is at hand, never with this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdn_kernels.dims import BlockDims
from gdn_kernels.dtypes import Array

MODULES = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen3NextGatedDeltaNet")

# What all of them have; the projections differ.
_ATTRIBUTES: Mapping[str, str] = {
    "H": "hidden_size",
    "Hk": "num_k_heads",
    "Hv": "num_v_heads",
    "K": "head_k_dim",
    "V": "head_v_dim",
    "K_win": "conv_kernel_size",
}
_PARTS = ("conv1d", "A_log", "dt_bias", "norm", "out_proj")
_PROJECTIONS = (("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"), ("in_proj_qkvz", "in_proj_ba"))


@dataclass(frozen=True)
class ModuleTensors:
    """A module's parameters and buffers, by the names that a checkpoint has after `linear_attn.`."""

    name: str
    tensors: Mapping[str, Any]
    dims: BlockDims
    norm_eps: float

    @classmethod
    def of(cls, module: Any) -> ModuleTensors:
        """The tensors of `module`; ValueError with the reason when it is no GDN layer that the block can stand for."""
        kind = type(module).__name__
        wanted = (*_ATTRIBUTES.values(), *_PARTS)
        missing = [name for name in wanted if not hasattr(module, name)]
        if not any(all(hasattr(module, name) for name in names) for names in _PROJECTIONS):
            missing.append(" or ".join("+".join(names) for names in _PROJECTIONS))
        if missing:
            raise ValueError(f"module must be a {', '.join(MODULES)} or like one, got {kind} without {missing[0]}")
        if getattr(module, "activation", "silu") not in ("silu", "swish"):  # two names of one function
            raise ValueError(f"module.activation must be silu, got {module.activation!r} in {kind}")
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        if biases := [name for name in tensors if name.endswith(".bias")]:
            raise ValueError(f"module must have no bias, got {', '.join(biases)} in {kind}")
        try:
            dims = BlockDims(**{dim: int(getattr(module, name)) for dim, name in _ATTRIBUTES.items()})
        except ValueError as error:
            raise ValueError(f"module {kind}: {error}") from None
        index = getattr(module, "layer_idx", None)
        return cls(kind if index is None else f"{kind} of layer {index}", tensors, dims, _norm_eps(module))

    def has(self, name: str) -> bool:
        return name in self.tensors

    def place(self, name: str) -> str:
        return f"module {self.name}: {name}"

    def error(self, name: str, message: str) -> ValueError:
        return ValueError(f"{self.place(name)}: {message}")

    def read(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Array:
        """A copy of the tensor `name`, in one of `dtypes` (NumPy's names for them); the module may go on training."""
        from gdn_kernels.interpreter.torch_arrays import to_numpy

        if name not in self.tensors:
            raise self.error(name, f"expected shape {list(shape)}, found no such tensor")
        tensor = self.tensors[name].detach()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != shape:
            raise self.error(name, f"expected shape {list(shape)}, found {list(tensor.shape)}")
        if dtype not in dtypes:
            raise self.error(name, f"expected dtype {' or '.join(dtypes)}, found {dtype}")
        if tensor.device.type == "meta":
            raise self.error(name, "expected its values, found a tensor on the meta device (offloaded or not loaded)")
        return np.array(to_numpy(tensor.cpu().contiguous()))


def _norm_eps(module: Any) -> float:
    """The epsilon that the module's gated norm adds: transformers' own norm and fla's call it differently."""
    for name in ("variance_epsilon", "eps"):
        if hasattr(module.norm, name):
            return float(getattr(module.norm, name))
    raise ValueError(f"module.norm must have a variance_epsilon or eps, got {type(module.norm).__name__} without")
