"""Where heads live: on partitions, in groups, and on cores.

A *head tile* is `n` key heads side by side. Each takes `lanes = K / n` partitions and keeps `n` neighbouring key rows
on every one of them, so lane (j, i) holds rows n*i ... n*i + n-1 of head j. A state row is V fp32 values: with n = 4 a
partition's part of a state is one run of 2 KiB in HBM instead of four of 512 B (modelled: 96 % of a DMA engine's
peak instead of 75 %). The projection emits q and k in this order for free, by striding the stationary columns.

A *group* is `G` head tiles with `T` value heads for each of their key heads: key head I*n + j of the group, value head
(I*n + j)*T + t. A group walks through all stages before the next one starts, so SBUF holds one group, whatever the
number of heads.
"""

from dataclasses import dataclass

import nki.language as nl

BATCH_TILE = 64  # sequences at once: q and k of a group, 2 * 4 * 64 fp32 columns, fill one PSUM bank
GROUP_HEADS = 16  # value heads of a tile: 16 * 64 columns are two PSUM banks for v and two for z
FREE_COLUMNS = 64  # an instruction on so many columns takes no longer than on one
MANY_COLUMNS = (
    256,
    128,
    FREE_COLUMNS,
)  # for each head and sequence of a group, the more the better if states have room
CHUNK_COLUMNS = 2048  # weight columns loaded at once: one fp32 row of them fills a weight buffer
COLUMNS = 128  # rows or columns of one PE transpose
BANK = 512  # fp32 columns of one PSUM bank
BANK_BYTES = 2048
SBUF_BYTES = 192 * 1024  # a partition, what every document grants
CHUNK_BYTES = 8192  # of one weight transfer, a partition: 1 MiB in all
MOST_CHUNKS = 8  # in flight, where states leave room
LEAST_CHUNKS = 4
BLOCKS = 4  # of states in SBUF, where they fit: two loading, one being read, one updated
CHANGES = 8  # tiles of states under update
MOST_ROWS = 4  # tiles of value windows coming in, and as many going out


@dataclass
class Layout(nl.NKIObject):
    """n: key heads side by side, and key rows a partition. lanes: partitions a head. P = n * lanes = K.
    G: head tiles of a group. T: value heads of each of its key heads. classes: a sum over K is one of `classes * n`
    sums, each over one of the n rows of every classes-th lane; 1 but in a part of a layer (`summed_like`)."""

    n: int
    lanes: int
    G: int
    T: int
    classes: int

    def partitions(self):
        return self.n * self.lanes

    def heads(self):
        return self.G * self.n * self.T

    def keys(self):
        return self.G * self.n


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


def summed_like(layout, layer_Hk, gqa, K):
    """The layout of a part of a layer, with sums over K rounded as in the whole layer of `layer_Hk` key heads, whose
    head tile may be wider: a rank's states then have the bytes that they have there.

    Modelled, Qwen3.5 on four ranks and more: 0 to 8 % at B = 1, up to 23 % at 8 and 41 % at 32."""
    layout.classes = max(1, head_tile(layer_Hk, gqa, K) // layout.n)
    return layout


def destination(output, spare):
    """The output itself, or memory nobody reads for a result that the other core writes."""
    return nl.ndarray(output.shape, dtype=output.dtype, buffer=nl.private_hbm) if spare else output


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


def layout_of(Hk, gqa, K, mine, cores, B, columns):
    """The layout of every group of a core for B sequences. Groups are equal, and a repeated head is one of its own.

    Small batches take several tiles at once, up to `columns` for their heads and sequences: at B = 1 the whole layer
    goes through the gates and norms in one pass, which saves the fixed cost of some fifty instructions a tile
    (modelled, Qwen3.5-0.8B: 25 us of 84), and the waits between them (at B = 16: 33 us of 190)."""
    n = head_tile(Hk, gqa, K)
    T = gqa
    if n == 1:
        T = mine.values
        while T > GROUP_HEADS or mine.values % T != 0:
            T = T - 1
        if cores == 2 and Hk == 1 and gqa % 2 == 1:
            T = 1
    tiles, G = mine.keys // n, 1
    uneven = cores == 2 and Hk % 2 == 1
    if T == mine.values and not uneven:
        for more in range(2, tiles + 1):
            few = more * n * T * B <= columns and more * B <= BATCH_TILE
            if tiles % more == 0 and few and more * n * K <= CHUNK_COLUMNS:
                G = more
    return Layout(n, K // n, G, T, 1)


@dataclass
class Group(nl.NKIObject):
    """One group of a core: its first key head and value head, and its first head tile among those of the core. `opens`:
    its q and k are not those of the group before.
    `spare_keys`, `spare_values`: the other core writes the window of q and k, or all that belongs to value heads."""

    key_head: int
    h0: int
    tile: int
    opens: bool
    spare_keys: bool
    spare_values: bool


def group_of(mine, layout, gqa, index):
    of_keys = mine.values // layout.T  # groups that share q and k
    key, t = index // of_keys * layout.keys(), index % of_keys * layout.T
    repeated = mine.repeats_key and key == 0
    return Group(
        mine.first_key + key,
        (mine.first_key + key) * gqa + mine.first_value + t,
        key // layout.n,
        t == 0,
        repeated or mine.shares_key,
        repeated or (mine.repeats_value and t == 0),
    )


@dataclass
class Plan(nl.NKIObject):
    """How a core goes through its work: sequences in tiles of `B`, heads in `groups` groups of one layout, weights in
    flight in `chunks` buffers, and bytes of SBUF a partition for states in flight."""

    layout: Layout
    groups: int
    B: int
    chunks: int
    state_bytes: int


def plan_of(Hk, Hv, K, V, H, taps, batch, dtype, mine, cores):
    """The plan for a block. What bounds the batch tile is said here, once: q and k of a group fill a PSUM bank at 64
    sequences, and SBUF must hold a group's tiles beside the weights in flight and three sequences' states. Before the
    batch is cut, where every tile of it reads all weights, groups get smaller and fewer weights are in flight."""
    B = min(BATCH_TILE, batch)
    while True:
        for columns in MANY_COLUMNS:
            layout = layout_of(Hk, Hv // Hk, K, mine, cores, B, columns)
            groups = mine.keys // layout.keys() * (mine.values // layout.T)
            free = SBUF_BYTES - _other_bytes(layout, groups, Hv, K, V, H, taps, B, dtype)
            tile, chunks = layout.n * V * 4, MOST_CHUNKS
            of_sequence = layout.G * layout.T * tile
            wanted = CHANGES * tile + min(2 * BLOCKS, B) * of_sequence
            if free - chunks * CHUNK_BYTES >= wanted:
                return Plan(layout, groups, B, chunks, free - chunks * CHUNK_BYTES)
        while chunks > LEAST_CHUNKS and free - chunks * CHUNK_BYTES < wanted:
            chunks = chunks - 1
        state_bytes = free - chunks * CHUNK_BYTES
        if B == 1 or state_bytes >= CHANGES * tile + min(3, B) * of_sequence:
            return Plan(layout, groups, B, chunks, state_bytes)
        B = (B + 1) // 2


def _other_bytes(layout, groups, Hv, K, V, H, taps, B, dtype):
    """Bytes of SBUF a partition for everything but weights and states in flight."""
    # hidden, W_in_a, W_in_b; identity and parameters
    resident = H // 128 * (B + 2 * Hv) * itemsize(dtype) + 8 * 1024
    # some 6 tiles of a column for each head and sequence of a group, and one of every group that waits for its z;
    # before the first group, whole rows of hidden; and what tiles of many sizes leave between them
    working = max((6 + groups) * layout.heads() * B * 4, H * itemsize(dtype)) + 8 * 1024
    tiles = len(runs_of_heads(layout.heads(), B))
    return resident + working + row_buffer_bytes(layout.n, K, V, taps, tiles, dtype)


def row_buffer_bytes(n, K, V, taps, tiles, dtype):
    """Bytes a partition of `rows.row_buffers`."""
    return 2 * taps * (n * K + min(tiles, MOST_ROWS) * V) * itemsize(dtype)


def runs_of_heads(heads, B):
    """(first head, count) of neighbouring heads of [V, heads, B] whose columns fit one transpose and lie in one bank of
    `in_proj.head_banks`."""
    per_bank, runs, first = BANK // B, [], 0
    while first < heads:
        count = min(COLUMNS // B, heads - first, per_bank - first % per_bank)
        runs.append((first, count))
        first = first + count
    return runs


def view(tile, partitions, offset, pattern, start=0):
    """An access pattern [[stride, count], ...] over the free elements of a whole on-chip tile, on `partitions`
    partitions from `start`."""
    row = 1
    for size in tile.shape[1:]:
        row = row * size
    pairs = [[row, partitions]]
    pairs.extend(pattern)
    return tile.ap(pattern=pairs, offset=start * row + offset)


def bank_columns(columns):
    """The next power of two: tiles of so many columns, side by side in PSUM, never cross a bank, and in 16 bits two or
    more start on 4 bytes."""
    padded = 2
    while padded < columns:
        padded = padded * 2
    return padded


def itemsize(dtype):
    """Bytes of an element; a block is in bf16 or in fp32."""
    return 4 if dtype == nl.float32 else 2
