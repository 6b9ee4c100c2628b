"""The record of every instruction a kernel issued, enough to lay it out in time or to count its bytes later."""

from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from gdn_kernels.interpreter.memory import Allocation, Shape


class Operand(NamedTuple):
    """A view as an instruction used it: everything but the bytes. Strides and offset count elements of `dtype`."""

    role: str
    allocation: Allocation
    shape: Shape
    strides: Shape
    offset: int
    dtype: np.dtype

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Instruction(NamedTuple):
    """One issued instruction. `line` is (file, line number) in the kernel's source."""

    op: str
    engine: str
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    line: tuple[str, int]
    name: str | None
    options: dict[str, Any]


@dataclass
class Trace:
    """All instructions of one core, in program order."""

    core: int
    instructions: list[Instruction] = field(default_factory=list)

    def by_engine(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for instruction in self.instructions:
            counts[instruction.engine] = counts.get(instruction.engine, 0) + 1
        return counts
