"""The sample layer: what is in it, that the script still makes it, and that transformers reads the same layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from gdn_kernels import metrics, ops, reference, sample
from gdn_kernels.dims import BlockDims
from gdn_kernels.dtypes import bfloat16, to_float
from gdn_kernels.weights import BlockWeights

FILES = ("config.json", "model.safetensors", "recorded.safetensors")
DIMS = BlockDims(H=256, Hk=2, Hv=4, K=128, V=128, K_win=4)


def decay(weights: BlockWeights, hidden: Any) -> Any:
    """exp(g) of each token and value head: hidden [..., H] -> [..., Hv]."""
    a = to_float(hidden, np.float64) @ to_float(weights.W_in_a, np.float64)
    g, _ = reference.gates(a, a, weights.A_log.astype(np.float64), weights.dt_bias.astype(np.float64))
    return np.exp(g)


def test_size_is_under_4_mb() -> None:
    assert sum((sample.PATH / name).stat().st_size for name in FILES) < 4_000_000


def test_layer_is_the_one_described() -> None:
    weights = sample.load_weights()
    assert weights.dims == DIMS
    assert weights.norm_eps == 1e-6
    assert weights.W_in_qkv.dtype == bfloat16()


def test_some_heads_forget_slowly_and_some_fast() -> None:
    decays = decay(sample.load_weights(), sample.load_recording("bf16").hidden)
    slowest, fastest = decays[..., 0], decays[..., 1]
    assert slowest.min() > 0.999
    assert fastest.max() < 0.5
    assert 0.999 < np.median(decays[..., 2]) < 0.9999


def test_A_log_is_no_bf16_number() -> None:
    # Otherwise no comparison with the recording could notice an A_log that went through bf16.
    A_log = sample.load_weights().A_log
    assert (A_log.astype(bfloat16()).astype(np.float32) != A_log).all()


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_recording_has_the_shapes_and_dtypes_it_says(form: str) -> None:
    recording = sample.load_recording(form)
    dtype = np.dtype(np.float32) if form == "fp32" else bfloat16()
    assert recording.prefill_hidden.shape == (1, 64, DIMS.H)
    assert recording.hidden.shape == (64, 1, 1, DIMS.H)
    assert recording.core_out.shape == (64, 1, 1, DIMS.value_dim)
    for array in (recording.prefill_hidden, recording.hidden, recording.core_out, *recording.conv_state.values()):
        assert array.dtype == dtype
    assert set(recording.conv_state) == set(recording.recurrent_state) == {0, 1, 8, 64}
    assert {state.shape for state in recording.conv_state.values()} == {(1, DIMS.conv_dim, DIMS.K_win)}
    assert {state.shape for state in recording.recurrent_state.values()} == {(1, DIMS.Hv, DIMS.K, DIMS.V)}
    assert {state.dtype for state in recording.recurrent_state.values()} == {np.dtype(np.float32)}


def test_both_recordings_have_the_same_input() -> None:
    fp32, bf16 = sample.load_recording("fp32"), sample.load_recording("bf16")
    np.testing.assert_array_equal(fp32.hidden, to_float(bf16.hidden, np.float32))


def test_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match='form: expected "fp32" or "bf16", got \'fp16\''):
        sample.load_recording("fp16")


def test_metadata_names_versions_and_nothing_else() -> None:
    with safe_open(sample.PATH / "recorded.safetensors", framework="numpy") as file:
        metadata = file.metadata()
    assert set(metadata) == {"format", "seed", "torch", "transformers"}
    assert metadata["torch"].replace(".", "").isdigit()


@pytest.mark.parametrize("tokens", [1, 64])
def test_reference_agrees_with_the_fp32_recording(tokens: int) -> None:
    weights, recording = sample.load_weights().astype_fp32(), sample.load_recording("fp32")
    conv_state, S = recording.conv_state[0], recording.recurrent_state[0]
    for step in range(tokens):
        core_out, conv_state, S = reference.gdn_block_tkg(
            recording.hidden[step], conv_state=conv_state, recurrent_state=S, **weights.arguments()
        )
        assert metrics.relative_error(core_out, recording.core_out[step]) < 2e-6
    assert metrics.relative_error(S, recording.recurrent_state[tokens]) < 2e-6
    assert metrics.relative_error(conv_state, recording.conv_state[tokens]) < 1e-6


def test_prefill_state_follows_from_its_input() -> None:
    # The recorded prefill input, one token at a time from zero states, leads to the recorded states.
    weights, recording = sample.load_weights().astype_fp32(), sample.load_recording("fp32")
    conv_state, S = np.zeros_like(recording.conv_state[0]), np.zeros_like(recording.recurrent_state[0])
    for token in range(64):
        hidden = recording.prefill_hidden[:, token : token + 1]
        _, conv_state, S = reference.gdn_block_tkg(
            hidden, conv_state=conv_state, recurrent_state=S, **weights.arguments()
        )
    assert metrics.relative_error(S, recording.recurrent_state[0]) < 2e-6
    assert metrics.relative_error(conv_state, recording.conv_state[0]) < 1e-6


@pytest.fixture(scope="module")
def remade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample, made anew by its script."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from gdn_kernels.sample import make_sample

    folder = tmp_path_factory.mktemp("sample")
    make_sample.write(folder)
    return folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_script_makes_the_same_weights(remade: Path, name: str) -> None:
    assert (remade / name).read_bytes() == (sample.PATH / name).read_bytes()


@pytest.mark.parametrize(("form", "state", "core_out"), [("fp32", 1e-6, 2e-6), ("bf16", 1e-3, 4e-3)])
def test_script_makes_the_same_recording(remade: Path, form: str, state: float, core_out: float) -> None:
    # Not byte for byte: the last bit of torch's sums depends on the processor, and one bit may turn a bf16 rounding.
    stored, new = sample.load_recording(form), sample.load_recording(form, remade)
    np.testing.assert_array_equal(new.prefill_hidden, stored.prefill_hidden)
    np.testing.assert_array_equal(new.hidden, stored.hidden)
    assert metrics.relative_error(new.core_out, stored.core_out) < core_out
    for step in sample.RECORDED_STEPS:
        assert metrics.relative_error(new.conv_state[step], stored.conv_state[step]) < state
        assert metrics.relative_error(new.recurrent_state[step], stored.recurrent_state[step]) < state


@pytest.mark.parametrize(("form", "state", "core_out"), [("fp32", 2e-6, 2e-6), ("bf16", 8e-3, 2e-2)])
def test_block_follows_transformers_at_every_step(form: str, state: float, core_out: float) -> None:
    # Live, and after each step, where the recording has the states of three steps.
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from gdn_kernels.sample import make_sample

    expected = {name: tensor.float().numpy() for name, tensor in make_sample.run_layer(form).items()}
    weights = sample.load_weights() if form == "bf16" else sample.load_weights().astype_fp32()
    hidden = sample.load_recording(form).hidden
    conv_state, S = expected["conv_state"][0].astype(hidden.dtype), expected["recurrent_state"][0]
    for step in range(sample.DECODE_STEPS):
        out, conv_state, S = ops.gdn_block_tkg(
            hidden[step], conv_state=conv_state, recurrent_state=S, norm_eps=weights.norm_eps, **weights.arguments()
        )
        assert metrics.relative_error(S, expected["recurrent_state"][step + 1]) <= state
        assert metrics.relative_error(out, expected["core_out"][step]) <= core_out


def test_transformers_reads_the_folder() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(sample.PATH)
    model = transformers.Qwen3_5ForCausalLM(config.text_config)
    layer = model.model.layers[sample.LAYER].linear_attn
    with safe_open(sample.PATH / "model.safetensors", framework="numpy") as file:
        stored = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    prefix = "model.language_model.layers.0.linear_attn."
    assert {prefix + name: list(tensor.shape) for name, tensor in layer.state_dict().items()} == stored
    assert json.loads((sample.PATH / "config.json").read_text())["model_type"] == config.model_type == "qwen3_5"
