"""The Tensor engine: matrix multiply into PSUM.

A product is summed in float64 and rounded once to fp32, so an element of the result depends on its own row and column
alone, whatever the size of the tile. The hardware sums in fp32 in an order it doesn't document: compare with
tolerances, not for equality.
"""

from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from gdn_kernels.interpreter import hardware, machine
from gdn_kernels.interpreter.isa.enums import PerfMode
from gdn_kernels.interpreter.isa.operands import (
    BF16,
    F32,
    IN_PSUM,
    IN_SBUF,
    Array,
    check,
    check_alignment,
    check_floating,
    instruction,
    member,
    read_bits,
    round_to,
    to_fp32,
)
from gdn_kernels.interpreter.isa.pe_tile import check_position, check_tiling
from gdn_kernels.interpreter.memory import EMPTY, OPEN, PLAIN, READ
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

OP = "nc_matmul"
FP8 = tuple(np.dtype(kind) for kind in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn))
LEGACY_FP8, OCP_FP8 = FP8[0], FP8[2]


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
    """dst[M, N] (+)= stationary[K, M].T @ moving[K, N], K on the partitions of both; free dimensions are flattened.

    Up to 128 x 128 x 512, from SBUF to fp32 within one PSUM bank; a float of 4 bytes goes with its like only.
    accumulate: False overwrites, True adds to what matmuls wrote, None does either, location by location.
    double_row: fp8 operands [K, 2, M] and [K, 2, N], contracted over K and 2.
    is_transpose: moving is the identity; dst has the dtype of stationary and is bit-exact.
    tile_position, tile_size: the (row, column) part of the engine used; 32, 64 or 128 each way.
    """
    check(OP, "stationary", stationary, IN_SBUF)
    check(OP, "moving", moving, IN_SBUF)
    check(OP, "dst", dst, IN_PSUM)
    double = perf_mode is not PerfMode.none and member(OP, "perf_mode", perf_mode, PerfMode) is PerfMode.double_row
    if double:
        _check_double_row(stationary, moving, is_transpose)
    _check_sizes(dst, stationary, moving, double)
    _check_dtypes(dst, stationary, moving, is_transpose)
    check_position(OP, stationary, moving)
    tiled = tile_position != () or tile_size != ()
    if tiled:
        check_tiling(OP, dst, stationary, tuple(tile_position), tuple(tile_size), double)
    rows, columns = read_bits(OP, "stationary", stationary), read_bits(OP, "moving", moving)
    if is_transpose:
        _transpose(dst, rows, columns, accumulate)
    else:
        _accumulate(dst, _product(rows, columns, double).reshape(dst.shape), accumulate)
    options: dict[str, Any] = {"accumulate": accumulate}
    if is_stationary_onezero or is_moving_onezero:
        options["onezero"] = (bool(is_stationary_onezero), bool(is_moving_onezero))
    if is_transpose:
        options["is_transpose"] = True
    if tiled:
        options.update(tile_position=tuple(tile_position), tile_size=tuple(tile_size))
    if double:
        options["perf_mode"] = "double_row"
    machine.current().record(OP, "tensor", (stationary, moving), (dst,), name, **options)


def _check_sizes(dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, double: bool) -> None:
    M, N = (prod(view.shape[2:]) if double else view.free_size for view in (stationary, moving))
    if stationary.shape[0] != moving.shape[0]:
        refuse("shape", f"{stationary.shape[0]} partitions, moving has {moving.shape[0]}", OP, "stationary")
    limit = hardware.MATMUL_STATIONARY_FREE
    if limit < M:
        refuse("shape", f"{M} columns, at most {limit}", OP, "stationary", limit=limit, found=M)
    target = machine.current().target
    limit = target.matmul_moving_free
    if target.generation > 3 and dst.dtype == BF16:
        limit *= 2
    if limit < N:
        refuse("shape", f"{N} columns, at most {limit}", OP, "moving", limit=limit, found=N)
    if dst.shape[0] != M or dst.free_size != N:
        refuse("shape", f"({dst.shape[0]}, {dst.free_size}), expected ({M}, {N})", OP, "dst")
    if target.generation < 4 and dst.crosses_bank():
        refuse("psum-bank", f"{dst!r} crosses a bank of {hardware.PSUM_BANK_BYTES} bytes", OP, "dst")


def _check_dtypes(dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, is_transpose: bool) -> None:
    check_floating(OP, "stationary", stationary)
    check_floating(OP, "moving", moving)
    if (stationary.dtype.itemsize == 4) != (moving.dtype.itemsize == 4):
        refuse("dtype", f"{stationary.dtype} with {moving.dtype}: fp32 goes with fp32 only", OP, "stationary")
    if {stationary.dtype, moving.dtype} == {LEGACY_FP8, OCP_FP8}:
        refuse("dtype", f"{stationary.dtype} with {moving.dtype}", OP, "stationary")
    if is_transpose:
        if dst.dtype != stationary.dtype:
            refuse("dtype", f"{dst.dtype}, a transpose keeps the {stationary.dtype} of stationary", OP, "dst")
    elif dst.dtype == BF16:
        if machine.current().target.generation < 4:
            refuse("target", "a product in bfloat16 needs trn3; on trn2 it is written as float32", OP, "dst")
    elif dst.dtype != F32:
        refuse("dtype", f"{dst.dtype}, a product is written as float32", OP, "dst")


def _check_double_row(stationary: NkiTensor, moving: NkiTensor, is_transpose: bool) -> None:
    for role, view in (("stationary", stationary), ("moving", moving)):
        if view.dtype not in FP8:
            refuse("dtype", f"{view.dtype}, double_row takes fp8", OP, role)
        if view.ndim < 3 or view.shape[1] != 2:
            refuse("shape", f"{view.shape}, double_row takes (K, 2, columns)", OP, role)
    if is_transpose:
        refuse("operation", "double_row excludes transpose mode", OP, "perf_mode")


def _product(stationary: Array, moving: Array, double: bool) -> Array:
    """stationary.T @ moving in float64; writing it rounds once."""
    contracted = stationary.shape[0] * (2 if double else 1)
    rows, columns = (values.reshape(contracted, -1).astype(np.float64) for values in (stationary, moving))
    product: Array = rows.T @ columns  # [M, N]
    return product


def _accumulate(dst: NkiTensor, product: Array, accumulate: bool | None) -> None:
    """Overwrite or add, by the state of each location: an accumulation is open from its first write to a read.

    Up to generation 3 only what a matmul wrote can be added to (API nc_matmul).
    """
    assert dst.storage.psum is not None
    states = dst.over(dst.storage.psum)
    adds: Any = False if accumulate is False else _added_to(dst, states)
    if accumulate and not adds.all():
        refuse("accumulate", f"accumulate=True onto {dst!r}, written by nothing", OP, "dst")
    if adds is not False and adds.any():
        rounded = product.astype(np.float32)
        product = np.where(adds, to_fp32(dst.array) + rounded, rounded)
    dst.array[...] = product if dst.dtype == F32 else round_to(product.astype(np.float32), dst.dtype)
    states[...] = OPEN
    dst.mark_written()


def _added_to(dst: NkiTensor, states: Array) -> Array:
    """Which locations a matmul adds to, bool in the shape of dst; refused where that is undefined."""
    if states.ndim > dst.ndim:  # a location is of several units: as closed as the least open of them
        states = np.where((states == OPEN).all(axis=-1), OPEN, states.max(axis=-1))
    opened = states == OPEN
    if opened.all():
        return opened
    if (states == READ).any():
        refuse("accumulate", f"{dst!r} was read, which ended its accumulation", OP, "dst")
    other = states == PLAIN
    if not other.any():
        return opened
    if machine.current().target.generation < 4:
        refuse("accumulate", f"{dst!r} was written by another engine, which a matmul can't add to", OP, "dst")
    return opened | other


def _transpose(dst: NkiTensor, data: Array, moving: Array, accumulate: bool | None) -> None:
    """dst[M, K] = data[K, M].T; what a transpose wrote is no open accumulation."""
    K = data.shape[0]
    if moving.size != K * K or not np.array_equal(to_fp32(moving).reshape(K, K), np.eye(K, dtype=np.float32)):
        refuse("not-modelled", "transpose mode with anything but the identity as moving operand", OP, "moving")
    check_alignment(OP, dst)
    assert dst.storage.psum is not None
    states = dst.over(dst.storage.psum)
    if accumulate or (accumulate is None and (states != EMPTY).any()):
        refuse("accumulate", f"a transpose onto {dst!r}, which was written before: pass accumulate=False", OP, "dst")
    dst.array[...] = data.reshape(K, -1).T.reshape(dst.shape)
    states[...] = PLAIN
    dst.mark_written()
