"""Layers for the tests of tensor parallelism, and real processes of one gloo group that run them."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from arguments import Arguments, block_arguments, form_dtype

from gdn_kernels import BlockDims, BlockWeights
from gdn_kernels.dtypes import Array
from gdn_kernels.sharding import shard_states

DIMS = BlockDims(128, 4, 12, 16, 24, 4)  # of the layers that real processes decode with

# Ranks are forked from one clean process that has imported torch: the import takes longer than all that they do.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["ranks", "torch.distributed", "gdn_kernels.interpreter.torch_arrays"])
PATIENCE = 60.0  # seconds for all ranks together, on a machine with other things to do


def layer_weights(dims: BlockDims, form: str = "bf16", seed: int = 0) -> BlockWeights:
    arguments = block_arguments(dims, 1, form, seed)
    for name in ("hidden", "conv_state", "recurrent_state"):
        del arguments[name]
    out_proj = np.random.default_rng(seed + 1).standard_normal((dims.value_dim, dims.H)) * dims.value_dim**-0.5
    return BlockWeights(**arguments, norm_eps=1e-5, out_proj=out_proj.astype(form_dtype(form)), dims=dims)


def step_inputs(dims: BlockDims, B: int, form: str, seed: int = 0) -> tuple[Array, tuple[Array, Array]]:
    """hidden, and the two states before the step."""
    arguments: Arguments = block_arguments(dims, B, form, seed)
    return arguments["hidden"], (arguments["conv_state"], arguments["recurrent_state"])


def run_ranks(
    world: int,
    work: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    timeout: float = PATIENCE,
    awaited: int | None = None,
) -> list[Any]:
    """What `work(rank, world, *arguments)` returned, or the error that it raised as text, on each of `world` ranks.

    The ranks meet at a file in `folder`, so that no port has to be free. timeout: the group's, in seconds. awaited: how
    many ranks are waited for, from the first; all unless given. A rank that ended without an answer gives None, as does
    one that is still at work after PATIENCE.
    """
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        CONTEXT.Process(
            target=_rank, args=(rank, world, str(folder / "meeting"), timeout, sender, work, arguments), daemon=True
        )
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process, (_, sender) in zip(ranks, pipes, strict=True):
        process.start()
        sender.close()
    end = time.monotonic() + PATIENCE
    try:
        return [_answer(receiver, end) for receiver, _ in pipes[:awaited]]
    finally:
        for process, (receiver, _) in zip(ranks, pipes, strict=True):
            process.kill()
            process.join()
            receiver.close()


def _answer(receiver: Connection, end: float) -> Any:
    try:
        return receiver.recv() if receiver.poll(max(0.0, end - time.monotonic())) else None
    except EOFError:
        return None


def _rank(
    rank: int,
    world: int,
    meeting: str,
    timeout: float,
    sender: Connection,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    try:
        answer = work(rank, world, *arguments)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    sender.send(answer)
    distributed.destroy_process_group()


# ---- what ranks do ----


def make_layer(rank: int, world: int, form: str = "bf16", **changes: Any) -> Any:
    from gdn_kernels.parallel import TensorParallelLayer

    return TensorParallelLayer(replace(layer_weights(DIMS, form).shard(rank, world), **changes))


def decode(rank: int, world: int, B: int, steps: int) -> dict[str, tuple[list[Array], Array, Array]]:
    """By form: the output of every step, and this rank's states after the last."""
    from gdn_kernels.interpreter.torch_arrays import to_numpy, to_torch

    results = {}
    for form in ("bf16", "fp32"):
        layer = make_layer(rank, world, form)
        states: Any = [to_torch(state) for state in shard_states(*step_inputs(DIMS, B, form)[1], DIMS, rank, world)]
        outputs = []
        for step in range(steps):
            before = [state.clone() for state in states]
            output, *new = layer(to_torch(step_inputs(DIMS, B, form, seed=step)[0]), *states)
            assert all(bool((a == b).all()) for a, b in zip(states, before, strict=True)), "an input was written"
            outputs.append(to_numpy(output))
            states = new
        results[form] = (outputs, to_numpy(states[0]), to_numpy(states[1]))
    return results


def step(layer: Any, B: int = 1) -> Any:
    from gdn_kernels.interpreter.torch_arrays import to_torch

    return layer(to_torch(step_inputs(DIMS, B, "bf16")[0]), *layer.zeros(B))[0]


def construct_the_shard_of_another(rank: int, world: int) -> None:
    make_layer(0, world)


def construct_a_part_of_more(rank: int, world: int) -> None:
    make_layer(rank, 2 * world)


def construct_the_whole(rank: int, world: int) -> None:
    from gdn_kernels.parallel import TensorParallelLayer

    TensorParallelLayer(layer_weights(DIMS))


def construct_without_out_proj(rank: int, world: int) -> None:
    make_layer(rank, world, out_proj=None)


def construct_with_another_epsilon(rank: int, world: int) -> None:
    make_layer(rank, world, norm_eps=1e-5 if rank == 0 else 1e-6)


def construct_with_another_form(rank: int, world: int) -> None:
    make_layer(rank, world, "bf16" if rank == 0 else "fp32")


def step_in_a_subgroup(rank: int, world: int) -> float:
    """Ranks 1 and 3 of the default group are ranks 0 and 1 of their own."""
    from torch import distributed

    from gdn_kernels.parallel import TensorParallelLayer

    group = distributed.new_group([1, 3])
    return float(step(TensorParallelLayer(layer_weights(DIMS).shard(rank // 2, 2), group=group)).float().sum())


def end_after_a_step(rank: int, world: int) -> None:
    layer = make_layer(rank, world)
    step(layer)
    if rank == 1:
        os._exit(3)
    step(layer)


def stall_after_a_step(rank: int, world: int) -> tuple[float, str, str]:
    """Seconds until the error, the error, and that of another call."""
    layer = make_layer(rank, world)
    step(layer)
    if rank == 1:
        time.sleep(PATIENCE)
    start = time.monotonic()
    errors = []
    for _ in range(2):
        try:
            step(layer)
            errors.append("none")
        except RuntimeError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return time.monotonic() - start, errors[0], errors[1]


def be_refused_once(rank: int, world: int) -> list[float]:
    """A rank whose call was refused before the sum calls again, and the others have waited for it."""
    layer = make_layer(rank, world)
    if rank == 1:
        try:
            layer(*reversed(layer.zeros(1)), layer.zeros(1)[0])
        except ValueError:
            time.sleep(0.2)
    return [float(step(layer).float().sum()) for _ in range(2)]


def decode_no_sequence(rank: int, world: int) -> tuple[int, ...]:
    return tuple(step(make_layer(rank, world), 0).shape)
