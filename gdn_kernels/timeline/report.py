"""What a schedule says: totals, busy shares, the critical path by source line, idle gaps and their causes."""

from collections import defaultdict
from dataclasses import dataclass

from gdn_kernels.timeline.schedule import Schedule


@dataclass(frozen=True)
class Gap:
    """A queue that waits: from `start` for `length` ns, for an instruction at `cause` to end ("" at the start)."""

    queue: str
    start: float
    length: float
    cause: str


def source(schedule: Schedule, index: int) -> str:
    """Where an instruction was issued, as "file:line"."""
    file, line = schedule.instructions[index].line
    return f"{file.rsplit('/', 1)[-1]}:{line}"


def active(schedule: Schedule, queue: str) -> float:
    """ns in which a queue worked or a result of it was on its way, as a profiler counts an engine's active time."""
    total = reached = 0.0
    for span in schedule.spans:  # in order of start, as each queue runs in program order
        if span.queue == queue:
            total += max(0.0, span.end - max(reached, span.start))
            reached = max(reached, span.end)
    return total


def critical_path(schedule: Schedule) -> list[int]:
    """Instructions from the first to the one that ends last, each the reason the next one couldn't start earlier."""
    spans = schedule.spans
    if not spans:
        return []
    before: dict[int, int] = {}  # the previous instruction of the same queue
    last: dict[str, int] = {}
    for index, span in enumerate(spans):
        if span.queue in last:
            before[index] = last[span.queue]
        last[span.queue] = index
    index = max(range(len(spans)), key=lambda i: spans[i].end)
    path = [index]
    while True:
        earlier = spans[index].waited_for if spans[index].waited_for >= 0 else before.get(index, -1)
        if earlier < 0:
            return path[::-1]
        path.append(earlier)
        index = earlier


def path_by_line(schedule: Schedule) -> list[tuple[str, float, int]]:
    """(source line, ns of the critical path, instructions on it), the longest first. The parts add up to the total: an
    instruction counts from the end of the one before it on the path to its own."""
    time: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    reached = 0.0
    for index in critical_path(schedule):
        # A DMA ahead of its successor in the same queue holds it back until issued, not until it is done.
        until = max(reached, schedule.spans[index].end)
        name = source(schedule, index)
        time[name] += until - reached
        count[name] += 1
        reached = until
    return sorted(((name, ns, count[name]) for name, ns in time.items()), key=lambda row: -row[1])


def gaps(schedule: Schedule, most: int = 10) -> list[Gap]:
    """The longest times a queue stood still between two instructions, and what it was waiting for."""
    found = []
    free: dict[str, float] = defaultdict(float)
    for span in schedule.spans:
        if span.start > free[span.queue]:
            cause = source(schedule, span.waited_for) if span.waited_for >= 0 else ""
            found.append(Gap(span.queue, free[span.queue], span.start - free[span.queue], cause))
        free[span.queue] = span.issued
    return sorted(found, key=lambda gap: -gap.length)[:most]
