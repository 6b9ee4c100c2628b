"""Random numbers by position: what a token gets depends on the seed and its index, not on what was drawn before.

A rollout that is resumed, or cut into other chunks, then gets the same bytes. Arrays come from Philox, whose counter is
set to the position; stochastic rounding, which needs bits for every element at every token, hashes the element's index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gdn_kernels.dtypes import Array
from gdn_kernels.policy import BF16_SR, ROLLOUT_SITES, SITES, Roundings

SITE_NUMBER: Mapping[str, int] = {site: number for number, site in enumerate((*SITES, *ROLLOUT_SITES))}

# Steele, Lea and Flood's splitmix64: the odd increment of its counter, and the two multipliers of its finaliser.
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def generator(seed: int, purpose: int, position: int = 0) -> np.random.Generator:
    """The generator of one purpose at one position; no two of them share a number."""
    return np.random.Generator(np.random.Philox(key=[seed, purpose], counter=[0, 0, 0, position]))


def mixed(x: Array) -> Array:
    """splitmix64's finaliser: uint64 -> uint64, any shape; neighbours in, unrelated bits out."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX2)
    return x ^ (x >> np.uint64(31))


def site_key(seed: int, site: str) -> int:
    """The start of a site's counter, a uint64."""
    start = np.array([(seed * 64 + SITE_NUMBER[site] + 1) % 2**64], np.uint64)
    return int(mixed(start * np.uint64(GOLDEN))[0])


def hashed(key: int, first: int, count: int) -> Array:
    """uint64 [count], the bits of elements first, first + 1, ... of a site."""
    index = np.arange(count, dtype=np.uint64) + np.uint64(first)
    return mixed(index * np.uint64(GOLDEN) + np.uint64(key))


def stochastic_bf16(x: Array, bits: Array) -> Array:
    """`x` (float32 or float64) to bf16 with stochastic rounding, in the dtype of `x`.

    As hardware does it: x in fp32, 16 random bits added to the 16 that bf16 lacks, which are then dropped. A carry
    beyond the largest number gives infinity; infinities and NaN stay.

    Args:
        bits: uint64, the shape of `x`; the upper 16 are used.
    """
    with np.errstate(over="ignore"):
        single = x.astype(np.float32)
    added = (single.view(np.uint32) + (bits >> np.uint64(48)).astype(np.uint32)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(single), added.view(np.float32), single).astype(x.dtype)


@dataclass(frozen=True)
class SeededRoundings(Roundings):
    """A policy with the random bits of some tokens: `round` takes arrays whose first axis is the token.

    Attributes:
        seed: of the rollout. first: the index of the first token.
    """

    seed: int = 0
    first: int = 0

    def round(self, site: str, x: Array) -> Array:
        """As `Roundings.round`, and stochastically where the table says so; x [tokens, ...]."""
        if self.table.get(site) != BF16_SR:
            return super().round(site, x)
        a_token = x.size // len(x)
        bits = hashed(site_key(self.seed, site), self.first * a_token, x.size)
        return stochastic_bf16(x, bits.reshape(x.shape))


def seeded(policy: Roundings, seed: int, first: int) -> SeededRoundings:
    """`policy` for tokens from `first` on."""
    return SeededRoundings(policy.name, policy.table, policy.arithmetic, policy.decay, seed, first)
