"""The PyTorch block against the reference and the interpreted kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arguments import Arguments, block_arguments, check_block
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from gdn_kernels import BlockDims, gdn_block_tkg, torch_block  # noqa: E402
from gdn_kernels.interpreter.torch_arrays import to_numpy, to_torch  # noqa: E402
from gdn_kernels.metrics import bf16_steps, relative_error, unequal_share  # noqa: E402

SHAPES = [BlockDims(128, 2, 6, 48, 32), BlockDims(128, 3, 3, 32, 64, K_win=3), BlockDims(256, 1, 4, 128, 128)]


def in_torch(arguments: Arguments) -> tuple[Any, Any, Any]:
    core_out, window, state = torch_block.gdn_block_tkg(**{name: to_torch(x) for name, x in arguments.items()})
    return to_numpy(core_out), to_numpy(window), to_numpy(state)


def next_step(arguments: Arguments, window: Any, state: Any, seed: int) -> Arguments:
    hidden = np.random.default_rng(seed).standard_normal(arguments["hidden"].shape).astype(arguments["hidden"].dtype)
    return {**arguments, "hidden": hidden, "conv_state": window, "recurrent_state": state}


@pytest.mark.parametrize("form", ["bf16", "fp32"])
@pytest.mark.parametrize("dims", SHAPES, ids=str)
def test_block_meets_the_reference_as_the_kernel_does(dims: BlockDims, form: str) -> None:
    for B in (1, 3):
        arguments = block_arguments(dims, B, form)
        check_block(arguments, in_torch(arguments))


@settings(max_examples=15)
@given(
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    sizes=st.tuples(st.integers(16, 128), st.integers(16, 128), st.integers(2, 8)),
    B=st.integers(1, 5),
    form=st.sampled_from(["bf16", "fp32"]),
    seed=st.integers(0, 99),
)
def test_any_dimensions(heads: tuple[int, int], sizes: tuple[int, int, int], B: int, form: str, seed: int) -> None:
    (Hk, gqa), (K, V, K_win) = heads, sizes
    arguments = block_arguments(BlockDims(128, Hk, Hk * gqa, K, V, K_win), B, form, seed)
    check_block(arguments, in_torch(arguments))


def test_fp32_state_stays_with_the_kernels_over_many_steps() -> None:
    """Each carries its own states: what their orders of summation differ by doesn't add up."""
    ours = theirs = block_arguments(SHAPES[0], 2, "fp32")
    for step in range(48):
        out, *states = in_torch(ours)
        kernel_out, *kernel_states = gdn_block_tkg(**theirs, backend="interpreter")
        assert relative_error(out, kernel_out) <= 3e-6
        assert relative_error(states[0], kernel_states[0]) <= 1e-6
        assert relative_error(states[1], kernel_states[1]) <= 1e-6
        ours, theirs = next_step(ours, *states, step), next_step(theirs, *kernel_states, step)


def test_bf16_results_are_the_kernels_up_to_one_rounding() -> None:
    """Every step from the kernel's own states: a window element at a tie would go on to move the state."""
    arguments, unequal, ties, elements = block_arguments(SHAPES[0], 2), 0.0, 0, 0
    for step in range(24):
        core_out, window, state = in_torch(arguments)
        kernel_out, kernel_window, kernel_state = gdn_block_tkg(**arguments, backend="interpreter")
        assert (window[..., :-1] == kernel_window[..., :-1]).all()
        assert max(bf16_steps(window, kernel_window).max(), bf16_steps(core_out, kernel_out).max()) <= 1
        here = int((window != kernel_window).sum())
        if not here:
            assert relative_error(state, kernel_state) <= 1e-6
        ties, elements, unequal = (
            ties + here,
            elements + window[..., -1].size,
            unequal + unequal_share(core_out, kernel_out),
        )
        arguments = next_step(arguments, kernel_window, kernel_state, step)
    assert ties / elements <= 1e-3 and unequal / 24 <= 2e-3


def test_rows_of_a_batch_are_those_of_each_alone() -> None:
    arguments = block_arguments(SHAPES[0], 3, "fp32")
    together = in_torch(arguments)
    for row in range(3):
        batched = ("hidden", "conv_state", "recurrent_state")
        alone = in_torch({name: x[row : row + 1] if name in batched else x for name, x in arguments.items()})
        for one, all_of_them in zip(alone, together, strict=True):
            assert relative_error(one[0], all_of_them[row]) <= 1e-6


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "W_in_a", "hidden", "recurrent_state", "conv_state"])
@pytest.mark.parametrize("value", [0.0, 1e-30, 100.0, -100.0, 2.0**40, -(2.0**40)])
def test_extremes_stay_finite(name: str, value: float) -> None:
    arguments = block_arguments(SHAPES[0], 2, "fp32")
    arguments[name] = np.full_like(arguments[name], value)
    assert all(np.isfinite(result).all() for result in in_torch(arguments))


def test_faults_are_beyond_the_tolerances() -> None:
    arguments = block_arguments(SHAPES[0], 2, "fp32")
    _, _, state = in_torch(arguments)
    _, _, kernel_state = gdn_block_tkg(**arguments, backend="interpreter")
    assert relative_error(state, kernel_state) <= 1e-6
    for fault in (
        {"dt_bias": arguments["dt_bias"] + np.float32(1e-4)},
        {"conv_weight": arguments["conv_weight"] * np.float32(1 + 1e-4)},
        {"recurrent_state": arguments["recurrent_state"][::-1].copy()},
    ):
        assert relative_error(in_torch({**arguments, **fault})[2], kernel_state) > 1e-6
