"""Views whose address is known at run time only, and the registers they may be addressed by.

An instruction asks such a view for its offset when it runs, so the index is read then, as on the device.
"""

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.interpreter.dry import hollow
from gdn_kernels.interpreter.memory import SBUF, Shape
from gdn_kernels.interpreter.objects import RunTimeValue
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor


class Indirect(NkiTensor):
    """A view addressed by `index`, in steps of `unit` elements; a legal index is at least 0 and below `limit`."""

    __slots__ = ("index", "limit", "unit")

    def __init__(self, view: NkiTensor, index: Any, unit: int, limit: int) -> None:
        super().__init__(view.storage, view.shape, view.strides, view.base, view.dtype)
        self.index, self.unit, self.limit = index, unit, limit

    def _view(self, shape: Shape, strides: Shape, base: int) -> NkiTensor:
        plain = NkiTensor(self.storage, shape, strides, base, self.dtype)
        return type(self)(plain, self.index, self.unit, self.limit)

    def index_values(self) -> npt.NDArray[np.int64]:
        """The indices as they are now."""
        if isinstance(self.index, RunTimeValue):
            if self.index.value is None:
                refuse("uninitialised", "the register holds no value", "", "index")
            return np.array([self.index.value])
        hole = self.index.first_unwritten()
        if hole is not None:
            refuse("uninitialised", f"{self.index!r} was never written at {hole}", "", "index")
        values: npt.NDArray[np.int64] = self.index.array.reshape(-1).astype(np.int64)
        return values

    def in_bounds(self) -> npt.NDArray[np.bool_]:
        """Which indices stay inside the tensor: one entry an index."""
        values = self.index_values()
        return (values >= 0) & (values < self.limit)

    def touched(self) -> npt.NDArray[np.int64]:
        """The element numbers that an access reaches: none that an index out of bounds names, as it is skipped."""
        return self.elements() if self.in_bounds().all() else np.empty(0, np.int64)

    def check_use(self, op: str, role: str) -> None:
        super().check_use(op, role)
        if not self.in_bounds().all():
            refuse("bounds", f"index {self.index_values()} of {self!r}, legal below {self.limit}", op, role)


class Moved(Indirect):
    """A view that begins `index` steps later. `index`: a register or an integer (1, 1) tile."""

    __slots__ = ()

    @property
    def offset(self) -> int:
        return self.base + int(self.index_values()[0]) * self.unit

    @property
    def array(self) -> npt.NDArray[Any]:
        self.check_use("", "")
        return NkiTensor(self.storage, self.shape, self.strides, self.offset, self.dtype).array


class Rows(Indirect):
    """Row index[p] for every p of dimension 0. `index`: an integer (P, 1) tile. Only a DMA reads or writes it."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> NkiTensor:
        first = key[0] if isinstance(key, tuple) and key else key
        if first is not Ellipsis and first != slice(None):
            refuse("pattern", f"index {first!r} of the dimension that a vector selects", "[]")
        return super().__getitem__(key)

    def _first_stays(self) -> bool:
        return True

    def row(self, number: int) -> NkiTensor:
        """Row `number` alone, [1, ...]."""
        base = self.base + int(self.index_values()[number]) * self.unit
        return NkiTensor(self.storage, (1, *self.shape[1:]), self.strides, base, self.dtype)

    def touched(self) -> npt.NDArray[np.int64]:
        return self.elements()[self.in_bounds()]

    def elements(self) -> npt.NDArray[np.int64]:
        one = NkiTensor(self.storage, (1, *self.shape[1:]), self.strides, self.base, self.dtype).elements()
        return one + (self.index_values() * self.unit).reshape((-1,) + (1,) * (self.ndim - 1))

    def over(self, entries: npt.NDArray[Any]) -> npt.NDArray[Any]:
        pieces = self.dtype.itemsize // self.storage.unit
        return entries[self.elements()] if pieces == 1 else entries.reshape(-1, pieces)[self.elements()]

    @property
    def covers_storage(self) -> bool:
        return False

    @property
    def array(self) -> npt.NDArray[Any]:
        """A copy of the rows: what is assigned to it is lost, so a DMA writes row by row."""
        self.check_use("", "")
        if self.storage.data is None:
            return hollow(self.shape, self.dtype)
        return self.storage.data.view(self.dtype)[self.elements()]


def moved(view: NkiTensor, index: Any, unit: int, limit: int, op: str) -> NkiTensor:
    """`view` moved by `index` steps of `unit` elements at run time."""
    _check_direct(view, op)
    if not isinstance(index, RunTimeValue):
        _check_index(index, 1, op)
    return Moved(view, index, unit, limit)


def rows(view: NkiTensor, index: Any, shape: Shape, strides: Shape, base: int, op: str) -> NkiTensor:
    """Rows of dimension 0 of `view`, chosen by a (P, 1) tile; each of `shape` and `strides` from element `base`."""
    _check_direct(view, op)
    if view.buffer.on_chip:
        refuse("memory-space", f"{view!r}: rows are chosen by a vector in HBM only", op)
    if not isinstance(index, NkiTensor):
        refuse("objects-not-strings", f"{index!r}, expected a (P, 1) tile", op, "vector_offset")
    _check_index(index, index.shape[0], op)
    unit = view.strides[0]
    plain = NkiTensor(view.storage, (index.shape[0], *shape), (unit, *strides), base, view.dtype)
    return Rows(plain, index, unit, min(view.shape[0], _limit(plain, base, shape, strides, unit)))


def access_pattern(view: NkiTensor, made: NkiTensor, scalar: Any, vector: Any, dim: int) -> NkiTensor:
    """The view `made` by `.ap` of `view`, addressed along dimension `dim` of `view` at run time."""
    if scalar is not None and vector is not None:
        refuse("pattern", "scalar_offset and vector_offset exclude each other", "ap")
    view._dimension("ap", dim)
    if vector is not None:
        if dim != 0 or made.dtype != view.dtype:
            refuse("pattern", f"vector_offset with indirect_dim {dim} and dtype {made.dtype}", "ap", "vector_offset")
        if isinstance(vector, NkiTensor) and vector.shape[0] != made.shape[0]:
            refuse("shape", f"{vector.shape[0]} offsets for {made.shape[0]} rows", "ap", "vector_offset")
        return rows(view, vector, made.shape[1:], made.strides[1:], made.base, "ap")
    if dim == 0 and view.buffer.on_chip:
        refuse("partition-first", "a partition can't be chosen at run time", "ap", "indirect_dim")
    _check_direct(view, "ap")
    unit = view.strides[dim] * view.dtype.itemsize // made.dtype.itemsize
    return moved(made, scalar, unit, _limit(made, made.base, made.shape, made.strides, unit), "ap")


def _limit(view: NkiTensor, base: int, shape: Shape, strides: Shape, unit: int) -> int:
    """How often a view can move by `unit` and stay inside its tensor or, on chip, inside its partition's row."""
    total = view.storage.allocation.row_bytes // view.dtype.itemsize
    if view.buffer.on_chip:
        base, shape, strides = base % total, shape[1:], strides[1:]
    last = base + sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True) if stride > 0)
    return (total - 1 - last) // max(unit, 1) + 1


def _check_direct(view: NkiTensor, op: str) -> None:
    if view.is_indirect():
        refuse("pattern", f"{view!r} is already addressed at run time", op)


def _check_index(index: NkiTensor, count: int, op: str) -> None:
    if index.buffer is not SBUF or prod(index.shape) != count or index.dtype.kind not in "iu":
        refuse("scalar-operand", f"{index!r}, expected an integer ({count}, 1) tile in SBUF", op, "index")
