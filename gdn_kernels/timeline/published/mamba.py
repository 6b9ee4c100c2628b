"""The scan of a Mamba layer in three versions, as the tutorial "Fused Mamba" describes them.

For delta and u fp32 [1, channels, length], A fp32 [channels, states], B and C fp32 [1, states, length] each computes,
by channel c, the sum over states s of C[s, t] * h[s, t] with

    h[s, t] = exp(delta[t] * A[c, s]) * h[s, t - 1] + delta[t] * u[t] * B[s, t]

Channels lie on partitions, so B and C, the same for all of them, are copied to every partition by the Tensor engine;
what reads them from PSUM takes half as long.
"""

from typing import Any

from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl

P, COLUMNS = 128, 512  # channels of a tile; steps that fit a bank of PSUM, and a tile of version 3


def version_1(delta: Any, u: Any, A: Any, B: Any, C: Any) -> Any:
    """States outermost, so delta and u are loaded again for every state."""
    _, channels, length = delta.shape
    result, ones = _result(delta), _ones()
    totals = [_zeros(length) for _ in range(channels // P)]
    for s in range(A.shape[1]):
        b, c = _load(B[0, s : s + 1, :]), _load(C[0, s : s + 1, :])
        for tile, total in enumerate(totals):
            steps, inputs = _load(_rows(delta, tile)), _load(_rows(u, tile))
            decay = _decay(steps, _load(A[tile * P : (tile + 1) * P, s : s + 1]))
            _add_state(total, decay, _multiplied(steps, inputs), b, c, 0.0, ones)
    for tile, total in enumerate(totals):
        nisa.dma_copy(dst=_rows(result, tile), src=total)
    return result


def version_2(delta: Any, u: Any, A: Any, B: Any, C: Any) -> Any:
    """Channels outermost: delta and u are loaded once, and multiplied for every state as they were."""
    result, ones = _result(delta), _ones()
    for tile in range(delta.shape[1] // P):
        total = _zeros(delta.shape[2])
        steps, inputs = _load(_rows(delta, tile)), _load(_rows(u, tile))
        for s in range(A.shape[1]):
            decay = _decay(steps, _load(A[tile * P : (tile + 1) * P, s : s + 1]))
            b, c = _load(B[0, s : s + 1, :]), _load(C[0, s : s + 1, :])
            _add_state(total, decay, _multiplied(steps, inputs), b, c, 0.0, ones)
        nisa.dma_copy(dst=_rows(result, tile), src=total)
    return result


def version_2_shared(delta: Any, u: Any, A: Any, B: Any, C: Any) -> Any:
    """Version 2 with delta * u, which no state changes, taken out of the loop over states."""
    result, ones = _result(delta), _ones()
    for tile in range(delta.shape[1] // P):
        total = _zeros(delta.shape[2])
        steps = _load(_rows(delta, tile))
        product = _multiplied(steps, _load(_rows(u, tile)))
        for s in range(A.shape[1]):
            decay = _decay(steps, _load(A[tile * P : (tile + 1) * P, s : s + 1]))
            b, c = _load(B[0, s : s + 1, :]), _load(C[0, s : s + 1, :])
            _add_state(total, decay, product, b, c, 0.0, ones)
        nisa.dma_copy(dst=_rows(result, tile), src=total)
    return result


def version_3(delta: Any, u: Any, A: Any, B: Any, C: Any) -> Any:
    """Version 2 in tiles of 512 steps; a scan goes on from the last value of the one before."""
    result, ones = _result(delta), _ones()
    for tile in range(delta.shape[1] // P):
        total = _zeros(delta.shape[2])
        steps, inputs = _load(_rows(delta, tile)), _load(_rows(u, tile))
        for s in range(A.shape[1]):
            a, last = _load(A[tile * P : (tile + 1) * P, s : s + 1]), _zeros(1)
            for t in range(0, delta.shape[2], COLUMNS):
                now = slice(t, t + COLUMNS)
                product = _multiplied(steps[:, now], inputs[:, now])
                _add_tile(total[:, now], _decay(steps[:, now], a), product, B, C, s, now, last, ones)
        nisa.dma_copy(dst=_rows(result, tile), src=total)
    return result


def version_3_shared(delta: Any, u: Any, A: Any, B: Any, C: Any) -> Any:
    """Version 3 with delta * u taken out of the loop over states."""
    result, ones = _result(delta), _ones()
    for tile in range(delta.shape[1] // P):
        total = _zeros(delta.shape[2])
        steps = _load(_rows(delta, tile))
        product = _multiplied(steps, _load(_rows(u, tile)))
        for s in range(A.shape[1]):
            a, last = _load(A[tile * P : (tile + 1) * P, s : s + 1]), _zeros(1)
            for t in range(0, delta.shape[2], COLUMNS):
                now = slice(t, t + COLUMNS)
                _add_tile(total[:, now], _decay(steps[:, now], a), product[:, now], B, C, s, now, last, ones)
        nisa.dma_copy(dst=_rows(result, tile), src=total)
    return result


def _add_tile(total: Any, decay: Any, product: Any, B: Any, C: Any, s: int, now: slice, last: Any, ones: Any) -> None:
    b, c = _load(B[0, s : s + 1, now]), _load(C[0, s : s + 1, now])
    h = _add_state(total, decay, product, b, c, last, ones)
    nisa.tensor_copy(dst=last, src=h[:, COLUMNS - 1 : COLUMNS])


def _add_state(total: Any, decay: Any, product: Any, b: Any, c: Any, initial: Any, ones: Any) -> Any:
    """total += c * h, and h itself, for one state; b and c [1, length]."""
    h = _like(decay)
    inflow = _times_row(product, b, ones)
    nisa.tensor_tensor_scan(dst=h, data0=decay, data1=inflow, initial=initial, op0=nl.multiply, op1=nl.add)
    nisa.tensor_tensor(dst=total, data1=total, data2=_times_row(h, c, ones), op=nl.add)
    return h


def _times_row(tile: Any, row: Any, ones: Any) -> Any:
    """Every partition of `tile` times the same row, which comes by way of PSUM a bank at a time."""
    scaled = _like(tile)
    for first in range(0, tile.shape[1], COLUMNS):
        now = slice(first, min(first + COLUMNS, tile.shape[1]))
        copies = nl.ndarray((P, now.stop - first), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=copies, stationary=ones, moving=row[:, now])
        nisa.tensor_tensor(dst=scaled[:, now], data1=tile[:, now], data2=copies, op=nl.multiply)
    return scaled


def _decay(steps: Any, a: Any) -> Any:
    """exp(a * steps), a [128, 1]."""
    decay = _like(steps)
    nisa.activation(dst=decay, op=nl.exp, data=steps, scale=a)
    return decay


def _multiplied(left: Any, right: Any) -> Any:
    product = _like(left)
    nisa.tensor_tensor(dst=product, data1=left, data2=right, op=nl.multiply)
    return product


def _result(delta: Any) -> Any:
    return nl.ndarray(delta.shape, dtype=nl.float32, buffer=nl.shared_hbm)


def _rows(tensor: Any, tile: int) -> Any:
    return tensor[0, tile * P : (tile + 1) * P, :]


def _like(tile: Any) -> Any:
    return nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)


def _load(source: Any) -> Any:
    tile = nl.ndarray(source.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def _zeros(length: int) -> Any:
    return _filled(P, length, 0.0)


def _ones() -> Any:
    """[1, 128]: stationary, it copies the one row of what moves to all partitions."""
    return _filled(1, P, 1.0)


def _filled(rows: int, length: int, value: float) -> Any:
    tile = nl.ndarray((rows, length), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=value)
    return tile
