"""Weights from transformers' own modules, and from checkpoints that transformers saves: all three kinds of model."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdn_kernels import BlockWeights, reference
from gdn_kernels.checkpoint import model_preset
from gdn_kernels.dtypes import bfloat16, to_fp32
from gdn_kernels.packing import dequantise
from gdn_kernels.weights import PrecisionWarning

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")

from gdn_kernels.small_models import KINDS, small_model  # noqa: E402 - it imports torch

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return small_model(request.param)


def layer_of(model: Any, index: int = 0) -> Any:
    return model.model.layers[index].linear_attn


def same(got: BlockWeights, expected: BlockWeights) -> bool:
    arrays = [(got.out_proj, expected.out_proj)]
    arrays += [(array, expected.arguments()[name]) for name, array in got.arguments().items()]
    return (got.dims, got.norm_eps) == (expected.dims, expected.norm_eps) and all(
        x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in arrays
    )


def first_token(layer: Any, weights: BlockWeights) -> tuple[Array, Array]:
    """The layer's output for the first token of three rows, and the reference's with `weights`."""
    d = weights.dims
    hidden = torch.randn(3, 1, d.H, generator=torch.Generator().manual_seed(2))
    states = np.zeros((3, d.conv_dim, d.K_win), np.float32), np.zeros((3, d.Hv, d.K, d.V), np.float32)
    core_out, _, _ = reference.gdn_block_tkg(
        hidden.numpy(),
        conv_state=states[0],
        recurrent_state=states[1],
        norm_eps=weights.norm_eps,
        **weights.arguments(),
    )
    with torch.no_grad():
        return layer(hidden).numpy(), core_out @ weights.out_proj


def relative(got: Array, expected: Array) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def test_weights_of_a_layer_compute_what_the_layer_does(model: Any) -> None:
    layer = layer_of(model)
    weights = BlockWeights.from_layer(layer)
    d = weights.dims
    assert (d.H, d.Hk, d.Hv, d.K, d.V, d.K_win) == (128, 2, 6, 48, 32, 4)
    for array in (*weights.arguments().values(), weights.out_proj):
        assert array.dtype == np.float32 and array.flags.c_contiguous
    expected, got = first_token(layer, weights)
    assert relative(got, expected) < 2e-6


def test_heads_tiled_over_the_key_heads_are_far_off(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "expand_heads", lambda x, gqa: np.tile(x, (1, gqa, 1)))
    expected, got = first_token(layer_of(model), BlockWeights.from_layer(layer_of(model)))
    assert relative(got, expected) > 1e-2


def test_gain_and_epsilon_are_those_of_the_gated_norm(model: Any) -> None:
    layer = layer_of(model)
    weights = BlockWeights.from_layer(layer)
    np.testing.assert_array_equal(weights.norm_weight, layer.norm.weight.detach().numpy())
    assert weights.norm_eps == layer.norm.variance_epsilon


def test_bf16_module_gives_bf16_projections_and_a_warning(model: Any) -> None:
    layer = copy.deepcopy(layer_of(model)).bfloat16()
    with pytest.warns(PrecisionWarning, match=r"of layer 0: A_log and norm\.weight: stored in bf16") as caught:
        weights = BlockWeights.from_layer(layer)
    assert [warning.filename for warning in caught] == [__file__]
    exact = BlockWeights.from_layer(layer_of(model))
    for name in ("W_in_qkv", "W_in_z", "W_in_a", "W_in_b"):
        assert getattr(weights, name).dtype == bfloat16()
        np.testing.assert_array_equal(getattr(weights, name), getattr(exact, name).astype(bfloat16()))
    for name in ("conv_weight", "A_log", "dt_bias", "norm_weight"):
        assert getattr(weights, name).dtype == np.float32
        np.testing.assert_array_equal(getattr(weights, name), to_fp32(getattr(exact, name).astype(bfloat16())))
    # What the warning is about: the digits are gone.
    assert not np.array_equal(weights.A_log, exact.A_log)


def test_bf16_module_with_fp32_logs_brings_no_warning() -> None:
    layer = layer_of(small_model("qwen3_5", dtype=torch.bfloat16))
    layer.A_log.data, layer.norm.weight.data = layer.A_log.data.float(), layer.norm.weight.data.float()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert BlockWeights.from_layer(layer).W_in_qkv.dtype == bfloat16()


def test_weights_are_copies() -> None:
    layer = layer_of(small_model("qwen3_5"))
    weights, before = BlockWeights.from_layer(layer), BlockWeights.from_layer(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert same(weights, before)


def test_fp8_module_is_dequantised() -> None:
    layer = layer_of(small_model("qwen3_5", dtype=torch.bfloat16))
    layer.A_log.data, layer.norm.weight.data = layer.A_log.data.float(), layer.norm.weight.data.float()
    fp8 = layer.in_proj_z.weight.data.float().clamp(-1, 1).mul(400).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.25], [0.5]]) / 128
    layer.in_proj_z.weight = torch.nn.Parameter(fp8, requires_grad=False)
    layer.in_proj_z.weight_scale_inv = torch.nn.Parameter(scales)
    meant = (fp8.float() * scales.repeat_interleave(128, 0)[:192]).bfloat16().float().numpy()
    np.testing.assert_array_equal(to_fp32(BlockWeights.from_layer(layer).W_in_z), meant.T)


def test_dequantised_as_transformers_does() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(0)
    fp8 = torch.randn(384, 256, generator=generator).mul(60).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator).bfloat16()
    expected = Fp8Dequantize(None)._dequantize_one(fp8, scales, torch.bfloat16)
    import ml_dtypes

    ours = dequantise(fp8.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn), to_fp32(scales.float().numpy()))
    assert ours.tobytes() == expected.view(torch.uint16).numpy().tobytes()


def changed(**attributes: Any) -> Any:
    layer = layer_of(small_model("qwen3_5"))
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.nn.Linear(2, 2), "must be a Qwen3_5GatedDeltaNet, .*, got Linear without hidden_size"),
        (lambda: small_model("qwen3_5").model.layers[3].self_attn, "got Qwen3_5Attention without hidden_size"),
        (lambda: changed(activation="gelu"), "activation must be silu, got 'gelu'"),
        (lambda: changed(in_proj_z=torch.nn.Linear(128, 192)), "must have no bias, got in_proj_z.bias"),
        (lambda: changed(in_proj_z=torch.nn.Linear(128, 191, bias=False)), r"in_proj_z.weight: expected shape \[192"),
        (lambda: changed(in_proj_z=torch.nn.Identity()), r"in_proj_z.weight: expected shape .*, found no such tensor"),
        (lambda: changed(head_k_dim=129), "K must be at most 128, got 129"),
        (
            lambda: layer_of(small_model("qwen3_5", dtype=torch.float16)),
            "expected dtype bfloat16 or float32, found float16",
        ),
        (
            lambda: changed(A_log=torch.nn.Parameter(torch.zeros(6, device="meta"))),
            "A_log: expected its values, .* meta",
        ),
        (lambda: changed(in_proj_z=torch.nn.Linear(128, 192, bias=False).bfloat16()), "expected one dtype for all"),
    ],
)
def test_other_modules_are_refused_with_the_reason(make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        BlockWeights.from_layer(make())


@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_checkpoint_saved_by_transformers(model: Any, shard_size: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "100KB")
    for index in range(3):
        assert same(BlockWeights.from_checkpoint(tmp_path, index), BlockWeights.from_layer(layer_of(model, index)))
    with pytest.raises(
        ValueError, match="layer 3 is a full_attention layer; GDN layers of this checkpoint are 0, 1, 2"
    ):
        BlockWeights.from_checkpoint(tmp_path, 3)
    preset = model_preset(tmp_path)
    assert (preset.dims, preset.layers, preset.gdn_layers) == (BlockWeights.from_layer(layer_of(model)).dims, 4, 3)


def test_multimodal_checkpoint_saved_by_transformers(tmp_path: Path) -> None:
    import transformers

    text = small_model("qwen3_5")
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
    config = transformers.Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision)
    whole = transformers.Qwen3_5ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.save_pretrained(tmp_path)
    assert "text_config" in json.loads((tmp_path / "config.json").read_text())
    for index in range(3):
        assert same(BlockWeights.from_checkpoint(tmp_path, index), BlockWeights.from_layer(layer_of(text, index)))
