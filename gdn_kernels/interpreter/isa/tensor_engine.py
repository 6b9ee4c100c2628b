"""The Tensor engine: matrix multiply and transpose into PSUM.

A product is summed in float64 and rounded once to fp32, so an element of the result depends on its own row and column
alone, whatever the size of the tile. The hardware sums in fp32 in an order it doesn't document: compare with
tolerances, not for equality.
"""

from typing import Any

import numpy as np

from gdn_kernels.interpreter import hardware, machine
from gdn_kernels.interpreter.isa.enums import Engine, PerfMode
from gdn_kernels.interpreter.isa.operands import check, check_initialised, choose_engine, instruction
from gdn_kernels.interpreter.isa.operands import read as read_fp32
from gdn_kernels.interpreter.memory import EMPTY, OPEN, PLAIN, PSUM, READ, SBUF
from gdn_kernels.interpreter.rules import refuse, warn
from gdn_kernels.interpreter.tensor import NkiTensor


@instruction
def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: PerfMode = PerfMode.none,
    name: str | None = None,
) -> None:
    """dst[M, N] (+)= stationary[K, M].T @ moving[K, N], K on the partitions of both; dst fp32 in PSUM."""
    op = "nc_matmul"
    core = machine.current()
    check(op, "stationary", stationary, (SBUF,))
    check(op, "moving", moving, (SBUF,))
    check(op, "dst", dst, (PSUM,))
    _check_sizes(op, dst, stationary, moving, core.target)
    _check_dtypes(op, dst, stationary, moving)
    if tile_position or tile_size or is_transpose or perf_mode is not PerfMode.none:
        refuse("not-modelled", "tile_position, tile_size, is_transpose and perf_mode", op)
    check_initialised(op, "stationary", stationary)
    check_initialised(op, "moving", moving)
    rows, columns = (view.array.reshape(view.shape[0], -1).astype(np.float64) for view in (stationary, moving))
    product = (rows.T @ columns).astype(np.float32).reshape(dst.shape)  # [M, N]
    _accumulate(op, dst, product, accumulate)
    core.record(op, "tensor", (stationary, moving), (dst,), name, accumulate=accumulate)


def _check_sizes(op: str, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, target: hardware.Target) -> None:
    if stationary.shape[0] != moving.shape[0]:
        refuse("shape", f"{stationary.shape[0]} partitions, moving has {moving.shape[0]}", op, "stationary")
    if stationary.free_size > hardware.MATMUL_STATIONARY_FREE:
        refuse("shape", f"{stationary.free_size} columns, at most {hardware.MATMUL_STATIONARY_FREE}", op, "stationary")
    if moving.free_size > target.matmul_moving_free:
        refuse("shape", f"{moving.free_size} columns, at most {target.matmul_moving_free}", op, "moving")
    if (dst.shape[0], dst.free_size) != (stationary.free_size, moving.free_size):
        refuse(
            "shape",
            f"({dst.shape[0]}, {dst.free_size}), expected ({stationary.free_size}, {moving.free_size})",
            op,
            "dst",
        )
    if dst.crosses_bank():
        refuse("psum-bank", f"{dst!r} crosses a bank of {hardware.PSUM_BANK_BYTES} bytes", op, "dst")


def _check_dtypes(op: str, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor) -> None:
    for role, view in (("stationary", stationary), ("moving", moving)):
        if view.dtype.kind in "iub":
            refuse("dtype", f"{view.dtype}, expected a float", op, role)
    if (stationary.dtype.itemsize == 4) != (moving.dtype.itemsize == 4):
        refuse("dtype", f"{stationary.dtype} with {moving.dtype}: fp32 goes with fp32 only", op, "stationary")
    if dst.dtype != np.float32:
        refuse("dtype", f"{dst.dtype}, a product is written as float32", op, "dst")


def _accumulate(op: str, dst: NkiTensor, product: np.ndarray[Any, Any], accumulate: bool | None) -> None:
    """Overwrite or add, by the state of each location: an accumulation is open from its first write to a read."""
    assert dst.storage.psum is not None
    states = dst.over(dst.storage.psum)
    opened = states == OPEN
    if accumulate is not False and (states == READ).any():
        refuse("accumulate", f"{dst!r} was read, which ended its accumulation", op, "dst")
    if accumulate and not opened.all():
        what = "nothing" if (states == EMPTY).any() else "another engine"
        refuse("accumulate", f"accumulate=True onto {dst!r}, written by {what}", op, "dst")
    adds = accumulate if accumulate is not None else opened
    if adds is True:
        dst.array[...] += product
    elif adds is False:
        dst.array[...] = product
    else:
        dst.array[...] = np.where(opened, dst.array + product, product)
    states[...] = OPEN
    dst.mark_written()


@instruction
def nc_transpose(dst: NkiTensor, data: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None) -> None:
    """dst[F, P] = data[P, F].T, bit for bit: up to 128 x 128 from SBUF to PSUM on Tensor, 32 x 32 on Vector."""
    op = "nc_transpose"
    chosen = choose_engine(op, engine, ("tensor", "vector"), (dst, data))
    limit = hardware.PARTITIONS if chosen == "tensor" else hardware.VECTOR_TRANSPOSE
    check(op, "data", data, (SBUF,) if chosen == "tensor" else (SBUF, PSUM))
    check(op, "dst", dst, (PSUM,) if chosen == "tensor" else (SBUF, PSUM))
    if data.shape[0] > limit or data.free_size > limit:
        refuse("shape", f"({data.shape[0]}, {data.free_size}), at most {limit} x {limit} on {chosen}", op, "data")
    if (dst.shape[0], dst.free_size) != (data.free_size, data.shape[0]):
        refuse("shape", f"({dst.shape[0]}, {dst.free_size}), expected ({data.free_size}, {data.shape[0]})", op, "dst")
    if dst.dtype != data.dtype:
        refuse("dtype", f"{dst.dtype}, expected that of data, {data.dtype}", op, "dst")
    if dst.crosses_bank():
        refuse("psum-bank", f"{dst!r} crosses a bank of {hardware.PSUM_BANK_BYTES} bytes", op, "dst")
    if dst.buffer is PSUM and (dst.offset * dst.dtype.itemsize) % 4:
        warn("psum-alignment", f"{dst!r} starts {dst.offset * dst.dtype.itemsize} bytes into its tensor", op, "dst")
    read_fp32(op, "data", data)
    dst.array[...] = data.array.reshape(data.shape[0], -1).T.reshape(dst.shape)  # [F, P]
    dst.mark_written()
    if dst.storage.psum is not None:
        dst.over(dst.storage.psum)[...] = PLAIN
    machine.current().record(op, chosen, (data,), (dst,), name)
