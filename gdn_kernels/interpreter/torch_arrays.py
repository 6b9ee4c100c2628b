"""Torch tensors as NumPy arrays over the same memory and back, for the dtypes that NumPy itself lacks too."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gdn_kernels.interpreter import dtypes

# By torch dtype: the NumPy dtype, and the torch integer of the same width that both can be seen as.
_EXTENDED = {
    torch.bfloat16: (dtypes.bfloat16, torch.int16),
    torch.float8_e5m2: (dtypes.float8_e5m2, torch.uint8),
    torch.float8_e4m3fn: (dtypes.float8_e4m3fn, torch.uint8),
}
_TO_TORCH = {dtype: (torch_dtype, bits) for torch_dtype, (dtype, bits) in _EXTENDED.items()}


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor's own memory (CPU)."""
    tensor = tensor.detach()
    if tensor.dtype not in _EXTENDED:
        return tensor.numpy()
    dtype, bits = _EXTENDED[tensor.dtype]
    return tensor.view(bits).numpy().view(dtype)


def to_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor over the array's memory; float8_e4m3 ends at 240 and has no torch dtype, so it raises TypeError."""
    if array.dtype not in _TO_TORCH:
        return torch.from_numpy(array)
    torch_dtype, bits = _TO_TORCH[array.dtype]
    return torch.from_numpy(array.view(np.int16 if bits is torch.int16 else np.uint8)).view(torch_dtype)
