"""What two cores of a launch do together, and which chip they are of."""

from collections.abc import Sequence

from gdn_kernels.interpreter import hardware, machine
from gdn_kernels.interpreter.isa.enums import DmaEngine, Engine, NcVersion
from gdn_kernels.interpreter.isa.operands import IN_SBUF, check, check_initialised, check_overlap, instruction, member
from gdn_kernels.interpreter.memory import SHARED_HBM
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

CORES = (0, 1)
GPSIMD_DMA_BYTES = {4: 1024, 2: 512, 1: 256}  # a partition, by the size of an element


@instruction
def core_barrier(
    data: NkiTensor, cores: Sequence[int], engine: Engine = Engine.gpsimd, name: str | None = None
) -> None:
    """Wait on one engine until both cores came here: then each may use what the other wrote to `data`, a shared HBM
    tensor. cores is (0, 1)."""
    op = "core_barrier"
    if not isinstance(data, NkiTensor) or data.buffer is not SHARED_HBM:
        refuse("memory-space", f"{data!r}, expected a tensor in {SHARED_HBM!r}", op, "data")
    if not isinstance(cores, (tuple, list)) or tuple(cores) != CORES:
        refuse("shape", f"{cores!r}, expected {CORES}", op, "cores")
    waiting = member(op, "engine", engine, Engine).name
    core = machine.current()
    core.barrier(data, CORES)
    core.record(op, waiting, (), (), name)


@instruction
def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: DmaEngine = DmaEngine.dma,
    name: str | None = None,
) -> None:
    """Send src to one core and receive dst from one: SBUF tiles of one shape and dtype; ranks are 0 and 1.

    gpsimd_dma moves at most 1,024, 512 or 256 bytes a partition of 4-, 2- or 1-byte elements.
    """
    op = "sendrecv"
    check(op, "src", src, IN_SBUF)
    check(op, "dst", dst, IN_SBUF)
    for role, rank in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        if rank not in CORES:
            refuse("shape", f"{rank!r}, expected 0 or 1", op, role)
    if src.shape != dst.shape:
        refuse("shape", f"{dst.shape}, expected that of src, {src.shape}", op, "dst")
    if src.dtype != dst.dtype:
        refuse("dtype", f"{dst.dtype}, expected that of src, {src.dtype}", op, "dst")
    check_overlap(op, dst, src)
    mover, size = member(op, "dma_engine", dma_engine, DmaEngine), src.dtype.itemsize
    if mover is DmaEngine.gpsimd_dma and src.free_size * size > GPSIMD_DMA_BYTES[size]:
        limit, found = GPSIMD_DMA_BYTES[size], src.free_size * size
        refuse("dma", f"{found} bytes a partition by gpsimd_dma, at most {limit}", op, "src", limit=limit, found=found)
    check_initialised(op, "src", src)
    core = machine.current()
    core.sendrecv(src, dst, send_to_rank, recv_from_rank, pipe_id)
    engine = "gpsimd" if mover is DmaEngine.gpsimd_dma else "dma"
    core.record(op, engine, (src,), (dst,), name, dma_engine=mover.name, pipe_id=pipe_id)


def get_nc_version() -> NcVersion:
    """The generation of the running kernel's target; outside of a kernel, of Trn2."""
    target = machine.current().target if machine.running() else hardware.TRN2
    return NcVersion(target.generation)


def get_nc_sub_version() -> int:
    """The silicon revision within a generation: the first."""
    return 0
