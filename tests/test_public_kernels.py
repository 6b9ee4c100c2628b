"""Kernels in the manner of public ones, and, on request, the public ones themselves.

The kernels below are this repository's own. They use the calls, views and idioms of the NKI tutorials and of NKI
Library's kernels for token generation, so that what those need keeps working. To run the real ones, unchanged, from
checkouts of their repositories (for NKI 0.3 or later):

    GDN_NEURON_SDK=../aws-neuron-sdk GDN_NKI_LIBRARY=../nki-library python -m pytest tests/test_public_kernels.py

Each variable adds its own tests, and without it there are none to skip.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gdn_kernels import interpreter

with interpreter.installed():
    import nki
    import nki.isa as nisa
    import nki.language as nl
    from nki.isa.constants import dge_mode
    from nki.language import NKIObject, affine_range

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
# Relative to the largest value: half a unit in the last place of the result, twice, where inputs and sums round too.
TOLERANCE = {F32: 3e-6, F16: 2e-3, BF16: 1.2e-2}

# A column of a tile is moved element by element, and small shapes make short runs: both are these kernels' way.
pytestmark = pytest.mark.filterwarnings("ignore::gdn_kernels.interpreter.NkiRuleWarning")


def normal(*shape: int, dtype: np.dtype = F32, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(dtype)


def close(found: Any, expected: np.ndarray, dtype: np.dtype) -> None:
    found = np.asarray(found)
    assert found.shape == expected.shape
    error = np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max()
    assert error <= TOLERANCE[dtype], f"relative error {error:.3g}"


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


# ---- in the manner of the tutorials ----


@nki.jit
def added(a, b):
    """Tiles of 128 x 512, each in its own buffers."""
    P, F = nl.tile_size.pmax, 512
    out = nl.ndarray(dtype=a.dtype, shape=a.shape, buffer=nl.shared_hbm)
    for row in affine_range(a.shape[0] // P):
        for column in nl.affine_range(a.shape[1] // F):
            rows, columns = slice(row * P, (row + 1) * P), slice(column * F, (column + 1) * F)
            left = nl.ndarray((P, F), dtype=a.dtype, buffer=nl.sbuf)
            right = nl.ndarray((P, F), dtype=b.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=left, src=a[rows, columns])
            nisa.dma_copy(dst=right, src=b[rows, columns])
            total = nl.ndarray((P, F), dtype=a.dtype, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=total, data1=left, data2=right, op=nl.add)
            nisa.dma_copy(dst=out[rows, columns], src=total)
    return out


@nki.jit
def multiplied(lhsT, rhs, K_TILES=2, N_TILES=2):
    """lhsT.T @ rhs in blocks: operands of a block stay in SBUF, sums over K blocks too, tiles in Python lists."""
    K, M = lhsT.shape
    _, N = rhs.shape
    TM, TK, TN = nl.tile_size.gemm_stationary_fmax, nl.tile_size.pmax, nl.tile_size.gemm_moving_fmax
    assert K % (K_TILES * TK) == 0 and N % (N_TILES * TN) == 0, f"blocks of {K_TILES=} and {N_TILES=}"
    out = nl.ndarray((M, N), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    for n in nl.affine_range(N // (N_TILES * TN)):
        sums = []
        for _ in nl.affine_range(M // TM):
            block = nl.ndarray((TM, N_TILES * TN), dtype=nl.float32, buffer=nl.sbuf)
            nisa.memset(dst=block, value=0.0)
            sums.append(block)
        for k in nl.sequential_range(K // (K_TILES * TK)):
            lefts, rights = [], []
            for part in nl.affine_range(K_TILES):
                start = (k * K_TILES + part) * TK
                left = nl.ndarray((TK, M), dtype=lhsT.dtype, buffer=nl.sbuf)
                right = nl.ndarray((TK, N_TILES * TN), dtype=rhs.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=left, src=lhsT[start : start + TK, 0:M])
                nisa.dma_copy(dst=right, src=rhs[start : start + TK, nl.ds(n * N_TILES * TN, N_TILES * TN)])
                lefts.append(left)
                rights.append(right)
            for m in nl.affine_range(M // TM):
                for column in nl.affine_range(N_TILES):
                    acc = nl.ndarray((TM, TN), dtype=nl.float32, buffer=nl.psum)
                    columns = slice(column * TN, (column + 1) * TN)
                    for part in nl.affine_range(K_TILES):
                        nisa.nc_matmul(acc, lefts[part][0:TK, m * TM : (m + 1) * TM], rights[part][0:TK, columns])
                    held = sums[m].reshape((TM, N_TILES, TN))[:, column]
                    nisa.tensor_tensor(dst=held, data1=held, data2=acc, op=nl.add)
        for m in nl.affine_range(M // TM):
            rounded = nl.ndarray(sums[m].shape, dtype=out.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=rounded, src=sums[m])
            nisa.dma_copy(dst=out[m * TM : (m + 1) * TM, nl.ds(n * N_TILES * TN, N_TILES * TN)], src=rounded)
    return out


@nki.jit
def rows_transposed(x, sizes):
    """Each row is a matrix of `sizes`; it is transposed column by column."""
    rows, columns = sizes
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    turned = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    for row in nl.affine_range(rows):
        for column in nl.affine_range(columns):
            to, at = nl.ds(column * rows + row, 1), nl.ds(row * columns + column, 1)
            nisa.tensor_copy(dst=turned[:, to], src=tile[:, at])
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=turned)
    return out


@nki.jit
def pooled(x, size):
    """The mean of every size x size window, as a sum over the last two of a view's five dimensions."""
    C, H, W = x.shape
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    windows = tile.ap([[H * W, C], [size * W, H // size], [size, W // size], [W, size], [1, size]])
    total = nl.sum(windows, axis=[3, 4])
    nisa.tensor_scalar(dst=total, data=total, op0=nl.multiply, operand0=1.0 / (size * size))
    out = nl.ndarray((C, H // size, W // size), dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=total)
    return out


@nki.jit
def selective_scan(delta, u, A, B, C, piece=512):
    """h[t] = exp(delta A) h[t-1] + delta u B; y = sum over states of h C. The scan goes on from piece to piece."""
    channels, length = delta.shape
    states = A.shape[1]
    out = nl.ndarray(delta.shape, dtype=delta.dtype, buffer=nl.shared_hbm)
    rates = nl.ndarray((channels, states), dtype=A.dtype)
    nisa.dma_copy(dst=rates, src=A)
    carried = nl.zeros((channels, states), dtype=nl.float32)
    for first in nl.static_range(0, length, piece):
        here = nl.ds(first, piece)
        steps, inputs = nl.load(delta[:, here]), nl.load(u[:, here])
        total = nl.zeros((channels, piece), dtype=nl.float32)
        driven = nl.ndarray(steps.shape, dtype=nl.float32)
        nisa.tensor_tensor(driven, steps, inputs, nl.multiply)
        for state in nl.static_range(states):
            decay, h = nl.ndarray(steps.shape, dtype=nl.float32), nl.ndarray(steps.shape, dtype=nl.float32)
            nisa.activation(dst=decay, op=nl.exp, data=steps, scale=rates[:, state])
            entering = nl.ndarray(steps.shape, dtype=nl.float32)
            row = nl.broadcast_to(nl.load(B[state : state + 1, here]), (channels, piece))
            nisa.tensor_tensor(dst=entering, data1=driven, data2=row, op=nl.multiply)
            nisa.tensor_tensor_scan(
                dst=h, data0=decay, data1=entering, initial=carried[:, state], op0=nl.multiply, op1=nl.add
            )
            nisa.tensor_copy(dst=carried[:, state], src=h[:, piece - 1])
            row = nl.broadcast_to(nl.load(C[state : state + 1, here]), (channels, piece))
            nisa.tensor_tensor(dst=h, data1=h, data2=row, op=nl.multiply)
            nisa.tensor_tensor(dst=total, data1=total, data2=h, op=nl.add)
        nl.store(out[:, here], value=total)
    return out


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_tiles_are_added(dtype: np.dtype) -> None:
    a, b = normal(256, 1024, dtype=dtype), normal(256, 1024, dtype=dtype, seed=1)
    assert np.array_equal(added(a, b), a + b)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(256, 128, 1024), (512, 256, 1024)])
def test_blocks_are_multiplied(shape: tuple[int, int, int], dtype: np.dtype) -> None:
    K, M, N = shape
    lhsT, rhs = normal(K, M, dtype=dtype), normal(K, N, dtype=dtype)
    close(multiplied(lhsT, rhs), wide(lhsT).T @ wide(rhs), dtype)


@pytest.mark.parametrize("dtype", [np.int8, np.float32])
def test_rows_are_transposed(dtype: Any) -> None:
    x = np.arange(5 * 12, dtype=dtype).reshape(5, 12)
    expected = x.reshape(5, 3, 4).transpose(0, 2, 1).reshape(5, 12)
    assert np.array_equal(rows_transposed(x, (3, 4)), expected)


@pytest.mark.parametrize(("shape", "size"), [((2, 6, 6), 2), ((128, 12, 16), 4)])
def test_windows_are_averaged(shape: tuple[int, int, int], size: int) -> None:
    C, H, W = shape
    x = np.arange(C * H * W, dtype=np.float32).reshape(shape)
    expected = wide(x).reshape(C, H // size, size, W // size, size).mean((2, 4))
    close(pooled(x, size), expected, F32)


def test_a_scan_goes_on_from_piece_to_piece() -> None:
    channels, states, length = 128, 3, 96
    rng = np.random.default_rng(0)
    delta = rng.uniform(0.01, 0.2, (channels, length)).astype(np.float32)
    A = -rng.uniform(0.5, 2, (channels, states)).astype(np.float32)
    u, B, C = normal(channels, length), normal(states, length), normal(states, length, seed=1)
    h, expected = np.zeros((channels, states)), np.zeros((channels, length))
    for t in range(length):
        h = np.exp(wide(delta)[:, t : t + 1] * A) * h + (wide(delta) * u)[:, t : t + 1] * B[:, t]
        expected[:, t] = h @ C[:, t]
    whole, pieces = selective_scan(delta, u, A, B, C, piece=96), selective_scan(delta, u, A, B, C, piece=32)
    assert np.array_equal(whole, pieces)
    close(pieces, expected, F32)


# ---- in the manner of NKI Library ----


class Norm(Enum):
    NONE = 0
    RMS = 1


@dataclass
class Shape(NKIObject):
    """H on partitions: h = p * H1 + r."""

    rows: int
    H1: int

    @staticmethod
    def of(x):
        rows = 1
        for size in x.shape[:-1]:
            rows *= size
        return Shape(rows, x.shape[-1] // nl.tile_size.pmax)


def everywhere(dst, src):
    """Row 0 of src in every partition of dst, a quadrant at a time."""
    for first in range(0, dst.shape[0], 32):
        nisa.nc_stream_shuffle(dst=dst[first : min(first + 32, dst.shape[0])], src=src[0:1], shuffle_mask=[0] * 32)


def normalised(x, weight, eps):
    """x [..., H] as [128, rows, H1] over its root mean square, times weight [1, H]; sums by a matrix of ones."""
    P, shape = nl.tile_size.pmax, Shape.of(x)
    rows, H1 = shape.rows, shape.H1
    tile = nl.ndarray((P, rows, H1), dtype=x.dtype, buffer=nl.sbuf)
    gain = nl.ndarray((P, H1), dtype=weight.dtype, buffer=nl.sbuf)
    flat = x.reshape((rows, P * H1))
    nisa.dma_copy(dst=tile, src=flat.ap([[H1, P], [P * H1, rows], [1, H1]]), dge_mode=dge_mode.none)
    nisa.dma_copy(dst=gain, src=weight.reshape((P, H1)))
    squares = nl.ndarray((P, rows, H1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(squares[...], op=nl.square, data=tile)
    sums = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(sums, nl.add, squares, axis=2)
    ones = nl.ndarray((P, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    total = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(stationary=ones, moving=sums, dst=total)
    floor = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(floor, value=eps)
    scale = nl.ndarray((P, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(scale, op=nl.rsqrt, data=total, scale=1.0 / (P * H1), bias=floor)
    by_row = gain.expand_dim(1).broadcast(1, rows)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=by_row, op=nl.multiply)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=scale.expand_dim(2).broadcast(2, H1), op=nl.multiply)
    return tile


@nki.jit
def rms_norm(x, weight, output, eps=1e-6):
    """Writes an argument and returns it."""
    nisa.dma_copy(dst=output, src=normalised(x, weight, eps))
    return output


@nki.jit
def projected(x, W, weight=None, norm=Norm.NONE, eps=1e-6):
    """norm(x) @ W. Few rows leave columns of the Tensor engine idle, so four parts of H run in its column tiles.
    Two cores take half of H each, and exchange and add their sums."""
    P, shape = nl.tile_size.pmax, Shape.of(x)
    rows, H1, columns = shape.rows, shape.H1, W.shape[1]
    core, cores = nl.program_id(0), nl.num_programs(0)
    if norm == Norm.RMS:
        tile = normalised(x, weight, eps)
    else:
        tile = nl.ndarray((P, rows, H1), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x.reshape((rows, P * H1)).ap([[H1, P], [P * H1, rows], [1, H1]]))
    weights = nl.ndarray((P, H1, columns), dtype=W.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=weights, src=W.reshape((P, H1, columns)))
    parts, mine = 4, H1 // cores
    acc = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.psum)
    for number in range(mine):
        part, r = 32 * (number % parts), core * mine + number
        nisa.nc_matmul(
            acc[part : part + rows, 0:columns],
            tile[:, :, r],
            weights[:, r],
            tile_position=(0, part),
            tile_size=(P, 32),
        )
    total = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=total, value=0)  # an int for a float tile
    for part in range(min(parts, mine)):
        nisa.tensor_tensor(total, total, acc[32 * part : 32 * part + rows], nl.add)
    if cores > 1:
        other = nl.ndarray(total.shape, dtype=total.dtype, buffer=nl.sbuf)
        nisa.sendrecv(src=total, dst=other, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
        nisa.tensor_tensor(dst=total, data1=total, data2=other, op=nl.add)
    rounded = nl.ndarray(total.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rounded, src=total, engine=nisa.scalar_engine)
    out = nl.ndarray((*x.shape[:-1], columns), dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out.reshape((rows, columns)), rounded)
    return out


@nki.jit
def combined(heads, W, bias=None):
    """heads [D, rows, N] times W [N * D, H], plus bias [1, H]: as many heads side by side as fill the partitions, and
    each core its half of the columns."""
    D, rows, N = heads.shape
    H = W.shape[1]
    together = min(nl.tile_size.pmax // D, N)
    core, cores = nl.program_id(0), nl.num_programs(0)
    first, width = core * (H // cores), H // cores
    out = nl.ndarray((rows, H), dtype=heads.dtype, buffer=nl.shared_hbm)
    packed = nl.ndarray((together * D, rows, N // together), dtype=heads.dtype, buffer=nl.sbuf)
    for place in range(together):
        view = heads.ap([[rows * N, D], [N, rows], [together, N // together]], offset=place)
        nisa.dma_copy(dst=packed[place * D : (place + 1) * D], src=view)
    acc = nl.ndarray((rows, width), dtype=nl.float32, buffer=nl.psum)
    step = together * D
    row = N // together * rows
    for group in range(N // together):
        weights = nl.ndarray((step, width), dtype=W.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=weights, src=W[group * step : (group + 1) * step, first : first + width])
        # The view of the next group is made before it is known whether there is one.
        following = packed.ap([[row, step], [N // together, rows]], offset=group + 1)
        stationary = packed.ap([[row, step], [N // together, rows]], offset=group)
        assert following.shape == stationary.shape
        nisa.nc_matmul(dst=acc, stationary=stationary, moving=weights)
    result = nl.ndarray((rows, width), dtype=heads.dtype, buffer=nl.sbuf)
    if bias is not None:
        line = nl.ndarray((1, width), dtype=bias.dtype, buffer=nl.sbuf)
        shared = nl.ndarray((rows, width), dtype=bias.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=line, src=bias[:, first : first + width])
        everywhere(shared, line)
        nisa.tensor_tensor(dst=result, data1=acc, data2=shared, op=nl.add)
    else:
        nisa.tensor_copy(dst=result, src=acc, engine=nisa.engine.scalar if rows % 2 == 0 else nisa.engine.vector)
    nisa.dma_copy(dst=out[:, first : first + width], src=result)
    return out


@nki.jit
def running_sum(x, piece=64):
    """Along the last axis: data0 * previous + data1 with data0 of ones, carried from piece to piece."""
    rows, length = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for top in nl.sequential_range(0, rows, nl.tile_size.pmax):
        count = min(nl.tile_size.pmax, rows - top)
        carry = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
        ones = nl.ndarray((count, piece), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(carry, value=0.0)
        nisa.memset(ones, value=1.0)
        for left in nl.sequential_range(0, length, piece):
            width = min(piece, length - left)
            tile = nl.ndarray((count, width), dtype=x.dtype, buffer=nl.sbuf)
            sums = nl.ndarray((count, width), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(tile, x[nl.ds(top, count), nl.ds(left, width)])
            nisa.tensor_tensor_scan(sums, ones[:, 0:width], tile, initial=carry, op0=nl.multiply, op1=nl.add)
            nisa.tensor_copy(dst=carry, src=sums[:, width - 1])
            rounded = nl.ndarray((count, width), dtype=x.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=rounded, src=sums)
            nisa.dma_copy(out[nl.ds(top, count), nl.ds(left, width)], rounded)
    return out


class Stack(NKIObject):
    """Addresses in SBUF, handed out upwards; `free` takes the last tiles back, so that their bytes are used again."""

    def __init__(self, limit):
        self.limit = limit
        self.top = 0

    def tile(self, shape, dtype, size):
        row = size
        for length in shape[1:]:
            row = row * length
        start, self.top = self.top, self.top + row
        assert self.top <= self.limit, f"{self.top} of {self.limit} bytes"
        return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf, address=(0, start))

    def free(self, to):
        self.top = to


@nki.jit
def convolved(x, filters, bias=None, activation=None, padding=(0, 0)):
    """x [B, C, L] with filters [K, C, F], one matmul a tap and chunk of channels, everything at chosen addresses."""
    B, C, L = x.shape
    K, _, F = filters.shape
    P, size = nl.tile_size.pmax, 2 if x.dtype == nl.bfloat16 else 4
    chunks = (C + P - 1) // P
    length = L + padding[0] + padding[1]
    steps = length - K + 1
    stack = Stack(nl.tile_size.total_available_sbuf_size)
    out = nl.ndarray((B, F, steps), dtype=x.dtype, buffer=nl.shared_hbm)
    taps = []
    for chunk in range(chunks):
        count = min(P, C - chunk * P)
        tile = stack.tile((count, K, F), x.dtype, size)
        nisa.dma_copy(dst=tile, src=filters.ap([[F, count], [C * F, K], [1, F]], offset=chunk * P * F))
        taps.append(tile)
    shift = None
    if bias is not None:
        shift = stack.tile((F, 1), nl.float32, 4)
        nisa.dma_copy(dst=shift[:, 0], src=bias.ap([[1, F]]))
    base = stack.top
    for b in range(B):
        stack.free(base)
        acc = nl.ndarray((F, steps), dtype=nl.float32, buffer=nl.psum, address=(0, b % 8 * 2048))
        for chunk in range(chunks):
            count = min(P, C - chunk * P)
            window = stack.tile((count, length), x.dtype, size)
            if padding != (0, 0):
                nisa.memset(dst=window, value=0.0)
            nisa.dma_copy(dst=window[:, nl.ds(padding[0], L)], src=x[b, chunk * P : chunk * P + count])
            for tap in range(K):
                nisa.nc_matmul(dst=acc, stationary=taps[chunk][:, tap], moving=window[:, nl.ds(tap, steps)])
        result = stack.tile((F, steps), x.dtype, size)
        if activation is not None:
            nisa.activation(dst=result, op=activation, data=acc, bias=shift, scale=1.0)
        elif bias is not None:
            nisa.tensor_scalar(dst=result, data=acc, op0=nl.add, operand0=shift)
        else:
            nisa.tensor_copy(dst=result, src=acc, engine=nisa.vector_engine)
        nisa.dma_copy(dst=out[b], src=result)
    return out


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-6) * wide(weight)


def on(kernel: Any, cores: int) -> Callable[..., Any]:
    return kernel[cores] if cores > 1 else kernel


@pytest.mark.parametrize(("H", "batch", "dtype"), [(256, 2, F32), (512, 3, BF16), (1024, 5, F16)])
def test_a_norm_is_written_into_an_argument(H: int, batch: int, dtype: np.dtype) -> None:
    x, weight = normal(batch, 1, H, dtype=dtype), normal(1, H, dtype=dtype)
    output = np.zeros((128, batch, H // 128), dtype)
    returned = rms_norm(x, weight, output)
    assert np.shares_memory(returned, output)
    close(output, normed(x, weight).reshape(batch, 128, H // 128).transpose(1, 0, 2), dtype)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("norm", [Norm.NONE, Norm.RMS])
@pytest.mark.parametrize(
    ("H", "columns", "batch", "dtype"), [(256, 64, 2, F32), (1024, 96, 4, BF16), (768, 512, 32, BF16)]
)
def test_a_projection_in_column_tiles(
    H: int, columns: int, batch: int, dtype: np.dtype, norm: Norm, cores: int
) -> None:
    x, weight = normal(batch, 1, H, dtype=dtype), normal(1, H, dtype=dtype)
    W = normal(H, columns, dtype=dtype, scale=H**-0.5)
    expected = (normed(x, weight) if norm == Norm.RMS else wide(x)) @ wide(W)
    close(on(projected, cores)(x, W, weight, norm=norm), expected, dtype)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("D", "N", "rows", "H", "dtype"), [(64, 4, 2, 512, F32), (128, 2, 5, 256, BF16), (32, 8, 40, 384, BF16)]
)
def test_heads_are_combined(D: int, N: int, rows: int, H: int, dtype: np.dtype, bias: bool, cores: int) -> None:
    heads, W = normal(D, rows, N, dtype=dtype), normal(N * D, H, dtype=dtype, scale=(N * D) ** -0.5)
    shift = normal(1, H, dtype=dtype)
    expected = wide(heads).transpose(1, 2, 0).reshape(rows, N * D) @ wide(W) + (wide(shift) if bias else 0)
    close(on(combined, cores)(heads, W, shift if bias else None), expected, dtype)


@pytest.mark.parametrize(("shape", "dtype"), [((6, 40), F32), ((200, 150), F32), ((64, 128), BF16)])
def test_sums_run_on_from_piece_to_piece(shape: tuple[int, int], dtype: np.dtype) -> None:
    x = normal(*shape, dtype=dtype)
    close(running_sum(x), np.cumsum(wide(x), -1), dtype)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(
    ("B", "C", "F", "L", "K", "padding"), [(1, 16, 32, 20, 3, (0, 0)), (9, 160, 100, 40, 4, (3, 0))]
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_convolution_at_chosen_addresses(
    B: int, C: int, F: int, L: int, K: int, padding: tuple[int, int], dtype: np.dtype, activation: str | None
) -> None:
    x, filters = normal(B, C, L, dtype=dtype), normal(K, C, F, dtype=dtype, scale=(K * C) ** -0.5)
    bias = normal(F)
    padded = np.pad(wide(x), ((0, 0), (0, 0), padding))
    steps = padded.shape[-1] - K + 1
    expected = np.zeros((B, F, steps)) + bias[:, None]
    for tap in range(K):
        expected += np.einsum("bcl,co->bol", padded[:, :, tap : tap + steps], wide(filters[tap]))
    if activation == "silu":
        expected /= 1 + np.exp(-expected)
    function = getattr(nl, activation) if activation else None
    close(convolved(x, filters, bias, activation=function, padding=padding), expected, dtype)


# ---- the public kernels themselves ----


@contextmanager
def environment_kept() -> Iterator[None]:
    """Some of these files set environment variables when they are imported."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


SDK, LIBRARY = os.environ.get("GDN_NEURON_SDK"), os.environ.get("GDN_NKI_LIBRARY")

if SDK:

    def tutorial(name: str) -> ModuleType:
        """The module of nki/examples/`name` (folder/file without .py)."""
        path = Path(SDK) / "nki" / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        with environment_kept(), interpreter.installed():
            spec.loader.exec_module(module)
        return module

    @pytest.mark.parametrize("dtype", [F32, BF16])
    def test_tutorial_tensor_addition(dtype: np.dtype) -> None:
        a, b = normal(256, 1024, dtype=dtype), normal(256, 1024, dtype=dtype, seed=1)
        module = tutorial("tensor_addition/tensor_addition_nki_kernels")
        assert np.array_equal(module.nki_tensor_add(a, b), a + b)

    @pytest.mark.parametrize("dtype", [F32, BF16])
    @pytest.mark.parametrize(
        ("name", "K", "M", "N", "options"),
        [
            ("nki_matmul_basic_", 128, 64, 512, {}),
            ("nki_matmul_tiled_", 256, 128, 512, {}),
            ("nki_matmul_hoist_load_", 256, 256, 512, {}),
            ("nki_matmul_block_free_dimension_", 256, 256, 1024, {}),
            (
                "nki_matmul_fully_optimized_",
                512,
                256,
                1024,
                {"TILES_IN_BLOCK_M": 2, "TILES_IN_BLOCK_N": 1, "TILES_IN_BLOCK_K": 2},
            ),
        ],
    )
    def test_tutorial_matrix_multiplication(
        name: str, K: int, M: int, N: int, options: dict[str, int], dtype: np.dtype
    ) -> None:
        lhsT, rhs = normal(K, M, dtype=dtype), normal(K, N, dtype=dtype)
        module = tutorial("matrix_multiplication/matrix_multiplication_nki_kernels")
        close(getattr(module, name)(lhsT, rhs, **options), wide(lhsT).T @ wide(rhs), dtype)

    @pytest.mark.parametrize(("P", "X", "Y", "dtype"), [(5, 3, 4, np.int8), (128, 40, 30, np.float32)])
    def test_tutorial_transpose2d(P: int, X: int, Y: int, dtype: Any) -> None:
        x = (np.arange(P * X * Y) % 100).astype(dtype).reshape(P, X * Y)
        found = tutorial("transpose2d/transpose2d_nki_kernels").tensor_transpose2D_kernel_(x, (X, Y))
        assert np.array_equal(found, x.reshape(P, X, Y).transpose(0, 2, 1).reshape(P, X * Y))

    @pytest.mark.parametrize(("shape", "size", "dtype"), [((2, 6, 6), 2, F16), ((128, 48, 48), 4, F32)])
    def test_tutorial_average_pool2d(shape: tuple[int, int, int], size: int, dtype: np.dtype) -> None:
        C, H, W = shape
        x = normal(*shape, dtype=dtype)
        expected = wide(x).reshape(C, H // size, size, W // size, size).mean((2, 4))
        close(tutorial("average_pool2d/average_pool2d_nki_kernels").tensor_avgpool_kernel(x, size), expected, dtype)

    @pytest.mark.parametrize(("channels", "length", "states"), [(128, 512, 2), (256, 512, 16)])
    def test_tutorial_fused_mamba(channels: int, length: int, states: int) -> None:
        rng = np.random.default_rng(0)
        delta = rng.uniform(0.01, 0.2, (1, channels, length)).astype(np.float32)
        A = -rng.uniform(0.5, 2, (channels, states)).astype(np.float32)
        u, B, C = normal(1, channels, length), normal(1, states, length), normal(1, states, length, seed=1)
        h, expected = np.zeros((channels, states)), np.zeros((1, channels, length))
        for t in range(length):
            h = np.exp(wide(delta)[0, :, t : t + 1] * A) * h + (wide(delta) * u)[0, :, t : t + 1] * B[0, :, t]
            expected[0, :, t] = h @ C[0, :, t]
        module = tutorial("fused_mamba/mamba_nki_kernels")
        first = module.mamba_v1(delta, u, A, B, C)
        close(first, expected, F32)
        assert np.array_equal(module.mamba_v2(delta, u, A, B, C), first)
        assert np.array_equal(module.mamba_v3(delta, u, A, B, C), first)

    def test_tutorial_simulate() -> None:
        tutorial("simulate/nki_simulate_example")  # compares by itself when imported


if LIBRARY:

    def library(name: str) -> ModuleType:
        """The module nkilib_src.nkilib.`name`."""
        root = str(Path(LIBRARY) / "src")
        if root not in sys.path:
            sys.path.insert(0, root)
        with environment_kept(), interpreter.installed():
            os.environ["NKILIB_LOG_LEVEL"] = "OFF"
            return importlib.import_module(f"nkilib_src.nkilib.{name}")

    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [((3, 2, 40), F32), ((1, 256), F32), ((128, 2048), F32), ((64, 4, 1024), BF16), ((200, 5000), F32)],
    )
    def test_library_cumsum(shape: tuple[int, ...], dtype: np.dtype) -> None:
        x = normal(*shape, dtype=dtype)
        close(library("core.cumsum.cumsum").cumsum(x), np.cumsum(wide(x), -1), dtype)

    @pytest.mark.parametrize(
        ("H", "B", "S", "dtype", "cores", "by_row"),
        [
            (256, 2, 1, F32, 1, False),
            (512, 3, 1, BF16, 1, False),
            (2304, 2, 1, F32, 1, False),
            (4096, 4, 2, BF16, 1, False),
            (512, 8, 1, F16, 1, True),
            (512, 4, 1, BF16, 2, False),
            (4096, 2, 1, F32, 2, False),
        ],
    )
    def test_library_rmsnorm_tkg(H: int, B: int, S: int, dtype: np.dtype, cores: int, by_row: bool) -> None:
        kernel = nki.jit(library("core.subkernels.rmsnorm_tkg").rmsnorm_tkg)
        x, weight = normal(B, S, H, dtype=dtype), 1 + normal(1, H, scale=0.1)
        weight = weight.astype(dtype)
        output = np.zeros((128, B * S, H // 128), dtype)
        on(kernel, cores)(x, weight, output, hidden_dim_tp=by_row)
        rows = normed(x, weight).reshape(B * S, H)
        if by_row:
            expected = rows.reshape(B * S, H // 128, 128).transpose(2, 0, 1)
        else:  # each core has its half of H as [128, H / 128 / cores]
            halves = rows.reshape(B * S, cores, 128, H // 128 // cores).transpose(2, 0, 1, 3)
            expected = halves.reshape(128, B * S, H // 128)
        close(output, expected, dtype)

    @pytest.mark.parametrize(
        ("H", "columns", "B", "dtype", "normalise", "cores"),
        [
            (512, 64, 2, F32, True, 1),
            (512, 64, 2, BF16, False, 1),
            (512, 640, 40, BF16, True, 1),
            (512, 600, 100, BF16, True, 1),
            (2048, 1536, 4, BF16, True, 1),
            (1024, 256, 4, BF16, True, 2),
            (2048, 1024, 8, BF16, True, 2),
        ],
    )
    def test_library_qkv_tkg(H: int, columns: int, B: int, dtype: np.dtype, normalise: bool, cores: int) -> None:
        types = library("core.utils.common_types")
        kernel = nki.jit(library("core.qkv.qkv_tkg").qkv_tkg)
        x, W = normal(B, 1, H, dtype=dtype), normal(H, columns, dtype=dtype, scale=H**-0.5)
        weight = (1 + normal(1, H, scale=0.1)).astype(dtype)
        found = on(kernel, cores)(
            hidden=x,
            qkv_w=W,
            norm_w=weight if normalise else None,
            norm_type=types.NormType.RMS_NORM if normalise else types.NormType.NO_NORM,
            output_layout=types.QKVOutputLayout.BSD,
        )
        close(found, (normed(x, weight) if normalise else wide(x)) @ wide(W), dtype)

    @pytest.mark.parametrize(
        ("D", "B", "N", "S", "H", "dtype", "bias", "transposed", "cores"),
        [
            (64, 2, 2, 1, 512, F32, True, False, 1),
            (128, 2, 4, 1, 1024, BF16, False, False, 1),
            (128, 2, 2, 1, 256, BF16, True, True, 1),
            (64, 1, 4, 4, 512, BF16, True, True, 1),
            (32, 2, 8, 1, 384, F32, True, True, 1),
            (128, 4, 8, 1, 2048, BF16, True, False, 1),
            (128, 2, 4, 1, 1024, BF16, True, False, 2),
            (128, 2, 4, 1, 1024, BF16, True, True, 2),
        ],
    )
    def test_library_output_projection_tkg(
        D: int, B: int, N: int, S: int, H: int, dtype: np.dtype, bias: bool, transposed: bool, cores: int
    ) -> None:
        kernel = library("core.output_projection.output_projection_tkg").output_projection_tkg
        heads, W = normal(D, B, N, S, dtype=dtype), normal(N * D, H, dtype=dtype, scale=(N * D) ** -0.5)
        shift = normal(1, H, dtype=dtype)
        found = on(kernel, cores)(attention=heads, weight=W, bias=shift if bias else None, TRANSPOSE_OUT=transposed)
        expected = wide(heads).transpose(1, 3, 2, 0).reshape(B * S, N * D) @ wide(W) + (wide(shift) if bias else 0)
        if transposed:  # each core has its half of H as [128, H / 128 / cores]
            expected = expected.T.reshape(cores, 128, H // 128 // cores, B * S).transpose(1, 0, 2, 3)
        close(np.asarray(found).reshape(expected.shape), expected, dtype)

    @pytest.mark.parametrize(
        ("B", "C", "F", "L", "K", "stride", "padding", "dilation", "dtype", "silu", "cores"),
        [
            (1, 16, 32, 20, 3, 1, (0, 0), 1, F32, False, 1),
            (2, 64, 128, 40, 5, 2, (2, 2), 2, F32, True, 1),
            (2, 64, 128, 100, 4, 1, (3, 0), 1, BF16, False, 1),
            (1, 160, 200, 600, 3, 1, (1, 1), 1, BF16, True, 1),
            (1, 64, 256, 64, 3, 1, (1, 1), 1, F32, False, 2),
        ],
    )
    def test_library_conv1d(
        B: int,
        C: int,
        F: int,
        L: int,
        K: int,
        stride: int,
        padding: tuple[int, int],
        dilation: int,
        dtype: np.dtype,
        silu: bool,
        cores: int,
    ) -> None:
        x, filters = normal(B, C, L, dtype=dtype), normal(K, C, F, dtype=dtype, scale=(K * C) ** -0.5)
        bias = normal(F, dtype=dtype)
        found = on(library("experimental.conv.conv1d").conv1d, cores)(
            x,
            filters,
            bias=bias,
            stride=stride,
            padding=padding,
            dilation=dilation,
            activation_fn=library("core.utils.common_types").ActFnType.SiLU if silu else None,
            lnc_shard=cores > 1,
        )
        padded = np.pad(wide(x), ((0, 0), (0, 0), padding))
        steps = (padded.shape[-1] - dilation * (K - 1) - 1) // stride + 1
        expected = np.zeros((B, F, steps)) + wide(bias)[:, None]
        for tap in range(K):
            end = tap * dilation + stride * (steps - 1) + 1
            expected += np.einsum("bcl,co->bol", padded[:, :, tap * dilation : end : stride], wide(filters[tap]))
        if silu:
            expected /= 1 + np.exp(-expected)
        close(found, expected, dtype)
