"""The oracle and every policy on top of it: the stages of `gdn_kernels.reference` in float64, many tokens at a time."""

from __future__ import annotations

import numpy as np

from gdn_kernels import reference
from gdn_kernels.drift.noise import seeded
from gdn_kernels.drift.plain import format_table
from gdn_kernels.drift.recurrence import loops
from gdn_kernels.drift.steps import Projected, convolved
from gdn_kernels.dtypes import Array, to_float
from gdn_kernels.policy import Roundings
from gdn_kernels.weights import BlockWeights


class Rounded:
    """float64 steps of one layer, with the roundings of a policy; a `steps.Decoder`. S: float64.

    norms: [n, B, Hv], the state's Frobenius norm after each of the last n tokens.
    """

    def __init__(self, weights: BlockWeights, state: Array, form: str, policy: Roundings, seed: int) -> None:
        """state: [B, Hv, K, V], copied. form: "bf16" or "fp32". seed: of stochastic rounding."""
        self.dims, self.seed, self.policy = weights.dims, seed, policy.of_form(form)
        self.norm_eps = weights.norm_eps
        self.W = [to_float(W, np.float64) for W in (weights.W_in_qkv, weights.W_in_z, weights.W_in_a, weights.W_in_b)]
        names = ("conv_weight", "A_log", "dt_bias", "norm_weight")
        self.taps, self.A_log, self.dt_bias, self.norm_weight = (
            self.policy.round(name, to_float(getattr(weights, name), np.float64)) for name in names
        )
        self.S = np.array(state, np.float64)
        self.formats, self.keys = format_table(self.policy, seed)
        self.norms = np.zeros((0, *self.S.shape[:2]))

    @reference.quiet
    def project(self, hidden: Array, first: int) -> Projected:
        """See `steps.Decoder`. Sites: window, z, a, b."""
        n, B, H = hidden.shape
        rows, policy = hidden.reshape(n * B, H).astype(np.float64), seeded(self.policy, self.seed, first)
        sites = ("window", "z", "a", "b")
        parts = [
            policy.round(site, (rows @ W).reshape(n, B, W.shape[1])) for site, W in zip(sites, self.W, strict=True)
        ]
        return Projected(*parts)

    @reference.quiet
    def steps(self, projected: Projected, window: Array, first: int) -> Array:
        """See `steps.Decoder`. float64. Sites: all the others."""
        dims, policy, tokens = self.dims, seeded(self.policy, self.seed, first), len(projected.qkv)
        B = projected.qkv.shape[1]
        conv = policy.round("conv", convolved(window.astype(np.float64, copy=False), self.taps, tokens))
        c = policy.round("c", reference.silu(conv))
        q, k = (c[..., start : start + dims.key_dim].reshape(tokens, B, dims.Hk, dims.K) for start in (0, dims.key_dim))
        v = policy.round("v", np.ascontiguousarray(c[..., 2 * dims.key_dim :]).reshape(tokens, B, dims.Hv, dims.V))
        q = policy.round("q", reference.l2norm(q, policy) / np.sqrt(np.float64(dims.K)))
        k = policy.round("k", reference.l2norm(k, policy))
        g, beta = reference.gates(projected.a, projected.b, self.A_log, self.dt_bias, policy)
        decay = policy.round("decay", np.exp(g))
        o, self.norms = np.empty_like(v), np.empty_like(g)
        loops().rounded_steps(self.S, q, k, v, decay, beta, self.formats, self.keys, first, o, self.norms)
        return reference.gated_norm(o, projected.z.reshape(v.shape), self.norm_weight, self.norm_eps, policy)
