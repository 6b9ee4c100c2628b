"""Tensor parallelism: a layer's parts put together are the layer, in one process and in several over gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
from arguments import form_dtype
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import layer_weights, run_ranks, step_inputs

from gdn_kernels import MODELS, BlockDims, BlockWeights, gdn_block_tkg
from gdn_kernels.dtypes import Array, to_float
from gdn_kernels.metrics import bf16_steps, relative_error
from gdn_kernels.sharding import merge_states, shard_dims, shard_states

torch = pytest.importorskip("torch")
from gdn_kernels.interpreter.torch_arrays import to_numpy, to_torch  # noqa: E402
from gdn_kernels.parallel import TensorParallelLayer, partial_output  # noqa: E402

States = tuple[Array, Array]

# K != V, gqa 1 to 4, odd head counts, windows of 2 to 5; several world sizes each.
SHAPES = {
    "gqa 1": BlockDims(128, 4, 4, 16, 24, 4),
    "gqa 2": BlockDims(128, 8, 16, 32, 8, 4),
    "gqa 2, wide": BlockDims(256, 4, 8, 128, 64, 4),
    "gqa 3": BlockDims(128, 6, 18, 8, 20, 2),
    "gqa 4": BlockDims(128, 4, 16, 24, 16, 5),
    "odd keys": BlockDims(128, 3, 9, 48, 80, 4),
    "odd widths": BlockDims(128, 5, 10, 7, 5, 4),
}
CASES = [(name, world) for name, d in SHAPES.items() for world in range(2, d.Hk + 1) if d.Hk % world == 0]


def block(weights: BlockWeights, hidden: Array, states: States) -> tuple[Array, States]:
    conv_state, recurrent_state = (np.ascontiguousarray(state) for state in states)
    core_out, *new = gdn_block_tkg(
        hidden,
        **weights.arguments(),
        conv_state=conv_state,
        recurrent_state=recurrent_state,
        norm_eps=weights.norm_eps,
        layer_Hk=weights.world * weights.dims.Hk,
    )
    return core_out, (new[0], new[1])


def project(core_out: Array, weights: BlockWeights) -> Array:
    """A rank's summand [B, 1, H], fp32."""
    assert weights.out_proj is not None
    return to_numpy(partial_output(to_torch(core_out), to_torch(weights.out_proj), weights.dims.V))


def whole_layer(weights: BlockWeights, hidden: Array, states: States) -> tuple[Array, States]:
    core_out, new = block(weights, hidden, states)
    return project(core_out, weights).astype(hidden.dtype), new


def sharded_layer(
    weights: BlockWeights,
    world: int,
    hidden: Array,
    states: States,
    shard: Callable[[BlockWeights, int, int], BlockWeights] = BlockWeights.shard,
    split: Callable[[Array, Array, BlockDims, int, int], States] = shard_states,
    add_up: Callable[[list[Array]], Array] = sum,  # type: ignore[assignment]
) -> tuple[Array, States]:
    """All ranks of a layer, one after the other. The last three arguments are where faults are put in."""
    summands, parts = [], []
    for rank in range(world):
        part = shard(weights, rank, world)
        core_out, new = block(part, hidden, split(*states, weights.dims, rank, world))
        summands.append(project(core_out, part))
        parts.append(new)
    return np.asarray(add_up(summands)).astype(hidden.dtype), merge_states(parts, weights.dims)


def check_same(sharded: tuple[Array, States], whole: tuple[Array, States]) -> None:
    """States byte for byte; the output within 1e-6 in fp32, and two bf16 steps in bf16."""
    check_states(sharded[1], whole[1])
    check_output(sharded[0], whole[0])


def check_states(states: States, expected: States) -> None:
    (window, state), (expected_window, expected_state) = states, expected
    assert window.dtype == expected_window.dtype
    assert window.tobytes() == expected_window.tobytes()
    assert state.dtype == expected_state.dtype == np.float32
    assert state.tobytes() == expected_state.tobytes()


def check_output(output: Array, expected: Array) -> None:
    assert output.dtype == expected.dtype
    assert output.shape == expected.shape
    if output.dtype == np.float32:
        assert relative_error(output, expected) <= 1e-6
    else:
        assert bf16_steps(output, expected).max(initial=0) <= 2


# ---- what a part holds ----


def numbered(dims: BlockDims) -> BlockWeights:
    """Weights whose every element is the number of its channel or head along the axis that is split."""

    def along(axis: int, *shape: int) -> Array:
        return np.ascontiguousarray(np.broadcast_to(np.arange(shape[axis])[(...,) + (None,) * (~axis % 2)], shape))

    d = dims
    return BlockWeights(
        W_in_qkv=along(1, d.H, d.conv_dim),
        W_in_z=along(1, d.H, d.value_dim),
        W_in_a=along(1, d.H, d.Hv),
        W_in_b=along(1, d.H, d.Hv),
        conv_weight=np.arange(d.conv_dim)[:, None].repeat(d.K_win, 1),
        A_log=np.arange(d.Hv),
        dt_bias=np.arange(d.Hv),
        norm_weight=np.arange(d.V),
        norm_eps=1e-6,
        out_proj=np.arange(d.value_dim)[:, None].repeat(d.H, 1),
        dims=dims,
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_model_and_every_world_size(name: str) -> None:
    d = replace(MODELS[name].dims, H=128)  # H is never split
    whole = numbered(d)
    for world in (1, 2, 4, 8, 16):
        for rank in range(world):
            part = whole.shard(rank, world)
            keys = [h for h in range(d.Hk) if h * world // d.Hk == rank]
            values = [h for h in range(d.Hv) if h // d.gqa in keys]
            key_channels = np.array([h * d.K + i for h in keys for i in range(d.K)])
            value_channels = np.array([h * d.V + i for h in values for i in range(d.V)])
            channels = np.concatenate([key_channels, d.key_dim + key_channels, 2 * d.key_dim + value_channels])
            assert part.dims == replace(d, Hk=d.Hk // world, Hv=d.Hv // world)
            assert (part.rank, part.world, part.norm_eps) == (rank, world, 1e-6)
            for array, axis, expected in (
                (part.W_in_qkv, 1, channels),
                (part.W_in_z, 1, value_channels),
                (part.W_in_a, 1, values),
                (part.W_in_b, 1, values),
                (part.conv_weight, 0, channels),
                (part.A_log, 0, values),
                (part.dt_bias, 0, values),
                (part.out_proj, 0, value_channels),
                (part.norm_weight, 0, range(d.V)),
            ):
                assert array is not None and array.flags.c_contiguous
                assert np.array_equal(np.moveaxis(array, axis, -1).reshape(-1, len(expected))[[0, -1]], [expected] * 2)


def test_a_part_shares_no_memory_with_the_layer() -> None:
    weights = layer_weights(SHAPES["gqa 2"])
    for world in (1, 2):
        part = weights.shard(0, world)
        for name, array in part.arguments().items():
            assert not np.shares_memory(array, getattr(weights, name))
        assert not np.shares_memory(part.out_proj, weights.out_proj)  # type: ignore[arg-type]


def test_a_layer_without_out_proj_has_parts_without() -> None:
    assert replace(layer_weights(SHAPES["gqa 1"]), out_proj=None).shard(0, 2).out_proj is None


@pytest.mark.parametrize("name", MODELS)
def test_other_world_sizes_are_refused_for_every_model(name: str) -> None:
    dims = MODELS[name].dims
    for world in (*(w for w in range(-1, 70) if w not in (1, 2, 4, 8, 16)), True, 2.0, "2", None):
        with pytest.raises(ValueError, match=r"world must divide the key heads, Hk = 16.*1, 2, 4, 8, 16, got "):
            shard_dims(dims, 0, world)  # type: ignore[arg-type]
    for rank in (-1, 4, 100, True, 1.0, "1", None):
        with pytest.raises(ValueError, match="rank must be 0 to 3 with world = 4, got "):
            shard_dims(dims, rank, 4)  # type: ignore[arg-type]


def test_refusals_reach_the_weights() -> None:
    weights = layer_weights(SHAPES["odd keys"])
    with pytest.raises(ValueError, match=r"Hk = 3.*expected one of 1, 3, got 2"):
        weights.shard(0, 2)
    with pytest.raises(ValueError, match="rank must be 0 to 2"):
        weights.shard(3, 3)
    with pytest.raises(ValueError, match="whole layer, got rank 1 of world = 3"):
        weights.shard(1, 3).shard(0, 1)


@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 3), st.integers(1, 6))
def test_states_survive_the_way_to_the_ranks_and_back(name: str, B: int, world: int) -> None:
    dims = SHAPES[name]
    _, states = step_inputs(dims, B, "bf16")
    if dims.Hk % world:
        with pytest.raises(ValueError, match="world must divide"):
            shard_states(*states, dims, 0, world)
        return
    parts = [shard_states(*states, dims, rank, world) for rank in range(world)]
    part = shard_dims(dims, 0, world)
    for conv_state, recurrent_state in parts:
        assert conv_state.shape == (B, part.conv_dim, part.K_win) and conv_state.flags.c_contiguous
        assert recurrent_state.shape == (B, part.Hv, part.K, part.V) and recurrent_state.flags.c_contiguous
    for state, merged in zip(states, merge_states(parts, dims), strict=True):
        assert state.dtype == merged.dtype and state.tobytes() == merged.tobytes()


def test_states_of_other_shapes_are_refused() -> None:
    dims = SHAPES["gqa 2"]
    _, (conv_state, recurrent_state) = step_inputs(dims, 2, "bf16")
    with pytest.raises(ValueError, match=r"conv_state must have shape \[2, 640, 4\], got \[2, 640, 3\]"):
        shard_states(conv_state[..., 1:], recurrent_state, dims, 0, 2)
    with pytest.raises(ValueError, match=r"recurrent_state must have shape \[2, 16, 32, 8\], got \[2, 16, 8, 32\]"):
        shard_states(conv_state, recurrent_state.swapaxes(-1, -2), dims, 0, 2)
    with pytest.raises(ValueError, match=r"recurrent_state must have shape \[2, 16, 32, 8\], got \[1, 16, 32, 8\]"):
        shard_states(conv_state, recurrent_state[:1], dims, 0, 2)
    part = shard_states(conv_state, recurrent_state, dims, 0, 2)
    with pytest.raises(ValueError, match=r"conv_state of rank 1 must have shape \[2, 320, 4\], got \[2, 640, 4\]"):
        merge_states([part, (conv_state, recurrent_state)], dims)
    with pytest.raises(ValueError, match="got 0"):
        merge_states([], dims)


# ---- the parts together are the layer ----


def check_steps(dims: BlockDims, world: int, form: str, B: int = 2, steps: int = 2) -> None:
    """Both forms of the layer decode on from their own states."""
    weights = layer_weights(dims, form)
    _, states = step_inputs(dims, B, form)
    sharded_states = states
    for step in range(steps):
        hidden, _ = step_inputs(dims, B, form, seed=step)
        whole = whole_layer(weights, hidden, states)
        sharded = sharded_layer(weights, world, hidden, sharded_states)
        check_same(sharded, whole)
        states, sharded_states = whole[1], sharded[1]


@pytest.mark.parametrize("form", ["bf16", "fp32"])
@pytest.mark.parametrize(("name", "world"), CASES)
def test_the_parts_together_are_the_layer(name: str, world: int, form: str) -> None:
    check_steps(SHAPES[name], world, form)


@pytest.mark.parametrize("world", [2, 4, 8, 16])
@pytest.mark.parametrize("gqa", [1, 2, 3, 4])
def test_the_heads_of_the_models(gqa: int, world: int) -> None:
    check_steps(BlockDims(128, 16, 16 * gqa, 128, 128, 4), world, "bf16", B=1, steps=1)


@pytest.mark.parametrize("layer_Hk", [0, 3, 6, -8, True, 8.0, "8"])
def test_a_part_of_no_layer_is_refused(layer_Hk: Any) -> None:
    weights = layer_weights(SHAPES["gqa 1"])
    hidden, (conv_state, recurrent_state) = step_inputs(weights.dims, 1, "bf16")
    states = {"conv_state": conv_state, "recurrent_state": recurrent_state}
    with pytest.raises(ValueError, match=r"layer_Hk must be a multiple of these key heads, Hk = 4, or None, got"):
        gdn_block_tkg(hidden, **weights.arguments(), **states, layer_Hk=layer_Hk)


@pytest.mark.parametrize("world", [1, 2, 16])
@pytest.mark.parametrize("B", [1, 5])
def test_the_widest_projection_is_as_exact_as_fp32_allows(world: int, B: int) -> None:
    """64 value heads of 128, more terms than any sum in order keeps below 1e-6."""
    rng = np.random.default_rng(0)
    core_out, out_proj = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, 1, 8192), (8192, 128)))
    parts = zip(np.split(core_out, world, axis=2), np.split(out_proj, world, axis=0), strict=True)
    output = sum(partial_output(torch.from_numpy(x.copy()), torch.from_numpy(W), 128) for x, W in parts)
    assert output.shape == (B, 1, 128)
    assert relative_error(to_numpy(output), core_out.astype(np.float64) @ out_proj.astype(np.float64)) <= 4e-7


@settings(max_examples=12)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    world = data.draw(st.integers(2, 5), "world")
    Hk = world * data.draw(st.integers(1, 2), "key heads a rank")
    wide = st.sampled_from([8, 20, 33, 64, 128])
    dims = BlockDims(
        H=128,
        Hk=Hk,
        Hv=Hk * data.draw(st.integers(1, 4), "gqa"),
        K=data.draw(st.one_of(st.just(1), wide), "K"),
        V=data.draw(wide, "V"),
        K_win=data.draw(st.integers(2, 8), "K_win"),
    )
    form = data.draw(st.sampled_from(["bf16", "fp32"]), "form")
    check_steps(dims, world, form, B=data.draw(st.integers(1, 3), "B"), steps=1)


# ---- negative controls: what the checks above must see ----


def shard_with(fault: Callable[[BlockWeights, int, int], dict[str, Array]]) -> Callable[..., BlockWeights]:
    return lambda weights, rank, world: replace(weights.shard(rank, world), **fault(weights, rank, world))


def tiled(x: Array, axis: int, width: int, rank: int, world: int) -> Array:
    """Heads rank, rank + world, ... in place of a run of them: right for nothing here."""
    heads = np.arange(rank, x.shape[axis] // width, world)
    return np.ascontiguousarray(np.take(x, (heads[:, None] * width + np.arange(width)).ravel(), axis))


def tiled_value_heads(w: BlockWeights, rank: int, world: int) -> dict[str, Array]:
    V, keys = w.dims.V, 2 * w.dims.key_dim
    assert w.out_proj is not None
    own = w.shard(rank, world)
    own_keys = 2 * own.dims.key_dim
    values = tiled(w.W_in_qkv[:, keys:], 1, V, rank, world), tiled(w.conv_weight[keys:], 0, V, rank, world)
    return {
        "W_in_qkv": np.concatenate([own.W_in_qkv[:, :own_keys], values[0]], 1),
        "conv_weight": np.concatenate([own.conv_weight[:own_keys], values[1]], 0),
        "W_in_z": tiled(w.W_in_z, 1, V, rank, world),
        "W_in_a": tiled(w.W_in_a, 1, 1, rank, world),
        "W_in_b": tiled(w.W_in_b, 1, 1, rank, world),
        "A_log": tiled(w.A_log, 0, 1, rank, world),
        "dt_bias": tiled(w.dt_bias, 0, 1, rank, world),
        "out_proj": tiled(w.out_proj, 0, V, rank, world),
    }


def tiled_states(conv_state: Array, recurrent_state: Array, d: BlockDims, rank: int, world: int) -> States:
    own, _ = shard_states(conv_state, recurrent_state, d, rank, world)
    values = tiled(conv_state[:, 2 * d.key_dim :], 1, d.V, rank, world)
    conv_part = np.concatenate([own[:, : 2 * d.key_dim // world], values], 1)
    return conv_part, tiled(recurrent_state, 1, 1, rank, world)


def merge_tiled(sharded: tuple[Array, States], d: BlockDims, world: int) -> tuple[Array, States]:
    """Value heads back to where they belong: what is left is that they read the wrong key heads."""
    output, (conv_state, recurrent_state) = sharded
    back = np.argsort(np.concatenate([np.arange(rank, d.Hv, world) for rank in range(world)]))
    values = conv_state[:, 2 * d.key_dim :].reshape(len(conv_state), d.Hv, d.V, d.K_win)[:, back]
    conv_state = np.concatenate([conv_state[:, : 2 * d.key_dim], values.reshape(len(conv_state), -1, d.K_win)], 1)
    return output, (conv_state, recurrent_state[:, back])


def plain_channels(w: BlockWeights, rank: int, world: int) -> dict[str, Array]:
    """The fused q|k|v cut into equal pieces, as one cuts any other column-parallel matrix."""
    size = w.dims.conv_dim // world
    part = slice(rank * size, (rank + 1) * size)
    return {"W_in_qkv": w.W_in_qkv[:, part].copy(), "conv_weight": w.conv_weight[part].copy()}


def plain_conv_state(conv_state: Array, recurrent_state: Array, d: BlockDims, rank: int, world: int) -> States:
    _, recurrent = shard_states(conv_state, recurrent_state, d, rank, world)
    return np.split(conv_state, world, axis=1)[rank].copy(), recurrent


def out_proj_columns(w: BlockWeights, rank: int, world: int) -> dict[str, Array]:
    assert w.out_proj is not None
    full = np.zeros_like(w.out_proj[: w.dims.value_dim // world])
    size = w.dims.H // world
    part = slice(rank * size, (rank + 1) * size)
    full[:, part] = w.out_proj[: len(full), part]
    return {"out_proj": full}


def checked(form: str, world: int = 2, **faults: Any) -> None:
    weights = layer_weights(SHAPES["gqa 3"], form)
    hidden, states = step_inputs(weights.dims, 2, form)
    whole = whole_layer(weights, hidden, states)
    sharded = sharded_layer(weights, world, hidden, states, **faults)
    if faults.get("split") is tiled_states:
        sharded = merge_tiled(sharded, weights.dims, world)
        # The fault can't be seen in what is put back: the window has the bytes that it should have.
        assert sharded[1][0].tobytes() == whole[1][0].tobytes()
    check_same(sharded, whole)


@pytest.mark.parametrize("form", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "faults",
    [
        {"shard": shard_with(tiled_value_heads), "split": tiled_states},
        {"shard": shard_with(plain_channels)},
        {"split": plain_conv_state},
        {"shard": shard_with(plain_channels), "split": plain_conv_state},
        {"add_up": lambda summands: summands[0]},
        {"add_up": lambda summands: sum(summands) / len(summands)},
        {"shard": shard_with(out_proj_columns)},
        {"shard": shard_with(lambda w, rank, world: {"A_log": w.shard(world - 1 - rank, world).A_log})},
    ],
    ids=[
        "value heads tiled",
        "weights without q|k|v",
        "conv state without q|k|v",
        "channels without q|k|v",
        "no all-reduce",
        "mean in place of sum",
        "out_proj columns",
        "another rank's decay",
    ],
)
def test_a_fault_is_seen(faults: dict[str, Any], form: str) -> None:
    checked(form)
    with pytest.raises(AssertionError):
        checked(form, **faults)


def test_rounding_before_the_sum_is_seen() -> None:
    """Summands rounded to bf16 on sixteen ranks: what an all-reduce in the model's own dtype does."""

    def rounded(summands: list[Array]) -> Array:
        total = np.zeros_like(summands[0])
        for summand in summands:
            total = to_float((total + to_float(summand.astype(form_dtype("bf16")), np.float32)), np.float32)
            total = to_float(total.astype(form_dtype("bf16")), np.float32)
        return total

    weights = layer_weights(BlockDims(512, 16, 16, 8, 4, 2))
    hidden, states = step_inputs(weights.dims, 4, "bf16")
    whole = whole_layer(weights, hidden, states)
    check_same(sharded_layer(weights, 16, hidden, states), whole)
    with pytest.raises(AssertionError):
        check_same(sharded_layer(weights, 16, hidden, states, add_up=rounded), whole)


# ---- real processes ----


@pytest.mark.parametrize("world", [2, 4])
def test_processes_over_gloo_decode_as_one(world: int, tmp_path: Path) -> None:
    B, steps, dims = 3, 4, ranks.DIMS
    answers = run_ranks(world, ranks.decode, tmp_path, B, steps)
    for form in ("bf16", "fp32"):
        by_rank = [answer[form] for answer in answers]
        weights = layer_weights(dims, form)
        _, states = step_inputs(dims, B, form)
        for step in range(steps):
            hidden, _ = step_inputs(dims, B, form, seed=step)
            output, states = whole_layer(weights, hidden, states)
            merged = [outputs[step] for outputs, _, _ in by_rank]
            assert all(other.tobytes() == merged[0].tobytes() for other in merged)
            check_output(merged[0], output)
        check_states(merge_states([(window, state) for _, window, state in by_rank], dims), states)


def test_ranks_of_a_subgroup_use_its_own_numbers(tmp_path: Path) -> None:
    outside, first, other_outside, second = run_ranks(4, ranks.step_in_a_subgroup, tmp_path)
    assert first == second and first != 0
    for answer in (outside, other_outside):
        assert answer == "ValueError: group must be one that this process belongs to, got another"


def test_an_empty_batch(tmp_path: Path) -> None:
    assert run_ranks(2, ranks.decode_no_sequence, tmp_path) == [(0, 1, 128)] * 2


def test_a_layer_needs_a_group() -> None:
    with pytest.raises(ValueError, match=r"before torch\.distributed\.init_process_group"):
        TensorParallelLayer(layer_weights(ranks.DIMS).shard(0, 2))


@pytest.mark.parametrize(
    ("work", "reasons"),
    [
        (ranks.construct_the_shard_of_another, ("RankFailure", "weights.shard(rank=1, world=2), because")),
        (ranks.construct_a_part_of_more, ("shard(rank=0, world=2)", "shard(rank=1, world=2)")),
        (ranks.construct_the_whole, ("got rank 0 of 1", "got rank 0 of 1")),
        (ranks.construct_without_out_proj, ("an out_proj", "an out_proj")),
        (
            ranks.construct_with_another_epsilon,
            ("norm_eps is 1e-05 on rank 0 and 1e-06", "norm_eps is 1e-06 on rank 1"),
        ),
        (ranks.construct_with_another_form, ("is 2 on rank 0 and 4 on rank 1", "is 4 on rank 1 and 2 on rank 0")),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_shard_that_does_not_fit_the_group_is_refused(work: Any, reasons: tuple[str, str], tmp_path: Path) -> None:
    for answer, reason in zip(run_ranks(2, work, tmp_path), reasons, strict=True):
        assert isinstance(answer, str) and reason in answer
        assert answer.startswith(("ValueError: shard must", "RankFailure: rank 0 of 2 could not add up"))


def test_a_rank_that_ends_is_noticed_by_the_others(tmp_path: Path) -> None:
    first, ended, third, _ = run_ranks(4, ranks.end_after_a_step, tmp_path)
    assert ended is None
    assert first.startswith("RankFailure: rank 0 of 4 could not add up its output with the others: one of them failed")
    assert third.startswith("RankFailure: rank 2 of 4")


def test_a_rank_that_hangs_is_waited_for_until_the_timeout(tmp_path: Path) -> None:
    ((seconds, error, again),) = run_ranks(2, ranks.stall_after_a_step, tmp_path, timeout=2.0, awaited=1)
    assert 1.5 < seconds < 15
    assert error.startswith("RankFailure: rank 0 of 2 could not add up its output with the others")
    assert again.startswith("RankFailure")


def test_a_rank_that_was_refused_may_call_again(tmp_path: Path) -> None:
    first, second = run_ranks(2, ranks.be_refused_once, tmp_path)
    assert first == second and len(first) == 2
