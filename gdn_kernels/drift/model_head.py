"""The head of a checkpoint's own model behind one of its blocks, so that an error can be read in the model's tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gdn_kernels.checkpoint import CheckpointError, LayerTensors
from gdn_kernels.drift.records import TOP_K
from gdn_kernels.dtypes import Array, to_float
from gdn_kernels.metrics import kl_divergence, top_k_agreement
from gdn_kernels.weights import BlockWeights

MODELS_OWN = ("model.language_model.", "model.")  # of a multimodal checkpoint, of a text-only one
ROWS = 8192  # of the head that are widened at once: in float64 a vocabulary takes gigabytes


@dataclass(frozen=True)
class ModelHead:
    """logits = rms_norm(core_out @ out_proj) @ matrix^T: what this block alone would have the model say.

    The residual stream and the layers in between are left out. They would carry the same error on top of a larger
    sum, so that the model itself diverges later than this.

    Attributes:
        out_proj: [value_dim, H], of the block's layer.
        gain: [H], of the norm before the head; the model family multiplies by 1 + gain.
        matrix: [vocabulary, H], as stored.
        norm_eps: of that norm.
    """

    out_proj: Array
    gain: Array
    matrix: Array
    norm_eps: float

    @classmethod
    def from_checkpoint(cls, path: str, weights: BlockWeights) -> ModelHead | None:
        """That of the checkpoint in the folder `path`, behind a layer of it; None if it has no head, as a file with
        single layers has not. Tied models keep it as the embedding.

        Raises:
            CheckpointError: naming the tensor, if it is of another shape or dtype than config.json says.
        """
        tensors, config = LayerTensors.whole(Path(path)), json.loads((Path(path) / "config.json").read_text("utf-8"))
        names = ["lm_head.weight", *(f"{own}embed_tokens.weight" for own in MODELS_OWN if _is_tied(config))]
        heads = [name for name in names if tensors.has(name)]
        norms = [name for name in (f"{own}norm.weight" for own in MODELS_OWN) if tensors.has(name)]
        if not heads or not norms or weights.out_proj is None:
            return None
        vocabulary = config.get("text_config", config).get("vocab_size")
        if not isinstance(vocabulary, int):
            raise CheckpointError(f"{path}/config.json: expected a number under 'vocab_size', found {vocabulary!r}")
        H, plain = weights.dims.H, ("bfloat16", "float32")
        gain, matrix = tensors.read(norms[0], (H,), plain), tensors.read(heads[0], (vocabulary, H), plain)
        return cls(weights.out_proj, to_float(gain, np.float64), matrix, weights.norm_eps)

    def logits(self, core_out: Array) -> Array:
        """core_out [n, value_dim] -> [n, vocabulary] float64."""
        x = to_float(core_out, np.float64) @ to_float(self.out_proj, np.float64)  # [n, H]
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.norm_eps) * (1 + self.gain)
        parts = (self.matrix[row : row + ROWS] for row in range(0, len(self.matrix), ROWS))
        return np.concatenate([x @ to_float(part, np.float64).T for part in parts], axis=-1)

    def figures(self, y: Array, exact_y: Array, token: int, diverged: Array) -> dict[str, Array]:
        """What is recorded at a token, each [B]: y, exact_y [B, Hv, V]; diverged: `head_greedy_divergence` so far."""
        rows = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (y, exact_y))
        ours, theirs = np.split(self.logits(np.concatenate(list(rows))), 2)
        same = top_k_agreement(ours, theirs, 1)
        return {
            "head_top1_agreement": same,
            "head_top_k_agreement": top_k_agreement(ours, theirs, TOP_K),
            "head_kl": kl_divergence(ours, theirs),
            "head_greedy_divergence": np.where((diverged < 0) & (same < 1), token, diverged).astype(np.float64),
        }


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the embedding is the head; in a multimodal config.json either level may say so."""
    inner = config.get("text_config", {})
    return bool(config.get("tie_word_embeddings", inner.get("tie_word_embeddings", False)))
