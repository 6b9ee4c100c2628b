"""What the trace of a core adds up to: instructions by engine, DMA bytes by direction, run lengths, HBM scratch."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gdn_kernels.interpreter.descriptors import packets
from gdn_kernels.interpreter.memory import PRIVATE_HBM, SHARED_HBM, Allocation
from gdn_kernels.interpreter.trace import Instruction, Operand, Trace

RUNS = (4, 64, 512, 2048, 8192)  # bytes: the upper bounds of the histogram's bins, but for its last


@dataclass
class Summary:
    """Counts over one or more cores.

    dma_bytes: by direction, such as "hbm -> sbuf"; of a casting DMA, the wider side. packets: how many packets of each
    length in bytes. histogram: DMA bytes by run length. scratch_bytes: HBM tensors that are neither arguments nor
    results.
    """

    instructions: int = 0
    by_engine: Counter[str] = field(default_factory=Counter)
    by_op: Counter[str] = field(default_factory=Counter)
    dma_bytes: Counter[str] = field(default_factory=Counter)
    packets: Counter[int] = field(default_factory=Counter)
    scratch_bytes: int = 0

    @property
    def histogram(self) -> dict[str, int]:
        bins = {_bin(bound): 0 for bound in (*RUNS, None)}
        for length, count in self.packets.items():
            bins[_bin(next((bound for bound in RUNS if length <= bound), None))] += length * count
        return bins

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return {
            "instructions": self.instructions,
            "by_engine": dict(self.by_engine),
            "by_op": dict(self.by_op),
            "dma_bytes": dict(self.dma_bytes),
            "run_bytes": self.histogram,
            "scratch_bytes": self.scratch_bytes,
        }


def summarise(traces: Sequence[Trace], results: Iterable[Allocation] = ()) -> Summary:
    """Sum up the traces of one launch, whose results are `results`."""
    summary = Summary()
    scratch: dict[tuple[int, int], Allocation] = {}
    kept = {(-1, result.id) for result in results}
    for trace in traces:
        summary.instructions += len(trace.instructions)
        summary.by_engine.update(trace.by_engine())
        for instruction in trace.instructions:
            summary.by_op[instruction.op] += 1
            if instruction.engine == "dma":
                _add_dma(summary, instruction)
            for operand in instruction.reads + instruction.writes:
                held = operand.allocation
                if held.buffer in (PRIVATE_HBM, SHARED_HBM) and held.id >= 0:
                    scratch[-1 if held.buffer is SHARED_HBM else trace.core, held.id] = held
    summary.scratch_bytes = sum(held.bytes for key, held in scratch.items() if key not in kept)
    return summary


def _add_dma(summary: Summary, instruction: Instruction) -> None:
    if instruction.options.get("skipped"):
        return
    for dst in instruction.writes:
        for src in instruction.reads[:1] if instruction.options.get("indirect") else instruction.reads:
            direction = f"{_memory(src)} -> {_memory(dst)}"
            if src.size != dst.size:  # gathers and the like: what they write, in unknown runs
                summary.dma_bytes[direction] += dst.bytes
                continue
            made = packets(dst, src)
            summary.dma_bytes[direction] += made.total_bytes
            summary.packets[made.bytes] += sum(made.counts)


def _memory(operand: Operand) -> str:
    return operand.allocation.buffer.name if operand.allocation.buffer.on_chip else "hbm"


def _bin(bound: int | None) -> str:
    return f"<= {bound} B" if bound is not None else f"> {RUNS[-1]} B"
