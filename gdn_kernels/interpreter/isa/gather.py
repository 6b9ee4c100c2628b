"""Gathering within partitions by index tiles, on GpSimd: from SBUF to SBUF, no dtype conversion."""

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.isa.operands import (
    IN_SBUF,
    Array,
    check,
    check_dtype,
    check_overlap,
    instruction,
    integer,
    read_bits,
    write_bits,
)
from gdn_kernels.interpreter.rules import refuse, report
from gdn_kernels.interpreter.tensor import NkiTensor

CORE_PARTITIONS = 16  # that each of the 8 GpSimd cores is connected to
ELEMENTS_PER_INDEX = (1, 2, 4, 8, 16, 32)
MAX_INDICES = 4096


def _check(op: str, dst: NkiTensor, role: str, data: NkiTensor, index_role: str, index: NkiTensor) -> None:
    for name, view in (("dst", dst), (role, data), (index_role, index)):
        check(op, name, view, IN_SBUF)
        if view.shape[0] != dst.shape[0]:
            refuse("shape", f"{view.shape[0]} partitions, dst has {dst.shape[0]}", op, name)
    if dst.dtype != data.dtype:
        refuse("dtype", f"{dst.dtype}, expected that of {role}, {data.dtype}", op, "dst")
    check_overlap(op, dst, data)
    check_overlap(op, dst, index)


def _check_range(op: str, role: str, index: Array, elements: int) -> None:
    if index.size and int(index.max()) >= elements:
        refuse("bounds", f"index {index.max()} into {elements} elements", op, role, limit=elements, found=index.max())


@instruction
def nc_n_gather(dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None) -> None:
    """dst[p, j] = data[p, indices[p, j]], free dimensions flattened; indices are uint32 and in range."""
    op = "nc_n_gather"
    _check(op, dst, "data", data, "indices", indices)
    check_dtype(op, "indices", indices, (np.uint32,))
    if dst.free_size != indices.free_size:
        refuse("shape", f"{dst.free_size} elements a partition, {indices.free_size} indices", op, "dst")
    index = read_bits(op, "indices", indices).reshape(dst.shape[0], -1).astype(np.int64)
    _check_range(op, "indices", index, data.free_size)
    write_bits(dst, np.take_along_axis(read_bits(op, "data", data).reshape(dst.shape[0], -1), index, axis=1))
    machine.current().record(op, "gpsimd", (data, indices), (dst,), name)


@instruction
def local_gather(
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> None:
    """dst[p, j, e] = src_buffer[p, i[j] + e], free dimensions flattened, for e < num_elem_per_idx.

    i are the first num_valid_indices uint16 values of index in the 16 partitions that share a GpSimd core, partitions
    first: the same for all 16. At most 4,096 a core; partitions come in 16s.
    """
    op = "local_gather"
    _check(op, dst, "src_buffer", src_buffer, "index", index)
    check_dtype(op, "index", index, (np.uint16,))
    partitions, width = dst.shape[0], integer(op, "num_elem_per_idx", num_elem_per_idx)
    if partitions % CORE_PARTITIONS:
        refuse("shape", f"{partitions} partitions, expected a multiple of {CORE_PARTITIONS}", op, "index")
    if width not in ELEMENTS_PER_INDEX:
        refuse("shape", f"{width}, expected one of {ELEMENTS_PER_INDEX}", op, "num_elem_per_idx")
    if width > 1:
        detail = f"{width}: taken as elements from each index on; the documented NumPy equivalent counts groups"
        report("documents-disagree", detail, op, "num_elem_per_idx")
    available = CORE_PARTITIONS * index.free_size
    valid = available if num_valid_indices is None else integer(op, "num_valid_indices", num_valid_indices)
    if not 1 <= valid <= min(available, MAX_INDICES):
        refuse("shape", f"{valid} indices a core, from 1 to {min(available, MAX_INDICES)}", op, "num_valid_indices")
    if dst.free_size != valid * width:
        refuse("shape", f"{dst.free_size} elements a partition, expected {valid * width}", op, "dst")
    cores = read_bits(op, "index", index).reshape(-1, CORE_PARTITIONS, index.free_size)
    chosen = cores.transpose(0, 2, 1).reshape(len(cores), -1)[:, :valid].astype(np.int64)  # [cores, valid]
    at = (chosen[:, :, None] + np.arange(width)).reshape(len(cores), -1).repeat(CORE_PARTITIONS, axis=0)
    _check_range(op, "index", at, src_buffer.free_size)
    source = read_bits(op, "src_buffer", src_buffer).reshape(partitions, -1)
    write_bits(dst, np.take_along_axis(source, at, axis=1))
    machine.current().record(op, "gpsimd", (src_buffer, index), (dst,), name, indices=valid)
