"""Which earlier instructions each instruction waits for: those whose bytes it reads or overwrites.

Within a tile or an HBM tensor the bytes are compared exactly. A tile that takes over another's place waits for the last
uses of everything that lay there. Every compute engine finishes its instructions in order, so of many on one engine the
latest stands for all. DMAs don't, not even of one queue: two of them may be moved by different DMA engines.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from gdn_kernels.interpreter.memory import PSUM, SBUF, Shape
from gdn_kernels.interpreter.trace import Instruction, Operand

Sequence = str | int  # what finishes in order: a compute engine, or a DMA, by its number, alone


@dataclass(frozen=True, slots=True)
class _Region:
    """Bytes of a tensor: partitions [p0, p1), bytes [first, end) of each, `dense` when all of these are meant."""

    p0: int
    p1: int
    first: int
    end: int
    dense: bool
    pattern: tuple[Shape, Shape, int, int]  # free shape, strides, offset, itemsize

    def overlaps(self, other: "_Region") -> bool:
        if self.p1 <= other.p0 or other.p1 <= self.p0 or self.end <= other.first or other.end <= self.first:
            return False
        if self.dense and other.dense:
            return True
        return _runs_overlap(self.pattern, other.pattern)

    def covers(self, other: "_Region") -> bool:
        inside = self.p0 <= other.p0 and other.p1 <= self.p1 and self.first <= other.first and other.end <= self.end
        return inside and (self.dense or self.pattern == other.pattern)


class _Access(NamedTuple):
    at: int  # the instruction's number
    sequence: Sequence
    region: _Region
    write: bool


@dataclass(slots=True)
class _Tensor:
    """The accesses to one allocation that a later one may have to wait for."""

    accesses: list[_Access] = field(default_factory=list)
    inherited: dict[Sequence, int] = field(default_factory=dict)  # last uses of what lay here before


def dependences(instructions: list[Instruction], places: dict[int, tuple[int, int]]) -> list[tuple[int, ...]]:
    """For every instruction the earlier ones it waits for: of each compute engine at most one."""
    tensors: dict[int, _Tensor] = {}
    memories: dict[str, _Tenants] = {SBUF.name: _Tenants(), PSUM.name: _Tenants()}
    # Nothing ever waits for reads of what no instruction writes: the arguments.
    written = {operand.allocation.id for instruction in instructions for operand in instruction.writes}
    result = []
    for index, instruction in enumerate(instructions):
        sequence = index if instruction.engine == "dma" else instruction.engine
        waits: dict[Sequence, int] = {}
        for operands, write in ((instruction.reads, False), (instruction.writes, True)):
            for operand in operands:
                allocation = operand.allocation
                if allocation.id not in written:
                    continue
                tensor = tensors.get(allocation.id)
                if tensor is None:
                    tensor = tensors[allocation.id] = _Tensor()
                    if allocation.id in places:
                        memories[allocation.buffer.name].move_in(tensor, *places[allocation.id])
                _meet(tensor, _Access(index, sequence, _region(operand), write), waits)
        waits.pop(sequence, None)
        result.append(tuple(sorted(waits.values())))
    return result


class _Tenants:
    """Which tensor has each part of a memory now."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._parts: list[tuple[int, _Tensor]] = []  # (end, tensor) of the part from each start on; none overlap

    def move_in(self, tensor: _Tensor, first: int, end: int) -> None:
        """Give [first, end) to `tensor`, which inherits the last uses of all that lay there."""
        low = bisect_right(self._starts, first)
        if low and self._parts[low - 1][0] > first:
            low -= 1
        high = bisect_left(self._starts, end)
        starts, parts = [first], [(end, tensor)]
        for start, (stop, other) in zip(self._starts[low:high], self._parts[low:high], strict=True):
            for index, sequence, _, _ in other.accesses:  # which come after all that `other` inherited
                _latest(tensor.inherited, sequence, index)
            if start < first:  # what sticks out of the new place is still the old tile's
                starts.insert(0, start)
                parts.insert(0, (first, other))
            if stop > end:
                starts.append(end)
                parts.append((stop, other))
        self._starts[low:high], self._parts[low:high] = starts, parts


def _meet(tensor: _Tensor, access: _Access, waits: dict[Sequence, int]) -> None:
    """Note what an access waits for, and keep it instead of those it stands for from now on: what a write covers, and
    reads of the same engine it covers."""
    index, sequence, region, write = access
    if write:
        for earlier_sequence, last in tensor.inherited.items():
            _latest(waits, earlier_sequence, last)
    kept = []
    for earlier in tensor.accesses:
        before, earlier_sequence, other, wrote = earlier
        same = other is region  # regions are made once, see _region_of
        if (write or wrote) and before != index and (same or other.overlaps(region)):
            _latest(waits, earlier_sequence, before)
        replaces = write or (not wrote and earlier_sequence == sequence)
        if not (replaces and (same or region.covers(other))):
            kept.append(earlier)
    kept.append(access)
    tensor.accesses = kept


def _latest(waits: dict[Sequence, int], sequence: Sequence, index: int) -> None:
    if waits.get(sequence, -1) < index:
        waits[sequence] = index


def _region(operand: Operand) -> _Region:
    return _region_of(
        operand.shape,
        operand.strides,
        operand.offset,
        operand.dtype.itemsize,
        operand.allocation.buffer.on_chip,
        operand.allocation.row_bytes,
    )


@lru_cache(maxsize=65536)
def _region_of(shape: Shape, strides: Shape, offset: int, size: int, on_chip: bool, row_bytes: int) -> _Region:
    p0, p1, start = 0, 1, offset
    if on_chip:
        p0, start = divmod(offset, row_bytes // size)
        p1, shape, strides = p0 + shape[0], shape[1:], strides[1:]
    start += sum(stride * (count - 1) for count, stride in zip(shape, strides, strict=True) if stride < 0)
    strides = tuple(map(abs, strides))  # the same bytes, counted upwards
    first = start * size
    reach = sum(stride * (count - 1) for count, stride in zip(shape, strides, strict=True))
    end = first + (reach + 1) * size
    distinct = prod(count for count, stride in zip(shape, strides, strict=True) if stride)
    return _Region(p0, p1, first, end, distinct == reach + 1, (shape, strides, start, size))


@lru_cache(maxsize=65536)
def _runs_overlap(left: tuple[Shape, Shape, int, int], right: tuple[Shape, Shape, int, int]) -> bool:
    """Whether two patterns share a byte: their contiguous runs, merged by position."""
    (a, a_run), (b, b_run) = _runs(*left), _runs(*right)
    a_end, b_end = a + a_run, b + b_run
    at = np.searchsorted(b, a, side="right")
    before = (at > 0) & (b_end[np.maximum(at - 1, 0)] > a)
    after = (at < len(b)) & (b[np.minimum(at, len(b) - 1)] < a_end)
    return bool((before | after).any())


def _runs(shape: Shape, strides: Shape, offset: int, size: int) -> tuple[np.ndarray, int]:
    """Sorted byte starts of the contiguous runs of a pattern, and their length."""
    run, dims = 1, [(c, s) for c, s in zip(shape, strides, strict=True) if c > 1 and s]
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    starts = np.array([offset])
    for count, stride in dims:
        starts = (starts[:, None] + np.arange(count) * stride).reshape(-1)
    return np.sort(starts) * size, run * size
