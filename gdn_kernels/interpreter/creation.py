"""Tensors a kernel makes: uninitialised, filled, or constant."""

from operator import index as as_int
from pathlib import Path
from typing import Any

import numpy as np

from gdn_kernels.interpreter import isa, machine
from gdn_kernels.interpreter.dtypes import storable, uint8
from gdn_kernels.interpreter.memory import SBUF, SHARED_HBM, Allocation, Buffer, Storage
from gdn_kernels.interpreter.placement import place
from gdn_kernels.interpreter.rules import kernel_line, refuse
from gdn_kernels.interpreter.tensor import NkiTensor


class ndarray:  # a class, as kernels put it into annotations such as `nl.ndarray | None`
    """Uninitialised memory of a shape and dtype in one of the memories.

    `address`: (partition, byte) to put an on-chip tensor at, instead of leaving that to the compiler.
    """

    def __new__(  # type: ignore[misc]
        cls,
        shape: Any,
        dtype: Any,
        buffer: Any = SBUF,
        name: str = "",
        address: tuple[int | None, int | None] | None = None,
    ) -> NkiTensor:
        if not isinstance(buffer, Buffer):
            refuse("objects-not-strings", f"{buffer!r}, expected a memory such as nl.sbuf", "ndarray", "buffer")
        if type(shape) not in (tuple, list):
            refuse("argument", f"{shape!r}, expected a tuple of sizes", "ndarray", "shape")
        sizes = tuple(as_int(size) for size in shape)
        if min(sizes, default=1) < 1:
            refuse("argument", f"{sizes}: sizes are 1 or more", "ndarray", "shape")
        tensor = machine.current().allocate(sizes, storable(dtype, "ndarray"), buffer, name)
        if address is not None:
            place(tensor, address, machine.current().target)
        return tensor


def full(shape: Any, fill_value: Any, dtype: Any, buffer: Any = SBUF, name: str = "") -> NkiTensor:
    """A tensor with every element `fill_value`."""
    tensor = ndarray(shape, dtype, buffer, name)
    tile = tensor if tensor.buffer.on_chip else _staging(tensor)
    isa.memset(dst=tile, value=int(fill_value) if tile.dtype.kind in "iu" else float(fill_value))
    if tile is not tensor:
        isa.dma_copy(dst=tensor, src=tile)
    return tensor


def _staging(tensor: NkiTensor) -> NkiTensor:
    """An SBUF tile with the elements of an HBM tensor over as many partitions as divide them."""
    partitions = next(count for count in range(128, 0, -1) if tensor.size % count == 0)
    return ndarray((partitions, tensor.size // partitions), tensor.dtype, SBUF)


def zeros(shape: Any, dtype: Any, buffer: Any = SBUF, name: str = "") -> NkiTensor:
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: Any = SBUF, name: str = "") -> NkiTensor:
    return full(shape, 1, dtype, buffer, name)


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    return full(x.shape, 0, dtype or x.dtype, buffer or x.buffer, name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def shared_constant(constant: Any) -> NkiTensor:
    """A shared_hbm tensor with the values of a NumPy array, or of the .npy file at a path."""
    values = np.load(constant) if isinstance(constant, (str, Path)) else constant
    if not isinstance(values, np.ndarray):
        refuse("argument", f"{constant!r}, expected an array or the path of a .npy file", "shared_constant", "constant")
    core = machine.current()
    dtype = storable(values.dtype, "shared_constant", "constant")
    allocation = Allocation(len(core.lifetimes), "constant", SHARED_HBM, values.shape, dtype, kernel_line())
    storage = Storage.stand_in(allocation) if core.launch.dry else Storage.of_array(allocation, values.copy(order="C"))
    core.lifetimes.append(storage.lifetime)
    return NkiTensor.whole(storage)


def shared_identity_matrix(n: int, dtype: Any = uint8, dst: NkiTensor | None = None) -> NkiTensor:
    """An identity matrix [n, n] in SBUF, ready to use; in `dst`, if given."""
    tile = ndarray((n, n), dtype, SBUF, "identity") if dst is None else dst
    if tile.buffer is not SBUF or tile.shape != (n, n):
        refuse("shape", f"{tile!r}, expected ({n}, {n}) in SBUF", "shared_identity_matrix", "dst")
    tile.array[...] = np.eye(n)
    tile.mark_written()
    return tile
