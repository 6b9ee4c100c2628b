"""Random arguments for the three calls, and the bars their results must meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gdn_kernels import BlockDims, reference
from gdn_kernels.dtypes import bfloat16
from gdn_kernels.metrics import bf16_steps, projection_misses, relative_error, unequal_share, worst_head_error
from gdn_kernels.policy import UNROUNDED

Array = npt.NDArray[Any]
Arguments = dict[str, Array]

STATE, WORST_HEAD, UNEQUAL = 5e-7, 1e-6, 1e-3


def form_dtype(form: str) -> np.dtype[Any]:
    return bfloat16() if form == "bf16" else np.dtype(np.float32)


def block_arguments(dims: BlockDims, B: int, form: str = "bf16", seed: int = 0) -> Arguments:
    """Unit-variance activations, an asymmetric non-zero state, decays from a token to a million tokens."""
    rng = np.random.default_rng(seed)
    dtype = form_dtype(form)

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return rng.standard_normal(shape) * scale

    def weight(columns: int) -> Array:
        return normal(dims.H, columns, scale=dims.H**-0.5).astype(dtype)

    return {
        "hidden": normal(B, 1, dims.H).astype(dtype),
        "W_in_qkv": weight(dims.conv_dim),
        "W_in_z": weight(dims.value_dim),
        "W_in_a": weight(dims.Hv),
        "W_in_b": weight(dims.Hv),
        "conv_weight": normal(dims.conv_dim, dims.K_win, scale=0.5).astype(np.float32),
        "conv_state": normal(B, dims.conv_dim, dims.K_win).astype(dtype),
        "A_log": rng.uniform(-14, 1, dims.Hv).astype(np.float32),
        "dt_bias": normal(dims.Hv).astype(np.float32),
        "norm_weight": (1 + normal(dims.V, scale=0.2)).astype(np.float32),
        "recurrent_state": (normal(B, dims.Hv, dims.K, dims.V) + 0.3).astype(np.float32),
    }


def tkg_arguments(B: int, Hv: int, K: int, V: int, form: str = "bf16", seed: int = 0) -> Arguments:
    rng = np.random.default_rng(seed)
    dtype = form_dtype(form)
    BH = B * Hv
    return {
        "q": rng.standard_normal((BH, K)).astype(dtype),
        "k": rng.standard_normal((BH, K)).astype(dtype),
        "v": rng.standard_normal((BH, V)).astype(dtype),
        "b": rng.standard_normal(BH).astype(np.float32),
        "a": rng.standard_normal(BH).astype(np.float32),
        "A_log": rng.uniform(-14, 1, Hv).astype(np.float32),
        "dt_bias": rng.standard_normal(Hv).astype(np.float32),
        "z": rng.standard_normal((BH, V)).astype(dtype),
        "norm_weight": (1 + 0.2 * rng.standard_normal(V)).astype(np.float32),
        "state_in": (rng.standard_normal((BH, K, V)) + 0.3).astype(np.float32),
    }


def check_block(arguments: Arguments, results: tuple[Array, Array, Array]) -> None:
    """Hold the results of `gdn_block_tkg` to the reference: the window, and what follows from that very window."""
    core_out, window, state = results
    form = "fp32" if core_out.dtype == np.float32 else "bf16"
    exact_out, _, exact_state = reference.gdn_block_tkg(**arguments, window=window, policy=UNROUNDED)
    assert window[..., :-1].tobytes() == np.ascontiguousarray(arguments["conv_state"][..., 1:]).tobytes()
    _, wrong = projection_misses(window[..., -1], arguments["hidden"][:, 0], arguments["W_in_qkv"], form)
    assert wrong == 0
    check_state(state, exact_state)
    check_output(core_out, exact_out)


def check_state(state: Array, exact: Array) -> None:
    assert state.dtype == np.float32
    assert relative_error(state, exact) <= STATE
    assert worst_head_error(state, exact) <= WORST_HEAD


def check_output(out: Array, exact: Array) -> None:
    """bf16: all but a thousandth equal, the rest within a step. fp32: the relative error of an fp32 computation."""
    if out.dtype == np.float32:
        assert relative_error(out, exact) <= 2e-6
    else:
        # A small result has few elements: one at a tie is no fault.
        assert unequal_share(out, exact) * out.size <= max(1, UNEQUAL * out.size)
        assert bf16_steps(out, exact).max(initial=0) <= 1


def rows(arguments: Arguments, names: tuple[str, ...], pick: slice, per_row: int = 1) -> Arguments:
    """The arguments with the batch rows `pick` only, of those in `names`."""
    wide = slice(pick.start * per_row, pick.stop * per_row)
    return {name: value[wide] if name in names else value for name, value in arguments.items()}
