"""The fused block: one GDN decode layer from hidden states to the input of the output projection, all in SBUF.

hidden -> in_proj -> conv1d -> gates -> delta_rule -> gated_norm -> core_out

`decode` is the whole of it but for where windows and states are: `gdn_block_tkg` has them in a `Batch` and returns new
ones, `slots.gdn_block_tkg_slots` has them in pools and updates those.
"""

from dataclasses import dataclass

import nki
import nki.language as nl

from gdn_kernels.kernels.conv1d import Span, WindowRows, conv1d
from gdn_kernels.kernels.delta_rule import StateBuffers, StateRows, delta_rule, state_buffers
from gdn_kernels.kernels.gated_norm import gate, normalise, store_heads
from gdn_kernels.kernels.gates import block_diagonal, gates_of, keys_of
from gdn_kernels.kernels.in_proj import (
    head_banks,
    hidden_columns,
    project_heads,
    project_keys,
    project_scalars,
    resident_weight,
    weight_ring,
)
from gdn_kernels.kernels.layout import (
    Layout,
    core_heads,
    destination,
    group_of,
    plan_of,
    runs_of_heads,
    summed_like,
    view,
)
from gdn_kernels.kernels.parameters import Parameters, load_parameters, parameter_column
from gdn_kernels.kernels.rings import Ring
from gdn_kernels.kernels.rows import RowBuffers, row_buffers, rows_in
from gdn_kernels.kernels.taps import Taps, head_taps, key_taps


@dataclass
class Batch(nl.NKIObject):
    """Windows and states of sequences [b0, b0 + B) as rows of a batch, in HBM: the old and the new ones."""

    conv_state: nl.ndarray
    recurrent_state: nl.ndarray
    new_conv_state: nl.ndarray
    new_state: nl.ndarray
    b0: int
    B: int

    def rows(self, b0, B):
        """The same for other sequences."""
        return Batch(self.conv_state, self.recurrent_state, self.new_conv_state, self.new_state, b0, B)

    def windows(self, spare, shared):
        """Conv windows. spare: the other core writes the new ones. shared: and both cores need the old ones."""
        return WindowRows(self.conv_state, destination(self.new_conv_state, spare), self.b0, self.B)

    def states(self, spare):
        return StateRows(self.recurrent_state, destination(self.new_state, spare), self.b0)

    def clear_unnamed(self, columns):
        """Every row of a batch counts."""


@dataclass
class Inputs(nl.NKIObject):
    """What the stages read from HBM; of the two small projections, their copies in SBUF. conv_state, recurrent_state:
    for their shapes and dtypes."""

    W_in_qkv: nl.ndarray
    W_in_z: nl.ndarray
    W_in_a: nl.ndarray
    W_in_b: nl.ndarray
    conv_weight: nl.ndarray
    conv_state: nl.ndarray
    recurrent_state: nl.ndarray


@dataclass
class Kept(nl.NKIObject):
    """What stays in SBUF for the whole kernel: the parameters, the conv taps, the buffers that weights, windows and
    states stream through, and the `gates.block_diagonal` of a group's keys."""

    parameters: Parameters
    taps: Taps
    weights: Ring
    rows: RowBuffers
    states: StateBuffers
    wide: nl.ndarray


@dataclass
class Step(nl.NKIObject):
    """One batch tile, sequences [b0, b0 + B): hidden as columns [128, R, B], where its windows and states are (such as
    a Batch), the layout of its groups, and what is kept from tile to tile."""

    columns: nl.ndarray
    batch: nl.NKIObject
    b0: int
    B: int
    layout: Layout
    kept: Kept


@nki.jit
def gdn_block_tkg(
    hidden,
    W_in_qkv,
    W_in_z,
    W_in_a,
    W_in_b,
    conv_weight,
    conv_state,
    A_log,
    dt_bias,
    norm_weight,
    recurrent_state,
    norm_eps,
    layer_Hk=0,
):
    """One decode step of one GDN layer. Shapes are those of `gdn_kernels.gdn_block_tkg`. layer_Hk: key heads of the
    layer that this is a part of, whose bytes the states get; 0 for a whole layer.

    Returns core_out [B, 1, Hv * V], new_conv_state [B, conv_dim, K_win], new_recurrent_state [B, Hv, K, V].
    """
    core_out = nl.ndarray((hidden.shape[0], 1, W_in_z.shape[1]), dtype=hidden.dtype, buffer=nl.shared_hbm)
    new_conv_state = nl.ndarray(conv_state.shape, dtype=hidden.dtype, buffer=nl.shared_hbm)
    new_state = nl.ndarray(recurrent_state.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    inputs = Inputs(W_in_qkv, W_in_z, W_in_a, W_in_b, conv_weight, conv_state, recurrent_state)
    batch = Batch(conv_state, recurrent_state, new_conv_state, new_state, 0, hidden.shape[0])
    decode(core_out, hidden, inputs, batch, A_log, dt_bias, norm_weight, norm_eps, layer_Hk)
    return core_out, new_conv_state, new_state


def decode(core_out, hidden, inputs, sequences, A_log, dt_bias, norm_weight, norm_eps, layer_Hk=0):
    """The step for all of hidden [batch, 1, H]; windows and states in `sequences`, such as a Batch."""
    batch = hidden.shape[0]
    _, Hv, K, V = inputs.recurrent_state.shape
    conv_dim, K_win = inputs.conv_weight.shape
    Hk = (conv_dim - Hv * V) // (2 * K)
    cores, core = nl.num_programs(axes=0), nl.program_id(axis=0)
    mine = core_heads(Hk, Hv // Hk, cores, core)
    plan = plan_of(Hk, Hv, K, V, hidden.shape[2], K_win, batch, hidden.dtype, mine, cores)
    layout = summed_like(plan.layout, max(Hk, layer_Hk), Hv // Hk, K)
    parameters = load_parameters(layout, A_log, dt_bias, norm_weight)
    kept = _kept(inputs, parameters, layout, plan, mine, hidden.dtype)
    inputs.W_in_a, inputs.W_in_b = resident_weight(inputs.W_in_a), resident_weight(inputs.W_in_b)
    for b0 in range(0, batch, plan.B):
        B = min(plan.B, batch - b0)
        rows = sequences.rows(b0, B)
        columns = hidden_columns(hidden, b0, B)
        rows.clear_unnamed(columns)
        step = Step(columns, rows, b0, B, layout, kept)
        normed = nl.ndarray((V, plan.groups, layout.heads(), B), dtype=nl.float32, buffer=nl.sbuf)
        for index in range(plan.groups):
            group = group_of(mine, layout, Hv // Hk, index)
            gates = _gates(step, inputs, group.h0, V)
            if group.opens:
                shared = cores == 2 and Hk == 1
                keys = _keys(step, inputs, rows.windows(group.spare_keys, shared), group, index)
            v = _values(step, inputs, rows.windows(group.spare_values, False), group.h0, index)
            here = normed[:, index, :, :]
            at = rows.states(group.spare_values)
            delta_rule(here, v, keys, gates, parameters.identity, layout, at, group.h0, kept.states)
            normalise(here, parameters, norm_eps)
        # All of z last: its weights stream in while the last states are updated and leave.
        for index in range(plan.groups):
            group = group_of(mine, layout, Hv // Hk, index)
            out = destination(core_out, group.spare_values).reshape((batch, Hv * V))
            _finish(step, inputs, normed[:, index, :, :], out, group.h0, index == plan.groups - 1)


def _kept(inputs, parameters, layout, plan, mine, dtype):
    """What is loaded once, and all buffers."""
    _, Hv, K, V = inputs.recurrent_state.shape
    conv_dim, K_win = inputs.conv_weight.shape
    key_dim, heads = (conv_dim - Hv * V) // 2, layout.heads()
    first = group_of(mine, layout, Hv // (key_dim // K), 0)
    taps = Taps(
        key_taps(inputs.conv_weight, layout, first.key_head, mine.keys, key_dim, K),
        head_taps(inputs.conv_weight, 2 * key_dim + first.h0 * V, plan.groups * heads, V, 4),
    )
    return Kept(
        parameters,
        taps,
        weight_ring(dtype, plan.chunks),
        row_buffers(layout.n, K, V, K_win, len(runs_of_heads(heads, plan.B)), dtype),
        state_buffers(layout, V, plan.B, plan.state_bytes),
        block_diagonal(layout, layout.G * plan.B),
    )


def _keys(step, inputs, windows, group, index):
    """Stages 1 to 3 for q and k of a group, the core's `index`th."""
    layout, B = step.layout, step.B
    n, G, P = layout.n, layout.G, layout.partitions()
    _, Hv, K, V = inputs.recurrent_state.shape
    conv_dim, taps = inputs.conv_weight.shape
    key_dim = (conv_dim - Hv * V) // 2
    acc = nl.ndarray((P, n, 2, G * B), dtype=nl.float32, buffer=nl.psum)
    for kind in range(2):
        c0 = kind * key_dim + group.key_head * K
        project_keys(acc, kind, inputs.W_in_qkv, c0, layout, step.columns, step.kept.weights)
    # A row is a tile's channels of q or of k, of one sequence; a block those of all sequences.
    width, starts = n * K * taps, []
    for tile in range(G):
        for kind in range(2):
            starts.append((kind * key_dim + group.key_head * K) * taps + tile * width)
    span = Span(starts, 1, width)
    rows = rows_in(step.kept.rows.keys.next(), index, 2 * G, B, False, n, layout.lanes, taps)
    windows.load(rows, span)
    c = nl.ndarray((P, n, 2, G * B), dtype=nl.float32, buffer=nl.sbuf)
    outputs, fresh = [], []
    for s in range(n):
        by_row = [[B, G], [G * B, 2], [1, B]]
        outputs.append(view(c, P, s * 2 * G * B, by_row))
        fresh.append(view(acc, P, s * 2 * G * B, by_row))
    moved = conv1d(outputs, rows, fresh, step.kept.taps.keys, 2 * group.tile, B, step.kept.rows.keys.next())
    windows.store(moved, span)
    return keys_of(c, step.kept.wide, step.kept.parameters.mask, step.kept.parameters.identity, layout, K, V)


def _values(step, inputs, windows, h0, index):
    """Stages 1 and 2 for v of the core's group `index`: [V, heads, B]."""
    B, heads, G = step.B, step.layout.heads(), step.layout.G
    _, Hv, _, V = inputs.recurrent_state.shape
    conv_dim, taps = inputs.conv_weight.shape
    c0, width = conv_dim - Hv * V + h0 * V, V * taps  # first channel; elements of a row, one head's channels
    accs = head_banks(heads, V, B)
    project_heads(accs, inputs.W_in_qkv, c0, heads, V, step.columns, step.kept.weights, False)
    v = nl.ndarray((V, heads, B), dtype=nl.float32, buffer=nl.sbuf)
    per_bank = accs[0].shape[1]
    runs = runs_of_heads(heads, B)
    for i in range(len(runs)):
        h, count = runs[i]
        blocks = G if count % G == 0 else 1
        in_block, starts = count // blocks, []
        for block in range(blocks):
            starts.append((c0 + (h + block * in_block) * V) * taps)
        span = Span(starts, in_block, width)
        rows = rows_in(step.kept.rows.values.next(), index + i, blocks, in_block * B, True, 1, V, taps)
        windows.load(rows, span)
        fresh = accs[h // per_bank][:, h % per_bank : h % per_bank + count, :]
        new = step.kept.rows.values.next()
        moved = conv1d([v[:, h : h + count, :]], rows, [fresh], step.kept.taps.values, index * heads + h, B, new)
        windows.store(moved, span)
    return v


def _gates(step, inputs, h0, V):
    """Stages 1 and 3 for decay and beta of one group."""
    heads, Hv = step.layout.heads(), inputs.recurrent_state.shape[1]
    a = nl.ndarray((heads, step.B), dtype=nl.float32, buffer=nl.psum)
    project_scalars(a, inputs.W_in_a, Hv, h0, heads, step.columns)
    b = nl.ndarray((heads, step.B), dtype=nl.float32, buffer=nl.psum)
    project_scalars(b, inputs.W_in_b, Hv, h0, heads, step.columns)
    A_log = parameter_column(step.kept.parameters.A_log, h0, heads)
    dt_bias = parameter_column(step.kept.parameters.dt_bias, h0, heads)
    return gates_of(a, b, A_log, dt_bias, step.kept.parameters.identity, step.layout, V)


def _finish(step, inputs, normed, core_out, h0, last):
    """Stages 1 and 5 for z of one group: core_out [batch, Hv * V] of its heads."""
    V, heads, B = normed.shape
    z = head_banks(heads, V, B)
    project_heads(z, inputs.W_in_z, h0 * V, heads, V, step.columns, step.kept.weights, last)
    out = nl.ndarray(normed.shape, dtype=core_out.dtype, buffer=nl.sbuf)
    gate(out, normed, z)
    step.batch.clear_unnamed(out)
    store_heads(core_out, out, step.b0, h0)
