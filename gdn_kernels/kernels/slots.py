"""The fused block on pools of states: every sequence of a call has its window and state in a slot, which the kernel
reads and updates in place.

Which slot is known at run time: `read_slots` and `write_slots` [B] int32 are tensors that DMAs are addressed by. A slot
of -1 is out of bounds, and what it names is left out (`oob_mode.skip`):

- read slot -1: the sequence starts from zeros, put where its window and state would have been loaded to;
- write slot -1: the sequence is padding. Nothing of it is stored and its `core_out` is zero, whatever came in.

A state moves in a transfer of its own, addressed by a scalar. Windows move many sequences at a time, a row each,
addressed by a vector, which takes software descriptors.

Nothing orders the sequences of a call: a slot that is written may be read by the same sequence only. That is for the
caller to see to; `gdn_kernels.gdn_block_tkg_slots` checks it.
"""

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.block import Inputs, decode
from gdn_kernels.kernels.delta_rule import head_tile_pattern
from gdn_kernels.kernels.layout import view
from gdn_kernels.kernels.queues import gather, load_aside, load_at, store_at

NOWHERE = -1


@nki.jit
def gdn_block_tkg_slots(
    hidden,
    W_in_qkv,
    W_in_z,
    W_in_a,
    W_in_b,
    conv_weight,
    conv_pool,
    A_log,
    dt_bias,
    norm_weight,
    recurrent_pool,
    read_slots,
    write_slots,
    norm_eps,
):
    """One decode step of one GDN layer. conv_pool [slots, conv_dim, K_win] and recurrent_pool [slots, Hv, K, V] are
    written; read_slots, write_slots [B] int32 hold slots or -1. Other shapes are those of `gdn_block_tkg`.

    Returns core_out [B, 1, Hv * V] and both pools: inputs that are written are returned too, so that a framework can
    declare them aliases of results, or copy the results back.
    """
    core_out = nl.ndarray((hidden.shape[0], 1, W_in_z.shape[1]), dtype=hidden.dtype, buffer=nl.shared_hbm)
    inputs = Inputs(W_in_qkv, W_in_z, W_in_a, W_in_b, conv_weight, conv_pool, recurrent_pool)
    slots = Slots(conv_pool, recurrent_pool, read_slots, write_slots, zeros_row(4 * recurrent_pool.shape[3]))
    decode(core_out, hidden, inputs, slots, A_log, dt_bias, norm_weight, norm_eps)
    return core_out, conv_pool, recurrent_pool


@dataclass
class Slots(nl.NKIObject):
    """Pools and the slots of every sequence [batch], in HBM. zeros: a row of them, as long as a partition's part of a
    state or longer."""

    conv_pool: nl.ndarray
    recurrent_pool: nl.ndarray
    read_slots: nl.ndarray
    write_slots: nl.ndarray
    zeros: nl.ndarray

    def rows(self, b0, B):
        """Windows and states of sequences [b0, b0 + B)."""
        reads, writes = load_indices(self.read_slots, b0, B), load_indices(self.write_slots, b0, B)
        return SlotRows(self, reads, writes, nowhere(B), negative_columns(self.write_slots, b0, B), [])


@dataclass
class Indices(nl.NKIObject):
    """Slots of B sequences, int32 in SBUF: as a row [1, B], to address by one of them, and as a column [B, 1], to
    address by all. unread: [1, B], 0 where there is no slot and out of bounds where there is one."""

    row: nl.ndarray
    column: nl.ndarray
    unread: nl.ndarray


@dataclass
class SlotRows(nl.NKIObject):
    """Windows and states of the sequences of one batch tile, with the methods of `block.Batch`. unnamed: [128, B]
    uint8, 1 where a sequence has no slot to write. pending: windows still to be stored."""

    slots: Slots
    reads: Indices
    writes: Indices
    nowhere: Indices
    unnamed: nl.ndarray
    pending: list

    def windows(self, spare, shared):
        """A core whose result is spare reads nothing either, as the other core writes there: unless it needs the window
        for results of its own."""
        reads = self.nowhere if spare and not shared else self.reads
        writes = self.nowhere if spare else self.writes
        return SlotWindows(self.slots.conv_pool, reads, writes, shared, self)

    def states(self, spare):
        self.store_pending()
        reads = self.nowhere if spare else self.reads
        writes = self.nowhere if spare else self.writes
        return SlotStates(self.slots.recurrent_pool, self.slots.zeros, reads, writes)

    def store_pending(self):
        for moved in self.pending:
            windows, rows, span = moved
            windows.store_now(rows, span)
        self.pending = []

    def clear_unnamed(self, columns):
        """columns [P, N, B] = 0 for sequences without a slot, whatever they hold."""
        P, N, B = columns.shape
        nisa.tensor_copy_predicated(dst=columns, src=0.0, predicate=view(self.unnamed, P, 0, [[0, N], [1, B]]))


@dataclass
class SlotWindows(nl.NKIObject):
    """Conv windows by slot, with the methods of `conv1d.WindowRows`. shared: both cores read them, one writes them."""

    pool: nl.ndarray
    reads: Indices
    writes: Indices
    shared: bool
    batch_tile: SlotRows

    def load(self, rows, span):
        """GpSimd makes the descriptors, so what is to be stored waits until the next rows are gathered: otherwise their
        gather would wait for what is stored (modelled, Qwen3.5-35B-A3B, B = 32: 5 % of the block)."""
        nisa.memset(dst=rows.everything(), value=0.0, engine=nisa.engine.gpsimd)
        B = self.reads.column.shape[0]
        for block in range(rows.blocks):
            for run in range(span.count):
                gather(rows.block(block)[run * B : (run + 1) * B, :], self._run(span, block, run, self.reads))
        self.batch_tile.store_pending()

    def store(self, rows, span):
        self.batch_tile.pending.append((self, rows, span))

    def store_now(self, rows, span):
        if self.shared:
            nisa.core_barrier(data=self.pool, cores=(0, 1))
        B = self.writes.column.shape[0]
        for block in range(rows.blocks):
            for run in range(span.count):
                store_at(self._run(span, block, run, self.writes), rows.block(block)[run * B : (run + 1) * B, :])

    def _run(self, span, block, run, indices):
        """One run of every sequence, [B, width]."""
        _, conv_dim, taps = self.pool.shape
        return self.pool.ap(
            pattern=[[conv_dim * taps, indices.column.shape[0]], [1, span.width]],
            offset=span.starts[block] + run * span.width,
            vector_offset=indices.column,
            indirect_dim=0,
        )


@dataclass
class SlotStates(nl.NKIObject):
    """States by slot, with the methods of `delta_rule.StateRows`."""

    pool: nl.ndarray
    zeros: nl.ndarray
    reads: Indices
    writes: Indices

    def clear(self, S, b):
        """Zeros where there is no slot to read: of this transfer and the next, one is left out. An engine that cleared
        S would stand still until S is free (modelled, B = 32: 60 % more for the whole block)."""
        P, tiles, width = S.shape
        pattern, unread = [[0, P], [0, tiles], [1, width]], self.reads.unread[:, b : b + 1]
        load_at(S, self.zeros.ap(pattern=pattern, offset=0, scalar_offset=unread, indirect_dim=0))

    def load(self, S, layout, b, h0, tile):
        load_at(S, self._state(layout, b, h0, tile, self.reads))

    def store(self, S, layout, b, h0, tile):
        store_at(self._state(layout, b, h0, tile, self.writes), S)

    def _state(self, layout, b, h0, tile, indices):
        """The states of one head tile and one sequence, as `delta_rule.states_of`."""
        K, V = self.pool.shape[2], self.pool.shape[3]
        return self.pool.ap(
            pattern=head_tile_pattern(layout, K, V),
            offset=(h0 + tile * layout.n * layout.T) * K * V,
            scalar_offset=indices.row[:, b : b + 1],
            indirect_dim=0,
        )


def load_indices(slots, b0, B):
    row = nl.ndarray((1, B), dtype=nl.int32, buffer=nl.sbuf)
    load_aside(row, slots.ap(pattern=[[B, 1], [1, B]], offset=b0))
    column = nl.ndarray((B, 1), dtype=nl.int32, buffer=nl.sbuf)
    load_aside(column, slots.ap(pattern=[[1, B], [1, 1]], offset=b0))
    return Indices(row, column, unread_of(row))


def nowhere(B):
    row = nl.ndarray((1, B), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=row, value=NOWHERE)
    column = nl.ndarray((B, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=column, value=NOWHERE)
    return Indices(row, column, unread_of(row))


def unread_of(row):
    """0 for a slot below 0, -1 for any other."""
    unread = nl.ndarray(row.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=unread, data=row, op0=nl.greater_equal, operand0=0.0, op1=nl.multiply, operand1=-1.0)
    return unread


def negative_columns(slots, b0, B):
    """[128, B] uint8: on every partition 1 where a sequence's slot is below 0."""
    everywhere = nl.ndarray((128, B), dtype=nl.int32, buffer=nl.sbuf)
    load_aside(everywhere, slots.ap(pattern=[[0, 128], [1, B]], offset=b0))
    negative = nl.ndarray((128, B), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=negative, data=everywhere, op0=nl.less, operand0=0.0)
    return negative


def zeros_row(width):
    """[1, width] zeros in HBM."""
    tile = nl.ndarray((1, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=0.0)
    zeros = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.private_hbm)
    load_aside(zeros, tile)
    return zeros
