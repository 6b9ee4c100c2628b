"""Reductions of the Vector engine."""

from typing import Any

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.alu import Op
from gdn_kernels.interpreter.isa.operands import binary, check, check_overlap, instruction, read, write
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

REDUCTIONS = {"add": np.add, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum}


@instruction
def tensor_reduce(
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    axis: int | tuple[int, ...],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> None:
    """dst = op over the last free axes of data, summed in order of the axis in fp32."""
    here = "tensor_reduce"
    operation = binary(here, "op", op)
    if operation.name not in REDUCTIONS:
        refuse("operation", f"{operation!r} doesn't reduce", here, "op")
    check(here, "dst", dst)
    check(here, "data", data)
    check_overlap(here, dst, (data,))
    axes = tuple(sorted(a % data.ndim for a in ((axis,) if isinstance(axis, int) else axis)))
    if axes != tuple(range(data.ndim - len(axes), data.ndim)) or 0 in axes:
        refuse("shape", f"axes {axes} of {data.ndim} dimensions: only the last free axes reduce", here, "axis")
    kept = data.shape[: data.ndim - len(axes)]
    if dst.shape[0] != kept[0] or dst.free_size != int(np.prod(kept[1:])):
        refuse("shape", f"{dst.shape}, expected {kept}", here, "dst")
    values = read(here, "data", data).reshape((*kept, -1))
    result = _in_order(REDUCTIONS[operation.name], values)
    write(dst, -result if negate else result)
    machine.current().record(here, "vector", (data,), (dst,), name, op=operation.name)


def _in_order(function: Any, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A left fold over the last axis: NumPy's own reduction pairs terms differently for different lengths."""
    result = values[..., 0].copy()
    for index in range(1, values.shape[-1]):
        function(result, values[..., index], out=result)
    return result
