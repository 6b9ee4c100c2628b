"""One core running one program: its memory, its trace, and the kernel launch around it.

`Machine` is what every instruction works on. A launch runs the kernel's Python once a core, eagerly and in program
order; with two cores, one after the other over the same shared HBM.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.interpreter import hardware, memory
from gdn_kernels.interpreter.memory import Allocation, Buffer, Lifetime, Shape, Storage
from gdn_kernels.interpreter.rules import PACKAGE, kernel_line, refuse
from gdn_kernels.interpreter.tensor import NkiTensor
from gdn_kernels.interpreter.trace import Instruction, Operand, Trace


class Launch:
    """What the cores of one launch share: the grid, the target, the inputs and shared HBM."""

    def __init__(self, cores: int, target: hardware.Target) -> None:
        self.cores, self.target = cores, target
        self.shared: list[Storage] = []


class Machine:
    """One core of a launch."""

    def __init__(self, launch: Launch, core: int) -> None:
        self.launch, self.core, self.target = launch, core, launch.target
        self.trace = Trace(core)
        self.lifetimes: list[Lifetime] = []
        self._shared_seen = 0

    def allocate(self, shape: Shape, dtype: np.dtype, buffer: Buffer, name: str) -> NkiTensor:
        """Uninitialised memory. The n-th shared_hbm tensor of every core is one tensor."""
        if buffer.on_chip:
            memory.check_on_chip(buffer, shape, dtype)
        allocation = Allocation(len(self.lifetimes), name, buffer, shape, dtype, kernel_line())
        if buffer is memory.SHARED_HBM:
            storage = self._shared(allocation)
        else:
            storage = Storage.empty(allocation, born=len(self.trace.instructions))
        self.lifetimes.append(storage.lifetime)
        return NkiTensor.whole(storage)

    def _shared(self, allocation: Allocation) -> Storage:
        index, self._shared_seen = self._shared_seen, self._shared_seen + 1
        if index == len(self.launch.shared):
            self.launch.shared.append(Storage.empty(allocation, born=0))
        found = self.launch.shared[index]
        if (found.allocation.shape, found.allocation.dtype) != (allocation.shape, allocation.dtype):
            wanted, had = f"{allocation.shape} {allocation.dtype}", f"{found.allocation.shape} {found.allocation.dtype}"
            refuse("output", f"core {self.core} allocates shared_hbm {wanted} where core 0 allocated {had}")
        return found

    def record(
        self,
        op: str,
        engine: str,
        reads: tuple[NkiTensor, ...],
        writes: tuple[NkiTensor, ...],
        name: str | None,
        /,
        **options: Any,
    ) -> None:
        """Append an instruction to the trace and extend the life of the tiles it uses."""
        index = len(self.trace.instructions)
        frame = sys._getframe(2)
        while frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back  # type: ignore[assignment]
        for view in reads + writes:
            view.storage.lifetime.last_use = index
        line = (frame.f_code.co_filename, frame.f_lineno)
        operands = tuple(_operand("read", t) for t in reads), tuple(_operand("write", t) for t in writes)
        self.trace.instructions.append(Instruction(op, engine, *operands, line, name, options))


def _operand(role: str, view: NkiTensor) -> Operand:
    return Operand(role, view.storage.allocation, view.shape, view.strides, view.offset, view.dtype)


_current: list[Machine] = []


def current() -> Machine:
    """The core whose program is running."""
    if not _current:
        raise RuntimeError("nki instructions only run inside a kernel: call one decorated with nki.jit")
    return _current[-1]


def running() -> bool:
    return bool(_current)


@contextmanager
def _running(machine: Machine):  # type: ignore[no-untyped-def]
    _current.append(machine)
    try:
        with np.errstate(all="ignore"):  # the engines raise no floating-point exceptions
            yield
    finally:
        _current.pop()


class Result:
    """What a launch leaves: the outputs in the order returned, and each core's machine."""

    def __init__(self, outputs: tuple[npt.NDArray[Any], ...], single: bool, machines: list[Machine]) -> None:
        self.outputs, self.single, self.machines = outputs, single, machines


def launch(
    function: Callable[..., Any], arguments: dict[str, Any], cores: int = 1, target: hardware.Target = hardware.TRN2
) -> Result:
    """Run `function` on `cores` cores. NumPy arrays become HBM tensors over their own memory, so a kernel that writes
    an input writes the caller's array; everything else is passed as it is.

    Raises NkiRuleError for the first rule refuse.
    """
    shared = Launch(cores, target)
    inputs = {name: _input(name, index, value) for index, (name, value) in enumerate(arguments.items())}
    returned, machines = [], []
    for core in range(cores):
        machine = Machine(shared, core)
        machines.append(machine)
        with _running(machine):
            returned.append(function(**inputs))
        memory.check_capacity(machine.lifetimes, target)
    return Result(*_outputs(returned), machines)


def _input(name: str, index: int, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        allocation = Allocation(-1 - index, name, memory.SHARED_HBM, value.shape, value.dtype, "argument")
        return NkiTensor.whole(Storage.of_array(allocation, value))
    if isinstance(value, (bool, int, float, str, tuple, type(None))):
        return value
    refuse("argument", f"{name} is a {type(value).__name__}")


def _outputs(returned: list[Any]) -> tuple[tuple[npt.NDArray[Any], ...], bool]:
    single = not isinstance(returned[0], (tuple, list))
    outputs = (returned[0],) if single else tuple(returned[0])
    seen: set[int] = set()
    for position, tensor in enumerate(outputs):
        if (
            not isinstance(tensor, NkiTensor)
            or tensor.buffer is not memory.SHARED_HBM
            or tensor.size != prod(tensor.storage.allocation.shape)
        ):
            refuse("output", f"result {position} is {tensor!r}, not a whole shared_hbm tensor")
        if id(tensor.storage) in seen:
            refuse("output", f"result {position} ({tensor!r}) is returned twice")
        seen.add(id(tensor.storage))
        hole = tensor.first_unwritten()
        if hole is not None:
            refuse("output", f"result {position} ({tensor!r}) was never written at {hole}")
    return tuple(tensor.array for tensor in outputs), single
