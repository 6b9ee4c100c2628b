"""A tile with constants or one value a partition: up to two operations in one instruction."""

from typing import Any

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.alu import Op
from gdn_kernels.interpreter.isa.bits import bit_column, check_bits, read_unsigned, write_unsigned
from gdn_kernels.interpreter.isa.enums import Engine
from gdn_kernels.interpreter.isa.operands import (
    Array,
    an_op,
    apply,
    check_tiles,
    choose_engine,
    column,
    instruction,
    need_generation,
    read,
    tensors,
    write,
)
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

SCALAR_ENGINE_OPS = (("multiply", None), ("add", None), ("multiply", "add"))


@instruction
def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Op,
    operand0: Any,
    reverse0: bool = False,
    op1: Op | None = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """dst = (data op0 operand0) op1 operand1; operands are constants or fp32 (P, 1) columns, None or 0 for a unary op.

    Both operations are arithmetic or both bitvec (Vector only). On Trn2 Scalar multiplies, adds, or multiplies and
    adds; GpSimd has rsqrt only, which no other engine has here.
    """
    op = "tensor_scalar"
    steps = _steps(op, op0, operand0, reverse0, op1, operand1, reverse1)
    check_tiles(op, dst, ("data", data))
    ops = (op0.name, op1.name if op1 is not None else None)
    chosen = choose_engine(op, engine, _engines(op, ops, op0.kind), (dst, data))
    if op0.kind == "bitvec":
        check_bits(op, ("dst", dst), ("data", data))
        bits = read_unsigned(op, "data", data)
        for role, operation, operand, reverse in steps:
            bits = _bit_step(op, role, operation, operand, reverse, bits, data)
        write_unsigned(dst, bits)
    else:
        result = read(op, "data", data)
        for role, operation, operand, reverse in steps:
            if operation.binary is None:
                result = operation.apply_unary(result)
            else:
                result = apply(operation, result, column(op, role, operand, data), reverse)
        write(dst, result)
    machine.current().record(op, chosen, tensors(data, operand0, operand1), (dst,), name, op=ops)


def _bit_step(op: str, role: str, operation: Op, operand: Any, reverse: bool, bits: Array, data: NkiTensor) -> Array:
    if operation.binary is None:
        return operation.unary(bits)  # type: ignore[misc]
    other = bit_column(op, role, operand, data)
    left, right = (np.broadcast_to(other, bits.shape), bits) if reverse else (bits, other)
    result: Array = operation.binary(left, right)
    return result


Step = tuple[str, Op, Any, bool]


def _steps(
    op: str, op0: Any, operand0: Any, reverse0: bool, op1: Any, operand1: Any, reverse1: bool
) -> tuple[Step, ...]:
    """The operations in order, each checked by itself and the second against the first."""
    first = scalar_op(op, "op0", op0, operand0)
    if op1 is None:
        if operand1 is not None:
            refuse("operation", f"{operand1!r} without op1", op, "operand1")
        return (("operand0", first, operand0, reverse0),)
    second = scalar_op(op, "op1", op1, operand1)
    if first.kind != second.kind:
        refuse("operation", f"{first!r} is {first.kind} and {second!r} {second.kind}", op, "op1")
    return ("operand0", first, operand0, reverse0), ("operand1", second, operand1, reverse1)


def scalar_op(op: str, role: str, value: Any, operand: Any) -> Op:
    """An operation with a scalar operand, or a unary one without."""
    value = an_op(op, role, value)
    if value.binary is None:
        if not value.scalar_unary:
            refuse("operation", f"{value!r} runs on the Scalar engine, as an activation", op, role)
        if isinstance(operand, NkiTensor) or operand not in (None, 0):
            refuse(
                "operation", f"{value!r} takes one operand, so the scalar must be None or 0, got {operand!r}", op, role
            )
    if value.generation > 3:
        need_generation(op, value.generation, repr(value), role)
    return value


def _engines(op: str, ops: tuple[str, str | None], kind: str) -> tuple[str, ...]:
    """The engines that have these operations, the preferred one first."""
    if kind == "bitvec":
        return ("vector",)
    if "rsqrt" in ops:
        return ("gpsimd",)
    if ops in SCALAR_ENGINE_OPS or machine.current().target.generation > 3:
        return ("vector", "scalar")
    return ("vector",)
