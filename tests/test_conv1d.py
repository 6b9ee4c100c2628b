"""The conv step alone against the float64 reference."""

import numpy as np
from arguments import check_output, form_dtype
from hypothesis import given, settings
from hypothesis import strategies as st

from gdn_kernels import gdn_conv1d_decode, reference
from gdn_kernels.policy import UNROUNDED


def conv_arguments(B: int, C: int, K_win: int, form: str, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    dtype = form_dtype(form)
    return {
        "x": rng.standard_normal((B, C, 1)).astype(dtype),
        "conv_state": rng.standard_normal((B, C, K_win)).astype(dtype),
        "conv_weight": rng.standard_normal((C, K_win)).astype(np.float32),
    }


@settings(max_examples=30)
@given(
    B=st.integers(1, 6),
    C=st.sampled_from([1, 2, 3, 127, 128, 129, 255, 256, 300, 513]),
    K_win=st.integers(2, 8),
    form=st.sampled_from(["bf16", "fp32"]),
    seed=st.integers(0, 99),
)
def test_any_shape(B: int, C: int, K_win: int, form: str, seed: int) -> None:
    arguments = conv_arguments(B, C, K_win, form, seed)
    out, window = gdn_conv1d_decode(**arguments, lnc=1)
    exact = reference.gdn_conv1d_decode(**arguments, policy=UNROUNDED)[0]
    expected = np.concatenate([arguments["conv_state"][..., 1:], arguments["x"]], -1)
    assert window.tobytes() == expected.tobytes()
    check_output(out[..., 0], exact[..., 0])
    two = gdn_conv1d_decode(**arguments, lnc=2)
    assert (out.tobytes(), window.tobytes()) == (two[0].tobytes(), two[1].tobytes())
    arguments["conv_state"][..., 0] = np.nan
    assert gdn_conv1d_decode(**arguments)[0].tobytes() == out.tobytes()


def test_many_sequences_are_tiled() -> None:
    arguments = conv_arguments(130, 5, 4, "bf16", 0)
    out, _ = gdn_conv1d_decode(**arguments)
    alone, _ = gdn_conv1d_decode(**{**arguments, **{n: arguments[n][129:] for n in ("x", "conv_state")}})
    assert out[129:].tobytes() == alone.tobytes()


def test_an_empty_batch_gives_empty_results() -> None:
    out, window = gdn_conv1d_decode(**conv_arguments(0, 7, 4, "fp32", 0))
    assert (out.shape, window.shape, out.dtype) == ((0, 7, 1), (0, 7, 4), np.float32)
