"""Element-by-element instructions of the Vector, Scalar and GpSimd engines.

Arithmetic is computed in fp32 (32-bit integers on GpSimd exactly) and rounded once on writing. Bitvec operations take
integers of one width as bit patterns.
"""

from typing import Any

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.alu import Op
from gdn_kernels.interpreter.isa.bits import check_bits, read_unsigned, write_unsigned
from gdn_kernels.interpreter.isa.enums import Engine
from gdn_kernels.interpreter.isa.operands import (
    INT32,
    UINT32,
    apply,
    binary,
    check,
    check_one_psum,
    check_tiles,
    choose_engine,
    column,
    convert,
    instruction,
    number,
    read,
    read_bits,
    round_to,
    tensors,
    write,
    write_bits,
)
from gdn_kernels.interpreter.memory import PSUM
from gdn_kernels.interpreter.rules import refuse, report
from gdn_kernels.interpreter.tensor import NkiTensor

VECTOR_OR_GPSIMD = ("vector", "gpsimd")
ANY = ("vector", "scalar", "gpsimd")


@instruction
def memset(dst: NkiTensor, value: float, engine: Engine = Engine.unknown, name: str | None = None) -> None:
    """dst = value, on Vector or GpSimd: a float for a float dtype, an int within its range for an integer one."""
    op = "memset"
    check(op, "dst", dst)
    chosen = choose_engine(op, engine, VECTOR_OR_GPSIMD, (dst,))
    write_bits(dst, np.broadcast_to(_constant(op, value, dst.dtype), dst.shape))
    machine.current().record(op, chosen, (), (dst,), name, value=value)


def _constant(op: str, value: Any, dtype: np.dtype) -> Any:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if not whole or not limits.min <= value <= limits.max:
            refuse("dtype", f"{value!r} for {dtype}", op, "value")
        return dtype.type(value)
    if dtype.kind == "b":
        return np.bool_(value)
    if whole:
        report("value-kind", f"the int {value} for {dtype}", op, "value")
    return round_to(np.asarray(number(op, "value", value)), dtype)


@instruction
def tensor_copy(dst: NkiTensor, src: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None) -> None:
    """dst = src on Vector, Scalar or GpSimd: bit for bit, or through fp32 when the dtypes differ."""
    op = "tensor_copy"
    check_tiles(op, dst, ("src", src))
    chosen = choose_engine(op, engine, ANY, (dst, src))
    if chosen == "scalar" and src.dtype.kind in "iu" and src.dtype.itemsize == 4:
        report("documents-disagree", f"{src.dtype} on Scalar, which passes it through fp32 on some chips", op, "src")
    write_bits(dst, convert(read_bits(op, "src", src), dst.dtype))
    machine.current().record(op, chosen, (src,), (dst,), name)


@instruction
def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """dst = 1 / data in fp32, on Vector."""
    op = "reciprocal"
    check_tiles(op, dst, ("data", data))
    write(dst, np.float32(1) / read(op, "data", data))
    machine.current().record(op, "vector", (data,), (dst,), name)


@instruction
def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Op,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """dst = data1 op data2. Both in PSUM is illegal. power runs on GpSimd only, and int32/uint32 by default, exactly
    (modulo 2^32) unless an operand is in PSUM; bit operations run on Vector only."""
    here = "tensor_tensor"
    operation = binary(here, "op", op)
    check_tiles(here, dst, ("data1", data1), ("data2", data2))
    check_one_psum(here, "data1", data1, "data2", data2)
    views = (dst, data1, data2)
    whole = dst.dtype.kind in "iu" and all(view.dtype in (INT32, UINT32) for view in views)
    chosen = choose_engine(here, engine, _engines(operation, whole, views), views)
    if operation.kind == "bitvec":
        check_bits(here, ("dst", dst), ("data1", data1), ("data2", data2))
        left, right = read_unsigned(here, "data1", data1), read_unsigned(here, "data2", data2)
        write_unsigned(dst, operation.binary(left, right.reshape(left.shape)))  # type: ignore[misc]
    elif whole and chosen == "gpsimd" and operation.name != "power":
        left, right = (read_bits(here, "data", view).astype(np.int64) for view in (data1, data2))
        write_bits(dst, operation.binary(left, right.reshape(left.shape)).astype(np.int64).astype(dst.dtype))  # type: ignore[misc]
    else:
        left, right = read(here, "data1", data1), read(here, "data2", data2)
        write(dst, apply(operation, left, right if right.shape == left.shape else right.reshape(left.shape), False))
    machine.current().record(here, chosen, (data1, data2), (dst,), name, op=operation.name)


def _engines(operation: Op, whole: bool, views: tuple[NkiTensor, ...]) -> tuple[str, ...]:
    """The engines that have an operation on tiles, the preferred one first."""
    if operation.name == "power":
        return ("gpsimd",)
    if operation.kind == "bitvec":
        return ("vector",)
    if whole and not any(view.buffer is PSUM for view in views):
        return ("gpsimd", "vector")
    return VECTOR_OR_GPSIMD


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
    """dst = (data op0 operand0) op1 operand1 on Vector: a constant or fp32 (P, 1) column first, then a tile.
    Arithmetic only; data and operand1 not both in PSUM."""
    op = "scalar_tensor_tensor"
    first, second = binary(op, "op0", op0, arithmetic=True), binary(op, "op1", op1, arithmetic=True)
    check_tiles(op, dst, ("data", data), ("operand1", operand1))
    check_one_psum(op, "data", data, "operand1", operand1)
    result = apply(first, read(op, "data", data), column(op, "operand0", operand0, data), reverse0)
    tile = read(op, "operand1", operand1)
    write(dst, apply(second, result, tile if tile.shape == result.shape else tile.reshape(result.shape), reverse1))
    ops = (first.name, second.name)
    machine.current().record(op, "vector", tensors(data, operand0, operand1), (dst,), name, op=ops)
