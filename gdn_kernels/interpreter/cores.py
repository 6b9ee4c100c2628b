"""Two cores of one launch: taking turns, meeting at barriers and exchanges, and what they must not do to each other.

The programs run in turn, each until it waits for the other or ends, so the order of everything is the same in every
run. The first core runs on the caller's thread and the second on one of its own; only ever one of them moves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from gdn_kernels.interpreter.memory import Storage
from gdn_kernels.interpreter.rules import refuse, report
from gdn_kernels.interpreter.tensor import NkiTensor
from gdn_kernels.interpreter.trace import Instruction, Operand, Trace


class Meeting(NamedTuple):
    """What a core waits with: the instruction and its line, what the other's must agree on, and what it brings."""

    op: str
    line: str
    agreed: tuple[Any, ...]
    brought: Any


class _Abandoned(BaseException):
    """Unwinds a program whose partner has failed."""


class Turns:
    """Strict hand-off between the programs of two cores."""

    def __init__(self) -> None:
        self._wake = threading.Semaphore(0), threading.Semaphore(0)
        self._ended = [False, False]
        self._waits: list[Meeting | None] = [None, None]
        self._received: list[Any] = [None, None]
        self._returned: list[Any] = [None, None]
        self._failure: BaseException | None = None

    def run(self, programs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run both programs to their ends and return what they returned; raises what the first to fail raised."""
        second = threading.Thread(target=self._second, args=(programs[1],), daemon=True)
        second.start()
        self._program(0, programs[0])
        second.join()
        if self._failure is not None:
            raise self._failure
        return self._returned

    def _second(self, program: Callable[[], Any]) -> None:
        self._wake[1].acquire()
        if self._failure is None:
            self._program(1, program)

    def _program(self, core: int, program: Callable[[], Any]) -> None:
        with suppress(_Abandoned):
            try:
                self._returned[core] = program()
            except Exception as error:
                self._failure = error
        self._ended[core] = True
        if not self._ended[1 - core]:
            self._wake[1 - core].release()

    def meet(self, core: int, mine: Meeting) -> Any:
        """Wait until the other core comes to the same meeting, and return what it brings."""
        other = 1 - core
        theirs = self._waits[other]
        if theirs is None:
            return self._wait(core, mine)
        if (theirs.op, theirs.agreed) != (mine.op, mine.agreed):
            here, there = _place(core, mine), _place(other, theirs)
            refuse("deadlock", f"{here} and {there} wait for each other but don't agree", mine.op)
        self._waits[other] = None
        self._received[other] = mine.brought
        return theirs.brought

    def _wait(self, core: int, mine: Meeting) -> Any:
        other = 1 - core
        self._waits[core] = mine
        if not self._ended[other]:
            self._wake[other].release()
            self._wake[core].acquire()
        if self._failure is not None:
            raise _Abandoned
        if self._waits[core] is not None:
            self._waits[core] = None
            refuse("deadlock", f"{_place(core, mine)} waits for core {other}, whose program has ended", mine.op)
        return self._received[core]


def _place(core: int, meeting: Meeting) -> str:
    agreed = ", ".join(map(str, meeting.agreed))
    return f"core {core} in {meeting.op}({agreed}) at {meeting.line}"


class Touch(NamedTuple):
    """One use of a shared HBM tensor: by which core, after how many barriers of any kind, and where in the kernel.

    `elements`: those of a view addressed at run time, as they were then; None for a view that says so itself.
    `written`: the bytes of a write; None in a dry launch.
    """

    core: int
    epoch: int
    writes: bool
    view: NkiTensor
    elements: np.ndarray | None
    line: tuple[str, int]
    written: bytes | None = None

    def paint(self, units: np.ndarray) -> None:
        """Set the entries of `units`, one for each unit of the storage, that this use touches."""
        if self.elements is None:
            self.view.over(units)[...] = True
        else:
            units.reshape(-1, self.view.dtype.itemsize // self.view.storage.unit)[self.elements] = True

    def meets(self, units: np.ndarray) -> bool:
        """Whether any entry that this use touches is set."""
        if self.elements is None:
            return bool(self.view.over(units).any())
        return bool(units.reshape(-1, self.view.dtype.itemsize // self.view.storage.unit)[self.elements].any())

    def span(self) -> tuple[int, int]:
        """The bytes [first, end) that it lies within."""
        size = self.view.dtype.itemsize
        if self.elements is not None:
            return int(self.elements.min()) * size, (int(self.elements.max()) + 1) * size
        reach = [stride * (count - 1) for stride, count in zip(self.view.strides, self.view.shape, strict=True)]
        first = self.view.base + sum(step for step in reach if step < 0)
        return first * size, (self.view.base + sum(step for step in reach if step > 0) + 1) * size


class SharedUse:
    """Who touched which bytes of shared HBM since the last barrier on each tensor, to find races.

    Between a write of one core and any use of the same byte by the other lies a barrier on that tensor. One on another
    tensor may do, as the cores did meet, but the documented barrier names the data it is for.
    """

    def __init__(self) -> None:
        self._touches: dict[int, list[Touch]] = {}

    def record(self, touch: Touch) -> None:
        self._touches.setdefault(id(touch.view.storage), []).append(touch)

    def barrier(self, storage: Storage) -> None:
        """Both cores have come to a barrier on this tensor."""
        _check_races(self._touches.pop(id(storage), []))

    def end(self) -> None:
        for touches in self._touches.values():
            _check_races(touches)


def _check_races(touches: list[Touch]) -> None:
    """Report the first pair of uses of one tensor that race."""
    for core in (0, 1):
        writes = [touch for touch in touches if touch.writes and touch.core == core]
        others = [touch for touch in touches if touch.core != core]
        if not writes or not others or not _spans_meet(writes, others):
            continue
        storage = writes[0].view.storage
        units = storage.allocation.bytes // storage.unit
        written = np.zeros(units, bool)
        for write in writes:
            write.paint(written)
        for other in others:
            if not other.meets(written):
                continue
            meeting = [write for write in writes if _share(write, other, units)]
            if not all(_same_bytes(write, other) for write in meeting):
                _report_race(meeting, other)
                return
            detail = f"core {meeting[0].core} writes {other.view!r} at {_line(meeting[0])}, core {other.core} the same"
            report("same-bytes", f"{detail} at {_line(other)}", line=_line(other))


def _spans_meet(left: list[Touch], right: list[Touch]) -> bool:
    """Whether the bytes that each side lies within overlap; it mostly spares looking at single ones."""
    (starts, ends), (other_starts, other_ends) = (zip(*(t.span() for t in side), strict=True) for side in (left, right))
    return min(starts) < max(other_ends) and min(other_starts) < max(ends)


def _same_bytes(write: Touch, other: Touch) -> bool:
    """Whether both cores write the same bytes to the same place, which leaves the same memory in any order."""
    places = [(touch.view.offset, touch.view.shape, touch.view.strides, touch.view.dtype) for touch in (write, other)]
    known = write.written is not None and write.elements is None and other.elements is None
    return other.writes and known and places[0] == places[1] and write.written == other.written


def _share(write: Touch, other: Touch, units: int) -> bool:
    written = np.zeros(units, bool)
    write.paint(written)
    return other.meets(written)


def _report_race(writes: list[Touch], other: Touch) -> None:
    same = [write for write in writes if write.epoch == other.epoch]
    write = (same or writes)[0]
    detail = (
        f"core {write.core} writes {write.view!r} at {_line(write)} and core {other.core} "
        f"{'writes' if other.writes else 'reads'} {other.view!r} at {_line(other)}"
    )
    if same:
        report("race", f"{detail}, with no barrier between", line=_line(other))
    else:
        report("race-barrier", f"{detail}; the barriers between are on other tensors", line=_line(other))


def _line(touch: Touch | Instruction) -> str:
    return f"{touch.line[0]}:{touch.line[1]}"


def check_streams(first: Trace, second: Trace) -> None:
    """Refuse two programs that differ in more than addresses and constants, at the first instruction that does."""
    pairs = zip(first.instructions, second.instructions, strict=False)
    for index, (one, two) in enumerate(pairs):
        if _kind(one) != _kind(two):
            detail = (
                f"instruction {index} of core 0 is {_description(one)} at {_line(one)}, "
                f"of core 1 {_description(two)} at {_line(two)}"
            )
            report("unequal-streams", detail, two.op, line=_line(two))
            return
    counts = len(first.instructions), len(second.instructions)
    if counts[0] != counts[1]:
        longer = first if counts[0] > counts[1] else second
        extra = longer.instructions[min(counts)]
        detail = (
            f"core 0 runs {counts[0]} instructions and core 1 {counts[1]}; only core {longer.core} has "
            f"{_description(extra)} at {_line(extra)}"
        )
        report("unequal-streams", detail, extra.op, line=_line(extra))


def _kind(instruction: Instruction) -> tuple[Any, ...]:
    operands = instruction.reads + instruction.writes
    return instruction.op, instruction.engine, instruction.options.get("op"), [(o.shape, o.dtype) for o in operands]


def _description(instruction: Instruction) -> str:
    def shapes(operands: Iterable[Operand]) -> str:
        return ", ".join(f"{list(operand.shape)} {operand.dtype}" for operand in operands)

    reads, writes = shapes(instruction.reads), shapes(instruction.writes)
    return f"{instruction.op} on {instruction.engine} of ({reads}) into ({writes})"
