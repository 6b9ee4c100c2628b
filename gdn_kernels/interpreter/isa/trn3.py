"""Instructions that only Trn3 has and whose numerics are documented."""

from typing import Any

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.alu import OPS, Op
from gdn_kernels.interpreter.isa.accumulators import ADD, Lanes
from gdn_kernels.interpreter.isa.activations import check_valid
from gdn_kernels.interpreter.isa.enums import ReduceCmd
from gdn_kernels.interpreter.isa.operands import (
    Array,
    an_op,
    apply,
    check_tiles,
    column,
    instruction,
    member,
    need_generation,
    read,
    tensors,
    write,
)
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

BYPASS, PRELU = OPS["bypass"], OPS["prelu"]
STEPS = (
    ("multiply", "add"),
    ("multiply", "subtract"),
    ("multiply", "bypass"),
    ("add", "bypass"),
    ("subtract", "bypass"),
    ("bypass", "bypass"),
)
REDUCTIONS = ("add", "maximum", "minimum", "abs_max", "abs_min")


@instruction
def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: Any = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    reduce_init: Any = 0.0,
    name: str | None = None,
) -> None:
    """dst = exp(src - max_value) on Vector, max_value a constant or fp32 (P, 1) column. Trn3 only.

    reset_reduce, reduce and load_reduce (from reduce_init) sum the fp32 results into Vector's registers, which
    reduce_res (P, 1) receives; idle leaves them unspecified.
    """
    op = "exponential"
    need_generation(op, 4, "exponential")
    check_tiles(op, dst, ("src", src))
    y = OPS["exp"].apply_unary(read(op, "src", src) - column(op, "max_value", max_value, src))
    cmd = member(op, "reduce_cmd", reduce_cmd, ReduceCmd)
    if cmd is ReduceCmd.reset:
        refuse("operation", "reset, expected idle, reset_reduce, reduce or load_reduce", op, "reduce_cmd")
    if cmd is not ReduceCmd.load_reduce and (isinstance(reduce_init, NkiTensor) or reduce_init != 0.0):
        refuse("registers", f"{reduce_init!r} with {cmd.name}: it comes with load_reduce only", op, "reduce_init")
    lanes = Lanes(op, "vector", src)
    if cmd is ReduceCmd.idle:
        lanes.forget()
    else:
        lanes.start(cmd, ADD, np.reshape(column(op, "reduce_init", reduce_init, src), -1))
        lanes.reduce(ADD, y.reshape(src.shape[0], -1))
    write(dst, y)
    if reduce_res is not None:
        lanes.store(reduce_res, src)
    reads, written = tensors(src, max_value, reduce_init), tensors(dst, reduce_res)
    machine.current().record(op, "vector", reads, written, name, reduce_cmd=cmd.name)


@instruction
def activate2(
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    imm0: Any,
    imm1: Any,
    op0: Op,
    op1: Op,
    relu_param: Any = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Op | None = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    name: str | None = None,
) -> None:
    """dst = op((data op0 imm0) op1 imm1) on Scalar, nl.bypass leaving a step out; prelu takes relu_param as its slope
    for negative inputs. Registers as in `activation`, with reduce_op add, maximum, minimum, abs_max or abs_min.
    Trn3 only."""
    here = "activate2"
    need_generation(here, 4, "activate2")
    function, steps = an_op(here, "op", op), (an_op(here, "op0", op0), an_op(here, "op1", op1))
    names = (steps[0].name, steps[1].name)
    if not function.activation:
        refuse("operation", f"{function!r} isn't an activation", here, "op")
    if names not in STEPS:
        refuse("operation", f"{steps}, expected one of {STEPS}", here, "op0")
    check_tiles(here, dst, ("data", data))
    x = read(here, "data", data)
    for role, step, operand, reverse in (("imm0", steps[0], imm0, reverse0), ("imm1", steps[1], imm1, reverse1)):
        if step is not BYPASS:
            x = apply(step, x, column(here, role, operand, data), reverse)
        elif reverse:
            refuse("operation", f"reversed operands of {step!r}", here, role)
    check_valid(here, function, x)
    slope = column(here, "relu_param", relu_param, data)
    y = np.where(x > 0, x, x * slope) if function is PRELU else function.apply_unary(x)
    write(dst, y)
    cmd = _reduce(here, y, data, reduce_op, reduce_res, reduce_cmd)
    reads, written = tensors(data, imm0, imm1, relu_param), tensors(dst, reduce_res)
    options = {"op": function.name, "steps": names, "reduce_cmd": cmd.name}
    machine.current().record(here, "scalar", reads, written, name, **options)


def _reduce(here: str, y: Array, data: NkiTensor, op: Any, result: NkiTensor | None, cmd: Any) -> ReduceCmd:
    cmd = member(here, "reduce_cmd", cmd, ReduceCmd)
    if cmd is ReduceCmd.load_reduce:
        refuse("operation", "load_reduce, expected idle, reset, reduce or reset_reduce", here, "reduce_cmd")
    lanes = Lanes(here, "scalar", data)
    if cmd is not ReduceCmd.idle:
        op = an_op(here, "reduce_op", op)
        if op.name not in REDUCTIONS:
            refuse("operation", f"{op!r}, expected one of {', '.join(REDUCTIONS)}", here, "reduce_op")
        lanes.start(cmd, op)
        if cmd is not ReduceCmd.reset:
            lanes.reduce(op, y.reshape(data.shape[0], -1))
    if result is not None:
        lanes.store(result, data)
    return cmd
