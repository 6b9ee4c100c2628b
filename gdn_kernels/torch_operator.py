"""`gdn_kernels::block`: the block as a PyTorch operator, for what has to be one node of a graph.

It is functional, as the kernel is: no input is written, and the caller copies the returned states into its caches. With
the shapes of its results declared, `torch.compile` needs not look inside.
"""

from __future__ import annotations

import torch

from gdn_kernels import ops


@torch.library.custom_op("gdn_kernels::block", mutates_args=())
def block(
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
    norm_eps: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`gdn_kernels.gdn_block_tkg` as an operator that graphs and `torch.compile` can hold; functional, no gradient."""
    return ops.gdn_block_tkg(
        hidden,
        W_in_qkv,
        W_in_z,
        W_in_a,
        W_in_b,
        conv_weight,
        conv_state,
        A_log,
        dt_bias,
        norm_weight,
        recurrent_state,
        norm_eps=norm_eps,
        backend=backend,
    )


@block.register_fake
def _shapes_of_block(
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
    norm_eps: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    core_out = hidden.new_empty((hidden.shape[0], 1, W_in_z.shape[1]))
    return core_out, torch.empty_like(conv_state), torch.empty_like(recurrent_state)
