"""How the kernel writes S * exp(g), and why: what each form costs, modelled, and which error it leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decay_forms import CASES, FORMS, kernel_with, modelled_us, saved_errors
from test_drift_emulate import CASES as ROLLOUTS
from test_drift_emulate import bits, decoded

from gdn_kernels.drift.heads import Start, first_state, layer_weights
from gdn_kernels.drift.rollout import Rollout
from gdn_kernels.policy import PRESETS

NAMES = {"ours_product": "S * exp(g)", "ours_expm1": "S + S * expm1(g)", "ours": "the kernel's"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 4])
def test_a_kernel_with_that_form_has_the_bytes_of_its_policy(form: str, n: int) -> None:
    """So the errors of the policies are those of kernels that could be, and their times are of the same kernels."""
    config = ROLLOUTS[n, "bf16"]
    with kernel_with(form):
        theirs, ours = decoded(config, layer_weights(config), first_state(config, config.dims), PRESETS[form], steps=24)
    for kernel, emulated in zip(theirs, ours, strict=True):
        np.testing.assert_array_equal(bits(emulated), bits(kernel))


@pytest.fixture(scope="module")
def times() -> dict[str, list[float]]:
    return {form: modelled_us(form) for form in FORMS}


def test_the_kernels_form_costs_little(times: dict[str, list[float]]) -> None:
    for (model, B), mine, product in zip(CASES, times["ours"], times["ours_product"], strict=True):
        assert product <= mine <= product * (1.08 if model.endswith("0.8B") else 1.0001), (model, B)


def median(stream: str, tokens: int, policy: str) -> np.ndarray:
    """Medians over eight seeds: of each head, and of the worst."""
    errors = saved_errors()[stream, tokens, policy]
    assert len(errors) >= 8
    return np.append(np.median(errors, axis=0), np.median(errors.max(1)))


@pytest.mark.parametrize(("stream", "tokens"), [("repeated", 131072), ("silence", 8192)])
def test_a_product_repeats_its_rounding_where_the_decay_is_constant(stream: str, tokens: int) -> None:
    product, mine = median(stream, tokens, "ours_product"), median(stream, tokens, "ours")
    assert product[6] > 8 * mine[6]  # the head that remembers 140 thousand tokens
    assert product[-1] > (2.5 if stream == "repeated" else 1.1) * mine[-1]
    assert (mine <= 1.05 * product).all()


def test_on_independent_tokens_fast_heads_want_the_product_and_slow_ones_expm1() -> None:
    product, expm1, mine = (median("independent", 8192, form) for form in FORMS)
    assert 1.05 * product[0] < expm1[0] and mine[0] < 1.01 * product[0]
    assert product[7] > 2 * expm1[7] and mine[7] < 1.01 * expm1[7]


def test_the_readme_has_these_figures(times: dict[str, list[float]], root: Path) -> None:
    readme = (root / "README.md").read_text()
    for form in FORMS:
        independent, repeated, silence = (
            median(stream, tokens, form)
            for stream, tokens in (("independent", 8192), ("repeated", 131072), ("silence", 8192))
        )
        errors = (independent[0], independent[7], repeated[6], repeated[-1], silence[6])
        cells = [NAMES[form], *(f"{error:.1e}" for error in errors), *(f"{us:.1f}" for us in times[form])]
        row = f"| {' | '.join(cells)} |".replace("e-0", "e-")
        assert row in readme, row


def test_a_head_that_drops_a_large_state_keeps_none_of_its_rounding() -> None:
    """S + S * expm1(g) rounds at the size of the state that goes; the kernel multiplies there."""
    config = replace(ROLLOUTS[1, "bf16"], tokens=1)
    weights, start = layer_weights(config), first_state(config, config.dims)
    weights = replace(weights, A_log=np.full(config.Hv, 3.7, np.float32))  # exp(g) is exp(-28) at a = 0
    start = Start(start.conv_state, np.float32(1e6) * start.recurrent_state)
    errors = {}
    for form in FORMS:
        rollout = Rollout(config, policy=PRESETS[form], weights=weights, start=start)
        rollout.advance(1)
        errors[form] = rollout.records["state_error_now"].max()
    assert errors["ours"] < 1e-5 < 1e-3 < errors["ours_expm1"]
    assert errors["ours"] == errors["ours_product"]
