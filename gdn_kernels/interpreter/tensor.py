"""Tensors and their views: shape, strides and offset over one storage; no view moves data.

Strides and offsets count elements of the view's dtype, as in NKI's access patterns. On chip, dimension 0 is the
partition: a view may take a range of partitions but can't step over, move, split or merge them. Views only describe:
whether an access pattern stays inside its tensor is asked when an instruction uses it.
"""

from collections.abc import Sequence
from math import prod
from operator import index as as_int
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from gdn_kernels.interpreter import hardware, views
from gdn_kernels.interpreter.dry import hollow
from gdn_kernels.interpreter.memory import PSUM, Buffer, Shape, Storage
from gdn_kernels.interpreter.objects import RunTimeValue
from gdn_kernels.interpreter.rules import refuse, report
from gdn_kernels.interpreter.views import DynamicSlice, contiguous_strides


class NkiTensor:
    """A tensor or a view of one. Supports the views of the language guide; data is only touched by instructions."""

    __slots__ = ("_array", "base", "dtype", "fault", "shape", "storage", "strides")

    index: Any = None  # what a dynamic view is addressed by, at run time

    def __init__(self, storage: Storage, shape: Shape, strides: Shape, base: int, dtype: np.dtype) -> None:
        self.storage, self.shape, self.strides, self.base, self.dtype = storage, shape, strides, base, dtype
        self.fault: tuple[str, str] | None = None  # the rule that an instruction breaks by using this view
        self._array: npt.NDArray[Any] | None = None
        if dtype.itemsize < storage.unit:
            storage.refine(dtype.itemsize)

    @classmethod
    def whole(cls, storage: Storage) -> "NkiTensor":
        shape = storage.allocation.shape
        return cls(storage, shape, contiguous_strides(shape), 0, storage.allocation.dtype)

    # ---- what a kernel may ask ----

    @property
    def offset(self) -> int:
        return self.base

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
        """Whether the elements (on chip, those of each partition) lie next to each other in row-major order."""
        first = 1 if self.buffer.on_chip else 0
        return views.is_contiguous(self.shape[first:], self.strides[first:])

    def is_indirect(self) -> bool:
        return self.index is not None

    def get_pattern(self) -> list[list[int]]:
        return [[stride, count] for stride, count in zip(self.strides, self.shape, strict=True)]

    def __repr__(self) -> str:
        return f"{self.name or 'tensor'}{list(self.shape)} {self.dtype} in {self.buffer}"

    # ---- views ----

    def __getitem__(self, key: Any) -> "NkiTensor":
        keys = key if type(key) is tuple else (key,)
        for entry in keys:
            if entry is Ellipsis:
                keys = views.expand_ellipsis(keys, len(self.shape))
                break
        if len(keys) > len(self.shape):
            refuse("bounds", f"{len(keys)} indices into shape {self.shape}", "[]")
        on_chip = self.storage.allocation.buffer.on_chip
        fewest = 2 if on_chip else 1
        shape, strides, base = list(self.shape), list(self.strides), self.base
        dynamic = None
        dropped: list[int] = []
        for dim, entry in enumerate(keys):
            size = shape[dim]
            if type(entry) is slice:
                if entry.start is None and entry.stop is None and entry.step is None:
                    continue
                start, count, step = views.bounds(entry, size, dim)
            elif type(entry) is int:
                start, count, step = views.position(entry, size, dim), 1, 1
                dropped.append(dim)
            else:
                if isinstance(entry, DynamicSlice):
                    start, count, step = entry.start, as_int(entry.size), 1
                else:
                    start, count, step = entry, 1, 1
                    dropped.append(dim)
                if isinstance(start, (NkiTensor, RunTimeValue)):
                    if dynamic is not None:
                        refuse("pattern", "more than one dimension is addressed at run time", "[]")
                    dynamic, start = (start, dim, size - count + 1), 0
                start = views.position(start, size, dim)
                start, count, _ = views.bounds(slice(start, start + count), size, dim)
            if dim == 0 and step > 1 and on_chip and count > 1:
                refuse("partition-first", f"step {step} over the partitions of {self!r}", "[]")
            base += start * strides[dim]
            shape[dim], strides[dim] = count, strides[dim] * step
        unit = strides[dynamic[1]] if dynamic is not None else 0
        if dropped:  # on chip, the partition stays and so does one free dimension; in HBM, one dimension
            if on_chip and dropped[0] == 0:
                del dropped[0]
            if len(shape) - len(dropped) < fewest:
                dropped.remove(max(dropped))
            for dim in reversed(dropped):
                del shape[dim], strides[dim]
        view = self._view(tuple(shape), tuple(strides), base)
        return view if dynamic is None else view._addressed(*dynamic, unit)

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> "NkiTensor":
        self._dimension("slice", dim)
        return self[(slice(None),) * dim + (slice(start, end, step),)]

    def select(self, dim: int, index: Any) -> "NkiTensor":
        self._dimension("select", dim)
        return self[(slice(None),) * dim + (index,)]

    def permute(self, dims: Sequence[int]) -> "NkiTensor":
        order = tuple(dims)
        if sorted(order) != list(range(self.ndim)):
            refuse("pattern", f"permute {order} of {self.ndim} dimensions", "permute")
        if order[0] != 0:
            self._keeps_first("permute", f"{order} moves dimension 0")
        return self._view(tuple(self.shape[d] for d in order), tuple(self.strides[d] for d in order), self.base)

    def reshape(self, shape: Sequence[int]) -> "NkiTensor":
        wanted = views.resolve_size(shape, self.size)
        if wanted[0] != self.shape[0]:
            self._keeps_first("reshape", f"{self.shape} to {wanted} splits or merges dimension 0")
        if self._first_stays() and wanted[0] == self.shape[0]:
            free = views.reshaped_strides(self.shape[1:], self.strides[1:], wanted[1:])
            strides = free and (self.strides[0], *free)
        else:
            strides = views.reshaped_strides(self.shape, self.strides, wanted)
        if strides is None:
            refuse("pattern", f"{self.shape} with strides {self.strides} can't be viewed as {wanted}", "reshape")
        return self._view(wanted, strides, self.base)

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> "NkiTensor":
        self._dimension("reshape_dim", dim)
        parts = views.resolve_size(shape, self.shape[dim])
        return self.reshape(self.shape[:dim] + parts + self.shape[dim + 1 :])

    def flatten_dims(self, start_dim: int, end_dim: int) -> "NkiTensor":
        self._dimension("flatten_dims", start_dim, end_dim)
        if start_dim == 0 and end_dim > 0:
            self._keeps_first("flatten_dims", f"({start_dim}, {end_dim}) merges dimension 0")
        merged = prod(self.shape[start_dim : end_dim + 1])
        return self.reshape((*self.shape[:start_dim], merged, *self.shape[end_dim + 1 :]))

    def expand_dim(self, dim: int) -> "NkiTensor":
        if dim != self.ndim:
            self._dimension("expand_dim", dim)
        if dim == 0:
            self._keeps_first("expand_dim", "a dimension before dimension 0")
        shape, strides = self.shape, self.strides
        stride = shape[dim] * strides[dim] if dim < len(shape) else 1
        return self._view((*shape[:dim], 1, *shape[dim:]), (*strides[:dim], stride, *strides[dim:]), self.base)

    def squeeze_dim(self, dim: int) -> "NkiTensor":
        self._dimension("squeeze_dim", dim)
        if self.shape[dim] != 1:
            refuse("pattern", f"squeeze_dim({dim}) of size {self.shape[dim]}", "squeeze_dim")
        if dim == 0:
            self._keeps_first("squeeze_dim", "dimension 0 would go")
        shape, strides = self.shape, self.strides
        return self._view(shape[:dim] + shape[dim + 1 :], strides[:dim] + strides[dim + 1 :], self.base)

    def broadcast(self, dim: int, size: int) -> "NkiTensor":
        self._dimension("broadcast", dim)
        if self.shape[dim] != 1 or size < 1:
            refuse("pattern", f"dimension {dim} of size {self.shape[dim]} to {size}: only size 1 repeats", "broadcast")
        if dim == 0:
            self._keeps_first("broadcast", "a partition can't be repeated")
        strides = (*self.strides[:dim], 0, *self.strides[dim + 1 :])
        return self._view((*self.shape[:dim], size, *self.shape[dim + 1 :]), strides, self.base)

    def rearrange(
        self, src_pattern: Sequence[Any], dst_pattern: Sequence[Any], fixed_sizes: dict[str, int] | None = None
    ) -> "NkiTensor":
        """Split, reorder and merge dimensions by name: `rearrange(("p", ("h", "w")), ("p", "w", "h"), {"h": 4})`."""
        plan = views.rearrangement(self.shape, src_pattern, dst_pattern, fixed_sizes or {})
        return self.reshape(plan.split).permute(plan.order).reshape(plan.merged)

    def view(self, dtype: Any) -> "NkiTensor":
        """The same bytes as another dtype; the last dimension scales."""
        from gdn_kernels.interpreter.dtypes import storable

        new_dtype = storable(dtype, "view")
        old, new = self.dtype.itemsize, new_dtype.itemsize
        if self.is_indirect():
            refuse("pattern", "a view addressed at run time can't be reinterpreted", "view")
        last = self.shape[-1] * old
        if (self.strides[-1] != 1 and self.shape[-1] > 1) or last % new or (self.base * old) % new:
            refuse("pattern", f"{self!r} as {new_dtype}: its last dimension must be contiguous and divisible", "view")
        scaled = [stride * old for stride in self.strides[:-1]]
        if any(stride % new for stride in scaled):
            refuse("pattern", f"strides {self.strides} of {self.dtype} don't divide into {new_dtype}", "view")
        strides = (*(stride // new for stride in scaled), 1)
        return NkiTensor(self.storage, (*self.shape[:-1], last // new), strides, self.base * old // new, new_dtype)

    reinterpret_cast = view

    def vector_select(self, dim: int, vector_offset: "NkiTensor") -> "NkiTensor":
        """Row vector_offset[p] of dimension 0 for every partition p: the rows of an HBM tensor, chosen at run time."""
        from gdn_kernels.interpreter import dynamic

        if dim != 0:
            refuse("pattern", f"dimension {dim}; only dimension 0 is selected by a vector", "vector_select")
        return dynamic.rows(self, vector_offset, self.shape[1:], self.strides[1:], self.base, "vector_select")

    def indirect(self, index: Any, num_elem: int | None = None) -> NoReturn:
        """Tensor indirection, which Trn3 has; not modelled."""
        from gdn_kernels.interpreter.machine import current

        if current().target.generation < 4:
            refuse("target", f"tensor indirection on {current().target.name}, only Trn3 has it", "indirect")
        refuse("not-modelled", "tensor indirection", "indirect")

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: "NkiTensor | None" = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> "NkiTensor":
        """The access pattern [[stride, count], ...] over the storage, `offset` elements after this view's first one.

        On a view the documents disagree: the API reference adds `offset` to the view's own, as is done here, and the
        access-pattern guide counts from the start of the storage.
        """
        try:
            strides, shape = zip(*pattern, strict=True)
            if type(sum(strides) + sum(shape)) is not int:
                strides, shape = tuple(map(as_int, strides)), tuple(map(as_int, shape))
        except (TypeError, ValueError):
            refuse("pattern", f"{pattern!r}, expected [[stride, count], ...]", "ap", "pattern")
        storage, tensor_dtype, base = self.storage, self.dtype, self.base
        if not shape or min(shape) < 1:
            refuse("pattern", f"{pattern}: a count below 1", "ap", "pattern")
        # The first condition holds for a tensor that is no view, and costs nothing.
        if base or (self.shape is not storage.allocation.shape and not self._is_all()):
            report("ap-on-view", f"{self!r} is a view from element {base}; offset {offset} is added to it", "ap")
        if dtype is not None:
            whole = self.whole(storage).view(dtype)
            if base * tensor_dtype.itemsize % whole.dtype.itemsize:
                refuse("pattern", f"element {base} of {tensor_dtype} is no whole element of {whole.dtype}", "ap")
            base, tensor_dtype = base * tensor_dtype.itemsize // whole.dtype.itemsize, whole.dtype
        made = NkiTensor(storage, shape, strides, base + (offset or 0), tensor_dtype)
        if storage.allocation.buffer.on_chip:
            row = made._row_elements
            if len(shape) < 2:
                refuse("rank", f"pattern {pattern} of an on-chip tensor needs two pairs or more", "ap")
            if strides[0] != row or shape[0] > storage.allocation.shape[0]:
                refuse(
                    "pattern",
                    f"first pair {list(pattern[0])}: its stride is the row, {row} elements, of "
                    f"{storage.allocation.shape[0]} partitions",
                    "ap",
                )
        if scalar_offset is not None or vector_offset is not None:
            from gdn_kernels.interpreter import dynamic

            return dynamic.access_pattern(self, made, scalar_offset, vector_offset, indirect_dim)
        made.fault = made._out_of_bounds()
        return made

    def _view(self, shape: Shape, strides: Shape, base: int) -> "NkiTensor":
        view = NkiTensor(self.storage, shape, strides, base, self.dtype)
        if self.fault is not None:
            view.fault = view._out_of_bounds()
        return view

    def _addressed(self, index: Any, dim: int, limit: int, unit: int) -> "NkiTensor":
        """This view moved by `index` times `unit` elements at run time; `index` below `limit`."""
        from gdn_kernels.interpreter import dynamic

        if dim == 0 and self.buffer.on_chip:
            refuse("partition-first", "a partition can't be chosen at run time", "select")
        return dynamic.moved(self, index, unit, limit, "select")

    def _dimension(self, view: str, *dims: int) -> None:
        if any(not 0 <= dim < self.ndim for dim in dims):
            refuse("bounds", f"{view}{dims} of {self.ndim} dimensions", view)

    def _first_stays(self) -> bool:
        """Whether dimension 0 is more than an address: the partition, or the rows of a vector_select."""
        return self.storage.allocation.buffer.on_chip

    def _keeps_first(self, view: str, what: str) -> None:
        if self._first_stays():
            refuse("partition-first", f"{what} of {self!r}", view)

    def _is_all(self) -> bool:
        """Whether this is the whole storage in its own order, if perhaps in another shape."""
        return not self.is_indirect() and self.covers_storage and self.is_contiguous()

    def _out_of_bounds(self) -> tuple[str, str] | None:
        """The bounds rule as a fault, if an element of the view lies outside its tensor or its partition's row."""
        allocation = self.storage.allocation
        total = allocation.row_bytes // self.dtype.itemsize
        first, dims = self.base, zip(self.strides, self.shape, strict=True)
        if allocation.buffer.on_chip:
            partition, first = divmod(first, total)
            if not 0 <= partition <= allocation.shape[0] - self.shape[0]:
                has = allocation.shape[0]
                return "bounds", f"{self.shape[0]} partitions from {partition} of {self!r}, which has {has}"
            next(dims)
        last = first
        for stride, size in dims:
            if stride > 0:
                last += stride * (size - 1)
            else:
                first += stride * (size - 1)
        if first < 0 or last >= total:
            pattern, where = self.get_pattern(), "a partition" if self.buffer.on_chip else "the tensor"
            return "bounds", f"pattern {pattern} from {self.base} spans elements {first} to {last}, {where} has {total}"
        return None

    # ---- what a tensor can't do ----

    def __bool__(self) -> bool:
        refuse("operators", f"the truth value of {self!r}")

    def __iter__(self) -> Any:
        refuse("operators", f"iteration over {self!r}")

    def __setitem__(self, key: Any, value: Any) -> None:
        refuse("operators", f"assignment to {self!r}; an instruction with dst= writes")

    def __eq__(self, other: object) -> bool:
        return self._compare("==", other)

    def __ne__(self, other: object) -> bool:
        return not self._compare("!=", other)

    __hash__ = object.__hash__

    def _compare(self, sign: str, other: object) -> bool:
        """Kernels ask `x == None`, and whether a tensor is some enumeration's member; values can't be compared."""
        if other is not self and isinstance(other, (NkiTensor, bool, int, float, np.ndarray, np.generic)):
            refuse("operators", f"{self!r} {sign} {other!r}")
        return other is self

    # ---- for the interpreter ----

    @property
    def _row_elements(self) -> int:
        return self.storage.allocation.row_bytes // self.dtype.itemsize

    def check_use(self, op: str, role: str) -> None:
        """Refuse what only matters once an instruction reads or writes through this view."""
        if self.fault is not None:
            refuse(*self.fault, op, role)
        if self._row_elements > hardware.MAX_STRIDE and self.buffer.on_chip:
            steps = [(stride, size) for stride, size in zip(self.strides[1:], self.shape[1:], strict=True) if size > 1]
            if any(not -hardware.MAX_STRIDE - 1 <= stride <= hardware.MAX_STRIDE for stride, _ in steps):
                refuse("pattern", f"strides {self.strides}, a stride is an int16", op, role)
            if any(size > hardware.MAX_COUNT for _, size in steps):
                refuse("pattern", f"counts {self.shape}, a count is a uint16", op, role)

    @property
    def array(self) -> npt.NDArray[Any]:
        """The elements as a NumPy view of the storage; without values in a dry launch."""
        if self._array is None:
            if self.fault is not None:
                refuse(*self.fault)
            if self.storage.data is None:
                return hollow(self.shape, self.dtype)
            size = self.dtype.itemsize
            strides = tuple(stride * size for stride in self.strides)
            self._array = np.ndarray(self.shape, self.dtype, self.storage.data.data, self.base * size, strides)
        return self._array

    @property
    def free_size(self) -> int:
        """Elements a partition."""
        return prod(self.shape[1:])

    @property
    def start_partition(self) -> int:
        address = self.storage.lifetime.address
        return self.offset // self._row_elements + (address[0] if address is not None else 0)

    @property
    def covers_storage(self) -> bool:
        """Whether the view has every element of the storage, in any order."""
        allocation = self.storage.allocation
        if self.base or prod(self.shape) * self.dtype.itemsize != prod(allocation.shape) * allocation.dtype.itemsize:
            return False
        if self.shape == allocation.shape and 0 not in self.strides and self.strides == contiguous_strides(self.shape):
            return True
        step = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    def over(self, entries: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`entries`, one for each unit of the storage, seen through this view: in its shape, with one more dimension
        where an element is of several units."""
        if self.fault is not None:
            refuse(*self.fault)
        size, pieces = entries.itemsize, self.dtype.itemsize // self.storage.unit
        if pieces == 1:
            strides = tuple(stride * size for stride in self.strides)
            return np.ndarray(self.shape, entries.dtype, entries.data, self.offset * size, strides)
        strides = (*(stride * pieces * size for stride in self.strides), size)
        return np.ndarray((*self.shape, pieces), entries.dtype, entries.data, self.offset * pieces * size, strides)

    def elements(self) -> npt.NDArray[np.int64]:
        """The element number of every entry of the view, in its shape."""
        index = np.full(self.shape, self.offset, np.int64)
        for dim, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            index += (np.arange(size) * stride).reshape((-1,) + (1,) * (self.ndim - dim - 1))
        return index

    def mark_written(self) -> None:
        if self.storage.unwritten is None:
            return
        if self.covers_storage:
            self.storage.unwritten = None
        else:
            self.over(self.storage.unwritten)[...] = False

    def first_unwritten(self) -> tuple[int, ...] | None:
        """The index of the first element of which some byte was never written, or None."""
        if self.storage.unwritten is None:
            return None
        mask = self.over(self.storage.unwritten)
        if not mask.any():
            if self.covers_storage:
                self.storage.unwritten = None
            return None
        return tuple(int(i) for i in np.argwhere(mask)[0][: self.ndim])

    def crosses_bank(self) -> bool:
        """Whether a PSUM view touches two banks of a partition."""
        row = self.storage.allocation.row_bytes
        first = self.offset * self.dtype.itemsize % row
        reach = sum(stride * (size - 1) for size, stride in zip(self.shape[1:], self.strides[1:], strict=True))
        last = first + (reach + 1) * self.dtype.itemsize - 1
        return self.buffer is PSUM and first // hardware.PSUM_BANK_BYTES != last // hardware.PSUM_BANK_BYTES


def _refusing(sign: str) -> Any:
    def operator(self: NkiTensor, *_: Any) -> NoReturn:
        refuse("operators", f"{sign} of {self!r}; call an instruction such as nisa.tensor_tensor")

    return operator


_OPERATORS = {
    "+": ("add", "radd", "iadd", "pos"),
    "-": ("sub", "rsub", "isub", "neg"),
    "*": ("mul", "rmul", "imul"),
    "@": ("matmul", "rmatmul", "imatmul"),
    "/": ("truediv", "rtruediv", "itruediv"),
    "//": ("floordiv", "rfloordiv", "ifloordiv"),
    "%": ("mod", "rmod", "imod"),
    "**": ("pow", "rpow", "ipow"),
    "&": ("and", "rand", "iand"),
    "|": ("or", "ror", "ior"),
    "^": ("xor", "rxor", "ixor"),
    "~": ("invert",),
    "<<": ("lshift", "rlshift", "ilshift"),
    ">>": ("rshift", "rrshift", "irshift"),
    "<": ("lt",),
    "<=": ("le",),
    ">": ("gt",),
    ">=": ("ge",),
    "abs()": ("abs",),
    "int()": ("int", "index"),
    "float()": ("float",),
}
for _sign, _names in _OPERATORS.items():
    for _name in _names:
        setattr(NkiTensor, f"__{_name}__", _refusing(_sign))
