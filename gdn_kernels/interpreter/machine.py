"""One core running one program: its memory, its trace, and the kernel launch around it.

`Machine` is what every instruction works on. A launch runs the kernel's Python once a core, eagerly and in program
order; two cores take turns over the same shared HBM (see `cores`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import numpy as np

from gdn_kernels.interpreter import hardware, memory
from gdn_kernels.interpreter.alu import Op
from gdn_kernels.interpreter.cores import Meeting, SharedUse, Touch, Turns, check_streams
from gdn_kernels.interpreter.dry import Spec
from gdn_kernels.interpreter.dtypes import NamedOnly, storable
from gdn_kernels.interpreter.dynamic import Indirect
from gdn_kernels.interpreter.memory import Allocation, Buffer, Lifetime, Shape, Storage
from gdn_kernels.interpreter.objects import NKIObject
from gdn_kernels.interpreter.packets import check_packets
from gdn_kernels.interpreter.placement import check_placement
from gdn_kernels.interpreter.rules import kernel_frame, kernel_line, refuse
from gdn_kernels.interpreter.summary import Summary, summarise
from gdn_kernels.interpreter.tensor import NkiTensor
from gdn_kernels.interpreter.trace import Instruction, Operand, Trace


class Launch:
    """What the cores of one launch share: the grid, the target, shared HBM, and how they meet."""

    def __init__(self, cores: int, target: hardware.Target, dry: bool = False) -> None:
        self.cores, self.target, self.dry = cores, target, dry
        self.shared: list[Storage] = []
        self.turns, self.use = Turns(), SharedUse()


class Machine:
    """One core of a launch."""

    def __init__(self, launch: Launch, core: int) -> None:
        self.launch, self.core, self.target = launch, core, launch.target
        self.trace = Trace(core)
        self.lifetimes: list[Lifetime] = []
        self._shared_seen = 0
        self._epoch = 0  # barriers passed

    def allocate(self, shape: Shape, dtype: np.dtype, buffer: Buffer, name: str) -> NkiTensor:
        """Uninitialised memory. The n-th shared_hbm tensor of every core is one tensor."""
        if buffer.on_chip:
            memory.check_on_chip(buffer, shape, dtype, self.target)
        allocation = Allocation(len(self.lifetimes), name, buffer, shape, dtype, kernel_line())
        if buffer is memory.SHARED_HBM:
            storage = self._shared(allocation)
        else:
            storage = Storage.empty(allocation, len(self.trace.instructions), self.launch.dry)
        self.lifetimes.append(storage.lifetime)
        return NkiTensor.whole(storage)

    def _shared(self, allocation: Allocation) -> Storage:
        index, self._shared_seen = self._shared_seen, self._shared_seen + 1
        if index == len(self.launch.shared):
            self.launch.shared.append(Storage.empty(allocation, 0, self.launch.dry))
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
        """Append an instruction to the trace, and note what it used and for how long."""
        index = len(self.trace.instructions)
        frame = kernel_frame()
        line = (frame.f_code.co_filename, frame.f_lineno)
        for view in reads + writes:
            view.storage.lifetime.last_use = index
            if isinstance(view.index, NkiTensor):  # the index of a view addressed at run time is read too
                view.index.storage.lifetime.last_use = index
                reads = reads if any(view.index is read for read in reads) else (*reads, view.index)
        if self.launch.cores > 1:
            self._share(reads, False, line)
            self._share(writes, True, line)
        operands = tuple(_operand("read", t) for t in reads), tuple(_operand("write", t) for t in writes)
        instruction = Instruction(op, engine, *operands, line, name, options)
        self.trace.instructions.append(instruction)
        if engine == "dma":
            check_packets(instruction)

    def _share(self, views: tuple[NkiTensor, ...], writes: bool, line: tuple[str, int]) -> None:
        for view in views:
            if view.buffer is memory.SHARED_HBM:
                elements = view.touched() if isinstance(view, Indirect) else None
                if elements is not None and not elements.size:  # every index was out of bounds and skipped
                    continue
                written = view.array.tobytes() if writes and elements is None and not self.launch.dry else None
                self.launch.use.record(Touch(self.core, self._epoch, writes, view, elements, line, written))

    def barrier(self, data: NkiTensor, cores: Any) -> None:
        """Wait until each of `cores` (an iterable of core numbers) has come here with the same tensor."""
        op, present = "core_barrier", sorted({int(core) for core in cores})
        if data.buffer is not memory.SHARED_HBM:
            refuse("memory-space", f"{data!r}, expected data in nl.shared_hbm", op, "data")
        if self.core not in present or present[-1] >= self.launch.cores:
            refuse("deadlock", f"cores {present} at a barrier of core {self.core} of {self.launch.cores}", op, "cores")
        if len(present) > 1:
            met = self.launch.turns.meet(
                self.core, Meeting(op, kernel_line(), (data.name or data.shape,), data.storage)
            )
            if met is not data.storage:
                refuse(
                    "deadlock", f"core {self.core} waits with {data!r}, the other core with another tensor", op, "data"
                )
            self._epoch += 1
            self.launch.use.barrier(data.storage)

    def sendrecv(self, src: NkiTensor, dst: NkiTensor, send_to_rank: int, recv_from_rank: int, pipe_id: int) -> None:
        """Send `src` to one core while `dst` receives what one core sends, in the group `pipe_id`."""
        op, cores, other = "sendrecv", self.launch.cores, 1 - self.core
        for role, rank in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
            if rank not in range(cores):
                refuse("sendrecv", f"rank {rank}, the launch has {cores} cores", op, role, limit=cores - 1, found=rank)
        if send_to_rank != recv_from_rank:
            detail = (
                f"core {self.core} sends to {send_to_rank} and receives from {recv_from_rank}: the other core waits"
            )
            refuse("sendrecv", detail, op, "recv_from_rank")
        values = src.array.copy()
        if send_to_rank == other:
            line, kind = kernel_line(), (src.shape, src.dtype.name)
            sent, shape, dtype = self.launch.turns.meet(
                self.core, Meeting(op, line, (f"pipe_id={pipe_id}",), (values, *kind))
            )
            if (shape, dtype) != (dst.shape, dst.dtype.name):
                refuse("sendrecv", f"{dst!r} receives {list(shape)} {dtype}", op, "dst")
            values = sent
        dst.array[...] = values
        dst.mark_written()


def _operand(role: str, view: NkiTensor) -> Operand:
    return Operand(role, view.storage.allocation, view.shape, view.strides, view.offset, view.dtype)


class _Running(threading.local):
    """The machines whose programs run on this thread, the innermost launch last."""

    def __init__(self) -> None:
        self.machines: list[Machine] = []


_running = _Running()


def current() -> Machine:
    """The core whose program is running."""
    if not _running.machines:
        raise RuntimeError("nki instructions only run inside a kernel: call one decorated with nki.jit")
    return _running.machines[-1]


def running() -> bool:
    return bool(_running.machines)


def _program(machine: Machine, function: Callable[..., Any], inputs: dict[str, Any]) -> Callable[[], Any]:
    """The kernel as that core runs it."""

    def run() -> Any:
        _running.machines.append(machine)
        try:
            with np.errstate(all="ignore"):  # the engines raise no floating-point exceptions
                return function(**inputs)
        finally:
            _running.machines.pop()

    return run


class Result:
    """What a launch leaves: the outputs in the order returned, each core's machine, and the outputs' allocations."""

    def __init__(
        self, outputs: tuple[Any, ...], single: bool, machines: list[Machine], returned: tuple[Allocation, ...] = ()
    ) -> None:
        self.outputs, self.single, self.machines, self.returned = outputs, single, machines, returned

    def summary(self) -> Summary:
        """What all cores did, added up."""
        return summarise([machine.trace for machine in self.machines], self.returned)


def launch(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    cores: int = 1,
    target: hardware.Target = hardware.TRN2,
    dry: bool = False,
) -> Result:
    """Run `function` on `cores` cores, whatever Python it is written in; `Kernel.launch` looks at that first.

    NumPy arrays become HBM tensors over their own memory, so a kernel that writes an input writes the caller's array;
    everything else is passed as it is.

    A dry launch checks and records every instruction and computes nothing: tensors hold no bytes, an argument may be
    a `Spec`, and so are the outputs. Integers are kept, as they may be addresses; every other value reads as zero, and
    so do the integers of a `Spec`. Rules about values, such as activation-range, have nothing to look at.

    Raises NkiRuleError for the first rule broken.
    """
    shared = Launch(cores, target, dry)
    ids = itertools.count(-1, -1)
    inputs = {name: _input(name, ids, value, shared) for name, value in arguments.items()}
    machines = [Machine(shared, core) for core in range(cores)]
    programs = [_program(machine, function, inputs) for machine in machines]
    returned = [programs[0]()] if cores == 1 else shared.turns.run(programs)
    if cores > 1:
        shared.use.end()
        check_streams(machines[0].trace, machines[1].trace)
    for machine in machines:
        memory.check_capacity(machine.lifetimes, target, machine.trace.instructions)
        check_placement(machine.lifetimes, machine.trace.instructions)
    outputs, single = _outputs(returned)
    results = tuple(Spec(output.shape, output.dtype) if dry else output.array for output in outputs)
    return Result(results, single, machines, tuple(output.storage.allocation for output in outputs))


def _input(name: str, ids: Iterator[int], value: Any, shared: Launch) -> Any:
    """What the kernel gets for one argument: a tensor for an array, a tuple for a list."""
    if isinstance(value, np.ndarray) or (shared.dry and isinstance(value, Spec)):
        dtype = storable(value.dtype, "argument", name, shared.target)
        allocation = Allocation(next(ids), name, memory.SHARED_HBM, value.shape, dtype, "argument")
        if isinstance(value, Spec) or (shared.dry and dtype.kind not in "iu"):
            return NkiTensor.whole(Storage.stand_in(allocation))
        value = value.copy() if shared.dry else value
        return NkiTensor.whole(Storage.of_array(allocation, value))
    if isinstance(value, (tuple, list)):
        return tuple(_input(f"{name}[{number}]", ids, entry, shared) for number, entry in enumerate(value))
    if isinstance(value, (bool, int, float, str, Enum, np.dtype, NamedOnly, NKIObject, Buffer, Op, type(None))):
        return value
    refuse("argument", f"{name} is a {type(value).__name__}")


def _outputs(returned: list[Any]) -> tuple[tuple[NkiTensor, ...], bool]:
    """What the kernel returned, checked, and whether it was a single tensor.

    An output is all of a shared_hbm tensor or of an argument, reshaped or not, and fully written.
    """
    single = not isinstance(returned[0], (tuple, list))
    outputs = (returned[0],) if single else tuple(returned[0])
    seen: dict[int, int] = {}
    for position, tensor in enumerate(outputs):
        what = f"result {position} ({tensor!r})"
        if (
            not isinstance(tensor, NkiTensor)
            or tensor.buffer is not memory.SHARED_HBM
            or tensor.size * tensor.dtype.itemsize != tensor.storage.allocation.bytes
            or not tensor.is_contiguous()
        ):
            refuse("output", f"{what} is not a whole shared_hbm tensor")
        if id(tensor.storage) in seen:
            refuse("output", f"{what} is the same memory as result {seen[id(tensor.storage)]}")
        seen[id(tensor.storage)] = position
        hole = tensor.first_unwritten()
        if hole is not None:
            refuse("output", f"{what} was never written at {hole}", line=tensor.storage.allocation.line)
    for core, other in enumerate(returned[1:], 1):
        theirs = (other,) if not isinstance(other, (tuple, list)) else tuple(other)
        if [id(getattr(tensor, "storage", None)) for tensor in theirs] != list(seen):
            refuse("output", f"core {core} returns {theirs}, core 0 {outputs}")
    return outputs, single
