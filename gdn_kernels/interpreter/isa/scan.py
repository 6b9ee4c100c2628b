"""Scans along the free dimensions on Vector: every result depends on the one before it. The state is fp32."""

from typing import Any

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.alu import Op
from gdn_kernels.interpreter.isa.enums import ReduceCmd
from gdn_kernels.interpreter.isa.operands import (
    INT32,
    UINT32,
    Array,
    apply,
    binary,
    check_one_psum,
    check_tiles,
    column,
    instruction,
    read,
    tensors,
    write,
)
from gdn_kernels.interpreter.isa.reduce import start_lanes
from gdn_kernels.interpreter.isa.scalars import scalar_op
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

CUMULATIVE = ("add", "subtract", "multiply", "maximum", "minimum")


@instruction
def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Any,
    op0: Op,
    op1: Op,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """r[i] = (data0[i] op0 r[i-1]) op1 data1[i], r[-1] = initial, a constant or a (P, 1) column; dst = r.

    Arithmetic only; data0 and data1 not both in PSUM.
    """
    op = "tensor_tensor_scan"
    first, second = binary(op, "op0", op0, arithmetic=True), binary(op, "op1", op1, arithmetic=True)
    check_tiles(op, dst, ("data0", data0), ("data1", data1))
    check_one_psum(op, "data0", data0, "data1", data1)
    left, right = _columns(read(op, "data0", data0)), _columns(read(op, "data1", data1))
    state = np.broadcast_to(np.reshape(column(op, "initial", initial, data0, any_dtype=True), -1), left.shape[1:])
    result = np.empty(left.shape, np.float32)
    steps = 0 if machine.current().launch.dry else len(left)  # a dry launch has no values to go through one by one
    for index in range(steps):
        state = apply(second, apply(first, left[index], state, reverse0), right[index], reverse1)
        result[index] = state
    write(dst, result.T)
    ops = (first.name, second.name)
    machine.current().record(op, "vector", tensors(data0, data1, initial), (dst,), name, op=ops)


@instruction
def tensor_scalar_cumulative(
    dst: NkiTensor,
    src: NkiTensor,
    op0: Op,
    op1: Op,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: ReduceCmd = ReduceCmd.reset_reduce,
    name: str | None = None,
) -> None:
    """reg = (src[i] op0 imm0) op1 reg; dst[i] = reg. op0 arithmetic; op1 add, subtract, multiply, maximum or minimum.

    reset_reduce starts from op1's identity (0 for subtract), load_reduce from imm1, reduce from Vector's registers.
    32-bit integers aren't supported.
    """
    op = "tensor_scalar_cumulative"
    first, second = scalar_op(op, "op0", op0, imm0), binary(op, "op1", op1)
    if first.kind != "arithmetic":
        refuse("operation", f"{first!r} works on bits", op, "op0")
    if second.name not in CUMULATIVE:
        refuse("operation", f"{second!r}, expected one of {', '.join(CUMULATIVE)}", op, "op1")
    check_tiles(op, dst, ("src", src))
    for role, view in (("dst", dst), ("src", src)):
        if view.dtype in (INT32, UINT32):
            refuse("dtype", f"{view.dtype}, 32-bit integers aren't supported", op, role)
    x = read(op, "src", src)
    x = first.apply_unary(x) if first.binary is None else apply(first, x, column(op, "imm0", imm0, src), False)
    lanes, cmd = start_lanes(op, src, second, reduce_cmd, "imm1", imm1)
    state, result = lanes.get(), _columns(x).copy()
    for row in result:
        state = apply(second, row, state, False)
        row[...] = state
    lanes.set(state)
    write(dst, result.T)
    options = {"op": (first.name, second.name), "reduce_cmd": cmd.name}
    machine.current().record(op, "vector", tensors(src, imm0, imm1), (dst,), name, **options)


def _columns(values: Array) -> Array:
    """[P, ...] as [N, P], so that a step of the scan is one contiguous row."""
    return np.ascontiguousarray(values.reshape(values.shape[0], -1).T)
