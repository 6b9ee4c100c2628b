"""What is recorded at a token: errors, directions, sizes and readouts of a policy beside the oracle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gdn_kernels.drift.readout import logits
from gdn_kernels.dtypes import Array
from gdn_kernels.metrics import cosine, frobenius, kl_divergence, max_error, norm_error, top_k_agreement

TOP_K = 10

# Every figure but tokens, with its meaning; `[records, heads]` for the first group, heads = B * Hv, a sequence's heads
# side by side; `[records, B]` for the second.
HEAD_FIGURES: Mapping[str, str] = {
    "state_error": "|S - S*| over the largest |S*| so far, Frobenius norms; S* the oracle's state",
    "state_error_now": "the same over |S*| at this token",
    "state_max_error": "max |S - S*| over max |S*|",
    "cosine": "of S and S*",
    "output_error": "|y - y*| over |y*|, y = core_out as returned, y* the oracle's unrounded one",
    "output_error_of_largest": "the same over the largest |y*| so far",
    "output_max_error": "max |y - y*| over max |y*|",
    "output_cosine": "of y and y*",
    "state_norm": "|S|",
    "exact_norm": "|S*|",
    "finite": "1 if all of S and y are finite, else 0",
}
SEQUENCE_FIGURES: Mapping[str, str] = {
    "top1_agreement": "1 if the largest logit of the fixed random readout is that of the oracle's, else 0",
    "top_k_agreement": "share of the oracle's 10 largest logits among the 10 largest",
    "kl": "KL divergence of the readout's softmax from the oracle's, nats",
    "greedy_divergence": "first token so far, recorded or not, whose largest logit differs; -1 if none",
}


def head_figures(
    S: Array, exact: Array, y: Array, exact_y: Array, largest: Array, largest_y: Array
) -> dict[str, Array]:
    """HEAD_FIGURES of one token: S, exact [B, Hv, K, V]; y, exact_y [B, Hv, V]; largest norms [B, Hv] -> [heads]."""
    figures = {
        "state_error": norm_error(S, exact, (-2, -1), largest),
        "state_error_now": norm_error(S, exact, (-2, -1)),
        "state_max_error": max_error(S, exact, (-2, -1)),
        "cosine": cosine(S, exact, (-2, -1)),
        "output_error": norm_error(y, exact_y, -1),
        "output_error_of_largest": norm_error(y, exact_y, -1, largest_y),
        "output_max_error": max_error(y, exact_y, -1),
        "output_cosine": cosine(y, exact_y, -1),
        "state_norm": frobenius(S, (-2, -1)),
        "exact_norm": frobenius(exact, (-2, -1)),
        "finite": (np.isfinite(S).all((-2, -1)) & np.isfinite(y).all(-1)).astype(np.float64),
    }
    return {name: values.reshape(-1) for name, values in figures.items()}


def sequence_figures(y: Array, exact_y: Array, matrix: Array, diverged: Array) -> dict[str, Array]:
    """SEQUENCE_FIGURES of one token: y, exact_y [B, Hv, V], diverged [B] -> [B]."""
    ours, theirs = logits(y[None], matrix)[0], logits(exact_y[None], matrix)[0]
    return {
        "top1_agreement": top_k_agreement(ours, theirs, 1),
        "top_k_agreement": top_k_agreement(ours, theirs, TOP_K),
        "kl": kl_divergence(ours, theirs),
        "greedy_divergence": diverged.astype(np.float64),
    }
