"""What long runs show, on two thousand tokens: bars hold early, policies differ as they do there. Heads remember
from one token to a million."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from gdn_kernels.drift.config import RolloutConfig
from gdn_kernels.drift.plain import format_table
from gdn_kernels.drift.readout import logits
from gdn_kernels.drift.recurrence import loops
from gdn_kernels.drift.rollout import Rollout
from gdn_kernels.dtypes import round_to
from gdn_kernels.metrics import norm_error
from gdn_kernels.policy import EXACT, OURS, Roundings

TOKENS = 2048
LONG = slice(4, None)  # heads that remember 2700 tokens and more


@cache
def state_errors(policy: str, stream: str, seed: int = 0) -> np.ndarray:
    """[records, heads]."""
    rollout = Rollout(RolloutConfig(policy=policy, stream=stream, tokens=TOKENS, seed=seed, H=128, K=64, V=64))
    rollout.advance(TOKENS)
    return rollout.records["state_error"]


@pytest.mark.parametrize(("stream", "bar"), [("independent", 2e-6), ("ar1", 1e-5)])
def test_ours_is_near_fp32(stream: str, bar: float) -> None:
    assert state_errors("ours", stream).max() <= bar


@pytest.mark.parametrize("stream", ["repeated", "silence"])
def test_ours_is_near_the_best_fp32_state(stream: str) -> None:
    ours, best = state_errors("ours", stream).max(1), state_errors("fp64_step_fp32_state", stream).max(1)
    # The first tokens have a test of their own; from then on the bar of the long run.
    assert (ours[-10:] <= 2 * best[-10:]).all()


def worst_heads(policy: Roundings, tokens: int, B: int, stream: str = "independent") -> np.ndarray:
    """State errors at the last token, [B]."""
    rollout = Rollout(RolloutConfig(policy="exact", tokens=tokens, B=B, stream=stream), policy=policy)
    rollout.advance(tokens)
    return rollout.records["state_error"][-1].reshape(B, -1).max(1)


def with_fp32(*sites: str) -> Roundings:
    return Roundings("with fp32", {**EXACT.table, **dict.fromkeys(sites, "fp32")})


def test_the_first_step_in_fp32_rounds_more_than_once() -> None:
    """The best has rounded its state, and nothing else. No rounding on the way there explains ours by itself."""
    best, ours = worst_heads(EXACT, 1, 32), worst_heads(OURS, 1, 32)
    assert 1.6 < np.median(ours / best) < 1.9 and (ours / best > 2).mean() < 0.25 and ours.max() < 1e-7
    sites = ("conv", "c", "squares", "k", "a", "b", "beta", "memory", "delta", "outer")
    alone = [np.median(worst_heads(with_fp32(site), 1, 32) / best) for site in sites]
    together = np.median(worst_heads(with_fp32(*sites), 1, 32) / best)
    assert max(alone) < 1.25 and 1.4 < together < 1.6


def test_ours_is_below_the_best_where_roundings_repeat_because_it_rounds_the_read() -> None:
    little = RolloutConfig(policy="exact", stream="repeated", tokens=1024, B=8, H=128, Hk=1, Hv=4, K=64, V=64)
    errors = []
    for policy in (EXACT, with_fp32("memory"), with_fp32("delta"), OURS):
        rollout = Rollout(little, policy=policy)
        rollout.advance(little.tokens)
        errors.append(rollout.records["state_error"][-1].reshape(little.B, little.Hv)[:, 2])  # of 10,000 tokens
    read, delta, ours = (np.median(error / errors[0]) for error in errors[1:])
    assert max(read, ours) < 0.75 and delta > 0.9


def test_where_ours_and_exact_first_differ_apart_the_oracle_has_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[np.ndarray] = []  # of a token: core_out, the oracle's core_out, in turn

    def watched(core_out: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        seen.append(logits(core_out, matrix)[-1, 0])
        return logits(core_out, matrix)

    monkeypatch.setattr("gdn_kernels.drift.rollout.logits", watched)
    pairs = {}
    for policy, diverged in ((EXACT, -1), (OURS, 43)):
        rollout = Rollout(RolloutConfig(policy="exact", tokens=43, seed=7), policy=policy)
        rollout.advance(43)
        assert rollout.records["greedy_divergence"][-1, 0] == diverged
        pairs[policy.name] = seen[-2:]
    np.testing.assert_array_equal(pairs["exact"][0], pairs["ours"][0])
    for _, oracle in pairs.values():
        second, largest = np.sort(oracle)[-2:]
        assert largest - second < 3e-6 < 1e-3 * oracle.std()


def test_a_plain_product_is_worse_where_the_decay_is_constant() -> None:
    for stream in ("repeated", "silence"):
        product, ours = (np.median(state_errors(policy, stream)[-1, LONG]) for policy in ("ours_product", "ours"))
        assert product > 2 * ours


def test_nkilib_is_flat() -> None:
    error = state_errors("nkilib", "independent")[-10:]
    assert (np.median(error, axis=1) > 2e-3).all() and (np.median(error, axis=1) < 6e-3).all()


def test_bf16_state_grows_on_long_memory() -> None:
    error = state_errors("bf16_state", "independent")
    assert error[-1, LONG].mean() > 5 * error[5, LONG].mean()
    assert 1e-2 < error[-1, LONG].mean() < 5e-2
    assert error[-1, 0] < 5e-3  # a head that forgets within a token


def test_stochastic_rounding_keeps_a_constant_decay_moving() -> None:
    """To nearest, bf16 does not decay at all above exp(g) = 1 - 2^-9; stochastically, it does on average. On
    independent tokens its larger noise costs a factor of sqrt(2) instead."""
    seeds = range(3)
    for stream, factor in (("silence", 1.0), ("independent", 2.0)):
        nearest, stochastic = (
            np.median([state_errors(policy, stream, seed)[-1, LONG].max() for seed in seeds])
            for policy in ("bf16_state", "bf16_state_sr")
        )
        assert stochastic < factor * nearest


def test_where_a_bf16_state_saturates_is_understood() -> None:
    """Rounding errs by r, a token with a key of any direction erases the share mean(2 beta - beta^2) / K of what is
    there, so the error ends at r * sqrt(K / mean(2 beta - beta^2)). Twice the variance for stochastic rounding."""
    K, tokens, rng = 64, 2000, np.random.default_rng(0)
    keys = rng.standard_normal((tokens, 1, 1, K))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    values = rng.standard_normal((tokens, 1, 1, K))
    beta, decay = 1 / (1 + np.exp(-rng.standard_normal((tokens, 1, 1)))), np.full((tokens, 1, 1), 1 - 1e-6)
    states = []
    for table in ({}, {"state": "bf16"}, {"state": "bf16_sr"}):
        S, o, norms = np.zeros((1, 1, K, K)), np.empty_like(values), np.empty_like(beta)
        loops().rounded_steps(S, keys, keys, values, decay, beta, *format_table(Roundings("", table), 0), 0, o, norms)
        states.append(S)
    exact, nearest, stochastic = states
    r = norm_error(round_to(exact, "bf16"), exact, (-2, -1))
    found = [float(norm_error(S, exact, (-2, -1)).item() / r.item()) for S in (nearest, stochastic)]
    expected = np.sqrt(K / (2 * beta - beta**2).mean())
    np.testing.assert_allclose(found, [expected, 2**0.5 * expected], rtol=0.1)
