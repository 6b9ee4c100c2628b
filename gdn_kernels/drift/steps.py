"""What a rollout asks of whoever decodes: the projections of a block of tokens, then steps on chunks of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gdn_kernels.dtypes import Array


@dataclass(frozen=True)
class Projected:
    """The input projections of n tokens, in the arithmetic of the one who made them: qkv [n, B, conv_dim], rounded as
    the newest window column; z [n, B, value_dim]; a, b [n, B, Hv]."""

    qkv: Array
    z: Array
    a: Array
    b: Array

    def part(self, start: int, stop: int) -> Projected:
        """Tokens [start, stop) of these."""
        return Projected(self.qkv[start:stop], self.z[start:stop], self.a[start:stop], self.b[start:stop])


class Decoder(Protocol):
    """One side of a rollout. S: its state [B, Hv, K, V]."""

    S: Array

    def project(self, hidden: Array, first: int) -> Projected:
        """hidden [n, B, H] float32, tokens first, first + 1, ... Always called with whole blocks: the bytes of a BLAS
        product may depend on the number of its rows."""
        ...

    def steps(self, projected: Projected, window: Array, first: int) -> Array:
        """Decode tokens first, first + 1, ...: the state moves on, and core_out [n, B, Hv, V] comes back.

        window: [K_win - 1 + n, B, conv_dim], the raw columns of these tokens and of those before them.
        """
        ...


def convolved(window: Array, taps: Array, tokens: int) -> Array:
    """The sum over taps, oldest first: window [K_win - 1 + tokens, B, C], taps [C, K_win] -> [tokens, B, C]."""
    total = window[:tokens] * taps[:, 0]
    for tap in range(1, taps.shape[1]):
        total += window[tap : tap + tokens] * taps[:, tap]
    return np.asarray(total)
