"""Stage 2, the causal conv step: the window moves on by one column, c = silu(sum over taps of window * conv_weight).

In HBM a channel's taps are neighbours: a channel-on-partition load would have runs of 8 bytes. So windows move as rows
(many channels a row) and are turned on PE, one tap at a time; column 0 of the incoming window is never touched.
"""

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.finite import TAP, clamp
from gdn_kernels.kernels.layout import COLUMNS, bank_columns, view
from gdn_kernels.kernels.queues import load, store
from gdn_kernels.kernels.rows import row_tile, rows_in
from gdn_kernels.kernels.taps import head_taps


@dataclass
class Span(nl.NKIObject):
    """Which elements of every sequence's window [conv_dim, taps] are the rows of each block: `count` neighbouring runs
    of `width` elements, from those of `starts` onwards."""

    starts: list
    count: int
    width: int


@dataclass
class WindowRows(nl.NKIObject):
    """Conv windows of sequences [b0, b0 + B) as rows of a batch: HBM [batch, conv_dim, taps], read from `source`,
    written to `target`. Rows in SBUF: the runs of a span one after the other, sequences fastest."""

    source: nl.ndarray
    target: nl.ndarray
    b0: int
    B: int

    def load(self, rows, span):
        for block in range(rows.blocks):
            load(rows.block(block), self._runs(self.source, span, block))

    def store(self, rows, span):
        for block in range(rows.blocks):
            store(self._runs(self.target, span, block), rows.block(block))

    def _runs(self, windows, span, block):
        """The rows of one block in HBM, [count, B, width]."""
        window = windows.shape[1] * windows.shape[2]
        pattern = [[span.width, span.count], [window, self.B], [1, span.width]]
        return windows.ap(pattern=pattern, offset=self.b0 * window + span.starts[block])


def conv1d(dst, rows, fresh, weights, first, B, tile):
    """One conv step for every row (channel block x sequence) of `rows`; returns the Rows of the new window.

    dst:     n views [P, rows] fp32, the convolved and silu'd channels, key row s in dst[s]
    rows:    Rows of the incoming window; sequences fastest
    fresh:   n PSUM views [P, rows] fp32, the new column
    weights: [P, n, channel blocks, taps], such as of `taps.Taps`; this call's begin at `first`
    tile:    for the new window, like that of `rows`

        window = concat(conv_state[..., 1:], round(fresh));   c = silu(sum over taps of window * conv_weight)
    """
    taps, total, span, P, dtype = rows.taps, rows.total(), rows.span(), rows.n * rows.lanes, rows.tile.dtype
    channels = rows.tile.shape[1]
    moved = rows.on(tile)
    # Shifting whole rows by one element moves every channel's taps on in one contiguous copy; the last tap of each
    # channel gets its neighbour's dead column and is overwritten below.
    shifted, old = moved.everything()[:, 0 : channels - 1], rows.everything()[:, 1:channels]
    nisa.tensor_copy(dst=shifted, src=old, engine=nisa.engine.gpsimd)
    newest = nl.ndarray((P, rows.n, span), dtype=dtype, buffer=nl.sbuf)
    if total < span:
        nisa.memset(dst=newest, value=0.0)
    for s in range(rows.n):
        window = nl.ndarray((P, total, taps), dtype=nl.float32, buffer=nl.psum)  # where Vector reads twice as fast
        _past_columns(window, rows, s)
        of_row = view(newest, P, s * span + rows.offset, [[rows.spacing, rows.blocks], [1, rows.count]])
        nisa.tensor_copy(dst=of_row, src=fresh[s], engine=nisa.engine.scalar)  # the contract's rounding of the window
        clamp(window[:, :, taps - 1], of_row, TAP)
        weighted = nl.ndarray((P, total, taps), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=weighted,
            data1=window,
            data2=view(weights, P, (s * weights.shape[2] + first) * taps, [[taps, total // B], [0, B], [1, taps]]),
            op=nl.multiply,
        )
        summed = nl.ndarray((P, total), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=summed, op=nl.add, data=weighted, axis=2)
        nisa.activation(dst=dst[s], op=nl.silu, data=summed)
        turned = nl.ndarray((span, P), dtype=dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=newest[:, s, :])  # [P, span] -> [span, P]
        nisa.tensor_copy(dst=moved.lane_taps(s, taps - 1), src=turned, engine=nisa.engine.scalar)
    return moved


def _past_columns(window, rows, s):
    """window[:, :, :-1] = taps 1 onwards of the incoming rows, as fp32 columns."""
    taps, span, P = rows.taps, rows.span(), rows.n * rows.lanes
    padded = bank_columns(span)
    past = nl.ndarray((P, taps - 1, padded), dtype=rows.tile.dtype, buffer=nl.psum)
    for tap in range(1, taps):
        nisa.nc_transpose(dst=past[:, tap - 1, 0:span], data=rows.lane_taps(s, tap))
    clamp(
        view(window, P, 0, [[1, taps - 1], [taps, rows.total()]]),
        view(past, P, rows.offset, [[padded, taps - 1], [rows.spacing, rows.blocks], [1, rows.count]]),
        TAP,
    )


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
        weights = head_taps(conv_weight, c0, 1, width, 1)
        for b0 in range(0, B, COLUMNS):
            _conv_block(targets, x, conv_state, weights, c0, width, b0, min(COLUMNS, B - b0))
    return out, new_conv_state


def _conv_block(targets, x, conv_state, weights, c0, width, b0, B):
    """Channels [c0, c0+width) of sequences [b0, b0+B)."""
    out, new_conv_state = targets
    batch, C, taps = conv_state.shape
    dtype = x.dtype
    rows = rows_in(row_tile(width * taps, dtype), 0, 1, B, False, 1, width, taps)
    state_rows = (batch, C * taps)
    load(rows.block(0), conv_state.reshape(state_rows)[b0 : b0 + B, c0 * taps : (c0 + width) * taps])
    x_rows = nl.ndarray((B, width), dtype=dtype, buffer=nl.sbuf)
    load(x_rows, x.reshape((batch, C))[b0 : b0 + B, c0 : c0 + width])
    fresh = nl.ndarray((width, B), dtype=dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=fresh, data=x_rows)  # [B, width] -> [width, B]
    c = nl.ndarray((width, B), dtype=nl.float32, buffer=nl.sbuf)
    moved = conv1d([c], rows, [fresh], weights, 0, B, row_tile(width * taps, dtype))
    store(new_conv_state.reshape(state_rows)[b0 : b0 + B, c0 * taps : (c0 + width) * taps], moved.block(0))
    rounded = nl.ndarray((width, B), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rounded, src=c)
    turned = nl.ndarray((B, width), dtype=dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=rounded)  # [width, B] -> [B, width]
    out_rows = nl.ndarray((B, width), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out_rows, src=turned)
    store(out.reshape((batch, C))[b0 : b0 + B, c0 : c0 + width], out_rows)


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
