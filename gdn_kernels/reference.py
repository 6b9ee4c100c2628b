"""The oracle: one decode step of a Gated DeltaNet layer in plain NumPy, one function a stage.

float64 by default; `dtype=np.float32` computes every stage in float32. The stages work in the dtype of their arguments
and round where the policy says (see `gdn_kernels.policy`). In float64, finite input gives finite results wherever the
exact ones are finite, provided that the window is (in bf16 it overflows at 3.4e38). In float32, input up to 2^40 does.

Dimensions: B batch, H hidden size, Hk key heads, Hv value heads, K and V the sizes of a key and a value head, K_win the
columns of the conv window, gqa = Hv / Hk, conv_dim = 2 * Hk * K + Hv * V, value_dim = Hv * V.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.dims import CONV1D_SHAPES, TKG_SHAPES, BlockDims, resolve
from gdn_kernels.dtypes import Array, bfloat16, is_bfloat16, to_float
from gdn_kernels.policy import EXACT, UNROUNDED, Roundings

L2_EPS = 1e-6  # a constant of the model family, added to the sum of squares; not norm_eps

# No stage warns. Legal input overflows where infinity is right: a decay rate exp(A_log), whose exp(g) is then 0, and in
# float32 a sum of squares, whose rsqrt is then 0. A value too large for the format it is rounded to (a window of 1e39)
# is an infinity too, and NaNs follow from it.
quiet = np.errstate(over="ignore", invalid="ignore", under="ignore")


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), any shape; the exponential is always of a negative number, so it can't overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


@quiet
def silu(x: Array) -> Array:
    """x * sigmoid(x), any shape."""
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), any shape, with full relative accuracy at both ends."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


@quiet
def in_proj(hidden: Array, W: Array) -> Array:
    """hidden @ W: hidden [B, 1, H], W [H, C] -> [B, C]."""
    return hidden[:, 0, :] @ W


def conv_window(conv_state: Array, qkv: Array) -> Array:
    """The window slides by one: conv_state [B, conv_dim, K_win] drops its oldest column, qkv [B, conv_dim] joins."""
    return np.concatenate([conv_state[..., 1:], qkv[..., None]], axis=-1)


@quiet
def conv1d(window: Array, conv_weight: Array, policy: Roundings = UNROUNDED) -> Array:
    """c = silu(sum over taps of window * conv_weight).

    window [B, conv_dim, K_win], conv_weight [conv_dim, K_win], both oldest first -> c [B, conv_dim]. Sites: conv, c.
    """
    return policy.round("c", silu(policy.round("conv", (window * conv_weight).sum(-1))))


def split_heads(c: Array, dims: BlockDims) -> tuple[Array, Array, Array]:
    """c [B, conv_dim] -> q [B, Hk, K], k [B, Hk, K], v [B, Hv, V]."""
    q, k, v = np.split(c, [dims.key_dim, 2 * dims.key_dim], axis=-1)
    return q.reshape(-1, dims.Hk, dims.K), k.reshape(-1, dims.Hk, dims.K), v.reshape(-1, dims.Hv, dims.V)


def expand_heads(x: Array, gqa: int) -> Array:
    """Value head h reads key head h // gqa: x [B, Hk, K] -> [B, Hk * gqa, K]."""
    return np.repeat(x, gqa, axis=1)


@quiet
def l2norm(x: Array, policy: Roundings = UNROUNDED) -> Array:
    """x * rsqrt(sum(x * x) + 1e-6) over the last axis, any shape. Site: squares."""
    return x / np.sqrt(policy.round("squares", x * x).sum(-1, keepdims=True) + L2_EPS)


@quiet
def gates(a: Array, b: Array, A_log: Array, dt_bias: Array, policy: Roundings = UNROUNDED) -> tuple[Array, Array]:
    """g = -exp(A_log) * softplus(a + dt_bias), the log of the decay; beta = sigmoid(b), the writing strength.

    a, b [B, Hv], A_log, dt_bias [Hv] -> g, beta [B, Hv]. Site: beta.
    """
    x = a + dt_bias
    # Below -80 softplus(x) is exp(x) to the last bit, and exp(A_log) may be infinite where exp(x) is 0: one exponential
    # of the sum then. Above, softplus(x) is far from underflow, and an infinite product is a decay of 0 all the same.
    far, near = np.exp(A_log + np.minimum(x, -80)), np.exp(A_log) * softplus(np.maximum(x, -80))
    g = -np.where(x < -80, far, near)
    return g, policy.round("beta", sigmoid(b))


@quiet
def delta_rule(
    q: Array, k: Array, v: Array, g: Array, beta: Array, S: Array, policy: Roundings = UNROUNDED
) -> tuple[Array, Array]:
    """One step of the gated delta rule, in the order of the equations.

        S1 = S * exp(g);  delta = (v - k^T S1) * beta;  S2 = S1 + k outer delta;  o = q^T S2

    q, k [B, Hv, K], normalised, q scaled; v [B, Hv, V]; g, beta [B, Hv]; S [B, Hv, K, V] -> o [B, Hv, V], S2 like S.
    Sites: S_mem, delta, S_out, o.
    """
    S1 = S * np.exp(g)[..., None, None]
    memory = (k[..., None, :] @ policy.round("S_mem", S1))[..., 0, :]  # [B, Hv, V]
    delta = policy.round("delta", (v - memory) * beta[..., None])
    S2 = S1 + k[..., :, None] * delta[..., None, :]
    o = (q[..., None, :] @ policy.round("S_out", S2))[..., 0, :]  # [B, Hv, V]
    return policy.round("o", o), S2


@quiet
def gated_norm(o: Array, z: Array, norm_weight: Array, norm_eps: float, policy: Roundings = UNROUNDED) -> Array:
    """o * rsqrt(mean(o * o) + norm_eps) * norm_weight * silu(z), the mean over a head; a plain gain, not 1 + w.

    o, z [B, Hv, V], norm_weight [V] -> [B, Hv, V]. Sites: normed, gained, core_out.
    """
    normed = policy.round("normed", o / np.sqrt((o * o).mean(-1, keepdims=True) + norm_eps))
    return policy.round("core_out", policy.round("gained", normed * norm_weight) * silu(z))


def _recurrence(
    q: Array,
    k: Array,
    v: Array,
    b: Array,
    a: Array,
    A_log: Array,
    dt_bias: Array,
    z: Array,
    norm_weight: Array,
    S: Array,
    norm_eps: float,
    policy: Roundings,
) -> tuple[Array, Array]:
    """What gdn_tkg computes, on raw heads: q, k [B, Hv, K], v, z [B, Hv, V], b, a [B, Hv], S [B, Hv, K, V].

    Returns core_out [B, Hv, V] and the new state. Sites: A_log, dt_bias, norm_weight, q, k, state.
    """
    q = policy.round("q", l2norm(q, policy) / np.sqrt(q.dtype.type(q.shape[-1])))
    k = policy.round("k", l2norm(k, policy))
    g, beta = gates(a, b, policy.round("A_log", A_log), policy.round("dt_bias", dt_bias), policy)
    o, S = delta_rule(q, k, v, g, beta, S, policy)
    core_out = gated_norm(o, z, policy.round("norm_weight", norm_weight), norm_eps, policy)
    return core_out, policy.round("state", S)


def gdn_block_tkg(
    hidden: Array,
    W_in_qkv: Array,
    W_in_z: Array,
    W_in_a: Array,
    W_in_b: Array,
    conv_weight: Array,
    conv_state: Array,
    A_log: Array,
    dt_bias: Array,
    norm_weight: Array,
    recurrent_state: Array,
    *,
    norm_eps: float = 1e-6,
    dtype: npt.DTypeLike = np.float64,
    policy: Roundings = EXACT,
    window: Array | None = None,
) -> tuple[Array, Array, Array]:
    """One decode step of a Gated DeltaNet layer, all but the output projection.

    Args:
        hidden: [B, 1, H]; bfloat16 or float32, which is the form: the dtype of the window and of core_out.
        W_in_qkv: [H, conv_dim]. The weights and states may be of any float dtype; float64 ones save the conversion.
        W_in_z: [H, value_dim].
        W_in_a, W_in_b: [H, Hv].
        conv_weight: [conv_dim, K_win], oldest tap first.
        conv_state: [B, conv_dim, K_win], oldest column first; column 0 is dead.
        A_log, dt_bias: [Hv].
        norm_weight: [V].
        recurrent_state: [B, Hv, K, V].
        norm_eps: epsilon of the gated norm.
        dtype: np.float64 or np.float32, the dtype of the computation.
        policy: what is rounded on the way, and to what.
        window: [B, conv_dim, K_win], used in place of the window computed here, and returned: what follows it can then
            be compared on its own.

    Returns:
        core_out [B, 1, value_dim], new_conv_state [B, conv_dim, K_win], new_recurrent_state [B, Hv, K, V]. A result
        that the policy rounds comes in the dtype of that format (with EXACT: the form's, and float32 for the state),
        one that it does not round in `dtype`.

    Raises:
        ValueError: if the shapes do not fit together, or hidden is neither bfloat16 nor float32.
    """
    dims = BlockDims.from_shapes(
        *map(np.shape, (hidden, W_in_qkv, W_in_z, W_in_a, W_in_b, conv_weight, conv_state)),
        *map(np.shape, (A_log, dt_bias, norm_weight, recurrent_state)),
    )
    policy = policy.of_form(_form("hidden", hidden))
    if window is None:
        qkv = policy.round("window", in_proj(to_float(hidden, dtype), to_float(W_in_qkv, dtype)))
        window = _stored("window", conv_window(to_float(conv_state, dtype), qkv), policy)
    z, a, b = (
        policy.round(site, in_proj(to_float(hidden, dtype), to_float(W, dtype)))
        for site, W in (("z", W_in_z), ("a", W_in_a), ("b", W_in_b))
    )
    taps = policy.round("conv_weight", to_float(conv_weight, dtype))
    q, k, v = split_heads(conv1d(to_float(window, dtype), taps, policy), dims)
    q, k = expand_heads(q, dims.gqa), expand_heads(k, dims.gqa)  # [B, Hv, K]
    z = z.reshape(v.shape)  # [B, Hv, V]
    A_log, dt_bias, norm_weight, S = (to_float(x, dtype) for x in (A_log, dt_bias, norm_weight, recurrent_state))
    core_out, S = _recurrence(q, k, v, b, a, A_log, dt_bias, z, norm_weight, S, norm_eps, policy)
    core_out = core_out.reshape(-1, 1, dims.value_dim)  # [B, 1, value_dim]
    return _stored("core_out", core_out, policy), window, _stored("state", S, policy)


def gdn_tkg(
    q: Array,
    k: Array,
    v: Array,
    b: Array,
    a: Array,
    A_log: Array,
    dt_bias: Array,
    z: Array,
    norm_weight: Array,
    state_in: Array,
    *,
    norm_eps: float = 1e-6,
    dtype: npt.DTypeLike = np.float64,
    policy: Roundings = EXACT,
) -> tuple[Array, Array]:
    """The recurrence with its gates and norms, from raw heads; BH = B * Hv, value head fastest.

    Args:
        q, k: [BH, K], key heads already expanded; bfloat16 or float32, which is the form: the dtype of out.
        v, z: [BH, V].
        b, a: [BH].
        A_log, dt_bias: [Hv].
        norm_weight: [V].
        state_in: [BH, K, V].
        norm_eps, dtype, policy: as for gdn_block_tkg.

    Returns:
        out [BH, V], state_out [BH, K, V], in the dtypes that gdn_block_tkg gives core_out and the state.

    Raises:
        ValueError: if the shapes do not fit together, or q is neither bfloat16 nor float32.
    """
    names = ("q", "k", "v", "b", "a", "A_log", "dt_bias", "z", "norm_weight", "state_in")
    arrays = (q, k, v, b, a, A_log, dt_bias, z, norm_weight, state_in)
    sizes = resolve(TKG_SHAPES, dict(zip(names, map(np.shape, arrays), strict=True)))
    policy = policy.of_form(_form("q", q))
    Hv, K, V = sizes["Hv"], sizes["K"], sizes["V"]
    if Hv < 1 or sizes["BH"] % Hv:
        raise ValueError(f"q must have BH rows, a multiple of Hv = {Hv} by A_log and dt_bias, got {sizes['BH']}")
    B = sizes["BH"] // Hv
    A_log, dt_bias, norm_weight = (to_float(x, dtype) for x in (A_log, dt_bias, norm_weight))
    q, k = (to_float(x, dtype).reshape(B, Hv, K) for x in (q, k))
    v, z = (to_float(x, dtype).reshape(B, Hv, V) for x in (v, z))
    b, a = (to_float(x, dtype).reshape(B, Hv) for x in (b, a))
    S = to_float(state_in, dtype).reshape(B, Hv, K, V)
    out, S = _recurrence(q, k, v, b, a, A_log, dt_bias, z, norm_weight, S, norm_eps, policy)
    return _stored("core_out", out.reshape(-1, V), policy), _stored("state", S.reshape(-1, K, V), policy)


def gdn_conv1d_decode(
    x: Array,
    conv_state: Array,
    conv_weight: Array,
    *,
    dtype: npt.DTypeLike = np.float64,
    policy: Roundings = EXACT,
) -> tuple[Array, Array]:
    """The causal conv of one step, with silu.

    Args:
        x: [B, C, 1], the newest column; bfloat16 or float32, which is the form: the dtype of both results.
        conv_state: [B, C, K_win], oldest column first.
        conv_weight: [C, K_win], oldest tap first.
        dtype, policy: as for gdn_block_tkg.

    Returns:
        out [B, C, 1] and new_conv_state [B, C, K_win].

    Raises:
        ValueError: if the shapes do not fit together, or x is neither bfloat16 nor float32.
    """
    arrays = {"x": x, "conv_state": conv_state, "conv_weight": conv_weight}
    resolve(CONV1D_SHAPES, {name: np.shape(array) for name, array in arrays.items()})
    policy = policy.of_form(_form("x", x))
    window = conv_window(to_float(conv_state, dtype), policy.round("window", to_float(x, dtype)[..., 0]))
    taps = policy.round("conv_weight", to_float(conv_weight, dtype))
    out = policy.round("conv_out", conv1d(window, taps, policy))[..., None]  # [B, C, 1]
    return _stored("conv_out", out, policy), _stored("window", window, policy)


def _form(name: str, x: Any) -> str:
    """The form of a call, "bf16" or "fp32", by the dtype of its activations."""
    if is_bfloat16(x.dtype):
        return "bf16"
    if x.dtype == np.float32:
        return "fp32"
    raise ValueError(f"{name} must be bfloat16 or float32, got {x.dtype}")


def _stored(site: str, x: Array, policy: Roundings) -> Array:
    """A result, rounded already, in the dtype of its format; float32 holds those that are neither."""
    fmt = policy.table.get(site)
    return x if fmt is None else x.astype(bfloat16() if fmt == "bf16" else np.float32)
