"""Makes the sample layer and records what transformers' own layer gives for it.

    python -m gdn_kernels.sample.make_sample [FOLDER]

writes config.json, model.safetensors and recorded.safetensors (by default over the ones in this package). Needs
torch and transformers (`pip install gdn-kernels[hf]`). The weights come from NumPy's generator, whose stream is the
same on every machine; the recorded outputs are torch's, whose last bit may depend on the processor.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from gdn_kernels.sample import DECODE_STEPS, PATH, PREFILL_TOKENS, RECORDED_STEPS

SEED = 20260

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "intermediate_size": 512,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": TEXT_CONFIG,
    "tie_word_embeddings": True,
}

# Per value head: its decay is exp(-exp(A_log) * softplus(a + dt_bias)). The first forgets less than 0.1 % a token
# whatever a is, the second nearly everything; each key head serves one of the slower and one of the faster heads.
# No A_log here is a bf16 number: a loader that lets them pass through bf16 fails the fp32 comparison.
A_LOG = np.array([-6.3217, 1.4913, -4.6143, -0.9871], np.float32)
DT_BIAS = np.array([-4.0, 0.5, -2.5, -2.0], np.float32)


def weights() -> dict[str, Any]:
    """The layer's tensors by their name after `linear_attn.`, as torch tensors in a checkpoint's dtypes."""
    import torch

    H, K_win = TEXT_CONFIG["hidden_size"], TEXT_CONFIG["linear_conv_kernel_dim"]
    Hv, V = TEXT_CONFIG["linear_num_value_heads"], TEXT_CONFIG["linear_value_head_dim"]
    key_dim = TEXT_CONFIG["linear_num_key_heads"] * TEXT_CONFIG["linear_key_head_dim"]
    value_dim, conv_dim = Hv * V, 2 * key_dim + Hv * V
    generator = np.random.default_rng(SEED)

    def normal(*shape: int, scale: float) -> Any:
        return torch.from_numpy((generator.standard_normal(shape) * scale).astype(np.float32))

    return {
        # 1/sqrt(H) makes every projection of a unit-variance hidden state unit-variance, so that the gates move.
        "in_proj_qkv.weight": normal(conv_dim, H, scale=H**-0.5).bfloat16(),
        "in_proj_z.weight": normal(value_dim, H, scale=H**-0.5).bfloat16(),
        "in_proj_a.weight": normal(Hv, H, scale=H**-0.5).bfloat16(),
        "in_proj_b.weight": normal(Hv, H, scale=H**-0.5).bfloat16(),
        "conv1d.weight": normal(conv_dim, 1, K_win, scale=K_win**-0.5).bfloat16(),
        "A_log": torch.from_numpy(A_LOG.copy()),
        "dt_bias": torch.from_numpy(DT_BIAS.copy()).bfloat16(),
        "norm.weight": 1 + normal(V, scale=0.2),
        "out_proj.weight": normal(H, value_dim, scale=value_dim**-0.5).bfloat16(),
    }


def hidden_states() -> Any:
    """Input of the layer for prefill and decode, torch bf16 [1, PREFILL_TOKENS + DECODE_STEPS, H]."""
    import torch

    shape = (1, PREFILL_TOKENS + DECODE_STEPS, TEXT_CONFIG["hidden_size"])
    values = np.random.default_rng(SEED + 1).standard_normal(shape)
    return torch.from_numpy(values.astype(np.float32)).bfloat16()


def run_layer(form: str) -> dict[str, Any]:
    """What transformers' layer gives in `form`, "fp32" or "bf16" (a bf16 model: every parameter rounded to bf16).

    Returns torch tensors: "core_out" [steps, 1, 1, value_dim], the input of out_proj at each decode step;
    "conv_state" [1 + steps, 1, conv_dim, K_win] and "recurrent_state" [1 + steps, 1, Hv, K, V] after the prefill
    (index 0) and after each decode step.
    """
    import torch
    from transformers import DynamicCache
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[form]
    config = Qwen3_5TextConfig(**TEXT_CONFIG)
    layer = Qwen3_5GatedDeltaNet(config, 0)
    layer.load_state_dict({name: tensor.float() for name, tensor in weights().items()})
    layer.to(dtype)
    hidden = hidden_states().to(dtype)
    prefill, decode = hidden[:, :PREFILL_TOKENS], hidden[:, PREFILL_TOKENS:]
    core_out: list[Any] = []
    layer.out_proj.register_forward_pre_hook(lambda _, inputs: core_out.append(inputs[0].clone()))

    cache = DynamicCache(config=config)
    conv_states, recurrent_states = [], []
    with torch.no_grad():
        for tokens in (prefill, *decode.split(1, dim=1)):
            layer(tokens, cache=cache)
            conv_states.append(cache.get_conv_state(0, state_idx=0).clone())
            recurrent_states.append(cache.get_recurrent_state(0, state_idx=0).clone())
    return {
        "core_out": torch.stack(core_out[1:]),
        "conv_state": torch.stack(conv_states),
        "recurrent_state": torch.stack(recurrent_states),
    }


def record() -> dict[str, Any]:
    """Tensors of recorded.safetensors: the inputs, and for each form the results at RECORDED_STEPS."""
    hidden = hidden_states()
    decode = hidden[:, PREFILL_TOKENS:].transpose(0, 1).unsqueeze(2)  # [steps, 1, 1, H]
    tensors = {"prefill_hidden": hidden[:, :PREFILL_TOKENS].contiguous(), "decode_hidden": decode.contiguous()}
    for form in ("fp32", "bf16"):
        results = run_layer(form)
        tensors[f"{form}.core_out"] = results["core_out"]
        for step in RECORDED_STEPS:
            tensors[f"{form}.conv_state.{step}"] = results["conv_state"][step].clone()
            tensors[f"{form}.recurrent_state.{step}"] = results["recurrent_state"][step].clone()
    return tensors


def sort_metadata(file: Path) -> None:
    """Rewrite the header of a safetensors file with its metadata in order: the writer's own order is random."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def write(folder: Path) -> None:
    """Write the three files of the sample into `folder`."""
    import torch
    import transformers
    from safetensors.torch import save_file

    prefix = "model.language_model.layers.0.linear_attn."
    versions = {
        "format": "pt",
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "seed": str(SEED),
    }
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    save_file(
        {prefix + name: tensor for name, tensor in weights().items()},
        folder / "model.safetensors",
        metadata={"format": "pt", "seed": str(SEED)},
    )
    save_file(record(), folder / "recorded.safetensors", metadata=versions)
    for name in ("model.safetensors", "recorded.safetensors"):
        sort_metadata(folder / name)


def main() -> None:
    import torch

    torch.set_num_threads(1)  # so that the order of its sums, hence every byte, is the same each time
    parser = argparse.ArgumentParser(description="Make the sample layer and record transformers' results for it.")
    parser.add_argument("folder", nargs="?", type=Path, default=PATH, help="where to write (default: this package)")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    write(folder)
    for name in ("config.json", "model.safetensors", "recorded.safetensors"):
        print(f"{(folder / name).stat().st_size:>9,} bytes  {folder / name}")


if __name__ == "__main__":
    main()
