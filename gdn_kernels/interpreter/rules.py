"""The rules a kernel can break, and how the interpreter says so.

Each rule is one row: what it demands, where that is documented and how bad breaking it is.
`error` means the hardware or the compiler refuses it, `unclear` that documents disagree or the compiler may cope,
`slow` that it is legal and costs time. Errors raise `NkiRuleError`; the other two are `NkiRuleWarning`s.
"""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PACKAGE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Rule:
    name: str
    severity: str  # error | unclear | slow
    text: str
    source: str


_ROWS = (
    ("unknown-instruction", "error", "only documented instructions and keywords exist", "API reference"),
    ("not-modelled", "error", "the interpreter does not model this instruction or option", "interpreter"),
    ("target", "error", "the instruction, dtype or limit belongs to another chip generation", "API reference"),
    ("objects-not-strings", "error", "buffers, engines, dtypes and ops are objects of nl and nisa", "Language guide"),
    ("partition-count", "error", "an on-chip tensor or operand has at most 128 partitions", "Architecture guide"),
    ("partition-first", "error", "on chip, dimension 0 is the partition and stays whole", "Language guide"),
    ("rank", "error", "an on-chip tensor or view has at least two dimensions", "Language guide"),
    ("start-partition", "error", "an engine operand starts at a partition its count allows", "Architecture guide"),
    ("memory-space", "error", "the engine can't reach this memory", "Architecture guide"),
    ("bounds", "error", "a view stays inside its tensor", "Access-pattern guide"),
    ("pattern", "error", "an access pattern has legal strides, counts and dimensions", "Access-pattern guide"),
    ("psum-bank", "error", "a matmul result lies within one 2 KiB PSUM bank", "API nc_matmul"),
    ("capacity", "error", "live tiles fit the memory", "Architecture guide; NKI Library allocator"),
    ("capacity-safe", "unclear", "staying below 192 KiB a partition of SBUF is safe everywhere", "Architecture guides"),
    ("uninitialised", "error", "memory is read only after it was written", "Language guide"),
    ("overlap", "error", "source and destination are the same view or don't overlap", "interpreter"),
    ("shape", "error", "operands agree in partitions and in elements a partition", "API common fields"),
    ("scalar-operand", "error", "a per-partition operand is a (P, 1) fp32 view", "API tensor_scalar, activation"),
    ("dtype", "error", "operand dtypes are ones the instruction takes", "API reference"),
    ("operation", "error", "the op is one that the instruction and its engine have", "API reference"),
    ("engine", "error", "the engine can run this instruction", "API reference"),
    ("two-psum-inputs", "error", "two tile operands are not both in PSUM", "API tensor_tensor"),
    ("accumulate", "error", "a matmul adds only to what a matmul wrote, while its group is open", "API nc_matmul"),
    ("activation-range", "error", "an activation's input lies in its valid interval", "API activation"),
    ("output", "error", "outputs are fully written shared_hbm tensors, each returned once", "API jit"),
    ("argument", "error", "a kernel argument is a tensor, a number, a string, None or a tuple of these", "Migration"),
    ("dma", "error", "a DMA moves between HBM and SBUF, element for element", "API dma_copy"),
    ("psum-alignment", "unclear", "16-bit PSUM writes start on 4 bytes", "NKI Library"),
    ("short-runs", "slow", "a DMA moves runs of 512 bytes or more", "DMA bandwidth guide"),
)
RULES = {row[0]: Rule(*row) for row in _ROWS}


class NkiRuleWarning(UserWarning):
    """A rule of severity `unclear` or `slow` was refuse."""


class NkiRuleError(Exception):
    """A rule was refuse.

    Attributes: rule (Rule), instruction (str), operand (str), detail (str: limit and value found), line ("file:line").
    """

    def __init__(self, rule: str, detail: str, instruction: str = "", operand: str = "", line: str = "") -> None:
        self.rule = RULES[rule]
        self.detail, self.instruction, self.operand = detail, instruction, operand
        self.line = line or kernel_line()
        super().__init__(self.message())

    def message(self) -> str:
        where = " ".join(part for part in (self.instruction, self.operand and f"operand {self.operand}") if part)
        rule = f"rule {self.rule.name}: {self.rule.text}; {self.rule.source}"
        return f"{where + ': ' if where else ''}{self.detail} [{rule}] at {self.line}"


def kernel_line() -> str:
    """The innermost source line outside the interpreter, as "file:line"."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"


def refuse(rule: str, detail: str, instruction: str = "", operand: str = "") -> NoReturn:
    """Raise the error of a broken rule of severity `error`."""
    raise NkiRuleError(rule, detail, instruction, operand)


def warn(rule: str, detail: str, instruction: str = "", operand: str = "") -> None:
    """Warn of a broken rule of severity `unclear` or `slow`."""
    warnings.warn(NkiRuleWarning(NkiRuleError(rule, detail, instruction, operand).message()), stacklevel=3)
