"""Index patterns over partitions and free elements, on GpSimd and in SBUF. Indices are exact 32-bit integers."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.alu import OPS, Op
from gdn_kernels.interpreter.isa.operands import (
    IN_SBUF,
    INT32,
    Array,
    binary,
    check,
    check_overlap,
    check_same_elements,
    convert,
    instruction,
    integer,
    number,
    read_bits,
    round_to,
    write_bits,
)
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

MAX_PATTERN = 4
COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal")


@instruction
def iota(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    offset: int = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> None:
    """dst[p, i...] = offset + p * channel_multiplier + sum of step * i over the pattern [[step, num], ...], up to four
    pairs, outermost first; int32 arithmetic, then converted to the dtype of dst. p counts from the view's start."""
    op = "iota"
    check(op, "dst", dst, IN_SBUF)
    index = _affine(op, dst, pattern, offset, channel_multiplier)
    write_bits(dst, index if dst.dtype == INT32 else round_to(index.astype(np.float32), dst.dtype))
    machine.current().record(op, "gpsimd", (), (dst,), name)


@instruction
def affine_select(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Op = OPS["equal"],
    offset: int = 0,
    name: str | None = None,
) -> None:
    """dst = on_true_tile where cmp_op(the iota expression, 0) holds, the fp32 on_false_value elsewhere."""
    op = "affine_select"
    check(op, "dst", dst, IN_SBUF)
    check(op, "on_true_tile", on_true_tile, IN_SBUF)
    check_same_elements(op, ("dst", dst), ("on_true_tile", on_true_tile))
    check_overlap(op, dst, on_true_tile)
    comparison = binary(op, "cmp_op", cmp_op)
    if comparison.name not in COMPARISONS:
        refuse("operation", f"{comparison!r}, expected one of {', '.join(COMPARISONS)}", op, "cmp_op")
    holds: Array = comparison.binary(_affine(op, dst, pattern, offset, channel_multiplier), np.int32(0)) != 0  # type: ignore[misc]
    values = convert(read_bits(op, "on_true_tile", on_true_tile), dst.dtype).reshape(dst.shape)
    other = round_to(np.asarray(number(op, "on_false_value", on_false_value)), dst.dtype)
    write_bits(dst, np.where(holds, values, other))
    machine.current().record(op, "gpsimd", (on_true_tile,), (dst,), name)


def _affine(op: str, dst: NkiTensor, pattern: Sequence[Sequence[int]], offset: int, channel_multiplier: int) -> Array:
    """The index of every element, int32 in the shape of dst; overflow wraps."""
    if not 1 <= len(pattern) <= MAX_PATTERN or any(len(pair) != 2 for pair in pattern):
        refuse("pattern", f"{pattern!r}, expected 1 to {MAX_PATTERN} pairs [step, num]", op, "pattern")
    pairs = [(integer(op, "pattern", step), integer(op, "pattern", num)) for step, num in pattern]
    counts = [num for _, num in pairs]
    if prod(counts) != dst.free_size:
        detail = f"{pattern} counts {prod(counts)} elements a partition, dst has {dst.free_size}"
        refuse("shape", detail, op, "pattern")
    lanes = np.arange(dst.shape[0], dtype=np.int64).reshape((-1,) + (1,) * len(counts))
    multiplier = integer(op, "channel_multiplier", channel_multiplier)
    index: Any = integer(op, "offset", offset) + multiplier * lanes
    for dim, (step, num) in enumerate(pairs):
        index = index + step * np.arange(num).reshape((-1,) + (1,) * (len(counts) - dim - 1))
    return np.asarray(index).astype(np.int32).reshape(dst.shape)
