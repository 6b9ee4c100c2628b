"""Tensor parallelism of a GDN layer: each rank runs the block on its heads, and one all-reduce sums the output.

torch.distributed does the summing: gloo between CPU processes, "neuron" or "xla" on a Trainium instance, the same code.
torch is imported when a layer is made. On Trainium this has not been run.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from gdn_kernels.ops import gdn_block_tkg
from gdn_kernels.sharding import merge_states, shard_dims, shard_states
from gdn_kernels.weights import BlockWeights

__all__ = ["RankFailure", "TensorParallelLayer", "merge_states", "partial_output", "shard_dims", "shard_states"]


# What all ranks' shards have in common.
_KIND = ("H", "Hk", "Hv", "K", "V", "K_win", "bytes of a W_in element", "bytes of an out_proj element", "norm_eps")


class RankFailure(RuntimeError):
    """The ranks of a layer could not add up their outputs: one failed, or came later than the group's timeout."""


class TensorParallelLayer:
    """One rank's part of a GDN layer, output projection included; all ranks of the group call it together.

    A rank's states stay with the rank (`zeros`, `shard_states`); after every step they have the bytes of the same heads
    in the unsharded layer, whatever the world size (`layer_Hk` of `gdn_block_tkg`).

    The output is whole on every rank, with the same bytes on all: partial products and their sum are fp32, rounded once
    to the dtype of hidden at the end. The order of the sum is the process group's, so that the last bits differ from
    those of another world size.

    Args:
        shard: `weights.shard(rank, world)` with the rank and the size of the group, and with out_proj.
        group: a process group of torch.distributed; None is the default group. Its timeout (given to
            init_process_group or new_group; half an hour with gloo unless given) bounds how long a rank waits for
            the others.
        device: where the weights are kept and the calls' tensors are: "cpu", "neuron", torch_xla.device().
        lnc, backend: as for `gdn_block_tkg`.

    Every rank of the group must construct its layer: the ranks compare their shards' dimensions, dtypes and norm_eps.

    Raises:
        ValueError: when torch.distributed is not initialised, the shard's rank or world is not the group's, out_proj is
            missing, or the ranks' shards differ in kind.
        RankFailure: when the ranks could not compare, as in a call.
    """

    def __init__(
        self,
        shard: BlockWeights,
        *,
        group: Any = None,
        device: Any = "cpu",
        lnc: int | None = None,
        backend: str = "auto",
    ) -> None:
        _check_group(shard, group)
        if shard.out_proj is None:
            raise ValueError("shard must have an out_proj, whose products the ranks add up, got None")
        self.dims, self.norm_eps = shard.dims, shard.norm_eps
        self.rank, self.world, self.group = shard.rank, shard.world, group
        self.device, self.lnc, self.backend = device, lnc, backend
        self.weights = {name: _on(device, array) for name, array in shard.arguments().items()}
        self.out_proj = _on(device, shard.out_proj)
        self._check_ranks_agree()

    def zeros(self, batch: int) -> tuple[Any, Any]:
        """This rank's states before the first token: [B, conv_dim, K_win] and [B, Hv, K, V], by the shard's dims."""
        import torch

        d, form = self.dims, self.weights["W_in_qkv"].dtype
        conv_state = torch.zeros(batch, d.conv_dim, d.K_win, dtype=form, device=self.device)
        return conv_state, torch.zeros(batch, d.Hv, d.K, d.V, dtype=torch.float32, device=self.device)

    def __call__(self, hidden: Any, conv_state: Any, recurrent_state: Any) -> tuple[Any, Any, Any]:
        """One decode step, in which every rank of the group takes part. No argument is written.

        Args:
            hidden: [B, 1, H] torch tensor, the same on every rank.
            conv_state, recurrent_state: this rank's, as `zeros` or the last call returned them.

        Returns:
            output [B, 1, H] in the dtype of hidden, the same on every rank, and this rank's two new states.

        Raises:
            ValueError, gdn_kernels.BackendUnavailable: as `gdn_block_tkg`; before the sum, so that the others wait
                for this rank to call again, until the group's timeout.
            RankFailure: when another rank ended, or didn't come within the group's timeout. The step is not done on
                any rank that gets this, and the group can't be used again.
        """
        core_out, conv_state, recurrent_state = gdn_block_tkg(
            hidden,
            **self.weights,
            conv_state=conv_state,
            recurrent_state=recurrent_state,
            norm_eps=self.norm_eps,
            layer_Hk=self.world * self.dims.Hk,
            lnc=self.lnc,
            backend=self.backend,
        )
        output = partial_output(core_out, self.out_proj, self.dims.V)  # [B, 1, H]
        self._add_up(output)
        return output.to(hidden.dtype), conv_state, recurrent_state

    def _add_up(self, summand: Any) -> None:
        """The sum of all ranks' tensors, in place."""
        from torch import distributed

        try:
            distributed.all_reduce(summand, group=self.group)
        except RuntimeError as error:
            raise RankFailure(
                f"rank {self.rank} of {self.world} could not add up its output with the others: one of them failed or "
                f"did not come within the process group's timeout ({error})"
            ) from error

    def _check_ranks_agree(self) -> None:
        """Every rank puts its own row in a table of zeros, and the sum of these shows everyone all rows."""
        import torch

        dtypes = self.weights["W_in_qkv"].element_size(), self.out_proj.element_size()
        row = [*astuple(self.dims), *dtypes, self.norm_eps]
        table = torch.zeros(self.world, len(row), dtype=torch.float32)
        table[self.rank] = torch.tensor(row)
        mine, table = table[self.rank].clone(), table.to(self.device)
        self._add_up(table)
        for other, theirs in enumerate(table.cpu()):
            for name, here, there in zip(_KIND, mine.tolist(), theirs.tolist(), strict=True):
                if here != there:
                    raise ValueError(
                        f"shard must be of the same kind on every rank: {name} is {here:g} on rank {self.rank} "
                        f"and {there:g} on rank {other}"
                    )


def partial_output(core_out: Any, out_proj: Any, V: int) -> Any:
    """A rank's summand of the layer's output, in fp32 whatever the form: products of bf16 numbers are exact there.

    Each value head is multiplied by itself, and the heads are added up after that: at one token, a CPU sums a product
    element by element, which for 8,192 channels at once would leave an error of 2e-6 in place of 2e-7.

    core_out [B, 1, value_dim], out_proj [value_dim, H], the rank's part of both, torch tensors -> [B, 1, H].
    """
    import torch

    heads = core_out.float().unflatten(2, (-1, V)).squeeze(1)  # [B, Hv, V]
    by_head = torch.einsum("bhv,hvo->hbo", heads, out_proj.float().unflatten(0, (-1, V)))  # [Hv, B, H]
    return by_head.sum(0).unsqueeze(1)  # [B, 1, H]


def _check_group(shard: BlockWeights, group: Any) -> None:
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError(
            "group must be a process group, or None for the default one; got None, and there is no default one before "
            "torch.distributed.init_process_group"
        )
    rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    if rank < 0:
        raise ValueError("group must be one that this process belongs to, got another")
    if (shard.rank, shard.world) != (rank, world):
        raise ValueError(
            f"shard must be weights.shard(rank={rank}, world={world}), because this process is rank {rank} of {world} "
            f"in the group, got rank {shard.rank} of {shard.world}"
        )


def _on(device: Any, array: Any) -> Any:
    from gdn_kernels.interpreter.torch_arrays import to_torch

    return to_torch(array).to(device)
