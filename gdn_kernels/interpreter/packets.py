"""DMAs that are legal and slow: their runs are so short that engines spend more time on packets than on bytes."""

from gdn_kernels.interpreter.descriptors import packets
from gdn_kernels.interpreter.rules import report
from gdn_kernels.interpreter.trace import Instruction

PACKET_NS = 30.0  # the least time a packet takes an engine, whatever its size
BYTES_PER_NS = 23.0  # of one engine on Trn2 (DMA bandwidth guide)
SHORT_RUN = 512  # bytes
WORTH_SAYING_NS = 1300.0  # as much again as any DMA takes to start (DMA bandwidth guide)


def check_packets(instruction: Instruction) -> None:
    """Warn of a DMA whose short runs cost more above what its bytes take than a DMA takes to start."""
    if instruction.op != "dma_copy" or instruction.options.get("skipped"):
        return  # the others don't go from run to run
    dst, src = instruction.writes[0], instruction.reads[0]
    size, counts = packets(dst, src)
    lost = max(counts) * (PACKET_NS - size / BYTES_PER_NS)
    if size >= SHORT_RUN or lost <= WORTH_SAYING_NS:
        return
    rule = "element-runs" if size == max(dst.dtype.itemsize, src.dtype.itemsize) else "short-runs"
    file, line = instruction.line
    report(
        rule,
        f"{sum(counts)} runs of {size} bytes over {sum(map(bool, counts))} engines: modelled "
        f"{max(counts) * PACKET_NS / 1000:.1f} us, {max(counts) * size / BYTES_PER_NS / 1000:.2f} us as whole runs",
        instruction.op,
        line=f"{file}:{line}",
        limit=SHORT_RUN,
        found=size,
    )
