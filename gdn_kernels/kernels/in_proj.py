"""Stage 1, the input projections: qkv, z, a and b = hidden @ W.

Weights are the stationary operand, so channels come out on partitions, where everything downstream is plain
arithmetic, and a 128 x 128 tile costs 64 PE cycles instead of 128. Hidden index h = p * (H / 128) + r: partition p then
owns one contiguous run of every weight matrix's rows and of hidden.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.layout import BANK, BANK_BYTES, itemsize, view

CHUNK_BYTES = 8192  # of one weight transfer, a partition: 1 MiB in all
SLOTS = 8  # weight chunks in flight: 64 KiB a partition


@dataclass
class WeightRing(nl.NKIObject):
    """Buffers [128, 8 KiB] that weight chunks stream through, one after the other. `used`: chunks handed out so far."""

    buffers: list
    used: int

    def next(self):
        buffer = self.buffers[self.used % SLOTS]
        self.used = self.used + 1
        return buffer


def weight_ring(dtype):
    buffers = []
    for slot in range(SLOTS):
        shape = (128, CHUNK_BYTES // itemsize(dtype))
        buffers.append(nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf, name=f"weights{slot}"))
    return WeightRing(buffers, 0)


def hidden_columns(hidden, b0, B):
    """hidden[b0:b0+B] as columns [128, R, B], H = 128 * R: rows are loaded whole, then turned on PE, since a direct
    load would have runs of 2 * R bytes."""
    H = hidden.shape[2]
    R = H // 128
    rows = nl.ndarray((B, H), dtype=hidden.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=hidden.reshape((hidden.shape[0], H))[b0 : b0 + B, :])
    columns = nl.ndarray((128, R, B), dtype=hidden.dtype, buffer=nl.sbuf)
    padded = B + B % 2  # a 16-bit PSUM write starts on 4 bytes
    at_once = BANK_BYTES // (padded * itemsize(hidden.dtype))  # rows that share a PSUM bank
    for r0 in range(0, R, at_once):
        count = min(at_once, R - r0)
        turned = nl.ndarray((128, count, padded), dtype=hidden.dtype, buffer=nl.psum)
        for r in range(count):
            nisa.nc_transpose(dst=turned[:, r, 0:B], data=view(rows, B, r0 + r, [[R, 128]]))  # [B, 128] -> [128, B]
        nisa.tensor_copy(dst=columns[:, r0 : r0 + count, :], src=turned[:, :, 0:B])
    return columns


def project_tile(acc, kind, weight, c0, layout, columns, ring):
    """acc[:, s, kind, :] = one head tile of q or k, [P, B] a key row s, from weight columns c0 onwards.

    Lane (j, i) of key row s is column j*K + n*i + s."""
    n, lanes, P = layout.n, layout.lanes, layout.partitions()
    C = n * P  # n heads of K = P channels
    rows = _rows_a_chunk(ring, C)
    for r0 in range(0, columns.shape[1], rows):
        count = min(rows, columns.shape[1] - r0)
        chunk = ring.next()
        _load(chunk, weight, r0, count, c0, C)
        for r in range(count):
            for s in range(n):
                nisa.nc_matmul(
                    dst=acc[:, s, kind, :],
                    stationary=view(chunk, 128, r * C + s, [[P, n], [n, lanes]]),  # [128, P]
                    moving=columns[:, r0 + r, :],
                    accumulate=r0 + r > 0,
                )


def project_heads(accs, weight, c0, heads, V, columns, ring):
    """Value heads (v or z) from weight columns c0 onwards, [V, B] each, into `head_banks`."""
    C = heads * V
    per_bank = accs[0].shape[1]
    rows = _rows_a_chunk(ring, C)
    for r0 in range(0, columns.shape[1], rows):
        count = min(rows, columns.shape[1] - r0)
        chunk = ring.next()
        _load(chunk, weight, r0, count, c0, C)
        for r in range(count):
            for h in range(heads):
                nisa.nc_matmul(
                    dst=accs[h // per_bank][:, h % per_bank, :],
                    stationary=chunk[:, r * C + h * V : r * C + (h + 1) * V],  # [128, V]
                    moving=columns[:, r0 + r, :],
                    accumulate=r0 + r > 0,
                )


def head_banks(heads, V, B):
    """PSUM for `heads` projections of [V, B], as many to a bank as fit: a list of [V, per bank, B]; head h is
    column h % per bank of entry h // per bank."""
    per_bank = min(heads, BANK // B)
    banks = []
    for _ in range(0, heads, per_bank):
        banks.append(nl.ndarray((V, per_bank, B), dtype=nl.float32, buffer=nl.psum))
    return banks


def resident_weight(weight):
    """A whole small matrix [H, N] as [128, R * N], one run a partition."""
    tile = nl.ndarray((128, weight.shape[0] // 128 * weight.shape[1]), dtype=weight.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=weight.reshape(tile.shape))
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


def _rows_a_chunk(ring, C):
    """How many rows r of C columns one buffer of the ring holds."""
    return max(1, ring.buffers[0].shape[1] // C)


def _load(chunk, weight, r0, count, c0, C):
    H, N = weight.shape
    nisa.dma_copy(
        dst=chunk[:, 0 : count * C].reshape((128, count, C)),
        src=weight.reshape((128, H // 128, N))[:, r0 : r0 + count, c0 : c0 + C],
    )
