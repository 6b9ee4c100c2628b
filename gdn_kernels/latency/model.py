"""The block on the timeline: a dry trace of the kernel, laid out with published costs. All of it is modelled."""

from dataclasses import dataclass
from math import prod
from typing import Any

from gdn_kernels import backends
from gdn_kernels.dims import BlockDims
from gdn_kernels.interpreter.machine import Machine
from gdn_kernels.interpreter.memory import SBUF, SHARED_HBM, occupancy
from gdn_kernels.latency.floor import argument_specs, floor_us
from gdn_kernels.timeline.costs import TRN2, Costs
from gdn_kernels.timeline.schedule import Schedule, schedule


@dataclass(frozen=True)
class Modelled:
    """One case: schedules of every core, and what the command prints.

    engine_busy: share of the total that each engine of the busiest core works; dma is the mean of its 16 engines.
    hbm_bytes: all that DMAs move. hbm_scratch_bytes: HBM tensors that are neither arguments nor results.
    """

    modelled_us: float
    floor_us: float
    engine_busy: dict[str, float]
    hbm_bytes: int
    hbm_scratch_bytes: int
    sbuf_peak_bytes: int
    instructions: int
    schedules: list[Schedule]

    @property
    def ratio(self) -> float:
        return self.modelled_us / self.floor_us

    def row(self) -> dict[str, Any]:
        """The figures by name, rounded for printing."""
        return {
            "modelled_us": round(self.modelled_us, 2),
            "floor_us": round(self.floor_us, 2),
            "ratio": round(self.ratio, 4),
            "engine_busy": {name: round(share, 4) for name, share in self.engine_busy.items()},
            "hbm_bytes": self.hbm_bytes,
            "hbm_scratch_bytes": self.hbm_scratch_bytes,
            "sbuf_peak_bytes": self.sbuf_peak_bytes,
            "instructions": self.instructions,
        }


def model_block(dims: BlockDims, B: int, lnc: int = 1, costs: Costs = TRN2) -> Modelled:
    """The fused block for B sequences on `lnc` cores."""
    kernel = backends.interpreted("gdn_block_tkg")[lnc]
    result = kernel.launch(**argument_specs(dims, B), norm_eps=1e-6, dry=True)
    return model_machines([result.machines], floor_us(dims, B, lnc, costs), costs)


def model_machines(launches: list[list[Machine]], floor: float, costs: Costs) -> Modelled:
    """Launches one after the other, each on its cores; the slowest core ends a launch."""
    laid_out = [[schedule(machine, costs) for machine in machines] for machines in launches]
    total = sum(max(s.total for s in schedules) for schedules in laid_out)
    cores = range(len(laid_out[0]))
    busy = [_busy([schedules[core] for schedules in laid_out], total) for core in cores]
    machines = [machine for launch in launches for machine in launch]
    return Modelled(
        modelled_us=total / 1e3,
        floor_us=floor,
        engine_busy=max(busy, key=lambda shares: sum(shares.values())),
        hbm_bytes=sum(_dma_bytes(machine) for machine in machines),
        hbm_scratch_bytes=_scratch_bytes(launches),
        sbuf_peak_bytes=max(occupancy(machine.lifetimes, SBUF).peak for machine in machines),
        instructions=sum(len(machine.trace.instructions) for machine in machines),
        schedules=[s for schedules in laid_out for s in schedules],
    )


def _busy(schedules: list[Schedule], total: float) -> dict[str, float]:
    sums: dict[str, float] = {}
    for one in schedules:
        for name, ns in one.busy().items():
            sums[name] = sums.get(name, 0.0) + ns
    return {name: ns / total for name, ns in sums.items()}


def _dma_bytes(machine: Machine) -> int:
    """Bytes that cross HBM in DMAs of one core."""
    moved = 0
    for instruction in machine.trace.instructions:
        if instruction.engine == "dma" and not instruction.options.get("skipped"):
            moved += max(o.bytes for o in instruction.reads + instruction.writes if not o.allocation.buffer.on_chip)
    return moved


def _scratch_bytes(launches: list[list[Machine]]) -> int:
    """HBM that a launch allocates for itself: private tensors."""
    total = 0
    for machines in launches:
        for machine in machines:
            for life in machine.lifetimes:
                buffer = life.allocation.buffer
                if not buffer.on_chip and buffer is not SHARED_HBM and life.last_use >= 0:
                    total += prod(life.allocation.shape) * life.allocation.dtype.itemsize
    return total
