"""Allocations: the bytes of a tensor, which of them were written, and how much of a memory is live at once.

A `Storage` is one allocation in HBM, SBUF or PSUM. On chip its first dimension is the partition and every partition
holds the same contiguous row of bytes. Which bytes were written is kept exactly, so that a read of leftovers, which on
hardware may look right by luck, is an error here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.interpreter import hardware
from gdn_kernels.interpreter.rules import refuse, report

Shape = tuple[int, ...]

# What a PSUM element last saw. Only the Tensor engine accumulates, and only onto what it wrote itself.
EMPTY, OPEN, READ, PLAIN = range(4)


@dataclass(frozen=True)
class Buffer:
    """A memory space, as `nl.sbuf`, `nl.psum`, `nl.private_hbm` and `nl.shared_hbm` name it."""

    name: str
    on_chip: bool

    def __repr__(self) -> str:
        return f"nl.{self.name}"


SBUF = Buffer("sbuf", on_chip=True)
PSUM = Buffer("psum", on_chip=True)
PRIVATE_HBM = Buffer("private_hbm", on_chip=False)
SHARED_HBM = Buffer("shared_hbm", on_chip=False)


@dataclass(frozen=True)
class Allocation:
    """What a trace keeps of a storage: everything but its bytes. `line` is where the kernel allocated it."""

    id: int
    name: str
    buffer: Buffer
    shape: Shape
    dtype: np.dtype
    line: str

    @cached_property
    def row_bytes(self) -> int:
        """Bytes one partition holds (on chip), or all of them (HBM)."""
        return prod(self.shape[1:] if self.buffer.on_chip else self.shape) * self.dtype.itemsize

    @cached_property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass
class Lifetime:
    """When an allocation is in use: instruction numbers of the owning core. It is never used while last_use < 0.

    address: (partition, byte of the partition) where the kernel chose it, else None.
    """

    allocation: Allocation
    born: int
    last_use: int = -1
    address: tuple[int, int] | None = None


@dataclass
class Storage:
    """One allocation with its bytes.

    data: uint8 [bytes]; None in a dry launch, but for integers, which may be addresses. unit: the bytes that one entry
    of the next two stands for: an element, or the narrowest element it was ever seen as. unwritten: bool, True where
    nothing was written; None once all was.
    psum: int8 of EMPTY, OPEN, READ, PLAIN; None outside PSUM.
    """

    lifetime: Lifetime
    unit: int
    data: npt.NDArray[np.uint8] | None
    unwritten: npt.NDArray[np.bool_] | None = None
    psum: npt.NDArray[np.int8] | None = None

    @property
    def allocation(self) -> Allocation:
        return self.lifetime.allocation

    @classmethod
    def empty(cls, allocation: Allocation, born: int, dry: bool = False) -> "Storage":
        """Fresh memory: every float in it is NaN and no element counts as written."""
        elements, unit = prod(allocation.shape), allocation.dtype.itemsize
        data = None if dry and allocation.dtype.kind not in "iu" else np.full(elements * unit, 0xFF, np.uint8)
        psum = np.zeros(elements, np.int8) if allocation.buffer is PSUM else None
        return cls(Lifetime(allocation, born), unit, data, np.ones(elements, bool), psum)

    @classmethod
    def of_array(cls, allocation: Allocation, array: npt.NDArray[np.generic]) -> "Storage":
        """The caller's own memory as an HBM tensor; `array` is C-contiguous."""
        return cls(Lifetime(allocation, 0), allocation.dtype.itemsize, array.reshape(-1).view(np.uint8))

    @classmethod
    def stand_in(cls, allocation: Allocation) -> "Storage":
        """An argument of a dry launch."""
        return cls(Lifetime(allocation, 0), allocation.dtype.itemsize, None)

    def refine(self, unit: int) -> None:
        """Keep track of pieces of `unit` bytes, as the storage is about to be seen as so narrow a dtype."""
        pieces = self.unit // unit
        if self.unwritten is not None:
            self.unwritten = np.repeat(self.unwritten, pieces)
        if self.psum is not None:
            self.psum = np.repeat(self.psum, pieces)
        self.unit = unit


def check_on_chip(buffer: Buffer, shape: Shape, dtype: np.dtype, target: hardware.Target) -> None:
    """Refuse an on-chip shape that no partition layout can hold."""
    if len(shape) < 2:
        refuse("rank", f"shape {shape} has {len(shape)} dimension(s), at least 2 are needed", "ndarray", "shape")
    if not 1 <= shape[0] <= hardware.PARTITIONS:
        limit = hardware.PARTITIONS
        detail = f"{shape[0]} partitions, at most {limit}"
        refuse("partition-count", detail, "ndarray", "shape", limit=limit, found=shape[0])
    row = prod(shape[1:]) * dtype.itemsize
    limit = limit_of(buffer, target)
    if row > limit:
        detail = f"{row} bytes a partition, {buffer} has {limit}"
        report("capacity", detail, "ndarray", "shape", limit=limit, found=row)


def limit_of(buffer: Buffer, target: hardware.Target) -> int:
    """Bytes a partition that a program may use of an on-chip memory."""
    return target.sbuf_usable_bytes if buffer is SBUF else hardware.PSUM_BANKS * hardware.PSUM_BANK_BYTES


@dataclass(frozen=True)
class Occupancy:
    """Live bytes a partition over a program: `peak` of them when instruction `at` runs, held by `holders`, the largest
    first."""

    buffer: Buffer
    peak: int
    at: int
    holders: tuple[Allocation, ...]


def occupancy(lifetimes: Sequence[Lifetime], buffer: Buffer) -> Occupancy:
    """The peak of live bytes a partition; a tile lives from its allocation to its last use."""
    tiles = _used(lifetimes, buffer)
    live = usage(tiles, buffer).sum(axis=0)  # [instructions]
    at = int(live.argmax()) if live.size else 0
    holders = (tile.allocation for tile in tiles if tile.born <= at <= tile.last_use)
    return Occupancy(buffer, int(live.max(initial=0)), at, tuple(sorted(holders, key=lambda held: -footprint(held))))


def usage(lifetimes: Sequence[Lifetime], buffer: Buffer, sites: Sequence[str] | None = None) -> npt.NDArray[np.int64]:
    """Live bytes a partition as [sites, instructions]: of the tiles allocated at each of `sites` (file:line); without
    them, of all tiles together as [1, instructions]."""
    tiles = _used(lifetimes, buffer)
    rows = {site: row for row, site in enumerate(sites)} if sites is not None else {}
    length = max((tile.last_use + 2 for tile in tiles), default=1)
    changes = np.zeros((1 if sites is None else len(sites), length), np.int64)
    for tile in tiles:
        row, size = 0 if sites is None else rows[tile.allocation.line], footprint(tile.allocation)
        changes[row, tile.born] += size
        changes[row, tile.last_use + 1] -= size
    return changes.cumsum(axis=1)[:, :-1]


def _used(lifetimes: Sequence[Lifetime], buffer: Buffer) -> list[Lifetime]:
    return [life for life in lifetimes if life.allocation.buffer is buffer and life.last_use >= 0]


def footprint(allocation: Allocation) -> int:
    """Bytes a partition that a tile takes up: in PSUM whole banks, as a matmul destination may not cross one."""
    if allocation.buffer is PSUM:
        return -(-allocation.row_bytes // hardware.PSUM_BANK_BYTES) * hardware.PSUM_BANK_BYTES
    return allocation.row_bytes


def check_capacity(lifetimes: Sequence[Lifetime], target: hardware.Target, instructions: Sequence[Any]) -> None:
    """Refuse a program whose live tiles exceed SBUF or PSUM, naming the largest holders."""
    for buffer in (SBUF, PSUM):
        found, limit = occupancy(lifetimes, buffer), limit_of(buffer, target)
        safe = target.sbuf_safe_bytes if buffer is SBUF else limit
        if found.peak <= min(limit, safe):
            continue
        held = ", ".join(
            f"{held.name or 'tile'} {held.shape} {footprint(held)} B from {held.line}" for held in found.holders[:5]
        )
        rule, bound = ("capacity", limit) if found.peak > limit else ("capacity-safe", safe)
        file, number = instructions[found.at].line
        report(
            rule,
            f"{found.peak} bytes a partition of {buffer} are live, limit {bound}; largest: {held}",
            instructions[found.at].op,
            line=f"{file}:{number}",
            limit=bound,
            found=found.peak,
        )
