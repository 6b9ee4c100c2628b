"""Selecting elements by a predicate or by their position, on Vector."""

from typing import Any

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.alu import Op
from gdn_kernels.interpreter.isa.accumulators import MAXIMUM, Lanes
from gdn_kernels.interpreter.isa.enums import ReduceCmd
from gdn_kernels.interpreter.isa.operands import (
    F32,
    INT32,
    UINT32,
    Array,
    apply,
    binary,
    check_column,
    check_dtype,
    check_floating,
    check_one_psum,
    check_tiles,
    column,
    convert,
    instruction,
    integer,
    member,
    number,
    read,
    read_bits,
    round_to,
    tensors,
    to_fp32,
    write_bits,
    write_where,
)
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

FP32_MIN = float(np.finfo(np.float32).min)
COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")
EXACT_INDICES = 2**24  # fp32 holds every integer below


@instruction
def tensor_copy_predicated(
    dst: NkiTensor, src: Any, predicate: NkiTensor, reverse_pred: bool = False, name: str | None = None
) -> None:
    """dst = src where predicate is non-zero (zero, if reversed); elsewhere dst keeps what it has.

    src is a tile of the dtype of dst, or a number; predicate is uint8, uint16 or uint32. Not both in PSUM.
    """
    op = "tensor_copy_predicated"
    tile = isinstance(src, NkiTensor)
    check_tiles(op, dst, ("predicate", predicate), *((("src", src),) if tile else ()))
    check_dtype(op, "predicate", predicate, (np.uint8, np.uint16, np.uint32))
    if tile:
        check_one_psum(op, "src", src, "predicate", predicate)
        if src.dtype != dst.dtype:
            refuse("dtype", f"{src.dtype}, expected that of dst, {dst.dtype}", op, "src")
        values = read_bits(op, "src", src).reshape(dst.shape)
    else:
        values = np.broadcast_to(round_to(np.asarray(number(op, "src", src)), dst.dtype), dst.shape)
    write_where(dst, values, _holds(op, predicate, reverse_pred).reshape(dst.shape))
    machine.current().record(op, "vector", tensors(src, predicate), (dst,), name)


def _holds(op: str, predicate: NkiTensor, reverse: bool) -> Array:
    values = read_bits(op, "predicate", predicate)
    return values == 0 if reverse else values != 0


@instruction
def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: Any,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    reduce_op: Op = MAXIMUM,
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """dst = on_true where predicate is non-zero (zero, if reversed), on_false elsewhere: a number or a (P, 1) column.

    With reset_reduce (from -inf) or reduce, Vector's registers take the maximum over the free dimensions, and
    reduce_res (P, 1) receives them; idle leaves them unspecified. on_true and predicate aren't both in PSUM.
    """
    op = "select_reduce"
    check_tiles(op, dst, ("on_true", on_true), ("predicate", predicate))
    check_one_psum(op, "on_true", on_true, "predicate", predicate)
    check_dtype(op, "predicate", predicate, (np.int8, np.uint8, np.int16, np.uint16))
    if on_true.dtype in (INT32, UINT32):
        refuse("dtype", f"{on_true.dtype}, which select_reduce doesn't take", op, "on_true")
    holds = _holds(op, predicate, reverse_pred).reshape(dst.shape)
    other = np.reshape(column(op, "on_false", on_false, on_true, any_dtype=True), (-1,) + (1,) * (dst.ndim - 1))
    source = read_bits(op, "on_true", on_true).reshape(dst.shape)
    chosen = np.where(holds, convert(source, dst.dtype), round_to(other, dst.dtype))
    cmd = _reduce_maximum(op, dst, np.where(holds, to_fp32(source), other), reduce_op, reduce_cmd, reduce_res)
    write_bits(dst, chosen)
    if reduce_res is not None:
        Lanes(op, "vector", on_true).store(reduce_res, on_true)
    reads, written = tensors(on_true, predicate, on_false), tensors(dst, reduce_res)
    machine.current().record(op, "vector", reads, written, name, reduce_cmd=cmd.name)


def _reduce_maximum(
    op: str, data: NkiTensor, values: Array, reduce_op: Any, reduce_cmd: Any, reduce_res: Any
) -> ReduceCmd:
    """Vector's registers take the maximum of fp32 values; idle forgets what they held."""
    if reduce_op is not MAXIMUM:
        refuse("operation", f"{reduce_op!r}, expected nl.maximum", op, "reduce_op")
    cmd = member(op, "reduce_cmd", reduce_cmd, ReduceCmd)
    lanes = Lanes(op, "vector", data)
    if cmd is ReduceCmd.idle:
        lanes.forget()
    elif cmd in (ReduceCmd.reset_reduce, ReduceCmd.reduce):
        lanes.start(cmd, MAXIMUM)
        lanes.set(np.maximum(lanes.get(), values.reshape(data.shape[0], -1).max(axis=1)))
    else:
        refuse("operation", f"{cmd.name}, expected idle, reset_reduce or reduce", op, "reduce_cmd")
    return cmd


@instruction
def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Op,
    comp_op1: Op,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: ReduceCmd = ReduceCmd.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Op = MAXIMUM,
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> None:
    """dst = on_true_tile where (i comp_op0 bound0) and (i comp_op1 bound1), the lowest fp32 elsewhere; i counts the
    free elements from range_start and stays below 2^24.

    Bounds are fp32 (P, 1). Vector's registers take the maximum of the selected fp32 row and reduce_res receives them.
    """
    op = "range_select"
    check_tiles(op, dst, ("on_true_tile", on_true_tile))
    check_floating(op, "on_true_tile", on_true_tile)
    if on_false_value != FP32_MIN and np.float32(on_false_value) != np.float32(FP32_MIN):
        refuse("operation", f"{on_false_value}, the hardware has {FP32_MIN} only", op, "on_false_value")
    start, count = integer(op, "range_start", range_start), on_true_tile.free_size
    if not -EXACT_INDICES <= start <= EXACT_INDICES - count:
        refuse("bounds", f"indices {start} to {start + count}, fp32 counts to {EXACT_INDICES}", op, "range_start")
    index = np.arange(start, start + count, dtype=np.float32)
    mask = _compare(op, "0", comp_op0, bound0, index, on_true_tile) & _compare(
        op, "1", comp_op1, bound1, index, on_true_tile
    )
    chosen = np.where(mask, read(op, "on_true_tile", on_true_tile).reshape(mask.shape), np.float32(FP32_MIN))
    cmd = _reduce_maximum(op, on_true_tile, chosen, reduce_op, reduce_cmd, reduce_res)
    write_bits(dst, round_to(chosen, dst.dtype))
    if reduce_res is not None:
        Lanes(op, "vector", on_true_tile).store(reduce_res, on_true_tile)
    reads, written = (on_true_tile, bound0, bound1), tensors(dst, reduce_res)
    machine.current().record(op, "vector", reads, written, name, reduce_cmd=cmd.name)


def _compare(op: str, which: str, comparison: Any, bound: Any, index: Array, data: NkiTensor) -> Array:
    """index comparison bound, [P, N]."""
    comparison = binary(op, f"comp_op{which}", comparison)
    if comparison.name not in COMPARISONS:
        refuse("operation", f"{comparison!r}, expected one of {', '.join(COMPARISONS)}", op, f"comp_op{which}")
    check_column(op, f"bound{which}", bound, data)
    check_dtype(op, f"bound{which}", bound, (F32,))
    return apply(comparison, index, read(op, f"bound{which}", bound).reshape(-1, 1), False) != 0
