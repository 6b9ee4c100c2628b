"""The block in PyTorch, for models on a CPU: fp32 arithmetic in the kernel's order, rounded where the contract rounds.

A transformers layer in a bf16 model rounds after every operation; this rounds the window and core_out only, as the
kernel does, so that it stands for the kernel where there is no device and the interpreter would be too slow.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

L2_EPS = 1e-6
SOFTPLUS_TAIL = -20.0  # below it softplus(x) = exp(x) to 1e-9
LARGEST_EXPONENT = 80.0  # exp of it is finite, and as a decay rate leaves nothing
LN2 = 0.6931472


def gdn_block_tkg(
    hidden: torch.Tensor,
    W_in_qkv: torch.Tensor,
    W_in_z: torch.Tensor,
    W_in_a: torch.Tensor,
    W_in_b: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    recurrent_state: torch.Tensor,
    *,
    norm_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`gdn_kernels.gdn_block_tkg` in PyTorch: the same arguments, results and roundings.

    The four W_in may be fp32 with a bf16 hidden, which saves converting them at every step; the values count, and
    hidden says the form. Nothing is checked: it is called in a model's inner loop.
    """
    B, Hv, K, V = recurrent_state.shape
    form, x = hidden.dtype, hidden[:, 0].float()  # [B, H]
    qkv = (x @ W_in_qkv.float()).to(form)
    window = torch.cat([conv_state[..., 1:], qkv[..., None]], dim=-1)  # [B, conv_dim, K_win]
    c = F.silu((window.float() * conv_weight).sum(-1))  # [B, conv_dim]
    key_dim = (c.shape[1] - Hv * V) // 2
    q, k, v = c.split([key_dim, key_dim, Hv * V], dim=-1)
    # Value head h reads key head h // gqa: [B, Hk * K] -> [B, Hv, K]
    q, k = (_l2norm(y.reshape(B, -1, K)).repeat_interleave(Hv * K // key_dim, dim=1) for y in (q, k))
    beta = torch.sigmoid(x @ W_in_b.float())[..., None]  # [B, Hv, 1]
    rate = _decay_rate(x @ W_in_a.float(), A_log, dt_bias)[..., None]  # [B, Hv, 1]
    o, state = _delta_rule(q * K**-0.5, k, v.reshape(B, Hv, V), rate, beta, recurrent_state)
    z = (x @ W_in_z.float()).reshape(B, Hv, V)
    normed = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + norm_eps)
    return (normed * norm_weight * F.silu(z)).to(form).reshape(B, 1, Hv * V), window, state


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def _decay_rate(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """-g = exp(A_log) * softplus(a + dt_bias), [B, Hv]. The minimum takes over where softplus underflows while
    exp(A_log) overflows."""
    soft = F.softplus((a + dt_bias).clamp(min=SOFTPLUS_TAIL))
    bound = torch.exp((a + (A_log + dt_bias)).clamp(max=LARGEST_EXPONENT))
    return torch.minimum(torch.exp(A_log.clamp(max=LARGEST_EXPONENT)) * soft, bound)


def _delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rate: torch.Tensor, beta: torch.Tensor, S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the new state in one pass over S, as the kernel: both products are with the state before its decay.

    q, k [B, Hv, K], v [B, Hv, V], rate, beta [B, Hv, 1], S [B, Hv, K, V] -> o [B, Hv, V], state [B, Hv, K, V].
    """
    decay = torch.exp(-rate)
    read_q, read_k = (torch.stack([q, k], dim=2) @ S).unbind(2)  # [B, Hv, 2, K] @ [B, Hv, K, V] -> two of [B, Hv, V]
    delta = (v - decay * read_k) * beta
    o = decay * read_q + (q * k).sum(-1, keepdim=True) * delta
    # exp(g) = kept + change, kept 1 for a slow head: a product with exp(g) would repeat its rounding error every token.
    kept = (rate < LN2).float()
    change = torch.where(rate < LN2, torch.expm1(-rate), decay)
    return o, S * kept[..., None] + (S * change[..., None] + k[..., None] * delta[..., None, :])
