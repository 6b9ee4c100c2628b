"""The reference against independent loops in extended precision; its properties; faults that must show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdn_kernels import reference
from gdn_kernels.dims import BlockDims
from gdn_kernels.dtypes import bfloat16, round_to, to_float
from gdn_kernels.policy import EXACT, HF_BF16, NKILIB, SITES, UNROUNDED, Roundings

pytestmark = pytest.mark.filterwarnings("error")

Array = np.ndarray[Any, Any]
WIDE = np.longdouble
DIMS = BlockDims(H=128, Hk=2, Hv=4, K=24, V=40, K_win=4)


def block_arguments(dims: BlockDims, B: int, seed: int = 0, form: str = "bf16") -> dict[str, Array]:
    """Random arguments of gdn_block_tkg; half of the heads forget slowly, the states are far from symmetric."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    arguments = {
        "hidden": normal(B, 1, dims.H),
        "W_in_qkv": normal(dims.H, dims.conv_dim, scale=dims.H**-0.5),
        "W_in_z": normal(dims.H, dims.value_dim, scale=dims.H**-0.5),
        "W_in_a": normal(dims.H, dims.Hv, scale=dims.H**-0.5),
        "W_in_b": normal(dims.H, dims.Hv, scale=dims.H**-0.5),
        "conv_weight": normal(dims.conv_dim, dims.K_win, scale=0.5),
        "conv_state": normal(B, dims.conv_dim, dims.K_win),
        "A_log": np.where(np.arange(dims.Hv) % 2, -8, 1).astype(np.float32) + normal(dims.Hv, scale=0.3),
        "dt_bias": normal(dims.Hv),
        "norm_weight": 1 + normal(dims.V, scale=0.2),
        "recurrent_state": normal(B, dims.Hv, dims.K, dims.V) + np.arange(dims.V, dtype=np.float32) / dims.V,
    }
    if form == "bf16":
        for name in ("hidden", "W_in_qkv", "W_in_z", "W_in_a", "W_in_b", "conv_state"):
            arguments[name] = arguments[name].astype(bfloat16())
    return arguments


def wide(x: Array) -> Array:
    return to_float(x, np.float64).astype(WIDE)


def naive_block(x: dict[str, Array], dims: BlockDims, window: Array, norm_eps: float = 1e-6) -> tuple[Array, Array]:
    """core_out and the new state in extended precision, one head and one channel at a time, given the window."""
    x = {name: wide(array) for name, array in x.items()}
    window = wide(window)
    core_out, state = [], np.empty_like(x["recurrent_state"])

    def silu(t: Any) -> Any:
        return t / (1 + np.exp(-t))

    for row in range(len(x["hidden"])):
        h = x["hidden"][row, 0]
        c = []
        for channel in range(dims.conv_dim):
            total = WIDE(0)
            for tap in range(dims.K_win):
                total += window[row, channel, tap] * x["conv_weight"][channel, tap]
            c.append(silu(total))
        for head in range(dims.Hv):
            key_head = head // dims.gqa
            q = np.array(c[key_head * dims.K : (key_head + 1) * dims.K])
            k = np.array(c[dims.key_dim + key_head * dims.K : dims.key_dim + (key_head + 1) * dims.K])
            v = np.array(c[2 * dims.key_dim + head * dims.V : 2 * dims.key_dim + (head + 1) * dims.V])
            q = q / np.sqrt((q * q).sum() + WIDE(1e-6)) / np.sqrt(WIDE(dims.K))
            k = k / np.sqrt((k * k).sum() + WIDE(1e-6))
            a = (h * x["W_in_a"][:, head]).sum()
            b = (h * x["W_in_b"][:, head]).sum()
            decay = np.exp(-np.exp(x["A_log"][head]) * np.log(1 + np.exp(a + x["dt_bias"][head])))
            S = x["recurrent_state"][row, head] * decay
            for j in range(dims.V):
                delta = (v[j] - (k * S[:, j]).sum()) / (1 + np.exp(-b))
                S[:, j] += k * delta
            state[row, head] = S
            o = np.array([(q * S[:, j]).sum() for j in range(dims.V)])
            z = (h[:, None] * x["W_in_z"][:, head * dims.V : (head + 1) * dims.V]).sum(0)
            core_out.append(o / np.sqrt((o * o).mean() + WIDE(norm_eps)) * x["norm_weight"] * silu(z))
    return np.array(core_out).reshape(len(x["hidden"]), 1, dims.value_dim), state


def error(got: Array, expected: Array) -> float:
    """Relative Frobenius norm of the difference."""
    expected = wide(expected)
    return float(np.linalg.norm((wide(got) - expected).ravel()) / np.linalg.norm(expected.ravel()))


# --- the block ---


@settings(max_examples=30)
@given(
    Hk=st.integers(1, 3), gqa=st.integers(1, 4), B=st.integers(1, 3), K_win=st.integers(2, 8), seed=st.integers(0, 99)
)
def test_block_against_extended_precision(Hk: int, gqa: int, B: int, K_win: int, seed: int) -> None:
    dims = BlockDims(H=128, Hk=Hk, Hv=Hk * gqa, K=12, V=20, K_win=K_win)
    x = block_arguments(dims, B, seed)
    core_out, window, state = reference.gdn_block_tkg(**x, norm_eps=1e-5, policy=UNROUNDED)
    expected_core, expected_state = naive_block(x, dims, window, norm_eps=1e-5)
    assert error(core_out, expected_core) < 1e-13
    assert error(state, expected_state) < 1e-14
    qkv = (wide(x["hidden"]) @ wide(x["W_in_qkv"]))[:, 0]
    np.testing.assert_array_equal(window[..., :-1], x["conv_state"][..., 1:])
    np.testing.assert_allclose(wide(window[..., -1]), qkv.astype(float), rtol=2.0**-8)


def test_float32_run_is_float32_throughout() -> None:
    x = block_arguments(DIMS, 3)
    exact = reference.gdn_block_tkg(**x, policy=UNROUNDED)
    single = reference.gdn_block_tkg(**x, policy=UNROUNDED, dtype=np.float32, window=exact[1])
    assert single[0].dtype == single[2].dtype == np.float32
    assert 1e-8 < error(single[0], exact[0]) < 1e-6
    assert 1e-8 < error(single[2], exact[2]) < 3e-7


@pytest.mark.parametrize("form", ["bf16", "fp32"])
def test_exact_rounds_its_three_results_and_nothing_else(form: str) -> None:
    x = block_arguments(DIMS, 2, form=form)
    core_out, window, state = reference.gdn_block_tkg(**x)
    dtype = np.dtype(np.float32) if form == "fp32" else bfloat16()
    assert (core_out.dtype, window.dtype, state.dtype) == (dtype, dtype, np.float32)
    full_core, full_window, full_state = reference.gdn_block_tkg(**x, policy=UNROUNDED)
    assert full_core.dtype == full_state.dtype == np.float64
    np.testing.assert_array_equal(window, full_window)
    np.testing.assert_array_equal(to_float(core_out, np.float64), round_to(full_core, form))
    np.testing.assert_array_equal(state, full_state.astype(np.float32))


def test_given_window_is_used_and_returned() -> None:
    x = block_arguments(DIMS, 2)
    window = np.flip(x["conv_state"], axis=0)
    core_out, returned, state = reference.gdn_block_tkg(**x, window=window, policy=UNROUNDED)
    np.testing.assert_array_equal(returned, window)
    expected_core, expected_state = naive_block(x, DIMS, window)
    assert error(core_out, expected_core) < 1e-13 and error(state, expected_state) < 1e-14


@pytest.mark.parametrize("policy", [EXACT, HF_BF16, NKILIB], ids=lambda policy: policy.name)
def test_dead_column_never_matters(policy: Roundings) -> None:
    x = block_arguments(DIMS, 3)
    before = reference.gdn_block_tkg(**x, policy=policy)
    x["conv_state"][..., 0] = np.nan
    for got, expected in zip(reference.gdn_block_tkg(**x, policy=policy), before, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_row_of_a_batch_is_that_row_alone() -> None:
    x = block_arguments(DIMS, 5)
    together = reference.gdn_block_tkg(**x, policy=UNROUNDED)
    for row in range(5):
        batched = ("hidden", "conv_state", "recurrent_state")
        alone = {name: array[row : row + 1] if name in batched else array for name, array in x.items()}
        for got, expected in zip(reference.gdn_block_tkg(**alone, policy=UNROUNDED), together, strict=True):
            # Not bytes: BLAS sums in another order for another number of rows.
            np.testing.assert_allclose(to_float(got[0], float), to_float(expected[row], float), rtol=1e-9, atol=1e-13)


def test_empty_batch_gives_empty_results() -> None:
    core_out, window, state = reference.gdn_block_tkg(**block_arguments(DIMS, 0))
    assert core_out.shape == (0, 1, DIMS.value_dim) and core_out.dtype == bfloat16()
    assert window.shape == (0, DIMS.conv_dim, DIMS.K_win)
    assert state.shape == (0, DIMS.Hv, DIMS.K, DIMS.V)


def test_inputs_are_not_written() -> None:
    x = block_arguments(DIMS, 2, form="fp32")
    copies = {name: array.copy() for name, array in x.items()}
    reference.gdn_block_tkg(**x, dtype=np.float32)
    for name, array in x.items():
        np.testing.assert_array_equal(array, copies[name])


def test_bad_input_is_named() -> None:
    x = block_arguments(DIMS, 2)
    with pytest.raises(ValueError, match=r"^hidden must be bfloat16 or float32, got float64"):
        reference.gdn_block_tkg(**{**x, "hidden": to_float(x["hidden"], np.float64)})
    with pytest.raises(ValueError, match=r"^dt_bias must have shape \[Hv\] = \[4\].*got \[5\]"):
        reference.gdn_block_tkg(**{**x, "dt_bias": np.zeros(5, np.float32)})


# --- the inner kernels ---


def test_inner_kernels_compose_to_the_block() -> None:
    B, dims = 3, DIMS
    x = block_arguments(dims, B)
    core_out, window, state = reference.gdn_block_tkg(**x)
    qkv, z, a, b = (
        (to_float(x["hidden"], np.float64)[:, 0] @ to_float(x[f"W_in_{name}"], np.float64)).astype(np.float32)
        for name in ("qkv", "z", "a", "b")
    )
    conv_arguments = (qkv.astype(bfloat16())[..., None], x["conv_state"], x["conv_weight"])
    rounded, conv_window = reference.gdn_conv1d_decode(*conv_arguments)
    assert rounded.dtype == bfloat16()
    np.testing.assert_array_equal(conv_window, window)
    c, _ = reference.gdn_conv1d_decode(*conv_arguments, policy=UNROUNDED)
    np.testing.assert_array_equal(rounded, c.astype(bfloat16()))
    q, k, v = reference.split_heads(c[..., 0].astype(np.float32), dims)
    q, k = (reference.expand_heads(t, dims.gqa).reshape(-1, dims.K) for t in (q, k))
    out, state_out = reference.gdn_tkg(
        *(q, k, v.reshape(-1, dims.V), b.ravel(), a.ravel(), x["A_log"], x["dt_bias"], z.reshape(-1, dims.V)),
        *(x["norm_weight"], x["recurrent_state"].reshape(-1, dims.K, dims.V)),
    )
    assert out.dtype == np.float32  # the fp32 form, by q
    assert error(out.reshape(core_out.shape), reference.gdn_block_tkg(**x, policy=UNROUNDED)[0]) < 3e-7
    assert error(state_out.reshape(state.shape), state) < 1e-7


def test_gdn_tkg_of_an_odd_batch_and_none() -> None:
    rng = np.random.default_rng(1)

    def heads(BH: int) -> list[Array]:
        shapes = [(BH, 8), (BH, 8), (BH, 6), (BH,), (BH,), (3,), (3,), (BH, 6), (6,), (BH, 8, 6)]
        return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]

    x = heads(9)
    out, _ = reference.gdn_tkg(*x)
    fourth = [t if t.shape in ((3,), (6,)) else t[3:6] for t in x]
    np.testing.assert_allclose(reference.gdn_tkg(*fourth)[0], out[3:6], rtol=1e-6)
    assert reference.gdn_tkg(*heads(0))[1].shape == (0, 8, 6)
    with pytest.raises(ValueError, match="multiple of Hv = 3"):
        reference.gdn_tkg(*heads(7))


# --- stages at extremes ---

HUGE = [0.0, 1e-38, 1.0, 30.0, 88.0, 1e4, 1e30, 3e38]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scalar_functions_at_extremes(dtype: Any) -> None:
    x = np.array([*HUGE, *(-t for t in HUGE)], dtype)
    with np.errstate(under="ignore"):
        wide_x = x.astype(WIDE)
        expected = {
            "sigmoid": np.where(x > -1e4, 1 / (1 + np.exp(-np.maximum(wide_x, -1e4))), 0),
            "softplus": np.where(x > 1e3, wide_x, np.log1p(np.exp(np.minimum(wide_x, 1e3)))),
        }
    for name, values in expected.items():
        got = getattr(reference, name)(x)
        assert got.dtype == dtype
        np.testing.assert_allclose(got, values.astype(dtype), rtol=4 * np.finfo(dtype).eps, atol=np.finfo(dtype).tiny)
    assert np.isfinite(reference.silu(x)).all()


@given(A_log=st.floats(-1e3, 1e3, width=32), a=st.floats(-1e3, 1e3, width=32), dt_bias=st.floats(-100, 100, width=32))
def test_gates_against_extended_precision(A_log: float, a: float, dt_bias: float) -> None:
    x = WIDE(a) + WIDE(dt_bias)
    softplus = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    expected = np.exp(-np.exp(WIDE(A_log)) * softplus)
    g, _ = reference.gates(*(np.array([t]) for t in (a, 0.0, A_log, dt_bias)))
    np.testing.assert_allclose(np.exp(g), [float(expected)], rtol=1e-11, atol=1e-300)


@pytest.mark.parametrize(
    ("A_log", "a", "decay"),
    [
        (1000, -1000, np.exp(-1)),
        (1000, -300, 0),
        (1000, 300, 0),
        (3e38, -3e38, np.exp(-1)),
        (-3e38, 3e38, 1),
        (-1000, -1000, 1),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gates_at_extremes(A_log: float, a: float, decay: float, dtype: Any) -> None:
    g, beta = reference.gates(*(np.array([t], dtype) for t in (a, a, A_log, 0)))
    assert g.dtype == beta.dtype == dtype
    np.testing.assert_allclose(np.exp(g), [decay], rtol=1e-6)
    np.testing.assert_allclose(beta, [a > 0], atol=1e-100)


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-6, 1.0, 2.0**40, 3e38])
@pytest.mark.parametrize("name", ["hidden", "conv_state", "conv_weight", "A_log", "dt_bias", "recurrent_state"])
@pytest.mark.parametrize("form", ["bf16", "fp32"])
def test_finite_wherever_the_exact_result_is(name: str, scale: float, form: str) -> None:
    x = block_arguments(DIMS, 2, form=form)
    x[name] = (np.sign(to_float(x[name], np.float64)) * scale).astype(x[name].dtype)
    core_out, window, state = reference.gdn_block_tkg(**x, policy=UNROUNDED)
    if not np.isfinite(to_float(window, np.float64)).all():
        assert (name, scale) == ("hidden", 3e38)  # qkv is beyond bfloat16
        return
    assert np.isfinite(core_out).all() and np.isfinite(state).all()
    for got in reference.gdn_block_tkg(**x):  # an infinity only where a result is too large for its format
        assert not np.isnan(to_float(got, np.float64)).any()
    if scale <= 2.0**40:
        for got in reference.gdn_block_tkg(**x, dtype=np.float32):
            assert np.isfinite(to_float(got, np.float32)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_all_zero_rows(dtype: Any) -> None:
    x = block_arguments(DIMS, 2)
    for name in ("hidden", "conv_state", "recurrent_state"):
        x[name][0] = 0
    core_out, window, state = reference.gdn_block_tkg(**x, dtype=dtype)
    assert not to_float(core_out[0], float).any() and not to_float(window[0], float).any() and not state[0].any()
    assert to_float(core_out[1], float).any() and state[1].any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_norms_of_rows_whose_squares_overflow(dtype: Any) -> None:
    x = np.full((2, 3), 1e30, dtype)
    assert np.isfinite(reference.l2norm(x)).all()
    assert np.isfinite(reference.gated_norm(x, np.ones_like(x), np.ones(3, dtype), 1e-6)).all()


# --- roundings ---


def all_bfloat16() -> Array:
    values = np.arange(2**16, dtype=np.uint16).view(bfloat16()).astype(np.float32)
    return np.sort(values[np.isfinite(values)])


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16), ("fp8_e4m3", ml_dtypes.float8_e4m3)]
)
@pytest.mark.parametrize("of", [np.float32, np.float64])
def test_formats_are_those_of_ml_dtypes(name: str, dtype: Any, of: Any) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    near = np.random.default_rng(1).normal(0, 100, 100_000)  # where fp16 and fp8 neither overflow nor vanish
    with np.errstate(all="ignore"):  # random bits hold signalling NaNs; ml_dtypes warns of overflow
        x = np.concatenate([bits.view(np.float32), near.astype(np.float32), [0.0, -0.0, np.inf, -np.inf, np.nan]])
        expected = x.astype(np.float32).astype(dtype).astype(of)
        x = x.astype(of)
    got = round_to(x, name)
    assert got.dtype == of
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(expected), strict=True)


def test_float64_is_rounded_once() -> None:
    values = all_bfloat16().astype(np.float64)
    low, high = values[:-1], values[1:]
    tie = low / 2 + high / 2  # exact in float64
    even = np.where(low.astype(bfloat16()).view(np.uint16) % 2 == 0, low, high)
    np.testing.assert_array_equal(round_to(tie, "bf16"), even)
    # Half an ulp of float64 away from the tie: a detour by float32 would fall on the tie.
    np.testing.assert_array_equal(round_to(np.nextafter(tie, np.inf), "bf16"), high)
    np.testing.assert_array_equal(round_to(np.nextafter(tie, -np.inf), "bf16"), low)
    twice = round_to(round_to(np.nextafter(tie, np.inf), "fp32"), "bf16")
    assert (twice != high).mean() > 0.4
    for name, step in (("fp16", 2.0**-10), ("fp8_e4m3", 2.0**-3)):
        assert round_to(np.array(1 + step / 2 + 2.0**-40), name) == 1 + step
        assert round_to(np.array(1 + step / 2), name) == 1


def test_bad_roundings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"name must be one of fp32, .*got 'bf8'"):
        round_to(np.zeros(1), "bf8")
    with pytest.raises(ValueError, match="x must be float32 or float64, got int64"):
        round_to(np.zeros(1, np.int64), "bf16")
    with pytest.raises(ValueError, match=r"site must be one of .*got 'kk'"):
        Roundings("typo", {"kk": "bf16"})
    with pytest.raises(ValueError, match=r"table\['k'\] must be one of .*got 'bf8'"):
        Roundings("typo", {"k": "bf8"})
    with pytest.raises(ValueError, match=r"site must be one of .*got 'kk'"):
        EXACT.round("kk", np.zeros(1))


def test_every_site_is_reached_and_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    original = Roundings.round

    def recording(self: Roundings, site: str, x: Array) -> Array:
        seen.append(site)
        return original(self, site, x)

    x = block_arguments(DIMS, 2, form="fp32")
    conv_arguments = (x["conv_state"][..., :1], x["conv_state"], x["conv_weight"])
    monkeypatch.setattr(Roundings, "round", recording)
    reference.gdn_block_tkg(**x)
    assert len(set(seen)) == len(SITES) - 1
    assert [site for site in SITES if site not in seen] == ["conv_out"]
    monkeypatch.undo()
    exact = (*reference.gdn_block_tkg(**x), *reference.gdn_conv1d_decode(*conv_arguments))
    for site in SITES:
        policy = Roundings(site, {**EXACT.table, site: "fp8_e4m3"})
        results = (
            *reference.gdn_block_tkg(**x, policy=policy),
            *reference.gdn_conv1d_decode(*conv_arguments, policy=policy),
        )
        errors = [error(got, expected) for got, expected in zip(results, exact, strict=True)]
        assert max(errors) > 1e-4, site


@pytest.mark.parametrize(("policy", "core", "state"), [(HF_BF16, 2e-2, 8e-3), (NKILIB, 2e-2, 2e-3)])
def test_coarser_policies_stay_near_exact(policy: Roundings, core: float, state: float) -> None:
    x = block_arguments(DIMS, 3)
    exact = reference.gdn_block_tkg(**x)
    rounded = reference.gdn_block_tkg(**x, policy=policy)
    np.testing.assert_array_equal(rounded[1], exact[1])
    assert 1e-3 < error(rounded[0], exact[0]) < core
    assert 1e-5 < error(rounded[2], exact[2]) < state


# --- negative controls: each fault must turn the comparison with extended precision red ---


def transposed_state(x: dict[str, Array], run: Callable[..., Any], _: pytest.MonkeyPatch) -> Any:
    return run(**{**x, "recurrent_state": np.swapaxes(x["recurrent_state"], 2, 3).copy()})


def tiled_heads(x: dict[str, Array], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(reference, "expand_heads", lambda t, gqa: np.tile(t, (1, gqa, 1)))
    return run(**x)


def pre_sigmoided_b(x: dict[str, Array], run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    gates = reference.gates
    monkeypatch.setattr(reference, "gates", lambda a, b, *rest: gates(a, reference.sigmoid(b), *rest))
    return run(**x)


def gain_of_one_plus_w(x: dict[str, Array], run: Callable[..., Any], _: pytest.MonkeyPatch) -> Any:
    return run(**{**x, "norm_weight": 1 + x["norm_weight"]})


def window_of_one_column_less(x: dict[str, Array], run: Callable[..., Any], _: pytest.MonkeyPatch) -> Any:
    taps = x["conv_weight"].copy()
    taps[:, 0] = 0
    return run(**{**x, "conv_weight": taps})


def tap_order_reversed(x: dict[str, Array], run: Callable[..., Any], _: pytest.MonkeyPatch) -> Any:
    return run(**{**x, "conv_weight": x["conv_weight"][:, ::-1]})


def no_fault(x: dict[str, Array], run: Callable[..., Any], _: pytest.MonkeyPatch) -> Any:
    return run(**x)


@pytest.mark.parametrize(
    ("fault", "touches_state"),
    [
        (no_fault, None),
        (transposed_state, True),
        (tiled_heads, True),
        (pre_sigmoided_b, True),
        (gain_of_one_plus_w, False),
        (window_of_one_column_less, True),
        (tap_order_reversed, True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_faults_show(fault: Callable[..., Any], touches_state: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    dims = replace(DIMS, K=24, V=24)  # square, so that a transposed state has a legal shape
    x = block_arguments(dims, 2)
    core_out, window, state = fault(x, lambda **y: reference.gdn_block_tkg(**y, policy=UNROUNDED), monkeypatch)
    expected_core, expected_state = naive_block(x, dims, window)
    if touches_state is None:
        assert error(core_out, expected_core) < 1e-13 and error(state, expected_state) < 1e-14
    else:
        assert error(core_out, expected_core) > 2e-2
        assert (error(state, expected_state) > 8e-3) == touches_state
