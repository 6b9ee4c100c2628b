"""`ours` against the kernel in the interpreter: states, windows and outputs, byte for byte, over 256 steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gdn_kernels import backends
from gdn_kernels.drift import emulate
from gdn_kernels.drift.config import RolloutConfig
from gdn_kernels.drift.device import Device
from gdn_kernels.drift.emulate import Kernel, columns_of
from gdn_kernels.drift.heads import Start, first_state, layer_weights
from gdn_kernels.drift.streams import Stream
from gdn_kernels.dtypes import Array
from gdn_kernels.policy import OURS, OURS_EXPM1, OURS_PRODUCT, Roundings
from gdn_kernels.weights import BlockWeights

STEPS = 256
CASES = {  # neighbouring key rows on a partition, form -> a rollout
    (4, "bf16"): RolloutConfig(H=256, Hk=8, Hv=8, K=32, V=24, stream="independent"),
    (4, "fp32"): RolloutConfig(H=128, Hk=8, Hv=16, K=16, V=24, stream="ar1", form="fp32"),
    (2, "bf16"): RolloutConfig(H=384, Hk=4, Hv=8, K=16, V=40, B=2, stream="bursts"),
    (2, "fp32"): RolloutConfig(H=128, Hk=4, Hv=4, K=32, V=24, stream="repeated", form="fp32"),
    (1, "bf16"): RolloutConfig(H=256, Hk=1, Hv=3, K=17, V=9, B=3, stream="bursts"),
    (1, "fp32"): RolloutConfig(H=128, Hk=2, Hv=6, K=16, V=24, stream="silence", form="fp32"),
}


def decoded(
    config: RolloutConfig, weights: BlockWeights, start: Start, policy: Roundings, steps: int = STEPS
) -> tuple[list[Array], list[Array]]:
    """[window columns, core_out, state] of the kernel in the interpreter, and of the emulation."""
    hidden = Stream(config.stream, config.B, config.H, steps, config.seed, config.form).block(0)
    device = Device(weights, start, config.form, "interpreter")
    columns, output = device.decode(hidden)
    model = Kernel(weights, start.recurrent_state, config.form, policy)
    projected = model.project(hidden, 0)
    window = np.concatenate([columns_of(weights.dims, start.conv_state), projected.qkv])
    return [columns, output, device.S], [projected.qkv, model.steps(projected, window, 0), model.S]


def bits(x: Array) -> Array:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


@pytest.mark.parametrize(("n", "form"), list(CASES))
def test_same_bytes_as_the_kernel(n: int, form: str) -> None:
    config = CASES[n, form]
    weights = layer_weights(config)
    theirs, ours = decoded(config, weights, first_state(config, config.dims), OURS)
    assert Kernel(weights, theirs[2], form, OURS).n == n
    for kernel, emulated in zip(theirs, ours, strict=True):
        np.testing.assert_array_equal(bits(emulated), bits(kernel))


@pytest.mark.parametrize("policy", [OURS_PRODUCT, OURS_EXPM1], ids=lambda policy: policy.name)
def test_another_decay_is_noticed(policy: Roundings) -> None:
    config = CASES[1, "bf16"]
    theirs, ours = decoded(config, layer_weights(config), first_state(config, config.dims), policy, steps=32)
    np.testing.assert_array_equal(ours[0], theirs[0])
    assert (bits(ours[2]) != bits(theirs[2])).any()


def test_same_bytes_at_the_extremes() -> None:
    """Decay 0 and 1, states and weights beyond the clamps, a head whose values are silent."""
    config = replace(CASES[1, "bf16"], B=1, Hv=4)
    weights = layer_weights(config)
    z = weights.W_in_z.copy()
    z[:, :9] *= 1e30
    weights = replace(
        weights,
        W_in_z=z,
        A_log=np.array([60, -60, 200, 0], np.float32),
        dt_bias=np.array([0, 0, -300, 40], np.float32),
        norm_weight=np.full(9, 1e35, np.float32),
    )
    start = first_state(config, config.dims)
    state = start.recurrent_state.copy()
    state[:, 1], state[:, 2], state[:, 3, 5] = 1e33, 1e-38, 0
    theirs, ours = decoded(config, weights, Start(start.conv_state, state), OURS, steps=16)
    for kernel, emulated in zip(theirs, ours, strict=True):
        np.testing.assert_array_equal(bits(emulated), bits(kernel))
    assert np.isfinite(ours[2]).all()


def test_head_tile_and_bounds_are_the_kernels() -> None:
    block = backends.interpreted("gdn_block_tkg").function.__globals__
    kernels_own = block["plan_of"].__globals__["head_tile"]
    for Hk in (1, 2, 3, 4, 6, 8, 12, 16):
        for gqa in (1, 2, 3, 4, 5, 8, 16):
            for K in (16, 17, 18, 128):
                assert emulate.head_tile(Hk, gqa, K) == kernels_own(Hk, gqa, K)
    gates = block["keys_of"].__globals__
    for name in ("KEY", "VALUE", "L2_EPS", "SOFTPLUS_TAIL", "LARGEST_EXPONENT", "LN2"):
        assert np.float32(gates[name]) == getattr(emulate, name)
    assert np.float32(block["conv1d"].__globals__["TAP"]) == emulate.TAP
    assert np.float32(block["normalise"].__globals__["MEAN_SQUARE"]) == emulate.MEAN_SQUARE


def test_silu_is_the_interpreters() -> None:
    x = np.concatenate([np.linspace(-90, 90, 4001), [0.0, -0.0, 1e-40, 2.0**100]]).astype(np.float32)
    for values in (x, np.append(x, np.float32(-1e4)), np.append(x, np.float32(np.nan))):
        np.testing.assert_array_equal(bits(emulate._silu(values)), bits(emulate._activation("silu", values)))
