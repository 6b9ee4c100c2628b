"""What instructions share: checking an operand, reading it into fp32, rounding a result into it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.interpreter import hardware
from gdn_kernels.interpreter.alu import Op
from gdn_kernels.interpreter.memory import PLAIN, PSUM, READ, SBUF, Buffer
from gdn_kernels.interpreter.rules import NkiRuleError, refuse
from gdn_kernels.interpreter.tensor import NkiTensor

Array = npt.NDArray[Any]
ON_CHIP = (SBUF, PSUM)


def instruction(function: Callable[..., None]) -> Callable[..., None]:
    """Mark an instruction: a call that doesn't fit its signature is a refuse rule, not a Python error."""

    @wraps(function)
    def checked(*args: Any, **keywords: Any) -> None:
        try:
            function(*args, **keywords)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise NkiRuleError("unknown-instruction", str(error), function.__name__) from None
            raise

    return checked


def check(op: str, role: str, view: Any, spaces: tuple[Buffer, ...] = ON_CHIP) -> None:
    """An engine operand: a tensor in one of `spaces` that starts at a partition its count allows."""
    if not isinstance(view, NkiTensor):
        refuse("objects-not-strings", f"expected a tensor, got {view!r}", op, role)
    if view.buffer not in spaces:
        refuse("memory-space", f"{view!r}, expected {' or '.join(map(repr, spaces))}", op, role)
    if not hardware.legal_start(view.start_partition, view.shape[0]):
        refuse("start-partition", f"{view.shape[0]} partitions from {view.start_partition}", op, role)
    if view.ndim > hardware.MAX_DIMS:
        refuse("pattern", f"{view.ndim} dimensions, the hardware iterates over {hardware.MAX_DIMS}", op, role)


def check_initialised(op: str, role: str, view: NkiTensor) -> None:
    hole = view.first_unwritten()
    if hole is not None:
        refuse("uninitialised", f"{view!r} was never written at {hole}", op, role)


def read(op: str, role: str, view: NkiTensor) -> Array:
    """The elements in fp32, in the view's shape. A read of PSUM ends the accumulation of what it reads."""
    check_initialised(op, role, view)
    psum = view.storage.psum
    if psum is not None:
        states = view.over(psum)
        np.copyto(states, READ, where=states != PLAIN)
    return view.array if view.dtype == np.float32 else view.array.astype(np.float32)


def write(view: NkiTensor, values: Array) -> None:
    """Round fp32 results to the view's dtype and store them; the shape may differ if the elements agree."""
    target = view.array
    target[...] = round_to(values.reshape(target.shape), view.dtype)
    view.mark_written()
    if view.storage.psum is not None:
        view.over(view.storage.psum)[...] = PLAIN


def round_to(values: Array, dtype: np.dtype) -> Array:
    """Round to nearest even; to an integer with saturation."""
    if values.dtype == dtype:
        return values
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.clip(np.rint(values.astype(np.float64)), limits.min, limits.max).astype(dtype)
    return values.astype(dtype)


def check_same_elements(op: str, *operands: tuple[str, NkiTensor]) -> None:
    """All operands agree in partitions and in elements a partition."""
    first_role, first = operands[0]
    for role, view in operands[1:]:
        if view.shape[0] != first.shape[0] or view.free_size != first.free_size:
            refuse(
                "shape",
                f"{view.shape[0]} partitions of {view.free_size} elements, "
                f"{first_role} has {first.shape[0]} of {first.free_size}",
                op,
                role,
            )


def check_overlap(op: str, dst: NkiTensor, sources: tuple[NkiTensor, ...]) -> None:
    """A source in the destination's own storage is the same view or touches none of its elements."""
    for source in sources:
        if source.storage is not dst.storage or (
            source.shape == dst.shape and (source.offset, source.strides) == (dst.offset, dst.strides)
        ):
            continue
        if np.intersect1d(source.elements(), dst.elements()).size:
            refuse("overlap", f"reads {source!r} while it writes {dst!r} of the same tensor", op, "dst")


def scalar(op: str, role: str, value: Any, partitions: int, any_dtype: bool = False) -> Array | np.float32:
    """A constant, or a (P, 1) view as an fp32 column [P, 1]."""
    if isinstance(value, NkiTensor):
        check(op, role, value)
        if value.shape[0] != partitions or value.free_size != 1:
            refuse("scalar-operand", f"shape {value.shape}, expected ({partitions}, 1)", op, role)
        if value.dtype != np.float32 and not any_dtype:
            refuse("scalar-operand", f"dtype {value.dtype}, expected float32", op, role)
        return read(op, role, value).reshape(partitions, 1)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse("scalar-operand", f"{value!r}, expected a number or a ({partitions}, 1) tensor", op, role)
    return np.float32(value)


def tensors(*values: Any) -> tuple[NkiTensor, ...]:
    return tuple(value for value in values if isinstance(value, NkiTensor))


def binary(op: str, role: str, value: Any) -> Op:
    if not isinstance(value, Op):
        refuse("objects-not-strings", f"{value!r}, expected an op such as nl.add", op, role)
    if value.binary is None:
        refuse("operation", f"{value!r} takes one operand", op, role)
    return value


def apply(operation: Op, left: Array, right: Array | np.float32, reverse: bool) -> Array:
    """`left op right`, or `right op left` when reversed, in fp32."""
    assert operation.binary is not None
    result: Array = operation.binary(right, left) if reverse else operation.binary(left, right)
    return result.astype(np.float32, copy=False)


def choose_engine(op: str, engine: Any, allowed: tuple[str, ...], views: tuple[NkiTensor, ...]) -> str:
    """The engine asked for, or the first allowed one. GpSimd has no way to PSUM."""
    name = engine.name
    if name == "unknown":
        name = allowed[0]
    if name not in allowed:
        refuse("engine", f"runs on {' or '.join(allowed)}, not on {name}", op, "engine")
    if name == "gpsimd" and any(view.buffer is PSUM for view in views):
        refuse("memory-space", "GpSimd can't reach PSUM", op, "engine")
    return name
