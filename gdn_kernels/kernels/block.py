"""The fused block: one GDN decode layer from hidden states to the input of the output projection, all in SBUF.

hidden -> in_proj -> conv1d -> gates -> delta_rule -> gated_norm -> core_out
"""

from dataclasses import dataclass

import nki
import nki.language as nl

from gdn_kernels.kernels.conv1d import conv1d, conv_columns, load_rows, row_tiles, store_rows
from gdn_kernels.kernels.delta_rule import StateBuffers, delta_rule, state_buffers
from gdn_kernels.kernels.gated_norm import gate, normalise, store_heads
from gdn_kernels.kernels.gates import gates_of, keys_of
from gdn_kernels.kernels.in_proj import (
    head_banks,
    hidden_columns,
    project_heads,
    project_keys,
    project_scalars,
    resident_weight,
    weight_ring,
)
from gdn_kernels.kernels.layout import COLUMNS, Layout, core_heads, group_of, plan_of, view
from gdn_kernels.kernels.parameters import Parameters, load_parameters, parameter_column
from gdn_kernels.kernels.rings import Ring


@dataclass
class Inputs(nl.NKIObject):
    """What the stages read from HBM; of the two small projections, their copies in SBUF."""

    W_in_qkv: nl.ndarray
    W_in_z: nl.ndarray
    W_in_a: nl.ndarray
    W_in_b: nl.ndarray
    conv_weight: nl.ndarray
    conv_state: nl.ndarray
    recurrent_state: nl.ndarray


@dataclass
class Step(nl.NKIObject):
    """One batch tile, sequences [b0, b0 + B): hidden as columns [128, R, B], the layout of its groups, the parameters,
    and the buffers that weights and states stream through."""

    columns: nl.ndarray
    b0: int
    B: int
    layout: Layout
    parameters: Parameters
    weights: Ring
    states: StateBuffers


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
):
    """One decode step of one GDN layer. Shapes are those of `gdn_kernels.gdn_block_tkg`.

    Returns core_out [B, 1, Hv * V], new_conv_state [B, conv_dim, K_win], new_recurrent_state [B, Hv, K, V].
    """
    batch, Hv, K, V = recurrent_state.shape
    Hk = (conv_state.shape[1] - Hv * V) // (2 * K)
    core_out = nl.ndarray((batch, 1, Hv * V), dtype=hidden.dtype, buffer=nl.shared_hbm)
    new_conv_state = nl.ndarray(conv_state.shape, dtype=hidden.dtype, buffer=nl.shared_hbm)
    new_state = nl.ndarray(recurrent_state.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    cores, core = nl.num_programs(axes=0), nl.program_id(axis=0)
    mine = core_heads(Hk, Hv // Hk, cores, core)
    plan = plan_of(Hk, Hv, K, V, hidden.shape[2], batch, hidden.dtype, mine, cores)
    layout = plan.layout
    parameters = load_parameters(layout, A_log, dt_bias, norm_weight)
    weights, states = weight_ring(hidden.dtype), state_buffers(layout, V, plan.B, plan.state_bytes)
    W_a, W_b = resident_weight(W_in_a), resident_weight(W_in_b)
    inputs = Inputs(W_in_qkv, W_in_z, W_a, W_b, conv_weight, conv_state, recurrent_state)
    for b0 in range(0, batch, plan.B):
        B = min(plan.B, batch - b0)
        step = Step(hidden_columns(hidden, b0, B), b0, B, layout, parameters, weights, states)
        normed = nl.ndarray((V, plan.groups, layout.heads(), B), dtype=nl.float32, buffer=nl.sbuf)
        for index in range(plan.groups):
            group = group_of(mine, layout, Hv // Hk, index)
            if group.opens:
                keys = _keys(step, inputs, _spare(new_conv_state, group.spare_keys), group.key_head)
            v = _values(step, inputs, _spare(new_conv_state, group.spare_values), group.h0)
            gates = _gates(step, inputs, group.h0, V)
            target = _spare(new_state, group.spare_values)
            here = normed[:, index, :, :]
            delta_rule(here, v, keys, gates, parameters.identity, layout, recurrent_state, target, b0, group.h0, states)
            normalise(here, parameters, norm_eps)
        # All of z last: its weights stream in while the last states are updated and leave.
        for index in range(plan.groups):
            group = group_of(mine, layout, Hv // Hk, index)
            rows = _spare(core_out, group.spare_values).reshape((batch, Hv * V))
            _finish(step, inputs, normed[:, index, :, :], rows, group.h0, index == plan.groups - 1)
    return core_out, new_conv_state, new_state


def _spare(output, spare):
    """The output itself, or memory nobody reads for a result that the other core writes."""
    return nl.ndarray(output.shape, dtype=output.dtype, buffer=nl.private_hbm) if spare else output


def _keys(step, inputs, new_conv_state, key_head):
    """Stages 1 to 3 for q and k of one group."""
    layout, b0, B = step.layout, step.b0, step.B
    n, G, P = layout.n, layout.G, layout.partitions()
    _, Hv, K, V = inputs.recurrent_state.shape
    conv_dim, taps = inputs.conv_weight.shape
    key_dim = (conv_dim - Hv * V) // 2
    acc = nl.ndarray((P, n, 2, G * B), dtype=nl.float32, buffer=nl.psum)
    for kind in range(2):
        c0 = kind * key_dim + key_head * K
        project_keys(acc, kind, inputs.W_in_qkv, c0, layout, step.columns, step.weights)
    # A row is a tile's channels of q or of k; rows by tile, then q and k, then sequence.
    width, tile = n * K * taps, key_head // n
    weight_rows = row_tiles(tile, G, 2, False, n, layout.lanes, taps, nl.float32)
    load_rows(weight_rows, inputs.conv_weight, [[key_dim * taps, 2], [1, width]], tile * width, width)
    rows = row_tiles(tile, G, 2 * B, False, n, layout.lanes, taps, inputs.conv_state.dtype)
    pattern, offset = [[key_dim * taps, 2], [conv_dim * taps, B], [1, width]], b0 * conv_dim * taps + tile * width
    load_rows(rows, inputs.conv_state, pattern, offset, width)
    c = nl.ndarray((P, n, 2, G * B), dtype=nl.float32, buffer=nl.sbuf)
    outputs, fresh = [], []
    for s in range(n):
        by_row = [[B, G], [G * B, 2], [1, B]]
        outputs.append(view(c, P, s * 2 * G * B, by_row))
        fresh.append(view(acc, P, s * 2 * G * B, by_row))
    moved = conv1d(outputs, rows, fresh, conv_columns(weight_rows), 0, B)
    store_rows(new_conv_state, moved, pattern, offset, width)
    return keys_of(c, step.parameters.mask, layout, K, V)


def _values(step, inputs, new_conv_state, h0):
    """Stages 1 and 2 for v of one group: [V, heads, B]."""
    b0, B, heads, G = step.b0, step.B, step.layout.heads(), step.layout.G
    _, Hv, _, V = inputs.recurrent_state.shape
    conv_dim, taps = inputs.conv_weight.shape
    c0, width = conv_dim - Hv * V + h0 * V, V * taps  # first channel; elements of a row, one head's channels
    accs = head_banks(heads, V, B)
    project_heads(accs, inputs.W_in_qkv, c0, heads, V, step.columns, step.weights, False)
    in_tile = heads // G
    weight_rows = row_tiles(h0 // heads, G, in_tile, True, 1, V, taps, nl.float32)
    load_rows(weight_rows, inputs.conv_weight, [[width, in_tile], [1, width]], c0 * taps, in_tile * width)
    weights = conv_columns(weight_rows)
    v = nl.ndarray((V, heads, B), dtype=nl.float32, buffer=nl.sbuf)
    per_bank = accs[0].shape[1]
    at_once = min(COLUMNS // B, per_bank)  # heads whose rows fit one transpose; with G > 1 all of them
    for h in range(0, heads, at_once):
        count = min(at_once, heads - h, per_bank - h % per_bank)
        rows = row_tiles((h0 + h) // at_once, G, count // G * B, True, 1, V, taps, inputs.conv_state.dtype)
        pattern = [[width, count // G], [conv_dim * taps, B], [1, width]]
        offset, apart = (b0 * conv_dim + c0 + h * V) * taps, count // G * width
        load_rows(rows, inputs.conv_state, pattern, offset, apart)
        fresh = accs[h // per_bank][:, h % per_bank : h % per_bank + count, :]
        moved = conv1d([v[:, h : h + count, :]], rows, [fresh], weights, h, B)
        store_rows(new_conv_state, moved, pattern, offset, apart)
    return v


def _gates(step, inputs, h0, V):
    """Stages 1 and 3 for decay and beta of one group."""
    heads, Hv = step.layout.heads(), inputs.recurrent_state.shape[1]
    a = nl.ndarray((heads, step.B), dtype=nl.float32, buffer=nl.psum)
    project_scalars(a, inputs.W_in_a, Hv, h0, heads, step.columns)
    b = nl.ndarray((heads, step.B), dtype=nl.float32, buffer=nl.psum)
    project_scalars(b, inputs.W_in_b, Hv, h0, heads, step.columns)
    A_log = parameter_column(step.parameters.A_log, h0, heads)
    dt_bias = parameter_column(step.parameters.dt_bias, h0, heads)
    return gates_of(a, b, A_log, dt_bias, step.parameters.identity, step.layout, V)


def _finish(step, inputs, normed, core_out, h0, last):
    """Stages 1 and 5 for z of one group: core_out [batch, Hv * V] of its heads."""
    V, heads, B = normed.shape
    z = head_banks(heads, V, B)
    project_heads(z, inputs.W_in_z, h0 * V, heads, V, step.columns, step.weights, last)
    out = nl.ndarray(normed.shape, dtype=core_out.dtype, buffer=nl.sbuf)
    gate(out, normed, z)
    store_heads(core_out, out, step.b0, h0)
