"""The rules a kernel can break, and how the interpreter says so.

Each rule is one row: what it demands, where that is documented and how bad breaking it is.
`error` means the hardware or the compiler refuses it, `unclear` that documents disagree or the compiler may cope,
`slow` that it is legal and costs time. Errors raise `NkiRuleError`; the other two are `NkiRuleWarning`s, which
`strict()` turns into errors. `without(...)` switches single rules off.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

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
    ("ap-on-view", "unclear", "ap is called on a whole tensor", "API NkiTensor.ap; Access-pattern guide"),
    ("operators", "error", "tensors and registers have no Python operators or truth value", "Migration guide"),
    ("dynamic-loop", "unclear", "run-time loops are nl.fori_loop and nl.while_loop", "Release notes"),
    ("older-target", "unclear", "the target is one whose rules are modelled: trn2 or trn3", "API jit"),
    ("placement", "error", "an address is aligned, in bounds, and no other live tile's", "API ndarray"),
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
    ("enum-value", "unclear", "an enumeration is named, as in nisa.dge_mode.none, not given by its value", "Migration"),
    ("value-kind", "unclear", "memset takes a float for a float tile", "Release notes; NKI Library uses the int 0"),
    ("documents-disagree", "unclear", "the documents agree on what an instruction does", "API reference"),
    ("registers", "error", "accumulator registers are set before they are added to or read", "API reduce_cmd"),
    ("tile-position", "unclear", "Tensor engine tiles lie over their operands' partitions", "NKI Library qkv_tkg"),
    ("psum-alignment", "unclear", "16-bit PSUM writes start on 4 bytes", "NKI Library"),
    ("short-runs", "slow", "a DMA moves runs of 512 bytes or more", "DMA bandwidth guide"),
    ("element-runs", "slow", "neighbours in a DMA are neighbours in memory on both sides", "DMA bandwidth guide"),
    ("subset", "error", "kernels are written in the compiler's Python subset", "Language guide"),
    ("subset-unclear", "unclear", "kernels use only the Python that the compiler documents", "Migration guide"),
    ("purity", "error", "a kernel is a function of its arguments alone", "API jit"),
    ("race", "error", "a barrier lies between a core's write and the other core's use", "API core_barrier"),
    ("same-bytes", "unclear", "two cores write different bytes; NKI Library's write the same values twice", "LNC page"),
    ("race-barrier", "unclear", "the barrier between two cores' uses is one on that tensor", "API core_barrier"),
    ("deadlock", "error", "both cores arrive at every barrier and exchange", "API core_barrier, sendrecv"),
    ("sendrecv", "error", "the cores send what the other receives", "API sendrecv"),
    ("unequal-streams", "error", "both cores run the same instructions on operands of equal shapes", "LNC page"),
)
RULES = {row[0]: Rule(*row) for row in _ROWS}


class _Broken(Exception):
    """What an error and a warning say about a broken rule.

    Attributes: rule (Rule, with its source), instruction (its kind, such as "nc_matmul"), name (the `name=` the kernel
    gave it, or None), operand, detail (limit and value in words), limit and found (the same as values, where the rule
    is a limit), line ("file:line" in the kernel).
    """

    def __init__(
        self,
        rule: str,
        detail: str,
        instruction: str = "",
        operand: str = "",
        line: str = "",
        *,
        limit: Any = None,
        found: Any = None,
    ) -> None:
        self.rule = RULES[rule]
        self.detail, self.instruction, self.operand = detail, instruction, operand
        self.limit, self.found = limit, found
        self.name: str | None = None
        self.line = line or kernel_line()
        super().__init__(rule, detail, instruction, operand, line)

    def __str__(self) -> str:
        named = f"{self.instruction} {self.name!r}" if self.name else self.instruction
        where = " ".join(part for part in (named, self.operand and f"operand {self.operand}") if part)
        rule = f"rule {self.rule.name}: {self.rule.text}; {self.rule.source}"
        return f"{where + ': ' if where else ''}{self.detail} [{rule}] at {self.line}"


class NkiRuleError(_Broken):
    """A rule was broken."""


class UnknownName(NkiRuleError, AttributeError):
    """A name that nki doesn't have; `hasattr` says so too."""


class NkiRuleWarning(_Broken, UserWarning):
    """A rule of severity `unclear` or `slow` was broken."""


# Rules that a launch may go on without: the instruction still has a meaning when one of them is broken.
OPTIONAL = frozenset(
    {"capacity", "start-partition", "uninitialised", "activation-range", "race", "unequal-streams", "subset"}
    | {rule.name for rule in RULES.values() if rule.severity != "error"}
)
_strict = False
_off: frozenset[str] = frozenset()


@contextmanager
def strict() -> Iterator[None]:
    """Inside, a broken rule of severity `unclear` or `slow` is an error too."""
    global _strict
    before, _strict = _strict, True
    try:
        yield
    finally:
        _strict = before


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Inside, these rules are not checked.

    Raises ValueError for a rule that doesn't exist or that instructions have no meaning without.
    """
    global _off
    for name in names:
        if name not in OPTIONAL:
            raise ValueError(f"rule must be one of {', '.join(sorted(OPTIONAL))}, got {name!r}")
    before, _off = _off, _off | set(names)
    try:
        yield
    finally:
        _off = before


def kernel_frame() -> Any:
    """The innermost frame outside the interpreter, or None.

    A kernel module that only wraps instructions says so with `__nki_wrapper__ = True`; its callers are meant then.
    """
    frame = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename.startswith(PACKAGE) or "__nki_wrapper__" in frame.f_globals):
        frame = frame.f_back  # type: ignore[assignment]
    return frame


def kernel_line() -> str:
    """The innermost source line outside the interpreter, as "file:line"."""
    frame = kernel_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"


def refuse(
    rule: str,
    detail: str,
    instruction: str = "",
    operand: str = "",
    *,
    line: str = "",
    limit: Any = None,
    found: Any = None,
) -> NoReturn:
    """Raise the error of a broken rule of severity `error`."""
    raise NkiRuleError(rule, detail, instruction, operand, line, limit=limit, found=found)


def report(
    rule: str,
    detail: str,
    instruction: str = "",
    operand: str = "",
    line: str = "",
    *,
    limit: Any = None,
    found: Any = None,
) -> None:
    """Report a broken rule that can be switched off: an error or a warning as its severity says."""
    if rule in _off:
        return
    if _strict or RULES[rule].severity == "error":
        raise NkiRuleError(rule, detail, instruction, operand, line, limit=limit, found=found)
    warning = NkiRuleWarning(rule, detail, instruction, operand, line, limit=limit, found=found)
    file, _, number = warning.line.rpartition(":")
    warnings.warn_explicit(warning, None, file or "?", int(number) if number.isdigit() else 0, registry=_registry)


_registry: dict[Any, Any] = {}  # a warning is shown once for each line of a kernel, whatever the instruction
