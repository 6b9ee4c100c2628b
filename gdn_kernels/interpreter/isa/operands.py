"""What instructions share: checking an operand, reading it into fp32, rounding a result into it.

Every kernel passes here several times an instruction, so the usual case of each check comes first and costs little.
"""

from collections.abc import Callable
from enum import Enum
from functools import wraps
from numbers import Integral, Real
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gdn_kernels.interpreter import hardware, machine
from gdn_kernels.interpreter.alu import Op
from gdn_kernels.interpreter.isa.enums import Engine
from gdn_kernels.interpreter.isa.overlap import check_overlap as check_overlap
from gdn_kernels.interpreter.memory import PLAIN, PSUM, READ, SBUF, Buffer
from gdn_kernels.interpreter.rules import NkiRuleError, refuse, report
from gdn_kernels.interpreter.tensor import NkiTensor

Array = npt.NDArray[Any]
Member = TypeVar("Member", bound=Enum)

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
INT32, UINT32 = np.dtype(np.int32), np.dtype(np.uint32)
GENERATION_4 = {
    np.dtype(ml_dtypes.float8_e4m3fn): "float8_e4m3fn",
    np.dtype(ml_dtypes.float8_e8m0fnu): "float8_e8m0fnu",
}
ON_CHIP = (SBUF, PSUM)
IN_SBUF = (SBUF,)
IN_PSUM = (PSUM,)


class Issued:
    """What an instruction returns: a handle to order it after others."""

    __slots__ = ("core", "index")

    def __init__(self, core: machine.Machine) -> None:
        self.core, self.index = core, len(core.trace.instructions) - 1

    def depends_on(self, *producers: "Issued") -> "Issued":
        """Record that this instruction runs after each of `producers`; returns itself."""
        if not all(isinstance(producer, Issued) for producer in producers):
            refuse("argument", f"depends_on({producers!r}), expected what instructions returned", "depends_on")
        after = self.core.trace.instructions[self.index].options.setdefault("depends_on", [])
        after.extend(producer.index for producer in producers)
        return self


def instruction(function: Callable[..., None]) -> Callable[..., Issued]:
    """Mark an instruction: a call that doesn't fit its signature is a broken rule, not a Python error."""

    @wraps(function)
    def checked(*args: Any, **keywords: Any) -> Issued:
        try:
            function(*args, **keywords)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise NkiRuleError("unknown-instruction", str(error), function.__name__) from None
            raise
        except NkiRuleError as error:
            error.name = error.name or keywords.get("name")
            raise
        return Issued(machine.current())

    return checked


# ---- checks ----


def check(op: str, role: str, view: Any, spaces: tuple[Buffer, ...] = ON_CHIP) -> None:
    """An engine operand: a tensor in one of `spaces` that starts at a partition its count allows."""
    if not isinstance(view, NkiTensor):
        refuse("objects-not-strings", f"expected a tensor, got {view!r}", op, role)
    if view.buffer not in spaces:
        refuse("memory-space", f"{view!r}, expected {' or '.join(map(repr, spaces))}", op, role)
    view.check_use(op, role)
    placed = view.offset or view.storage.lifetime.address
    if placed and not hardware.legal_start(view.start_partition, view.shape[0]):
        report("start-partition", f"{view.shape[0]} partitions from {view.start_partition}", op, role)
    if len(view.shape) > hardware.MAX_DIMS:
        refuse("pattern", f"{view.ndim} dimensions, the hardware iterates over {hardware.MAX_DIMS}", op, role)
    if role == "dst" and 0 in view.strides:
        check_written_once(op, view)
    if view.dtype.itemsize == 1 and view.dtype in GENERATION_4:
        need_generation(op, 4, GENERATION_4[view.dtype], role)


def check_tiles(op: str, dst: NkiTensor, *sources: tuple[str, NkiTensor]) -> None:
    """Tiles of an elementwise instruction agree in partitions and elements, and no source lies half under dst."""
    check(op, "dst", dst)
    for role, source in sources:
        check(op, role, source)
        if source.shape != dst.shape:
            check_same_elements(op, ("dst", dst), (role, source))
        if source.storage is dst.storage:
            check_overlap(op, dst, source)


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


def check_written_once(op: str, dst: NkiTensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(dst.strides, dst.shape, strict=True)):
        refuse("pattern", f"strides {dst.strides} write an element more than once", op, "dst")


def check_alignment(op: str, dst: NkiTensor) -> None:
    """A transpose writes 16-bit elements to PSUM from a multiple of 4 bytes on."""
    start = dst.offset * dst.dtype.itemsize
    if start % 4 and dst.buffer is PSUM:
        report("psum-alignment", f"{dst!r} starts {start} bytes into its tensor", op, "dst")


def check_one_psum(op: str, role1: str, first: NkiTensor, role2: str, second: NkiTensor) -> None:
    if first.buffer is PSUM and second.buffer is PSUM:
        refuse("two-psum-inputs", f"{role1} and {role2} are both in PSUM", op, role2)


def check_dtype(op: str, role: str, view: NkiTensor, allowed: tuple[Any, ...]) -> None:
    if view.dtype not in allowed:
        names = ", ".join(np.dtype(dtype).name for dtype in allowed)
        refuse("dtype", f"{view.dtype}, expected {names}", op, role)


def check_floating(op: str, role: str, view: NkiTensor) -> None:
    if view.dtype.kind in "iub":
        refuse("dtype", f"{view.dtype}, expected a float", op, role)


def check_initialised(op: str, role: str, view: NkiTensor) -> None:
    if view.storage.unwritten is None:
        return
    hole = view.first_unwritten()
    if hole is not None:
        report("uninitialised", f"{view!r} was never written at {hole}", op, role)


def need_generation(op: str, generation: int, what: str, role: str = "") -> None:
    """Refuse what only a later NeuronCore generation than the launch's has."""
    target = machine.current().target
    if target.generation < generation:
        later = next(other.name for other in hardware.TARGETS.values() if other.generation >= generation)
        refuse("target", f"{what} needs {later}, the target is {target.name}", op, role)


def member(op: str, role: str, value: Any, kind: type[Member]) -> Member:
    """A member of an enumeration; its plain value, which the vendor's library passes, is warned about."""
    if type(value) is kind:
        return value
    for found in kind:
        if type(value) is type(found.value) and value == found.value:
            report("enum-value", f"{value!r}, meaning {found.name}", op, role)
            return found
    refuse("objects-not-strings", f"{value!r}, expected one of {', '.join(m.name for m in kind)}", op, role)


def choose_engine(op: str, engine: Any, allowed: tuple[str, ...], views: tuple[NkiTensor, ...]) -> str:
    """The engine asked for, or the first allowed one. GpSimd has no way to PSUM."""
    name = allowed[0] if engine is Engine.unknown else member(op, "engine", engine, Engine).name
    if name == "unknown":
        name = allowed[0]
    if name not in allowed:
        refuse("engine", f"runs on {' or '.join(allowed)}, not on {name}", op, "engine")
    if name == "gpsimd" and any(view.buffer is PSUM for view in views):
        refuse("memory-space", "GpSimd can't reach PSUM", op, "engine")
    return name


def an_op(op: str, role: str, value: Any) -> Op:
    if not isinstance(value, Op):
        refuse("objects-not-strings", f"{value!r}, expected an op such as nl.add", op, role)
    return value


def binary(op: str, role: str, value: Any, arithmetic: bool = False) -> Op:
    """An operation of two operands that the target has."""
    value = an_op(op, role, value)
    if value.binary is None:
        refuse("operation", f"{value!r} takes one operand", op, role)
    if value.generation > 3:
        need_generation(op, value.generation, repr(value), role)
    if arithmetic and value.kind != "arithmetic":
        refuse("operation", f"{value!r} works on bits, only arithmetic operations are supported", op, role)
    return value


# ---- reading ----


def read(op: str, role: str, view: NkiTensor) -> Array:
    """The elements in fp32, in the view's shape."""
    return to_fp32(read_bits(op, role, view))


def read_bits(op: str, role: str, view: NkiTensor) -> Array:
    """The elements as they are. A read of PSUM ends the accumulation of what it reads."""
    storage = view.storage
    if storage.unwritten is not None:
        check_initialised(op, role, view)
    if storage.psum is not None:
        states = view.over(storage.psum)
        np.copyto(states, READ, where=states != PLAIN)
    return view.array


def to_fp32(values: Array) -> Array:
    """Any dtype in fp32, by the engines' conversion on reading; fp32 itself is not copied."""
    dtype = values.dtype
    if dtype == F32:
        return values
    if dtype == BF16:  # its bits are the upper half of an fp32: three times as fast on large tiles as a cast
        return (values.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(F32)
    return values.astype(F32)


def number(op: str, role: str, value: Any, expected: str = "a number") -> np.float32:
    if isinstance(value, (float, int)) and not isinstance(value, bool):
        return np.float32(value)
    if isinstance(value, Real) and not isinstance(value, (bool, np.bool_)):
        return np.float32(float(value))
    refuse("scalar-operand", f"{value!r}, expected {expected}", op, role)


def integer(op: str, role: str, value: Any) -> int:
    """A compile-time int32."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not -(2**31) <= int(value) < 2**31:
        refuse("scalar-operand", f"{value!r}, expected an int of 32 bits", op, role)
    return int(value)


def column(op: str, role: str, value: Any, data: NkiTensor, any_dtype: bool = False) -> Any:
    """A constant, or a (P, 1) fp32 view shaped so that it broadcasts over the free dimensions of `data`."""
    if not isinstance(value, NkiTensor):
        return number(op, role, value, f"a number or a ({data.shape[0]}, 1) tensor")
    check_column(op, role, value, data)
    if value.dtype != F32 and not any_dtype:
        refuse("scalar-operand", f"dtype {value.dtype}, expected float32", op, role)
    return read(op, role, value).reshape((-1,) + (1,) * (len(data.shape) - 1))


def check_column(op: str, role: str, value: Any, data: NkiTensor) -> None:
    """A view of one element for each partition of `data`."""
    check(op, role, value)
    if value.shape[0] != data.shape[0] or value.free_size != 1:
        refuse("scalar-operand", f"shape {value.shape}, expected ({data.shape[0]}, 1)", op, role)


def tensors(*values: Any) -> tuple[NkiTensor, ...]:
    return tuple(value for value in values if isinstance(value, NkiTensor))


def apply(operation: Op, left: Any, right: Any, reverse: bool) -> Array:
    """`left op right`, or `right op left` when reversed, in fp32."""
    assert operation.binary is not None
    result: Array = operation.binary(right, left) if reverse else operation.binary(left, right)
    return result if result.dtype == F32 else result.astype(F32)


# ---- writing ----


def write(view: NkiTensor, values: Array) -> None:
    """Round fp32 results to the view's dtype and store them; the shape may differ if the elements agree."""
    write_bits(view, values if view.dtype == F32 else round_to(values, view.dtype))


def write_bits(view: NkiTensor, values: Array) -> None:
    """Store values that have the view's dtype already."""
    target = view.array
    target[...] = values if values.shape == target.shape else values.reshape(target.shape)
    mark(view)


def mark(view: NkiTensor) -> None:
    """Note that an engine wrote all of a view: a matmul can't add to it any more."""
    storage = view.storage
    if storage.unwritten is not None:
        view.mark_written()
    if storage.psum is not None:
        view.over(storage.psum)[...] = PLAIN


def write_where(view: NkiTensor, values: Array, mask: Array) -> None:
    """Store, where `mask` (bool in the shape of the view) is set, values of the view's dtype and shape."""
    np.copyto(view.array, values, where=mask)
    for entries, value in ((view.storage.unwritten, False), (view.storage.psum, PLAIN)):
        if entries is not None:
            view.over(entries)[mask] = value


def convert(values: Array, dtype: np.dtype) -> Array:
    """From one dtype to another as an instruction that copies does: bit for bit, or through fp32."""
    return values if values.dtype == dtype else round_to(to_fp32(values), dtype)


def round_to(values: Array, dtype: np.dtype) -> Array:
    """Round to nearest even; to an integer with saturation, NaN to 0; to bool by being non-zero."""
    if values.dtype == dtype:
        return values
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        whole = np.rint(values.astype(np.float64))
        return np.clip(np.where(np.isnan(whole), 0, whole), limits.min, limits.max).astype(dtype)
    return values.astype(dtype)
