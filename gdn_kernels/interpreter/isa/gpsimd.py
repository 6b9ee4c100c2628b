"""Instructions of the GpSimd engine: index patterns over partitions and free elements."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.alu import Op
from gdn_kernels.interpreter.isa.operands import (
    Array,
    apply,
    binary,
    check,
    check_overlap,
    check_same_elements,
    instruction,
    read,
    write,
)
from gdn_kernels.interpreter.memory import SBUF
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

MAX_PATTERN = 4


@instruction
def iota(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    offset: int = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> None:
    """dst[p, i...] = offset + p * channel_multiplier + sum of step * i over the pattern [[step, num], ...]."""
    op = "iota"
    check(op, "dst", dst, (SBUF,))
    write(dst, _affine(op, dst, pattern, offset, channel_multiplier).astype(np.float32))
    machine.current().record(op, "gpsimd", (), (dst,), name)


@instruction
def affine_select(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Op | None = None,
    offset: int = 0,
    name: str | None = None,
) -> None:
    """dst = on_true_tile where cmp_op(the iota expression, 0) holds, on_false_value elsewhere."""
    op = "affine_select"
    check(op, "dst", dst, (SBUF,))
    check(op, "on_true_tile", on_true_tile, (SBUF,))
    check_same_elements(op, ("dst", dst), ("on_true_tile", on_true_tile))
    check_overlap(op, dst, (on_true_tile,))
    index = _affine(op, dst, pattern, offset, channel_multiplier).astype(np.float32)
    holds = index == 0 if cmp_op is None else apply(binary(op, "cmp_op", cmp_op), index, np.float32(0), False) != 0
    values = read(op, "on_true_tile", on_true_tile).reshape(dst.shape[0], -1)
    write(dst, np.where(holds.reshape(values.shape), values, np.float32(on_false_value)))
    machine.current().record(op, "gpsimd", (on_true_tile,), (dst,), name)


def _affine(op: str, dst: NkiTensor, pattern: Sequence[Sequence[int]], offset: int, channel_multiplier: int) -> Array:
    counts = [int(num) for _, num in pattern]
    if not 1 <= len(pattern) <= MAX_PATTERN:
        refuse("pattern", f"{len(pattern)} pairs, from 1 to {MAX_PATTERN}", op, "pattern")
    if int(np.prod(counts)) != dst.free_size:
        refuse(
            "shape",
            f"pattern {pattern} counts {int(np.prod(counts))} elements a partition, dst has {dst.free_size}",
            op,
            "pattern",
        )
    index: Any = offset + channel_multiplier * np.arange(dst.shape[0]).reshape((-1,) + (1,) * len(counts))
    for dim, (step, num) in enumerate(pattern):
        index = index + step * np.arange(num).reshape((-1,) + (1,) * (len(counts) - dim - 1))
    return np.asarray(index).reshape(dst.shape)
