"""Allocations: the bytes of a tensor, which of them were written, and how much of a memory is live at once.

A `Storage` is one allocation in HBM, SBUF or PSUM. On chip its first dimension is the partition and every partition
holds the same contiguous row of bytes. Which elements were written is kept exactly, so that a read of leftovers,
which on hardware may look right by luck, is an error here.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from gdn_kernels.interpreter import hardware
from gdn_kernels.interpreter.rules import refuse, warn

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

    @property
    def row_bytes(self) -> int:
        """Bytes one partition holds (on chip), or all of them (HBM)."""
        return prod(self.shape[1:] if self.buffer.on_chip else self.shape) * self.dtype.itemsize


@dataclass
class Lifetime:
    """When an allocation is in use: instruction numbers of the owning core. It is never used while last_use < 0."""

    allocation: Allocation
    born: int
    last_use: int = -1


@dataclass
class Storage:
    """One allocation with its bytes.

    data: uint8 [bytes]. unwritten: bool [elements], True where nothing was written; None once all was.
    psum: int8 [elements] of EMPTY, OPEN, READ, PLAIN; None outside PSUM.
    """

    lifetime: Lifetime
    data: npt.NDArray[np.uint8]
    unwritten: npt.NDArray[np.bool_] | None
    psum: npt.NDArray[np.int8] | None = None

    @property
    def allocation(self) -> Allocation:
        return self.lifetime.allocation

    @classmethod
    def empty(cls, allocation: Allocation, born: int) -> "Storage":
        """Fresh memory: every float in it is NaN and no element counts as written."""
        elements = prod(allocation.shape)
        data = np.full(elements * allocation.dtype.itemsize, 0xFF, np.uint8)
        psum = np.zeros(elements, np.int8) if allocation.buffer is PSUM else None
        return cls(Lifetime(allocation, born), data, np.ones(elements, bool), psum)

    @classmethod
    def of_array(cls, allocation: Allocation, array: npt.NDArray[np.generic]) -> "Storage":
        """The caller's own memory as an HBM tensor; `array` is C-contiguous."""
        return cls(Lifetime(allocation, 0), array.reshape(-1).view(np.uint8), None)


def check_on_chip(buffer: Buffer, shape: Shape, dtype: np.dtype) -> None:
    """Refuse an on-chip shape that no partition layout can hold."""
    if len(shape) < 2:
        refuse("rank", f"shape {shape} has {len(shape)} dimension(s), at least 2 are needed", "ndarray", "shape")
    if not 1 <= shape[0] <= hardware.PARTITIONS:
        refuse("partition-count", f"{shape[0]} partitions, at most {hardware.PARTITIONS}", "ndarray", "shape")
    row = prod(shape[1:]) * dtype.itemsize
    limit = hardware.PSUM_BANKS * hardware.PSUM_BANK_BYTES
    if buffer is PSUM and row > limit:
        refuse("capacity", f"{row} bytes a partition, PSUM has {limit}", "ndarray", "shape")


@dataclass(frozen=True)
class Occupancy:
    """Live bytes a partition over a program: `peak` of them when instruction `at` runs, held by `holders`."""

    buffer: Buffer
    peak: int
    at: int
    holders: tuple[Allocation, ...]


def occupancy(lifetimes: list[Lifetime], buffer: Buffer) -> Occupancy:
    """The peak of live bytes a partition; a tile lives from its allocation to its last use.

    PSUM is counted in whole banks, as a matmul destination may not cross one.
    """
    tiles = [life for life in lifetimes if life.allocation.buffer is buffer and life.last_use >= 0]
    changes: dict[int, int] = {}
    for tile in tiles:
        size = _footprint(tile.allocation)
        changes[tile.born] = changes.get(tile.born, 0) + size
        changes[tile.last_use + 1] = changes.get(tile.last_use + 1, 0) - size
    live = peak = at = 0
    for index in sorted(changes):
        live += changes[index]
        if live > peak:
            peak, at = live, index
    holders = tuple(t.allocation for t in tiles if t.born <= at <= t.last_use)
    return Occupancy(buffer, peak, at, holders)


def _footprint(allocation: Allocation) -> int:
    if allocation.buffer is PSUM:
        return -(-allocation.row_bytes // hardware.PSUM_BANK_BYTES) * hardware.PSUM_BANK_BYTES
    return allocation.row_bytes


def check_capacity(lifetimes: list[Lifetime], target: hardware.Target) -> None:
    """Refuse a program whose live tiles exceed SBUF or PSUM, naming the largest holders."""
    limits = ((SBUF, target.sbuf_usable_bytes), (PSUM, hardware.PSUM_BANKS * hardware.PSUM_BANK_BYTES))
    for buffer, limit in limits:
        found = occupancy(lifetimes, buffer)
        safe = target.sbuf_safe_bytes if buffer is SBUF else limit
        if found.peak <= min(limit, safe):
            continue
        largest = sorted(found.holders, key=lambda a: -a.row_bytes)[:5]
        held = ", ".join(f"{a.name or 'tile'} {a.shape} {a.row_bytes} B from {a.line}" for a in largest)
        detail = f"{found.peak} bytes a partition of {buffer} are live, limit {{}}; largest: {held}"
        if found.peak > limit:
            refuse("capacity", detail.format(limit))
        warn("capacity-safe", detail.format(safe))
