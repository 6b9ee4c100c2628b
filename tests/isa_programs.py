"""Running one or a few instructions on arrays, and values that instructions get wrong first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from gdn_kernels import interpreter
from gdn_kernels.interpreter import hardware, rules
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3), np.dtype(ml_dtypes.float8_e5m2)
FLOATS = (F32, BF16, F16, E4M3, E5M2)
INTS = tuple(np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32"))
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3e38, -3e38, 1e-7, 448.0, 239.9, 65504.0)

floats = st.sampled_from(FLOATS)
ints = st.sampled_from(INTS)
anything = st.sampled_from(FLOATS + INTS)
seeds = st.integers(0, 2**32 - 1)
partitions = st.sampled_from((1, 3, 31, 32, 33, 64, 100, 128))
sizes = st.sampled_from((1, 2, 5, 16, 33))
flags = st.booleans()


def values(rng: np.random.Generator, shape: Any, dtype: Any, special: bool = True) -> np.ndarray:
    """Random values of a dtype; one in eight of a float is special, integers cover their whole range."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
    if special:
        x = np.where(rng.random(shape) < 1 / 8, rng.choice(SPECIAL, shape), x)
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(dtype)


def to_sbuf(x: Any) -> Any:
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    return tile


def to_psum(tile: Any) -> Any:
    made = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.psum)
    nisa.tensor_copy(dst=made, src=tile)
    return made


def to_hbm(tile: Any) -> Any:
    if tile.buffer is nl.psum:
        source, tile = tile, nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=tile, src=source)
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def new(shape: Any, dtype: Any = F32, buffer: Any = nl.sbuf) -> Any:
    return nl.ndarray(tuple(shape), dtype=dtype, buffer=buffer)


def tile(*shape: int, dtype: Any = F32, buffer: Any = nl.sbuf, value: Any = 1.0) -> Any:
    """A tile full of a value."""
    made = nl.ndarray(shape, dtype=dtype, buffer=buffer)
    nisa.memset(dst=made, value=int(value) if made.dtype.kind in "iu" else value)
    return made


def launch(kernel: Callable[..., Any], target: hardware.Target = hardware.TRN2, **arguments: Any) -> Any:
    """Programs here are written in all of Python."""
    with rules.without("subset", "subset-unclear"):
        return interpreter.launch(kernel, arguments, target=target)


def run(program: Callable[..., Any], *inputs: np.ndarray, target: hardware.Target = hardware.TRN2) -> Any:
    """What `program` of the inputs as SBUF tiles returns, a tile or a tuple of tiles, as arrays."""

    def kernel(**arguments: Any) -> Any:
        results = program(*(to_sbuf(x) for x in arguments.values()))
        return tuple(map(to_hbm, results)) if isinstance(results, tuple) else to_hbm(results)

    arrays = {f"x{number}": np.ascontiguousarray(x) for number, x in enumerate(inputs)}
    result = launch(kernel, target, **arrays)
    return result.outputs[0] if result.single else result.outputs


def rounded(x: Any, dtype: Any) -> np.ndarray:
    """An fp32 result as it is stored: nearest even by ml_dtypes, integers saturate, NaN is 0 in them."""
    dtype, x = np.dtype(dtype), np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        if dtype.kind not in "iu":
            return x.astype(dtype)
        limits, wide = np.iinfo(dtype), np.nan_to_num(x.astype(np.float64), posinf=1e30, neginf=-1e30)
        return np.minimum(np.maximum(np.round(wide), limits.min), limits.max).astype(dtype)


def same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal in every bit, but for the payload of NaNs."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if found.dtype.kind in "iub":
        np.testing.assert_array_equal(found, expected)
        return
    with np.errstate(all="ignore"):
        one, two = found.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(one, two)
    there = ~np.isnan(one)
    np.testing.assert_array_equal(np.signbit(one)[there], np.signbit(two)[there])
