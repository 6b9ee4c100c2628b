"""What each stage of the block costs by itself, from the block's timeline: modelled, like the timeline."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from gdn_kernels.interpreter.descriptors import packets
from gdn_kernels.latency.model import Modelled

STAGES = ("in_proj", "conv1d", "gates", "delta_rule", "gated_norm")


@dataclass
class StageCost:
    """One stage, over all cores: instructions without DMAs, DMAs, bytes they move to and from HBM, and us of every
    compute engine that has any."""

    instructions: int = 0
    dmas: int = 0
    hbm_bytes: int = 0
    engine_us: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def stage_costs(modelled: Modelled) -> dict[str, StageCost]:
    """Stage -> its cost, by the file that an instruction stands in; what stands elsewhere is no stage's."""
    costs = {stage: StageCost() for stage in STAGES}
    for schedule in modelled.schedules:
        for instruction, span in zip(schedule.instructions, schedule.spans, strict=True):
            cost = costs.get(Path(instruction.line[0]).stem)
            if cost is None:
                continue
            if instruction.engine == "dma":
                cost.dmas += 1
                operands = instruction.reads + instruction.writes
                cost.hbm_bytes += max(o.bytes for o in operands if not o.allocation.buffer.on_chip)
            else:
                cost.instructions += 1
                cost.engine_us[instruction.engine] += (span.issued - span.start) / 1e3
    return costs


def run_lengths(modelled: Modelled, stage: str) -> dict[int, int]:
    """Bytes of one packet -> bytes that a stage moves in packets of that size, the longest first.

    A packet is a run of neighbouring bytes, or several of them where they are neighbours again in HBM.
    """
    moved: dict[int, int] = defaultdict(int)
    for schedule in modelled.schedules:
        for instruction in schedule.instructions:
            if instruction.engine == "dma" and Path(instruction.line[0]).stem == stage:
                runs = packets(instruction.writes[0], instruction.reads[0])
                moved[runs.bytes] += runs.bytes * sum(runs.counts)
    return dict(sorted(moved.items(), reverse=True))
