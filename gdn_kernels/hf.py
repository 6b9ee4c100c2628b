"""The block in a transformers model: `patch(model)` has its Gated DeltaNet layers decode with it, `unpatch` ends that.

What changes is one token with a cache that has seen a prompt. Everything else goes the layer's own way: more than one
token (prefill, a chunk, verification of drafts), no cache, an empty or reset one, and a cache that records its past so
that it can be cropped (assisted decoding). Both ways read and write the model's own cache, so they may alternate.

On a device the block runs as the PyTorch operator `gdn_kernels::block`, which writes none of its inputs: the layer
copies the returned states into the cache. That path follows the vendor's documentation and has not run on hardware.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

try:
    import torch
    from torch import nn
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"gdn_kernels.hf needs torch and transformers ({missing}): pip install 'gdn-kernels[hf]'", name=missing.name
    ) from missing

from gdn_kernels import backends, torch_block
from gdn_kernels.patchable import reason_against
from gdn_kernels.torch_layer import MODULES
from gdn_kernels.torch_operator import block
from gdn_kernels.weights import BlockWeights, PrecisionWarning

BACKENDS = ("auto", "torch", *backends.NAMES)


def patch(model: nn.Module, *, backend: str = "auto") -> nn.Module:
    """Let every Gated DeltaNet layer of a transformers model decode with the fused block and its own `out_proj`.

    `generate()`, its caches and everything around these layers stay the model's own. The weights are read once, here,
    and kept beside the model's: as fp32 for the backend "torch" (three times the memory of these layers in a bf16
    model), as they are for the others. A weight that is changed, replaced or moved afterwards is noticed at the next
    decoded token and refused, as only a new `patch` takes it over; a change through `.data` in place is not seen. A
    deep copy of a patched model has to be unpatched and patched as well.

    Args:
        model: a transformers model with Qwen3_5, Qwen3_5Moe or Qwen3Next GatedDeltaNet layers, in eval mode, on the CPU
            (for "trn2": on the device), in bf16 or fp32.
        backend: where the block runs: "torch" (PyTorch, on a CPU, fast), "interpreter", "simulate", "trn2", or "auto":
            "trn2" where it is available, else "torch".

    Returns:
        The same model.

    Raises:
        ValueError: for a model with a layer that the block can't serve, naming the layer and the reason: already
            patched, no Gated DeltaNet, an unknown kind of one, training mode, quantised, adapted or offloaded weights,
            another dtype or device, hooks on what the block replaces, dimensions beyond the block's. No layer is then
            patched.
        gdn_kernels.BackendUnavailable: when the backend can't run here.
    """
    chosen = choose(backend)
    layers = _layers(model)
    for name, module in layers.items():
        reason = "already patched; unpatch(model) first" if _is_patched(module) else reason_against(module, chosen)
        if reason:
            raise ValueError(f"model has a layer that the block can't serve, {name}: {reason}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrecisionWarning)
        forwards = {name: _block_forward(name, module, chosen) for name, module in layers.items()}
    _repeat_once(caught)
    for name, module in layers.items():
        module.forward = forwards[name]
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Give every layer that `patch` changed its own forward back; a model that isn't patched stays as it is.

    Returns:
        The same model.
    """
    for module in model.modules():
        if _is_patched(module):
            replaced = module.forward
            del module.forward
            if replaced.was_set:  # some other patch was there before
                module.forward = replaced.own
    return model


def choose(backend: str = "auto") -> str:
    """The backend that `backend` means here, one of BACKENDS but "auto".

    Raises:
        ValueError, gdn_kernels.BackendUnavailable: for an unknown one, and one that can't run here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}, got {backend!r}")
    if backend == "auto":
        return "trn2" if backends.choose() == "trn2" else "torch"
    return "torch" if backend == "torch" else backends.choose(backend)


@dataclass(frozen=True)
class _Source:
    """A parameter that the block has a copy of, as it was: its place in the module, version and address."""

    name: str
    owner: dict[str, Any]
    key: str
    parameter: torch.Tensor
    version: int | None
    address: int

    @classmethod
    def of(cls, name: str, owner: nn.Module, key: str) -> _Source:
        parameter = owner._parameters[key]
        assert parameter is not None
        return cls(name, owner._parameters, key, parameter, _version(parameter), parameter.data_ptr())

    def same(self) -> bool:
        now = self.owner[self.key]
        return now is self.parameter and _version(now) == self.version and now.data_ptr() == self.address


def _version(tensor: torch.Tensor) -> int | None:
    """How often the tensor was written; tensors made in inference mode don't count."""
    return None if tensor.is_inference() else tensor._version


@dataclass(eq=False)
class BlockForward:
    """A patched layer's forward. Calls the block for one token with a cached past, else the layer's `own` forward.

    A class and no closure, so that a deep copy of the model has a copy of it. `was_set`: `own` had been assigned to
    this very module, so it isn't the one of its class.
    """

    name: str
    module: Any
    own: Any
    was_set: bool
    backend: str
    dtype: torch.dtype
    norm_eps: float
    weights: dict[str, torch.Tensor]
    sources: tuple[_Source, ...]

    def __call__(
        self, hidden_states: torch.Tensor, cache: Any = None, attention_mask: torch.Tensor | None = None, **rest: Any
    ) -> torch.Tensor:
        if not self._is_decode(hidden_states, cache, rest):
            output: torch.Tensor = self.own(hidden_states, cache=cache, attention_mask=attention_mask, **rest)
            return output
        index = self.module.layer_idx
        conv_state, recurrent_state = cache.get_conv_state(index), cache.get_recurrent_state(index)
        self._check(hidden_states, conv_state, recurrent_state)
        if attention_mask is not None:  # [B, 1]; transformers' own models pass none with one token
            hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
        arguments = {**self.weights, "conv_state": conv_state, "recurrent_state": recurrent_state}
        if self.backend == "torch":
            results = torch_block.gdn_block_tkg(hidden_states, **arguments, norm_eps=self.norm_eps)
        else:
            arguments = {name: tensor.contiguous() for name, tensor in arguments.items()}
            results = block(hidden_states.contiguous(), **arguments, norm_eps=self.norm_eps, backend=self.backend)
        core_out, window, state = results
        conv_state.copy_(window)  # in place: graphs and others hold the cache's own tensors
        cache.update_recurrent_state(state, index)
        projected: torch.Tensor = self.module.out_proj(core_out)
        return projected

    def _is_decode(self, hidden_states: torch.Tensor, cache: Any, rest: dict[str, Any]) -> bool:
        """One token after others. Packed sequences say where theirs begin; `cache_params` is the cache's old name."""
        if cache is None or hidden_states.shape[1] != 1 or "cache_params" in rest:
            return False
        if rest.get("cu_seq_lens_q") is not None or cache.is_recording_past(self.module.layer_idx):
            return False
        return cache.get_conv_state(self.module.layer_idx) is not None

    def _check(self, hidden_states: torch.Tensor, conv_state: torch.Tensor, recurrent_state: torch.Tensor) -> None:
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise RuntimeError(
                f"{self.name}: the block has no gradient; decode under torch.no_grad(), or unpatch(model)"
            )
        if (hidden_states.dtype, conv_state.dtype, recurrent_state.dtype) != (self.dtype, self.dtype, torch.float32):
            raise ValueError(
                f"{self.name}: hidden_states and conv state must be {self.dtype} as at patch(), the recurrent state "
                f"torch.float32, got {hidden_states.dtype}, {conv_state.dtype} and {recurrent_state.dtype}"
            )
        if torch.compiler.is_compiling():  # a graph holds the weights it was made with
            return
        changed = [source.name for source in self.sources if not source.same()]
        if changed:
            raise RuntimeError(
                f"{self.name}: {', '.join(changed)} changed since patch(), which took the weights over; "
                "unpatch(model) and patch(model) again"
            )


def _is_patched(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), BlockForward)


def patched_layers(model: nn.Module) -> list[str]:
    """The names of the layers that decode with the block."""
    return [name for name, module in model.named_modules() if _is_patched(module)]


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The Gated DeltaNet layers of the model by name."""
    found = {
        name or "itself": module for name, module in model.named_modules() if "GatedDeltaNet" in type(module).__name__
    }
    if not found:
        raise ValueError(f"model must have a layer of {', '.join(MODULES)}, got {type(model).__name__} without any")
    return found


def _block_forward(name: str, module: nn.Module, backend: str) -> BlockForward:
    try:
        weights = BlockWeights.from_layer(module)
    except ValueError as error:
        raise ValueError(f"model has a layer that the block can't serve, {name}: {error}") from None
    parameter = next(p for part, p in module.named_parameters() if part.startswith("in_proj"))
    return BlockForward(
        name=name,
        module=module,
        own=module.forward,
        was_set="forward" in module.__dict__,
        backend=backend,
        dtype=parameter.dtype,
        norm_eps=weights.norm_eps,
        weights=_tensors(weights, backend, parameter.device),
        sources=tuple(_sources(module)),
    )


def _tensors(weights: BlockWeights, backend: str, device: torch.device) -> dict[str, torch.Tensor]:
    """The eight weight arguments as tensors on the module's device; for PyTorch, which has no bf16 product with an fp32
    result on a CPU, in fp32."""
    from gdn_kernels.interpreter.torch_arrays import to_torch

    arguments = (weights.astype_fp32() if backend == "torch" else weights).arguments()
    return {name: to_torch(array).to(device) for name, array in arguments.items()}


def _sources(module: nn.Module) -> list[_Source]:
    """Every parameter that the block copied."""
    return [
        _Source.of(f"{part_name}.{key}".lstrip("."), part, key)
        for part_name, part in module.named_modules()
        if part_name != "out_proj"
        for key in part._parameters
        if part._parameters[key] is not None
    ]


def _repeat_once(caught: list[warnings.WarningMessage]) -> None:
    """Warnings from reading the layers, passed on; of those about precision the first, with their number."""
    rounded = [warning for warning in caught if issubclass(warning.category, PrecisionWarning)]
    for warning in caught:
        if warning not in rounded:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if rounded:
        more = f" ({len(rounded)} layers; the model's own layers use the same values)"
        warnings.warn(f"{rounded[0].message}{more}", PrecisionWarning, stacklevel=3)
