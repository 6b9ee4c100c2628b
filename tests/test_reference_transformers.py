"""The reference against transformers' own layer: after its prefill, every decode step, each carrying its own states."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from gdn_kernels import reference
from gdn_kernels.dtypes import bfloat16, to_float
from gdn_kernels.policy import EXACT, HF_BF16, Roundings

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")

Array = np.ndarray[Any, Any]
H, B, PREFILL, STEPS = 256, 3, 20, 24


@dataclass
class Recording:
    """What one layer did: the arguments of its decode steps, the states before them and the results of each."""

    weights: dict[str, Array]
    hidden: list[Array]
    conv_state: Array
    recurrent_state: Array
    core_out: list[Array] = field(default_factory=list)
    windows: list[Array] = field(default_factory=list)
    states: list[Array] = field(default_factory=list)


def to_numpy(tensor: Any) -> Array:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(bfloat16()).copy()
    return tensor.numpy().copy()


def random_layer(Hk: int, Hv: int, K: int, V: int) -> tuple[Any, Any]:
    """A seeded layer in fp32 with its config; its odd heads forget slowly, its even ones within some ten steps.

    None forgets everything at once: where q is nearly orthogonal to k, o is then nearly nothing, and the gated norm
    blows its rounding errors up with it (an |S| |q| / |o| of 250 was seen to give 7e-6 on an fp32 model).
    """
    config = transformers.Qwen3_5TextConfig(
        hidden_size=H,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=Hk,
        linear_num_value_heads=Hv,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
    )
    layer = qwen.Qwen3_5GatedDeltaNet(config, 0).eval()
    generator = torch.Generator().manual_seed(0)

    def normal(parameter: Any, scale: float) -> Any:
        return scale * torch.randn(parameter.shape, generator=generator)

    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(normal(parameter, 0.5 if name == "conv1d.weight" else H**-0.5))
        layer.norm.weight.copy_(1 + normal(layer.norm.weight, 0.2))
        layer.A_log.copy_(torch.where(torch.arange(Hv) % 2 == 1, -8.0, -1.5) + normal(layer.A_log, 0.3))
        layer.dt_bias.copy_(normal(layer.dt_bias, 0.5))
    return layer, config


def record(Hk: int, Hv: int, K: int, V: int, dtype: Any) -> Recording:
    stored, config = random_layer(Hk, Hv, K, V)
    layer = copy.deepcopy(stored).to(dtype)
    cache = transformers.DynamicCache(config=config)
    hidden = torch.randn(B, PREFILL + STEPS, H, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        layer(hidden[:, :PREFILL], cache=cache)
    states = cache.layers[0]
    weights = {f"W_in_{name}": to_numpy(getattr(layer, f"in_proj_{name}").weight.T) for name in ("qkv", "z", "a", "b")}
    # Of the stored fp32 layer: what is small stays fp32 in the contract, while transformers rounds it on loading.
    weights |= {name: to_numpy(getattr(stored, name)) for name in ("A_log", "dt_bias")}
    weights |= {"norm_weight": to_numpy(stored.norm.weight), "conv_weight": to_numpy(stored.conv1d.weight[:, 0])}
    tokens = hidden[:, PREFILL:].split(1, dim=1)
    recording = Recording(
        weights, [to_numpy(h) for h in tokens], to_numpy(states.conv_states[0]), to_numpy(states.recurrent_states[0])
    )
    layer.out_proj.register_forward_pre_hook(lambda _, inputs: recording.core_out.append(to_numpy(inputs[0])))
    for h in tokens:
        with torch.no_grad():
            layer(h, cache=cache)
        recording.windows.append(to_numpy(states.conv_states[0]))
        recording.states.append(to_numpy(states.recurrent_states[0]))
    return recording


SHAPES = [(2, 4, 128, 128), (2, 6, 64, 32), (3, 3, 96, 48)]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: "Hk{}-Hv{}-K{}-V{}".format(*shape))
def shape(request: pytest.FixtureRequest) -> tuple[int, int, int, int]:
    return request.param


@pytest.fixture(scope="module")
def fp32_model(shape: tuple[int, int, int, int]) -> Recording:
    return record(*shape, torch.float32)


@pytest.fixture(scope="module")
def bf16_model(shape: tuple[int, int, int, int]) -> Recording:
    return record(*shape, torch.bfloat16)


def error(got: Array, expected: Array) -> float:
    """Relative Frobenius norm of the difference."""
    got, expected = to_float(got, np.float64), to_float(expected, np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def worst_errors(recording: Recording, policy: Roundings, **changes: Any) -> tuple[float, float]:
    """The worst step's errors of core_out and of the state; the reference carries its own states."""
    conv_state, recurrent_state = recording.conv_state, recording.recurrent_state
    core_errors, state_errors = [], []
    for step, hidden in enumerate(recording.hidden):
        core_out, conv_state, recurrent_state = reference.gdn_block_tkg(
            hidden=hidden,
            conv_state=conv_state,
            recurrent_state=recurrent_state,
            policy=policy,
            **{**recording.weights, **changes},
        )
        core_errors.append(error(core_out, recording.core_out[step]))
        state_errors.append(error(recurrent_state, recording.states[step]))
    return max(core_errors), max(state_errors)


def test_states_have_the_layout_of_the_contract(bf16_model: Recording, shape: tuple[int, int, int, int]) -> None:
    Hk, Hv, K, V = shape
    assert bf16_model.recurrent_state.shape == (B, Hv, K, V) and bf16_model.recurrent_state.dtype == np.float32
    assert bf16_model.conv_state.shape == (B, 2 * Hk * K + Hv * V, 4) and bf16_model.conv_state.dtype == bfloat16()
    assert len(bf16_model.core_out) == STEPS


def test_some_heads_forget_slowly_and_some_fast(fp32_model: Recording) -> None:
    weights = fp32_model.weights
    a = fp32_model.hidden[0][:, 0] @ weights["W_in_a"]
    decay = np.exp(reference.gates(a, a, weights["A_log"], weights["dt_bias"])[0])
    assert decay[:, 1].min() > 0.999 and decay[:, 0].max() < 0.96


def test_fp32_form_on_an_fp32_model(fp32_model: Recording) -> None:
    core_out, state = worst_errors(fp32_model, EXACT)
    assert core_out <= 2e-6 and state <= 2e-6


def test_exact_on_a_bf16_model(bf16_model: Recording) -> None:
    core_out, state = worst_errors(bf16_model, EXACT)
    assert core_out <= 2e-2 and state <= 8e-3


def test_hf_bf16_emulates_a_bf16_model(bf16_model: Recording) -> None:
    # What is left are sums within fp32 rounding of a bf16 tie, each of which moves a few elements by a bf16 step.
    core_out, state = worst_errors(bf16_model, HF_BF16)
    assert core_out <= 4e-3 and state <= 5e-4
    exact_core_out, exact_state = worst_errors(bf16_model, EXACT)
    assert core_out < exact_core_out / 3 and state < exact_state / 10


def test_hf_bf16_elements_and_windows(bf16_model: Recording) -> None:
    conv_state, recurrent_state, equal, same = bf16_model.conv_state, bf16_model.recurrent_state, [], []
    for step, hidden in enumerate(bf16_model.hidden):
        core_out, window, _ = reference.gdn_block_tkg(
            hidden=hidden,
            conv_state=conv_state,
            recurrent_state=recurrent_state,
            policy=HF_BF16,
            **bf16_model.weights,
        )
        conv_state, recurrent_state = bf16_model.windows[step], bf16_model.states[step]
        equal.append((core_out == bf16_model.core_out[step]).mean())
        same.append((window == bf16_model.windows[step]).mean())
    assert np.mean(equal) > 0.999 and np.mean(same) > 0.9999


def test_a_fault_is_far_beyond_the_tolerances(fp32_model: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    taps = fp32_model.weights["conv_weight"].copy()
    taps[:, 0] = 0  # a window of K_win - 1 columns
    assert min(worst_errors(fp32_model, EXACT, conv_weight=taps)) > 1e-2
    assert worst_errors(fp32_model, EXACT, norm_weight=1 + fp32_model.weights["norm_weight"])[0] > 1e-2
    gates = reference.gates
    with monkeypatch.context() as patch:
        patch.setattr(reference, "gates", lambda a, b, *rest: gates(a, reference.sigmoid(b), *rest))
        assert min(worst_errors(fp32_model, EXACT)) > 1e-2
    if fp32_model.recurrent_state.shape[1] != 3:  # with one value head a key head, tiling changes nothing
        monkeypatch.setattr(reference, "expand_heads", lambda x, gqa: np.tile(x, (1, gqa, 1)))
        assert min(worst_errors(fp32_model, EXACT)) > 1e-2
