"""Bytes of a decode step against the parameters that transformers gives the same models."""

from __future__ import annotations

from typing import Any

import pytest

from gdn_kernels.dims import MODELS
from gdn_kernels.latency.floor import floor_bytes
from gdn_kernels.step_bytes import REST, step_bytes

DEFAULTS = {
    "Qwen3.5-9B": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "Qwen3.5-0.8B": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "linear_num_value_heads": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 3584,
        },
    ),
    "Qwen3.5-35B-A3B": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {}),
    "Qwen3-Next-80B-A3B": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {}),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_weights_are_those_of_transformers_models(name: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config_class, model_class, sizes = DEFAULTS[name]
    config = getattr(transformers, config_class)(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    rest, dims = REST[name], MODELS[name].dims
    counted = sum(_read(parameter, key, rest) for key, parameter in model.named_parameters())
    found = step_bytes(name, B=1, context=0)
    small = 4 * (dims.conv_dim * dims.K_win + 2 * dims.Hv + dims.V) * MODELS[name].gdn_layers
    block_weights = 2 * (dims.conv_dim + dims.value_dim + 2 * dims.Hv) * dims.H * MODELS[name].gdn_layers
    weights = found.total - found.block - found.kv_cache - 2 * dims.H + block_weights + small // 2  # bf16, as counted
    assert weights == 2 * counted


def _read(parameter: Any, key: str, rest: Any) -> int:
    """Elements that one token's step reads of a parameter: all, but of the embedding and the experts not taken."""
    if "embed_tokens" in key:
        return 0
    if ".experts." in key:
        return int(parameter.numel() * rest.active // rest.experts)
    return int(parameter.numel())


def test_the_block_is_its_layers_floor() -> None:
    for name in REST:
        found = step_bytes(name, B=3)
        assert found.block == MODELS[name].gdn_layers * floor_bytes(MODELS[name].dims, 3)
        assert 0.05 < found.share < 0.6


def test_experts_are_shared_by_a_batch() -> None:
    name = "Qwen3.5-35B-A3B"
    one, two, many = (step_bytes(name, B=B).mlp for B in (1, 2, 10_000))
    assert one < two < 2 * one
    rest, H = REST[name], MODELS[name].dims.H
    every = 2 * 40 * (H * 257 + 3 * H * (rest.experts * rest.expert + rest.shared))
    assert many == pytest.approx(every, rel=1e-6)


def test_context_counts_in_the_cache_alone() -> None:
    short, long = (step_bytes("Qwen3.5-9B", context=context) for context in (0, 1000))
    assert long.kv_cache - short.kv_cache == 1000 * 8 * 2 * 4 * 256 * 2
    assert long.total - short.total == long.kv_cache - short.kv_cache


def test_gain_of_a_faster_block() -> None:
    found = step_bytes("Qwen3.5-9B")
    assert found.gain(1) == pytest.approx(1)
    assert 1 < found.gain(2) < found.gain(1e9) == pytest.approx(1 / (1 - found.share))


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"name must be one of .*9B.*, got 'Qwen3\.5-2B'"):
        step_bytes("Qwen3.5-2B")
