"""When every instruction runs: a discrete-event simulation of one core's queues and DMA engines.

Queues (Tensor, Vector, Scalar, GpSimd, Sync) issue their instructions in program order, each when all it depends on is
done. A DMA keeps its issuing queue for the time of descriptor generation, and starts moving bytes a latency later.
"""

import heapq
from dataclasses import dataclass

from gdn_kernels.interpreter import hardware
from gdn_kernels.interpreter.descriptors import packets
from gdn_kernels.interpreter.machine import Machine
from gdn_kernels.interpreter.trace import Instruction
from gdn_kernels.timeline.addresses import assign
from gdn_kernels.timeline.costs import TRN2, Costs, duration, issue_time, issuer
from gdn_kernels.timeline.dependences import dependences
from gdn_kernels.timeline.dma_engines import DmaEngines


@dataclass(frozen=True)
class Span:
    """One instruction in time, ns. queue: what issued it. [start, issued): its time on that queue. end: when its result
    is there (of a DMA, when the last byte is). waited_for: the instruction that held it back last, -1 for its queue."""

    queue: str
    start: float
    issued: float
    end: float
    waited_for: int


@dataclass(frozen=True)
class Schedule:
    """A core's program laid out in time. spans[i] belongs to instructions[i]; dma_busy: when each DMA engine
    moved bytes."""

    instructions: list[Instruction]
    spans: list[Span]
    waits: list[tuple[int, ...]]
    dma_busy: dict[int, list[tuple[float, float]]]
    costs: Costs

    @property
    def total(self) -> float:
        """ns from the first issue to the last result."""
        return max((span.end for span in self.spans), default=0.0)

    def busy(self) -> dict[str, float]:
        """ns that each queue issued or computed; `dma` is the mean of the 16 DMA engines."""
        totals = dict.fromkeys((*self.costs.clocks, "sync"), 0.0)
        for span in self.spans:
            totals[span.queue] += span.issued - span.start
        moving = sum(end - start for intervals in self.dma_busy.values() for start, end in intervals)
        return {**totals, "dma": moving / len(self.dma_busy)}


def schedule(machine: Machine, costs: Costs = TRN2, sbuf_bytes: int = hardware.TRN2.sbuf_safe_bytes) -> Schedule:
    """Lay out the trace of one core, its tiles in `sbuf_bytes` a partition: more than there is for a program that was
    launched without the capacity rule.

    Raises NkiRuleError (capacity) when tiles that are alive together don't fit their memory.
    """
    instructions = machine.trace.instructions
    waits = dependences(instructions, assign(machine.lifetimes, sbuf_bytes))
    return lay_out(instructions, waits, costs)


def lay_out(instructions: list[Instruction], waits: list[tuple[int, ...]], costs: Costs) -> Schedule:
    """Run the simulation for instructions that wait for the given earlier ones."""
    return _Simulation(instructions, waits, costs).run()


class _Simulation:
    def __init__(self, instructions: list[Instruction], waits: list[tuple[int, ...]], costs: Costs) -> None:
        self.instructions, self.waits, self.costs = instructions, waits, costs
        self.queue_of = [issuer(i) if i.engine == "dma" else i.engine for i in instructions]
        self.programs: dict[str, list[int]] = {}
        for index, queue in enumerate(self.queue_of):
            self.programs.setdefault(queue, []).append(index)
        self.position = dict.fromkeys(self.programs, 0)
        self.free = dict.fromkeys(self.programs, 0.0)  # when the queue can take its next instruction
        self.done: dict[int, float] = {}
        self.dependents: dict[int, list[str]] = {}  # instruction -> queues whose head waits for it
        self.spans: list[Span | None] = [None] * len(instructions)
        self.started: dict[int, tuple[float, float, int]] = {}  # DMAs under way: start, issued, waited_for
        self.events: list[tuple[float, int, str, int]] = []
        self.engines = DmaEngines(costs)

    def run(self) -> Schedule:
        for queue in self.programs:
            self._try(queue)
        while True:
            moving = self.engines.next_end()
            if self.events and (moving is None or self.events[0][0] <= moving):
                time, _, kind, index = heapq.heappop(self.events)
                self._arrivals(self.engines.advance(time), time)
                self._handle(time, kind, index)
            elif moving is not None:
                self._arrivals(self.engines.advance(moving), moving)
            else:
                break
        spans = [span for span in self.spans if span is not None]
        assert len(spans) == len(self.instructions), "every instruction waits for earlier ones only"
        return Schedule(self.instructions, spans, self.waits, self.engines.busy(), self.costs)

    def _handle(self, time: float, kind: str, index: int) -> None:
        if kind == "ring":  # descriptors are there: the DMA engines may start
            instruction = self.instructions[index]
            if instruction.options.get("skipped"):  # its index was out of bounds: there is nothing to move
                self._arrivals([index], time)
            else:
                made = packets(instruction.writes[0], instruction.reads[0])
                self.engines.add(index, self.queue_of[index], made)
        else:
            self._finish(index, time)

    def _arrivals(self, transfers: list[int], time: float) -> None:
        for index in transfers:
            start, issued, waited_for = self.started.pop(index)
            self.spans[index] = Span(self.queue_of[index], start, issued, time, waited_for)
            self._finish(index, time)

    def _finish(self, index: int, time: float) -> None:
        self.done[index] = time
        for queue in self.dependents.pop(index, []):
            self._try(queue)

    def _try(self, queue: str) -> None:
        """Start the queue's next instructions, up to one that waits for something not done."""
        program = self.programs[queue]
        while self.position[queue] < len(program):
            index = program[self.position[queue]]
            pending = [i for i in self.waits[index] if i not in self.done]
            if pending:
                self.dependents.setdefault(pending[0], []).append(queue)
                return
            start, waited_for = self.free[queue], -1
            for i in self.waits[index]:
                ready = self.done[i] + (self.costs.semaphore if self._crosses(i, index) else 0.0)
                if ready > start:
                    start, waited_for = ready, i
            self.position[queue] += 1
            self._start(index, queue, start, waited_for)

    def _crosses(self, earlier: int, index: int) -> bool:
        return self.instructions[earlier].engine == "dma" or self.queue_of[earlier] != self.queue_of[index]

    def _start(self, index: int, queue: str, start: float, waited_for: int) -> None:
        instruction = self.instructions[index]
        if instruction.engine == "dma":
            issued = start + issue_time(instruction, self.costs)
            self.started[index] = (start, issued, waited_for)
            heapq.heappush(self.events, (start + self.costs.dma_latency, index, "ring", index))
        else:
            issued = start + duration(instruction, self.costs)
            latency = self.costs.tensor_latency / self.costs.clocks["tensor"] if queue == "tensor" else 0.0
            self.spans[index] = Span(queue, start, issued, issued + latency, waited_for)
            heapq.heappush(self.events, (issued + latency, index, "end", index))
        self.free[queue] = issued
