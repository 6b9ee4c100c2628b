"""The accumulator registers: one fp32 a lane, which instructions reduce into across calls.

The Scalar engine has one set, which activations share, and the Vector engine another, which its reducing instructions
share. A register is set by a reset or a load before it is added to or read: what it holds otherwise is left over.
"""

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from gdn_kernels.interpreter import hardware, machine
from gdn_kernels.interpreter.alu import OPS, Op
from gdn_kernels.interpreter.isa.enums import ReduceCmd
from gdn_kernels.interpreter.isa.operands import Array, check_column, check_floating, write
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

IDENTITY = {"add": 0.0, "subtract": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}
IDENTITY.update(abs_max=0.0, abs_min=np.inf)


class Registers:
    """The registers of one engine of one core. known: bool [128], which of them were set."""

    def __init__(self) -> None:
        self.values = np.zeros(hardware.PARTITIONS, np.float32)
        self.known = np.zeros(hardware.PARTITIONS, bool)


_registers: "WeakKeyDictionary[machine.Machine, dict[str, Registers]]" = WeakKeyDictionary()


class Lanes:
    """The registers below the partitions of `data`, as one instruction uses them."""

    def __init__(self, op: str, engine: str, data: NkiTensor) -> None:
        self.op = op
        self.registers = _registers.setdefault(machine.current(), {}).setdefault(engine, Registers())
        self.at = slice(data.start_partition, data.start_partition + data.shape[0])

    def set(self, values: Any) -> None:
        self.registers.values[self.at] = values
        self.registers.known[self.at] = True

    def forget(self) -> None:
        """What an instruction that may clobber the registers leaves in them."""
        self.registers.known[self.at] = False

    def get(self) -> Array:
        """fp32 [P]."""
        if not self.registers.known[self.at].all():
            refuse("registers", "no reset_reduce, reset or load_reduce came before", self.op, "reduce_cmd")
        return self.registers.values[self.at].copy()

    def start(self, cmd: ReduceCmd, operation: Op, init: Any = None) -> None:
        """Make the registers ready to be reduced into: reset, loaded with `init` ([P] or a constant), or kept."""
        if cmd in (ReduceCmd.reset, ReduceCmd.reset_reduce):
            self.set(IDENTITY[operation.name])
        elif cmd is ReduceCmd.load_reduce:
            self.set(init)
        else:
            self.get()

    def reduce(self, operation: Op, values: Array) -> None:
        """registers = registers op (op over values [P, N], from left to right)."""
        assert operation.binary is not None
        self.set(operation.binary(self.get(), fold(operation, values)))

    def store(self, result: NkiTensor, data: NkiTensor, negate: bool = False) -> None:
        """Write the registers to a (P, 1) tile."""
        check_column(self.op, "reduce_res", result, data)
        check_floating(self.op, "reduce_res", result)
        values = self.get()
        write(result, -values if negate else values)


def fold(operation: Op, values: Array) -> Array:
    """The last axis combined from left to right: NumPy's own sums pair terms differently for different lengths."""
    assert operation.binary is not None
    if operation.name.startswith("logical"):
        ufunc = {"logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor}
        return ufunc[operation.name].reduce(values != 0, axis=-1).astype(np.float32)
    if values.shape[-1] > 32 and isinstance(operation.binary, np.ufunc):
        return operation.binary.accumulate(values, axis=-1)[..., -1]
    result = values[..., 0].copy()
    for index in range(1, values.shape[-1]):
        result = operation.binary(result, values[..., index])
    return result


ADD, MAXIMUM = OPS["add"], OPS["maximum"]
