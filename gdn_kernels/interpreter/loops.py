"""Loops and conditions that run on the device, run here as they come: every iteration is executed and recorded.

A body gets registers, which hold no value for Python; what it computes lives in tiles. On the device one copy of the
body runs many times, so a trace of such a loop holds more instructions than the program.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.isa.registers import VirtualRegister, read
from gdn_kernels.interpreter.rules import refuse, report

_in_order: set[machine.Machine] = set()  # cores inside `no_reorder`


@contextmanager
def no_reorder() -> Iterator[None]:
    """Inside, the compiler keeps program order, which the interpreter always does."""
    core = machine.current()
    outermost = core not in _in_order
    _in_order.add(core)
    try:
        yield
    finally:
        if outermost:
            _in_order.discard(core)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[VirtualRegister], None], step: int = 1) -> None:
    """body_fun(i) for every i from lower up to upper; both are ints or registers, i is a register."""
    for value in _range("fori_loop", lower, upper, step):
        body_fun(VirtualRegister(value))


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """r = body_fun(r) for as long as the register r isn't zero."""
    op = "while_loop"
    _outside_no_reorder(op)
    condition = init
    while read(op, "init", condition) != 0:
        condition = body_fun(VirtualRegister(read(op, "init", condition)))
        if not isinstance(condition, VirtualRegister):
            refuse("operation", f"the body returned {condition!r}, expected a register", op, "body_fun")


def if_else(cond: Any, then_fn: Callable[[], None], else_fn: Callable[[], None] | None = None) -> None:
    """then_fn() if the register cond isn't zero, else else_fn()."""
    _outside_no_reorder("if_else")
    if read("if_else", "cond", cond) != 0:
        then_fn()
    elif else_fn is not None:
        else_fn()


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """The registers of a loop that runs on the device; gone since NKI 0.7."""
    report("dynamic-loop", "nl.dynamic_range, which NKI 0.7 no longer has", "dynamic_range")
    lower, upper = (0, start) if stop is None else (start, stop)
    return (VirtualRegister(value) for value in _range("dynamic_range", lower, upper, step))


def _range(op: str, lower: Any, upper: Any, step: Any) -> range:
    _outside_no_reorder(op)
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        refuse("operation", f"{step!r}, a step is a positive int known at compile time", op, "step")
    return range(read(op, "lower", lower), read(op, "upper", upper), step)


def _outside_no_reorder(op: str) -> None:
    if machine.current() in _in_order:
        refuse("operation", "a run-time loop inside nl.no_reorder()", op)
