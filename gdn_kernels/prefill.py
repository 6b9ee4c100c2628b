"""The prefill of one GDN layer in chunks: many tokens at once, with the same result as one step a token.

It is here to hand a state to decode that is known to be right, so it is plain NumPy, float64 unless told otherwise.

The recurrence of one value head, k_t and q_t normalised, q_t scaled, in the letters of `gdn_kernels.reference`:

    S_t = exp(g_t) S_{t-1} + k_t delta_t^T        delta_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)        o_t = S_t^T q_t

Within a chunk of C tokens that starts from the state S, with G_t = g_1 + ... + g_t the log decay since its start and
D_ti = exp(g_{i+1} + ... + g_t) the decay from token i to a token t >= i, 0 for t < i:

    S_t     = exp(G_t) S + sum over i <= t of D_ti k_i delta_i^T
    delta_t = beta_t (v_t - exp(G_t) S^T k_t - sum over i < t of D_ti (k_i . k_t) delta_i)

With the tokens of the chunk as rows of Q, K [C, K], V and Delta [C, V], the second line is a triangular system (this is
the UT transform):

    (1 + A) Delta = diag(beta) (V - diag(exp(G)) K S)                  A_ti = beta_t D_ti (k_t . k_i) for i < t, else 0

Its solution splits into what needs no state, U, and what multiplies it, W (the WY form), so that both are found by one
forward substitution, and the state then passes through every chunk in a few matrix products:

    U = (1 + A)^-1 diag(beta) V                    W = (1 + A)^-1 diag(beta exp(G)) K                  Delta = U - W S
    O = diag(exp(G)) Q S + (D * Q K^T) Delta       S' = exp(G_C) S + (diag(D_C) K)^T Delta

Yang et al., "Gated Delta Networks" (2024), has the derivation. All decays in it are of sums over spans of tokens, never
of differences of sums: where one token forgets everything, g is -inf and such a difference no number.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gdn_kernels.dtypes import Array, is_bfloat16, to_float
from gdn_kernels.policy import EXACT, Roundings
from gdn_kernels.reference import expand_heads, gated_norm, gates, l2norm, quiet, silu, split_heads
from gdn_kernels.state import DecodeState
from gdn_kernels.weights import BlockWeights


def prefill(
    hidden: Array,
    weights: BlockWeights,
    state: DecodeState | None = None,
    *,
    chunk: int = 64,
    dtype: npt.DTypeLike = np.float64,
) -> tuple[Array, DecodeState]:
    """All tokens of a prompt through one GDN layer, all but the output projection; the state is where decode goes on.

    Rounded are the window's columns and core_out, to the form's dtype, as in every step of `gdn_block_tkg`, and the
    state, to fp32, once at the end. Rows of a batch with left padding must be zero in `hidden` where they are padded,
    as transformers makes them: the state then stays zero until the first token.

    Args:
        hidden: [B, T, H] bf16 or fp32, like the weights' projections; T is 1 or more, also below K_win.
        weights: the layer's.
        state: what earlier tokens left, or None for none; it is not written.
        chunk: tokens taken at once. It changes nothing but speed and the last bits.
        dtype: np.float64 or np.float32, the dtype of the computation.

    Returns:
        core_out [B, T, value_dim] in the dtype of hidden, and the state after the last token. Its conv state's dead
        column 0 holds the column that a step would have left there.

    Raises:
        ValueError: naming the argument that does not fit, what it should be and what it is.
    """
    state = _checked(hidden, weights, state, chunk, dtype)
    policy = EXACT.of_form(state.form)
    window, S = to_float(state.conv_state, dtype), to_float(state.recurrent_state, dtype)
    W = {name: to_float(array, dtype) for name, array in weights.arguments().items()}
    core_out = np.empty((*hidden.shape[:2], weights.dims.value_dim), hidden.dtype)
    for start in range(0, hidden.shape[1], chunk):
        tokens = slice(start, start + chunk)
        core_out[:, tokens], window, S = _chunk(to_float(hidden[:, tokens], dtype), W, weights, window, S, policy)
    conv_state = np.ascontiguousarray(window.astype(hidden.dtype))
    return core_out, DecodeState(conv_state, np.ascontiguousarray(S.astype(np.float32)), weights.dims)


@quiet
def _chunk(
    hidden: Array, W: dict[str, Array], weights: BlockWeights, window: Array, S: Array, policy: Roundings
) -> tuple[Array, Array, Array]:
    """The tokens hidden [B, C, H] -> core_out [B, C, value_dim], the window and the state after them."""
    d = weights.dims
    B, C, _ = hidden.shape
    qkv = policy.round("window", hidden @ W["W_in_qkv"])  # [B, C, conv_dim]
    columns = np.concatenate([window, qkv.swapaxes(1, 2)], axis=-1)  # [B, conv_dim, K_win + C]
    # Token t sees columns t + 1 to t + K_win: column 0 is dead at its first token already.
    taps = (columns[..., j + 1 : j + 1 + C] * W["conv_weight"][:, j, None] for j in range(d.K_win))
    c = silu(np.sum(list(taps), axis=0)).swapaxes(1, 2)  # [B, C, conv_dim]

    def heads(x: Array) -> Array:
        """[B * C, Hv, ...] or [B, C, Hv * ...] -> [B, Hv, C, ...], tokens next to the last axis."""
        return x.reshape(B, C, d.Hv, -1).swapaxes(1, 2)

    q, k, v = split_heads(c.reshape(B * C, d.conv_dim), d)
    q = heads(expand_heads(l2norm(q), d.gqa)) / np.sqrt(q.dtype.type(d.K))
    k = heads(expand_heads(l2norm(k), d.gqa))
    g, beta = gates(hidden @ W["W_in_a"], hidden @ W["W_in_b"], W["A_log"], W["dt_bias"])
    o, S = chunk_rule(q, k, heads(v), heads(g)[..., 0], heads(beta)[..., 0], S)
    z = heads(hidden @ W["W_in_z"])
    core_out = gated_norm(o, z, W["norm_weight"], weights.norm_eps, policy)  # [B, Hv, C, V]
    return core_out.swapaxes(1, 2).reshape(B, C, d.value_dim), columns[..., -d.K_win :], S


@quiet
def chunk_rule(q: Array, k: Array, v: Array, g: Array, beta: Array, S: Array) -> tuple[Array, Array]:
    """The gated delta rule over the C tokens of one chunk, by the equations above; nothing is rounded.

    q, k [B, Hv, C, K], normalised, q scaled; v [B, Hv, C, V]; g, beta [B, Hv, C]; S [B, Hv, K, V]
    -> o [B, Hv, C, V], S' like S.
    """
    D = _decays(g)  # [B, Hv, C, C]
    since_start = np.exp(np.cumsum(g, axis=-1))[..., None]  # [B, Hv, C, 1]
    beta = beta[..., None]
    A = np.tril(beta * D * (k @ k.swapaxes(-1, -2)), -1)  # [B, Hv, C, C]
    right = np.concatenate([beta * v, beta * since_start * k], axis=-1)  # [B, Hv, C, V + K]
    U, W = np.split(_solve_unit_lower(A, right), [v.shape[-1]], axis=-1)
    delta = U - W @ S  # [B, Hv, C, V]
    o = since_start * q @ S + (D * (q @ k.swapaxes(-1, -2))) @ delta
    to_end = D[..., -1, :, None]  # [B, Hv, C, 1]
    return o, since_start[..., -1:, :] * S + (to_end * k).swapaxes(-1, -2) @ delta


def _decays(g: Array) -> Array:
    """D_ti, the decay from token i to token t: g [B, Hv, C] -> [B, Hv, C, C], lower triangular with ones on it."""
    C = g.shape[-1]
    spans = np.where(np.tri(C, k=-1, dtype=bool), g[..., :, None], 0)  # g_t in the columns i < t
    return np.tril(np.exp(np.cumsum(spans, axis=-2)))


def _solve_unit_lower(A: Array, right: Array) -> Array:
    """X of (1 + A) X = right, A [.., C, C] strictly lower triangular, right [.., C, N], by forward substitution."""
    X = right.copy()
    for t in range(1, A.shape[-1]):
        X[..., t, :] -= (A[..., t, None, :t] @ X[..., :t, :])[..., 0, :]
    return X


def _checked(
    hidden: Array, weights: BlockWeights, state: DecodeState | None, chunk: int, dtype: npt.DTypeLike
) -> DecodeState:
    """The state to start from, once every argument is known to fit."""
    H, form = weights.dims.H, "bf16" if is_bfloat16(weights.W_in_qkv.dtype) else "fp32"
    if np.ndim(hidden) != 3 or hidden.shape[2] != H or hidden.shape[1] < 1:
        raise ValueError(f"hidden must have shape [B, T, H] with T >= 1 and H = {H}, got {list(np.shape(hidden))}")
    if hidden.dtype != weights.W_in_qkv.dtype:
        raise ValueError(f"hidden must be {weights.W_in_qkv.dtype} like the projections, got {hidden.dtype}")
    if isinstance(chunk, bool) or not isinstance(chunk, (int, np.integer)) or chunk < 1:
        raise ValueError(f"chunk must be a whole number from 1, got {chunk!r}")
    if np.dtype(dtype) not in (np.float32, np.float64):
        raise ValueError(f"dtype must be float32 or float64, got {np.dtype(dtype)}")
    if state is None:
        return DecodeState.zeros(weights.dims, hidden.shape[0], form=form)
    if state.dims != weights.dims:
        raise ValueError(f"state must have the dims of the weights, {weights.dims}, got {state.dims}")
    if (state.batch, state.form) != (hidden.shape[0], form):
        wanted, got = f"{hidden.shape[0]} rows in the {form} form", f"{state.batch} in the {state.form} form"
        raise ValueError(f"state must have {wanted} like hidden, got {got}")
    return state
