"""The error measures, on cases whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from gdn_kernels import metrics
from gdn_kernels.dtypes import bfloat16, round_to


def test_relative_error() -> None:
    exact = np.array([3.0, 4.0])
    assert metrics.relative_error(exact, exact) == 0
    assert metrics.relative_error(np.array([3.0, 4.5], np.float32), exact) == pytest.approx(0.1)
    assert metrics.relative_error(np.zeros(2), np.zeros(2)) == 0
    assert metrics.relative_error(np.ones(2), np.zeros(2)) == np.inf
    assert metrics.relative_error(np.zeros((0, 2)), np.zeros((0, 2))) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nothing_passes_with_a_nan(bad: float) -> None:
    exact = np.ones((1, 2, 3, 3))
    x = exact.copy()
    x[0, 1, 2, 2] = bad
    assert metrics.relative_error(x, exact) == np.inf
    assert metrics.worst_head_error(x, exact) == np.inf
    assert metrics.bf16_steps(x, exact).max() == np.inf
    assert metrics.unequal_share(x, exact) > 0


def test_worst_head_is_not_hidden_by_large_heads() -> None:
    exact = np.ones((2, 3, 4, 5))
    exact[:, 0] = 1e6
    x = exact.copy()
    x[1, 2] *= 1.01
    assert metrics.relative_error(x, exact) < 1e-7
    assert metrics.worst_head_error(x, exact) == pytest.approx(0.01)
    assert metrics.worst_head_error(np.zeros((0, 3, 4, 5)), np.zeros((0, 3, 4, 5))) == 0


@pytest.mark.parametrize("size", [1.0, 1.5, -1.0, 2.0**40, 2.0**-40])
def test_neighbouring_bf16_numbers_are_one_step_apart(size: float) -> None:
    exact = np.array([[size]])
    up = np.array([[size * (1 + 2.0**-7) if abs(np.frexp(size)[0]) == 0.5 else size + np.sign(size) * 2.0**-7]])
    up = up.astype(bfloat16())
    assert metrics.bf16_steps(up, exact)[0, 0] == 1


def test_small_elements_are_measured_by_their_row() -> None:
    exact = np.array([[1.0, 0.0], [2.0**-20, 2.0**-20]])
    x = exact + np.array([[0.0, 2.0**-15], [0.0, 2.0**-27]])
    assert metrics.bf16_steps(x, exact).tolist() == [[0, 1], [0, 1]]


def test_unequal_share_judges_against_the_rounded_value() -> None:
    exact = np.array([1.0, 1 + 2.0**-10, 3.0, 5.0])
    x = round_to(exact, "bf16").astype(bfloat16())
    assert metrics.unequal_share(x, exact) == 0
    x[3] = 6
    assert metrics.unequal_share(x, exact) == 0.25


def test_projection_misses_allows_ties_and_nothing_else() -> None:
    W = np.array([[1.0, 1.0, 1.0], [2.0**-8, 2.0**-8, 2.0**-9]])
    hidden = np.ones((1, 2))  # sums: two ties between 1 and 1 + 2^-7, one that rounds to 1
    up = 1 + 2.0**-7
    assert metrics.projection_misses(np.array([[1.0, 1.0, 1.0]]), hidden, W, "bf16") == (0, 0)
    assert metrics.projection_misses(np.array([[1.0, up, 1.0]]), hidden, W, "bf16") == (1, 0)
    assert metrics.projection_misses(np.array([[1.0, up, up]]), hidden, W, "bf16") == (2, 1)
    assert metrics.projection_misses(np.array([[np.nan, 1.0, 1.0]]), hidden, W, "bf16") == (1, 1)


def test_projection_misses_in_fp32_allows_another_order_of_summation() -> None:
    generator = np.random.default_rng(0)
    hidden, W = (generator.standard_normal(shape).astype(np.float32) for shape in ((3, 512), (512, 64)))
    in_order = np.zeros((3, 64), np.float32)
    for i in range(512):
        in_order += hidden[:, i : i + 1] * W[i]
    differ, wrong = metrics.projection_misses(in_order, hidden, W, "fp32")
    assert differ > 100 and wrong == 0
    bf16_operand = round_to(W, "bf16")
    assert metrics.projection_misses(hidden @ bf16_operand, hidden, W, "fp32")[1] > 150
