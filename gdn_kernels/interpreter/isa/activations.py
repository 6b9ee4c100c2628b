"""The Scalar engine's activations: a function of data * scale + bias, with a running sum of the results."""

from typing import Any

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.alu import Op
from gdn_kernels.interpreter.dry import Hollow
from gdn_kernels.interpreter.isa.accumulators import ADD, Lanes
from gdn_kernels.interpreter.isa.enums import ReduceCmd
from gdn_kernels.interpreter.isa.operands import (
    Array,
    an_op,
    check_tiles,
    column,
    instruction,
    member,
    read,
    tensors,
    write,
)
from gdn_kernels.interpreter.rules import refuse, report
from gdn_kernels.interpreter.tensor import NkiTensor

COMMANDS = (ReduceCmd.idle, ReduceCmd.reset, ReduceCmd.reduce, ReduceCmd.reset_reduce)


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
    """dst = op(data * scale + bias) on Scalar, in fp32. scale: constant or fp32 (P, 1); bias: either, of any dtype.

    reduce_cmd reset zeroes the engine's registers, reduce adds the sum of the fp32 results over the free dimensions,
    reset_reduce does both; reduce_res (P, 1) receives the registers. reduce_op is nl.add. Inputs outside the
    function's valid interval are refused.
    """
    _activate("activation", dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd, name)


@instruction
def activation_reduce(
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    reduce_op: Op,
    reduce_res: NkiTensor | None,
    bias: Any = None,
    scale: Any = 1.0,
    name: str | None = None,
) -> None:
    """`activation` with reduce_cmd=reset_reduce: dst = op(data * scale + bias), reduce_res = its sum over the free
    dimensions."""
    here = "activation_reduce"
    _activate(here, dst, op, data, bias, scale, reduce_op, reduce_res, ReduceCmd.reset_reduce, name)


def _activate(
    here: str,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any,
    scale: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None,
    reduce_cmd: Any,
    name: str | None,
) -> None:
    function = activation_op(here, op)
    check_tiles(here, dst, ("data", data))
    x = read(here, "data", data)
    if isinstance(scale, NkiTensor) or scale != 1.0:
        x = x * column(here, "scale", scale, data)
    if bias is not None:
        x = x + column(here, "bias", bias, data, any_dtype=True)
    check_valid(here, function, x)
    y = function.apply_unary(x)
    write(dst, y)
    written: tuple[NkiTensor, ...] = (dst,)
    options = {"op": function.name}
    if reduce_cmd is not ReduceCmd.idle or reduce_op is not None or reduce_res is not None:
        options["reduce_cmd"] = _reduce(here, y, data, reduce_op, reduce_res, reduce_cmd).name
        written = tensors(dst, reduce_res)
    machine.current().record(here, "scalar", tensors(data, bias, scale), written, name, **options)


def _reduce(here: str, y: Array, data: NkiTensor, op: Any, result: NkiTensor | None, cmd: Any) -> ReduceCmd:
    cmd = member(here, "reduce_cmd", cmd, ReduceCmd)
    if cmd not in COMMANDS:
        refuse("operation", f"{cmd.name}, Scalar has {', '.join(c.name for c in COMMANDS)}", here, "reduce_cmd")
    sums = cmd in (ReduceCmd.reduce, ReduceCmd.reset_reduce)
    if op is not ADD and (sums or op is not None):
        refuse("operation", f"{op!r}, activations are summed: nl.add", here, "reduce_op")
    lanes = Lanes(here, "scalar", data)
    if cmd is not ReduceCmd.idle:
        lanes.start(cmd, ADD)
    if sums:
        lanes.reduce(ADD, y.reshape(data.shape[0], -1))
    if result is not None:
        lanes.store(result, data)
    return cmd


def activation_op(here: str, op: Any) -> Op:
    """A function of the Scalar engine whose meaning is documented."""
    op = an_op(here, "op", op)
    if not op.activation:
        refuse("operation", f"{op!r} isn't an activation", here, "op")
    if op.unary is None:
        refuse("not-modelled", f"{op!r} here: its slope is a parameter of activate2 only", here, "op")
    return op


def check_valid(here: str, op: Op, x: Array) -> None:
    """Refuse inputs the function has no polynomials for."""
    if op.valid is None or isinstance(x, Hollow):  # nothing to look at in a dry launch
        return
    low, high = op.valid
    size = np.abs(x) if op.name == "reciprocal" else x
    if size.min() >= low and size.max() <= high:  # NaN fails both
        return
    outside = ~((size >= low) & (size <= high))
    report(
        "activation-range",
        f"{op!r} of {x[outside][0]}, valid from {low:.3g} to {high:.3g}",
        here,
        "data",
        limit=op.valid,
        found=float(x[outside][0]),
    )
