"""Moving data across partitions: transposes on Tensor and Vector, shuffles within quadrants on Vector."""

from collections.abc import Sequence

from gdn_kernels.interpreter import hardware, machine
from gdn_kernels.interpreter.isa.enums import Engine
from gdn_kernels.interpreter.isa.operands import (
    IN_PSUM,
    IN_SBUF,
    ON_CHIP,
    check,
    check_alignment,
    check_overlap,
    choose_engine,
    instruction,
    mark,
    read_bits,
    write_bits,
)
from gdn_kernels.interpreter.memory import PSUM, SBUF
from gdn_kernels.interpreter.rules import refuse, report
from gdn_kernels.interpreter.tensor import NkiTensor

QUADRANT = hardware.SHUFFLE_PARTITIONS
KEEP = 255


@instruction
def nc_transpose(dst: NkiTensor, data: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None) -> None:
    """dst[F, P] = data[P, F].T, bit for bit; free dimensions are flattened.

    On Tensor from SBUF to one bank of PSUM up to 128 x 128, on Vector anywhere up to 32 x 32.
    """
    op = "nc_transpose"
    to_psum = isinstance(dst, NkiTensor) and isinstance(data, NkiTensor) and dst.buffer is PSUM and data.buffer is SBUF
    chosen = choose_engine(op, engine, ("tensor", "vector") if to_psum else ("vector", "tensor"), (dst, data))
    limit = hardware.PARTITIONS if chosen == "tensor" else hardware.VECTOR_TRANSPOSE
    check(op, "data", data, IN_SBUF if chosen == "tensor" else ON_CHIP)
    check(op, "dst", dst, IN_PSUM if chosen == "tensor" else ON_CHIP)
    if data.shape[0] > limit or data.free_size > limit:
        refuse("shape", f"({data.shape[0]}, {data.free_size}), at most {limit} x {limit} on {chosen}", op, "data")
    if dst.shape[0] != data.free_size or dst.free_size != data.shape[0]:
        refuse("shape", f"({dst.shape[0]}, {dst.free_size}), expected ({data.free_size}, {data.shape[0]})", op, "dst")
    if dst.dtype != data.dtype:
        refuse("dtype", f"{dst.dtype}, expected that of data, {data.dtype}", op, "dst")
    if dst.crosses_bank():
        refuse("psum-bank", f"{dst!r} crosses a bank of {hardware.PSUM_BANK_BYTES} bytes", op, "dst")
    check_alignment(op, dst)
    check_overlap(op, dst, data)
    write_bits(dst, read_bits(op, "data", data).reshape(data.shape[0], -1).T)  # [F, P]
    machine.current().record(op, chosen, (data,), (dst,), name)


@instruction
def nc_stream_shuffle(dst: NkiTensor, src: NkiTensor, shuffle_mask: Sequence[int], name: str | None = None) -> None:
    """dst[32q + i] = src[32q + shuffle_mask[i]] in every quadrant q, on Vector; 255 leaves a partition as it was.

    Partitions count from the start of each view. Same dtype and elements a partition; in place is fine.
    """
    op = "nc_stream_shuffle"
    check(op, "dst", dst)
    check(op, "src", src)
    if dst.dtype != src.dtype:
        refuse("dtype", f"{dst.dtype}, expected that of src, {src.dtype}", op, "dst")
    if dst.free_size != src.free_size:
        refuse("shape", f"{dst.free_size} elements a partition, src has {src.free_size}", op, "dst")
    active = -(-max(dst.shape[0], src.shape[0]) // QUADRANT) * QUADRANT
    for role, view in (("dst", dst), ("src", src)):
        if not hardware.legal_start(view.start_partition, active):
            report("start-partition", f"{active} active partitions from {view.start_partition}", op, role)
    if len(shuffle_mask) != QUADRANT:
        refuse("shape", f"{len(shuffle_mask)} entries, expected {QUADRANT}", op, "shuffle_mask")
    moves = _moves(op, shuffle_mask, dst.shape[0], src.shape[0])
    _move(op, dst, src, moves)
    machine.current().record(op, "vector", (src,), (dst,), name)


def _move(op: str, dst: NkiTensor, src: NkiTensor, moves: list[tuple[int, int]]) -> None:
    """Copy (destination, source) partitions; only those read need to be written, and only those moved are."""
    to, taken = [pair[0] for pair in moves], [pair[1] for pair in moves]
    if src.storage.unwritten is not None or src.storage.psum is not None:
        for row in sorted(set(taken)):
            read_bits(op, "src", src[row : row + 1])
    dst.array[to] = src.array[taken].reshape((len(moves), *dst.shape[1:]))
    for view in [dst] if len(moves) == dst.shape[0] else [dst[row : row + 1] for row in to]:
        mark(view)


def _moves(op: str, mask: Sequence[int], to: int, available: int) -> list[tuple[int, int]]:
    """(destination, source) partition of every partition moved."""
    moves = []
    for partition in range(to):
        entry = mask[partition % QUADRANT]
        if entry == KEEP:
            continue
        source = partition // QUADRANT * QUADRANT + entry
        if not 0 <= entry < QUADRANT or source >= available:
            refuse("bounds", f"partition {partition} takes {entry}; src has {available} partitions", op, "shuffle_mask")
        moves.append((partition, source))
    return moves
