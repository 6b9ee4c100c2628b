"""Small random transformers models with Gated DeltaNet layers: seeded, with heads that forget slowly and fast."""

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
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {"intermediate_size": 192}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", EXPERTS),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {"intermediate_size": 192, **EXPERTS}),
}
# Every expert takes part: no router's choice, which is a jump, turns on the last bit of a hidden state.
ALL_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 3}


def small_model(
    kind: str, *, seed: int = 0, dtype: Any = torch.float32, all_experts: bool = False, **heads: int
) -> Any:
    """A model in eval mode: 4 layers, the last with full attention. `heads`: any of Hk, Hv, K, V."""
    sizes = {**HEADS, **heads}
    config_class, model_class, more = KINDS[kind]
    if all_experts and "num_experts" in more:
        more = {**more, **ALL_EXPERTS}
    config = getattr(transformers, config_class)(
        **SIZES,
        **more,
        linear_num_key_heads=sizes["Hk"],
        linear_num_value_heads=sizes["Hv"],
        linear_key_head_dim=sizes["K"],
        linear_value_head_dim=sizes["V"],
    )
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, parameter, generator))
    return model.to(dtype)


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
        scale = 0.5  # as in trained models, a layer adds less than there is
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
