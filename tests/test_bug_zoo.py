"""A zoo of bugs: small kernels with one realistic fault each, caught by name, and the repaired twin, accepted.

Each kernel takes `right`: False makes the fault, True the repair. All run with warnings as errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from gdn_kernels import interpreter
from gdn_kernels.interpreter import NkiRuleError
from gdn_kernels.interpreter.dtypes import bfloat16

with interpreter.installed():
    import nki
    import nki.isa as nisa
    import nki.language as nl


class Bug(NamedTuple):
    rule: str
    kernel: Any
    inputs: tuple[tuple[tuple[int, ...], Any], ...]
    cores: int


ZOO: dict[str, Bug] = {}


def bug(rule: str, *shapes: tuple[int, ...], dtype: Any = np.float32, cores: int = 1) -> Callable[[Any], Any]:
    """Enter a kernel into the zoo: the rule its fault breaks and the shapes of its tensors."""

    def enter(function: Any) -> Any:
        ZOO[function.__name__] = Bug(rule, nki.jit(function), tuple((shape, dtype) for shape in shapes), cores)
        return function

    return enter


def load(x):
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    return tile


def store(tile):
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def evicted(acc):
    tile = nl.ndarray(acc.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=tile, src=acc)
    return tile


# ---- addressing ----


@bug("bounds", (8, 64))
def slice_off_by_one(x, right):
    tile, out = load(x), nl.ndarray((8, 16), dtype=x.dtype, buffer=nl.sbuf)
    for i in range(4):
        first = i * 16 if right else i * 16 + 1
        nisa.tensor_copy(dst=out, src=tile[:, first : first + 16])
    return store(out)


@bug("bounds", (130, 64))
def last_block_not_clipped(x, right):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for first in range(0, 130, 128):
        count = min(128, 130 - first) if right else 128
        nisa.dma_copy(dst=out[first : first + count, :], src=load(x[first : first + count, :]))
    return out


@bug("partition-count", (256, 64))
def rows_beyond_the_partitions(x, right):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    rows = 128 if right else 256
    for first in range(0, 256, rows):
        nisa.dma_copy(dst=out[first : first + rows, :], src=load(x[first : first + rows, :]))
    return out


@bug("rank", (64,))
def vector_without_a_free_dimension(x, right):
    row = x.reshape((1, 64)) if right else x
    return store(load(row))


@bug("start-partition", (64, 16))
def rows_from_an_odd_partition(x, right):
    tile, out = load(x), nl.ndarray((8, 16), dtype=x.dtype, buffer=nl.sbuf)
    first = 32 if right else 5
    nisa.tensor_scalar(dst=out, data=tile[first : first + 8, :], op0=nl.multiply, operand0=2.0)
    return store(out)


@bug("start-partition", (128, 16))
def half_and_a_bit_from_the_middle(x, right):
    tile = load(x)
    last = 128 if right else 104
    first = 64 if right else 32
    nisa.tensor_scalar(dst=tile[first:last, :], data=tile[first:last, :], op0=nl.multiply, operand0=2.0)
    return store(tile)


@bug("partition-first", (16, 8, 8))
def partitions_permuted(x, right):
    tile, out = load(x), nl.ndarray((16, 8, 8), dtype=x.dtype, buffer=nl.sbuf)
    order = (0, 2, 1) if right else (1, 0, 2)
    nisa.tensor_copy(dst=out, src=tile.permute(order))
    return store(out)


@bug("partition-first", (64, 16))
def every_other_partition(x, right):
    out = nl.ndarray((32, 16), dtype=x.dtype, buffer=nl.sbuf)
    if right:
        nisa.dma_copy(dst=out, src=x[::2, :])
    else:
        nisa.tensor_copy(dst=out, src=load(x)[::2, :])
    return store(out)


@bug("pattern", (16, 8))
def pattern_with_the_wrong_row(x, right):
    tile, out = load(x), nl.ndarray((16, 4), dtype=x.dtype, buffer=nl.sbuf)
    row = 8 if right else 4
    nisa.tensor_copy(dst=out, src=tile.ap(pattern=[[row, 16], [1, 4]], offset=0))
    return store(out)


@bug("ap-on-view", (16, 8))
def pattern_of_a_slice(x, right):
    tile, out = load(x), nl.ndarray((16, 4), dtype=x.dtype, buffer=nl.sbuf)
    base = tile if right else tile[:, 4:8]
    nisa.tensor_copy(dst=out, src=base.ap(pattern=[[8, 16], [1, 4]], offset=4 if right else 0))
    return store(out)


@bug("pattern", (16, 8, 8))
def reshape_of_a_permuted_view(x, right):
    tile, out = load(x), nl.ndarray((16, 64), dtype=x.dtype, buffer=nl.sbuf)
    turned = tile.permute((0, 2, 1))
    if right:
        nisa.tensor_copy(dst=out.reshape((16, 8, 8)), src=turned)
    else:
        nisa.tensor_copy(dst=out, src=turned.reshape((16, 64)))
    return store(out)


# ---- what is in memory ----


@bug("uninitialised", (7, 16))
def an_unwritten_lane(x, right):
    tile = nl.ndarray((8, 16), dtype=x.dtype, buffer=nl.sbuf)
    if right:
        nisa.memset(dst=tile, value=0.0)
    nisa.dma_copy(dst=tile[0:7, :], src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    return store(tile)


@bug("uninitialised", (8, 15))
def padding_never_set(x, right):
    tile = nl.ndarray((8, 16), dtype=x.dtype, buffer=nl.sbuf)
    total = nl.ndarray((8, 1), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile[:, 0:15], src=x)
    nisa.tensor_reduce(dst=total, op=nl.add, data=tile[:, 0:15] if right else tile, axis=1)
    return store(total)


@bug("uninitialised", (4, 16))
def stale_view_after_a_new_tile(x, right):
    """The view is of the first tile, and the kernel goes on with the second."""
    tile = load(x)
    view = tile.reshape((4, 4, 4))
    tile = nl.ndarray((4, 16), dtype=x.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=tile.reshape((4, 4, 4)) if right else view, data=view, op0=nl.multiply, operand0=2.0)
    return store(tile)


@bug("output", (8, 16))
def an_output_partly_written(x, right):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out if right else out[:, 0:15], src=load(x if right else x[:, 0:15]))
    return out


@bug("output", (8, 16))
def an_output_in_private_memory(x, right):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm if right else nl.private_hbm)
    nisa.dma_copy(dst=out, src=load(x))
    return out


@bug("output", (8, 16))
def an_output_returned_twice(x, right):
    out = store(load(x))
    return (out, store(load(x))) if right else (out, out.reshape((4, 32)))


@bug("overlap", (8, 16))
def a_shift_in_place(x, right):
    tile = load(x)
    target = nl.ndarray((8, 15), dtype=x.dtype, buffer=nl.sbuf) if right else tile[:, 1:16]
    nisa.tensor_copy(dst=target, src=tile[:, 0:15])
    return store(target if right else tile)


@bug("capacity", (128, 2048))
def tiles_kept_for_the_whole_kernel(x, right):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    kept = []
    for _ in range(27):
        tile = load(x)
        if right:
            nisa.dma_copy(dst=out, src=tile)
        kept.append(tile)
    if not right:
        for tile in kept:
            nisa.dma_copy(dst=out, src=tile)
    return out


# ---- the Tensor engine and PSUM ----


@bug("psum-bank", (32, 576))
def a_product_across_two_banks(x, right):
    tile = load(x)
    acc = nl.ndarray((64, 1024), dtype=nl.float32, buffer=nl.psum)
    first = 512 if right else 400
    nisa.nc_matmul(dst=acc[:, first : first + 512], stationary=tile[:, 512:576], moving=tile[:, 0:512])
    return store(evicted(acc[:, first : first + 512]))


@bug("shape", (32, 576))
def a_product_wider_than_the_engine(x, right):
    tile = load(x)
    acc = nl.ndarray((64, 576), dtype=nl.float32, buffer=nl.psum)
    width = 512 if right else 576
    nisa.nc_matmul(dst=acc[:, 0:width], stationary=tile[:, 0:64], moving=tile[:, 0:width])
    return store(evicted(acc[:, 0:width]))


@bug("accumulate", (32, 64))
def accumulation_onto_memset(x, right):
    tile, acc = load(x), nl.ndarray((64, 64), dtype=nl.float32, buffer=nl.psum)
    if not right:
        nisa.memset(dst=acc, value=0.0)
    for i in range(2):
        nisa.nc_matmul(dst=acc, stationary=tile, moving=tile, accumulate=i > 0 if right else True)
    return store(evicted(acc))


@bug("accumulate", (32, 64))
def a_sum_read_before_it_is_done(x, right):
    tile, acc = load(x), nl.ndarray((64, 64), dtype=nl.float32, buffer=nl.psum)
    for i in range(2):
        nisa.nc_matmul(dst=acc, stationary=tile, moving=tile, accumulate=i > 0)
        if not right:
            out = evicted(acc)
    if right:
        out = evicted(acc)
    return store(out)


@bug("dtype", (32, 64))
def fp32_times_bf16(x, right):
    tile = load(x)
    narrow = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=narrow, src=tile)
    acc = nl.ndarray((64, 64), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=acc, stationary=narrow if right else tile, moving=narrow)
    return store(evicted(acc))


@bug("target", (32, 64), dtype=bfloat16)
def a_product_rounded_in_psum(x, right):
    """What only the next generation's Tensor engine does."""
    tile = load(x)
    acc = nl.ndarray((64, 64), dtype=nl.float32 if right else nl.bfloat16, buffer=nl.psum)
    nisa.nc_matmul(dst=acc, stationary=tile, moving=tile)
    return store(evicted(acc))


@bug("dtype", (32, 64), dtype=bfloat16)
def a_transpose_that_changes_the_dtype(x, right):
    turned = nl.ndarray((64, 32), dtype=x.dtype if right else nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=load(x))
    return store(evicted(turned))


@bug("memory-space", (32, 64))
def a_product_stored_from_psum(x, right):
    tile, acc = load(x), nl.ndarray((64, 64), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=acc, stationary=tile, moving=tile)
    return store(evicted(acc) if right else acc)


@bug("memory-space", (32, 64))
def gpsimd_reading_psum(x, right):
    tile, acc = load(x), nl.ndarray((64, 64), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=acc, stationary=tile, moving=tile)
    out = nl.ndarray((64, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out, src=acc, engine=nisa.engine.vector if right else nisa.engine.gpsimd)
    return store(out)


@bug("memory-space", (32, 64))
def an_engine_reading_hbm(x, right):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out, src=load(x) if right else x)
    return store(out)


@bug("two-psum-inputs", (32, 64))
def a_sum_of_two_products(x, right):
    tile = load(x)
    accs = []
    for _ in range(2):
        acc = nl.ndarray((64, 64), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=acc, stationary=tile, moving=tile)
        accs.append(acc)
    out = nl.ndarray((64, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=out, data1=accs[0], data2=evicted(accs[1]) if right else accs[1], op=nl.add)
    return store(out)


@bug("psum-alignment", (3, 16), dtype=bfloat16)
def an_odd_column_of_a_16_bit_transpose(x, right):
    tile = load(x)
    width = 4 if right else 3
    turned = nl.ndarray((16, 2, width), dtype=x.dtype, buffer=nl.psum)
    for i in range(2):
        nisa.nc_transpose(dst=turned[:, i, 0:3], data=tile)
    out = nl.ndarray((16, 2, 3), dtype=x.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out, src=turned[:, :, 0:3])
    return store(out)


# ---- Vector, Scalar, GpSimd ----


@bug("shape", (8, 16))
def a_row_where_a_tile_is_needed(x, right):
    tile = load(x)
    other = tile if right else load(x[0:1, :])
    nisa.tensor_tensor(dst=tile, data1=tile, data2=other, op=nl.multiply)
    return store(tile)


@bug("scalar-operand", (8, 16))
def a_row_as_a_per_partition_operand(x, right):
    tile = load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=load(x[:, 0:1]) if right else load(x[:, 0:2]))
    return store(tile)


@bug("scalar-operand", (8, 16), dtype=bfloat16)
def a_16_bit_per_partition_operand(x, right):
    tile, column = load(x), load(x[:, 0:1])
    wide = nl.ndarray((8, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=wide, src=column)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=wide if right else column)
    return store(tile)


@bug("activation-range", (8, 16))
def a_norm_without_epsilon(x, right):
    tile = load(x)
    nisa.memset(dst=tile[:, 0:1], value=0.0)
    nisa.activation(dst=tile, op=nl.square, data=tile)
    nisa.activation(dst=tile, op=nl.rsqrt, data=tile, bias=1e-6 if right else 0.0)
    return store(tile)


@bug("registers", (8, 16))
def a_running_sum_never_reset(x, right):
    tile, total = load(x), nl.ndarray((8, 1), dtype=nl.float32, buffer=nl.sbuf)
    first = nisa.reduce_cmd.reset_reduce if right else nisa.reduce_cmd.reduce
    nisa.activation(dst=tile, op=nl.square, data=tile, reduce_op=nl.add, reduce_res=total, reduce_cmd=first)
    return store(total)


@bug("engine", (8, 16))
def a_maximum_on_the_scalar_engine(x, right):
    tile = load(x)
    engine = nisa.engine.vector if right else nisa.engine.scalar
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.maximum, operand0=0.0, engine=engine)
    return store(tile)


@bug("objects-not-strings", (8, 16))
def a_buffer_by_its_name(x, right):
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf if right else "sbuf")
    nisa.dma_copy(dst=tile, src=x)
    return store(tile)


@bug("unknown-instruction", (8, 16))
def a_keyword_of_the_old_api(x, right):
    tile = load(x)
    if right:
        nisa.tensor_copy(dst=tile, src=tile)
    else:
        nisa.tensor_copy(dst=tile, src=tile, mask=None)
    return store(tile)


@bug("operators", (8, 16))
def a_plus_sign_between_tiles(x, right):
    tile = load(x)
    if right:
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
    else:
        tile = tile + tile
    return store(tile)


# ---- DMA ----


@bug("element-runs", (128, 128), dtype=bfloat16)
def a_transpose_by_dma(x, right):
    """2-byte runs: 128 x 128 packets for 32 KiB."""
    if right:
        tile, turned = load(x), nl.ndarray((128, 128), dtype=x.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=tile)
        out = nl.ndarray((128, 128), dtype=x.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=out, src=turned)
        return store(out)
    return store(load(x.permute((1, 0))))


@bug("short-runs", (128, 64, 64), dtype=bfloat16)
def a_narrow_slice_of_every_row(x, right):
    """64-byte runs; the whole rows take the same time and hold twice as much."""
    if right:
        return store(load(x))
    return store(load(x[:, :, 0:32]))


@bug("dma", (8, 16))
def a_copy_of_the_wrong_size(x, right):
    tile = nl.ndarray((8, 16), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x if right else x[:, 0:15])
    return store(tile)


# ---- two cores ----


@bug("race", (2, 16), cores=2)
def a_missing_barrier(x, right):
    """Each core updates a row of x in place and then reads the other's."""
    core = nl.program_id()
    tile = load(x[core : core + 1, :])
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=x[core : core + 1, :], src=tile)
    if right:
        nisa.core_barrier(data=x, cores=(0, 1))
    theirs = load(x[1 - core : 2 - core, :])
    out = nl.ndarray((2, 16), dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[core : core + 1, :], src=theirs)
    return out


@bug("same-bytes", (3, 16), cores=2)
def a_row_that_both_cores_write(x, right):
    """An odd number of rows: the middle one belongs to the second core's copy as well."""
    core = nl.program_id()
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    spare = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    for row in range(2):
        target = spare if right and core == 1 and row == 0 else out
        nisa.dma_copy(dst=target[core + row : core + row + 1, :], src=load(x[core + row : core + row + 1, :]))
    return out


@bug("unequal-streams", (2, 16), cores=2)
def a_step_that_only_one_core_takes(x, right):
    core = nl.program_id()
    tile = load(x[core : core + 1, :])
    if right or core == 0:
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    out = nl.ndarray((2, 16), dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[core : core + 1, :], src=tile)
    return out


@bug("deadlock", (2, 16), cores=2)
def a_barrier_that_only_one_core_reaches(x, right):
    core = nl.program_id()
    out = nl.ndarray((2, 16), dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[core : core + 1, :], src=load(x[core : core + 1, :]))
    if right or core == 0:
        nisa.core_barrier(data=out, cores=(0, 1))
    return out


@bug("deadlock", (2, 16), cores=2)
def exchanges_in_different_pipes(x, right):
    core = nl.program_id()
    tile, theirs = load(x[core : core + 1, :]), nl.ndarray((1, 16), dtype=x.dtype, buffer=nl.sbuf)
    pipe = 0 if right else core
    nisa.sendrecv(src=tile, dst=theirs, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=pipe)
    out = nl.ndarray((2, 16), dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[core : core + 1, :], src=theirs)
    return out


# ---- the language ----


def scaled(x, factor):
    tile = load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
    return store(tile)


def none_by_identity(x, factor):
    if factor is None:
        factor = 2.0
    return scaled(x, factor)


def none_by_equality(x, factor):
    if factor == None:  # noqa: E711
        factor = 2.0
    return scaled(x, factor)


def tiles_in_a_comprehension(x, factor):
    tiles = [load(x) for _ in range(2)]
    return store(tiles[0])


def tiles_in_a_loop(x, factor):
    tiles = []
    for _ in range(2):
        tiles.append(load(x))
    return store(tiles[0])


def keyword_only(x, *, factor):
    return scaled(x, 2.0)


def positional(x, factor):
    return scaled(x, 2.0)


def guarded(x, factor):
    try:
        return scaled(x, factor)
    except TypeError:
        return scaled(x, 2.0)


def asked(x, factor):
    return scaled(x, 2.0 if factor == None else factor)  # noqa: E711


def factor_of_the_day(x, factor):
    return scaled(x, np.random.rand())


def factor_given(x, factor):
    return scaled(x, 2.0)


LANGUAGE = {
    "is None": ("subset-unclear", none_by_identity, none_by_equality),
    "comprehension": ("subset", tiles_in_a_comprehension, tiles_in_a_loop),
    "keyword-only": ("subset", keyword_only, positional),
    "try": ("subset", guarded, asked),
    "random number": ("purity", factor_of_the_day, factor_given),
}


def launch(name: str, right: bool) -> None:
    found = ZOO[name]
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype(dtype) for shape, dtype in found.inputs]
    with interpreter.strict():
        found.kernel[found.cores].launch(*inputs, right)


@pytest.mark.parametrize("name", ZOO)
def test_a_bug_is_caught_by_name(name: str) -> None:
    with pytest.raises(NkiRuleError) as caught:
        launch(name, False)
    assert caught.value.rule.name == ZOO[name].rule
    assert "test_bug_zoo.py:" in caught.value.line


@pytest.mark.parametrize("name", ZOO)
def test_the_repaired_twin_is_accepted(name: str) -> None:
    launch(name, True)


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_kernel_outside_the_subset_is_caught_and_its_twin_accepted(name: str) -> None:
    rule, wrong, right = LANGUAGE[name]
    x = np.ones((8, 16), np.float32)
    with interpreter.strict():
        with pytest.raises(NkiRuleError) as caught:
            nki.jit(wrong)(x, factor=None)
        assert caught.value.rule.name == rule and "test_bug_zoo.py:" in caught.value.line
        nki.jit(right)(x, factor=None)


def test_the_zoo_has_many_bugs() -> None:
    assert len(ZOO) + len(LANGUAGE) >= 25
