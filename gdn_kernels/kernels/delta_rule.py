"""Stage 4, the gated delta rule, for one group of heads.

    S1 = S * exp(g);  delta = (v - k^T S1) * beta;  S2 = S1 + k outer delta;  o = q^T S2

in one pass over the state: k and q are multiplied with S before its decay,

    k^T S1 = exp(g) * (k^T S)        o = exp(g) * (q^T S) + (q.k) * delta

so memory read and readout come from one product, and the update of S is nobody's input.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.finite import VALUE, clamp
from gdn_kernels.kernels.layout import BANK, BLOCKS, CHANGES, view
from gdn_kernels.kernels.queues import load, store
from gdn_kernels.kernels.rings import Ring, ring

MOST_STATE_BYTES = 72 * 1024  # a partition; more gains nothing (modelled)


@dataclass
class StateBuffers(nl.NKIObject):
    """states: a sequence's states of one group each, [P, G * T, n * V]. changes: S * e and S * c of one tile each,
    [P, n, V]. block: sequences that are read and updated together."""

    states: Ring
    changes: Ring
    block: int


def state_buffers(layout, V, B, budget):
    """Buffers for B sequences in `budget` bytes a partition. Longer blocks spread the fixed cost of a memory read over
    more states."""
    P, tiles, tile = layout.partitions(), layout.G * layout.T, layout.n * V * 4
    room = min(budget - CHANGES * tile, MOST_STATE_BYTES)
    sequences = max(3, room // (tiles * tile))
    block = max(1, min(sequences // BLOCKS, BANK // (2 * layout.heads()), (B + 1) // 2))
    return StateBuffers(
        ring(min(B, sequences), (P, tiles, layout.n * V), nl.float32, "states"),
        ring(CHANGES, (P, layout.n, V), nl.float32, "changes"),
        block,
    )


@dataclass
class StateRows(nl.NKIObject):
    """States of sequences b0 onwards as rows of a batch: HBM [batch, Hv, K, V] fp32, read from `source`, written to
    `target`."""

    source: nl.ndarray
    target: nl.ndarray
    b0: int

    def clear(self, S, b):
        """Every row of a batch has a state."""

    def load(self, S, layout, b, h0, tile):
        load(S, states_of(self.source, layout, self.b0 + b, h0, tile))

    def store(self, S, layout, b, h0, tile):
        store(states_of(self.target, layout, self.b0 + b, h0, tile), S)


def states_of(state, layout, b, h0, tile):
    """The states of one head tile and one sequence in HBM as [n, lanes, T, n * V]."""
    Hv, K, V = state.shape[1], state.shape[2], state.shape[3]
    return state.ap(pattern=head_tile_pattern(layout, K, V), offset=(b * Hv + h0 + tile * layout.n * layout.T) * K * V)


def head_tile_pattern(layout, K, V):
    """The states of one head tile among those of a sequence."""
    n, T = layout.n, layout.T
    return [[T * K * V, n], [n * V, layout.lanes], [K * V, T], [1, n * V]]


def delta_rule(o, v, keys, gates, identity, layout, states, h0, buffers):
    """The recurrence of value heads [h0, h0 + heads) for B sequences.

    o: out, [V, heads, B] fp32. v: [V, heads, B]. keys, gates: of this group. states: where the states are, such as
    StateRows. buffers: StateBuffers.
    """
    B = v.shape[2]
    S = load_states(buffers, states, layout, 0, min(buffers.block, B), h0)
    delta = _read_memory(o, v, S, keys, gates, layout, 0)
    for first in range(0, B, buffers.block):
        after = first + buffers.block
        # The next block's memory read goes first: it needs PE and little else, the update everything but PE.
        if after < B:
            next_S = load_states(buffers, states, layout, after, min(buffers.block, B - after), h0)
            next_delta = _read_memory(o, v, next_S, keys, gates, layout, after)
        for b in range(len(S)):
            for tile in range(layout.G):
                for t in range(layout.T):
                    _update_tile(S[b], delta, b, tile, t, keys.kq, gates.split, identity, layout, first + b, buffers)
                states.store(_tile_of(S[b], layout, tile), layout, first + b, h0, tile)
        if after < B:
            S, delta = next_S, next_delta


def load_states(buffers, states, layout, first, count, h0):
    """The group's states of `count` sequences from `first` onwards: a list of [P, G * T, n * V], value heads j*T + t of
    head tile I at [:, I*T + t]."""
    loaded = []
    for b in range(count):
        S = buffers.states.next()
        states.clear(S, first + b)
        loaded.append(S)
    for b in range(count):
        for tile in range(layout.G):
            states.load(_tile_of(loaded[b], layout, tile), layout, first + b, h0, tile)
    return loaded


def _tile_of(S, layout, tile):
    return S[:, tile * layout.T : (tile + 1) * layout.T, :]


def _read_memory(o, v, S, keys, gates, layout, first):
    """delta = (v - exp(g) k^T S) * beta, returned as [V, heads, count]; o = exp(g) q^T S + (q.k) delta."""
    n, T, heads, count = layout.n, layout.T, layout.heads(), len(S)
    V, B = v.shape[0], v.shape[2]
    read = nl.ndarray((V, 2, heads * count), dtype=nl.float32, buffer=nl.psum)  # q^T S, then k^T S
    X = keys.kq.shape[3]
    for b in range(count):
        for tile in range(layout.G):
            column = tile * B + first + b
            for t in range(T):
                for s in range(layout.classes * n):
                    row = s % n
                    nisa.nc_matmul(
                        dst=view(read, V, (tile * n * T + t) * count + b, [[heads * count, 2], [T * count, n]]),
                        stationary=S[b][:, tile * T + t, row * V : (row + 1) * V],  # [P, V]
                        moving=view(keys.wide, layout.partitions(), (s * 2 * X + column) * n, [[X * n, 2], [1, n]]),
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
    dot = view(keys.dots, V, first, [[B, layout.keys()], [0, T], [1, count]])
    nisa.tensor_tensor(dst=written, data1=delta, data2=dot, op=nl.multiply)
    nisa.tensor_tensor(dst=o[:, :, here], data1=written, data2=decayed[:, 0, :, :], op=nl.add)
    return delta


def _update_tile(S, delta, b, tile, t, kq, split, identity, layout, column, buffers):
    """S = S * c + (S * e + k outer delta), in place, for one tile of n states: the sum in brackets is small, so only
    the outer one rounds at the size of S. b: the sequence's place in delta; column: its place in split.

    Modelled: Scalar makes S * e and S * c, 0.95 us; Vector k outer delta and its sum with the first, 1.2 us, as it
    takes one operand of each from PSUM; GpSimd adds the two, 0.9 us. The DMA of the tile, in and out, takes 1.5 us."""
    n, T, P = layout.n, layout.T, layout.partitions()
    V, _, count = delta.shape
    slot, key_column = tile * T + t, tile * split.shape[3] + column
    rows = nl.ndarray((P, V), dtype=nl.float32, buffer=nl.psum)  # delta of each head, on all its lanes
    nisa.nc_matmul(
        dst=rows,
        stationary=view(delta, V, (tile * n * T + t) * count + b, [[T * count, n], [0, layout.lanes]]),  # [V, P]
        moving=identity[0:V, 0:V],
        is_moving_onezero=True,
        accumulate=False,
    )
    written = nl.ndarray((P, n, V), dtype=nl.float32, buffer=nl.psum)  # k outer delta
    key = view(kq, P, kq.shape[3] + key_column, [[2 * kq.shape[3], n], [0, V]])
    nisa.tensor_tensor(dst=written, data1=view(rows, P, 0, [[0, n], [1, V]]), data2=key, op=nl.multiply)
    change = buffers.changes.next()
    nisa.activation(dst=change, op=nl.copy, data=S[:, slot, :], scale=split[:, slot, 0, column : column + 1])
    kept = buffers.changes.next()
    nisa.activation(dst=kept, op=nl.copy, data=S[:, slot, :], scale=split[:, slot, 1, column : column + 1])
    nisa.tensor_tensor(dst=change, data1=written, data2=change, op=nl.add)
    nisa.tensor_tensor(dst=S[:, slot, :], data1=kept, data2=change, op=nl.add, engine=nisa.engine.gpsimd)
