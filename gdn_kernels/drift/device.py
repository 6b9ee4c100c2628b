"""The kernel itself as a side of a rollout: on a device, in the vendor's simulator, or in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np

from gdn_kernels.drift.heads import Start
from gdn_kernels.dtypes import Array, bfloat16, to_fp32
from gdn_kernels.ops import gdn_block_tkg
from gdn_kernels.weights import BlockWeights


class Device:
    """One layer decoded by a backend, token by token. S: float32 [B, Hv, K, V]; conv_state: [B, conv_dim, K_win]."""

    def __init__(self, weights: BlockWeights, start: Start, form: str, backend: str) -> None:
        self.weights, self.backend = weights, backend
        self.dtype = bfloat16() if form == "bf16" else np.dtype(np.float32)
        self.S, self.conv_state = start.recurrent_state, start.conv_state

    def decode(self, hidden: Array) -> tuple[Array, Array]:
        """hidden [n, B, H] float32 -> the newest window column of each token, [n, B, conv_dim] float32, and core_out
        [n, B, Hv, V] float32."""
        columns, outputs = [], []
        for token in hidden:
            arguments: dict[str, Any] = {
                "hidden": token[:, None, :].astype(self.dtype),
                **self.weights.arguments(),
                "conv_state": self.conv_state,
                "recurrent_state": self.S,
            }
            core_out, self.conv_state, self.S = gdn_block_tkg(
                **arguments, norm_eps=self.weights.norm_eps, backend=self.backend
            )
            columns.append(to_fp32(self.conv_state[..., -1]))
            outputs.append(to_fp32(core_out).reshape(*self.S.shape[:2], -1))
        return np.stack(columns), np.stack(outputs)
