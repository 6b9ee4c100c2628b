"""The Tensor engine against plain NumPy: every dtype, accumulation, tiles of the engine, fp8 pairs, transposes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isa_programs import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    anything,
    launch,
    new,
    run,
    same,
    seeds,
    tile,
    to_hbm,
    values,
)

from gdn_kernels.interpreter import NkiRuleError, NkiRuleWarning, hardware
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl

NARROW = (BF16, F16, E4M3, E5M2)
pairs = st.one_of(st.just((F32, F32)), st.tuples(st.sampled_from(NARROW), st.sampled_from(NARROW)))


def operand(rng: np.random.Generator, shape: Any, dtype: Any) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left [K, M], right [K, N] in longdouble, rounded once."""
    return (left.astype(np.longdouble).T @ right.astype(np.longdouble)).astype(np.float32)


def close(found: np.ndarray, exact: np.ndarray) -> None:
    """Equal but for the last bit, where the sum is that near a half."""
    np.testing.assert_allclose(found, exact, rtol=1.3e-7, atol=1e-9)


def psum(M: int, N: int, dtype: Any = F32) -> Any:
    return new((M, N), dtype, nl.psum)


@settings(max_examples=30)
@given(K=st.sampled_from((1, 32, 77, 128)), M=st.integers(1, 128), N=st.integers(1, 512), dtypes=pairs, seed=seeds)
def test_a_product(K: int, M: int, N: int, dtypes: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    left, right = operand(rng, (K, M), dtypes[0]), operand(rng, (K, N), dtypes[1])

    def program(left: Any, right: Any) -> Any:
        acc = psum(M, N)
        nisa.nc_matmul(acc, left, right, is_moving_onezero=True)  # the flag is a hint
        return acc

    close(run(program, left, right), product(left, right))


def test_infinities_and_nan_pass_through() -> None:
    left, right = np.float32([[np.inf, np.nan, 1, 1e-40]]), np.float32([[2, -1, 0]])

    def program(left: Any, right: Any) -> Any:
        acc = psum(4, 3)
        nisa.nc_matmul(acc, left, right)
        return acc

    with np.errstate(all="ignore"):
        same(run(program, left, right), left.T @ right)


@settings(max_examples=20)
@given(data=st.data(), seed=seeds)
def test_accumulation_is_decided_location_by_location(data: st.DataObject, seed: int) -> None:
    """A convolution: products onto overlapping columns; each location is first overwritten, then added to."""
    rng = np.random.default_rng(seed)
    spans = data.draw(st.lists(st.tuples(st.integers(0, 24), st.integers(1, 8)), min_size=1, max_size=6))
    left, right = operand(rng, (16, 8), F32), operand(rng, (16, 32), F32)

    def program(left: Any, right: Any) -> Any:
        acc, out = psum(8, 32), tile(8, 32, value=0.0)
        for start, width in spans:
            nisa.nc_matmul(acc[:, start : start + width], left, right[:, 0:width])
        for start, width in spans:
            nisa.tensor_copy(dst=out[:, start : start + width], src=acc[:, start : start + width])
        return out

    expected = np.zeros((8, 32))
    for start, width in spans:
        expected[:, start : start + width] += product(left, right[:, :width])
    np.testing.assert_allclose(run(program, left, right), expected, rtol=1e-5, atol=1e-5)


def test_accumulate_true_adds_and_false_starts_again() -> None:
    def program() -> Any:
        left, right, acc = tile(4, 2), tile(4, 3), psum(2, 3)
        for accumulate in (False, True, False, True, True):
            nisa.nc_matmul(acc, left, right, accumulate=accumulate)
        return acc

    assert run(program).tolist() == [[12.0] * 3] * 2


def test_free_dimensions_are_flattened_and_may_be_strided() -> None:
    rng = np.random.default_rng(0)
    left, right = operand(rng, (32, 3, 4), BF16), operand(rng, (32, 5, 6), BF16)

    def program(left: Any, right: Any) -> Any:
        acc = new((12, 5, 3), F32, nl.psum)
        nisa.nc_matmul(acc, left, right[:, :, ::2])
        return acc

    found = run(program, left, right)
    close(found, product(left.reshape(32, 12), right[:, :, ::2].reshape(32, 15)).reshape(12, 5, 3))


@settings(max_examples=15)
@given(
    K=st.sampled_from((1, 64, 128)),
    M=st.integers(1, 128),
    N=st.integers(1, 200),
    dtypes=st.tuples(st.sampled_from((E4M3, E5M2)), st.sampled_from((E4M3, E5M2))),
    seed=seeds,
)
def test_double_row_contracts_pairs_of_fp8(K: int, M: int, N: int, dtypes: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    left, right = operand(rng, (K, 2, M), dtypes[0]), operand(rng, (K, 2, N), dtypes[1])

    def program(left: Any, right: Any) -> Any:
        acc = psum(M, N)
        nisa.nc_matmul(acc, left, right, perf_mode=nisa.matmul_perf_mode.double_row)
        return acc

    close(run(program, left, right), product(left.reshape(2 * K, M), right.reshape(2 * K, N)))


@pytest.mark.parametrize("row, column, rows, columns", [(32, 64, 32, 32), (64, 0, 64, 128), (0, 96, 128, 32)])
def test_tiles_of_the_engine(row: int, column: int, rows: int, columns: int) -> None:
    rng = np.random.default_rng(1)
    left, right = operand(rng, (128, columns), BF16), operand(rng, (128, 40), BF16)

    def program(left: Any, right: Any) -> Any:
        acc, at = psum(128, 40), slice(row, row + rows)
        nisa.nc_matmul(
            acc[column : column + columns], left[at], right[at], tile_position=(row, column), tile_size=(rows, columns)
        )
        return acc[column : column + columns]

    close(run(program, left, right), product(left[row : row + rows], right[row : row + rows]))


@settings(max_examples=25)
@given(K=st.integers(1, 128), M=st.integers(1, 128), dtype=st.sampled_from((F32, *NARROW)), seed=seeds)
def test_transposes_are_bit_exact(K: int, M: int, dtype: Any, seed: int) -> None:
    x = values(np.random.default_rng(seed), (K, M), dtype)

    def program(x: Any, identity: Any) -> Any:
        by_mode, by_name = new((M, K), dtype, nl.psum), new((M, K), dtype, nl.psum)
        nisa.nc_matmul(by_mode, x, identity, is_transpose=True)
        nisa.nc_transpose(by_name, x, engine=nisa.engine.tensor)
        return by_mode, by_name

    for found in run(program, x, np.eye(K, dtype=dtype)):
        assert found.tobytes() == x.T.tobytes()


@settings(max_examples=20)
@given(P=st.integers(1, 32), F=st.integers(1, 32), dtype=anything, seed=seeds)
def test_vector_transposes(P: int, F: int, dtype: Any, seed: int) -> None:
    x = values(np.random.default_rng(seed), (P, F), dtype)

    def program(x: Any) -> Any:
        dst = new((F, P), dtype)
        nisa.nc_transpose(dst, x)
        return dst

    assert run(program, x).tobytes() == x.T.tobytes()


# ---- rules of accumulation and tiles ----


def kernel_of(program: Any) -> Any:
    def kernel() -> Any:
        program()
        return to_hbm(tile(4, 4))

    return kernel


def matmul(acc: Any, **options: Any) -> None:
    nisa.nc_matmul(acc, tile(4, acc.shape[0]), tile(4, acc.shape[1]), **options)


def after_memset(accumulate: bool | None) -> None:
    acc = psum(8, 8)
    nisa.memset(dst=acc[:, 7:8], value=0.0)
    matmul(acc, accumulate=accumulate)


def after_read(accumulate: bool | None) -> None:
    acc = psum(8, 8)
    matmul(acc)
    nisa.tensor_copy(dst=tile(8, 1), src=acc[:, 7:8])
    matmul(acc, accumulate=accumulate)


def fresh(accumulate: bool | None) -> None:
    acc = psum(8, 8)
    matmul(acc[:, 0:7])
    matmul(acc, accumulate=accumulate)


def after_transpose(accumulate: bool | None) -> None:
    acc = psum(8, 8)
    nisa.nc_transpose(acc, tile(8, 8))
    matmul(acc, accumulate=accumulate)


def copied_over(accumulate: bool | None) -> None:
    acc = psum(8, 8)
    matmul(acc)
    nisa.tensor_copy(dst=acc[:, 0:1], src=tile(8, 1))
    matmul(acc, accumulate=accumulate)


@pytest.mark.parametrize(
    "program, accepted",
    [
        (after_memset, (False,)),
        (after_read, (False,)),
        (fresh, (False, None)),
        (after_transpose, (False,)),
        (copied_over, (False,)),
    ],
)
@pytest.mark.parametrize("accumulate", (False, True, None))
def test_a_matmul_adds_only_to_an_open_accumulation(program: Any, accepted: Any, accumulate: bool | None) -> None:
    if accumulate in accepted:
        launch(kernel_of(lambda: program(accumulate)))
        return
    with pytest.raises(NkiRuleError) as caught:
        launch(kernel_of(lambda: program(accumulate)))
    assert caught.value.rule.name == "accumulate"


def test_trn3_adds_to_what_other_engines_wrote_and_writes_bf16() -> None:
    def program() -> Any:
        acc, narrow = tile(2, 3, buffer=nl.psum, value=0.5), psum(2, 7168, BF16)
        nisa.nc_matmul(acc, tile(4, 2), tile(4, 3), accumulate=True)
        nisa.nc_matmul(narrow, tile(1, 2, value=1.00390625), tile(1, 7168))
        return acc, narrow[:, 0:2]

    acc, narrow = run(program, target=hardware.TRN3)
    assert acc.tolist() == [[4.5] * 3] * 2 and narrow.dtype == BF16
    assert narrow.tolist() == [[1.0, 1.0]] * 2  # a half, to even


def tiled(row: int = 0, column: int = 0, start: int = 0, to: int = 0, K: int = 32, M: int = 32, **options: Any) -> None:
    size = options.pop("size", (32, 32))
    left, right = tile(128, M, dtype=BF16)[start : start + K], tile(128, 8, dtype=BF16)[start : start + K]
    nisa.nc_matmul(psum(128, 8)[to : to + M], left, right, tile_position=(row, column), tile_size=size, **options)


FP8 = {"dtype": E4M3}
TILE_FAULTS: dict[str, tuple[str, Any, Any]] = {
    "rows": ("shape", lambda: tiled(K=32), lambda: tiled(K=33)),
    "columns": ("shape", lambda: tiled(M=32), lambda: tiled(M=33)),
    "size": ("shape", lambda: tiled(size=(64, 32)), lambda: tiled(size=(48, 32))),
    "multiple": ("shape", lambda: tiled(32, 32, 32, 32), lambda: tiled(16, 32, 32, 32)),
    "inside": ("shape", lambda: tiled(96, 96, 96, 96), lambda: tiled(96, 128, 96, 96)),
    "both given": (
        "shape",
        lambda: tiled(),
        lambda: nisa.nc_matmul(psum(4, 4), tile(4, 4), tile(4, 4), tile_position=(0, 0)),
    ),
    "over the result": ("tile-position", lambda: tiled(0, 32, 0, 32), lambda: tiled(0, 32, 0, 64)),
    "over the operands": ("tile-position", lambda: tiled(32, 0, 32, 0), lambda: tiled(32, 0, 64, 0)),
    "one start": (
        "tile-position",
        lambda: nisa.nc_matmul(psum(4, 4), tile(64, 4)[32:], tile(64, 4)[32:]),
        lambda: nisa.nc_matmul(psum(4, 4), tile(64, 4)[32:], tile(64, 4)[0:32]),
    ),
    "double_row takes fp8": (
        "dtype",
        lambda: nisa.nc_matmul(psum(4, 4), tile(8, 2, 4, **FP8), tile(8, 2, 4, **FP8), perf_mode=DOUBLE),
        lambda: nisa.nc_matmul(psum(4, 4), tile(8, 2, 4, **FP8), tile(8, 2, 4, dtype=BF16), perf_mode=DOUBLE),
    ),
    "double_row takes pairs": (
        "shape",
        lambda: nisa.nc_matmul(psum(4, 4), tile(8, 2, 4, **FP8), tile(8, 2, 4, **FP8), perf_mode=DOUBLE),
        lambda: nisa.nc_matmul(psum(4, 4), tile(8, 3, 4, **FP8), tile(8, 3, 4, **FP8), perf_mode=DOUBLE),
    ),
    "double_row excludes column tiles": (
        "operation",
        lambda: double_tiled((64, 128)),
        lambda: double_tiled((64, 64)),
    ),
    "double_row excludes transposes": (
        "operation",
        lambda: nisa.nc_matmul(psum(4, 4), tile(8, 2, 4, **FP8), tile(8, 2, 4, **FP8), perf_mode=DOUBLE),
        lambda: nisa.nc_matmul(
            psum(4, 4), tile(8, 2, 4, **FP8), tile(8, 2, 4, **FP8), perf_mode=DOUBLE, is_transpose=True
        ),
    ),
    "enumeration": (
        "enum-value",
        lambda: nisa.nc_matmul(psum(4, 4), tile(8, 2, 4, **FP8), tile(8, 2, 4, **FP8), perf_mode=DOUBLE),
        lambda: nisa.nc_matmul(psum(4, 4), tile(8, 2, 4, **FP8), tile(8, 2, 4, **FP8), perf_mode="double_row"),
    ),
    "transpose keeps the dtype": (
        "dtype",
        lambda: nisa.nc_matmul(psum(4, 1, BF16), tile(1, 4, dtype=BF16), tile(1, 1, dtype=BF16), is_transpose=True),
        lambda: nisa.nc_matmul(psum(4, 1), tile(1, 4, dtype=BF16), tile(1, 1, dtype=BF16), is_transpose=True),
    ),
    "transpose by the identity": (
        "not-modelled",
        lambda: nisa.nc_matmul(psum(4, 1), tile(1, 4), tile(1, 1), is_transpose=True),
        lambda: nisa.nc_matmul(psum(4, 1), tile(1, 4), tile(1, 1, value=2.0), is_transpose=True),
    ),
}
DOUBLE = nisa.matmul_perf_mode.double_row


def double_tiled(size: tuple[int, int]) -> None:
    left, right = tile(64, 2, 4, **FP8), tile(64, 2, 4, **FP8)
    nisa.nc_matmul(psum(4, 4), left, right, perf_mode=DOUBLE, tile_position=(0, 0), tile_size=size)


@pytest.mark.parametrize("name", TILE_FAULTS)
def test_tile_rules(name: str) -> None:
    rule, legal, illegal = TILE_FAULTS[name]
    launch(kernel_of(legal))
    with pytest.raises((NkiRuleError, NkiRuleWarning)) as caught:
        launch(kernel_of(illegal))
    assert caught.value.rule.name == rule


def test_fp8_formats_of_two_generations_dont_mix() -> None:
    ocp = np.dtype(ml_dtypes.float8_e4m3fn)
    with pytest.raises(NkiRuleError, match="dtype"):
        launch(kernel_of(lambda: nisa.nc_matmul(psum(4, 4), tile(4, 4, dtype=ocp), tile(4, 4, **FP8))), hardware.TRN3)
