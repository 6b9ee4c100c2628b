"""Integers as bit patterns, for the bitvec operations: one width in and out, nothing is converted."""

from typing import Any

import numpy as np

from gdn_kernels.interpreter.isa.operands import Array, check_column, integer, read_bits, write_bits
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


def check_bits(op: str, *operands: tuple[str, NkiTensor]) -> None:
    """Integer tiles of one width."""
    first_role, first = operands[0]
    for role, view in operands:
        if view.dtype.kind not in "iu":
            refuse("dtype", f"{view.dtype}, a bit operation takes integers", op, role)
        if view.dtype.itemsize != first.dtype.itemsize:
            refuse(
                "dtype", f"{view.dtype}, a bit operation doesn't convert it to {first_role}'s {first.dtype}", op, role
            )


def read_unsigned(op: str, role: str, view: NkiTensor) -> Array:
    values = read_bits(op, role, view)
    return values.view(UNSIGNED[values.dtype.itemsize])


def write_unsigned(view: NkiTensor, values: Array) -> None:
    write_bits(view, values.view(view.dtype))


def bit_column(op: str, role: str, value: Any, data: NkiTensor) -> Any:
    """A constant, or a (P, 1) view of the width of `data` shaped to broadcast over its free dimensions."""
    unsigned = UNSIGNED[data.dtype.itemsize]
    if not isinstance(value, NkiTensor):
        return unsigned.type(integer(op, role, value) % 2 ** (8 * unsigned.itemsize))
    check_column(op, role, value, data)
    check_bits(op, ("data", data), (role, value))
    return read_unsigned(op, role, value).reshape((-1,) + (1,) * (len(data.shape) - 1))
