"""DMA: the only way between HBM and SBUF. It has no partition rules, and can't reach PSUM."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.alu import Op
from gdn_kernels.interpreter.dynamic import Indirect, Rows
from gdn_kernels.interpreter.isa.accumulators import ADD
from gdn_kernels.interpreter.isa.enums import DgeMode, Engine, OobMode
from gdn_kernels.interpreter.isa.operands import (
    Array,
    check_initialised,
    check_overlap,
    check_written_once,
    convert,
    instruction,
    integer,
    member,
    need_generation,
    round_to,
    tensors,
    to_fp32,
    write_where,
)
from gdn_kernels.interpreter.memory import PSUM, SBUF
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

ISSUERS = (Engine.sync, Engine.scalar)
AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
MAX_SOURCES = 16
TRANSPOSE_ROWS = (1, 2, 4, 8, 16)


@instruction
def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: OobMode = OobMode.error,
    dge_mode: DgeMode = DgeMode.unknown,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """dst = src, element by element in row-major order of both views; through fp32 when the dtypes differ.

    hwdge can't convert, and alone takes an issuing engine (sync or scalar). A side addressed at run time excludes
    dge_mode none, rows chosen by a vector need swdge. oob_mode skip leaves out what such an index puts out of bounds.
    priority (0 to 3) belongs to Trn3.
    """
    op = "dma_copy"
    _check_sides(op, dst, ("src", src))
    _check_priority(op, priority)
    mode = dge_mode if dge_mode is DgeMode.unknown else member(op, "dge_mode", dge_mode, DgeMode)
    skips = oob_mode is not OobMode.error and member(op, "oob_mode", oob_mode, OobMode) is OobMode.skip
    _check_mode(op, dst, src, mode, engine)
    check_overlap(op, dst, src)
    options: dict[str, Any] = {"issued_by": member(op, "engine", engine, Engine).name, "dge_mode": mode.name}
    if isinstance(dst, Indirect) or isinstance(src, Indirect):
        options["indirect"] = True
        if not _copy_indirect(op, dst, src, skips):
            options["skipped"] = True
    else:
        check_initialised(op, "src", src)
        values = convert(src.array, dst.dtype)
        dst.array[...] = values if values.shape == dst.shape else values.reshape(dst.shape)
        dst.mark_written()
    machine.current().record(op, "dma", (src, *_indices(src, dst)), (dst,), name, **options)


def _check_sides(op: str, dst: Any, *sources: tuple[str, Any]) -> None:
    for role, view in (("dst", dst), *sources):
        if not isinstance(view, NkiTensor):
            refuse("objects-not-strings", f"expected a tensor, got {view!r}", op, role)
        if view.buffer is PSUM:
            refuse("memory-space", f"{view!r}: DMA can't reach PSUM", op, role)
        if not isinstance(view, Indirect):  # whose index is looked at with the out-of-bounds mode
            view.check_use(op, role)
    for role, view in sources:
        if view.size != dst.size:
            refuse("dma", f"{dst.shape} has {dst.size} elements, {role} {view.shape} has {view.size}", op, "dst")
    if 0 in dst.strides:
        check_written_once(op, dst)


def _check_priority(op: str, priority: int | None) -> None:
    if priority is None:
        return
    need_generation(op, 4, "a priority", "priority")
    if not 0 <= integer(op, "priority", priority) <= 3:
        refuse("dma", f"{priority}, expected 0 to 3", op, "priority")


def _check_mode(op: str, dst: NkiTensor, src: NkiTensor, mode: DgeMode, engine: Any) -> None:
    if mode is DgeMode.hwdge and dst.dtype != src.dtype:
        refuse("dma", f"a hardware-generated DMA can't cast {src.dtype} to {dst.dtype}", op, "dge_mode")
    if engine is not Engine.unknown:
        engine = member(op, "engine", engine, Engine)
        if engine is not Engine.unknown and (mode is not DgeMode.hwdge or engine not in ISSUERS):
            detail = f"engine {engine.name} with {mode.name}: only hwdge is issued from a chosen engine, sync or scalar"
            refuse("dma", detail, op, "engine")
    if isinstance(dst, Rows) or isinstance(src, Rows):
        if mode not in (DgeMode.unknown, DgeMode.swdge):
            refuse("dma", f"{mode.name}: rows chosen by a vector need swdge", op, "dge_mode")
    elif mode is DgeMode.none and (isinstance(dst, Indirect) or isinstance(src, Indirect)):
        refuse("dma", "none: an address known at run time only needs a descriptor engine", op, "dge_mode")


def _indices(*views: NkiTensor) -> tuple[NkiTensor, ...]:
    """The tiles that views are addressed by."""
    return tensors(*(view.index for view in views))


def _copy_indirect(op: str, dst: NkiTensor, src: NkiTensor, skips: bool) -> bool:
    """Whether anything was moved."""
    keep = _kept(op, dst, src, skips)  # [rows]; one entry for all of a view that moves
    values = convert(_gather(op, src, keep), dst.dtype)
    _scatter(dst, values.reshape(dst.shape), keep)
    return bool(keep.any())


def _kept(op: str, dst: NkiTensor, src: NkiTensor, skips: bool) -> Array:
    """Which rows are copied: all of them, or those whose indices are in bounds."""
    keep: Array = np.ones(1, bool)
    for role, view in (("dst", dst), ("src", src)):
        if isinstance(view, Indirect):
            if not skips:
                view.check_use(op, role)
            inside = view.in_bounds()
            if keep.size > 1 and inside.size > 1 and keep.size != inside.size:
                refuse("shape", f"{keep.size} rows chosen in dst and {inside.size} in src", op, role)
            keep = keep & inside
    return keep


def _gather(op: str, src: NkiTensor, keep: Array) -> Array:
    """The values of src in its shape; rows that aren't kept are anything."""
    if isinstance(src, Rows):
        values = np.zeros(src.shape, src.dtype)
        for number in np.flatnonzero(np.broadcast_to(keep, src.shape[:1])):
            row = src.row(int(number))
            check_initialised(op, "src", row)
            values[number : number + 1] = row.array
        return values
    if not keep.any():
        return np.zeros(src.shape, src.dtype)
    check_initialised(op, "src", src)
    return src.array


@instruction
def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: Sequence[int] | None = None,
    priority: int | None = None,
    dge_mode: DgeMode = DgeMode.unknown,
    oob_mode: OobMode = OobMode.error,
    name: str | None = None,
) -> None:
    """dst = src with its first and last dimension exchanged, in SBUF; the shape is exact and the dtype kept.

    axes is (1, 0), (2, 1, 0) or (3, 1, 2, 0). hwdge takes 2-byte dtypes with a last dimension up to 128 and a first of
    16, or in 3 and 4 dimensions of 1 to 16 so that it makes 16s with the last but one. Rows chosen by a vector (swdge)
    come from HBM, 16 at a time, of 2-byte dtypes.
    """
    op = "dma_transpose"
    _check_sides(op, dst, ("src", src))
    _check_priority(op, priority)
    mode = member(op, "dge_mode", dge_mode, DgeMode)
    skips = member(op, "oob_mode", oob_mode, OobMode) is OobMode.skip
    if dst.buffer is not SBUF:
        refuse("memory-space", f"{dst!r}, expected nl.sbuf", op, "dst")
    if dst.dtype != src.dtype:
        refuse("dtype", f"{dst.dtype}, expected that of src, {src.dtype}", op, "dst")
    order = AXES.get(src.ndim)
    if order is None or (axes is not None and tuple(axes) != order):
        refuse("shape", f"axes {axes} of {src.ndim} dimensions, expected {order or 'two to four'}", op, "axes")
    turned = tuple(src.shape[axis] for axis in order)
    if dst.shape != turned:
        refuse("shape", f"{dst.shape}, expected {turned}", op, "dst")
    if isinstance(src, Indirect):
        _check_gather_transpose(op, src, mode)
    elif skips:
        refuse("dma", "skip without a source addressed at run time", op, "oob_mode")
    elif mode is DgeMode.hwdge:
        _check_hardware_transpose(op, src)
    elif mode is not DgeMode.unknown:
        refuse("dma", f"{mode.name}, expected unknown or hwdge", op, "dge_mode")
    check_overlap(op, dst, src)
    keep = _kept(op, dst, src, skips)
    values = _gather(op, src, keep).transpose(order)
    kept = np.broadcast_to(keep.reshape(-1, *(1,) * (src.ndim - 1)), src.shape).transpose(order)
    write_where(dst, values, kept)
    machine.current().record(op, "dma", (src, *_indices(src)), (dst,), name, dge_mode=mode.name)


def _check_hardware_transpose(op: str, src: NkiTensor) -> None:
    first, last = src.shape[0], src.shape[-1]
    if src.dtype.itemsize != 2 or last > 128:
        refuse("dma", f"{src!r}: hwdge transposes 2-byte dtypes, at most 128 wide", op, "src")
    if (first != 16) if src.ndim == 2 else (first not in TRANSPOSE_ROWS or first * src.shape[-2] % 16):
        refuse("dma", f"{src.shape}: hwdge transposes 16 rows at a time", op, "src")


def _check_gather_transpose(op: str, src: NkiTensor, mode: DgeMode) -> None:
    if mode not in (DgeMode.unknown, DgeMode.swdge):
        refuse("dma", f"{mode.name}, expected unknown or swdge", op, "dge_mode")
    if not isinstance(src, Rows) or src.buffer.on_chip:
        refuse("dma", f"{src!r}, expected rows of an HBM tensor", op, "src")
    if src.dtype.itemsize != 2 or src.shape[-1] > 128:
        refuse("dma", f"{src!r}: swdge transposes 2-byte dtypes, at most 128 wide", op, "src")
    if not 16 <= src.shape[0] <= 128 or src.shape[0] % 16:
        refuse("dma", f"{src.shape[0]} rows, expected a multiple of 16 up to 128", op, "src")
    if src.ndim == 4 and src.shape[1] != 1 and src.shape[2] != 1:
        refuse("dma", f"{src.shape}: one of the middle dimensions is 1", op, "src")


@instruction
def dma_compute(
    dst: NkiTensor,
    srcs: Sequence[NkiTensor],
    reduce_op: Op,
    scales: Sequence[float] | None = None,
    unique_indices: bool = True,
    oob_mode: OobMode = OobMode.error,
    name: str | None = None,
) -> None:
    """dst = srcs[0] + srcs[1] + ... in fp32, from left to right; up to 16 sources, reduce_op nl.add, scales all 1.0.

    With rows chosen by a vector, in dst and the source that is the same (scatter) or in a source (gather), there are
    two sources, and the indices are unique.
    """
    op = "dma_compute"
    sources = tuple(srcs) if isinstance(srcs, (list, tuple)) else (srcs,)
    if not 1 <= len(sources) <= MAX_SOURCES:
        refuse("dma", f"{len(sources)} sources, from 1 to {MAX_SOURCES}", op, "srcs")
    _check_sides(op, dst, *((f"srcs[{number}]", source) for number, source in enumerate(sources)))
    if reduce_op is not ADD:
        refuse("operation", f"{reduce_op!r}, expected nl.add", op, "reduce_op")
    if scales is not None and (len(scales) != len(sources) or any(scale != 1.0 for scale in scales)):
        refuse("dma", f"{scales!r}, expected 1.0 for each source", op, "scales")
    skips = member(op, "oob_mode", oob_mode, OobMode) is OobMode.skip
    _check_read_modify_write(op, dst, sources, unique_indices)
    keep: Array = np.ones(1, bool)
    for source in sources:
        if not isinstance(source, Rows):
            check_overlap(op, dst, source)
        keep = keep & _kept(op, dst, source, skips)
    total = to_fp32(_gather(op, sources[0], keep)).reshape(dst.shape).copy()
    for source in sources[1:]:
        total += to_fp32(_gather(op, source, keep)).reshape(dst.shape)
    _scatter(dst, round_to(total, dst.dtype), keep)
    machine.current().record(op, "dma", (*sources, *_indices(dst, *sources)), (dst,), name, op="add")


def _check_read_modify_write(op: str, dst: NkiTensor, sources: tuple[NkiTensor, ...], unique: bool) -> None:
    chosen = [view for view in (dst, *sources) if isinstance(view, Indirect)]
    if not chosen:
        return
    if len(sources) != 2 or not all(isinstance(view, Rows) for view in chosen):
        refuse("dma", f"{len(sources)} sources: rows chosen by a vector take two", op, "srcs")
    values = chosen[0].index_values()
    if not unique or len(np.unique(values)) != len(values):
        refuse("dma", f"{values}: the indices have to be unique", op, "unique_indices")


def _scatter(dst: NkiTensor, values: Array, keep: Array) -> None:
    """Store values, in the shape of dst, in the rows that are kept."""
    if isinstance(dst, Rows):
        for number in np.flatnonzero(np.broadcast_to(keep, dst.shape[:1])):
            row = dst.row(int(number))
            row.array[...] = values[number : number + 1]
            row.mark_written()
    elif keep.any():  # a view moved out of bounds has no place to look at
        mask = np.broadcast_to(keep[:, None], (keep.size, dst.size // keep.size)).reshape(dst.shape)
        write_where(dst, values, mask)
