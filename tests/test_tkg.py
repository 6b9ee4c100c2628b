"""The recurrence kernel alone against the float64 reference."""

import numpy as np
import pytest
from arguments import check_output, check_state, rows, tkg_arguments
from hypothesis import given, settings
from hypothesis import strategies as st

from gdn_kernels import gdn_tkg, reference
from gdn_kernels.policy import UNROUNDED

PER_ROW = ("q", "k", "v", "b", "a", "z", "state_in")


def check(arguments: dict[str, np.ndarray], results: tuple[np.ndarray, np.ndarray]) -> None:
    exact_out, exact_state = reference.gdn_tkg(**arguments, policy=UNROUNDED)
    check_state(results[1][None], exact_state[None])
    check_output(results[0], exact_out)


def same_bytes(left: tuple[np.ndarray, ...], right: tuple[np.ndarray, ...]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


@settings(max_examples=25)
@given(
    B=st.integers(1, 5),
    Hv=st.integers(1, 17),
    K=st.sampled_from([1, 4, 24, 64, 100, 128]),
    V=st.sampled_from([9, 32, 128]),
    form=st.sampled_from(["bf16", "fp32"]),
    seed=st.integers(0, 99),
)
def test_any_shape(B: int, Hv: int, K: int, V: int, form: str, seed: int) -> None:
    arguments = tkg_arguments(B, Hv, K, V, form, seed)
    results = gdn_tkg(**arguments, lnc=1)
    check(arguments, results)
    assert same_bytes(results, gdn_tkg(**arguments, lnc=2))
    last = gdn_tkg(**rows(arguments, PER_ROW, slice(B - 1, B), per_row=Hv), lnc=1)
    assert same_bytes(last, tuple(result[(B - 1) * Hv :] for result in results))


@pytest.mark.parametrize("tau", [1e-3, 1.0, 30.0, 1e3, 1e6, 1e9])
def test_short_and_long_memory(tau: float) -> None:
    """Heads whose decay is exp(-1 / tau)."""
    arguments = tkg_arguments(2, 8, 128, 128, "fp32")
    arguments["a"][:] = 0
    arguments["A_log"][:] = np.log(1 / tau) - np.log(np.log1p(np.exp(arguments["dt_bias"].astype(np.float64))))
    check(arguments, gdn_tkg(**arguments))


def test_a_transposed_state_and_a_presigmoided_b_are_seen() -> None:
    arguments = tkg_arguments(2, 4, 128, 128)
    faults = {
        "state_in": np.ascontiguousarray(arguments["state_in"].swapaxes(1, 2)),
        "b": (1 / (1 + np.exp(-arguments["b"]))).astype(np.float32),
        "a": arguments["b"],
        "q": arguments["k"],
        "norm_weight": arguments["norm_weight"] + 1,
    }
    for name, value in faults.items():
        with pytest.raises(AssertionError):
            check(arguments, gdn_tkg(**{**arguments, name: value}))


def test_many_sequences_are_tiled() -> None:
    arguments = tkg_arguments(70, 3, 8, 8)
    check(arguments, gdn_tkg(**arguments))


def test_an_empty_batch_gives_empty_results() -> None:
    out, state = gdn_tkg(**tkg_arguments(0, 4, 16, 8))
    assert (out.shape, state.shape, state.dtype) == ((0, 8), (0, 16, 8), np.float32)


@pytest.mark.parametrize("name", ["q", "k", "v", "z", "b", "a", "state_in"])
@pytest.mark.parametrize("value", [0.0, 3.3e38, -3.3e38, 2.0**40])
def test_extreme_rows_stay_finite(name: str, value: float) -> None:
    arguments = tkg_arguments(2, 2, 16, 8)
    arguments[name][0] = value
    with np.errstate(all="ignore"):
        exact = reference.gdn_tkg(**arguments)
    results = gdn_tkg(**arguments)
    for result, true in zip(results, exact, strict=True):
        reachable = np.isfinite(np.asarray(true, np.float32))
        assert np.isfinite(np.asarray(result, np.float32)[reachable]).all()
