"""Stage 1, the input projections: qkv, z, a and b = hidden @ W.

Weights are the stationary operand, so channels come out on partitions, where everything downstream is plain
arithmetic, and a 128 x 128 tile costs 64 PE cycles instead of 128. Hidden index h = p * (H / 128) + r: partition p then
owns one contiguous run of every weight matrix's rows and of hidden.
"""

import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.layout import BANK, BANK_BYTES, CHUNK_BYTES, CHUNK_COLUMNS, bank_columns, itemsize, view
from gdn_kernels.kernels.queues import load, load_aside
from gdn_kernels.kernels.rings import ring


def weight_ring(dtype, chunks):
    return ring(chunks, (128, CHUNK_BYTES // itemsize(dtype)), dtype, "weights")


def hidden_columns(hidden, b0, B):
    """hidden[b0:b0+B] as columns [128, R, B], H = 128 * R: rows are loaded whole, then turned on PE, since a direct
    load would have runs of 2 * R bytes."""
    H = hidden.shape[2]
    R = H // 128
    rows = nl.ndarray((B, H), dtype=hidden.dtype, buffer=nl.sbuf)
    load_aside(rows, hidden.reshape((hidden.shape[0], H))[b0 : b0 + B, :])
    columns = nl.ndarray((128, R, B), dtype=hidden.dtype, buffer=nl.sbuf)
    padded = bank_columns(B)
    at_once = BANK_BYTES // (padded * itemsize(hidden.dtype))  # rows that share a PSUM bank
    for r0 in range(0, R, at_once):
        count = min(at_once, R - r0)
        turned = nl.ndarray((128, count, padded), dtype=hidden.dtype, buffer=nl.psum)
        for r in range(count):
            nisa.nc_transpose(dst=turned[:, r, 0:B], data=view(rows, B, r0 + r, [[R, 128]]))  # [B, 128] -> [128, B]
        nisa.tensor_copy(dst=columns[:, r0 : r0 + count, :], src=turned[:, :, 0:B])
    return columns


def project_keys(acc, kind, weight, c0, layout, columns, weights):
    """acc[:, s, kind, tile * B + b] = q or k of one group, [P, B] a key row s and tile, from weight columns c0 onwards.

    Lane (j, i) of key row s is column j*K + n*i + s of a tile."""
    n, lanes, P = layout.n, layout.lanes, layout.partitions()
    C, R, B = layout.G * n * P, columns.shape[1], columns.shape[2]  # n heads of K = P channels a tile
    r0 = 0
    while r0 < R:
        count = min(_rows_a_chunk(weights, C), R - r0)
        chunk = _load(weights, weight, r0, count, c0, C)
        for r in range(count):
            for tile in range(layout.G):
                for s in range(n):
                    nisa.nc_matmul(
                        dst=acc[:, s, kind, tile * B : (tile + 1) * B],
                        stationary=view(chunk, 128, r * C + tile * n * P + s, [[P, n], [n, lanes]]),  # [128, P]
                        moving=columns[:, r0 + r, :],
                        accumulate=r0 + r > 0,
                    )
        r0 = r0 + count


def project_heads(accs, weight, c0, heads, V, columns, weights, last):
    """Value heads (v or z) from weight columns c0 onwards, [V, B] each, into `head_banks`."""
    at_once = min(heads, CHUNK_COLUMNS // V)
    for first in range(0, heads, at_once):
        count = min(at_once, heads - first)
        ends = last and first + count == heads
        _project_some_heads(accs, first, weight, c0 + first * V, count, V, columns, weights, ends)


def _project_some_heads(accs, first, weight, c0, heads, V, columns, weights, last):
    """Value heads [first, first + heads) of `accs`.

    The last weights of a kernel come in ever smaller chunks, so that little is left to do after the last byte: of the
    0.9 us a whole chunk takes on PE, 0.2 remain (modelled, 8 heads)."""
    C, R, per_bank = heads * V, columns.shape[1], accs[0].shape[1]
    r0 = 0
    while r0 < R:
        count = min(_rows_a_chunk(weights, C), R - r0)
        if last:
            count = min(count, (R - r0 + 1) // 2)
        chunk = _load(weights, weight, r0, count, c0, C)
        for r in range(count):
            for h in range(heads):
                nisa.nc_matmul(
                    dst=accs[(first + h) // per_bank][:, (first + h) % per_bank, :],
                    stationary=chunk[:, r * C + h * V : r * C + (h + 1) * V],  # [128, V]
                    moving=columns[:, r0 + r, :],
                    accumulate=r0 + r > 0,
                )
        r0 = r0 + count


def head_banks(heads, V, B):
    """PSUM for `heads` projections of [V, B], as many to a bank as fit: a list of [V, per bank, B]; head h is
    column h % per bank of entry h // per bank."""
    per_bank = min(heads, BANK // B)
    banks = []
    for first in range(0, heads, per_bank):
        shape = (V, min(per_bank, heads - first), B)
        banks.append(nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum))
    return banks


def resident_weight(weight):
    """A whole small matrix [H, N] as [128, R * N], one run a partition."""
    tile = nl.ndarray((128, weight.shape[0] // 128 * weight.shape[1]), dtype=weight.dtype, buffer=nl.sbuf)
    load_aside(tile, weight.reshape(tile.shape))
    return tile


def project_scalars(acc, tile, Hv, h0, heads, columns):
    """acc[heads, B] = hidden @ W[:, h0:h0+heads] for a resident W_in_a or W_in_b."""
    for r in range(columns.shape[1]):
        nisa.nc_matmul(
            dst=acc,
            stationary=tile[:, r * Hv + h0 : r * Hv + h0 + heads],  # [128, heads]
            moving=columns[:, r, :],
            accumulate=r > 0,
        )


def _rows_a_chunk(weights, C):
    """How many rows r of C columns one buffer of the ring holds."""
    return max(1, weights.buffers[0].shape[1] // C)


def _load(weights, weight, r0, count, c0, C):
    """Rows [r0, r0 + count) and columns [c0, c0 + C) of a weight matrix into the next buffer of the ring."""
    H, N = weight.shape
    chunk = weights.next()
    load(
        chunk[:, 0 : count * C].reshape((128, count, C)),
        weight.reshape((128, H // 128, N))[:, r0 : r0 + count, c0 : c0 + C],
    )
    return chunk
