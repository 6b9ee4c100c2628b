"""Timing the fused block on a Trainium device. Unproven: written to the documentation, and run by nobody so far.

Two ways, as the SDK has no benchmark of its own for a kernel any more:

- A compiled file (NEFF) under nrtpy, which reads execution times from the device. nrtpy and nki can't share an
  environment (nrtpy, "Get started"), so the file is compiled in one and timed in the other. The better figure.
- torch-neuronx, by the clock of the host around launches with a synchronisation before and after (Neuron Explorer,
  "Troubleshooting", on timing without a profile). It holds what the host takes to launch, too.

Neither looks at the results: `gdn-kernels run --backend trn2` does, and comes first.
"""

import glob
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from gdn_kernels import backends
from gdn_kernels.dims import MODELS
from gdn_kernels.dtypes import Array, is_bfloat16
from gdn_kernels.latency.rows import TARGETS, VERSIONS, Row, today

KERNEL = "gdn_block_tkg"
NORM_EPS = 1e-6
LAUNCHES = 10  # between two synchronisations, so that their cost and the host's are shared
NRTPY_HOW = "nrtpy, device-side times of single executions"
TORCH_HOW = f"torch-neuronx, host clock around {LAUNCHES} dependent launches, launch overhead included"


class CannotMeasure(RuntimeError):
    """This machine or environment can't measure that way. The message is one line that says what is missing."""


@dataclass(frozen=True)
class Case:
    """What is timed: a published model at B sequences on `lnc` cores."""

    model: str
    B: int
    lnc: int


@dataclass(frozen=True)
class Neff:
    """A compiled block: the file, its case, and the versions it was compiled with, kept in a file beside it."""

    path: Path
    case: Case
    versions: Mapping[str, str | None]


def compile_neff(path: Path, case: Case, arguments: Mapping[str, Array]) -> Neff:
    """Compile the block for a case, and keep the file; in the environment that has nki.

    nki keeps what it compiles where NKI_ARTIFACTS_DIR says, read when nki is imported (nrtpy, "Tutorial: Debug NEFF
    runtime errors"). It compiles upon a call with NumPy arrays, which also runs the kernel once.

    Raises:
        CannotMeasure: without a device or nki, or when nki left no file.
    """
    _require_device()
    if "nki" in sys.modules:
        raise CannotMeasure("nki was imported before NKI_ARTIFACTS_DIR could be set: compile in a process of its own")
    with tempfile.TemporaryDirectory() as artifacts:
        os.environ["NKI_ARTIFACTS_DIR"] = artifacts
        _set_cores(case.lnc)
        _run(case, arguments)
        found = sorted(Path(artifacts).rglob("*.neff"))
        if len(found) != 1:
            raise CannotMeasure(f"nki left {len(found)} compiled files in NKI_ARTIFACTS_DIR, expected 1")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found[0], path)
    neff = Neff(path, case, versions())
    about = {"model": case.model, "B": case.B, "lnc": case.lnc, "versions": neff.versions}
    _beside(path).write_text(json.dumps(about) + "\n")
    return neff


def read_neff(path: Path) -> Neff:
    """A file that `compile_neff` kept.

    Raises:
        CannotMeasure: when it, or the description beside it, isn't there or isn't one.
    """
    if not path.exists():
        raise CannotMeasure(f"{path}: no such file; `gdn-kernels latency --compile {path}` makes it")
    try:
        about = json.loads(_beside(path).read_text())
        case = Case(MODELS[about["model"]].name, int(about["B"]), int(about["lnc"]))
        return Neff(path, case, dict(about["versions"]))
    except (OSError, ValueError, TypeError, KeyError):
        raise CannotMeasure(f"{_beside(path)}: not the description that --compile writes beside a file") from None


def with_nrtpy(neff: Neff, arguments: Mapping[str, Array], warmup: int, repeats: int, package: str) -> Row:
    """Time a compiled block (nrtpy, "nrtpy model API"): nrtpy warms up, then times each execution on the device.

    Args:
        arguments: of `gdn_block_tkg`, at the size of the file's case.
        warmup, repeats: executions that aren't timed, and that are.
        package: version of this package.

    Raises:
        CannotMeasure: without a device or nrtpy, or when the file isn't the block or runs as several executions.
    """
    _require_device()
    _require_module("nrtpy", "pip install nrtpy into an environment without nki")
    _set_cores(neff.case.lnc)
    nrtpy: Any = importlib.import_module("nrtpy")
    model = nrtpy.NrtpyModel.load_from_neff(neff.path)
    if set(model.input_tensors_info) != set(arguments):
        names = ", ".join(sorted(model.input_tensors_info))
        raise CannotMeasure(f"{neff.path}: its inputs are {names}; expected {', '.join(sorted(arguments))}")
    tensors = {name: nrtpy.NrtpyTensor.from_numpy(_words(value), name=name) for name, value in arguments.items()}
    result = model.benchmark(inputs=tensors, warmup_iter=warmup, benchmark_iter=repeats, mode="device")
    if len(result.durations_ms) != repeats:  # nrtpy, "Troubleshooting": several events a call
        raise CannotMeasure(f"{neff.path}: {len(result.durations_ms)} executions in {repeats} calls: not one kernel")
    us = [1e3 * ms for ms in result.durations_ms]
    here = versions()  # of nrtpy and the runtime; nki and the compiler are where the file was compiled
    found = {name: here[name] or neff.versions.get(name) for name in VERSIONS}
    return _row(neff.case, us, warmup, NRTPY_HOW, found, package)


def with_torch(case: Case, arguments: Mapping[str, Array], warmup: int, repeats: int, package: str) -> Row:
    """Time the block on the device of torch-neuronx, by the host's clock.

    A repeat is LAUNCHES decode steps, each from the states of the one before, so that none can be left out or merged
    with another. Arguments and errors as of `with_nrtpy`.
    """
    _require_device()
    _require_module("torch_neuronx", f"install it from {backends.NEURON_INDEX}, as environment.yml does")
    _set_cores(case.lnc)
    from gdn_kernels.interpreter.torch_arrays import to_torch

    device, synchronise = _torch()
    on_device = {name: to_torch(value).to(device) for name, value in arguments.items()}
    us = timed(lambda: _steps(case, on_device), synchronise, warmup, repeats)
    return _row(case, [total / LAUNCHES for total in us], warmup, TORCH_HOW, versions(), package)


def timed(work: Callable[[], Any], synchronise: Callable[[], None], warmup: int, repeats: int) -> list[float]:
    """us of each repeat, from one synchronisation to the next."""
    for _ in range(warmup):
        work()
    synchronise()
    us = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        synchronise()
        us.append(1e6 * (time.perf_counter() - started))
    return us


def versions() -> dict[str, str | None]:
    """What this environment has, by the names of rows.VERSIONS."""
    return {name: _runtime_version() if name == "runtime" else _wheel_version(name) for name in VERSIONS}


def instance_type() -> str | None:
    """The EC2 instance type that neuron-ls prints first (Neuron system tools, "Neuron LS user guide")."""
    for line in _output("neuron-ls").splitlines():
        if line.strip().startswith("instance-type:"):
            return line.split(":", 1)[1].strip()
    return None


def _row(case: Case, us: Sequence[float], warmup: int, how: str, found: Mapping[str, str | None], package: str) -> Row:
    p10, median, p90 = np.percentile(us, [10, 50, 90])
    spread = {"min": min(us), "p10": float(p10), "p90": float(p90), "max": max(us)}
    instance = instance_type()
    target = next((target for target in TARGETS if instance and instance.startswith(target)), "trn2")
    return Row(
        kind="measured",
        model=case.model,
        dims=MODELS[case.model].dims,
        B=case.B,
        lnc=case.lnc,
        target=target,
        median_us=round(float(median), 2),
        spread={name: round(value, 2) for name, value in spread.items()},
        repeats=len(us),
        warmup=warmup,
        how=how,
        versions=dict(found),
        instance=instance,
        package=package,
        date=today(),
    )


def _steps(case: Case, arguments: Mapping[str, Any]) -> Any:
    """LAUNCHES decode steps; returned is what the last one leaves."""
    step = dict(arguments)
    for _ in range(LAUNCHES):
        core_out, step["conv_state"], step["recurrent_state"] = _run(case, step)
    return core_out, step["conv_state"], step["recurrent_state"]


def _run(case: Case, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    try:
        return backends.run(KERNEL, {**arguments, "norm_eps": NORM_EPS}, case.lnc, "trn2")
    except backends.BackendUnavailable as error:
        raise CannotMeasure(str(error)) from None


def _torch() -> tuple[Any, Callable[[], None]]:
    """The device of the installed torch-neuronx, and what waits until it has done everything."""
    if importlib.util.find_spec("torch_xla") is not None:
        torch_xla: Any = importlib.import_module("torch_xla")
        # PyTorch/XLA API guide: runs what was traced so far; `wait` until the device is done.
        return torch_xla.device(), lambda: torch_xla.sync(wait=True)
    torch: Any = importlib.import_module("torch")
    importlib.import_module("torch_neuronx")
    return "neuron", lambda: torch.neuron.synchronize()


def _require_device() -> None:
    if not glob.glob("/dev/neuron[0-9]*"):
        raise CannotMeasure("no /dev/neuron* device: measuring needs a Trn2 or Trn3 instance with the Neuron driver")


def _require_module(name: str, advice: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise CannotMeasure(f"{name} is not installed: {advice}")


def _set_cores(lnc: int) -> None:
    """Tell runtime and compiler, which read it when they start, of how many cores a logical one is (Logical NeuronCore
    configuration)."""
    os.environ["NEURON_LOGICAL_NC_CONFIG"] = str(lnc)


def _words(array: Array) -> Array:
    """The array as NumPy alone knows it: a NEFF's inputs have names and sizes, and NumPy has no bfloat16."""
    return array.view(np.uint16) if is_bfloat16(array.dtype) else array


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _wheel_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _runtime_version() -> str | None:
    """Of the system package aws-neuronx-runtime-lib, on Ubuntu or Amazon Linux."""
    package = "aws-neuronx-runtime-lib"
    debian = _output("dpkg-query", "--show", "--showformat=${Version}", package)
    return debian or _output("rpm", "--query", "--queryformat=%{VERSION}", package) or None


def _output(*command: str) -> str:
    """What a command prints, nothing when it isn't there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
