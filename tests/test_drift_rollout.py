"""Rollouts: steps are the reference's, cutting and resuming change no byte, extremes stay finite."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest

from gdn_kernels import reference
from gdn_kernels.drift import emulate, oracle, plain, recurrence
from gdn_kernels.drift.config import RolloutConfig
from gdn_kernels.drift.heads import Start, first_state, gate_parameters, layer_weights, memory_lengths
from gdn_kernels.drift.rollout import Rollout, log_spaced
from gdn_kernels.drift.streams import Stream
from gdn_kernels.dtypes import bfloat16, to_fp32
from gdn_kernels.policy import FP64_STEP_FP32_STATE, HF_BF16, NKILIB, PRESETS, UNROUNDED, Roundings
from gdn_kernels.sample import PATH as SAMPLE

SMALL = RolloutConfig(H=128, Hk=2, Hv=6, K=12, V=20, tokens=300, B=2)


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype, name
        assert array.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("policy", ["ours", "nkilib", "bf16_state_sr"])
@pytest.mark.parametrize("stream", ["ar1", "bursts"])
def test_cutting_and_resuming_change_no_byte(policy: str, stream: str) -> None:
    config = replace(SMALL, policy=policy, stream=stream, oracle_window="exact" if policy == "nkilib" else "policy")
    whole = Rollout(config)
    whole.advance(config.tokens)
    cut = Rollout(config)
    for tokens in (1, 6, 130, 1, 50):
        cut.advance(tokens)
        cut = Rollout.from_arrays(config, cut.to_arrays())
    assert cut.done == 188
    cut.advance(10_000)
    assert cut.done == config.tokens
    same(whole.to_arrays(), cut.to_arrays())


def test_resuming_a_backend() -> None:
    config = replace(SMALL, backend="interpreter", tokens=12)
    whole, cut = Rollout(config), Rollout(config)
    whole.advance(12)
    cut.advance(5)
    cut = Rollout.from_arrays(config, cut.to_arrays())
    cut.advance(7)
    same(whole.to_arrays(), cut.to_arrays())
    assert (whole.records["model_error"] == 0).all()


def test_seed_counts_and_stochastic_bits_move_on() -> None:
    config = replace(SMALL, policy="bf16_state_sr", stream="repeated", tokens=20)
    runs = [Rollout(config), Rollout(config), Rollout(replace(config, seed=1))]
    for run in runs:
        run.advance(20)
    assert runs[0].state.tobytes() == runs[1].state.tobytes() != runs[2].state.tobytes()


@pytest.mark.parametrize("policy", [UNROUNDED, FP64_STEP_FP32_STATE, HF_BF16, NKILIB], ids=lambda policy: policy.name)
def test_steps_are_the_references(policy: Roundings) -> None:
    config = replace(SMALL, tokens=40)
    rollout, oracle = Rollout(config, policy=policy), Rollout(config, policy=UNROUNDED)
    start, weights = first_state(config, config.dims), layer_weights(config)
    state, window = start.recurrent_state, start.conv_state
    hidden = Stream("independent", config.B, config.H, 128, config.seed, "bf16").block(0)
    for t in range(config.tokens):
        rollout.advance(1)
        _, window, state = reference.gdn_block_tkg(
            hidden[t, :, None].astype(bfloat16()),
            **weights.arguments(),
            conv_state=window,
            recurrent_state=state,
            policy=policy,
            norm_eps=weights.norm_eps,
        )
    # A float64 sum in another order now and then rounds to the other neighbour.
    tolerance = 1e-12 if policy is UNROUNDED else 1e-7 if policy is FP64_STEP_FP32_STATE else 1e-4
    size = np.abs(state).max()
    np.testing.assert_allclose(rollout.state / size, state / size, atol=tolerance, rtol=0)
    oracle.advance(config.tokens)
    if policy is UNROUNDED:
        np.testing.assert_array_equal(oracle.exact_state, oracle.state)


def test_exact_window_counts_what_its_rounding_costs() -> None:
    errors = {}
    for window in ("policy", "exact"):
        run = Rollout(replace(SMALL, policy="exact", oracle_window=window))
        run.advance(SMALL.tokens)
        errors[window] = np.median(run.records["state_error"][-1])
    assert errors["policy"] < 1e-6 < 1e-3 < errors["exact"] < 1e-2


def test_records_have_the_documented_shapes() -> None:
    run = Rollout(SMALL)
    assert list(run.records) == ["tokens"]
    run.advance(SMALL.tokens)
    records = run.records
    assert records["tokens"].tolist() == log_spaced(300).tolist()
    for name, values in records.items():
        assert values.shape[1:] == {"tokens": (), "kl": (2,), "greedy_divergence": (2,)}.get(name, values.shape[1:])
    assert records["state_error"].shape == (len(records["tokens"]), 12)
    assert (records["finite"] == 1).all()
    assert (records["cosine"] > 0.999999).all()


def test_log_spaced() -> None:
    assert log_spaced(1).tolist() == [1]
    points = log_spaced(131072)
    assert points[0] == 1 and points[-1] == 131072 and (np.diff(points) > 0).all() and len(points) < 60


def test_without_oracle_the_numbers_are_the_same() -> None:
    runs = [Rollout(SMALL), Rollout(SMALL, oracle=False)]
    for run in runs:
        run.advance(SMALL.tokens)
    assert runs[0].state.tobytes() == runs[1].state.tobytes()
    assert list(runs[1].records) == ["tokens"]


@pytest.mark.parametrize("policy", ["ours", "exact", "nkilib", "bf16_state_sr"])
def test_extremes_stay_finite_for_ten_thousand_steps(policy: str) -> None:
    """Decays of 0 and 1, a huge and a tiny state, and long silences."""
    config = RolloutConfig(policy=policy, H=128, Hk=1, Hv=6, K=8, V=4, tokens=10_000, stream="bursts")
    weights = replace(
        layer_weights(config),
        A_log=np.array([-200, 80, 300, -3, -3, 5], np.float32),
        dt_bias=np.array([0, 80, -400, -90, 0, 80], np.float32),
    )
    start = first_state(config, config.dims)
    state = start.recurrent_state.copy()
    state[:, 3], state[:, 4], state[:, 5] = 2.0**40, 1e-38, 0
    run = Rollout(config, weights=weights, start=Start(start.conv_state, state))
    run.advance(config.tokens)
    assert np.isfinite(run.exact_state).all()
    assert (run.records["finite"] == 1).all()
    assert np.isfinite(run.records["kl"]).all()


def test_memory_lengths_are_what_the_gates_make() -> None:
    tau = memory_lengths((1, 1e6), 7)
    np.testing.assert_allclose(tau, 10.0 ** np.arange(7))
    A_log, dt_bias = gate_parameters(tau)
    zeros = np.zeros((1, 7))
    g, _ = reference.gates(zeros, zeros, A_log.astype(np.float64), dt_bias.astype(np.float64))
    np.testing.assert_allclose(-1 / g[0], tau, rtol=2e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": "best"}, "policy must be one of exact"),
        ({"backend": "gpu"}, "backend must be one of interpreter"),
        ({"tokens": 0}, "tokens must be a whole number of at least 1, got 0"),
        ({"seed": -1}, "seed must be"),
        ({"B": True}, "B must be"),
        ({"tau": (5.0, 1.0)}, "tau must be"),
        ({"stream": "ar1:2"}, "stream must name a correlation"),
        ({"stream": "noise"}, "stream must be one of independent"),
        ({"H": 100}, "H must be"),
        ({"Hv": 3}, "Hv must be"),
        ({"form": "fp16"}, "form must be one of"),
        ({"oracle_window": "none"}, "oracle_window must be one of"),
    ],
)
def test_bad_configurations_are_named(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **change)


def test_arrays_of_another_rollout_are_refused() -> None:
    arrays = Rollout(SMALL).to_arrays()
    with pytest.raises(ValueError, match=r"arrays\['model_state'\] must be of shape"):
        Rollout.from_arrays(replace(SMALL, V=16), arrays)
    del arrays["largest"]
    with pytest.raises(ValueError, match=r"arrays\['largest'\] .* got nothing"):
        Rollout.from_arrays(SMALL, arrays)


def test_presets_are_named_as_they_are_called() -> None:
    assert {"exact", "ours", "nkilib", "hf_bf16", "bf16_state", "fp16_state", "bf16_state_sr"} <= set(PRESETS)
    assert all(name == policy.name for name, policy in PRESETS.items())


def test_reference_refuses_stochastic_rounding() -> None:
    with pytest.raises(ValueError, match="needs the random bits of a rollout"):
        PRESETS["bf16_state_sr"].round("state", np.ones(3))


def test_kernel_arithmetic_takes_no_other_roundings() -> None:
    with pytest.raises(ValueError, match="table must be"):
        Roundings("mine", {"state": "bf16"}, arithmetic="kernel")
    with pytest.raises(ValueError, match="decay must be one of split"):
        Roundings("mine", {}, decay="power")


def test_checkpoint_heads() -> None:
    folder = str(SAMPLE)
    own = layer_weights(replace(SMALL, checkpoint=folder))
    assert own.dims != SMALL.dims
    longer = layer_weights(replace(SMALL, checkpoint=folder, tau=(1, 1e6)))
    assert not np.array_equal(own.A_log, longer.A_log)
    assert np.array_equal(to_fp32(own.W_in_qkv), to_fp32(longer.W_in_qkv))
    run = Rollout(RolloutConfig(checkpoint=folder, tokens=8))
    run.advance(8)
    assert run.records["state_error"].max() < 1e-6


@pytest.mark.parametrize("policy", ["ours", "nkilib", "bf16_state_sr"])
def test_numpy_alone_gives_the_same_bytes(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SMALL, policy=policy, tokens=70)
    runs = [Rollout(config), Rollout(config)]
    runs[0].advance(70)
    for module in (emulate, oracle):
        monkeypatch.setattr(module, "loops", lambda: plain)
    runs[1].advance(70)
    same(runs[0].to_arrays(), runs[1].to_arrays())


def test_numba_is_used_where_it_is() -> None:
    installed = importlib.util.find_spec("numba") is not None
    assert recurrence.loops().__name__.endswith("compiled" if installed else "plain")
