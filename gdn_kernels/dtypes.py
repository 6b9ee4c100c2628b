"""Number formats: reading bfloat16 arrays, and rounding float arrays to a narrower format, once.

`ml_dtypes` takes up to 0.8 s to import, so only `bfloat16()` imports it, when it is first called.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Formats that NumPy itself casts to from float32 and float64 with a single rounding.
_NATIVE: dict[str, type[np.floating[Any]]] = {"fp32": np.float32, "fp16": np.float16}
# The others: significand bits with the hidden one, exponent of the smallest subnormal, largest finite value.
_NARROW: dict[str, tuple[int, int, float]] = {
    "bf16": (8, -133, (2 - 2.0**-7) * 2.0**127),
    "fp8_e4m3": (4, -9, 240.0),  # the form with infinities, as on Trainium; `float8_e4m3` in ml_dtypes
}
FORMATS: tuple[str, ...] = (*_NATIVE, *_NARROW)


def bfloat16() -> np.dtype[Any]:
    """The NumPy dtype of bfloat16."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def is_bfloat16(dtype: npt.DTypeLike) -> bool:
    """Whether `dtype` is bfloat16; imports nothing."""
    return np.dtype(dtype).name == "bfloat16"


def to_float(x: Any, dtype: npt.DTypeLike) -> Array:
    """`x` (bfloat16 or any real dtype, any shape) as `dtype`, np.float32 or np.float64; no needless copy."""
    x = np.asarray(x)
    if is_bfloat16(x.dtype):
        # A bfloat16 is the upper half of a float32; the shift is ten times as fast as ml_dtypes' cast.
        x = (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(dtype, copy=False)


def to_fp32(x: Any) -> Array:
    """`x` (bfloat16 or any real dtype, any shape) as float32."""
    return to_float(x, np.float32)


def round_to(x: Array, name: str) -> Array:
    """Round `x` to the format `name`, to nearest with ties to even, in one step; overflow gives an infinity.

    A float64 goes straight to the format: by way of float32 it would be rounded twice, and 1 + 2^-8 + 2^-40 would
    fall to 1 in bf16, not rise to 1 + 2^-7.

    Args:
        x: float32 or float64, any shape.
        name: one of FORMATS: "fp32", "fp16", "bf16", "fp8_e4m3".

    Returns:
        The rounded values in the dtype of `x`.

    Raises:
        ValueError: if `name` is not one of FORMATS, or `x` neither float32 nor float64.
    """
    x = np.asarray(x)
    if name not in FORMATS:
        raise ValueError(f"name must be one of {', '.join(FORMATS)}, got {name!r}")
    if x.dtype not in (np.float32, np.float64):
        raise ValueError(f"x must be float32 or float64, got {x.dtype}")
    with np.errstate(over="ignore"):
        if name in _NATIVE:
            return x.astype(_NATIVE[name]).astype(x.dtype)
        bits, lowest, largest = _NARROW[name]
        fraction, exponent = np.frexp(x)
        step = np.maximum(exponent - bits, lowest)  # neighbours of x in the format are 2^step apart
        rounded = np.ldexp(np.rint(np.ldexp(fraction, exponent - step)), step)
    return np.where(np.abs(rounded) > largest, np.copysign(np.inf, rounded), rounded).astype(x.dtype, copy=False)
