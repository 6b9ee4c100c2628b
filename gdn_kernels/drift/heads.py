"""The layer that a rollout decodes with: its weights and first state, and heads of the memory lengths asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gdn_kernels.dims import BlockDims
from gdn_kernels.drift.config import RolloutConfig
from gdn_kernels.drift.noise import generator
from gdn_kernels.dtypes import Array, bfloat16, to_fp32
from gdn_kernels.weights import BlockWeights

WEIGHTS, STATES = 1, 2  # purposes of `noise.generator`
TAU = (1.0, 1e6)  # without a checkpoint and without a wish
OLDER_TAPS = 0.2  # of the conv, beside 1 for the newest: independent tokens keep keys that are nearly independent
FIRST_STATE = 0.1  # the spread of a first state's elements; long-memory heads settle a few times above it


@dataclass(frozen=True)
class Start:
    """conv_state [B, conv_dim, K_win] of the form's dtype, recurrent_state [B, Hv, K, V] fp32."""

    conv_state: Array
    recurrent_state: Array


def memory_lengths(tau: tuple[float, float], Hv: int) -> Array:
    """Memory lengths in tokens, [Hv], evenly spaced in their logarithm from tau[0] to tau[1]."""
    return np.geomspace(tau[0], tau[1], Hv)


def gate_parameters(tau: Array) -> tuple[Array, Array]:
    """A_log, dt_bias [Hv] fp32 such that -1 / g = tau at a = 0.

    g = -exp(A_log) * softplus(a + dt_bias), with dt_bias = 0 here: a head forgets 1.9 times as fast at a token with
    a = 1, and 2.2 times as slowly at one with a = -1.
    """
    return -np.log(np.log(2) * np.asarray(tau)).astype(np.float32), np.zeros(len(tau), np.float32)


def layer_weights(config: RolloutConfig) -> BlockWeights:
    """The weights: of the checkpoint, or random ones that keep unit variance, with gates by `config.tau`."""
    if config.checkpoint is not None:
        weights = BlockWeights.from_checkpoint(config.checkpoint, config.layer)
    else:
        weights = _random_weights(config.dims, config.seed)
    if config.tau is not None or config.checkpoint is None:
        A_log, dt_bias = gate_parameters(memory_lengths(config.tau or TAU, weights.dims.Hv))
        weights = replace(weights, A_log=A_log, dt_bias=dt_bias)
    return weights.astype_fp32() if config.form == "fp32" else weights


def first_state(config: RolloutConfig, dims: BlockDims) -> Start:
    """A random state, none of it zero, and a random window."""
    rng = generator(config.seed, STATES)
    window = rng.standard_normal((config.B, dims.conv_dim, dims.K_win))
    state = FIRST_STATE * rng.standard_normal((config.B, dims.Hv, dims.K, dims.V))
    return Start(_rounded(window, config.form), state.astype(np.float32))


def _random_weights(dims: BlockDims, seed: int) -> BlockWeights:
    rng = generator(seed, WEIGHTS)

    def projection(columns: int) -> Array:
        return _rounded(rng.standard_normal((dims.H, columns)) * dims.H**-0.5, "bf16")

    A_log, dt_bias = gate_parameters(memory_lengths(TAU, dims.Hv))
    newest = np.arange(dims.K_win) == dims.K_win - 1
    taps = OLDER_TAPS * rng.standard_normal((dims.conv_dim, dims.K_win)) + newest
    return BlockWeights(
        W_in_qkv=projection(dims.conv_dim),
        W_in_z=projection(dims.value_dim),
        W_in_a=projection(dims.Hv),
        W_in_b=projection(dims.Hv),
        conv_weight=to_fp32(_rounded(taps, "bf16")),  # as checkpoints have them
        A_log=A_log,
        dt_bias=dt_bias,
        norm_weight=to_fp32(1 + 0.2 * rng.standard_normal(dims.V)),
        norm_eps=1e-6,
        out_proj=None,
        dims=dims,
    )


def _rounded(x: Array, form: str) -> Array:
    return x.astype(np.float32).astype(bfloat16()) if form == "bf16" else x.astype(np.float32)
