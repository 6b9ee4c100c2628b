"""Where a kernel runs: a Trainium device, the vendor's simulator, or this package's interpreter.

The kernel source is the same everywhere. Where the `nki` wheel is, the kernels are imported as they are; the
interpreter loads a copy of its own, so both can be used in one process. The two Neuron paths follow the vendor's
documentation and have not been run by this project on hardware or with the wheel.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

NAMES = ("trn2", "simulate", "interpreter")
NEURON_INDEX = "https://pip.repos.neuron.amazonaws.com"
KERNELS = "gdn_kernels.kernels"
MODULES = {
    "gdn_block_tkg": "block",
    "gdn_block_tkg_slots": "slots",
    "gdn_tkg": "tkg",
    "gdn_conv1d_decode": "conv1d",
    "in_proj_stage": "unfused",
    "conv1d_stage": "unfused",
    "gates_stage": "unfused",
    "delta_rule_stage": "unfused",
    "gated_norm_stage": "unfused",
}


class BackendUnavailable(RuntimeError):
    """The backend asked for can't run here. The message says why and what to install."""


@dataclass(frozen=True)
class Backend:
    """One place a kernel can run. `why`: what makes it available, or what is missing and how to get it."""

    name: str
    available: bool
    why: str


def available() -> list[Backend]:
    """Every backend, in the order in which `auto` prefers them."""
    missing = _nki_missing()
    devices = sorted(glob.glob("/dev/neuron[0-9]*"))
    device_missing = missing or ("" if devices else "no /dev/neuron* device: a Trn2 or Trn3 instance is needed")
    return [
        Backend("trn2", not device_missing, device_missing or f"device {devices[0]}, nki is installed"),
        Backend("simulate", not missing, missing or "nki is installed"),
        Backend("interpreter", True, "part of this package"),
    ]


def choose(name: str = "auto") -> str:
    """The backend that `name` means here: itself, or the first available one for "auto".

    Raises:
        ValueError: for a name that isn't one of NAMES or "auto".
        BackendUnavailable: when it can't run here.
    """
    if name not in (*NAMES, "auto"):
        raise ValueError(f"backend must be auto, {', '.join(NAMES[:-1])} or {NAMES[-1]}, got {name!r}")
    backends = available()
    if name == "auto":
        return next(backend.name for backend in backends if backend.available)
    chosen = next(backend for backend in backends if backend.name == name)
    if not chosen.available:
        raise BackendUnavailable(f"backend {name!r} is not available: {chosen.why}")
    return name


def run(kernel: str, arguments: Mapping[str, Any], lnc: int | None, backend: str) -> tuple[Any, ...]:
    """Run one of the kernels (a key of MODULES) with checked arguments, NumPy arrays or torch tensors.

    Args:
        arguments: the kernel's own, by name.
        lnc: cores to run on, 1 or 2; None for what the runtime is set to on a device, 1 elsewhere.
        backend: one of NAMES or "auto".
    """
    chosen = choose(backend)
    return _RUNNERS[chosen](kernel, arguments, lnc)


def _interpret(kernel: str, arguments: Mapping[str, Any], lnc: int | None) -> tuple[Any, ...]:
    from gdn_kernels import interpreter

    # A caller wants the result; what is slow with odd head sizes, `gdn-kernels latency` and `check` say.
    with interpreter.without("short-runs", "element-runs"):
        outputs: tuple[Any, ...] = interpreted(kernel)[lnc or 1](**arguments)
    return outputs


def _simulate(kernel: str, arguments: Mapping[str, Any], lnc: int | None) -> tuple[Any, ...]:
    import nki

    os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")  # its own default is trn3
    outputs: tuple[Any, ...] = nki.simulate(_native(kernel)[lnc or 1])(**arguments)
    return outputs


def _on_device(kernel: str, arguments: Mapping[str, Any], lnc: int | None) -> tuple[Any, ...]:
    """NumPy arguments are compiled and run standalone by nki itself. Torch tensors run where they are; those on the
    CPU go to the device and back."""
    cores = lnc or int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", "2"))  # 2 is the default of Trn2
    launch = _native(kernel)[cores]
    torch = sys.modules.get("torch")
    tensors = [value for value in arguments.values() if torch is not None and isinstance(value, torch.Tensor)]
    if not tensors or tensors[0].device.type != "cpu":
        outputs: tuple[Any, ...] = launch(**arguments)
        return outputs
    device = _torch_device()
    assert torch is not None
    moved = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
    return tuple(output.cpu() for output in launch(**moved))


def _torch_device() -> Any:
    """The Neuron device of the installed torch: PyTorch/XLA's, or the one of native TorchNeuron."""
    if importlib.util.find_spec("torch_xla") is not None:
        import torch_xla

        return torch_xla.device()
    return "neuron"


_RUNNERS: Mapping[str, Callable[[str, Mapping[str, Any], int | None], tuple[Any, ...]]] = {
    "trn2": _on_device,
    "simulate": _simulate,
    "interpreter": _interpret,
}


def _native(kernel: str) -> Any:
    return getattr(importlib.import_module(f"{KERNELS}.{MODULES[kernel]}"), kernel)


def interpreted(kernel: str) -> Any:
    """The kernel for the interpreter: a `gdn_kernels.interpreter.Kernel`, whose `launch` also gives the trace."""
    return getattr(_interpreted_modules()[MODULES[kernel]], kernel)


@cache
def _interpreted_modules() -> dict[str, ModuleType]:
    """The kernel modules imported against the interpreter, leaving those imported against nki as they are."""
    from gdn_kernels import interpreter

    def is_kernel(name: str) -> bool:
        return name == KERNELS or name.startswith(KERNELS + ".")

    native = {name: module for name, module in sys.modules.items() if is_kernel(name)}
    for name in native:
        del sys.modules[name]
    try:
        with interpreter.installed():
            return {module: importlib.import_module(f"{KERNELS}.{module}") for module in MODULES.values()}
    finally:
        for name in [name for name in sys.modules if is_kernel(name)]:
            del sys.modules[name]
        sys.modules.update(native)


@cache
def _nki_missing() -> str:
    """Why `import nki` doesn't work here, or an empty string."""
    advice = f"install neuronx-cc and nki from {NEURON_INDEX}, as environment.yml does"
    try:
        import nki  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "nki":
            return f"nki is not installed; {advice}"
        return f"nki can't be imported ({error}); {advice}"
    except ImportError as error:
        return f"nki can't be imported ({error}): the one on the general index is a stand-in; {advice}"
    return ""
