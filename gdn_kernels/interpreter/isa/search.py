"""Finding the largest values of each partition and where they are, eight at a time, on Vector."""

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.dry import Hollow
from gdn_kernels.interpreter.isa.operands import (
    Array,
    check,
    check_dtype,
    check_overlap,
    check_tiles,
    convert,
    instruction,
    number,
    read,
    read_bits,
    round_to,
    tensors,
    write,
    write_bits,
)
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

FEWEST, MOST = 8, 16384
INDEX_DTYPES = (np.uint16, np.uint32)


def _check_searched(op: str, role: str, data: NkiTensor) -> None:
    check(op, role, data)
    if not FEWEST <= data.free_size <= MOST or data.ndim > 3:
        refuse("shape", f"{data.shape}, expected {FEWEST} to {MOST} elements in up to 3 dimensions", op, role)


def _check_eight(op: str, role: str, view: NkiTensor, data: NkiTensor) -> None:
    check(op, role, view)
    if view.shape[0] != data.shape[0] or view.free_size != 8:
        refuse("shape", f"{view.shape}, expected ({data.shape[0]}, 8)", op, role)


@instruction
def max8(dst: NkiTensor, src: NkiTensor, name: str | None = None) -> None:
    """dst[P, 8] = the 8 largest values of each partition in fp32, largest first; 8 to 16,384 elements."""
    op = "max8"
    _check_searched(op, "src", src)
    _check_eight(op, "dst", dst, src)
    check_overlap(op, dst, src)
    values = np.sort(read(op, "src", src).reshape(src.shape[0], -1), axis=1)
    write(dst, values[:, :-9:-1])
    machine.current().record(op, "vector", (src,), (dst,), name)


@instruction
def nc_find_index8(dst: NkiTensor, data: NkiTensor, vals: NkiTensor, name: str | None = None) -> None:
    """dst[P, 8] = where each of the 8 vals is first found in data; all bits set where it isn't.

    A value that vals repeats takes its occurrences one after another. dst is uint16 or uint32.
    """
    op = "nc_find_index8"
    _check_searched(op, "data", data)
    _check_eight(op, "vals", vals, data)
    _check_eight(op, "dst", dst, data)
    check_dtype(op, "dst", dst, INDEX_DTYPES)
    x, wanted = (read(op, role, view).reshape(data.shape[0], -1) for role, view in (("data", data), ("vals", vals)))
    found = np.full((data.shape[0], 8), np.iinfo(dst.dtype).max, dst.dtype)
    left = np.ones(x.shape, bool)
    for slot in range(8):
        rows, position = _first(x, wanted[:, slot], left)
        found[rows, slot] = position
        left[rows, position] = False
    write_bits(dst, found)
    machine.current().record(op, "vector", (data, vals), (dst,), name)


def _first(x: Array, value: Array, left: Array) -> tuple[Array, Array]:
    """The partitions that have their value among the elements left, and where first."""
    match = (x == value[:, None]) & left
    rows = np.flatnonzero(match.any(axis=1))
    return rows, match[rows].argmax(axis=1)


@instruction
def nc_match_replace8(
    dst: NkiTensor,
    data: NkiTensor,
    vals: NkiTensor,
    imm: float,
    dst_idx: NkiTensor | None = None,
    name: str | None = None,
) -> None:
    """dst = data with the first occurrence of each of the 8 vals replaced by imm; dst_idx[P, 8] = where they were.

    The last of vals goes first, so a value that vals repeats takes its occurrences in descending order of slots. What
    the slot of a value that isn't there receives isn't documented, so it is refused.
    """
    op = "nc_match_replace8"
    check_tiles(op, dst, ("data", data))
    _check_searched(op, "data", data)
    _check_eight(op, "vals", vals, data)
    x, wanted = (read(op, role, view).reshape(data.shape[0], -1) for role, view in (("data", data), ("vals", vals)))
    found, left = np.zeros((data.shape[0], 8), np.uint32), np.ones(x.shape, bool)
    matched = np.zeros(found.shape, bool)
    for slot in reversed(range(8)):
        rows, position = _first(x, wanted[:, slot], left)
        found[rows, slot], matched[rows, slot] = position, True
        left[rows, position] = False
    kept = convert(read_bits(op, "data", data), dst.dtype).reshape(x.shape)
    write_bits(dst, np.where(left, kept, round_to(np.asarray(number(op, "imm", imm)), dst.dtype)))
    if dst_idx is not None:
        _check_eight(op, "dst_idx", dst_idx, data)
        check_dtype(op, "dst_idx", dst_idx, INDEX_DTYPES)
        if not matched.all() and not isinstance(data.array, Hollow):
            refuse("not-modelled", "dst_idx of a value that isn't found", op, "dst_idx")
        write_bits(dst_idx, found.astype(dst_idx.dtype))
    machine.current().record(op, "vector", (data, vals), tensors(dst, dst_idx), name)
