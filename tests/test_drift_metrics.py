"""Error measures of rollouts, on values whose errors are known."""

from __future__ import annotations

import numpy as np
import pytest

from gdn_kernels.metrics import (
    cosine,
    first_past,
    growth_exponent,
    kl_divergence,
    max_error,
    norm_error,
    top_k_agreement,
)

X = np.random.default_rng(0).standard_normal((3, 5, 7))


def test_scaled_values() -> None:
    np.testing.assert_allclose(norm_error(1.01 * X, X, (-2, -1)), 0.01)
    np.testing.assert_allclose(max_error(1.01 * X, X, (-2, -1)), 0.01)
    np.testing.assert_allclose(cosine(1.01 * X, X, (-2, -1)), 1)
    np.testing.assert_allclose(cosine(-X, X, -1), -1)
    np.testing.assert_allclose(norm_error(2 * X, X, (-2, -1), np.full(3, 10.0)), np.linalg.norm(X, axis=(-2, -1)) / 10)


def test_one_element_off() -> None:
    x = X.copy()
    x[1, 2, 3] += 0.5
    size, largest = np.linalg.norm(X[1]), np.abs(X[1]).max()
    np.testing.assert_allclose(norm_error(x, X, (-2, -1)), [0, 0.5 / size, 0])
    np.testing.assert_allclose(max_error(x, X, (-2, -1)), [0, 0.5 / largest, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_infinitely_wrong(bad: float) -> None:
    x = X.copy()
    x[0, 0, 0] = bad
    for error in (norm_error(x, X, (-2, -1)), max_error(x, X, (-2, -1))):
        assert error[0] == np.inf and (error[1:] == 0).all()


def test_zeros() -> None:
    zeros = np.zeros((2, 3))
    assert (norm_error(zeros, zeros, -1) == 0).all()
    assert (norm_error(zeros + 1, zeros, -1) == np.inf).all()
    assert (cosine(zeros, zeros, -1) == 1).all()
    assert np.isnan(cosine(zeros + 1, zeros, -1)).all()


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_growth_exponent(power: float) -> None:
    tokens = np.unique(np.geomspace(1, 10_000, 40).astype(int))
    error = 1e-7 * tokens[:, None] ** power * np.array([1, 5])
    np.testing.assert_allclose(growth_exponent(tokens, error), power, atol=1e-9)
    error[tokens < 500] = 1  # what was early does not count
    np.testing.assert_allclose(growth_exponent(tokens, error), power, atol=1e-9)
    assert np.isnan(growth_exponent(tokens, 0 * error)).all()


def test_first_past() -> None:
    tokens = np.array([1, 10, 100, 1000])
    error = np.array([[0.1, 0, 0.1], [0.3, 0, np.nan], [0.1, 0, 0], [0.5, 0.2, 0]])
    assert first_past(tokens, error, 0.2).tolist() == [10, -1, 10]


def test_kl_divergence() -> None:
    exact, other = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25]) + 7
    np.testing.assert_allclose(kl_divergence(other, exact), 0.25 * np.log(2))
    assert abs(kl_divergence(exact + 1e3, exact)) < 1e-12
    assert np.isfinite(kl_divergence(np.array([1e4, 0.0]), np.array([0.0, 1e4])))


def test_top_k_agreement() -> None:
    exact = np.arange(10.0)
    other = exact.copy()
    other[9], other[0] = -1, 20
    assert top_k_agreement(exact + 5, exact, 3) == 1
    assert top_k_agreement(other, exact, 1) == 0
    np.testing.assert_allclose(top_k_agreement(other, exact, 3), 2 / 3)
