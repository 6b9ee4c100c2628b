"""How the arrays of a layer are split among the ranks of tensor parallelism: by key heads, each with its value heads.

Value head h reads key head h // gqa, so that a run of key heads and the run of their value heads need nothing from any
other rank before the output projection. Rank r of `world` has key heads r * Hk / world up to (r + 1) * Hk / world.
An axis of conv_dim channels holds q|k|v one after the other, and each of the three is split by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gdn_kernels.dims import BlockDims
from gdn_kernels.dtypes import Array


def shard_dims(dims: BlockDims, rank: int, world: int) -> BlockDims:
    """The dimensions of one rank's part of the layer: Hk / world key heads and Hv / world value heads.

    Raises:
        ValueError: when `world` does not divide the key heads, or `rank` is not 0 to world - 1.
    """
    if not _is_whole(world) or world < 1 or dims.Hk % world:
        sizes = ", ".join(str(size) for size in range(1, dims.Hk + 1) if dims.Hk % size == 0)
        raise ValueError(
            f"world must divide the key heads, Hk = {dims.Hk}, because a rank holds whole key heads with their value "
            f"heads: expected one of {sizes}, got {world!r}"
        )
    if not _is_whole(rank) or not 0 <= rank < world:
        raise ValueError(f"rank must be 0 to {world - 1} with world = {world}, got {rank!r}")
    return replace(dims, Hk=dims.Hk // world, Hv=dims.Hv // world)


def split_heads(x: Array, axis: int, rank: int, world: int) -> Array:
    """The part of `x` that belongs to `rank`, a contiguous copy; the axis counts heads, or channels head after head."""
    size = x.shape[axis] // world
    part = (slice(None),) * axis + (slice(rank * size, (rank + 1) * size),)
    return np.array(x[part], order="C")


def split_channels(x: Array, axis: int, dims: BlockDims, rank: int, world: int) -> Array:
    """The same for an axis of the whole layer's conv_dim channels, q|k|v: the rank's heads of each."""
    parts = np.split(x, [dims.key_dim, 2 * dims.key_dim], axis)
    heads = [split_heads(part, axis, rank, world) for part in parts]
    return np.ascontiguousarray(np.concatenate(heads, axis))


def shard_states(
    conv_state: Array, recurrent_state: Array, dims: BlockDims, rank: int, world: int
) -> tuple[Array, Array]:
    """One rank's part of the two states of a layer with the dimensions `dims`: contiguous copies.

    Args:
        conv_state: [B, conv_dim, K_win]. recurrent_state: [B, Hv, K, V]. NumPy arrays.

    Returns:
        conv_state [B, conv_dim / world, K_win] and recurrent_state [B, Hv / world, K, V].

    Raises:
        ValueError: for states of other shapes, and as `shard_dims`.
    """
    shard_dims(dims, rank, world)
    _check_states(conv_state, recurrent_state, dims, "")
    return split_channels(conv_state, 1, dims, rank, world), split_heads(recurrent_state, 1, rank, world)


def merge_states(shards: Sequence[tuple[Array, Array]], dims: BlockDims) -> tuple[Array, Array]:
    """The states of the whole layer from those of all ranks, in rank order; the inverse of `shard_states`.

    Raises:
        ValueError: when the number of shards does not divide dims.Hk, or a shard has another shape than it should.
    """
    part = shard_dims(dims, 0, len(shards))
    for rank, (conv_state, recurrent_state) in enumerate(shards):
        _check_states(conv_state, recurrent_state, part, f" of rank {rank}")
    cuts = [part.key_dim, 2 * part.key_dim]
    by_rank = [np.split(conv_state, cuts, axis=1) for conv_state, _ in shards]
    channels = [np.concatenate(parts, axis=1) for parts in zip(*by_rank, strict=True)]  # q, k, v of all ranks
    return np.concatenate(channels, axis=1), np.concatenate([state for _, state in shards], axis=1)


def _is_whole(number: Any) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def _check_states(conv_state: Array, recurrent_state: Array, dims: BlockDims, whose: str) -> None:
    B = np.shape(conv_state)[0] if np.ndim(conv_state) else 0
    expected = {"conv_state": (B, dims.conv_dim, dims.K_win), "recurrent_state": (B, dims.Hv, dims.K, dims.V)}
    for (name, shape), state in zip(expected.items(), (conv_state, recurrent_state), strict=True):
        if np.shape(state) != shape:
            raise ValueError(f"{name}{whose} must have shape {list(shape)}, got {list(np.shape(state))}")
