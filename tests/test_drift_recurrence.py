"""The compiled loops give the bytes of the NumPy ones, whatever is rounded; the NumPy ones round as `dtypes` does."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gdn_kernels import drift
from gdn_kernels.drift import plain, recurrence
from gdn_kernels.drift.noise import generator, hashed, site_key, stochastic_bf16
from gdn_kernels.dtypes import FORMATS
from gdn_kernels.policy import BF16_SR, Roundings

compiled = pytest.importorskip(
    "gdn_kernels.drift.compiled", reason="the extra `fast` is not installed", exc_type=ImportError
)
Array = npt.NDArray[Any]
TOKENS, B, HK, HV, K, V = 5, 2, 2, 4, 22, 13  # K leaves a rest, of fours as well as of the key rows of a partition


def normal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def bits(x: Array) -> Array:
    return x.view(np.uint32 if x.dtype == np.float32 else np.uint64)


@pytest.mark.parametrize(("n", "rows"), [(1, K), (2, K), (4, 24)])
def test_kernel_steps(n: int, rows: int) -> None:
    q, k = (normal(TOKENS, B, HK, rows).astype(np.float32) for _ in range(2))
    v = normal(TOKENS, B, HV, V).astype(np.float32)
    gates, split = (np.abs(normal(TOKENS, 2, B, HV)).astype(np.float32) for _ in range(2))
    dots = normal(TOKENS, B, HK).astype(np.float32)
    v[:, :, 0] = 0
    gates[0, :, 0, 1] = 0
    S = normal(B, HV, rows, V).astype(np.float32)
    S[0, 1], S[0, 2] = 1e38, -0.0  # beyond the clamp; negative zeros
    results = []
    for loops in (plain, compiled):
        state, o = S.copy(), np.empty_like(v)
        loops.kernel_steps(state, q, k, v, gates, split, dots, n, o)
        results.append((state, o))
    for mine, other in zip(*results, strict=True):
        np.testing.assert_array_equal(bits(mine), bits(other))


@pytest.mark.parametrize("site", plain.SITES)
@pytest.mark.parametrize("fmt", [*FORMATS, BF16_SR])
def test_rounded_steps(site: str, fmt: str) -> None:
    formats, keys = plain.format_table(Roundings("one", {site: fmt}), seed=3)
    spread = 10.0 ** np.random.default_rng(1).uniform(-45, 3, (B, HV, K, V))  # subnormals, and beyond fp8
    q, k, v = 0.3 * normal(TOKENS, B, HK, K), 0.1 * normal(TOKENS, B, HK, K), 1e-3 * normal(TOKENS, B, HV, V)
    decay, beta = np.exp(-np.abs(normal(TOKENS, B, HV))), 0.5 + 0 * normal(TOKENS, B, HV)
    results = []
    for loops in (plain, compiled):
        S, o, norms = normal(B, HV, K, V) * spread, np.empty_like(v), np.empty_like(decay)
        loops.rounded_steps(S, q, k, v, decay, beta, formats, keys, 11, o, norms)
        results.append((S, o, norms))
    for mine, other in zip(*results, strict=True):
        np.testing.assert_array_equal(bits(mine), bits(other))


def test_nothing_rounded() -> None:
    formats, keys = plain.format_table(Roundings("none", {}), seed=0)
    arrays = [normal(TOKENS, B, HK, K), normal(TOKENS, B, HK, K), normal(TOKENS, B, HV, V)]
    gates = [np.exp(-np.abs(normal(TOKENS, B, HV)))] * 2
    results = []
    for loops in (plain, compiled):
        S, o, norms = normal(B, HV, K, V), np.empty_like(arrays[2]), np.empty_like(gates[0])
        loops.rounded_steps(S, *arrays, *gates, formats, keys, 0, o, norms)
        np.testing.assert_allclose(norms[-1], np.linalg.norm(S, axis=(-2, -1)), rtol=1e-12)
        results.append((S, o, norms))
    for mine, other in zip(*results, strict=True):
        np.testing.assert_array_equal(bits(mine), bits(other))


def test_stochastic_rounding_is_unbiased_and_reaches_neighbours_only() -> None:
    x = np.full(200_000, 1 + 0.25 * 2**-7)  # a quarter of the way from 1 to the next bf16
    rounded = stochastic_bf16(x, hashed(site_key(5, "state"), 0, x.size))
    assert set(rounded) == {1.0, 1 + 2**-7}
    assert abs(rounded.mean() - x[0]) < 4 * 2**-7 * (3 / 16 / x.size) ** 0.5


def test_stochastic_rounding_leaves_what_bf16_has() -> None:
    x = np.array([0.0, -0.0, 1.0, -3.5, 2.0**-133, np.inf, -np.inf, np.nan])
    rounded = stochastic_bf16(x, np.full(x.shape, 2**64 - 1, np.uint64))
    np.testing.assert_array_equal(rounded, x)
    assert np.signbit(rounded[1])


def test_random_numbers_differ_by_seed_purpose_and_position() -> None:
    drawn = [generator(*where).standard_normal(4).tobytes() for where in ((0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1))]
    assert len(set(drawn)) == 4
    assert generator(0, 1, 7).random() == generator(0, 1, 7).random()
    np.testing.assert_array_equal(hashed(9, 0, 10)[4:], hashed(9, 4, 6))


@pytest.mark.parametrize("error", [ImportError("No module named 'numba'"), RuntimeError("cannot cache function")])
def test_without_numba_numpy_runs_and_a_line_says_how_to_be_fast(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        """An import system that has no numba, or one that finds no folder for its cache."""

        def find_spec(self, name: str, *_: Any) -> None:
            if name == "gdn_kernels.drift.compiled":
                raise error

    monkeypatch.delitem(sys.modules, "gdn_kernels.drift.compiled")
    monkeypatch.delattr(drift, "compiled")
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    recurrence._found.cache_clear()
    try:
        assert recurrence.loops() is plain
        assert "pip install 'gdn-kernels[fast]'" in recurrence.hint() and str(error) in recurrence.hint()
        assert "\n" not in recurrence.hint()
    finally:
        recurrence._found.cache_clear()


def test_with_numba_there_is_nothing_to_say() -> None:
    assert recurrence.loops() is compiled and recurrence.hint() == ""
