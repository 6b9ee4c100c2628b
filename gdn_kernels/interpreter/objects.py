"""What kernels and the interpreter hand each other besides tensors."""

from typing import Any


class NKIObject:
    """`nl.NKIObject`: the base class of a kernel's own classes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class RunTimeValue:
    """A number that exists on the device only, such as a register. `value` is what the interpreter knows it to be."""

    value: int | None
