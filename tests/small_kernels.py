"""Pieces of small kernels, and running them: what the tests of the interpreter's rules are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gdn_kernels import interpreter
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl

Body = Callable[..., Any]


def tile(*shape: int, dtype: Any = nl.float32, buffer: Any = nl.sbuf, value: float | None = 1.0) -> Any:
    """A tile filled with `value`, or with nothing."""
    made = nl.ndarray(shape, dtype=dtype, buffer=buffer)
    if value is not None:
        nisa.memset(dst=made, value=value)
    return made


def psum(*shape: int, dtype: Any = nl.float32) -> Any:
    """An unwritten tile in PSUM."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def shared(*shape: int, dtype: Any = nl.float32) -> Any:
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)


def load(x: Any) -> Any:
    loaded = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=loaded, src=x)
    return loaded


def stored(source: Any) -> Any:
    """A tile's values as an output."""
    out = shared(*source.shape, dtype=source.dtype)
    nisa.dma_copy(dst=out, src=source)
    return out


def copied(source: Any) -> Any:
    """A tile's values in SBUF, read by an engine."""
    out = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out, src=source)
    return out


def run(body: Body, cores: int = 1, **arguments: Any) -> Any:
    """Launch a kernel and return what it returns."""
    result = interpreter.launch(body, arguments, cores)
    return result.outputs[0] if result.single else result.outputs


def run_body(body: Body, cores: int = 1, **options: Any) -> Any:
    """Launch a kernel without arguments that does `body()`, and return its `Result`."""

    def kernel() -> Any:
        body()
        out = shared(2, 4)
        half = out[nl.program_id() : nl.program_id() + 1, :] if cores == 2 else out
        nisa.dma_copy(dst=half, src=tile(half.shape[0], 4))
        return out

    return interpreter.launch(kernel, {}, cores, **options)


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
