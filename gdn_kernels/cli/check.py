"""`gdn-kernels check`: run somebody's NKI kernel in the interpreter and say which of the hardware's rules it breaks.

    python -m gdn_kernels check FILE.py:KERNEL --args x=float32[128,512] n=4

An argument is a tensor, DTYPE[SHAPE], or a Python literal. Tensors are filled with seeded random numbers. Exit status:
0 when no rule is broken, 1 when one is, 2 for wrong usage.
"""

import argparse
import ast
import importlib
import inspect
import json
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gdn_kernels.interpreter import Kernel, NkiRuleError, NkiRuleWarning, Spec, hardware, installed, memory
from gdn_kernels.interpreter.machine import Machine, Result

TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d,\s]*)\]")


class UsageError(Exception):
    """Something on the command line that can't be done; the message says what."""


def add_parser(subparsers: Any) -> None:
    """Declare the command's options on the action that `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "check", help="run a kernel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", metavar="FILE.py:KERNEL", help="a file and the kernel function in it")
    parser.add_argument(
        "--args", nargs="*", default=[], metavar="NAME=VALUE", help="float32[128,512], bfloat16[8], 4, (2,3), None, ..."
    )
    parser.add_argument("--lnc", type=int, default=1, choices=(1, 2), help="cores (default 1)")
    parser.add_argument("--target", default="trn2", choices=hardware.TARGETS, help="chip generation (default trn2)")
    parser.add_argument("--seed", type=int, default=0, help="of the random tensors (default 0)")
    parser.add_argument("--dry", action="store_true", help="check and record only: no values, no rules about them")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw the memory occupancy of core 0")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    try:
        with _loaded(args.kernel) as kernel:
            arguments = _arguments(args.args, args.seed, args.dry)
            _check_signature(kernel, arguments)
            report = _check(kernel[args.lnc], arguments, args)
    except UsageError as error:
        print(f"gdn-kernels check: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report) if args.json else _text(report))
    return 1 if report["broken"] else 0


def _check(kernel: Kernel, arguments: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Launch the kernel; the report of it as plain types."""
    report: dict[str, Any] = {"kernel": args.kernel, "target": args.target, "lnc": args.lnc, "broken": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NkiRuleWarning)
        try:
            result = kernel.launch(**arguments, target=hardware.TARGETS[args.target], dry=args.dry)
        except NkiRuleError as error:
            report["broken"] = _described(error)
        except Exception as error:
            report["broken"] = {"rule": "python", "message": _python_error(error)}
        else:
            report |= result.summary().as_dict() | {"memory": _memory(result)}
            if args.figure:
                _draw(result.machines[0], args)
    report["warnings"] = _grouped([entry.message for entry in caught if isinstance(entry.message, NkiRuleWarning)])
    return report


# ---- the kernel and its arguments ----


@contextmanager
def _loaded(name: str) -> Iterator[Kernel]:
    """The kernel named FILE.py:KERNEL. Inside, `nki` means the interpreter and what the file imported of its own tree
    is imported; afterwards neither."""
    file, colon, attribute = name.rpartition(":")
    path = Path(file)
    if not colon or not attribute or not path.is_file():
        raise UsageError(f"expected FILE.py:KERNEL with an existing file, got {name!r}")
    root, module_name = _module_name(path.resolve())
    before = set(sys.modules)
    sys.path.insert(0, str(root))
    try:
        with installed():
            yield _kernel(_import(path, module_name), attribute)
    finally:
        sys.path.remove(str(root))
        for module in set(sys.modules) - before:
            if Path(getattr(sys.modules[module], "__file__", None) or "").is_relative_to(root):
                del sys.modules[module]


def _module_name(path: Path) -> tuple[Path, str]:
    """The folder to import a file from and its name there: within its package, where it has one, so that its relative
    imports work."""
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").exists():
        root, parts = root.parent, [root.name, *parts]
    return root, ".".join(parts)


def _import(path: Path, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UsageError(f"{path} can't be imported: {type(error).__name__}: {error}") from error


def _kernel(module: ModuleType, name: str) -> Kernel:
    kernel = getattr(module, name, None)
    if isinstance(kernel, Kernel):
        return kernel
    if not callable(kernel):
        kernels = [key for key, value in vars(module).items() if isinstance(value, Kernel)]
        raise UsageError(
            f"{module.__file__} has no kernel {name!r}; decorated with nki.jit: {', '.join(kernels) or 'none'}"
        )
    return Kernel(kernel)


def _arguments(words: list[str], seed: int, dry: bool) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--args takes NAME=VALUE, got {word!r}")
        tensor = TENSOR.fullmatch(value)
        if tensor:
            shape = tuple(int(size) for size in tensor["shape"].split(",") if size.strip())
            dtype = _dtype(tensor["dtype"])
            found[name] = Spec(shape, dtype) if dry else _random(rng, shape, dtype)
            continue
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise UsageError(f"{name} must be DTYPE[SHAPE] or a Python literal, got {value!r}") from None
    return found


def _check_signature(kernel: Kernel, arguments: dict[str, Any]) -> None:
    signature = inspect.signature(kernel.function)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(f"{kernel.__name__}{signature}: {error}") from None


def _dtype(name: str) -> np.dtype:
    from gdn_kernels.interpreter import language

    found = vars(language).get(name)
    if not isinstance(found, np.dtype):
        known = sorted(key for key, value in vars(language).items() if isinstance(value, np.dtype))
        raise UsageError(f"dtype {name!r} is none of {', '.join(known)}")
    return found


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Standard normal numbers; integers from 0 to 7."""
    if dtype.kind in "iub":
        return rng.integers(0, 2 if dtype.kind == "b" else 8, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


# ---- the report ----


def _described(broken: NkiRuleError | NkiRuleWarning) -> dict[str, Any]:
    names = ("instruction", "name", "operand", "detail", "limit", "found", "line")
    return {
        "rule": broken.rule.name,
        "severity": broken.rule.severity,
        "source": broken.rule.source,
        "message": str(broken),
        **{name: getattr(broken, name) for name in names},
    }


def _python_error(error: Exception) -> str:
    """What a kernel raised and the innermost of its own lines."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "gdn_kernels/interpreter" not in frame.filename
    ]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _grouped(found: list[NkiRuleWarning]) -> list[dict[str, Any]]:
    """Equal rules at equal lines together, most frequent first, each with its first detail."""
    counts = Counter((warning.rule.name, warning.line) for warning in found)
    firsts = {(warning.rule.name, warning.line): warning for warning in reversed(found)}
    return [{"count": count, **_described(firsts[key])} for key, count in counts.most_common()]


def _memory(result: Result) -> list[dict[str, Any]]:
    peaks = []
    for machine in result.machines:
        for buffer in (memory.SBUF, memory.PSUM):
            found = memory.occupancy(machine.lifetimes, buffer)
            holders = [
                {"name": held.name, "shape": held.shape, "bytes": memory.footprint(held), "line": held.line}
                for held in found.holders[:5]
            ]
            limit = memory.limit_of(buffer, machine.target)
            entry = {"core": machine.core, "memory": buffer.name, "peak": found.peak, "limit": limit}
            peaks.append({**entry, "at_instruction": found.at, "holders": holders})
    return peaks


def _draw(machine: Machine, args: argparse.Namespace) -> None:
    from gdn_kernels.plots import memory_occupancy

    memory_occupancy(machine, f"{args.kernel}, core {machine.core} of {args.lnc}", args.figure)


def _text(report: dict[str, Any]) -> str:
    lines = [f"{report['kernel']} on {report['target']}, {report['lnc']} core(s)"]
    broken = report["broken"]
    lines.append(f"rule broken: {broken['message']}" if broken else "rules: none broken")
    for warning in report["warnings"]:
        lines.append(f"warning ({warning['severity']}), {warning['count']} times: {warning['message']}")
    if broken:
        return "\n".join(lines)
    for peak in report["memory"]:
        share = f"{peak['peak']:,} of {peak['limit']:,} bytes a partition"
        lines.append(f"core {peak['core']} {peak['memory']}: {share}, at instruction {peak['at_instruction']}")
        for held in peak["holders"]:
            lines.append(f"    {held['bytes']:>8,} {held['name'] or 'tile'} {list(held['shape'])} from {held['line']}")
    engines = ", ".join(f"{engine} {count:,}" for engine, count in sorted(report["by_engine"].items()))
    lines.append(f"instructions: {report['instructions']:,} ({engines})")
    for direction, count in sorted(report["dma_bytes"].items()):
        lines.append(f"DMA {direction}: {count:,} bytes")
    lines.append(
        "DMA bytes by run length: " + ", ".join(f"{run}: {count:,}" for run, count in report["run_bytes"].items())
    )
    lines.append(f"HBM scratch: {report['scratch_bytes']:,} bytes")
    return "\n".join(lines)
