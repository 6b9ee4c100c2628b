"""Memory: written bytes, PSUM accumulation, occupancy and its figure, outputs, dry launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arguments import block_arguments, tkg_arguments
from hypothesis import given
from hypothesis import strategies as st
from small_kernels import copied, load, normal, psum, run, run_body, shared, stored, tile

from gdn_kernels import BlockDims, backends, interpreter
from gdn_kernels.interpreter import NkiRuleError, NkiRuleWarning, Spec, memory
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl
from gdn_kernels.interpreter.dry import hollow

DTYPES = {1: nl.int8, 2: nl.bfloat16, 4: nl.float32}


def refused(body: Any, rule: str, cores: int = 1) -> NkiRuleError:
    with pytest.raises(NkiRuleError) as caught:
        run_body(body, cores)
    assert caught.value.rule.name == rule
    return caught.value


# ---- which bytes were written ----


@given(data=st.data())
def test_written_bytes_are_known_exactly_whatever_dtype_wrote_them(data: st.DataObject) -> None:
    """Against a plain set of bytes: writes and a read through views of any width."""
    sizes = st.sampled_from(sorted(DTYPES))
    own, writes = (
        data.draw(sizes),
        data.draw(st.lists(st.tuples(sizes, st.integers(0, 31), st.integers(1, 32)), max_size=4)),
    )
    width, first, count = data.draw(st.tuples(sizes, st.integers(0, 31), st.integers(1, 32)))
    written: set[int] = set()

    def part(whole: Any, size: int, start: int, count: int) -> tuple[Any, range]:
        seen = whole.view(DTYPES[size])
        start = min(start, seen.shape[1] - 1)
        stop = min(start + count, seen.shape[1])
        return seen[:, start:stop], range(start * size, stop * size)

    def kernel() -> None:
        whole = nl.ndarray((2, 32 // own), dtype=DTYPES[own], buffer=nl.sbuf)
        for size, start, many in writes:
            view, touched = part(whole, size, start, many)
            nisa.memset(dst=view, value=0 if size == 1 else 0.0)
            written.update(touched)
        view, touched = part(whole, width, first, count)
        copied(view)
        assert set(touched) <= written

    if not writes:
        refused(kernel, "uninitialised")
        return
    try:
        run_body(kernel)
    except NkiRuleError as error:
        assert error.rule.name == "uninitialised"
        whole_bytes = range(0)
        start = min(first, 32 // width - 1)
        whole_bytes = range(start * width, min(start + count, 32 // width) * width)
        assert not set(whole_bytes) <= written


@pytest.mark.parametrize("halves", [1, 2])
def test_half_of_an_fp32_element_is_not_an_element(halves: int) -> None:
    def kernel() -> None:
        whole = tile(8, 4, value=None)
        narrow = whole.view(nl.bfloat16)
        for half in range(halves):
            nisa.memset(dst=narrow[:, half::2], value=0.0)
        copied(whole)

    if halves == 1:
        assert "never written at (0, 0)" in str(refused(kernel, "uninitialised"))
    else:
        run_body(kernel)


@pytest.mark.parametrize("halves", [1, 2])
def test_an_output_of_half_written_elements_is_refused(halves: int) -> None:
    def kernel() -> Any:
        out = shared(2, 4)
        for half in range(halves):
            nisa.dma_copy(dst=out.view(nl.bfloat16)[:, half::2], src=tile(2, 4, dtype=nl.bfloat16))
        return out

    if halves == 1:
        with pytest.raises(NkiRuleError, match=r"never written at \(0, 0\)"):
            run(kernel)
    else:
        run(kernel)


def test_a_partition_nobody_wrote_is_named() -> None:
    def kernel() -> None:
        whole = tile(64, 4, value=None)
        nisa.memset(dst=whole[0:32, :], value=0.0)
        copied(whole)

    assert "(32, 0)" in str(refused(kernel, "uninitialised"))


# ---- PSUM accumulation ----


def product(dst: Any, accumulate: bool | None) -> None:
    nisa.nc_matmul(dst=dst, stationary=tile(8, dst.shape[0]), moving=tile(8, dst.shape[1]), accumulate=accumulate)


SEQUENCES: dict[str, tuple[Any, bool]] = {
    "overwrite, add": (lambda acc: (product(acc, False), product(acc, True)), True),
    "automatic twice": (lambda acc: (product(acc, None), product(acc, None)), True),
    "add to nothing": (lambda acc: product(acc, True), False),
    "add to memset": (lambda acc: (nisa.memset(dst=acc, value=0.0), product(acc, True)), False),
    "read, overwrite": (lambda acc: (product(acc, False), copied(acc), product(acc, False)), True),
    "read, add": (lambda acc: (product(acc, False), copied(acc), product(acc, True)), False),
    "read, automatic": (lambda acc: (product(acc, None), copied(acc), product(acc, None)), False),
    "read one column, add to the others": (
        lambda acc: (product(acc, False), copied(acc[:, 0:1]), product(acc[:, 1:8], True)),
        True,
    ),
    "read one column, add to all": (lambda acc: (product(acc, False), copied(acc[:, 7:8]), product(acc, True)), False),
    "read, overwrite, add": (
        lambda acc: (product(acc, False), copied(acc), product(acc, False), product(acc, True)),
        True,
    ),
    "half overwritten, add to all": (lambda acc: (product(acc[:, 0:4], False), product(acc, True)), False),
    "half overwritten, automatic for all": (lambda acc: (product(acc[:, 0:4], None), product(acc, None)), True),
    "vector writes between": (
        lambda acc: (product(acc, False), nisa.tensor_copy(dst=acc, src=tile(8, 8)), product(acc, True)),
        False,
    ),
    "read through bf16, add": (
        lambda acc: (product(acc, False), copied(acc.view(nl.bfloat16)[:, 0:2]), product(acc, True)),
        False,
    ),
    "seen as bf16, add": (lambda acc: (product(acc, False), acc.view(nl.bfloat16), product(acc, True)), True),
    "seen as bf16, automatic": (lambda acc: (product(acc, None), acc.view(nl.bfloat16), product(acc, None)), True),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_an_accumulation_is_open_from_its_overwrite_to_a_read(name: str) -> None:
    sequence, allowed = SEQUENCES[name]
    if allowed:
        run_body(lambda: sequence(psum(8, 8)))
    else:
        refused(lambda: sequence(psum(8, 8)), "accumulate")


def test_automatic_accumulation_adds_only_where_something_is() -> None:
    def kernel() -> Any:
        acc = psum(8, 8)
        product(acc[:, 0:4], None)
        product(acc, None)
        return stored(copied(acc))

    assert np.array_equal(run(kernel), np.repeat([[16.0, 8.0]], 4, axis=1).repeat(8, axis=0))


# ---- occupancy ----


def lifetimes(body: Any) -> list[memory.Lifetime]:
    return run_body(body).machines[0].lifetimes


def test_a_tile_lives_from_its_allocation_to_its_last_use() -> None:
    def kernel() -> None:
        first = tile(8, 100)
        second = tile(4, 1000)
        copied(second[:, 0:10])
        copied(first[:, 0:10])
        third = tile(8, 3000)
        copied(third[:, 0:10])

    found = memory.occupancy(lifetimes(kernel), memory.SBUF)
    assert found.peak == 3000 * 4 + 10 * 4 and found.holders[0].shape == (8, 3000)


def test_tiles_that_are_never_used_take_no_room() -> None:
    assert memory.occupancy(lifetimes(lambda: tile(8, 50000, value=None)), memory.SBUF).peak == 16


def test_psum_is_counted_in_banks() -> None:
    def kernel() -> None:
        tiles = [psum(8, 8) for _ in range(3)]
        for acc in tiles:
            product(acc, False)
        for acc in tiles:
            copied(acc)

    assert memory.occupancy(lifetimes(kernel), memory.PSUM).peak == 3 * 2048


@given(spans=st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 9), st.integers(1, 50)), max_size=8))
def test_usage_is_the_sum_over_live_tiles(spans: list[tuple[int, int, int]]) -> None:
    tiles = []
    for number, (born, length, size) in enumerate(spans):
        allocation = memory.Allocation(number, "", memory.SBUF, (4, size), np.dtype(np.int8), f"k.py:{number % 2}")
        tiles.append(memory.Lifetime(allocation, born, born + length if length >= 0 else -1))
    live = [life for life in tiles if life.last_use >= 0]
    end = max((life.last_use for life in live), default=-1) + 1
    expected = [sum(t.allocation.row_bytes for t in live if t.born <= i <= t.last_use) for i in range(end)]
    assert memory.usage(tiles, memory.SBUF)[0].tolist() == expected
    assert memory.usage(tiles, memory.SBUF, ["k.py:0", "k.py:1"]).sum(axis=0).tolist() == expected
    assert memory.occupancy(tiles, memory.SBUF).peak == max(expected, default=0)


@pytest.mark.parametrize(("limit", "rule"), [(212_984, "capacity"), (192 * 1024, "capacity-safe")])
def test_sbuf_limits_are_exact(limit: int, rule: str) -> None:
    def kernel(extra: int) -> None:
        large = tile(8, (limit - 1024) // 4 + extra, value=None)
        nisa.memset(dst=large[:, 0:256], value=0.0)
        copied(large[:, 0:256])

    if rule == "capacity":
        with interpreter.without("capacity-safe"):
            run_body(lambda: kernel(0))
            error = refused(lambda: kernel(1), "capacity")
        assert (error.limit, error.found) == (limit, limit + 4)
        assert "(8, 52991) 211964 B from" in str(error) and "small_kernels.py" in error.line
        with interpreter.without("capacity", "capacity-safe"):
            run_body(lambda: kernel(1))
    else:
        run_body(lambda: kernel(0))
        with pytest.warns(NkiRuleWarning, match="capacity-safe"):
            run_body(lambda: kernel(1))


@pytest.mark.parametrize("banks", [8, 9])
def test_psum_has_eight_banks(banks: int) -> None:
    def kernel() -> None:
        tiles = [psum(8, 8) for _ in range(banks)]
        for acc in tiles:
            product(acc, False)
        for acc in tiles:
            copied(acc)

    if banks == 9:
        assert refused(kernel, "capacity").found == 9 * 2048
    else:
        run_body(kernel)


def test_the_figure_of_a_kernels_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from gdn_kernels.plots import memory_occupancy

    memory_occupancy(run_body(lambda: copied(tile(8, 8))).machines[0], "a title", tmp_path / "a" / "figure.png")
    assert (tmp_path / "a" / "figure.png").stat().st_size > 5000


# ---- outputs ----


def test_outputs_may_be_reshaped_single_or_arguments() -> None:
    def kernel(x: Any) -> Any:
        nisa.dma_copy(dst=x[0:1, :], src=tile(1, 8))
        return stored(load(x)).reshape((4, 4)), x

    x = normal(2, 8)
    out, updated = run(kernel, x=x)
    assert out.shape == (4, 4) and np.array_equal(out.reshape(2, 8), updated) and np.array_equal(x, updated)
    assert run(lambda: stored(tile(2, 2))).shape == (2, 2)
    assert run(lambda: [stored(tile(2, 2))])[0].shape == (2, 2)


WRONG_OUTPUTS: dict[str, Any] = {
    "the same memory twice": lambda: (lambda out: (out, out.reshape((4, 4))))(stored(tile(2, 8))),
    "part of a tensor": lambda: stored(tile(2, 8))[0:1, :],
    "a permuted tensor": lambda: stored(tile(2, 8)).permute((1, 0)),
    "a tile": lambda: tile(2, 8),
    "private memory": lambda: nl.ndarray((2, 8), dtype=nl.float32, buffer=nl.private_hbm),
    "nothing": lambda: None,
    "an unwritten tensor": lambda: shared(2, 8),
}


@pytest.mark.parametrize("name", WRONG_OUTPUTS)
def test_what_is_no_output_is_refused(name: str) -> None:
    with pytest.raises(NkiRuleError) as caught:
        run(WRONG_OUTPUTS[name])
    assert caught.value.rule.name == "output"


# ---- dry launches ----

DRY = {
    "gdn_block_tkg": {**block_arguments(BlockDims(128, 4, 8, 16, 8, 4), 3), "norm_eps": 1e-6},
    "gdn_tkg": {**tkg_arguments(3, 8, 16, 24), "norm_eps": 1e-6},
    "gdn_conv1d_decode": {"x": normal(3, 200, 1), "conv_state": normal(3, 200, 4), "conv_weight": normal(200, 4)},
}


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("name", DRY)
def test_a_dry_trace_is_the_real_one(name: str, cores: int) -> None:
    kernel, arguments = backends.interpreted(name)[cores], DRY[name]
    specs = {n: Spec(v.shape, v.dtype) if isinstance(v, np.ndarray) else v for n, v in arguments.items()}
    real, dry = kernel.launch(**arguments), kernel.launch(**specs, dry=True)
    for wet, hollow_core in zip(real.machines, dry.machines, strict=True):
        assert wet.trace == hollow_core.trace and wet.lifetimes == hollow_core.lifetimes
    outputs = real.outputs if not real.single else (real.outputs[0],)
    assert [(out.shape, out.dtype) for out in dry.outputs] == [(out.shape, out.dtype) for out in outputs]
    assert dry.summary() == real.summary()


def test_a_dry_launch_needs_no_memory_and_still_refuses() -> None:
    def kernel(x: Any) -> Any:
        out = shared(*x.shape)
        for row in range(0, x.shape[0], 128):
            nisa.dma_copy(dst=out[row : row + 128, :], src=load(x[row : row + 128, :]))
        return out

    size = (1 << 12, 1 << 11)  # 32 MiB; a stand-in for larger ones
    big = interpreter.launch(kernel, {"x": Spec(size, np.dtype(np.float32))}, dry=True)
    assert big.outputs[0] == Spec(size, np.dtype(np.float32))
    assert big.summary().dma_bytes == {"hbm -> sbuf": 4 << 23, "sbuf -> hbm": 4 << 23}
    with pytest.raises(NkiRuleError, match="never written"):
        run_body(lambda: copied(tile(2, 4, value=None)), dry=True)


def test_a_stand_in_is_for_dry_launches_only() -> None:
    with pytest.raises(NkiRuleError, match="argument"):
        run(lambda x: stored(load(x)), x=Spec((2, 2), np.dtype(np.float32)))


def test_hollow_arrays_follow_numpys_shapes_and_dtypes() -> None:
    h, a = hollow((3, 4), np.dtype(np.float32)), np.zeros((3, 4), np.float32)
    functions: dict[str, Any] = {
        "sum": lambda x: x.sum(axis=1),
        "matmul": lambda x: x @ x.T,
        "compare": lambda x: x[:, None, :] > x[None],
        "where": lambda x: np.where(x > 0, x, np.float32(1)),
        "cumulate": lambda x: np.cumsum(x, axis=1),
        "pick": lambda x: x[:, [0, 2]],
        "cast": lambda x: x.astype(np.float64).reshape(2, 6),
        "max": lambda x: np.max(x, axis=(0, 1), keepdims=True),
        "bits": lambda x: x.view(np.uint32) << np.uint32(3),
        "stack": lambda x: np.concatenate([x, x]),
        "accumulate": lambda x: np.add.accumulate(x, axis=0),
    }
    for name, function in functions.items():
        got, expected = function(h), function(a)
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), name
    h[...] = 1
    h += 1
    assert not h.any() and not np.asarray(h.copy()).any()
