"""The block stage by stage: five kernels that meet in HBM, to show what fusion saves.

The arithmetic, the device functions and the rounding are those of the fused block, and so are the bytes of the results:
what passes through HBM is fp32, or has the dtype that the block rounds it to anyway. Each kernel is written to be good
at its one stage. What they pay for is a start and an end each, in which weights and states stand still, and the way of
everything between two stages to HBM and back.

    in_proj:    hidden -> q, k, v, z, a, b          conv1d:     q, k, v, conv_state -> q, k, v, new_conv_state
    gates:      q, k, a, b -> q, k, decays, beta    delta_rule: q, k, v, decays, beta, S -> o, new S
    gated_norm: o, z -> core_out
"""

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.conv1d import conv1d
from gdn_kernels.kernels.delta_rule import MOST_STATE_BYTES, StateRows, delta_rule, state_buffers
from gdn_kernels.kernels.finite import VALUE, clamp
from gdn_kernels.kernels.gated_norm import gate, normalise, store_heads
from gdn_kernels.kernels.gates import (
    Gates,
    Keys,
    block_diagonal,
    fill_block_diagonal,
    gates,
    l2norm,
    query_dot_key,
    to_key_lanes,
    to_value_lanes,
)
from gdn_kernels.kernels.in_proj import (
    head_banks,
    hidden_columns,
    project_heads,
    project_scalars,
    resident_weight,
    weight_ring,
)
from gdn_kernels.kernels.layout import (
    BATCH_TILE,
    COLUMNS,
    FREE_COLUMNS,
    GROUP_HEADS,
    MOST_CHUNKS,
    bank_columns,
    core_heads,
    destination,
    group_of,
    layout_of,
    view,
)
from gdn_kernels.kernels.parameters import head_mask, identity_matrix, parameter_column
from gdn_kernels.kernels.queues import load, load_aside, store
from gdn_kernels.kernels.rows import row_tile, rows_in
from gdn_kernels.kernels.taps import head_taps


@nki.jit
def in_proj_stage(hidden, W_in_qkv, W_in_z, W_in_a, W_in_b, Hk):
    """hidden [B, 1, H] -> q, k [B, Hk * K], v [B, Hv * V] in the dtype of hidden, as the conv window rounds them;
    z [B, Hv * V], a, b [B, Hv] fp32."""
    batch, Hv, value_dim = hidden.shape[0], W_in_a.shape[1], W_in_z.shape[1]
    key_dim = (W_in_qkv.shape[1] - value_dim) // 2
    q = nl.ndarray((batch, key_dim), dtype=hidden.dtype, buffer=nl.shared_hbm)
    k = nl.ndarray((batch, key_dim), dtype=hidden.dtype, buffer=nl.shared_hbm)
    v = nl.ndarray((batch, value_dim), dtype=hidden.dtype, buffer=nl.shared_hbm)
    z = nl.ndarray((batch, value_dim), dtype=nl.float32, buffer=nl.shared_hbm)
    a = nl.ndarray((batch, Hv), dtype=nl.float32, buffer=nl.shared_hbm)
    b = nl.ndarray((batch, Hv), dtype=nl.float32, buffer=nl.shared_hbm)
    weights = weight_ring(hidden.dtype, MOST_CHUNKS)
    W_a, W_b = resident_weight(W_in_a), resident_weight(W_in_b)
    for b0 in range(0, batch, BATCH_TILE):
        columns = hidden_columns(hidden, b0, min(BATCH_TILE, batch - b0))
        for heads in _heads_of_core(Hk, GROUP_HEADS):
            _project(q, W_in_qkv, 0, heads, key_dim // Hk, columns, weights, b0)
        for heads in _heads_of_core(Hk, GROUP_HEADS):
            _project(k, W_in_qkv, key_dim, heads, key_dim // Hk, columns, weights, b0)
        for heads in _heads_of_core(Hv, GROUP_HEADS):
            _project(v, W_in_qkv, 2 * key_dim, heads, value_dim // Hv, columns, weights, b0)
        for heads in _heads_of_core(Hv, COLUMNS):
            _project_scalars(a, W_a, heads, columns, b0)
            _project_scalars(b, W_b, heads, columns, b0)
        for heads in _heads_of_core(Hv, GROUP_HEADS):
            _project(z, W_in_z, 0, heads, value_dim // Hv, columns, weights, b0)
    return q, k, v, z, a, b


@nki.jit
def conv1d_stage(q, k, v, conv_state, conv_weight, Hk, Hv):
    """Raw q, k [B, Hk * K], v [B, Hv * V], conv_state [B, conv_dim, K_win], conv_weight [conv_dim, K_win] fp32 ->
    convolved q, k, v fp32 and new_conv_state."""
    new_conv_state = nl.ndarray(conv_state.shape, dtype=conv_state.dtype, buffer=nl.shared_hbm)
    parts, taps, c0 = ((q, Hk), (k, Hk), (v, Hv)), [], 0
    for part in parts:  # the taps of all heads first, so that windows need not wait for them
        raw, number = part
        for heads in _heads_of_core(number, GROUP_HEADS):
            width = raw.shape[1] // number
            taps.append(head_taps(conv_weight, c0 + heads.first * width, heads.count, width, 1))
        c0 = c0 + raw.shape[1]
    outputs, c0, done = [], 0, 0
    for part in parts:
        raw, number = part
        convolved = nl.ndarray(raw.shape, dtype=nl.float32, buffer=nl.shared_hbm)
        for heads in _heads_of_core(number, GROUP_HEADS):
            target, window = destination(convolved, heads.spare), destination(new_conv_state, heads.spare)
            _conv_heads(target, window, raw, conv_state, taps[done], c0, heads, raw.shape[1] // number)
            done = done + 1
        outputs.append(convolved)
        c0 = c0 + raw.shape[1]
    return outputs[0], outputs[1], outputs[2], new_conv_state


@nki.jit
def gates_stage(q, k, a, b, A_log, dt_bias, Hk):
    """Convolved q, k [B, Hk * K], raw a, b [B, Hv], A_log, dt_bias [Hv], all fp32 -> normalised q, k; decay_beta
    [Hv, 2, B] of exp(g) and beta; split [Hv, 2, B] of e and c, exp(g) = c + e (see `gates.gates`)."""
    batch, Hv, K = a.shape[0], a.shape[1], q.shape[1] // Hk
    normed_q = nl.ndarray(q.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    normed_k = nl.ndarray(k.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    decay_beta = nl.ndarray((Hv, 2, batch), dtype=nl.float32, buffer=nl.shared_hbm)
    split = nl.ndarray((Hv, 2, batch), dtype=nl.float32, buffer=nl.shared_hbm)
    mine = core_heads(Hk, Hv // Hk, nl.num_programs(axes=0), nl.program_id(axis=0))
    layout = layout_of(Hk, Hv // Hk, K, mine, nl.num_programs(axes=0), min(BATCH_TILE, batch), FREE_COLUMNS)
    mask = head_mask(identity_matrix(), layout)
    A_row, dt_row = _parameter_row(A_log), _parameter_row(dt_bias)
    for b0 in range(0, batch, BATCH_TILE):
        B = min(BATCH_TILE, batch - b0)
        for index in range(_groups(mine, layout)):
            group = group_of(mine, layout, Hv // Hk, index)
            if group.opens:
                c = _key_lanes(q, k, layout, group.key_head, b0, B)
                l2norm(c, mask, layout, K)
                _store_key_lanes(destination(normed_q, group.spare_keys), c, 0, layout, group.key_head, b0, B)
                _store_key_lanes(destination(normed_k, group.spare_keys), c, 1, layout, group.key_head, b0, B)
            heads = layout.heads()
            here = gates(
                _scalar_lanes(a, group.h0, heads, b0, B),
                _scalar_lanes(b, group.h0, heads, b0, B),
                parameter_column(A_row, group.h0, heads),
                parameter_column(dt_row, group.h0, heads),
            )
            rows, columns = slice(group.h0, group.h0 + heads), slice(b0, b0 + B)
            store(destination(decay_beta, group.spare_values)[rows, :, columns], here[0])
            store(destination(split, group.spare_values)[rows, :, columns], here[1])
    return normed_q, normed_k, decay_beta, split


@nki.jit
def delta_rule_stage(q, k, v, decay_beta, split, recurrent_state):
    """Normalised q, k [B, Hk * K], convolved v [B, Hv * V], decay_beta, split [Hv, 2, B], recurrent_state
    [B, Hv, K, V], all fp32 -> o [B, Hv * V] fp32, new_recurrent_state."""
    batch, Hv, K, V = recurrent_state.shape
    Hk = q.shape[1] // K
    o = nl.ndarray(v.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    new_state = nl.ndarray(recurrent_state.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    mine = core_heads(Hk, Hv // Hk, nl.num_programs(axes=0), nl.program_id(axis=0))
    layout = layout_of(Hk, Hv // Hk, K, mine, nl.num_programs(axes=0), min(BATCH_TILE, batch), FREE_COLUMNS)
    identity = identity_matrix()
    mask = head_mask(identity, layout)
    buffers = state_buffers(layout, V, min(BATCH_TILE, batch), MOST_STATE_BYTES)
    for b0 in range(0, batch, BATCH_TILE):
        B = min(BATCH_TILE, batch - b0)
        for index in range(_groups(mine, layout)):
            group = group_of(mine, layout, Hv // Hk, index)
            if group.opens:
                c = _key_lanes(q, k, layout, group.key_head, b0, B)
                wide = block_diagonal(layout, layout.G * B)
                fill_block_diagonal(wide, c, mask, layout)
                keys = Keys(c, wide, query_dot_key(c, mask, identity, layout, V))
            heads = layout.heads()
            decays, splits = _gate_lanes(decay_beta, group.h0, heads, b0, B), _gate_lanes(split, group.h0, heads, b0, B)
            lanes = Gates(to_value_lanes(decays, identity, V), to_key_lanes(splits, identity, layout))
            values = _value_lanes(v, V, group.h0, heads, b0, B)
            read = nl.ndarray((V, heads, B), dtype=nl.float32, buffer=nl.sbuf)
            states = destination(new_state, group.spare_values)
            rows = StateRows(recurrent_state, states, b0)
            delta_rule(read, values, keys, lanes, identity, layout, rows, group.h0, buffers)
            store_heads(destination(o, group.spare_values), read, b0, group.h0)
    return o, new_state


@nki.jit
def gated_norm_stage(o, z, norm_weight, norm_eps, dtype):
    """o, z [B, Hv * V], norm_weight [V], all fp32 -> core_out [B, 1, Hv * V] of `dtype`."""
    batch, V = o.shape[0], norm_weight.shape[0]
    core_out = nl.ndarray((batch, 1, o.shape[1]), dtype=dtype, buffer=nl.shared_hbm)
    ones = nl.ndarray((V, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    parameters = NormParameters(ones, parameter_column(_parameter_row(norm_weight), 0, V))
    for b0 in range(0, batch, BATCH_TILE):
        B = min(BATCH_TILE, batch - b0)
        for heads in _heads_of_core(o.shape[1] // V, GROUP_HEADS):
            normed = _value_lanes(o, V, heads.first, heads.count, b0, B)
            normalise(normed, parameters, norm_eps)
            out = nl.ndarray(normed.shape, dtype=dtype, buffer=nl.sbuf)
            gate(out, normed, [_value_lanes(z, V, heads.first, heads.count, b0, B)])
            store_heads(destination(core_out, heads.spare).reshape(o.shape), out, b0, heads.first)
    return core_out


@dataclass
class NormParameters(nl.NKIObject):
    """What `normalise` needs: columns [V, 1] of ones and of the gain."""

    ones: nl.ndarray
    gain: nl.ndarray


@dataclass
class Heads(nl.NKIObject):
    """Heads [first, first + count). `spare`: the other core writes their results."""

    first: int
    count: int
    spare: bool


def _heads_of_core(number, most):
    """This core's share of `number` heads, at most `most` at a time. Both cores run the same instructions: an odd head
    in the middle is computed by both, and spare on the second."""
    cores, core = nl.num_programs(axes=0), nl.program_id(axis=0)
    count = (number + cores - 1) // cores
    first, runs = core * (number - count), []
    if count * cores > number:
        runs.append(Heads(first, 1, core == 1))
        first, count = first + 1, count - 1
    for h in range(0, count, most):
        runs.append(Heads(first + h, min(most, count - h), False))
    return runs


def _groups(mine, layout):
    return mine.keys // layout.keys() * (mine.values // layout.T)


def _project(target, weight, c0, heads, width, columns, weights, b0):
    """Heads of q, k, v or z, `width` columns each, from weight column c0 onwards, into rows of `target`."""
    B = columns.shape[2]
    accs = head_banks(heads.count, width, B)
    project_heads(accs, weight, c0 + heads.first * width, heads.count, width, columns, weights, False)
    out = nl.ndarray((width, heads.count, B), dtype=target.dtype, buffer=nl.sbuf)
    h = 0
    for acc in accs:
        nisa.tensor_copy(dst=out[:, h : h + acc.shape[1], :], src=acc)
        h = h + acc.shape[1]
    store_heads(destination(target, heads.spare), out, b0, heads.first)


def _project_scalars(target, weight, heads, columns, b0):
    """a or b of some heads into rows of `target` [batch, Hv]."""
    B = columns.shape[2]
    acc = nl.ndarray((heads.count, B), dtype=nl.float32, buffer=nl.psum)
    project_scalars(acc, weight, target.shape[1], heads.first, heads.count, columns)
    out = nl.ndarray((heads.count, B), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out, src=acc)
    turned = nl.ndarray((B, heads.count), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=out)
    rows = nl.ndarray((B, heads.count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rows, src=turned)
    store(destination(target, heads.spare)[b0 : b0 + B, heads.first : heads.first + heads.count], rows)


def _conv_heads(target, window, raw, conv_state, weights, c0, heads, width):
    """The conv step of some heads of q, k or v, whose channels begin at c0 of the window."""
    batch, conv_dim, taps = conv_state.shape
    channel, run = c0 + heads.first * width, width * taps
    for b0 in range(0, batch, BATCH_TILE):
        B = min(BATCH_TILE, batch - b0)
        c = nl.ndarray((width, heads.count, B), dtype=nl.float32, buffer=nl.sbuf)
        at_once = COLUMNS // B
        for h in range(0, heads.count, at_once):
            count = min(at_once, heads.count - h)
            tile = row_tile(run, conv_state.dtype)
            rows = rows_in(tile, h // at_once, 1, count * B, True, 1, width, taps)
            pattern = [[run, count], [conv_dim * taps, B], [1, run]]
            offset = (b0 * conv_dim + channel + h * width) * taps
            load(rows.block(0), conv_state.ap(pattern=pattern, offset=offset))
            fresh = _turned_heads(raw, width, heads.first + h, count, b0, B)
            moved = conv1d([c[:, h : h + count, :]], rows, [fresh], weights, h, B, row_tile(run, conv_state.dtype))
            store(window.ap(pattern=pattern, offset=offset), moved.block(0))
        store_heads(target, c, b0, heads.first)


def _turned_heads(source, width, h0, heads, b0, B):
    """Rows [batch, number * width] of some heads with channels on partitions, in PSUM: [width, heads * B], at most 128
    columns."""
    row = source.shape[1]
    rows = nl.ndarray((heads * B, width), dtype=source.dtype, buffer=nl.sbuf)
    load(rows, source.ap(pattern=[[width, heads], [row, B], [1, width]], offset=b0 * row + h0 * width))
    turned = nl.ndarray((width, heads * B), dtype=source.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=rows)  # [heads * B, width] -> [width, heads * B]
    return turned


def _value_lanes(source, V, h0, heads, b0, B):
    """Rows [batch, Hv * V] of some heads as columns [V, heads, B] fp32."""
    lanes = nl.ndarray((V, heads, B), dtype=nl.float32, buffer=nl.sbuf)
    at_once = COLUMNS // B
    for h in range(0, heads, at_once):
        count = min(at_once, heads - h)
        clamp(lanes[:, h : h + count, :], _turned_heads(source, V, h0 + h, count, b0, B), VALUE)
    return lanes


def _key_lanes(q, k, layout, key_head, b0, B):
    """Rows q, k [batch, Hk * K] of one group as lanes [P, n, 2, G * B] fp32: lane p, key row s is column n*p + s of a
    head tile."""
    n, G, P = layout.n, layout.G, layout.partitions()
    width = n * P  # a head tile's channels
    lanes = nl.ndarray((P, n, 2, G * B), dtype=nl.float32, buffer=nl.sbuf)
    padded = bank_columns(B)
    for kind in range(2):
        source = k if kind == 1 else q
        rows = nl.ndarray((B, G * width), dtype=nl.float32, buffer=nl.sbuf)
        c0 = key_head * P
        load(rows, source[b0 : b0 + B, c0 : c0 + G * width])
        turned = nl.ndarray((P, n, G, padded), dtype=nl.float32, buffer=nl.psum)
        for s in range(n):
            for tile in range(G):
                row_lanes = view(rows, B, tile * width + s, [[n, P]])
                nisa.nc_transpose(dst=turned[:, s, tile, 0:B], data=row_lanes)  # [B, P] -> [P, B]
        of_kind = view(lanes, P, kind * G * B, [[2 * G * B, n], [B, G], [1, B]])
        nisa.tensor_copy(dst=of_kind, src=turned[:, :, :, 0:B])
    return lanes


def _store_key_lanes(target, lanes, kind, layout, key_head, b0, B):
    """The way back of `_key_lanes` for q (kind 0) or k (kind 1)."""
    n, G, P = layout.n, layout.G, layout.partitions()
    width, padded = n * P, bank_columns(P)
    rows = nl.ndarray((B, G * width), dtype=nl.float32, buffer=nl.sbuf)
    for tile in range(G):
        turned = nl.ndarray((B, n, padded), dtype=nl.float32, buffer=nl.psum)
        for s in range(n):
            nisa.nc_transpose(dst=turned[:, s, 0:P], data=lanes[:, s, kind, tile * B : (tile + 1) * B])
        nisa.tensor_copy(dst=view(rows, B, tile * width, [[1, n], [n, P]]), src=turned[:, :, 0:P])
    store(target[b0 : b0 + B, key_head * P : key_head * P + G * width], rows)


def _scalar_lanes(source, h0, heads, b0, B):
    """Rows [batch, Hv] of some heads with heads on partitions, [heads, B] fp32."""
    rows = nl.ndarray((B, heads), dtype=nl.float32, buffer=nl.sbuf)
    load(rows, source[b0 : b0 + B, h0 : h0 + heads])
    turned = nl.ndarray((heads, B), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=rows)
    return turned


def _gate_lanes(source, h0, heads, b0, B):
    """Some heads and sequences of decay_beta or split, [heads, 2, B]."""
    tile = nl.ndarray((heads, 2, B), dtype=nl.float32, buffer=nl.sbuf)
    load(tile, source[h0 : h0 + heads, :, b0 : b0 + B])
    return tile


def _parameter_row(parameter):
    """A 1-D HBM parameter as a row [1, N]."""
    row = nl.ndarray((1, parameter.shape[0]), dtype=nl.float32, buffer=nl.sbuf)
    load_aside(row, parameter.reshape(row.shape))
    return row
