"""Where heads live: on partitions, in groups, and on cores.

A *head tile* is `n` key heads side by side. Each takes `lanes = K / n` partitions and keeps `n` neighbouring key rows
on every one of them, so lane (j, i) holds rows n*i ... n*i + n-1 of head j. A state row is V fp32 values: with n = 4 a
partition's part of a state is one run of 2 KiB in HBM instead of four of 512 B (modelled: 96 % of a DMA engine's
peak instead of 75 %). The projection emits q and k in this order for free, by striding the stationary columns.

A *group* is a head tile with `T` value heads for each of its key heads: value head h = first + j*T + t. A group walks
through all stages before the next one starts, so SBUF holds one group, whatever the number of heads.
"""

from dataclasses import dataclass

import nki.language as nl

BATCH_TILE = 64  # sequences at once: q and k of a group, 2 * 4 * 64 fp32 columns, fill one PSUM bank
GROUP_HEADS = 16  # value heads a group: 16 * 64 columns are two PSUM banks for v and two for z
COLUMNS = 128  # rows or columns of one PE transpose
BANK = 512  # fp32 columns of one PSUM bank
BANK_BYTES = 2048


@dataclass
class Layout(nl.NKIObject):
    """n: key heads side by side, and key rows a partition. lanes: partitions a head. P = n * lanes = K.
    T: value heads of each key head in a group."""

    n: int
    lanes: int
    T: int

    def partitions(self):
        return self.n * self.lanes

    def heads(self):
        return self.n * self.T


@dataclass
class CoreHeads(nl.NKIObject):
    """The heads one core computes: key heads [first_key, first_key + keys), and of each the value heads
    [first_value, first_value + values).

    Both cores must run the same instructions, so when heads don't split evenly each takes the larger half, and the
    second core repeats the head in the middle: its results go to memory nobody reads, where `repeats_key` or
    `repeats_value` says so. `shares_key`: the second core of a single key head, whose window the first one writes.
    """

    first_key: int
    keys: int
    first_value: int
    values: int
    repeats_key: bool
    repeats_value: bool
    shares_key: bool


def head_tile(Hk, gqa, K):
    """Key heads side by side: the most of 4, 2, 1 that divide the heads of half a layer, so that one core and two use
    the same arithmetic and give the same bytes."""
    if Hk % 8 == 0 and K % 4 == 0 and 4 * gqa <= GROUP_HEADS:
        return 4
    if Hk % 4 == 0 and K % 2 == 0 and 2 * gqa <= GROUP_HEADS:
        return 2
    return 1


def core_heads(Hk, gqa, cores, core):
    """Split key heads with their value heads; with a single key head, its value heads."""
    second = core == 1
    if cores == 1:
        return CoreHeads(0, Hk, 0, gqa, False, False, False)
    if Hk > 1:
        keys = (Hk + 1) // 2
        return CoreHeads(core * (Hk - keys), keys, 0, gqa, second and Hk % 2 == 1, False, False)
    values = (gqa + 1) // 2
    return CoreHeads(0, 1, core * (gqa - values), values, False, second and gqa % 2 == 1, second)


def layout_of(Hk, gqa, K, mine, cores):
    """The layout of every group of a core. Groups are equal, and a repeated value head is a group of its own."""
    n = head_tile(Hk, gqa, K)
    T = gqa
    if n == 1:
        T = mine.values
        while T > GROUP_HEADS or mine.values % T != 0:
            T = T - 1
        if cores == 2 and Hk == 1 and gqa % 2 == 1:
            T = 1
    return Layout(n, K // n, T)


def view(tile, partitions, offset, pattern):
    """An access pattern over the free elements of a whole on-chip tile, from partition 0: [[stride, count], ...]."""
    row = 1
    for size in tile.shape[1:]:
        row = row * size
    pairs = [[row, partitions]]
    pairs.extend(pattern)
    return tile.ap(pattern=pairs, offset=offset)


def itemsize(dtype):
    """Bytes of an element; a block is in bf16 or in fp32."""
    return 4 if dtype == nl.float32 else 2
