"""Stage 2, the causal conv step: the window moves on by one column, c = silu(sum over taps of window * conv_weight).

In HBM a channel's taps are neighbours: a channel-on-partition load would have runs of 8 bytes. So windows move as rows
(many channels a row) and are turned on PE, one tap at a time; column 0 of the incoming window is never touched.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.finite import TAP, clamp
from gdn_kernels.kernels.layout import COLUMNS, view


def conv_columns(rows, n, lanes, taps):
    """Conv weights as columns [P, n, rows, taps], of `rows` [rows, channels * taps] fp32: channel c = j*K + n*i + s of
    a row goes to partition (j, i), key row s."""
    count, P = rows.shape[0], n * lanes
    turned = nl.ndarray((P, n * taps, count), dtype=nl.float32, buffer=nl.psum)
    for s in range(n):
        for tap in range(taps):
            nisa.nc_transpose(dst=turned[:, s * taps + tap, :], data=_lanes(rows, count, n, lanes, taps, s, tap))
    columns = nl.ndarray((P, n, count, taps), dtype=nl.float32, buffer=nl.sbuf)
    for s in range(n):
        clamp(
            view(columns, P, s * count * taps, [[1, taps], [taps, count]]),
            turned[:, s * taps : (s + 1) * taps, :],
            TAP,
        )
    return columns


def conv1d(dst, rows, fresh, weights, first, B, n, lanes, taps):
    """One conv step for every row (channel block x sequence) of `rows`; returns the rows of the new window.

    dst:     n views [P, rows] fp32, the convolved and silu'd channels, key row s in dst[s]
    rows:    [rows, channels * taps], the incoming window; row = block * B + sequence
    fresh:   n PSUM views [P, rows] fp32, the new column
    weights: [P, n, blocks, taps] from conv_columns; this call uses blocks [first, first + rows / B)

        window = concat(conv_state[..., 1:], round(fresh));   c = silu(sum over taps of window * conv_weight)
    """
    count, P, dtype = rows.shape[0], n * lanes, rows.dtype
    channels = rows.shape[1]
    moved = nl.ndarray((count, channels), dtype=dtype, buffer=nl.sbuf)
    # Shifting whole rows by one element moves every channel's taps on in one contiguous copy; the last tap of each
    # channel gets its neighbour's dead column and is overwritten below.
    nisa.tensor_copy(dst=moved[:, 0 : channels - 1], src=rows[:, 1:channels], engine=nisa.engine.gpsimd)
    for s in range(n):
        window = nl.ndarray((P, count, taps), dtype=nl.float32, buffer=nl.sbuf)
        _past_columns(window, rows, n, lanes, taps, s)
        newest = nl.ndarray((P, count), dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=newest, src=fresh[s])  # the contract's rounding of the window
        clamp(window[:, :, taps - 1], newest, TAP)
        weighted = nl.ndarray((P, count, taps), dtype=nl.float32, buffer=nl.sbuf)
        blocks = weights.shape[2]
        nisa.tensor_tensor(
            dst=weighted,
            data1=window,
            data2=view(weights, P, (s * blocks + first) * taps, [[taps, count // B], [0, B], [1, taps]]),
            op=nl.multiply,
        )
        total = nl.ndarray((P, count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=total, op=nl.add, data=weighted, axis=2)
        nisa.activation(dst=dst[s], op=nl.silu, data=total)
        turned = nl.ndarray((count, P), dtype=dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=newest)  # [P, rows] -> [rows, P]
        nisa.tensor_copy(dst=_lanes(moved, count, n, lanes, taps, s, taps - 1), src=turned)
    return moved


def _past_columns(window, rows, n, lanes, taps, s):
    """window[:, :, :-1] = taps 1 onwards of the incoming rows, as fp32 columns."""
    count, P = rows.shape[0], n * lanes
    padded = count + count % 2  # a 16-bit PSUM write starts on 4 bytes
    past = nl.ndarray((P, taps - 1, padded), dtype=rows.dtype, buffer=nl.psum)
    for tap in range(1, taps):
        nisa.nc_transpose(dst=past[:, tap - 1, 0:count], data=_lanes(rows, count, n, lanes, taps, s, tap))
    clamp(view(window, P, 0, [[1, taps - 1], [taps, count]]), past[:, :, 0:count], TAP)


def _lanes(rows, count, n, lanes, taps, s, tap):
    """One tap of key row s of every lane, [rows, n, lanes], of rows [rows, n * (n * lanes) * taps]."""
    return view(rows, count, s * taps + tap, [[n * lanes * taps, n], [n * taps, lanes]])


@nki.jit
def gdn_conv1d_decode(x, conv_state, conv_weight):
    """The conv step alone: x [B, C, 1], conv_state [B, C, K_win], conv_weight [C, K_win] fp32 ->
    out [B, C, 1] (silu applied) and the new window [B, C, K_win], in the dtype of x."""
    B, C, taps = conv_state.shape
    out = nl.ndarray((B, C, 1), dtype=x.dtype, buffer=nl.shared_hbm)
    new_conv_state = nl.ndarray((B, C, taps), dtype=x.dtype, buffer=nl.shared_hbm)
    for block in _channel_blocks(C):
        c0, width, spare = block
        targets = (out, new_conv_state)
        if spare:  # an odd channel in the middle, which the first core writes
            targets = (
                nl.ndarray((B, C, 1), dtype=x.dtype, buffer=nl.private_hbm),
                nl.ndarray((B, C, taps), dtype=x.dtype, buffer=nl.private_hbm),
            )
        weight_row = nl.ndarray((1, width * taps), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=weight_row, src=conv_weight.reshape((1, C * taps))[:, c0 * taps : (c0 + width) * taps])
        weights = conv_columns(weight_row, 1, width, taps)
        for b0 in range(0, B, COLUMNS):
            _conv_block(targets, x, conv_state, weights, c0, width, b0, min(COLUMNS, B - b0))
    return out, new_conv_state


def _conv_block(targets, x, conv_state, weights, c0, width, b0, B):
    """Channels [c0, c0+width) of sequences [b0, b0+B)."""
    out, new_conv_state = targets
    batch, C, taps = conv_state.shape
    dtype = x.dtype
    rows = nl.ndarray((B, width * taps), dtype=dtype, buffer=nl.sbuf)
    state_rows = (batch, C * taps)
    nisa.dma_copy(dst=rows, src=conv_state.reshape(state_rows)[b0 : b0 + B, c0 * taps : (c0 + width) * taps])
    x_rows = nl.ndarray((B, width), dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_rows, src=x.reshape((batch, C))[b0 : b0 + B, c0 : c0 + width])
    fresh = nl.ndarray((width, B), dtype=dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=fresh, data=x_rows)  # [B, width] -> [width, B]
    c = nl.ndarray((width, B), dtype=nl.float32, buffer=nl.sbuf)
    moved = conv1d([c], rows, [fresh], weights, 0, B, 1, width, taps)
    nisa.dma_copy(dst=new_conv_state.reshape(state_rows)[b0 : b0 + B, c0 * taps : (c0 + width) * taps], src=moved)
    rounded = nl.ndarray((width, B), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rounded, src=c)
    turned = nl.ndarray((B, width), dtype=dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=rounded)  # [width, B] -> [B, width]
    out_rows = nl.ndarray((B, width), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out_rows, src=turned)
    nisa.dma_copy(dst=out.reshape((batch, C))[b0 : b0 + B, c0 : c0 + width], src=out_rows)


def _channel_blocks(C):
    """(first channel, width, spare) of this core's blocks of at most 128 channels. Both cores run the same blocks: of
    an odd number of channels the middle one is a block of its own, spare on the second core."""
    cores, core = nl.num_programs(axes=0), nl.program_id(axis=0)
    blocks = []
    mine = (C + cores - 1) // cores
    c0 = core * (C - mine)
    end = c0 + mine
    if cores == 2 and C % 2 == 1:
        blocks.append((c0, 1, core == 1))
        c0 = c0 + 1
    while c0 < end:
        width = min(128, end - c0)
        blocks.append((c0, width, False))
        c0 = c0 + width
    return blocks
