"""The 16 DMA engines of a core: packets from several queues, taken in turn.

Within a queue transfers run in order. Engines that have had the same work so far are simulated as one.
"""

from collections import deque
from dataclasses import dataclass, field

from gdn_kernels.interpreter.descriptors import ENGINES, Packets
from gdn_kernels.timeline.costs import Costs, packet_time


@dataclass
class _Job:
    """One transfer's part on one engine."""

    transfer: int
    packets: float
    time: float  # ns a packet


@dataclass
class _Engines:
    """Engines with the same history: their queues, the time they are simulated up to, when they worked."""

    members: tuple[int, ...]
    queues: dict[str, deque[_Job]] = field(default_factory=dict)
    now: float = 0.0
    busy: list[tuple[float, float]] = field(default_factory=list)

    def split(self, members: tuple[int, ...]) -> "_Engines":
        queues = {name: deque(_Job(j.transfer, j.packets, j.time) for j in jobs) for name, jobs in self.queues.items()}
        return _Engines(members, queues, self.now, list(self.busy))

    def next_end(self) -> float | None:
        """When the next transfer leaves, if none arrives: queues take turns, one packet each."""
        heads = [jobs[0] for jobs in self.queues.values() if jobs]
        if not heads:
            return None
        round_time = sum(job.time for job in heads)
        return self.now + min(job.packets for job in heads) * round_time

    def advance(self, time: float) -> list[int]:
        """Work until `time`, no further than the next end; returns the transfers that left."""
        heads = [jobs[0] for jobs in self.queues.values() if jobs]
        if heads:
            rounds = (time - self.now) / sum(job.time for job in heads)
            if self.busy and self.busy[-1][1] == self.now:
                self.busy[-1] = (self.busy[-1][0], time)
            else:
                self.busy.append((self.now, time))
            for job in heads:
                job.packets -= rounds
        self.now = time
        left = [jobs.popleft().transfer for jobs in self.queues.values() if jobs and jobs[0].packets <= 1e-9]
        return left


class DmaEngines:
    """Simulates transfers that arrive in time order."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.groups = [_Engines(tuple(range(ENGINES)))]
        self.parts: dict[int, int] = {}  # engine groups that still work on a transfer

    def next_end(self) -> float | None:
        ends = [end for group in self.groups if (end := group.next_end()) is not None]
        return min(ends) if ends else None

    def advance(self, time: float) -> list[int]:
        """Work until `time`; returns the transfers that are complete."""
        done = []
        for group in self.groups:
            for transfer in group.advance(time):
                self.parts[transfer] -= len(group.members)
                if self.parts[transfer] == 0:
                    done.append(transfer)
                    del self.parts[transfer]
        return done

    def add(self, transfer: int, queue: str, packets: Packets) -> None:
        """A transfer arrives now."""
        self._split(packets.counts)
        time = packet_time(packets.bytes, self.costs)
        self.parts[transfer] = sum(1 for count in packets.counts if count)
        for group in self.groups:
            count = packets.counts[group.members[0]]
            if count:
                group.queues.setdefault(queue, deque()).append(_Job(transfer, count, time))

    def _split(self, counts: tuple[int, ...]) -> None:
        """Separate engines that get different work."""
        if len(self.groups) == 1 and len(set(counts)) == 1:
            return
        groups = []
        for group in self.groups:
            by_count: dict[int, list[int]] = {}
            for engine in group.members:
                by_count.setdefault(counts[engine], []).append(engine)
            parts = [tuple(members) for members in by_count.values()]
            groups += [group] if len(parts) == 1 else [group.split(members) for members in parts]
        self.groups = groups

    def busy(self) -> dict[int, list[tuple[float, float]]]:
        """Engine -> the intervals in which it moved bytes."""
        return {engine: group.busy for group in self.groups for engine in group.members}
