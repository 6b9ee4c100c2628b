"""Registers of the engines' sequencers: 32-bit integers that exist at run time only.

The interpreter knows their values, but a kernel may not: a register bounds a loop or addresses a view, nothing else.
"""

from typing import Any, NoReturn

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.isa.operands import check_initialised, instruction
from gdn_kernels.interpreter.memory import PSUM
from gdn_kernels.interpreter.objects import RunTimeValue
from gdn_kernels.interpreter.rules import refuse, report
from gdn_kernels.interpreter.tensor import NkiTensor

INT32 = np.iinfo(np.int32)


class VirtualRegister(RunTimeValue):
    """`nisa.VirtualRegister`. `value` is None until something is moved or loaded into it."""

    __slots__ = ("value",)

    def __init__(self, value: int | None = None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "register"

    def __bool__(self) -> bool:
        report("dynamic-loop", "a register as a Python condition, which NKI 0.7 no longer accepts")
        return read("while", "condition", self) != 0

    def __index__(self) -> NoReturn:
        refuse("operators", "the value of a register, which only the device knows")

    __int__ = __float__ = __index__


def read(op: str, role: str, value: Any) -> int:
    """The value of a register, or of a number where either may stand."""
    if isinstance(value, bool) or not isinstance(value, (int, VirtualRegister)):
        refuse("operation", f"{value!r}, expected an int or a register", op, role)
    if isinstance(value, int):
        return value
    if value.value is None:
        refuse("uninitialised", "the register holds no value", op, role)
    return value.value


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A register; of value x, if given."""
    if x is None:
        return VirtualRegister()
    if isinstance(x, VirtualRegister):
        refuse("operation", "a register is initialised with an int; register_move copies one", "register_alloc", "x")
    return VirtualRegister(_in_range("register_alloc", "x", read("register_alloc", "x", x)))


@instruction
def register_move(dst: VirtualRegister, src: Any) -> None:
    """dst = src, an int or another register."""
    _check_register("register_move", "dst", dst)
    dst.value = _in_range("register_move", "src", read("register_move", "src", src))


@instruction
def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    """dst = the one integer that src holds."""
    op = "register_load"
    _check_register(op, "dst", dst)
    _check_cell(op, "src", src)
    check_initialised(op, "src", src)
    dst.value = int(src.array.reshape(-1)[0])
    machine.current().record(op, "sync", (src,), (), None)


@instruction
def register_store(dst: NkiTensor, src: VirtualRegister) -> None:
    """dst, of one integer element, = src."""
    op = "register_store"
    _check_cell(op, "dst", dst)
    _check_register(op, "src", src)
    value, limits = read(op, "src", src), np.iinfo(dst.dtype)
    if not limits.min <= value <= limits.max:
        refuse("dtype", f"{value} in {dst.dtype}", op, "dst")
    dst.array[...] = value
    dst.mark_written()
    machine.current().record(op, "sync", (), (dst,), None)


def _check_register(op: str, role: str, register: Any) -> None:
    if not isinstance(register, VirtualRegister):
        refuse("objects-not-strings", f"{register!r}, expected a register from register_alloc", op, role)


def _check_cell(op: str, role: str, view: Any) -> None:
    if not isinstance(view, NkiTensor):
        refuse("objects-not-strings", f"{view!r}, expected a tensor", op, role)
    if view.buffer is PSUM:
        refuse("memory-space", f"{view!r}: a sequencer reaches SBUF and HBM", op, role)
    if view.size != 1 or view.dtype.kind not in "iu":
        refuse("shape", f"{view!r}, expected one integer", op, role)
    view.check_use(op, role)


def _in_range(op: str, role: str, value: int) -> int:
    if not INT32.min <= value <= INT32.max:
        refuse("dtype", f"{value}, a register has 32 bits", op, role)
    return value


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "lt", "le", "gt", "ge", "neg"):

    def _refuse_operator(self: VirtualRegister, *_: Any) -> NoReturn:
        refuse("operators", "arithmetic on a register; compute in a tile and register_load it")

    setattr(VirtualRegister, f"__{_name}__", _refuse_operator)
