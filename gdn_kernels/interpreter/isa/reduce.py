"""Reductions over the free dimensions on Vector and over partitions on GpSimd."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.alu import OPS, Op
from gdn_kernels.interpreter.isa.accumulators import Lanes, fold
from gdn_kernels.interpreter.isa.bits import check_bits, read_unsigned, write_unsigned
from gdn_kernels.interpreter.isa.enums import ReduceCmd
from gdn_kernels.interpreter.isa.operands import (
    IN_SBUF,
    an_op,
    apply,
    check,
    check_overlap,
    check_tiles,
    column,
    instruction,
    member,
    read,
    tensors,
    write,
)
from gdn_kernels.interpreter.isa.scalars import scalar_op
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

ACROSS_PARTITIONS = ("add", "average", "maximum", "bitwise_or", "bitwise_and")
ACCUMULATED = ("add", "multiply", "maximum", "minimum")


@instruction
def tensor_reduce(
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    axis: int | Sequence[int],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> None:
    """dst = op over the last free axes of data, combined from left to right in fp32 (bitvec: as bits), on Vector.

    negate multiplies an arithmetic result by -1. keepdims only shapes the result, whose elements must fit dst.
    """
    here = "tensor_reduce"
    operation = reduction(here, "op", op)
    check(here, "dst", dst)
    check(here, "data", data)
    check_overlap(here, dst, data)
    kept = _kept(here, data, axis)
    if dst.shape[0] != kept[0] or dst.free_size != prod(kept[1:]):
        refuse("shape", f"{dst.shape}, expected {kept}", here, "dst")
    if operation.kind == "bitvec":
        if negate:
            refuse("operation", f"{operation!r} works on bits, which aren't negated", here, "negate")
        check_bits(here, ("dst", dst), ("data", data))
        write_unsigned(dst, fold(operation, read_unsigned(here, "data", data).reshape((*kept, -1))))
    else:
        result = fold(operation, read(here, "data", data).reshape((*kept, -1)))
        write(dst, -result if negate else result)
    machine.current().record(here, "vector", (data,), (dst,), name, op=operation.name)


def reduction(here: str, role: str, op: Any) -> Op:
    op = an_op(here, role, op)
    if not op.reduces:
        refuse("operation", f"{op!r} doesn't reduce", here, role)
    return op


def _kept(here: str, data: NkiTensor, axis: int | Sequence[int]) -> tuple[int, ...]:
    """The dimensions before the reduced ones, which are the last."""
    given = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(sorted(a + data.ndim if a < 0 else a for a in given))
    if not axes or axes[0] < 1 or axes != tuple(range(data.ndim - len(axes), data.ndim)):
        refuse("shape", f"axes {given} of {data.ndim} dimensions: only the last free axes reduce", here, "axis")
    return data.shape[: axes[0]]


@instruction
def tensor_partition_reduce(dst: NkiTensor, op: Op, data: NkiTensor, name: str | None = None) -> None:
    """dst[1, ...] = op over the partitions of data: nl.add, nl.average, nl.maximum, nl.bitwise_or or nl.bitwise_and.
    On GpSimd, from SBUF to SBUF."""
    here = "tensor_partition_reduce"
    operation = an_op(here, "op", op)
    if operation.name not in ACROSS_PARTITIONS:
        refuse("operation", f"{operation!r}, expected one of {', '.join(ACROSS_PARTITIONS)}", here, "op")
    check(here, "dst", dst, IN_SBUF)
    check(here, "data", data, IN_SBUF)
    check_overlap(here, dst, data)
    if dst.shape[0] != 1 or dst.free_size != data.free_size:
        refuse("shape", f"{dst.shape}, expected 1 partition of {data.free_size} elements", here, "dst")
    if operation.kind == "bitvec":
        check_bits(here, ("dst", dst), ("data", data))
        write_unsigned(dst, fold(operation, np.moveaxis(read_unsigned(here, "data", data), 0, -1)))
    else:
        average = operation.name == "average"
        result = fold(OPS["add"] if average else operation, np.moveaxis(read(here, "data", data), 0, -1))
        write(dst, result / np.float32(data.shape[0]) if average else result)
    machine.current().record(here, "gpsimd", (data,), (dst,), name, op=operation.name)


@instruction
def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Op,
    operand0: Any,
    reduce_op: Op,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: ReduceCmd = ReduceCmd.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> None:
    """dst = data op0 operand0; reduce_res (P, 1) = reduce_op of the fp32 results over the free dimensions, on Vector.

    reduce_op is add, multiply, maximum or minimum. reset_reduce starts from its identity, load_reduce from
    reduce_init, reduce from what the registers hold. reduce_res_negate flips the sign of what is written only.
    """
    here = "tensor_scalar_reduce"
    operation = scalar_op(here, "op0", op0, operand0)
    if operation.kind != "arithmetic":
        refuse("operation", f"{operation!r} works on bits", here, "op0")
    if reverse0:
        refuse("operation", "reverse0 isn't supported", here, "reverse0")
    reducing = reduction(here, "reduce_op", reduce_op)
    if reducing.name not in ACCUMULATED:
        refuse("operation", f"{reducing!r}, expected one of {', '.join(ACCUMULATED)}", here, "reduce_op")
    check_tiles(here, dst, ("data", data))
    y = read(here, "data", data)
    if operation.binary is None:
        y = operation.apply_unary(y)
    else:
        y = apply(operation, y, column(here, "operand0", operand0, data), False)
    lanes, cmd = start_lanes(here, data, reducing, reduce_cmd, "reduce_init", reduce_init)
    lanes.reduce(reducing, y.reshape(data.shape[0], -1))
    write(dst, y)
    if reduce_res is not None:
        lanes.store(reduce_res, data, reduce_res_negate)
    options = {"op": operation.name, "reduce_op": reducing.name, "reduce_cmd": cmd.name}
    reads = tensors(data, operand0, reduce_init)
    machine.current().record(here, "vector", reads, tensors(dst, reduce_res), name, **options)


def start_lanes(here: str, data: NkiTensor, operation: Op, cmd: Any, role: str, init: Any) -> tuple[Lanes, ReduceCmd]:
    """Vector's registers, reset, loaded or kept; an initial value comes with load_reduce and with it only."""
    cmd = member(here, "reduce_cmd", cmd, ReduceCmd)
    if cmd in (ReduceCmd.idle, ReduceCmd.reset):
        refuse("operation", f"{cmd.name}, expected reset_reduce, reduce or load_reduce", here, "reduce_cmd")
    if (cmd is ReduceCmd.load_reduce) != (init is not None):
        refuse("registers", f"{init!r} with {cmd.name}: it comes with load_reduce only", here, role)
    lanes = Lanes(here, "vector", data)
    loaded = np.reshape(column(here, role, init, data), -1) if init is not None else None
    lanes.start(cmd, operation, loaded)
    return lanes, cmd
