"""DecodeState: the two states of one GDN layer between tokens; cleared, saved, to and from a transformers cache.

`gdn_kernels.layouts` converts other projects' layouts: the functions imported from there are this module's too.
"""

from __future__ import annotations

import json
import operator
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from gdn_kernels import atomic
from gdn_kernels.dims import BlockDims
from gdn_kernels.dtypes import Array, bfloat16, is_bfloat16
from gdn_kernels.layouts import check_shape, narrow_conv_state, to_key_major, to_value_major, widen_conv_state

__all__ = ["DecodeState", "narrow_conv_state", "to_key_major", "to_value_major", "widen_conv_state"]

FORMAT = "gdn_kernels.DecodeState 1"


@dataclass(eq=False)
class DecodeState:
    """The states of one GDN layer; the arrays given are kept, not copied.

    Attributes:
        conv_state: [B, conv_dim, K_win] bf16 or fp32, contiguous; column 0 is dead.
        recurrent_state: [B, Hv, K, V] fp32, contiguous.
        dims: the layer's dimensions.

    Raises:
        ValueError: naming the state whose shape or dtype is another.
    """

    conv_state: Array
    recurrent_state: Array
    dims: BlockDims

    def __post_init__(self) -> None:
        d = self.dims
        batch = np.shape(self.conv_state)[:1]
        check_shape("conv_state", self.conv_state, (*batch, d.conv_dim, d.K_win), "[B, conv_dim, K_win]")
        check_shape("recurrent_state", self.recurrent_state, (*batch, d.Hv, d.K, d.V), "[B, Hv, K, V]")
        if not is_bfloat16(self.conv_state.dtype) and self.conv_state.dtype != np.float32:
            raise ValueError(f"conv_state must be bfloat16 or float32, got {self.conv_state.dtype}")
        if self.recurrent_state.dtype != np.float32:
            raise ValueError(f"recurrent_state must be float32, got {self.recurrent_state.dtype}")
        for name, array in self.arguments().items():
            if not array.flags.c_contiguous:
                raise ValueError(f"{name} must be C-contiguous, got a strided view of shape {list(array.shape)}")

    @property
    def batch(self) -> int:
        """Rows, B."""
        return int(self.conv_state.shape[0])

    @property
    def form(self) -> str:
        """ "bf16" or "fp32": the form of the calls that this state goes with."""
        return "bf16" if is_bfloat16(self.conv_state.dtype) else "fp32"

    def arguments(self) -> dict[str, Array]:
        """The two state arguments of `gdn_block_tkg`, by name."""
        return {"conv_state": self.conv_state, "recurrent_state": self.recurrent_state}

    @classmethod
    def zeros(cls, dims: BlockDims, batch: int, *, form: str = "bf16") -> DecodeState:
        """The state before the first token of `batch` rows, for calls of `form` "bf16" or "fp32"."""
        if form not in ("bf16", "fp32"):
            raise ValueError(f'form must be "bf16" or "fp32", got {form!r}')
        if isinstance(batch, bool) or not isinstance(batch, (int, np.integer)) or batch < 0:
            raise ValueError(f"batch must be a whole number from 0, got {batch!r}")
        dtype = bfloat16() if form == "bf16" else np.dtype(np.float32)
        conv_state = np.zeros((batch, dims.conv_dim, dims.K_win), dtype)
        return cls(conv_state, np.zeros((batch, dims.Hv, dims.K, dims.V), np.float32), dims)

    def reset(self, rows: Iterable[SupportsIndex]) -> None:
        """Clear these rows in place, as a new sequence needs; the others keep their bytes. Duplicates are fine.

        Raises:
            ValueError: for a row that is no whole number from 0 to B - 1; nothing is cleared then.
        """
        wanted = list(rows)
        for row in wanted:
            if isinstance(row, (bool, np.bool_)) or not hasattr(row, "__index__"):
                raise ValueError(f"rows must be whole numbers, got {row!r}")
            if not 0 <= operator.index(row) < self.batch:
                raise ValueError(f"rows must be 0 to {self.batch - 1}, got {operator.index(row)}")
        indices = [operator.index(row) for row in wanted]
        self.conv_state[indices] = 0
        self.recurrent_state[indices] = 0

    @classmethod
    def from_cache(cls, cache: Any, layer: int, dims: BlockDims) -> DecodeState:
        """A copy of the states of layer number `layer` in a transformers cache, such as DynamicCache.

        The layer's convolution must hold K_win columns: a cache that records its past, as assisted decoding makes it
        do, holds more of them, and which of those stay is known only after its `crop`.

        Raises:
            ValueError: if the cache has no such layer, no linear-attention states there or none yet, records its past,
                or if the states' shapes or dtypes are not those of `dims`.
        """
        states = _cache_layer(cache, layer)
        conv_state, recurrent_state = states.conv_states[0], states.recurrent_states[0]
        if conv_state is None or recurrent_state is None or not states.has_previous_state[0]:
            raise ValueError(f"cache must hold states of layer {layer}, it has none yet; DecodeState.zeros makes some")
        return cls(_from_torch(conv_state), _from_torch(recurrent_state), dims)

    def to_cache(self, cache: Any, layer: int) -> None:
        """Write these states to layer number `layer` of a transformers cache, in place where it has states already.

        The cache's other layers, and with them its count of tokens, stay as they are.

        Raises:
            ValueError: as `from_cache`, or if the states in the cache have another batch, shape or dtype.
        """
        states = _cache_layer(cache, layer)
        conv_state, recurrent_state = _to_torch(self.conv_state), _to_torch(self.recurrent_state)
        for name, held, new in (
            ("conv_state", states.conv_states[0], conv_state),
            ("recurrent_state", states.recurrent_states[0], recurrent_state),
        ):
            if held is not None and (held.shape, held.dtype) != (new.shape, new.dtype):
                raise ValueError(
                    f"{name} must have shape {list(held.shape)} and dtype {held.dtype} like the one in layer {layer} "
                    f"of the cache, got {list(new.shape)} and {new.dtype}"
                )
        if states.device is not None:
            conv_state, recurrent_state = conv_state.to(states.device), recurrent_state.to(states.device)
        # K_win new columns push out every old one.
        cache.update_conv_state(conv_state, layer, conv_kernel_size=self.dims.K_win)
        cache.update_recurrent_state(recurrent_state, layer)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state to a safetensors file; a file already there is replaced as a whole, or stays whole."""
        from safetensors.numpy import save

        metadata = {"format": FORMAT, "dims": json.dumps(asdict(self.dims)), "checksum": self._checksum()}
        atomic.write(Path(path), save(self.arguments(), metadata))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> DecodeState:
        """A state that `save` wrote.

        Raises:
            ValueError: naming the file, if it is no such file, cut short, or changed since.
            OSError: if it can't be opened.
        """
        from safetensors import SafetensorError, safe_open

        bfloat16()  # safetensors finds bf16 by NumPy's name for it, which exists once ml_dtypes is imported
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(f"its format is {metadata.get('format')!r}")
                arrays = {name: file.get_tensor(name) for name in ("conv_state", "recurrent_state")}
                state = cls(**arrays, dims=BlockDims(**json.loads(metadata["dims"])))
        except (SafetensorError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}: expected a file that DecodeState.save wrote, could not read it: {error}"
            ) from error
        if state._checksum() != metadata.get("checksum"):
            raise ValueError(
                f"{path}: expected checksum {metadata.get('checksum')}, found {state._checksum()}: damaged"
            )
        return state

    def _checksum(self) -> str:
        both = 0
        for array in self.arguments().values():
            both = zlib.crc32(array.reshape(-1).view(np.uint8).data, both)
        return f"{both:08x}"


def _cache_layer(cache: Any, layer: int) -> Any:
    """The states of a linear-attention layer in a transformers cache, which holds K_win columns and no more."""
    layers = getattr(cache, "layers", None)
    if layers is None or not hasattr(cache, "update_recurrent_state"):
        raise ValueError(f"cache must be a transformers cache with linear-attention layers, got {type(cache).__name__}")
    if not 0 <= layer < len(layers):
        raise ValueError(f"layer must be 0 to {len(layers) - 1} in this cache, got {layer}")
    states = layers[layer]
    if not hasattr(states, "recurrent_states"):
        raise ValueError(
            f"layer must be a linear-attention layer of the cache, layer {layer} is {type(states).__name__}"
        )
    if states.record_past:
        raise ValueError(
            f"cache must not be recording its past, it is in layer {layer}; it then holds uncropped columns"
        )
    return states


def _from_torch(tensor: Any) -> Array:
    """A copy as NumPy has it; bf16, fp32 or what `DecodeState` then refuses."""
    from gdn_kernels.interpreter.torch_arrays import to_numpy

    return np.array(to_numpy(tensor.cpu().contiguous()))


def _to_torch(array: Array) -> Any:
    from gdn_kernels.interpreter.torch_arrays import to_torch

    return to_torch(array.copy())
