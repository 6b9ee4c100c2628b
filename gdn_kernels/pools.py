"""Pools of states, [slots, ...]: what a call must satisfy that updates some of their slots in place.

Slots are checked as host arrays, before anything runs. The kernel handles the sequences of a call in no order that a
caller could rely on, so a call is taken only where no order matters: no slot is written twice, and none that a sequence
writes is read by another. All reads then see the pools as they were before the call.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.dims import BLOCK_FORMED, BLOCK_SHAPES, BlockDims, Layout, resolve

PADDING = -1  # the slot of a row that isn't a sequence
LARGEST = 2**31 - 1  # elements; no document says how an address known at run time goes beyond 32 bits
NAMES = {"conv_state": "conv_pool", "recurrent_state": "recurrent_pool"}
SHAPES: Layout = {
    NAMES.get(name, name): ("slots", *shape[1:]) if name in NAMES else shape for name, shape in BLOCK_SHAPES.items()
}

FORMED = tuple(NAMES.get(name, name) for name in BLOCK_FORMED)

Slots = npt.NDArray[np.int32]


def check_shapes(shapes: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """B and the number of slots, from the shapes of the arguments by name.

    Raises ValueError, naming the argument, for shapes that don't fit, as `BlockDims.from_shapes`; and for a pool of
    more than LARGEST elements.
    """
    sizes = resolve(SHAPES, shapes)
    per_row = {name: (sizes["B"], *shapes[pool][1:]) for name, pool in NAMES.items()}
    others = {name: shape for name, shape in shapes.items() if name not in NAMES.values()}
    try:
        BlockDims.from_shapes(**others, **per_row)
    except ValueError as error:
        message = str(error)
        for name, pool in NAMES.items():
            message = message.replace(name, pool)
        raise ValueError(message) from None
    for pool in NAMES.values():
        elements = math.prod(shapes[pool])
        if elements > LARGEST:
            raise ValueError(
                f"{pool} must have at most {LARGEST} elements, got {list(shapes[pool])}, {elements}: addresses known "
                f"at run time are documented for 32 bits only"
            )
    return sizes["B"], sizes["slots"]


def check_memory(arguments: Mapping[str, Any]) -> None:
    """The pools are writeable and share no byte with another argument.

    Raises ValueError naming the pool. Arrays on a device are taken as they are.
    """
    spans = {name: _span(array) for name, array in arguments.items()}
    for pool in NAMES.values():
        if isinstance(arguments[pool], np.ndarray) and not arguments[pool].flags.writeable:
            raise ValueError(f"{pool} must be writeable, as it is updated in place, got a read-only array")
        mine = spans[pool]
        for name, theirs in spans.items():
            if name != pool and mine and theirs and mine[0] < theirs[1] and theirs[0] < mine[1]:
                raise ValueError(f"{pool} must not share memory with other arguments, got one that overlaps {name}")


def _span(array: Any) -> tuple[int, int] | None:
    """First byte and end of a contiguous array in the host's memory; None where that can't be known, or is nothing."""
    if isinstance(array, np.ndarray):
        first, size = array.__array_interface__["data"][0], array.nbytes
    elif array.device.type == "cpu":
        first, size = array.data_ptr(), array.numel() * array.element_size()
    else:
        return None
    return (first, first + size) if size else None


def check_slots(slots: Any, write_slots: Any, fresh: Any, B: int, count: int) -> tuple[Slots, Slots]:
    """The slot each row reads and the one it writes, PADDING for none, out of `count`.

    Raises ValueError naming `slots`, `write_slots` or `fresh`, and the rows.
    """
    read = _host("slots", slots, "int32", B)
    _check_range("slots", read, count)
    write = read
    if write_slots is not None:
        write = _host("write_slots", write_slots, "int32", B)
        _check_range("write_slots", write, count)
        uneven = np.flatnonzero((read == PADDING) != (write == PADDING))
        if uneven.size:
            b = uneven[0]
            expected = f"{PADDING} where slots is and nowhere else"
            raise ValueError(f"write_slots must be {expected}, got {write[b]} where slots is {read[b]}, in row {b}")
    if fresh is not None:
        read = np.where(_host("fresh", fresh, "bool", B), np.int32(PADDING), read)
    _check_order("slots" if write_slots is None else "write_slots", read, write)
    return np.ascontiguousarray(read), np.ascontiguousarray(write)


def _check_range(name: str, slots: Slots, count: int) -> None:
    outside = np.flatnonzero((slots < PADDING) | (slots >= count))
    if outside.size:
        b = outside[0]
        raise ValueError(f"{name} must be {PADDING} or 0 to {count - 1}, got {slots[b]} in row {b}")


def _check_order(name: str, read: Slots, write: Slots) -> None:
    """No slot is written by two rows, or written by one and read by another."""
    writer: dict[int, int] = {}
    for b, slot in enumerate(write.tolist()):
        if slot != PADDING and writer.setdefault(slot, b) != b:
            raise ValueError(f"{name} must name a slot once, got slot {slot} in rows {writer[slot]} and {b}")
    for b, slot in enumerate(read.tolist()):
        if slot != PADDING and writer.get(slot, b) != b:
            raise ValueError(
                f"{name} must not name a slot that another row reads, got slot {slot}, which row {writer[slot]} writes "
                f"and row {b} reads"
            )


def _host(name: str, value: Any, dtype: str, B: int) -> npt.NDArray[Any]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise ValueError(f"{name} must be on the CPU, where it is checked, got device {value.device.type}")
        value = value.detach().numpy() if value.dtype in (torch.int32, torch.bool) else value
    if not isinstance(value, np.ndarray):
        got = getattr(value, "dtype", type(value).__name__)
        raise ValueError(f"{name} must be a NumPy array or a torch tensor of {dtype}, got {got}")
    if value.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {value.dtype}")
    if value.shape != (B,):
        raise ValueError(f"{name} must have shape [B] = [{B}] by hidden, got {list(value.shape)}")
    return value


def like(array: Any, slots: Slots) -> Any:
    """Slots as an array of the same library and on the same device."""
    if isinstance(array, np.ndarray):
        return slots
    return sys.modules["torch"].from_numpy(slots).to(array.device)


@contextmanager
def restored_on_error(pools: Sequence[Any], write: Slots) -> Iterator[None]:
    """What is raised inside leaves the slots that were to be written as they were, where pools are the host's."""
    rows = [slot for slot in write.tolist() if slot != PADDING]
    host = [pool for pool in pools if _span(pool) is not None]
    before = [pool[rows] for pool in host]  # copies
    try:
        yield
    except BaseException:
        for pool, kept in zip(host, before, strict=True):
            pool[rows] = kept
        raise


def settle(pools: Sequence[Any], returned: Sequence[Any]) -> None:
    """Put into the pools what a kernel returned for them, where it isn't there already."""
    for pool, new in zip(pools, returned, strict=True):
        if new is not pool and (_span(new) is None or _span(new) != _span(pool)):
            pool[...] = new
