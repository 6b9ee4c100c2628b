"""Prefill in chunks against stepping token by token, against transformers' own, and handing over to the kernel.

Tolerances: the chunk form in float64 equals steps in float64 to 1e-11, relative to the largest element. Through the
whole layer the windows have the same bytes; core_out and state, stored in fp32, differ by a rounding of it at most. In
float32, and against transformers, which computes in fp32: 5e-6 in relative Frobenius norm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arguments import block_arguments
from hypothesis import given, settings
from hypothesis import strategies as st

from gdn_kernels import BlockDims, BlockWeights, DecodeState, gdn_block_tkg, reference
from gdn_kernels import prefill as module
from gdn_kernels.dtypes import bfloat16, to_float
from gdn_kernels.policy import EXACT, UNROUNDED
from gdn_kernels.prefill import chunk_rule, prefill

Array = np.ndarray[Any, Any]

DIMS = BlockDims(H=128, Hk=2, Hv=6, K=16, V=8, K_win=4)
FP32 = 5e-6


def weights_of(dims: BlockDims = DIMS, form: str = "fp32", seed: int = 0, **changes: Any) -> BlockWeights:
    arguments = block_arguments(dims, 1, form, seed) | changes
    names = ("W_in_qkv", "W_in_z", "W_in_a", "W_in_b", "conv_weight", "A_log", "dt_bias", "norm_weight")
    return BlockWeights(**{name: arguments[name] for name in names}, norm_eps=1e-5, out_proj=None, dims=dims)


def tokens(B: int, T: int, dims: BlockDims = DIMS, form: str = "fp32", seed: int = 1) -> Array:
    values = np.random.default_rng(seed).standard_normal((B, T, dims.H))
    return values.astype(bfloat16() if form == "bf16" else np.float32)


def some_state(B: int, dims: BlockDims = DIMS, form: str = "fp32") -> DecodeState:
    arguments = block_arguments(dims, B, form, seed=7)
    return DecodeState(arguments["conv_state"], arguments["recurrent_state"], dims)


def stepped(hidden: Array, weights: BlockWeights, state: DecodeState, policy: Any = UNROUNDED) -> tuple[Array, ...]:
    """Token by token: core_out [B, T, value_dim], the conv state, the recurrent state."""
    conv_state, recurrent_state, outs = state.conv_state, state.recurrent_state, []
    for t in range(hidden.shape[1]):
        out, conv_state, recurrent_state = reference.gdn_block_tkg(
            hidden[:, t : t + 1],
            conv_state=conv_state,
            recurrent_state=recurrent_state,
            norm_eps=weights.norm_eps,
            policy=policy,
            **weights.arguments(),
        )
        outs.append(out)
    return np.concatenate(outs, axis=1), conv_state, recurrent_state


def relative(got: Array, expected: Array) -> float:
    got, expected = to_float(got, np.float64), to_float(expected, np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def assert_same(result: tuple[Array, DecodeState], expected: tuple[Array, ...]) -> None:
    """Within one rounding to the dtype that results are stored in: half a step, and a hair for the tie itself."""
    core_out, state = result
    bf16 = core_out.dtype == bfloat16()
    got = to_float(core_out, np.float64)
    np.testing.assert_allclose(got, expected[0], rtol=2.0**-8 if bf16 else 2e-7, atol=1e-9)
    assert state.conv_state.dtype == core_out.dtype
    np.testing.assert_array_equal(to_float(state.conv_state, np.float64), to_float(expected[1], np.float64))
    largest = np.abs(expected[2]).max()
    np.testing.assert_allclose(state.recurrent_state, expected[2], rtol=1e-7, atol=1e-11 * largest)


def heads(T: int, B: int = 2, Hv: int = 3, K: int = 16, V: int = 8, seed: int = 0) -> dict[str, Array]:
    """The chunk rule's arguments in float64: normalised q and k, decays from a token to a million tokens."""
    generator = np.random.default_rng(seed)
    q, k = (reference.l2norm(generator.standard_normal((B, Hv, T, K))) for _ in range(2))
    return {
        "q": q / np.sqrt(K),
        "k": k,
        "v": generator.standard_normal((B, Hv, T, V)),
        "g": -np.exp(generator.uniform(-14, 2, (B, Hv, T))),
        "beta": generator.uniform(0, 1, (B, Hv, T)),
        "S": generator.standard_normal((B, Hv, K, V)) + 0.3,
    }


def steps_of(x: dict[str, Array]) -> tuple[Array, Array]:
    S, outs = x["S"], []
    for t in range(x["q"].shape[2]):
        o, S = reference.delta_rule(*(x[n][:, :, t] for n in ("q", "k", "v", "g", "beta")), S)
        outs.append(o)
    return np.stack(outs, axis=2), S


@pytest.mark.parametrize("T", [1, 2, 3, 17, 64, 100])
def test_chunk_rule_is_the_recurrence(T: int) -> None:
    x = heads(T, seed=T)
    for got, expected in zip(chunk_rule(**x), steps_of(x), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11 * np.abs(expected).max())


def test_chunk_rule_where_a_token_forgets_everything() -> None:
    x = heads(40)
    x["g"][..., 7], x["g"][..., 8], x["g"][..., 20] = -np.inf, -1e300, -800
    x["beta"][..., 12], x["beta"][..., 13] = 0, 1
    for got, expected in zip(chunk_rule(**x), steps_of(x), strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11 * np.abs(expected).max())


def test_decays_as_differences_of_sums_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def differences(g: Array) -> Array:
        G = np.cumsum(g, axis=-1)
        return np.tril(np.exp(np.minimum(G[..., :, None] - G[..., None, :], 0)))

    x = heads(40)
    monkeypatch.setattr(module, "_decays", differences)
    np.testing.assert_allclose(chunk_rule(**x)[0], steps_of(x)[0], rtol=0, atol=1e-11)
    x["g"][..., 7] = -np.inf
    assert np.isnan(chunk_rule(**x)[0]).any()


@settings(max_examples=30)
@given(
    dims=st.sampled_from(
        [DIMS, BlockDims(128, 1, 1, 8, 12, 2), BlockDims(128, 3, 3, 5, 24, 8), BlockDims(256, 2, 4, 12, 4)]
    ),
    B=st.integers(1, 3),
    T=st.integers(1, 40),
    chunk=st.sampled_from([1, 2, 7, 16, 64]),
    fresh=st.booleans(),
    form=st.sampled_from(["fp32", "bf16"]),
)
def test_prefill_is_stepping(dims: BlockDims, B: int, T: int, chunk: int, fresh: bool, form: str) -> None:
    weights, hidden = weights_of(dims, form), tokens(B, T, dims, form)
    state = DecodeState.zeros(dims, B, form=form) if fresh else some_state(B, dims, form)
    before = state.conv_state.tobytes(), state.recurrent_state.tobytes()
    result = prefill(hidden, weights, None if fresh else state, chunk=chunk)
    assert result[0].dtype == hidden.dtype and result[0].shape == (B, T, dims.value_dim)
    assert_same(result, stepped(hidden, weights, state))
    assert before == (state.conv_state.tobytes(), state.recurrent_state.tobytes())


@pytest.mark.parametrize("T", [1, 2, 3, 4, 5])
def test_prompt_shorter_than_the_window(T: int) -> None:
    hidden, weights = tokens(2, T), weights_of()
    core_out, state = prefill(hidden, weights)
    assert_same((core_out, state), stepped(hidden, weights, DecodeState.zeros(DIMS, 2, form="fp32")))
    assert (state.conv_state[..., : max(0, DIMS.K_win - T)] == 0).all() and state.conv_state[..., -1].any()


def test_bf16_states_after_a_long_prompt_are_those_of_exact_steps() -> None:
    hidden, weights, state = tokens(2, 150, form="bf16"), weights_of(form="bf16"), some_state(2, form="bf16")
    core_out, after = prefill(hidden, weights, state)
    expected = stepped(hidden, weights, state, EXACT)
    assert (core_out == expected[0]).mean() > 0.999
    assert after.conv_state.tobytes() == expected[1].tobytes()
    assert relative(after.recurrent_state, expected[2]) < 5e-7


def test_float32_keeps_to_its_tolerance() -> None:
    hidden, weights, state = tokens(2, 200), weights_of(), some_state(2)
    core_out, after = prefill(hidden, weights, state, dtype=np.float32)
    exact_out, exact = prefill(hidden, weights, state)
    assert relative(core_out, exact_out) < FP32 and relative(after.recurrent_state, exact.recurrent_state) < FP32


def test_prompt_in_two_parts() -> None:
    hidden, weights = tokens(3, 50), weights_of()
    whole_out, whole = prefill(hidden, weights)
    first_out, first = prefill(hidden[:, :21], weights, chunk=8)
    second_out, second = prefill(hidden[:, 21:], weights, first, chunk=64)
    assert relative(np.concatenate([first_out, second_out], axis=1), whole_out) < 2e-7
    np.testing.assert_allclose(second.conv_state, whole.conv_state, rtol=1e-6, atol=1e-6)
    assert relative(second.recurrent_state, whole.recurrent_state) < 2e-7


def test_rows_do_not_leak_into_one_another() -> None:
    hidden, weights, state = tokens(3, 30), weights_of(), some_state(3)
    alone_out, alone = prefill(
        hidden[1:2], weights, DecodeState(state.conv_state[1:2], state.recurrent_state[1:2], DIMS)
    )
    hidden[0], state.recurrent_state[2], state.conv_state[2] = np.nan, np.nan, np.inf
    core_out, after = prefill(hidden, weights, state)
    np.testing.assert_allclose(core_out[1], alone_out[0], rtol=2e-7, atol=1e-9)
    np.testing.assert_allclose(after.recurrent_state[1], alone.recurrent_state[0], rtol=2e-7, atol=1e-9)


def test_zeroed_padding_on_the_left_leaves_no_trace() -> None:
    hidden, weights = tokens(2, 30), weights_of()
    padded = np.concatenate([np.zeros_like(hidden[:, :11]), hidden], axis=1)
    core_out, state = prefill(hidden, weights)
    padded_out, padded_state = prefill(padded, weights)
    np.testing.assert_allclose(padded_out[:, 11:], core_out, rtol=2e-7, atol=1e-9)
    np.testing.assert_allclose(padded_state.recurrent_state, state.recurrent_state, rtol=2e-7, atol=1e-9)


def test_extreme_input_gives_finite_results() -> None:
    weights = weights_of(A_log=np.array([100, -100, 88, 0, 3, -14], np.float32))
    hidden = tokens(2, 20)
    hidden[0, 3], hidden[0, 5], hidden[1, 4] = 0, 2.0**40, -(2.0**40)
    state = some_state(2)
    state.recurrent_state[0] *= 2.0**40
    result = prefill(hidden, weights, state)
    assert np.isfinite(result[0]).all() and np.isfinite(result[1].recurrent_state).all()
    assert_same(result, stepped(hidden, weights, state))


@pytest.mark.parametrize(
    "fault", ["tiled heads", "a column too wide", "state forgotten", "state transposed", "no beta in A"]
)
def test_faults_are_far_beyond_the_tolerance(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dims = BlockDims(H=128, Hk=2, Hv=4, K=16, V=16, K_win=4)  # K = V: a transposed state fits
    hidden, weights, state = tokens(2, 30, dims), weights_of(dims), some_state(2, dims)
    expected = stepped(hidden, weights, state)
    if fault == "tiled heads":
        monkeypatch.setattr(module, "expand_heads", lambda x, gqa: np.tile(x, (1, gqa, 1)))
    elif fault == "a column too wide":  # a window of K_win - 1 columns taken for one of K_win
        wide = np.concatenate([state.conv_state[..., 1:], np.zeros_like(state.conv_state[..., :1])], axis=-1)
        state = DecodeState(wide, state.recurrent_state, dims)
    elif fault == "state forgotten":
        state = DecodeState.zeros(dims, 2, form="fp32")
    elif fault == "state transposed":
        S = np.ascontiguousarray(state.recurrent_state.swapaxes(2, 3))
        state = DecodeState(state.conv_state, S, dims)
    else:
        solve = module._solve_unit_lower
        monkeypatch.setattr(module, "_solve_unit_lower", lambda A, right: solve(np.sign(A), right))
    core_out, after = prefill(hidden, weights, state)
    assert relative(core_out, expected[0]) > 1e-3
    with pytest.raises(AssertionError):
        assert_same((core_out, after), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": tokens(2, 3)[:, 0]}, r"hidden must have shape \[B, T, H\] with T >= 1 and H = 128, got \[2, 128\]"),
        ({"hidden": tokens(2, 3)[:, :0]}, r"hidden must have shape .* got \[2, 0, 128\]"),
        ({"hidden": tokens(2, 3)[..., :64]}, r"hidden must have shape .* got \[2, 3, 64\]"),
        ({"hidden": tokens(2, 3, form="bf16")}, "hidden must be float32 like the projections, got bfloat16"),
        ({"state": some_state(3)}, "state must have 2 rows in the fp32 form like hidden, got 3 in the fp32 form"),
        (
            {"state": some_state(2, form="bf16")},
            "state must have 2 rows in the fp32 form like hidden, got 2 in the bf16",
        ),
        (
            {"state": some_state(2, BlockDims(128, 2, 6, 8, 16))},
            r"state must have the dims of the weights, BlockDims\(",
        ),
        ({"chunk": 0}, "chunk must be a whole number from 1, got 0"),
        ({"chunk": 2.0}, r"chunk must be a whole number from 1, got 2\.0"),
        ({"dtype": np.float16}, "dtype must be float32 or float64, got float16"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"hidden": tokens(2, 3), "weights": weights_of(), **change}
    with pytest.raises(ValueError, match=message):
        prefill(**arguments)


@pytest.mark.parametrize("form", ["bf16", "fp32"])
def test_the_kernel_goes_on_from_the_state(form: str) -> None:
    dims = BlockDims(H=128, Hk=1, Hv=2, K=32, V=16, K_win=4)
    weights, hidden = weights_of(dims, form), tokens(2, 12, dims, form)
    _, state = prefill(hidden[:, :11], weights)
    core_out, conv_state, recurrent_state = gdn_block_tkg(
        np.ascontiguousarray(hidden[:, 11:]),
        **weights.arguments(),
        **state.arguments(),
        norm_eps=weights.norm_eps,
        backend="interpreter",
    )
    expected_out, expected = prefill(hidden, weights)
    assert relative(core_out, expected_out[:, 11:]) < (4e-3 if form == "bf16" else 2e-6)
    assert relative(conv_state, expected.conv_state) < (4e-3 if form == "bf16" else 1e-6)
    assert relative(recurrent_state, expected.recurrent_state) < (1e-3 if form == "bf16" else 1e-6)


# transformers


@pytest.mark.parametrize("T", [1, 5, 64, 150])
def test_transformers_chunk_rule(T: int) -> None:
    torch = pytest.importorskip("torch")
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    generator = np.random.default_rng(T)
    B, Hk, gqa, K, V = 2, 2, 3, 16, 8
    raw = {n: generator.standard_normal((B, T, Hk, K)).astype(np.float32) for n in ("query", "key")}
    raw["value"] = generator.standard_normal((B, T, Hk * gqa, V)).astype(np.float32)
    raw["g"] = -np.exp(generator.uniform(-10, 1, (B, T, Hk * gqa))).astype(np.float32)
    raw["beta"] = generator.uniform(0, 1, (B, T, Hk * gqa)).astype(np.float32)
    S = generator.standard_normal((B, Hk * gqa, K, V)).astype(np.float32)
    got_o, got_S = qwen.torch_chunk_gated_delta_rule(
        **{name: torch.from_numpy(array) for name, array in raw.items()},
        initial_state=torch.from_numpy(S),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    q, k = (
        np.repeat(reference.l2norm(raw[n].astype(np.float64)), gqa, axis=2).swapaxes(1, 2) for n in ("query", "key")
    )
    v, g, beta = (raw[name].astype(np.float64).swapaxes(1, 2) for name in ("value", "g", "beta"))
    o, S2 = chunk_rule(q / np.sqrt(K), k, v, g, beta, S.astype(np.float64))
    assert relative(got_o.numpy(), o.swapaxes(1, 2)) < FP32
    assert relative(got_S.numpy(), S2) < FP32


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def model(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    from gdn_kernels.small_models import small_model

    return small_model(request.param)


@pytest.mark.parametrize(("first", "second"), [(2, 40), (70, 3)])
def test_the_layers_own_prefill(model: Any, first: int, second: int) -> None:
    import torch
    import transformers

    layer = model.model.layers[0].linear_attn
    weights = BlockWeights.from_layer(layer)
    cache = transformers.DynamicCache(config=model.config)
    hidden = torch.randn(3, first + second, 128, generator=torch.Generator().manual_seed(0))
    state = None
    for part in hidden.split([first, second], dim=1):  # the second goes on from the states of the first
        with torch.no_grad():
            expected = layer(part, cache=cache).numpy()
        core_out, state = prefill(part.numpy(), weights, state)
        held = DecodeState.from_cache(cache, 0, weights.dims)
        assert relative(core_out @ weights.out_proj, expected) < FP32
        assert relative(state.conv_state, held.conv_state) < 1e-6
        assert relative(state.recurrent_state, held.recurrent_state) < FP32


def test_the_layers_own_prefill_in_bf16(model: Any) -> None:
    # transformers rounds a dozen intermediates to bf16, and A_log with the rest of the module.
    import copy
    import warnings

    import torch
    import transformers

    layer = copy.deepcopy(model.model.layers[0].linear_attn).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = BlockWeights.from_layer(layer)
    cache = transformers.DynamicCache(config=model.config)
    hidden = torch.randn(2, 50, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        layer(hidden, cache=cache)
    _, state = prefill(hidden.view(torch.uint16).numpy().view(bfloat16()), weights)
    held = DecodeState.from_cache(cache, 0, weights.dims)
    assert relative(state.conv_state, held.conv_state) < 1e-3
    assert relative(state.recurrent_state, held.recurrent_state) < 1e-2
