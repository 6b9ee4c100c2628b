"""`nki.jit`, `nki.simulate`, and making `import nki` mean the interpreter."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from gdn_kernels.interpreter import hardware, isa, language, machine
from gdn_kernels.interpreter.isa import constants
from gdn_kernels.interpreter.rules import refuse, report
from gdn_kernels.interpreter.subset import check_subset


class Kernel:
    """A function decorated with `nki.jit`. Called from a kernel it is inlined; called from outside it is launched.

    `kernel[2](...)` launches two cores. NumPy arrays or torch tensors in, the same kind out.
    """

    def __init__(self, function: Callable[..., Any], cores: int = 1) -> None:
        self.function, self.cores = function, cores
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.__wrapped__ = function

    def __getitem__(self, grid: int) -> "Kernel":
        if not isinstance(grid, int) or grid not in (1, 2):
            refuse("argument", f"grid [{grid}]: a launch has 1 or 2 cores", self.__name__)
        return Kernel(self.function, grid)

    def with_schedule(self, edges: Any) -> "Kernel":
        """The same kernel: instructions run in program order, so edges (consumer, producer) of names have no say."""
        if any(len(edge) != 2 for edge in edges):
            refuse("argument", f"{edges!r}, expected pairs (consumer, producer)", self.__name__)
        return Kernel(self.function, self.cores)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if machine.running():
            return self.function(*args, **keywords)
        result = self.launch(*args, **keywords)
        return result.outputs[0] if result.single else result.outputs

    def launch(
        self, *args: Any, target: hardware.Target | None = None, dry: bool = False, **keywords: Any
    ) -> machine.Result:
        """As calling it, but returns the outputs with each core's trace and memory. A dry launch computes nothing;
        its arguments may be `Spec`s and its outputs are (see `machine.launch`). The target is the environment's unless
        one is given (see `target_of_environment`)."""
        try:
            bound = inspect.signature(self.function).bind(*args, **keywords)
        except TypeError as error:
            code = self.function.__code__
            refuse("argument", str(error), self.__name__, line=f"{code.co_filename}:{code.co_firstlineno}")
        bound.apply_defaults()
        check_subset(self.function)
        exchange = _Exchange()
        arrays = {name: exchange.to_kernel(value) for name, value in bound.arguments.items()}
        result = machine.launch(self.function, arrays, self.cores, target or target_of_environment(), dry)
        exchange.write_back()
        if dry:
            return result
        outputs = tuple(exchange.to_caller(output) for output in result.outputs)
        return machine.Result(outputs, result.single, result.machines, result.returned)


class _Exchange:
    """Arguments on their way into a kernel and results on their way out: torch tensors if an argument was one.

    A kernel works in the memory of the caller's arrays. Those that aren't contiguous it can only get as copies, which
    are copied back, as it may have written them; those that are read-only, as copies that are dropped.
    """

    def __init__(self) -> None:
        self._torch = sys.modules.get("torch")
        self._gives_torch = False
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []

    def to_kernel(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(self.to_kernel(entry) for entry in value)
        if self._torch is not None and isinstance(value, self._torch.Tensor):
            from gdn_kernels.interpreter.torch_arrays import to_numpy

            self._gives_torch, value = True, to_numpy(value)
        if isinstance(value, np.ndarray) and not (value.flags.c_contiguous and value.flags.writeable):
            copy = value.copy(order="C")
            if value.flags.writeable:
                self._copies.append((value, copy))
            return copy
        return value

    def write_back(self) -> None:
        for original, copy in self._copies:
            original[...] = copy

    def to_caller(self, output: np.ndarray) -> Any:
        if not self._gives_torch:
            return output
        from gdn_kernels.interpreter.torch_arrays import to_torch

        return to_torch(output)


def target_of_environment() -> hardware.Target:
    """The target NEURON_PLATFORM_TARGET_OVERRIDE names; Trn2 without it and, with a warning, for Trn1 and Inf2."""
    name = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2").lower()
    if name in ("trn3", "gen4"):
        return hardware.TRN3
    if name in ("trn1", "inf2", "gen2"):
        report("older-target", f"NEURON_PLATFORM_TARGET_OVERRIDE={name}; the rules are those of trn2")
    elif name not in ("trn2", "gen3"):
        refuse("target", f"NEURON_PLATFORM_TARGET_OVERRIDE={name}, expected trn1, inf2, trn2, trn3 or gen2 to gen4")
    return hardware.TRN2


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The decorator of a kernel, with or without parentheses. Compiler options have no meaning here."""
    if "platform_target" in options:
        refuse("argument", "platform_target; set NEURON_PLATFORM_TARGET_OVERRIDE instead", "jit")
    return Kernel if fn is None else Kernel(fn)


def simulate(kernel: Any) -> Kernel:
    """As `nki.simulate`: the kernel, run here."""
    return kernel if isinstance(kernel, Kernel) else Kernel(kernel)


class _TypingTensor:
    """`nki.typing.tensor[128, 512]`, an annotation."""

    def __class_getitem__(cls, shape: Any) -> type["_TypingTensor"]:
        return cls


def _modules() -> dict[str, ModuleType]:
    nki = ModuleType("nki", "The Neuron Kernel Interface, as the interpreter understands it.")
    typing, collectives = ModuleType("nki.typing"), ModuleType("nki.collectives")
    typing.__dict__.update(tensor=_TypingTensor)
    collectives.__dict__.update(__getattr__=_collective)
    nki.__dict__.update(
        jit=jit,
        simulate=simulate,
        isa=isa,
        language=language,
        typing=typing,
        collectives=collectives,
        dtype=np.dtype,
        __path__=[],
    )
    return {
        "nki": nki,
        "nki.isa": isa,
        "nki.isa.constants": constants,
        "nki.language": language,
        "nki.typing": typing,
        "nki.collectives": collectives,
    }


def _collective(name: str) -> Any:
    """Collectives are known, so that kernels that hold them can be imported, but a call is refused."""
    if name.startswith("__"):
        raise AttributeError(name)

    def collective(*_: Any, **__: Any) -> None:
        refuse("not-modelled", "communication between chips", f"collectives.{name}")

    return collective


def is_nki(name: str) -> bool:
    return name == "nki" or name.startswith("nki.")


@contextmanager
def installed() -> Iterator[None]:
    """Inside, `import nki`, `nki.isa` and `nki.language` mean the interpreter; afterwards what they meant before.

    Kernels defined inside keep working outside.
    """
    hidden = {name: module for name, module in sys.modules.items() if is_nki(name)}
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(_modules())
    try:
        yield
    finally:
        for name in [name for name in sys.modules if is_nki(name)]:
            del sys.modules[name]
        sys.modules.update(hidden)
