"""`nki.jit`, `nki.simulate`, and making `import nki` mean the interpreter."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from gdn_kernels.interpreter import hardware, isa, language, machine
from gdn_kernels.interpreter.rules import refuse


class Kernel:
    """A function decorated with `nki.jit`. Called from a kernel it is inlined; called from outside it is launched.

    `kernel[2](...)` launches two cores. NumPy arrays or torch tensors in, the same kind out.
    """

    def __init__(self, function: Callable[..., Any], cores: int = 1) -> None:
        self.function, self.cores = function, cores
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.__wrapped__ = function

    def __getitem__(self, grid: int) -> "Kernel":
        if grid not in (1, 2):
            refuse("argument", f"grid [{grid}]: a launch has 1 or 2 cores", self.__name__)
        return Kernel(self.function, grid)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if machine.running():
            return self.function(*args, **keywords)
        result = self.launch(*args, **keywords)
        return result.outputs[0] if result.single else result.outputs

    def launch(self, *args: Any, target: hardware.Target = hardware.TRN2, **keywords: Any) -> machine.Result:
        """As calling it, but returns the outputs with each core's trace and memory."""
        try:
            bound = inspect.signature(self.function).bind(*args, **keywords)
        except TypeError as error:
            refuse("argument", str(error), self.__name__)
        bound.apply_defaults()
        arrays, to_caller = _as_arrays(bound.arguments)
        result = machine.launch(self.function, arrays, self.cores, target)
        return machine.Result(tuple(to_caller(output) for output in result.outputs), result.single, result.machines)


def _as_arrays(arguments: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Arguments with every torch tensor as a NumPy array over the same memory, and the way back for results."""
    torch = sys.modules.get("torch")
    if torch is None or not any(isinstance(value, torch.Tensor) for value in arguments.values()):
        return arguments, lambda output: output
    from gdn_kernels.interpreter.torch_arrays import to_numpy, to_torch

    arrays = {name: to_numpy(value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    return arrays, to_torch


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The decorator of a kernel, with or without parentheses. Compiler options have no meaning here."""
    return Kernel if function is None else Kernel(function)


def simulate(kernel: Kernel) -> Kernel:
    """As `nki.simulate`: the kernel, run here."""
    return kernel


def _modules() -> dict[str, ModuleType]:
    nki = ModuleType("nki")
    nki.__dict__.update(jit=jit, simulate=simulate, isa=isa, language=language, __path__=[])
    return {"nki": nki, "nki.isa": isa, "nki.language": language}


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
