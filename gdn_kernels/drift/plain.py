"""The recurrence over many tokens in NumPy: what `compiled` does, to the same bytes, and some fifty times as slow.

Sums over key rows run in their order (NumPy reduces an axis that is not the last one row after row), so that the bytes
depend neither on a BLAS nor on how the tokens are cut into chunks.
"""

from __future__ import annotations

import numpy as np

from gdn_kernels.drift.noise import hashed, site_key, stochastic_bf16
from gdn_kernels.dtypes import Array, round_to
from gdn_kernels.policy import BF16_SR, Roundings
from gdn_kernels.reference import quiet

VALUE = np.float32(2.0**100)  # the kernel's bound on memory reads

SITES = ("S1", "S_mem", "memory", "delta", "outer", "S_out", "state", "o")  # of the recurrence, in order

# Kind of the format, significand bits with the hidden one, exponent of the smallest subnormal, largest finite value.
# The kinds: 0 none, 1 fp32, 2 to nearest, 3 stochastically to bf16. All floats: numba compiles once for them all.
Format = tuple[float, float, float, float]
_FORMATS: dict[str | None, Format] = {
    None: (0.0, 0.0, 0.0, 0.0),
    "fp32": (1.0, 24.0, -149.0, (2 - 2.0**-23) * 2.0**127),
    "bf16": (2.0, 8.0, -133.0, (2 - 2.0**-7) * 2.0**127),
    "fp16": (2.0, 11.0, -24.0, 65504.0),
    "fp8_e4m3": (2.0, 4.0, -9.0, 240.0),
    BF16_SR: (3.0, 8.0, -133.0, (2 - 2.0**-7) * 2.0**127),
}
_NAMES = {row: name for name, row in _FORMATS.items()}


def format_table(policy: Roundings, seed: int) -> tuple[tuple[Format, ...], tuple[np.uint64, ...]]:
    """What the recurrence has to round: a Format and a counter's start for each of SITES."""
    formats = tuple(_FORMATS[policy.table.get(site)] for site in SITES)
    return formats, tuple(np.uint64(site_key(seed, site)) for site in SITES)


@quiet
def kernel_steps(
    S: Array, q: Array, k: Array, v: Array, decay_beta: Array, split: Array, dots: Array, n: int, o: Array
) -> None:
    """The kernel's recurrence in its own fp32 operations: `gdn_kernels.kernels.delta_rule`, for tokens 0, 1, ...

        q^T S, k^T S: summed in float64 over each n-th key row, rounded, and the n sums added in fp32
        delta = (v - exp(g) * k^T S) * beta;   o = (q.k) * delta + exp(g) * q^T S
        S = S * c + (k outer delta + S * e)

    Args, all fp32:
        S: [B, Hv, K, V], in place.
        q, k: [tokens, B, Hk, K], normalised.
        v: [tokens, B, Hv, V].
        decay_beta: [tokens, 2, B, Hv], exp(g) and beta. split: the same of e and c.
        dots: [tokens, B, Hk], q.k.
        n: neighbouring key rows on a partition, `layout.head_tile`.
        o: out, [tokens, B, Hv, V].
    """
    gqa = v.shape[2] // q.shape[2]
    for t in range(len(q)):
        queries, keys = (np.repeat(x[t], gqa, axis=1)[..., None] for x in (q, k))  # [B, Hv, K, 1]
        dot = np.repeat(dots[t], gqa, axis=1)[..., None]  # [B, Hv, 1]
        decay, beta, e, c = (x[..., None] for x in (*decay_beta[t], *split[t]))  # [B, Hv, 1]
        read_q, read_k = (_read(x, S, n) * decay for x in (queries, keys))
        delta = (v[t] - read_k) * beta
        o[t] = delta * dot + read_q
        delta = delta + np.float32(0)  # the product that spreads delta has no negative zeros
        S[...] = S * c[..., None] + (delta[..., None, :] * keys + S * e[..., None])


def _read(x: Array, S: Array, n: int) -> Array:
    """x^T S as PE does it: x [B, Hv, K, 1], S [B, Hv, K, V] -> [B, Hv, V] fp32, clamped."""
    products = x.astype(np.float64) * S
    total = np.add.reduce(products[:, :, 0::n], axis=-2).astype(np.float32)
    for s in range(1, n):
        total = total + np.add.reduce(products[:, :, s::n], axis=-2).astype(np.float32)
    return np.maximum(np.minimum(total, VALUE), -VALUE)


@quiet
def rounded_steps(
    S: Array,
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    formats: tuple[Format, ...],
    keys: tuple[np.uint64, ...],
    first: int,
    o: Array,
    norms: Array,
) -> None:
    """`reference.delta_rule` in float64 with roundings, for tokens first, first + 1, ...

    Args, all float64:
        S: [B, Hv, K, V], in place.
        q, k: [tokens, B, Hk, K], normalised.
        v: [tokens, B, Hv, V].
        decay, beta: [tokens, B, Hv].
        formats, keys: from `format_table`.
        o: out, [tokens, B, Hv, V].
        norms: out, [tokens, B, Hv], the Frobenius norm of every new state, before it is rounded.
    """
    gqa = v.shape[2] // q.shape[2]

    def rounded(site: str, x: Array, token: int) -> Array:
        row = SITES.index(site)
        name = _NAMES[formats[row]]
        if name == BF16_SR:
            return stochastic_bf16(x, hashed(int(keys[row]), token * x.size, x.size).reshape(x.shape))
        return x if name is None else round_to(x, name)

    for t in range(len(q)):
        queries, rows = (np.repeat(x[t], gqa, axis=1)[..., None] for x in (q, k))  # [B, Hv, K, 1]
        S1 = rounded("S1", S * decay[t, ..., None, None], first + t)
        memory = rounded("memory", np.add.reduce(rows * rounded("S_mem", S1, first + t), axis=-2), first + t)
        delta = rounded("delta", (v[t] - memory) * beta[t, ..., None], first + t)
        S2 = S1 + rounded("outer", rows * delta[..., None, :], first + t)
        o[t] = rounded("o", np.add.reduce(queries * rounded("S_out", S2, first + t), axis=-2), first + t)
        norms[t] = np.sqrt(np.add.reduce(S2 * S2, axis=-2).cumsum(-1)[..., -1])
        S[...] = rounded("state", S2, first + t)
