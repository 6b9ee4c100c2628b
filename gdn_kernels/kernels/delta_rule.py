"""Stage 4, the gated delta rule, for one group of heads.

    S1 = S * exp(g);  delta = (v - k^T S1) * beta;  S2 = S1 + k outer delta;  o = q^T S2

in one pass over the state: k and q are multiplied with S before its decay,

    k^T S1 = exp(g) * (k^T S)        o = exp(g) * (q^T S) + (q.k) * delta

so memory read and readout come from one product, and the update of S is nobody's input.
"""

import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.finite import VALUE, clamp
from gdn_kernels.kernels.layout import BANK, view

STATE_TILES = 16  # states of a block in SBUF at once: 32 KiB a partition before and after the update


def delta_rule(v, keys, gates, identity, layout, state, new_state, b0, h0):
    """The recurrence of value heads [h0, h0 + heads) for sequences [b0, b0 + B); returns o [V, heads, B].

    v: [V, heads, B]. keys, gates: of this group. state, new_state: HBM [batch, Hv, K, V] fp32.
    """
    B, T = v.shape[2], layout.T
    o = nl.ndarray(v.shape, dtype=nl.float32, buffer=nl.sbuf)
    at_once = min(B, max(1, STATE_TILES // T), max(1, BANK // (2 * layout.heads())))
    for first in range(0, B, at_once):
        count = min(at_once, B - first)
        S = load_states(state, layout, b0 + first, count, h0)
        delta = _read_memory(o, v, S, keys, gates, layout, first, count)
        S2 = _update_states(S, delta, keys.kq, gates.split, identity, layout, first, count)
        store_states(new_state, S2, layout, b0 + first, count, h0)
    return o


def load_states(state, layout, b0, count, h0):
    """S [P, count * T, n * V]: sequence b0 + b, value heads j*T + t of the group, at slot b*T + t."""
    V = state.shape[3]
    S = nl.ndarray((layout.partitions(), count * layout.T, layout.n * V), dtype=nl.float32, buffer=nl.sbuf)
    for b in range(count):
        nisa.dma_copy(dst=S[:, b * layout.T : (b + 1) * layout.T, :], src=_states_of(state, layout, b0 + b, h0))
    return S


def store_states(state, S, layout, b0, count, h0):
    for b in range(count):
        nisa.dma_copy(dst=_states_of(state, layout, b0 + b, h0), src=S[:, b * layout.T : (b + 1) * layout.T, :])


def _states_of(state, layout, b, h0):
    """The group's states of one sequence in HBM as [n, lanes, T, n * V]."""
    Hv, K, V = state.shape[1], state.shape[2], state.shape[3]
    return state.ap(
        pattern=[[layout.T * K * V, layout.n], [layout.n * V, layout.lanes], [K * V, layout.T], [1, layout.n * V]],
        offset=(b * Hv + h0) * K * V,
    )


def _read_memory(o, v, S, keys, gates, layout, first, count):
    """delta = (v - exp(g) k^T S) * beta, returned as [V, heads, count]; o = exp(g) q^T S + (q.k) delta."""
    n, T, heads = layout.n, layout.T, layout.heads()
    V, B = v.shape[0], v.shape[2]
    read = nl.ndarray((V, 2, n, T * count), dtype=nl.float32, buffer=nl.psum)  # q^T S, then k^T S
    for b in range(count):
        for t in range(T):
            for s in range(n):
                nisa.nc_matmul(
                    dst=view(read, V, t * count + b, [[heads * count, 2], [T * count, n]]),
                    stationary=S[:, b * T + t, s * V : (s + 1) * V],  # [P, V]
                    moving=view(keys.wide, layout.partitions(), (s * 2 * B + first + b) * n, [[B * n, 2], [1, n]]),
                    accumulate=s > 0,
                )
    decayed = nl.ndarray((V, 2, heads, count), dtype=nl.float32, buffer=nl.sbuf)
    clamp(decayed, read, VALUE)
    decay = view(gates.decay_beta, V, first, [[0, 2], [B, heads], [1, count]])
    nisa.tensor_tensor(dst=decayed, data1=decayed, data2=decay, op=nl.multiply)
    delta = nl.ndarray((V, heads, count), dtype=nl.float32, buffer=nl.sbuf)
    here = slice(first, first + count)
    nisa.tensor_tensor(dst=delta, data1=v[:, :, here], data2=decayed[:, 1, :, :], op=nl.subtract)
    nisa.tensor_tensor(dst=delta, data1=delta, data2=gates.decay_beta[:, 1, :, here], op=nl.multiply)
    written = nl.ndarray((V, heads, count), dtype=nl.float32, buffer=nl.sbuf)
    dot = view(keys.dots, V, first, [[B, n], [0, T], [1, count]])
    nisa.tensor_tensor(dst=written, data1=delta, data2=dot, op=nl.multiply)
    nisa.tensor_tensor(dst=o[:, :, here], data1=written, data2=decayed[:, 0, :, :], op=nl.add)
    return delta


def _update_states(S, delta, kq, split, identity, layout, first, count):
    """S2 = S * c + (S * e + k outer delta), [P, count * T, n * V]: the sum in brackets is small, so only the outer one
    rounds at the size of S."""
    n, T, P = layout.n, layout.T, layout.partitions()
    V = delta.shape[0]
    S2 = nl.ndarray(S.shape, dtype=nl.float32, buffer=nl.sbuf)
    for b in range(count):
        for t in range(T):
            rows = nl.ndarray((P, V), dtype=nl.float32, buffer=nl.psum)  # delta of each head, on all its lanes
            nisa.nc_matmul(
                dst=rows,
                stationary=view(delta, V, t * count + b, [[T * count, n], [0, layout.lanes]]),  # [V, P]
                moving=identity[0:V, 0:V],
                is_moving_onezero=True,
                accumulate=False,
            )
            change = nl.ndarray((P, n, V), dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(
                dst=change, op=nl.copy, data=S[:, b * T + t, :], scale=split[:, t, 0, first + b : first + b + 1]
            )
            for s in range(n):
                nisa.scalar_tensor_tensor(
                    dst=change[:, s, :],
                    data=rows,
                    op0=nl.multiply,
                    operand0=kq[:, s, 1, first + b : first + b + 1],
                    op1=nl.add,
                    operand1=change[:, s, :],
                )
            nisa.scalar_tensor_tensor(
                dst=S2[:, b * T + t, :],
                data=S[:, b * T + t, :],
                op0=nl.multiply,
                operand0=split[:, t, 1, first + b : first + b + 1],
                op1=nl.add,
                operand1=change,
            )
    return S2
