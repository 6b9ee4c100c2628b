"""Bookkeeping of sequences, on GpSimd and in SBUF: the bounds of packed segments, the positions of non-zeros."""

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.isa.operands import (
    IN_SBUF,
    Array,
    check,
    check_dtype,
    check_overlap,
    instruction,
    integer,
    mark,
    read_bits,
    write_bits,
)
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

NUMBERS = (np.float32, np.int32)
CORE_PARTITIONS = 16  # each GpSimd core uses the first of its partitions


@instruction
def sequence_bounds(dst: NkiTensor, segment_ids: NkiTensor, name: str | None = None) -> None:
    """dst[1, 0, i] = where the run of equal ids around element i starts, dst[1, 1, i] = where it ends (exclusive);
    N and -1 for the padding id 0. segment_ids [1, N] and dst [1, 2, N] are fp32 or int32."""
    op = "sequence_bounds"
    check(op, "dst", dst, IN_SBUF)
    check(op, "segment_ids", segment_ids, IN_SBUF)
    check_overlap(op, dst, segment_ids)
    check_dtype(op, "dst", dst, NUMBERS)
    check_dtype(op, "segment_ids", segment_ids, NUMBERS)
    N = segment_ids.free_size
    if segment_ids.shape[0] != 1 or dst.shape != (1, 2, N):
        refuse("shape", f"{dst.shape} of {segment_ids.shape}, expected (1, 2, {N}) of (1, {N})", op, "dst")
    ids = read_bits(op, "segment_ids", segment_ids).reshape(-1)
    new = np.append(True, ids[1:] != ids[:-1])  # where an element starts a run
    at = np.arange(N)
    starts = np.maximum.accumulate(np.where(new, at, 0))
    ends = np.minimum.accumulate(np.where(np.append(new[1:], True), at + 1, N)[::-1])[::-1]
    bounds = np.where(ids == 0, [[N], [-1]], np.stack([starts, ends]))
    write_bits(dst, bounds.astype(dst.dtype))
    machine.current().record(op, "gpsimd", (segment_ids,), (dst,), name)


@instruction
def nonzero_with_count(
    dst: NkiTensor, src: NkiTensor, index_offset: int = 0, padding_val: int = -1, name: str | None = None
) -> None:
    """dst[p] = the positions of non-zeros of src[p] plus index_offset, padding_val up to N, then their count; for
    partitions 0, 16, ..., 112 only. src [P, N] is fp32 or int32, dst [P, N + 1] int32."""
    op = "nonzero_with_count"
    check(op, "dst", dst, IN_SBUF)
    check(op, "src", src, IN_SBUF)
    check_overlap(op, dst, src)
    check_dtype(op, "dst", dst, (np.int32,))
    check_dtype(op, "src", src, NUMBERS)
    if dst.shape[0] != src.shape[0] or dst.free_size != src.free_size + 1:
        expected = f"{src.shape[0]} partitions of {src.free_size + 1}"
        refuse("shape", f"{dst.shape[0]} partitions of {dst.free_size} elements, expected {expected}", op, "dst")
    offset, padding = integer(op, "index_offset", index_offset), integer(op, "padding_val", padding_val)
    for partition in range(0, src.shape[0], CORE_PARTITIONS):
        row = read_bits(op, "src", src[partition : partition + 1]).reshape(-1)
        target = dst[partition : partition + 1]
        target.array[...] = _positions(row, offset, padding).reshape(target.shape)
        mark(target)
    machine.current().record(op, "gpsimd", (src,), (dst,), name)


def _positions(row: Array, offset: int, padding: int) -> Array:
    """int32 [N + 1]."""
    found = np.flatnonzero(row)
    result = np.full(row.size + 1, padding, np.int32)
    result[: found.size] = found + offset
    result[-1] = found.size
    return result
