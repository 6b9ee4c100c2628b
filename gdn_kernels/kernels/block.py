"""The fused block: one GDN decode layer from hidden states to the input of the output projection, all in SBUF.

hidden -> in_proj -> conv1d -> gates -> delta_rule -> gated_norm -> core_out
"""

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.conv1d import conv1d, conv_columns
from gdn_kernels.kernels.delta_rule import delta_rule
from gdn_kernels.kernels.gated_norm import gated_norm, store_heads
from gdn_kernels.kernels.gates import gates_of, keys_of
from gdn_kernels.kernels.in_proj import (
    WeightRing,
    head_banks,
    hidden_columns,
    project_heads,
    project_scalars,
    project_tile,
    resident_weight,
    weight_ring,
)
from gdn_kernels.kernels.layout import BATCH_TILE, COLUMNS, Layout, core_heads, layout_of
from gdn_kernels.kernels.parameters import Parameters, load_parameters, parameter_column


@dataclass
class Step(nl.NKIObject):
    """What every stage of one batch tile reads: hidden as columns [128, R, B] of sequences [b0, b0 + B), the layout,
    the parameters, the ring that weights stream through."""

    columns: nl.ndarray
    b0: int
    B: int
    layout: Layout
    parameters: Parameters
    ring: WeightRing


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
    gqa = Hv // Hk
    core_out = nl.ndarray((batch, 1, Hv * V), dtype=hidden.dtype, buffer=nl.shared_hbm)
    new_conv_state = nl.ndarray(conv_state.shape, dtype=hidden.dtype, buffer=nl.shared_hbm)
    new_state = nl.ndarray(recurrent_state.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    cores, core = nl.num_programs(axes=0), nl.program_id(axis=0)
    mine = core_heads(Hk, gqa, cores, core)
    layout = layout_of(Hk, gqa, K, mine, cores)
    parameters = load_parameters(layout, A_log, dt_bias, norm_weight)
    ring = weight_ring(hidden.dtype)
    W_a, W_b = resident_weight(W_in_a), resident_weight(W_in_b)
    for b0 in range(0, batch, BATCH_TILE):
        B = min(BATCH_TILE, batch - b0)
        step = Step(hidden_columns(hidden, b0, B), b0, B, layout, parameters, ring)
        for tile in range(mine.keys // layout.n):
            key_head = mine.first_key + tile * layout.n
            repeated = mine.repeats_key and tile == 0
            windows = _spare(new_conv_state, repeated or mine.shares_key)
            keys = _keys(step, W_in_qkv, conv_weight, conv_state, windows, key_head, Hk, K, V)
            for t in range(0, mine.values, layout.T):
                h0 = key_head * gqa + mine.first_value + t
                spare = repeated or (mine.repeats_value and t == 0)
                windows = _spare(new_conv_state, spare)
                v = _values(step, W_in_qkv, conv_weight, conv_state, windows, 2 * Hk * K, h0, V)
                gates = _gates(step, W_a, W_b, h0, V)
                states = _spare(new_state, spare)
                o = delta_rule(v, keys, gates, parameters.identity, layout, recurrent_state, states, b0, h0)
                rows = _spare(core_out, spare).reshape((batch, Hv * V))
                _finish(step, W_in_z, o, rows, h0, norm_eps)
    return core_out, new_conv_state, new_state


def _spare(output, spare):
    """The output itself, or memory nobody reads for a result that the other core writes."""
    return nl.ndarray(output.shape, dtype=output.dtype, buffer=nl.private_hbm) if spare else output


def _keys(step, W_in_qkv, conv_weight, conv_state, new_conv_state, key_head, Hk, K, V):
    """Stages 1 to 3 for q and k of one head tile."""
    layout, b0, B = step.layout, step.b0, step.B
    n, P = layout.n, layout.partitions()
    conv_dim, taps = conv_weight.shape
    acc = nl.ndarray((P, n, 2, B), dtype=nl.float32, buffer=nl.psum)
    for kind in range(2):
        c0 = (kind * Hk + key_head) * K
        project_tile(acc, kind, W_in_qkv, c0, layout, step.columns, step.ring)
    width = n * K * taps  # one row: the tile's channels of q, or of k
    c0 = key_head * K * taps
    weight_rows = nl.ndarray((2, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=weight_rows, src=conv_weight.ap(pattern=[[Hk * K * taps, 2], [1, width]], offset=c0))
    weights = conv_columns(weight_rows, n, layout.lanes, taps)
    window_rows = [[Hk * K * taps, 2], [conv_dim * taps, B], [1, width]]
    c0 = b0 * conv_dim * taps + c0
    rows = nl.ndarray((2 * B, width), dtype=conv_state.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=conv_state.ap(pattern=window_rows, offset=c0))
    c = nl.ndarray((P, n, 2, B), dtype=nl.float32, buffer=nl.sbuf)
    outputs, fresh = [], []
    for s in range(n):
        outputs.append(c[:, s, :, :])
        fresh.append(acc[:, s, :, :])
    moved = conv1d(outputs, rows, fresh, weights, 0, B, n, layout.lanes, taps)
    nisa.dma_copy(dst=new_conv_state.ap(pattern=window_rows, offset=c0), src=moved)
    return keys_of(c, step.parameters.mask, layout, K, V)


def _values(step, W_in_qkv, conv_weight, conv_state, new_conv_state, first_channel, h0, V):
    """Stages 1 and 2 for v of one group: [V, heads, B]."""
    b0, B, heads = step.b0, step.B, step.layout.heads()
    conv_dim, taps = conv_weight.shape
    c0 = first_channel + h0 * V
    accs = head_banks(heads, V, B)
    project_heads(accs, W_in_qkv, c0, heads, V, step.columns, step.ring)
    weight_rows = nl.ndarray((heads, V * taps), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=weight_rows, src=conv_weight[c0 : c0 + heads * V, :].reshape((heads, V * taps)))
    weights = conv_columns(weight_rows, 1, V, taps)
    v = nl.ndarray((V, heads, B), dtype=nl.float32, buffer=nl.sbuf)
    per_bank = accs[0].shape[1]
    at_once = min(COLUMNS // B, per_bank)  # heads whose rows fit one transpose
    for h in range(0, heads, at_once):
        count = min(at_once, heads - h, per_bank - h % per_bank)
        window_rows = [[V * taps, count], [conv_dim * taps, B], [1, V * taps]]
        offset = (b0 * conv_dim + c0 + h * V) * taps
        rows = nl.ndarray((count * B, V * taps), dtype=conv_state.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows, src=conv_state.ap(pattern=window_rows, offset=offset))
        fresh = accs[h // per_bank][:, h % per_bank : h % per_bank + count, :]
        moved = conv1d([v[:, h : h + count, :]], rows, [fresh], weights, h, B, 1, V, taps)
        nisa.dma_copy(dst=new_conv_state.ap(pattern=window_rows, offset=offset), src=moved)
    return v


def _gates(step, W_a, W_b, h0, V):
    """Stages 1 and 3 for decay and beta of one group."""
    heads, Hv = step.layout.heads(), step.parameters.A_log.shape[1]
    a = nl.ndarray((heads, step.B), dtype=nl.float32, buffer=nl.psum)
    project_scalars(a, W_a, Hv, h0, heads, step.columns)
    b = nl.ndarray((heads, step.B), dtype=nl.float32, buffer=nl.psum)
    project_scalars(b, W_b, Hv, h0, heads, step.columns)
    A_log = parameter_column(step.parameters.A_log, h0, heads)
    dt_bias = parameter_column(step.parameters.dt_bias, h0, heads)
    return gates_of(a, b, A_log, dt_bias, step.parameters.identity, step.layout, V)


def _finish(step, W_in_z, o, core_out, h0, norm_eps):
    """Stages 1 and 5 for z of one group: core_out [batch, Hv * V] of its heads."""
    V, heads, B = o.shape
    z = head_banks(heads, V, B)
    project_heads(z, W_in_z, h0 * V, heads, V, step.columns, step.ring)
    normed = nl.ndarray(o.shape, dtype=core_out.dtype, buffer=nl.sbuf)
    gated_norm(normed, o, z, step.parameters, norm_eps)
    store_heads(core_out, normed, step.b0, h0)
