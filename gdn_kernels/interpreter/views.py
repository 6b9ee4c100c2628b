"""The arithmetic of views: which shape and strides an index, a reshape or a rearrangement gives.

Nothing here knows a tensor; strides count elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import index as as_int
from typing import Any

from gdn_kernels.interpreter.memory import Shape
from gdn_kernels.interpreter.rules import refuse


@dataclass(frozen=True)
class DynamicSlice:
    """`nl.ds(start, size)`: `size` elements from `start`, an int or a value known at run time only."""

    start: Any
    size: int


def contiguous_strides(shape: Shape) -> Shape:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Whether elements lie next to each other in row-major order; a dimension of size 1 has no say."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def bounds(key: slice, size: int, dim: int) -> tuple[int, int, int]:
    """(start, count, step) of a slice. Nothing is clipped: what runs over is refused."""
    try:
        start = 0 if key.start is None else as_int(key.start)
        stop = size if key.stop is None else as_int(key.stop)
        step = 1 if key.step is None else as_int(key.step)
    except TypeError:
        refuse("pattern", f"slice {key.start!r}:{key.stop!r}:{key.step!r}; a run-time start needs nl.ds", "[]")
    start, stop = (start + size if start < 0 else start), (stop + size if stop < 0 else stop)
    if step < 1 or not 0 <= start < stop <= size:
        refuse("bounds", f"slice {start}:{stop}:{step} of dimension {dim}, whose size is {size}")
    return start, -(-(stop - start) // step), step


def position(key: Any, size: int, dim: int) -> int:
    """The element an integer index selects."""
    try:
        start = as_int(key)
    except TypeError:
        refuse("pattern", f"{key!r} is no index; an int, a slice, ..., nl.ds, a register or a (1, 1) tensor is", "[]")
    if start < 0:
        start += size
    if isinstance(key, bool) or not 0 <= start < size:
        refuse("bounds", f"index {key} of dimension {dim}, whose size is {size}")
    return start


def expand_ellipsis(keys: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """One key a dimension, for the first dimensions; the rest is taken whole."""
    at = [number for number, key in enumerate(keys) if key is Ellipsis]
    if len(at) > 1 or len(keys) - len(at) > ndim:
        refuse("bounds", f"{len(keys)} indices into {ndim} dimensions", "[]")
    if not at:
        return keys
    return keys[: at[0]] + (slice(None),) * (ndim - len(keys) + 1) + keys[at[0] + 1 :]


def resolve_size(shape: Sequence[int], size: int) -> Shape:
    """`shape` with its one -1, if any, replaced by what makes `size` elements."""
    wanted = tuple(as_int(n) for n in shape)
    if wanted.count(-1) == 1 and -prod(wanted) > 0:
        wanted = tuple(size // -prod(wanted) if n == -1 else n for n in wanted)
    if prod(wanted) != size or min(wanted, default=1) < 1:
        refuse("pattern", f"{size} elements can't be viewed as {tuple(shape)}")
    return wanted


def reshaped_strides(shape: Shape, strides: Shape, wanted: Shape) -> Shape | None:
    """The strides of a view seen in the shape `wanted`, of as many elements; None where only a copy has that shape."""
    dims = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    found: list[int] = []
    at = 0  # the first dimension that isn't used up
    left, stride = 1, 0  # elements of the dimensions before it that are still to be split, and the innermost's stride
    for size in wanted:
        if size == 1:
            found.append(0)
            continue
        while left % size or left == 1:
            if at == len(dims):
                return None
            if left != 1 and stride != dims[at][0] * dims[at][1]:
                return None
            left, stride = left * dims[at][0], dims[at][1]
            at += 1
        left //= size
        found.append(left * stride)
    for dim in reversed(range(len(wanted))):
        if wanted[dim] == 1:  # it has the stride it would have in contiguous memory
            found[dim] = 1 if dim == len(wanted) - 1 else wanted[dim + 1] * found[dim + 1]
    return tuple(found)


@dataclass(frozen=True)
class Rearrangement:
    """Split every dimension into `split`, order the parts by `order`, then merge them into `merged`."""

    split: Shape
    order: tuple[int, ...]
    merged: Shape


def rearrangement(shape: Shape, src: Sequence[Any], dst: Sequence[Any], fixed: dict[str, int]) -> Rearrangement:
    """What einops-style patterns ask for: names, or tuples of names for a dimension that is split or merged."""
    sources = [(part,) if isinstance(part, str) else tuple(part) for part in src]
    targets = [(part,) if isinstance(part, str) else tuple(part) for part in dst]
    names = [name for part in sources for name in part]
    wanted = [name for part in targets for name in part]
    if len(sources) != len(shape) or len(set(names)) != len(names) or sorted(names) != sorted(wanted):
        refuse("pattern", f"{tuple(src)} to {tuple(dst)} doesn't rearrange {len(shape)} dimensions", "rearrange")
    sizes: dict[str, int] = {}
    for part, size in zip(sources, shape, strict=True):
        known = [fixed.get(name, -1) for name in part]
        if len(part) == 1 and known == [-1]:
            known = [size]
        if known.count(-1) > 1:
            refuse("pattern", f"the sizes of {part} don't follow from {size} and {fixed}", "rearrange", "fixed_sizes")
        sizes.update(zip(part, resolve_size(known, size), strict=True))
    return Rearrangement(
        tuple(sizes[name] for name in names),
        tuple(names.index(name) for name in wanted),
        tuple(prod(sizes[name] for name in part) for part in targets),
    )
