"""Torch tensors as NumPy arrays over the same memory and back; NumPy itself has no bfloat16."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gdn_kernels.interpreter.language import bfloat16


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor's own memory (CPU)."""
    if tensor.dtype is torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(bfloat16)
    return tensor.detach().numpy()


def to_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
