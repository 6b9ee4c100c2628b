"""A schedule as a trace file for Perfetto (ui.perfetto.dev) or chrome://tracing: one row an engine and DMA queue."""

import json
from pathlib import Path
from typing import Any

from gdn_kernels.timeline.report import source
from gdn_kernels.timeline.schedule import Schedule

ROWS = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma sync", "dma scalar", "dma gpsimd")


def write_trace(schedules: list[Schedule], path: Path) -> None:
    """Write one process a core. Times are modelled, in us. Above the engines a DMA appears in the row of the queue that
    issues it, below them in the row of its transfer."""
    events: list[dict[str, Any]] = []
    for core, schedule in enumerate(schedules):
        events.append({"ph": "M", "pid": core, "name": "process_name", "args": {"name": f"core {core} (modelled)"}})
        for row, name in enumerate(ROWS):
            events.append({"ph": "M", "pid": core, "tid": row, "name": "thread_name", "args": {"name": name}})
        events += _events(schedule, core)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, separators=(",", ":")))


def _events(schedule: Schedule, core: int) -> list[dict[str, Any]]:
    events = []
    for index, (instruction, span) in enumerate(zip(schedule.instructions, schedule.spans, strict=True)):
        name = instruction.name or instruction.op
        shapes = {operand.role: list(operand.shape) for operand in instruction.writes + instruction.reads}
        args = {"line": source(schedule, index), "index": index, **shapes}
        events.append(_slice(name, core, span.queue, span.start, span.issued, args))
        if instruction.engine == "dma":
            begins = span.start + schedule.costs.dma_latency
            events.append(_slice(name, core, f"dma {span.queue}", begins, span.end, args))
    return events


def _slice(name: str, core: int, row: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    us, length = start / 1e3, (end - start) / 1e3
    return {"name": name, "ph": "X", "pid": core, "tid": ROWS.index(row), "ts": us, "dur": length, "args": args}
