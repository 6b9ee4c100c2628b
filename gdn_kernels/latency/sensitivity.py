"""How far the modelled ratio moves if the device differs from the constants: one of them changed at a time.

A kernel is traced once. Only the constants change, so what waits for what stays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gdn_kernels import backends
from gdn_kernels.dims import MODELS
from gdn_kernels.latency.floor import argument_specs, floor_us
from gdn_kernels.latency.tables import table
from gdn_kernels.timeline.addresses import assign
from gdn_kernels.timeline.costs import TRN2, Costs
from gdn_kernels.timeline.dependences import dependences
from gdn_kernels.timeline.schedule import lay_out

RUN = 512  # bytes, the run length whose efficiency is varied
CASES = (
    ("Qwen3.5-35B-A3B", 1, 1),
    ("Qwen3.5-35B-A3B", 1, 2),
    ("Qwen3.5-35B-A3B", 8, 2),
    ("Qwen3.5-35B-A3B", 32, 2),
)  # model, sequences, cores
Case = tuple[str, int, int]


@dataclass(frozen=True)
class Sensitivity:
    """Modelled time over the floor of each case, with one constant changed; without a change, it comes first."""

    change: str
    ratios: tuple[float, ...]


def efficiency(share: float, costs: Costs) -> Costs:
    """Costs under which runs of 512 bytes reach `share` of a DMA engine's documented peak, as far as the rate of longer
    runs lets them."""
    return replace(costs, packet_floor=RUN / (share * costs.peak_rate))


def changes(costs: Costs) -> Iterator[tuple[str, Costs]]:
    """What is varied: its name with its value, and the constants with it."""
    yield "as modelled", costs
    for share in (0.4, 0.5, 0.6, 0.75, 0.9, 1.0):
        yield f"runs of {RUN} bytes reach {share:.0%} of the DMA peak", efficiency(share, costs)
    for factor in (0.5, 2.0):
        yield f"semaphore latency x {factor:g}", replace(costs, semaphore=factor * costs.semaphore)
    for overhead in (0.0, 30.0, 100.0):
        yield f"{overhead:.0f} cycles more an instruction than its formula", replace(costs, overhead=overhead)


def sensitivity(cases: Sequence[Case] = CASES, costs: Costs = TRN2) -> list[Sensitivity]:
    """The table, a row a change and in it a ratio a case."""
    names, variants = zip(*changes(costs), strict=True)
    columns = [_ratios(case, variants, costs) for case in cases]
    return [Sensitivity(name, ratios) for name, ratios in zip(names, zip(*columns, strict=True), strict=True)]


def _ratios(case: Case, variants: Sequence[Costs], costs: Costs) -> list[float]:
    model, B, lnc = case
    dims = MODELS[model].dims
    arguments = argument_specs(dims, B)
    machines = backends.interpreted("gdn_block_tkg")[lnc].launch(**arguments, norm_eps=1e-6, dry=True).machines
    programs = [(m.trace.instructions, dependences(m.trace.instructions, assign(m.lifetimes))) for m in machines]
    floor = 1e3 * floor_us(dims, B, lnc, costs)
    return [max(lay_out(*program, variant).total for program in programs) / floor for variant in variants]


def sensitivity_table(rows: Sequence[Sensitivity], cases: Sequence[Case] = CASES, markdown: bool = False) -> str:
    """The ratios of every case, a row a change."""
    header = ("modelled / floor", *(f"{model}, B = {B}, LNC {lnc}" for model, B, lnc in cases))
    return table(header, [(row.change, *(f"{ratio:.3f}" for ratio in row.ratios)) for row in rows], markdown)
