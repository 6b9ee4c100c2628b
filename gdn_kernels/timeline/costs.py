"""Published costs: clocks, DMA figures and cycles an instruction, each with its source. Nothing here is fitted.

Sources: [isa] the `nki.isa` reference of Neuron SDK 2.23, the last with cost lines; [arch2], [arch3], [arch4] the
architecture guides of Trainium/Inferentia2, Trainium2 and Trainium3; [perf] the NKI performance guide; [dma] the DMA
bandwidth guide; [dge] the descriptor-generation deep dive; [profile] figures derived from the profiler screenshots of
the guide "Introduction to NKI kernel optimization", as the README's table of predicted beside published explains.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from gdn_kernels.interpreter.memory import PSUM, SBUF
from gdn_kernels.interpreter.trace import Instruction, Operand

MIN_II = 64  # cycles, the least an instruction takes of its engine [isa]


@dataclass(frozen=True)
class Costs:
    """One column of constants. Times in ns, rates in bytes a ns (GB/s), clocks in cycles a ns (GHz).

    clocks: of the Tensor, Vector, Scalar and GpSimd engines [arch].
    peak_rate: documented peak of one DMA engine [dma]; the floor is taken at 16 of them.
    packet_rate, packet_floor: what a packet takes, max(floor, bytes / rate) [profile]: 355 GB/s a core in long runs,
        75 % of the peak at 512 bytes.
    dma_latency: from semaphore to start of a transfer [dma].
    hardware_issue, software_issue: of the issuing queue, a DMA [dge], [profile].
    semaphore: from the end of one engine's instruction to the start of another's that waits for it. The guides give
        about 100 cycles of static overhead for an instruction that depends on the last [perf].
    overhead: cycles a Vector, Scalar or GpSimd instruction takes above its formula, the SBUF or PSUM access [perf],
        confirmed by [profile].
    tensor_latency: cycles from the end of a matmul's issue until its result is in PSUM [profile].
    fast_modes: whether the Vector engine has the 16-bit modes of [arch3].
    """

    name: str
    clocks: dict[str, float]
    peak_rate: float
    packet_rate: float
    packet_floor: float
    dma_latency: float
    hardware_issue: float
    software_issue: float
    semaphore: float
    overhead: float
    tensor_latency: float
    fast_modes: bool

    @property
    def core_rate(self) -> float:
        """Documented peak of a core's 16 DMA engines, bytes a ns."""
        return 16 * self.peak_rate


TRN2 = Costs(
    name="trn2",
    clocks={"tensor": 2.4, "vector": 0.96, "scalar": 1.2, "gpsimd": 1.2},
    peak_rate=23.0,
    packet_rate=22.2,
    packet_floor=30.0,
    dma_latency=1300.0,
    hardware_issue=600.0,
    software_issue=590.0,
    semaphore=100.0,
    overhead=60.0,
    tensor_latency=376.0,
    fast_modes=True,
)
# The rate of a packet is scaled by the documented peaks of one engine: 17 GB/s on Trn1, 33 on Trn3 [dma]. NeuronCore-v2
# has no hardware descriptor generation; clocks [arch2].
NEURONCORE_V2 = replace(
    TRN2,
    name="v2",
    clocks={"tensor": 2.8, "vector": 1.12, "scalar": 1.4, "gpsimd": 1.4},
    peak_rate=17.0,
    packet_rate=22.2 * 17 / 23,
    hardware_issue=590.0,
    fast_modes=False,
)
TRN3 = replace(
    TRN2,
    name="trn3",
    clocks={"tensor": 2.4, "vector": 1.2, "scalar": 1.2, "gpsimd": 1.2},
    peak_rate=33.0,
    packet_rate=22.2 * 33 / 23,
)
COSTS = {costs.name: costs for costs in (TRN2, TRN3, NEURONCORE_V2)}

SIMPLIFICATIONS = (
    "Engines issue in order and run one instruction at a time; the Tensor engine starts the next while a result lands.",
    "Tiles get addresses in program order, each the next free place of a rotation through 192 KiB of SBUF or 8 banks.",
    "An instruction waits for all earlier ones whose bytes it reads or overwrites, exactly those.",
    "A DMA engine takes packets from the queues in turn; HBM itself is never the limit, nor is one core by the other.",
    "Vector and GpSimd run in parallel although they share an SBUF port.",
    "Loading stationary tiles hides behind the previous matmul; onezero hints and Tensor column tiling are ignored.",
    "Activation tables are loaded for free; no instruction fetch, no launch, no descriptor setup before the kernel.",
)


def cycles(instruction: Instruction, costs: Costs) -> float:
    """Cycles of its engine that an instruction takes, by the published formulas [isa], without the overhead."""
    formula = _FORMULAS.get(instruction.op, _elementwise)
    return formula(instruction, costs)


def duration(instruction: Instruction, costs: Costs) -> float:
    """ns that a compute instruction keeps its engine.

    Raises ValueError for one that no document gives a cost for: registers, barriers and other work of the queues.
    """
    if instruction.engine not in costs.clocks or not instruction.writes:
        raise ValueError(f"instruction must be one with a published cost, got {instruction.op} on {instruction.engine}")
    clock = costs.clocks[instruction.engine]
    extra = 0.0 if instruction.engine == "tensor" else costs.overhead
    return (cycles(instruction, costs) + extra) / clock


def issue_time(instruction: Instruction, costs: Costs) -> float:
    """ns that a DMA keeps the queue that issues it."""
    return costs.software_issue if issuer(instruction) == "gpsimd" else costs.hardware_issue


def issuer(instruction: Instruction) -> str:
    """The queue that issues a DMA: the one named; else GpSimd for software descriptors and stores, Sync for loads."""
    named = instruction.options.get("issued_by", "unknown")
    if named != "unknown":
        return str(named)
    store = not instruction.writes[0].allocation.buffer.on_chip
    return "gpsimd" if store or instruction.options.get("dge_mode") == "swdge" else "sync"


def packet_time(size: int, costs: Costs) -> float:
    """ns one packet of `size` bytes takes of its DMA engine."""
    return max(costs.packet_floor, size / costs.packet_rate)


def _free(operand: Operand) -> int:
    return prod(operand.shape[1:])


def _elements(instruction: Instruction) -> int:
    """N: elements a partition of the largest operand."""
    return max(_free(operand) for operand in instruction.reads + instruction.writes)


def _narrow(*operands: Operand) -> bool:
    return all(operand.dtype.itemsize == 2 for operand in operands)


def _in_sbuf(*operands: Operand) -> bool:
    return all(operand.allocation.buffer is SBUF for operand in operands)


def _unit_stride(*operands: Operand) -> bool:
    return all(operand.strides[-1] == 1 or operand.shape[-1] == 1 for operand in operands)


def _elementwise(instruction: Instruction, costs: Costs) -> float:
    return max(MIN_II, _elements(instruction))


def _matmul(instruction: Instruction, costs: Costs) -> float:
    stationary, moving = instruction.reads[:2]
    passes = 4 if stationary.dtype.itemsize == 4 else 1
    return passes * max(min(64, _free(stationary)), _free(moving))


def _transpose(instruction: Instruction, costs: Costs) -> float:
    data = instruction.reads[0]
    if instruction.engine == "vector":
        return max(MIN_II, _free(data))
    return max(data.shape[0], min(64, _free(data)))


def _tensor_tensor(instruction: Instruction, costs: Costs) -> float:
    N = _elements(instruction)
    operands = instruction.reads + instruction.writes
    arithmetic = instruction.options.get("op") in ("add", "multiply", "subtract")
    if _in_sbuf(*instruction.reads) and _narrow(*operands) and arithmetic and _unit_stride(*operands):
        return max(MIN_II, N / 2 if costs.fast_modes and instruction.engine == "vector" else N)
    if {operand.allocation.buffer for operand in instruction.reads} == {SBUF, PSUM}:
        return max(MIN_II, N)
    return max(MIN_II, 2 * N)


def _tensor_copy(instruction: Instruction, costs: Costs) -> float:
    if len(instruction.reads) > 1:  # the second is the address
        return max(600, _elements(instruction))
    return _copy(instruction, costs)


def _tensor_scalar(instruction: Instruction, costs: Costs) -> float:
    if instruction.engine == "gpsimd" and "rsqrt" in instruction.options["op"]:
        return 4 * max(MIN_II, _elements(instruction))
    return _copy(instruction, costs)


def _copy(instruction: Instruction, costs: Costs) -> float:
    """tensor_copy and tensor_scalar on Vector: 4x in SBUF, all 16-bit and contiguous; 2x when one of these fails."""
    N = _elements(instruction)
    operands = (instruction.reads[0], *instruction.writes) if instruction.reads else instruction.writes
    if not costs.fast_modes or instruction.engine != "vector" or not _narrow(*operands):
        return max(MIN_II, N)
    misses = (not _in_sbuf(*operands)) + (not _unit_stride(*operands))
    return max(MIN_II, N / (4, 2, 1)[misses])


def _memset(instruction: Instruction, costs: Costs) -> float:
    N = _elements(instruction)
    return max(MIN_II, N / 2 if _narrow(*instruction.writes) and instruction.options.get("value") == 0 else N)


def _reduce(instruction: Instruction, costs: Costs) -> float:
    N = _elements(instruction)
    fast = _narrow(*instruction.reads, *instruction.writes) and instruction.options.get("op") in ("add", "maximum")
    return max(MIN_II, N / 2 if fast else N)


def _twice(instruction: Instruction, costs: Costs) -> float:
    return max(MIN_II, 2 * _elements(instruction))


def _with_reduction(instruction: Instruction, costs: Costs) -> float:
    return max(MIN_II, _elements(instruction)) + MIN_II


def _activation(instruction: Instruction, costs: Costs) -> float:
    reads_register = len(instruction.writes) > 1  # a second result is the sum
    return max(MIN_II, _elements(instruction)) + (MIN_II if reads_register else 0)


def _reciprocal(instruction: Instruction, costs: Costs) -> float:
    return max(MIN_II, (8 if instruction.engine == "vector" else 1) * _elements(instruction))


def _pattern(instruction: Instruction, costs: Costs) -> float:
    return 150 + _elements(instruction)


_FORMULAS: dict[str, Callable[[Instruction, Costs], float]] = {
    "nc_matmul": _matmul,
    "nc_transpose": _transpose,
    "tensor_tensor": _tensor_tensor,
    "tensor_copy": _tensor_copy,
    "tensor_scalar": _tensor_scalar,
    "scalar_tensor_tensor": _twice,
    "tensor_tensor_scan": _twice,
    "tensor_reduce": _reduce,
    "tensor_scalar_reduce": _with_reduction,
    "activation": _activation,
    "activation_reduce": _with_reduction,
    "reciprocal": _reciprocal,
    "memset": _memset,
    "iota": _pattern,
    "affine_select": _pattern,
}
