"""Tensors and their views: shape, strides and offset over one storage; no view moves data.

Strides and offsets count elements of the view's dtype, as in NKI's access patterns. On chip, dimension 0 is the
partition: a view may take a range of partitions but can't step over, move, split or merge them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.interpreter import hardware
from gdn_kernels.interpreter.memory import PSUM, Buffer, Shape, Storage
from gdn_kernels.interpreter.rules import refuse


@dataclass(frozen=True)
class DynamicSlice:
    """`nl.ds(start, size)`."""

    start: int
    size: int


class NkiTensor:
    """A tensor or a view of one. Supports the views of the language guide; data is only touched by instructions."""

    __slots__ = ("_array", "dtype", "offset", "shape", "storage", "strides")

    def __init__(self, storage: Storage, shape: Shape, strides: Shape, offset: int, dtype: np.dtype) -> None:
        self.storage, self.shape, self.strides, self.offset, self.dtype = storage, shape, strides, offset, dtype
        self._array: npt.NDArray[Any] | None = None

    @classmethod
    def whole(cls, storage: Storage) -> "NkiTensor":
        shape = storage.allocation.shape
        return cls(storage, shape, contiguous_strides(shape), 0, storage.allocation.dtype)

    # ---- what a kernel may ask ----

    @property
    def buffer(self) -> Buffer:
        return self.storage.allocation.buffer

    @property
    def name(self) -> str:
        return self.storage.allocation.name

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def is_contiguous(self) -> bool:
        return self.strides == contiguous_strides(self.shape)

    def get_pattern(self) -> list[list[int]]:
        return [[stride, count] for stride, count in zip(self.strides, self.shape, strict=True)]

    def __repr__(self) -> str:
        return f"{self.name or 'tensor'}{list(self.shape)} {self.dtype} in {self.buffer}"

    def __bool__(self) -> bool:
        raise TypeError("a tensor has no truth value while a kernel is traced")

    def __iter__(self) -> None:
        raise TypeError("a tensor can't be iterated over while a kernel is traced")

    # ---- views ----

    def __getitem__(self, key: Any) -> "NkiTensor":
        keys = key if isinstance(key, tuple) else (key,)
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys = keys[:at] + (slice(None),) * (self.ndim - len(keys) + 1) + keys[at + 1 :]
        if len(keys) > self.ndim:
            refuse("bounds", f"{len(keys)} indices into shape {self.shape}")
        shape: list[int] = []
        strides: list[int] = []
        offset = self.offset
        for dim, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            start, count, step, keep = _index(keys[dim] if dim < len(keys) else slice(None), size, dim)
            offset += start * stride
            if keep or (self.buffer.on_chip and (dim == 0 or (dim == self.ndim - 1 and len(shape) < 2))):
                shape.append(count)
                strides.append(stride * step)
        return self._view(tuple(shape), tuple(strides), offset)

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> "NkiTensor":
        return self[(slice(None),) * dim + (slice(start, end, step),)]

    def select(self, dim: int, index: int) -> "NkiTensor":
        return self[(slice(None),) * dim + (index,)]

    def permute(self, dims: Sequence[int]) -> "NkiTensor":
        if sorted(dims) != list(range(self.ndim)):
            refuse("pattern", f"permute {tuple(dims)} of {self.ndim} dimensions")
        return self._view(tuple(self.shape[d] for d in dims), tuple(self.strides[d] for d in dims), self.offset)

    def reshape(self, shape: Sequence[int]) -> "NkiTensor":
        try:
            array = np.reshape(self.array, tuple(shape), copy=False)
        except ValueError as error:
            refuse(
                "pattern", f"shape {self.shape} with strides {self.strides} can't be viewed as {tuple(shape)}: {error}"
            )
        return self._view(array.shape, tuple(s // self.dtype.itemsize for s in array.strides), self.offset)

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> "NkiTensor":
        return self.reshape(self.shape[:dim] + tuple(shape) + self.shape[dim + 1 :])

    def flatten_dims(self, start_dim: int, end_dim: int) -> "NkiTensor":
        merged = prod(self.shape[start_dim : end_dim + 1])
        return self.reshape((*self.shape[:start_dim], merged, *self.shape[end_dim + 1 :]))

    def expand_dim(self, dim: int) -> "NkiTensor":
        if dim == 0 and self.buffer.on_chip:
            refuse("partition-first", "expand_dim(0) would add a dimension before the partition")
        return self._view(
            (*self.shape[:dim], 1, *self.shape[dim:]), (*self.strides[:dim], 0, *self.strides[dim:]), self.offset
        )

    def squeeze_dim(self, dim: int) -> "NkiTensor":
        if self.shape[dim] != 1:
            refuse("pattern", f"squeeze_dim({dim}) of size {self.shape[dim]}")
        if dim == 0 and self.buffer.on_chip:
            refuse("partition-first", "squeeze_dim(0) would remove the partition")
        return self._view(
            self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :], self.offset
        )

    def broadcast(self, dim: int, size: int) -> "NkiTensor":
        if self.shape[dim] != 1:
            refuse("pattern", f"broadcast of dimension {dim}, whose size is {self.shape[dim]}, not 1")
        if dim == 0 and self.buffer.on_chip:
            refuse("partition-first", "a partition can't be broadcast on chip")
        strides = (*self.strides[:dim], 0, *self.strides[dim + 1 :])
        return self._view((*self.shape[:dim], size, *self.shape[dim + 1 :]), strides, self.offset)

    def view(self, dtype: np.dtype) -> "NkiTensor":
        """The same bytes as another dtype; the last dimension scales."""
        old, new = self.dtype.itemsize, np.dtype(dtype).itemsize
        last = self.shape[-1] * old
        if self.strides[-1] != 1 or last % new or (self.offset * old) % new:
            refuse(
                "pattern",
                f"{self!r} can't be reinterpreted as {dtype}: its last dimension must be contiguous and divisible",
            )
        scaled = [stride * old for stride in self.strides[:-1]]
        if any(stride % new for stride in scaled):
            refuse("pattern", f"strides {self.strides} of {self.dtype} don't divide into {dtype}")
        strides = (*(stride // new for stride in scaled), 1)
        return NkiTensor(
            self.storage, (*self.shape[:-1], last // new), strides, self.offset * old // new, np.dtype(dtype)
        )

    reinterpret_cast = view

    def ap(self, pattern: Sequence[Sequence[int]], offset: int | None = None) -> "NkiTensor":
        """The access pattern [[stride, count], ...] over the whole storage, `offset` elements from its start."""
        if (
            offset is None
            or self.offset
            or self.size != prod(self.storage.allocation.shape)
            or not self.is_contiguous()
        ):
            refuse("pattern", "ap is only defined on a whole tensor and with an explicit offset", "ap")
        strides, shape = tuple(p[0] for p in pattern), tuple(p[1] for p in pattern)
        row = prod(self.shape[1:])
        if self.buffer.on_chip and (strides[0] != row or offset // row + shape[0] > self.shape[0]):
            refuse(
                "pattern",
                f"first pair {list(pattern[0])}: its stride is the row, {row} elements, of {self.shape[0]} partitions",
                "ap",
            )
        reach = offset + sum(stride * (count - 1) for stride, count in pattern)
        if min(shape) < 1 or min(strides) < 0 or offset < 0 or reach >= self.size:
            refuse("bounds", f"pattern {pattern} from {offset} reaches element {reach} of {self.size}", "ap")
        return self._view(shape, strides, offset)

    def _view(self, shape: Shape, strides: Shape, offset: int) -> "NkiTensor":
        if self.buffer.on_chip:
            if len(shape) < 2:
                refuse("rank", f"view of shape {shape} of an on-chip tensor needs two dimensions or more")
            if len(shape) and (shape[0] > self.shape[0] or (shape[0] > 1 and strides[0] != self._row_elements)):
                refuse(
                    "partition-first",
                    f"view {shape} with strides {strides} moves or steps over partitions of {self!r}",
                )
        return NkiTensor(self.storage, shape, strides, offset, self.dtype)

    # ---- for the interpreter ----

    @property
    def _row_elements(self) -> int:
        return self.storage.allocation.row_bytes // self.dtype.itemsize

    @property
    def array(self) -> npt.NDArray[Any]:
        """The elements as a NumPy view of the storage."""
        if self._array is None:
            size = self.dtype.itemsize
            strides = tuple(stride * size for stride in self.strides)
            self._array = np.ndarray(self.shape, self.dtype, self.storage.data.data, self.offset * size, strides)
        return self._array

    @property
    def free_size(self) -> int:
        """Elements a partition."""
        return prod(self.shape[1:])

    @property
    def start_partition(self) -> int:
        return self.offset // self._row_elements

    @property
    def covers_storage(self) -> bool:
        return (
            self.dtype == self.storage.allocation.dtype
            and self.size == prod(self.storage.allocation.shape)
            and 0 not in self.strides
        )

    def over(self, per_element: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`per_element` (one entry for each element of the storage) seen through this view.

        A reinterpreted view sees, for each of its elements, the entry of the storage element it begins in.
        """
        size = per_element.itemsize
        if self.dtype.itemsize == self.storage.allocation.dtype.itemsize:
            strides = tuple(stride * size for stride in self.strides)
            return np.ndarray(self.shape, per_element.dtype, per_element.data, self.offset * size, strides)
        return per_element[self.elements() * self.dtype.itemsize // self.storage.allocation.dtype.itemsize]

    def elements(self) -> npt.NDArray[np.int64]:
        """The element number of every entry of the view, in its shape."""
        index = np.full(self.shape, self.offset, np.int64)
        for dim, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            index += (np.arange(size) * stride).reshape((-1,) + (1,) * (self.ndim - dim - 1))
        return index

    def mark_written(self) -> None:
        storage = self.storage
        if storage.unwritten is None:
            return
        if self.covers_storage:
            storage.unwritten = None
        elif self.dtype.itemsize == storage.allocation.dtype.itemsize:
            self.over(storage.unwritten)[...] = False
        else:
            ratio = storage.allocation.dtype.itemsize
            size = self.dtype.itemsize
            first = self.elements() * size
            for byte in range(0, size, min(size, ratio)):
                storage.unwritten[(first + byte) // ratio] = False

    def first_unwritten(self) -> tuple[int, ...] | None:
        """The index of the first element that nothing was written to, or None."""
        if self.storage.unwritten is None:
            return None
        mask = self.over(self.storage.unwritten)
        if not mask.any():
            if self.covers_storage:
                self.storage.unwritten = None
            return None
        return tuple(int(i) for i in np.argwhere(mask)[0])

    def crosses_bank(self) -> bool:
        """Whether a PSUM view touches two banks of a partition."""
        row = self.storage.allocation.row_bytes
        first = self.offset * self.dtype.itemsize % row
        reach = sum(stride * (size - 1) for size, stride in zip(self.shape[1:], self.strides[1:], strict=True))
        last = first + (reach + 1) * self.dtype.itemsize - 1
        return self.buffer is PSUM and first // hardware.PSUM_BANK_BYTES != last // hardware.PSUM_BANK_BYTES


def contiguous_strides(shape: Shape) -> Shape:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _index(key: Any, size: int, dim: int) -> tuple[int, int, int, bool]:
    """(start, count, step, keep the dimension) of one index. Nothing is clipped: what runs over is refused."""
    if isinstance(key, DynamicSlice):
        key = slice(key.start, key.start + key.size)
    if isinstance(key, slice):
        start = 0 if key.start is None else key.start
        stop = size if key.stop is None else key.stop
        step = 1 if key.step is None else key.step
        start, stop = (start + size if start < 0 else start), (stop + size if stop < 0 else stop)
        if step < 1 or not 0 <= start <= stop <= size:
            refuse("bounds", f"slice {start}:{stop}:{step} of dimension {dim}, whose size is {size}")
        return start, -(-(stop - start) // step), step, True
    start = key + size if key < 0 else key
    if not 0 <= start < size:
        refuse("bounds", f"index {key} of dimension {dim}, whose size is {size}")
    return start, 1, 1, False
