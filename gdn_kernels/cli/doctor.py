"""`gdn-kernels doctor`: what this machine has, and the backend that `backend="auto"` would take here.

The wheels are looked at, not imported: a broken installation is what this command is for, and importing torch costs
seconds. Only asking for the backends tries `import nki`.
"""

import argparse
import ast
import glob
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

NEURON_INDEX = "https://pip.repos.neuron.amazonaws.com"

NEURON_WHEELS = ("nki", "neuronx-cc", "torch-neuronx")
OTHER_WHEELS = (
    "gdn-kernels",
    "numpy",
    "ml_dtypes",
    "safetensors",
    "tqdm",
    "matplotlib",
    "torch",
    "transformers",
    "torch-xla",
    "jupyterlab",
)

# The prefixes of the variables that the Neuron runtime, the compiler and NKI read.
VARIABLE_PREFIXES = ("NEURON", "NKI_", "XLA_FLAGS")


def add_parser(subparsers: Any) -> None:
    """Declare the command's options on the action that `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser("doctor", help="what this machine has", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report. Always 0: a machine without Neuron is no error."""
    report = examine()
    print(json.dumps(report, indent=2) if args.json else as_text(report))
    return 0


def examine() -> dict[str, Any]:
    """Everything the command reports, in plain JSON types."""
    backends, auto = _backends()
    return {
        "system": {
            "os": _operating_system(),
            "machine": platform.machine(),
            "cores": _usable_cores(),
            "python": platform.python_version(),
        },
        "devices": sorted(glob.glob("/dev/neuron[0-9]*")),
        "wheels": {name: wheel(name) for name in (*NEURON_WHEELS, *OTHER_WHEELS)},
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLE_PREFIXES)},
        "backends": backends,
        "auto": auto,
    }


def wheel(name: str) -> dict[str, Any]:
    """Version and state of one distribution: `absent`, `installed`, `stand-in` (all it does is raise) or `damaged`."""
    try:
        distribution = metadata.distribution(name)
        if distribution.files is not None and not _code(distribution):
            raise FileNotFoundError("its files are gone")
        return {"state": "stand-in" if is_stand_in(distribution) else "installed", "version": distribution.version}
    except metadata.PackageNotFoundError:
        return {"state": "absent", "version": None}
    except Exception as error:  # an unreadable or half-deleted installation must still be reported
        return {"state": "damaged", "version": None, "error": f"{type(error).__name__}: {error}"}


def is_stand_in(distribution: metadata.Distribution) -> bool:
    """Whether all the code of a distribution is one `__init__.py` whose first statement, docstring aside, raises.

    That is what the general Python index has under the names of the Neuron wheels. Reading the file tells them apart
    without importing anything, and also where the stand-in's folder has a name that Python can't import (`neuronx-cc`).
    """
    code = _code(distribution)
    if len(code) != 1 or code[0].name != "__init__.py":
        return False
    module = ast.parse(Path(str(code[0].locate())).read_text(encoding="utf-8"))
    statements = module.body[1:] if ast.get_docstring(module) is not None else module.body
    return bool(statements) and isinstance(statements[0], ast.Raise)


def _code(distribution: metadata.Distribution) -> list[metadata.PackagePath]:
    # An editable installation may have no more than a .pth file. Python 3.12 and later leave out files that are gone.
    return [path for path in distribution.files or [] if path.suffix in (".py", ".so", ".pth")]


def as_text(report: dict[str, Any]) -> str:
    """The report for a reader."""
    system = report["system"]
    lines = [
        f"system    {system['os']}, {system['machine']}, {system['cores']} cores, Python {system['python']}",
        f"devices   {', '.join(report['devices']) or 'no /dev/neuron*: not a Neuron instance, or no driver'}",
        "",
        "wheels",
    ]
    lines += [f"  {name:<14} {_wheel_text(state)}" for name, state in report["wheels"].items()]
    lines += ["", "variables"]
    lines += [f"  {name}={value}" for name, value in report["variables"].items()] or [
        "  none of NEURON*, NKI_*, XLA_FLAGS is set"
    ]
    lines += ["", "backends"]
    lines += [
        f"  {b['name']:<14} {'available' if b['available'] else 'unavailable'}: {b['why']}" for b in report["backends"]
    ]
    lines += ["", f"auto      {report['auto']['name'] or 'none'}: {report['auto']['why']}"]
    return "\n".join(lines)


def _wheel_text(state: dict[str, Any]) -> str:
    if state["state"] == "stand-in":
        return f"{state['version']} is a stand-in that raises ImportError; the real one is on {NEURON_INDEX}"
    if state["state"] == "damaged":
        return f"damaged: {state['error']}"
    return state["version"] or "absent"


def _backends() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The backends as `gdn_kernels.backends` sees them, and its choice for `auto` with the reason."""
    try:
        from gdn_kernels import backends

        found = [{"name": b.name, "available": b.available, "why": b.why} for b in backends.available()]
        name = backends.choose("auto")
    except Exception as error:  # the report is of most use on a machine where this fails
        return [], {"name": None, "why": f"asking for the backends failed: {type(error).__name__}: {error}"}
    reason = next((b["why"] for b in found if b["name"] == name), "")
    return found, {"name": name, "why": reason}


def _operating_system() -> str:
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']} (kernel {platform.release()})"
    except (OSError, KeyError):  # not Linux, or a minimal image
        return f"{platform.system()} {platform.release()}"


def _usable_cores() -> int:
    # A container may use fewer cores than the machine has; macOS doesn't tell.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
