"""Element-by-element instructions of the Vector, Scalar and GpSimd engines. Everything is computed in fp32."""

from typing import Any

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.alu import Op
from gdn_kernels.interpreter.isa.enums import Engine, ReduceCmd
from gdn_kernels.interpreter.isa.operands import (
    apply,
    binary,
    check,
    check_overlap,
    check_same_elements,
    choose_engine,
    instruction,
    read,
    scalar,
    tensors,
    write,
)
from gdn_kernels.interpreter.memory import PSUM
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

VECTOR_OR_GPSIMD = ("vector", "gpsimd")
ANY = ("vector", "scalar", "gpsimd")
SCALAR_ENGINE_OPS = (("multiply", None), ("add", None), ("multiply", "add"))


@instruction
def memset(dst: NkiTensor, value: float, engine: Engine = Engine.unknown, name: str | None = None) -> None:
    """dst = value; a float for a float dtype, an int for an integer one."""
    op = "memset"
    check(op, "dst", dst)
    chosen = choose_engine(op, engine, VECTOR_OR_GPSIMD, (dst,))
    if isinstance(value, float) == (dst.dtype.kind in "iu"):
        refuse("dtype", f"{value!r} for {dst.dtype}", op, "value")
    write(dst, np.full(dst.shape, value, np.float32))
    machine.current().record(op, chosen, (), (dst,), name)


@instruction
def tensor_copy(dst: NkiTensor, src: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None) -> None:
    """dst = src, cast when dtypes differ."""
    op = "tensor_copy"
    _check_pair(op, dst, ("src", src))
    chosen = choose_engine(op, engine, ANY, (dst, src))
    write(dst, read(op, "src", src))
    machine.current().record(op, chosen, (src,), (dst,), name)


@instruction
def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Op,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """dst = data1 op data2."""
    here = "tensor_tensor"
    operation = binary(here, "op", op)
    _check_pair(here, dst, ("data1", data1), ("data2", data2))
    _check_one_psum(here, "data1", data1, "data2", data2)
    chosen = choose_engine(here, engine, VECTOR_OR_GPSIMD, (dst, data1, data2))
    left, right = read(here, "data1", data1), read(here, "data2", data2)
    write(dst, apply(operation, left, right.reshape(left.shape), False))
    machine.current().record(here, chosen, (data1, data2), (dst,), name, op=operation.name)


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
    """dst = (data op0 operand0) op1 operand1, each operand a constant or a (P, 1) column."""
    op = "tensor_scalar"
    first = binary(op, "op0", op0)
    second = binary(op, "op1", op1) if op1 is not None else None
    _check_pair(op, dst, ("data", data))
    chosen = choose_engine(op, engine, ANY, (dst, data))
    if chosen == "scalar" and (first.name, second and second.name) not in SCALAR_ENGINE_OPS:
        refuse("operation", f"{first!r} then {second!r}: Scalar multiplies, adds, or multiplies and adds", op, "op0")
    partitions = data.shape[0]
    result = read(op, "data", data).reshape(partitions, -1)
    result = apply(first, result, scalar(op, "operand0", operand0, partitions), reverse0)
    if second is not None:
        result = apply(second, result, scalar(op, "operand1", operand1, partitions), reverse1)
    write(dst, result)
    ops = (first.name, second and second.name)
    machine.current().record(op, chosen, tensors(data, operand0, operand1), (dst,), name, op=ops)


@instruction
def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Op,
    operand0: Any,
    op1: Op,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """dst = (data op0 operand0) op1 operand1: a constant or (P, 1) column first, then a tile."""
    op = "scalar_tensor_tensor"
    first, second = binary(op, "op0", op0), binary(op, "op1", op1)
    _check_pair(op, dst, ("data", data), ("operand1", operand1))
    _check_one_psum(op, "data", data, "operand1", operand1)
    partitions = data.shape[0]
    result = read(op, "data", data).reshape(partitions, -1)
    result = apply(first, result, scalar(op, "operand0", operand0, partitions), reverse0)
    result = apply(second, result, read(op, "operand1", operand1).reshape(partitions, -1), reverse1)
    write(dst, result)
    ops = (first.name, second.name)
    machine.current().record(op, "vector", tensors(data, operand0, operand1), (dst,), name, op=ops)


@instruction
def activation(
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Op | None = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    name: str | None = None,
) -> None:
    """dst = op(data * scale + bias) on the Scalar engine; scale and bias constants or (P, 1) columns."""
    here = "activation"
    if not isinstance(op, Op):
        refuse("objects-not-strings", f"{op!r}, expected an op such as nl.exp", here, "op")
    if op.unary is None:
        refuse("operation", f"{op!r} isn't an activation", here, "op")
    if reduce_op is not None or reduce_res is not None or reduce_cmd is not ReduceCmd.idle:
        refuse("not-modelled", "the reduction of activation", here)
    _check_pair(here, dst, ("data", data))
    partitions = data.shape[0]
    x = read(here, "data", data).reshape(partitions, -1)
    if isinstance(scale, NkiTensor) or scale != 1.0:
        x = x * scalar(here, "scale", scale, partitions)
    if bias is not None:
        x = x + scalar(here, "bias", bias, partitions, any_dtype=True)
    _check_valid(here, op, x)
    write(dst, op.activate(x))
    machine.current().record(here, "scalar", tensors(data, bias, scale), (dst,), name, op=op.name)


def _check_valid(here: str, op: Op, x: np.ndarray[Any, Any]) -> None:
    if op.valid is None:
        return
    size = np.abs(x) if op.name == "reciprocal" else x
    outside = ~((size >= op.valid[0]) & (size <= op.valid[1]))
    if outside.any():
        refuse(
            "activation-range",
            f"{op!r} of {x[outside][0]}, valid from {op.valid[0]:.3g} to {op.valid[1]:.3g}",
            here,
            "data",
        )


def _check_pair(op: str, dst: NkiTensor, *sources: tuple[str, NkiTensor]) -> None:
    check(op, "dst", dst)
    for role, source in sources:
        check(op, role, source)
    check_same_elements(op, ("dst", dst), *sources)
    check_overlap(op, dst, tuple(source for _, source in sources))


def _check_one_psum(op: str, role1: str, first: NkiTensor, role2: str, second: NkiTensor) -> None:
    if first.buffer is PSUM and second.buffer is PSUM:
        refuse("two-psum-inputs", f"{role1} and {role2} are both in PSUM", op, role2)
