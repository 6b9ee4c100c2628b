"""Whether a source of an instruction lies half under its destination.

The same view, element for element, is fine: engines work on streams. What overlaps otherwise would be read before or
after it is overwritten, depending on the machine.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gdn_kernels.interpreter.memory import Shape
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor


class _Layout(NamedTuple):
    """A view in bytes, within one partition on chip. `partitions`: (first, count), (0, 1) in HBM."""

    partitions: tuple[int, int]
    shape: Shape
    strides: Shape
    offset: int
    itemsize: int


def check_overlap(op: str, dst: NkiTensor, source: NkiTensor) -> None:
    """Refuse a source that shares bytes with `dst` without being the same view."""
    if source.storage is not dst.storage or (
        source.offset == dst.offset
        and source.strides == dst.strides
        and source.shape == dst.shape
        and source.dtype == dst.dtype
    ):
        return
    if _clash(_layout(source), _layout(dst)):
        refuse("overlap", f"reads {source!r} while it writes {dst!r} of the same tensor", op, "dst")


def _layout(view: NkiTensor) -> _Layout:
    size = view.dtype.itemsize
    strides = tuple(stride * size for stride in view.strides)
    if not view.buffer.on_chip:
        return _Layout((0, 1), view.shape, strides, view.offset * size, size)
    first, offset = divmod(view.offset * size, view.storage.allocation.row_bytes)
    return _Layout((first, view.shape[0]), view.shape[1:], strides[1:], offset, size)


@lru_cache(maxsize=4096)
def _clash(a: _Layout, b: _Layout) -> bool:
    if a.partitions[0] >= sum(b.partitions) or b.partitions[0] >= sum(a.partitions):
        return False
    if a.offset >= _end(b) or b.offset >= _end(a):
        return False
    mine, theirs = _addresses(a), _addresses(b)
    if a.partitions == b.partitions and a.itemsize == b.itemsize and np.array_equal(mine, theirs):
        return False
    base = min(a.offset, b.offset)
    covered = np.zeros(max(_end(a), _end(b)) - base, bool)
    for byte in range(a.itemsize):
        covered[mine - base + byte] = True
    return any(covered[theirs - base + byte].any() for byte in range(b.itemsize))


def _end(layout: _Layout) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True))
    return layout.offset + reach + layout.itemsize


def _addresses(layout: _Layout) -> npt.NDArray[np.int64]:
    """The first byte of every element, in order."""
    found = np.array([layout.offset], np.int64)
    for size, stride in zip(layout.shape, layout.strides, strict=True):
        found = (found[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return found
