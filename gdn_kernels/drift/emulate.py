"""`ours`: the kernel's own fp32 arithmetic, many tokens at a time, to the bytes of the kernel in the interpreter.

Every operation of `gdn_kernels.kernels` is here in its order and rounded as the interpreter rounds it: a matmul is
summed in float64 and rounded once to fp32, accumulation over matmuls is in fp32, an activation is the exact function
rounded once. What does not depend on the state is computed for many tokens at once. The interpreter's float64 sums run
in the order of a BLAS, these in that of the rows: the two may differ where a sum lies within 1e-16 of a tie in fp32, an
element in some 1e8.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gdn_kernels import reference
from gdn_kernels.dims import BlockDims
from gdn_kernels.drift.recurrence import loops
from gdn_kernels.drift.steps import Projected, convolved
from gdn_kernels.dtypes import Array, round_to, to_float, to_fp32
from gdn_kernels.interpreter.alu import OPS
from gdn_kernels.policy import Roundings
from gdn_kernels.weights import BlockWeights

# The bounds of `kernels.finite`, and the constants of `kernels.gates`.
TAP, KEY, VALUE, MEAN_SQUARE = (np.float32(2.0**power) for power in (60, 44, 100, 96))
L2_EPS, SOFTPLUS_TAIL, LARGEST_EXPONENT, LN2 = (np.float32(x) for x in (1e-6, -20.0, 80.0, 0.6931472))
ONE = np.float32(1)


def head_tile(Hk: int, gqa: int, K: int) -> int:
    """Neighbouring key rows on a partition: `kernels.layout.head_tile`, which can't be imported without `nki`."""
    if Hk % 8 == 0 and K % 4 == 0 and 4 * gqa <= 16:
        return 4
    return 2 if Hk % 4 == 0 and K % 2 == 0 and 2 * gqa <= 16 else 1


class Kernel:
    """The kernel's arithmetic on one layer; a `steps.Decoder`. S: float32."""

    def __init__(self, weights: BlockWeights, state: Array, form: str, policy: Roundings) -> None:
        """state: [B, Hv, K, V], copied. form: "bf16" or "fp32". policy: whose `decay` says how S decays."""
        self.dims, self.form, self.decay = weights.dims, form, policy.decay
        self.n = head_tile(self.dims.Hk, self.dims.gqa, self.dims.K)
        self.S = np.array(state, np.float32)
        self.W = [_in_chunks(W) for W in (weights.W_in_qkv, weights.W_in_z, weights.W_in_a, weights.W_in_b)]
        self.taps = _clamp(to_fp32(weights.conv_weight), TAP)
        self.A_log, self.dt_bias = _clamp(weights.A_log, VALUE), _clamp(weights.dt_bias, VALUE)
        self.gain, self.norm_eps = _clamp(weights.norm_weight, VALUE), np.float32(weights.norm_eps)

    @reference.quiet
    def project(self, hidden: Array, first: int) -> Projected:
        """See `steps.Decoder`. Fp32; qkv rounded to the form's dtype."""
        columns = hidden.reshape(*hidden.shape[:2], 128, -1).astype(np.float64)  # [n, B, 128, R]
        qkv, z, a, b = (_project(columns, W) for W in self.W)
        return Projected(round_to(qkv, self.form), z, a, b)

    @reference.quiet
    def steps(self, projected: Projected, window: Array, first: int) -> Array:
        """See `steps.Decoder`. Fp32, rounded to the form's dtype."""
        dims, tokens = self.dims, len(projected.qkv)
        B = projected.qkv.shape[1]
        c = _silu(convolved(_clamp(window.astype(np.float32, copy=False), TAP), self.taps, tokens))
        q, k = (c[..., start : start + dims.key_dim].reshape(tokens, B, dims.Hk, dims.K) for start in (0, dims.key_dim))
        v = np.ascontiguousarray(c[..., 2 * dims.key_dim :]).reshape(tokens, B, dims.Hv, dims.V)
        q, k = self._l2norm(q, np.float32(dims.K**-0.5)), self._l2norm(k, ONE)
        decay_beta, split = self._gates(projected.a, projected.b)
        o = np.empty_like(v)
        loops().kernel_steps(self.S, q, k, v, decay_beta, split, self._dots(q, k), self.n, o)
        normed = self._normalised(o)
        gates = _silu(_clamp(projected.z, VALUE)).reshape(v.shape)
        return round_to(normed * gates, self.form)

    def _l2norm(self, x: Array, factor: Any) -> Array:
        """x [n, B, Hk, K] -> x * rsqrt(sum(x*x) + 1e-6) * factor."""
        x = _clamp(x, KEY)
        sums = self._over_keys(x * x)
        scale = _activation("rsqrt", sums + L2_EPS) * factor
        return np.ascontiguousarray(x * scale[..., None])

    def _over_keys(self, x: Array) -> Array:
        """The sum over K of x [..., K], a product with the head mask for each key row of a partition."""
        lanes = x.reshape(*x.shape[:-1], -1, self.n).astype(np.float64)
        total = lanes[..., 0].sum(-1).astype(np.float32)
        for s in range(1, self.n):
            total = total + lanes[..., s].sum(-1).astype(np.float32)
        return np.asarray(total)

    def _dots(self, q: Array, k: Array) -> Array:
        """q.k of every key head, [n, B, Hk]: the n key rows of a partition in fp32, then over partitions."""
        products = (q * k).reshape(*q.shape[:-1], -1, self.n)
        partial = products[..., 0]
        for s in range(1, self.n):
            partial = partial + products[..., s]
        return np.asarray(partial.astype(np.float64).sum(-1).astype(np.float32))

    def _gates(self, a: Array, b: Array) -> tuple[Array, Array]:
        """a, b [n, B, Hv] -> exp(g) and beta, e and c, each pair [n, 2, B, Hv]. The products that spread them over
        partitions leave no negative zeros."""
        rate = self._decay_rate(a)
        decay, beta = _activation("exp", -rate), _activation("sigmoid", b)
        slow = {"split": (rate < LN2).astype(np.float32), "product": np.zeros_like(rate), "expm1": np.ones_like(rate)}
        c = slow[self.decay]
        change = (decay + ONE) * _activation("tanh", rate * np.float32(-0.5)) * c
        e = change + (c * -ONE + ONE) * decay
        return np.stack([decay, beta], 1) + np.float32(0), np.stack([e, c], 1) + np.float32(0)

    def _decay_rate(self, a: Array) -> Array:
        scale = _activation("exp", np.minimum(self.A_log, LARGEST_EXPONENT))
        soft = np.maximum(np.minimum(a + self.dt_bias, VALUE), SOFTPLUS_TAIL)
        bound = _activation("exp", np.minimum(a + (self.A_log + self.dt_bias), LARGEST_EXPONENT))
        return np.minimum(_activation("softplus", soft) * scale, bound)

    def _normalised(self, o: Array) -> Array:
        """o [n, B, Hv, V] * gain * rsqrt(mean(o*o) + norm_eps)."""
        sums = (o * o).sum(-1, dtype=np.float64, keepdims=True).astype(np.float32)
        mean = np.minimum(sums * np.float32(1.0 / self.dims.V), MEAN_SQUARE)
        return np.asarray(o * self.gain * _activation("rsqrt", mean + self.norm_eps))


def columns_of(dims: BlockDims, conv_state: Array) -> Array:
    """The raw columns before the first token, oldest first: conv_state [B, conv_dim, K_win] -> [K_win - 1, B, conv_dim]
    float32. Column 0 drops out of the window before it is read."""
    return np.ascontiguousarray(to_fp32(conv_state).transpose(2, 0, 1)[1:])


def _in_chunks(W: Array) -> Array:
    """W [H, C] as float64 [R, 128, C]: chunk r holds rows p * R + r."""
    H, C = W.shape
    return np.ascontiguousarray(to_float(W, np.float64).reshape(128, H // 128, C).swapaxes(0, 1))


def _project(columns: Array, W: Array) -> Array:
    """columns [n, B, 128, R], W [R, 128, C], float64 -> fp32 [n, B, C], accumulated over R in fp32."""
    n, B = columns.shape[:2]
    total = None
    for r in range(len(W)):
        rows = np.ascontiguousarray(columns[..., r]).reshape(n * B, 128)
        product = (rows @ W[r]).astype(np.float32)
        total = product if total is None else total + product
    return np.asarray(total).reshape(n, B, -1)


def _activation(name: str, x: Array) -> Array:
    """What the interpreter's Scalar engine computes, on fp32."""
    return OPS[name].apply_unary(x)


def _silu(x: Array) -> Array:
    """The interpreter's silu to the same bytes, in half its time: a sixth of a rollout goes into it."""
    if not x.min() > -700:  # where its exponential is 0; also NaN
        return _activation("silu", x)
    wide = x.astype(np.float64)
    e = np.abs(wide)
    np.exp(np.negative(e, out=e), out=e)
    above = np.where(wide >= 0, 1.0, e)
    e += 1
    above /= e
    above *= wide
    return above.astype(np.float32)


def _clamp(x: Array, bound: Any) -> Array:
    return np.maximum(np.minimum(x, bound), -bound)
