"""Small random transformers models with Gated DeltaNet layers, seeded, with transformers' initial values or with ours.

With its own, heads forget within a few tokens, and a state that was lost hardly shows in the text. In ours every other
head remembers for a thousand.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
HEADS: dict[str, int] = {"Hk": 2, "Hv": 6, "K": 48, "V": 32}
HEAD_FIELDS: dict[str, str] = {
    "Hk": "linear_num_key_heads",
    "Hv": "linear_num_value_heads",
    "K": "linear_key_head_dim",
    "V": "linear_value_head_dim",
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {"intermediate_size": 192}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", EXPERTS),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {"intermediate_size": 192, **EXPERTS}),
}


def small_model(kind: str, *, seed: int = 0, dtype: Any = torch.float32, **sizes: Any) -> Any:
    """A model with values of ours in eval mode: 4 layers, the last with full attention.

    `sizes`: any of Hk, Hv, K, V and of the fields of its config.
    """
    model = default_model(kind, **sizes)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, parameter, generator))
    return model.to(dtype)


def default_model(kind: str, *, seed: int = 0, dtype: Any = torch.float32, **sizes: Any) -> Any:
    """The same with the values that transformers gives it."""
    config_class, model_class, more = KINDS[kind]
    heads = {HEAD_FIELDS[name]: sizes.pop(name, default) for name, default in HEADS.items()}
    config = getattr(transformers, config_class)(**{**SIZES, **more, **heads, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, model_class)(config).eval().to(dtype)


def _values(name: str, parameter: Any, generator: Any) -> Any:
    """Activations of unit size in every layer; the logits spread over several units, so that most tokens are clear."""
    normal = torch.randn(parameter.shape, generator=generator)
    if name.endswith("A_log"):
        slow = torch.arange(len(parameter)) % 2 == 1
        return torch.where(slow, -7.0, -0.5) + 0.3 * normal
    if name.endswith("dt_bias"):
        return 0.5 * normal
    if name.endswith("linear_attn.norm.weight"):  # a plain gain; the others are 1 + weight
        return 1 + 0.2 * normal
    if "norm" in name:
        return 0.1 * normal
    if name.endswith("conv1d.weight"):
        return 0.5 * normal
    if name.endswith("embed_tokens.weight"):
        return normal
    scale = 4.0 if name.endswith("lm_head.weight") else 1.0
    if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj")):
        scale = 0.5  # with 1, rounding to bf16 alone moves the logits of transformers' own model by up to 11 bf16 steps
    return scale * parameter.shape[-1] ** -0.5 * normal


def prompts(batch: int, length: int = 9, *, padded: bool = False, seed: int = 0) -> dict[str, Any]:
    """input_ids and attention_mask [batch, length]; padded: row b starts with b + 1 padding tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(batch):
            mask[row, : row + 1] = 0
        ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask}
