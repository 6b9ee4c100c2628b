"""Conv weights as columns, where the conv step wants them: loaded as rows and turned once, for all heads of a core."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.finite import TAP, clamp
from gdn_kernels.kernels.layout import COLUMNS, bank_columns, view
from gdn_kernels.kernels.queues import load_aside
from gdn_kernels.kernels.rows import clear, row_tile, rows_in

SPREAD = 16  # blocks of rows, each with a DMA engine of its own


@dataclass
class Taps(nl.NKIObject):
    """Of keys [P, n, 2 * head tiles, taps], q and k of a tile side by side; of values [V, 1, heads, taps]. fp32."""

    keys: nl.ndarray
    values: nl.ndarray


def key_taps(conv_weight, layout, key_head, keys, key_dim, K):
    """Taps of q and k of key heads [key_head, key_head + keys), [P, n, 2 * head tiles, taps]."""
    n, tiles, taps = layout.n, keys // layout.n, conv_weight.shape[1]
    width = n * K * taps  # a row is a tile's channels of q or of k
    columns = nl.ndarray((layout.partitions(), n, 2 * tiles, taps), dtype=nl.float32, buffer=nl.sbuf)
    for first in range(0, tiles, SPREAD):
        blocks = min(SPREAD, tiles - first)
        tile = row_tile(width, nl.float32)
        clear(tile)
        rows = rows_in(tile, 0, blocks, 2, False, n, layout.lanes, taps)
        for block in range(blocks):
            offset = (key_head // n + first + block) * width
            load_aside(rows.block(block), conv_weight.ap(pattern=[[key_dim * taps, 2], [1, width]], offset=offset))
        _turn(columns, 2 * first, rows)
    return columns


def head_taps(conv_weight, c0, heads, V, blocks):
    """Taps of `heads` heads of V channels from channel c0 onwards, [V, 1, heads, taps]. blocks: how many transfers, on
    other DMA engines each, share the work where that divides it evenly."""
    taps = conv_weight.shape[1]
    width = V * taps
    columns = nl.ndarray((V, 1, heads, taps), dtype=nl.float32, buffer=nl.sbuf)
    for first in range(0, heads, COLUMNS):
        some = min(COLUMNS, heads - first)
        shares = blocks if some % blocks == 0 else 1
        count = some // shares
        tile = row_tile(width, nl.float32)
        if shares > 1:
            clear(tile)
        rows = rows_in(tile, 0, shares, count, True, 1, V, taps)
        for block in range(shares):
            offset = c0 * taps + (first + block * count) * width
            load_aside(rows.block(block), conv_weight.ap(pattern=[[width, count], [1, width]], offset=offset))
        _turn(columns, first, rows)
    return columns


def _turn(columns, first, rows):
    """columns[:, :, first + r, :] = the taps of row r of `rows`, turned: [P, n, any number, taps] fp32."""
    n, taps, span, P, number = rows.n, rows.taps, rows.span(), rows.n * rows.lanes, columns.shape[2]
    padded = bank_columns(span)
    for s in range(n):
        turned = nl.ndarray((P, taps, padded), dtype=nl.float32, buffer=nl.psum)
        for tap in range(taps):
            nisa.nc_transpose(dst=turned[:, tap, 0:span], data=rows.lane_taps(s, tap))
        of_rows = view(columns, P, (s * number + first) * taps, [[1, taps], [taps, rows.total()]])
        clamp(
            of_rows, view(turned, P, rows.offset, [[padded, taps], [rows.spacing, rows.blocks], [1, rows.count]]), TAP
        )
