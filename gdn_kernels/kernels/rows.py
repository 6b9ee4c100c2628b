"""Conv windows and taps between HBM, where they are rows, and the engines, which want channels on partitions.

Where rows lie in SBUF decides which DMA engines move them: an engine serves 8 partitions.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.layout import MOST_ROWS, view
from gdn_kernels.kernels.rings import Ring, ring


@dataclass
class Rows(nl.NKIObject):
    """Conv taps or windows as they lie in HBM, a row a partition: the channels of a block one after the other,
    `taps` elements a channel. Channel j*K + n*i + s goes to lane (j, i), key row s.

    `blocks` times `count` rows, in partitions start + offset + block * spacing onwards. Engines read from `start`,
    which is legal for them, over `span` partitions; those between the blocks hold anything.
    """

    tile: nl.ndarray
    start: int
    offset: int
    spacing: int
    blocks: int
    count: int
    n: int
    lanes: int
    taps: int

    def span(self):
        return self.offset + (self.blocks - 1) * self.spacing + self.count

    def total(self):
        return self.blocks * self.count

    def block(self, block):
        """The rows of one block, for a DMA."""
        first = self.start + self.offset + block * self.spacing
        return self.tile[first : first + self.count, :]

    def everything(self):
        """All rows with the partitions between them, for an engine."""
        return self.tile[self.start : self.start + self.span(), :]

    def lane_taps(self, s, tap):
        """One tap of key row s of every lane, [span, n, lanes]."""
        n, lanes, taps = self.n, self.lanes, self.taps
        pattern = [[n * lanes * taps, n], [n * taps, lanes]]
        return view(self.tile, self.span(), s * taps + tap, pattern, self.start)

    def on(self, tile):
        """Rows in the same places of another tile."""
        return Rows(tile, self.start, self.offset, self.spacing, self.blocks, self.count, self.n, self.lanes, self.taps)


@dataclass
class RowBuffers(nl.NKIObject):
    """Where the windows of keys and of values are, the incoming and the new one in turn.

    They are kept for the whole kernel: a load into memory that other stages use in between would wait for them, and
    hold back the states behind it (modelled, Qwen3.5-35B-A3B, B = 64: 15 us)."""

    keys: Ring
    values: Ring


def row_buffers(n, K, V, taps, tiles, dtype):
    """tiles: Rows of values in a group."""
    keys = ring(2, (128, n * K * taps), dtype, "key_windows")
    values = ring(2 * min(tiles, MOST_ROWS), (128, V * taps), dtype, "value_windows")
    for tile in keys.buffers + values.buffers:
        clear(tile)
    return RowBuffers(keys, values)


def row_tile(elements, dtype):
    return nl.ndarray((128, elements), dtype=dtype, buffer=nl.sbuf)


def clear(tile):
    """Engines read the partitions between the blocks of Rows too, if for nothing: they must have been written."""
    nisa.memset(dst=tile, value=0.0, engine=nisa.engine.gpsimd)


def rows_in(tile, index, blocks, count, shift, n, lanes, taps):
    """Rows in a tile [128, n * n * lanes * taps], where they keep different DMA engines busy: an engine serves 8
    partitions, so rows that all started at partition 0 would keep one waiting for sixteen (modelled, Qwen3.5-35B-A3B,
    B = 1: 4 us).

    Small blocks spread over all partitions, past the first eight, where everything of one row is, and move on by eight
    with the index; from the middle of their share if `shift`. Larger ones lie side by side, from a quadrant or a half
    that moves on with the index.
    """
    start, offset, spacing = 0, 0, count
    if blocks > 2 or (blocks == 2 and count <= 16):
        spacing = max(count, 128 // blocks // 8 * 8)
        room = spacing - count
        if shift and count <= spacing // 2:
            offset = spacing // 2
            room = offset - count
        offset = offset + (index + 1) * 8 % (room // 8 * 8 + 8)
    elif blocks * count <= 32:
        start = index % 4 * 32
    elif blocks * count <= 64:
        start = index % 2 * 64
    return Rows(tile, start, offset, spacing, blocks, count, n, lanes, taps)
