"""The recurrence over many tokens, compiled by numba (extra `fast`): the loops of `plain`, to the same bytes.

A head stays in the core's cache while all tokens of a chunk pass over it. Sums run in the order of the key rows, as
they do in `plain`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gdn_kernels.drift import plain
from gdn_kernels.drift.noise import GOLDEN, MIX1, MIX2
from gdn_kernels.dtypes import Array

VALUE = plain.VALUE

_GOLDEN, _MIX1, _MIX2 = np.uint64(GOLDEN), np.uint64(MIX1), np.uint64(MIX2)
_30, _27, _31, _48 = (np.uint64(shift) for shift in (30, 27, 31, 48))
_DROPPED = np.uint32(0xFFFF0000)


@njit(nogil=True, cache=True)
def kernel_steps(
    S: Array, q: Array, k: Array, v: Array, decay_beta: Array, split: Array, dots: Array, n: int, o: Array
) -> None:  # pragma: no cover - compiled
    """See `plain.kernel_steps`."""
    tokens, B, Hk, K = q.shape
    Hv, V = v.shape[2], v.shape[3]
    gqa = Hv // Hk
    sum_q, sum_k = np.empty(V, np.float64), np.empty(V, np.float64)
    read_q, read_k = np.empty(V, np.float32), np.empty(V, np.float32)
    delta = np.empty(V, np.float32)
    for b in range(B):
        for h in range(Hv):
            state, of = S[b, h], h // gqa
            for t in range(tokens):
                decay, beta, dot = decay_beta[t, 0, b, h], decay_beta[t, 1, b, h], dots[t, b, of]
                e, c = split[t, 0, b, h], split[t, 1, b, h]
                for s in range(n):
                    _sum_rows(state, q[t, b, of], k[t, b, of], s, n, sum_q, sum_k)
                    for j in range(V):
                        if s == 0:
                            read_q[j], read_k[j] = np.float32(sum_q[j]), np.float32(sum_k[j])
                        else:
                            read_q[j] += np.float32(sum_q[j])
                            read_k[j] += np.float32(sum_k[j])
                for j in range(V):
                    decayed_q, decayed_k = _clamped(read_q[j]) * decay, _clamped(read_k[j]) * decay
                    delta[j] = (v[t, b, h, j] - decayed_k) * beta
                    o[t, b, h, j] = delta[j] * dot + decayed_q
                    delta[j] += np.float32(0.0)  # the product that spreads delta has no negative zeros
                for i in range(K):
                    key32, row = k[t, b, of, i], state[i]
                    for j in range(V):
                        row[j] = row[j] * c + (delta[j] * key32 + row[j] * e)


# A product of two fp32 numbers is exact in float64, so that here fused multiply-adds change nothing but the time.
@njit(nogil=True, fastmath={"contract"})
def _sum_rows(
    S: Array, q: Array, k: Array, s: int, n: int, sum_q: Array, sum_k: Array
) -> None:  # pragma: no cover - compiled
    """sum_q, sum_k [V] = q^T S, k^T S over rows s, s + n, ... in float64, row after row; four at a time, which spares
    most of the stores."""
    rows, V = S.shape
    sum_q[:] = 0.0
    sum_k[:] = 0.0
    whole = rows // (4 * n) * (4 * n)
    for i in range(s, whole, 4 * n):
        q0, q1, q2, q3 = np.float64(q[i]), np.float64(q[i + n]), np.float64(q[i + 2 * n]), np.float64(q[i + 3 * n])
        k0, k1, k2, k3 = np.float64(k[i]), np.float64(k[i + n]), np.float64(k[i + 2 * n]), np.float64(k[i + 3 * n])
        r0, r1, r2, r3 = S[i], S[i + n], S[i + 2 * n], S[i + 3 * n]
        for j in range(V):
            x0, x1, x2, x3 = np.float64(r0[j]), np.float64(r1[j]), np.float64(r2[j]), np.float64(r3[j])
            sum_q[j] = (((sum_q[j] + q0 * x0) + q1 * x1) + q2 * x2) + q3 * x3
            sum_k[j] = (((sum_k[j] + k0 * x0) + k1 * x1) + k2 * x2) + k3 * x3
    for i in range(whole + s, rows, n):
        q0, k0, r0 = np.float64(q[i]), np.float64(k[i]), S[i]
        for j in range(V):
            x0 = np.float64(r0[j])
            sum_q[j] += q0 * x0
            sum_k[j] += k0 * x0


@njit(nogil=True, inline="always")
def _clamped(x: Any) -> Any:  # pragma: no cover - compiled
    x = VALUE if x > VALUE else x
    return -VALUE if x < -VALUE else x


@njit(nogil=True, cache=True)
def rounded_steps(
    S: Array,
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    formats: tuple[plain.Format, ...],
    keys: tuple[Any, ...],
    first: int,
    o: Array,
    norms: Array,
) -> None:  # pragma: no cover - compiled
    """See `plain.rounded_steps`."""
    tokens, B, Hk, K = q.shape
    Hv, V = v.shape[2], v.shape[3]
    gqa = Hv // Hk
    memory, delta, outer, operand = np.empty(V), np.empty(V), np.empty(V), np.empty(V)
    squares = np.empty(V)
    for b in range(B):
        for h in range(Hv):
            state, of = S[b, h], h // gqa
            for t in range(tokens):
                at = ((first + t) * B + b) * Hv + h
                gate, strength = decay[t, b, h], beta[t, b, h]
                memory[:] = 0.0
                key, query = k[t, b, of], q[t, b, of]
                rounds = formats[0][0] != 0 or formats[1][0] != 0
                whole = 0 if rounds else _decay(state, gate, key, memory)
                for i in range(whole, K):
                    row = state[i]
                    for j in range(V):
                        row[j] *= gate
                    _round(row, formats[0], keys[0], (at * K + i) * V)
                    operand[:] = row
                    _round(operand, formats[1], keys[1], (at * K + i) * V)
                    for j in range(V):
                        memory[j] += key[i] * operand[j]
                _round(memory, formats[2], keys[2], at * V)
                for j in range(V):
                    delta[j] = (v[t, b, h, j] - memory[j]) * strength
                _round(delta, formats[3], keys[3], at * V)
                read = o[t, b, h]
                read[:] = 0.0
                squares[:] = 0.0
                rounds = formats[4][0] != 0 or formats[5][0] != 0
                whole = 0 if rounds else _update(state, key, query, delta, squares, read)
                for i in range(whole, K):
                    row = state[i]
                    for j in range(V):
                        outer[j] = key[i] * delta[j]
                    _round(outer, formats[4], keys[4], (at * K + i) * V)
                    for j in range(V):
                        row[j] += outer[j]
                        squares[j] += row[j] * row[j]
                    operand[:] = row
                    _round(operand, formats[5], keys[5], (at * K + i) * V)
                    for j in range(V):
                        read[j] += query[i] * operand[j]
                if formats[6][0] != 0:
                    for i in range(K):
                        _round(state[i], formats[6], keys[6], (at * K + i) * V)
                _round(read, formats[7], keys[7], at * V)
                total = 0.0
                for j in range(V):
                    total += squares[j]
                norms[t, b, h] = np.sqrt(total)


# LLVM vectorises a loop only if a few comparisons tell that its arrays don't overlap: so one array is written in each,
# and a row is read by several loops while it is in the nearest cache.


@njit(nogil=True)
def _decay(S: Array, gate: float, k: Array, memory: Array) -> int:  # pragma: no cover - compiled
    """S *= gate, memory += k^T S for the rows that come in fours; returns how many those are."""
    rows, V = S.shape
    whole = rows // 4 * 4
    for i in range(0, whole, 4):
        for row in (S[i], S[i + 1], S[i + 2], S[i + 3]):
            for j in range(V):
                row[j] *= gate
        _add_rows(S[i], S[i + 1], S[i + 2], S[i + 3], k[i], k[i + 1], k[i + 2], k[i + 3], memory)
    return whole


@njit(nogil=True)
def _update(
    S: Array, k: Array, q: Array, delta: Array, squares: Array, read: Array
) -> int:  # pragma: no cover - compiled
    """S += k outer delta, squares += S * S over rows, read += q^T S, as `_decay`."""
    rows, V = S.shape
    whole = rows // 4 * 4
    for i in range(0, whole, 4):
        for r in range(i, i + 4):
            row, key = S[r], k[r]
            for j in range(V):
                row[j] += key * delta[j]
        r0, r1, r2, r3 = S[i], S[i + 1], S[i + 2], S[i + 3]
        for j in range(V):
            squares[j] = (((squares[j] + r0[j] * r0[j]) + r1[j] * r1[j]) + r2[j] * r2[j]) + r3[j] * r3[j]
        _add_rows(r0, r1, r2, r3, q[i], q[i + 1], q[i + 2], q[i + 3], read)
    return whole


@njit(nogil=True)
def _add_rows(
    r0: Array, r1: Array, r2: Array, r3: Array, f0: float, f1: float, f2: float, f3: float, total: Array
) -> None:  # pragma: no cover - compiled
    """total += f0 * r0 + f1 * r1 + f2 * r2 + f3 * r3, row after row."""
    for j in range(len(total)):
        total[j] = (((total[j] + f0 * r0[j]) + f1 * r1[j]) + f2 * r2[j]) + f3 * r3[j]


@njit(nogil=True)
def _round(x: Array, fmt: plain.Format, key: Any, counter: int) -> None:  # pragma: no cover - compiled
    """x [V] float64 in place, to a format of `plain.format_table`."""
    kind = fmt[0]
    if kind == 1:
        for j in range(len(x)):
            x[j] = np.float64(np.float32(x[j]))
    elif kind == 2:
        _narrow(x, int(fmt[1]), int(fmt[2]), fmt[3])
    elif kind == 3:
        single = np.empty(1, np.float32)
        bits = single.view(np.uint32)
        for j in range(len(x)):
            single[0] = np.float32(x[j])
            if np.isfinite(single[0]):
                bits[0] = (bits[0] + np.uint32(_hashed(key, counter + j) >> _48)) & _DROPPED
            x[j] = single[0]


@njit(nogil=True)
def _narrow(x: Array, bits: int, lowest: int, largest: float) -> None:  # pragma: no cover - compiled
    """To nearest with ties to even: adding and subtracting 1.5 * 2^52 steps leaves whole steps."""
    words, magic = x.view(np.int64), np.empty(len(x), np.int64)
    for j in range(len(x)):
        step = ((words[j] >> 52) & 0x7FF) - 1022 - bits
        step = min(max(step, lowest), 900)  # what is larger than that is infinite in any of the formats
        magic[j] = ((step + 1075) << 52) | (1 << 51)
    shift = magic.view(np.float64)
    for j in range(len(x)):
        rounded = np.copysign((x[j] + shift[j]) - shift[j], x[j])
        x[j] = np.copysign(np.inf, x[j]) if abs(rounded) > largest else rounded


@njit(nogil=True, inline="always")
def _hashed(key: Any, counter: Any) -> Any:  # pragma: no cover - compiled
    x = np.uint64(counter) * _GOLDEN + np.uint64(key)
    x = (x ^ (x >> _30)) * _MIX1
    x = (x ^ (x >> _27)) * _MIX2
    return x ^ (x >> _31)
