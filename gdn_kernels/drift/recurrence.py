"""Which recurrence runs: numba's where the extra `fast` is installed, NumPy's otherwise; the bytes are the same."""

from __future__ import annotations

from functools import cache
from types import ModuleType


def loops() -> ModuleType:
    """The module with `kernel_steps` and `rounded_steps`: `compiled` or `plain`."""
    return _found()[0]


def hint() -> str:
    """One line on why rollouts are slow here and how to make them fast, or nothing where they are fast."""
    why = _found()[1]
    return (
        f"some fifty times as slow as with numba, to the same bytes: pip install 'gdn-kernels[fast]' ({why})"
        if why
        else ""
    )


@cache
def _found() -> tuple[ModuleType, str]:
    """The module, and why it isn't `compiled`."""
    try:
        from gdn_kernels.drift import compiled
    except (ImportError, RuntimeError) as error:  # no numba, one that refuses this NumPy, no folder for its cache
        from gdn_kernels.drift import plain

        return plain, str(error)
    return compiled, ""
