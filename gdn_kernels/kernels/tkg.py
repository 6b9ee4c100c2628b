"""The recurrence as a kernel of its own: stages 3 to 5 on q, k, v, z, a and b that were projected elsewhere."""

import nki
import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.delta_rule import MOST_STATE_BYTES, StateRows, delta_rule, state_buffers
from gdn_kernels.kernels.finite import VALUE, clamp
from gdn_kernels.kernels.gated_norm import gate, normalise, store_heads
from gdn_kernels.kernels.gates import block_diagonal, gates_of, keys_of
from gdn_kernels.kernels.layout import BATCH_TILE, COLUMNS, FREE_COLUMNS, bank_columns, core_heads, layout_of, view
from gdn_kernels.kernels.parameters import load_parameters, parameter_column
from gdn_kernels.kernels.queues import load


@nki.jit
def gdn_tkg(q, k, v, b, a, A_log, dt_bias, z, norm_weight, state_in, norm_eps):
    """q, k [BH, K]; v, z [BH, V]; b, a [BH] fp32; A_log, dt_bias [Hv], norm_weight [V] fp32; state_in [BH, K, V] fp32
    -> out [BH, V] in the dtype of q, state_out fp32. BH = B * Hv, value head fastest; q and k one row a value head.
    """
    BH, K, V = state_in.shape
    Hv = A_log.shape[0]
    batch = BH // Hv
    out = nl.ndarray((BH, V), dtype=q.dtype, buffer=nl.shared_hbm)
    state_out = nl.ndarray((BH, K, V), dtype=nl.float32, buffer=nl.shared_hbm)
    cores, core = nl.num_programs(axes=0), nl.program_id(axis=0)
    mine = core_heads(Hv, 1, cores, core)  # every head brings its own q and k: gqa is 1
    layout = layout_of(Hv, 1, K, mine, cores, BATCH_TILE, FREE_COLUMNS)
    parameters = load_parameters(layout, A_log, dt_bias, norm_weight)
    buffers = state_buffers(layout, V, min(BATCH_TILE, batch), MOST_STATE_BYTES)
    for tile in range(mine.keys // layout.n):
        h0 = mine.first_key + tile * layout.n
        out_rows, states = out, state_out
        if (mine.repeats_key and tile == 0) or mine.shares_key:  # the other core writes this head
            out_rows = nl.ndarray(out.shape, dtype=q.dtype, buffer=nl.private_hbm)
            states = nl.ndarray(state_out.shape, dtype=nl.float32, buffer=nl.private_hbm)
        A_column = parameter_column(parameters.A_log, h0, layout.n)
        dt_column = parameter_column(parameters.dt_bias, h0, layout.n)
        for b0 in range(0, batch, BATCH_TILE):
            B = min(BATCH_TILE, batch - b0)
            lanes, wide = _key_lanes(q, k, layout, Hv, h0, b0, B), block_diagonal(layout, layout.G * B)
            keys = keys_of(lanes, wide, parameters.mask, parameters.identity, layout, K, V)
            a_rows = _head_rows(a, Hv, h0, layout.n, b0, B)
            b_rows = _head_rows(b, Hv, h0, layout.n, b0, B)
            gates = gates_of(a_rows, b_rows, A_column, dt_column, parameters.identity, layout, V)
            o = nl.ndarray((V, layout.n, B), dtype=nl.float32, buffer=nl.sbuf)
            delta_rule(
                o,
                _value_lanes(v, Hv, h0, layout.n, b0, B),
                keys,
                gates,
                parameters.identity,
                layout,
                StateRows(state_in.reshape((batch, Hv, K, V)), states.reshape((batch, Hv, K, V)), b0),
                h0,
                buffers,
            )
            normed = nl.ndarray(o.shape, dtype=q.dtype, buffer=nl.sbuf)
            normalise(o, parameters, norm_eps)
            gate(normed, o, [_value_lanes(z, Hv, h0, layout.n, b0, B)])
            store_heads(out_rows.reshape((batch, Hv * V)), normed, b0, h0)
    return out, state_out


def _key_lanes(q, k, layout, Hv, h0, b0, B):
    """Raw q and k of one head tile as [P, n, 2, B] fp32."""
    n, P = layout.n, layout.partitions()
    K = q.shape[1]
    lanes = nl.ndarray((P, n, 2, B), dtype=nl.float32, buffer=nl.sbuf)
    padded = bank_columns(B)
    for kind in range(2):
        source = k if kind == 1 else q
        rows = nl.ndarray((B, n * K), dtype=q.dtype, buffer=nl.sbuf)
        load(rows, source.reshape((q.shape[0] // Hv, Hv * K))[b0 : b0 + B, h0 * K : (h0 + n) * K])
        turned = nl.ndarray((P, n, padded), dtype=q.dtype, buffer=nl.psum)
        for s in range(n):
            lane_rows = view(rows, B, s, [[K, n], [n, layout.lanes]])  # [B, P]
            nisa.nc_transpose(dst=turned[:, s, 0:B], data=lane_rows)
        nisa.tensor_copy(dst=lanes[:, :, kind, :], src=turned[:, :, 0:B])
    return lanes


def _value_lanes(rows_of, Hv, h0, heads, b0, B):
    """Rows [BH, V] of a group's heads as columns [V, heads, B] fp32."""
    V = rows_of.shape[1]
    lanes = nl.ndarray((V, heads, B), dtype=nl.float32, buffer=nl.sbuf)
    at_once = COLUMNS // B
    for h in range(0, heads, at_once):
        count = min(at_once, heads - h)
        rows = nl.ndarray((count * B, V), dtype=rows_of.dtype, buffer=nl.sbuf)
        load(
            rows,
            rows_of.ap(pattern=[[V, count], [Hv * V, B], [1, V]], offset=(b0 * Hv + h0 + h) * V),
        )
        turned = nl.ndarray((V, count * B), dtype=rows_of.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=rows)  # [count * B, V] -> [V, count * B]
        clamp(lanes[:, h : h + count, :], turned, VALUE)
    return lanes


def _head_rows(values, Hv, h0, heads, b0, B):
    """Values [BH] of a group's heads with heads on partitions, [heads, B] fp32."""
    rows = nl.ndarray((B, heads), dtype=nl.float32, buffer=nl.sbuf)
    load(rows, values.reshape((values.shape[0] // Hv, Hv))[b0 : b0 + B, h0 : h0 + heads])
    turned = nl.ndarray((heads, B), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=rows)
    lanes = nl.ndarray((heads, B), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=lanes, src=turned)
    return lanes
