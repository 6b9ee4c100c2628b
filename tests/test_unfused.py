"""The block stage by stage: the same results as the fused block, and what the timeline says of both."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from arguments import Arguments, block_arguments, check_block
from hypothesis import given, settings
from hypothesis import strategies as st

from gdn_kernels import MODELS, BlockDims, backends, gdn_block_tkg
from gdn_kernels.latency.model import model_block
from gdn_kernels.latency.stages import Saving, model_stages, savings_table, stage_by_stage

# Head tiles of 4, 2 and 1; gqa 1 to 4; K != V; odd head counts; a single key head; windows of 2, 4 and 8.
SHAPES = {
    "tile of 4": BlockDims(256, 8, 16, 64, 32, 4),
    "tile of 2, gqa 3": BlockDims(128, 4, 12, 16, 24, 2),
    "odd keys": BlockDims(256, 3, 12, 48, 80, 8),
    "odd keys, gqa 1": BlockDims(128, 5, 5, 32, 48, 4),
    "one key head, odd values": BlockDims(128, 1, 3, 64, 40, 4),
    "one head": BlockDims(128, 1, 1, 128, 128, 4),
}


def run(arguments: Arguments, lnc: int) -> tuple[np.ndarray, ...]:
    def launch(kernel: str, given: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        result: tuple[np.ndarray, ...] = backends.interpreted(kernel)[lnc].launch(**given).outputs
        return result

    return stage_by_stage(launch, arguments)


def same_bytes(left: tuple[np.ndarray, ...], right: tuple[np.ndarray, ...]) -> bool:
    return all(a.tobytes() == b.tobytes() and a.dtype == b.dtype for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("form", ["bf16", "fp32"])
@pytest.mark.parametrize("name", SHAPES)
def test_stages_meet_the_bars_with_the_bytes_of_the_fused_block_on_one_core_and_two(name: str, form: str) -> None:
    arguments = block_arguments(SHAPES[name], 3, form)
    one = run(arguments, 1)
    check_block(arguments, one)
    assert same_bytes(one, run(arguments, 2))
    assert same_bytes(one, gdn_block_tkg(**arguments))


@settings(max_examples=10)
@given(st.data())
def test_any_shape_gives_the_bytes_of_the_fused_block(data: st.DataObject) -> None:
    Hk, gqa = data.draw(st.integers(1, 9), "Hk"), data.draw(st.integers(1, 4), "gqa")
    wide = st.sampled_from([8, 20, 33, 64, 128])
    K, V, K_win = data.draw(wide, "K"), data.draw(wide, "V"), data.draw(st.integers(2, 8), "K_win")
    arguments = block_arguments(
        BlockDims(128, Hk, Hk * gqa, K, V, K_win),
        data.draw(st.integers(1, 5), "B"),
        data.draw(st.sampled_from(["bf16", "fp32"]), "form"),
    )
    results = run(arguments, data.draw(st.sampled_from([1, 2]), "lnc"))
    check_block(arguments, results)
    assert same_bytes(results, gdn_block_tkg(**arguments))


@pytest.mark.parametrize("B", [1, 3])
def test_launched_by_a_backend_with_another_eps(B: int) -> None:
    arguments = block_arguments(SHAPES["tile of 2, gqa 3"], B)
    launch = partial(backends.run, lnc=None, backend="interpreter")  # gives a single result without a tuple around it
    staged = stage_by_stage(launch, arguments, norm_eps=0.5)
    assert staged[0].shape == (B, 1, SHAPES["tile of 2, gqa 3"].value_dim)
    assert same_bytes(staged, gdn_block_tkg(**arguments, norm_eps=0.5))
    assert not same_bytes(staged, gdn_block_tkg(**arguments))


def test_batches_beyond_a_tile() -> None:
    arguments = block_arguments(BlockDims(128, 4, 8, 16, 8, 4), 66)
    assert same_bytes(run(arguments, 1), gdn_block_tkg(**arguments))


def test_the_comparison_sees_a_stage_that_is_left_out() -> None:
    arguments = block_arguments(SHAPES["tile of 4"], 2)

    def launch(kernel: str, given: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        outputs = backends.interpreted(kernel)[1].launch(**given).outputs
        return (given["q"], given["k"], *outputs[2:]) if kernel == "gates_stage" else outputs  # not normalised

    with pytest.raises(AssertionError):
        check_block(arguments, stage_by_stage(launch, arguments))


def test_the_stages_move_what_the_fused_block_moves_and_what_is_between_them_twice() -> None:
    dims, B = MODELS["Qwen3.5-35B-A3B"].dims, 1
    fused, stages = model_block(dims, B), model_stages(dims, B)
    raw = 2 * dims.conv_dim  # q, k and v before the conv, bf16
    fp32 = dims.conv_dim + 2 * dims.key_dim + 2 * dims.value_dim + 2 * dims.Hv + 4 * dims.Hv
    # after the conv; normalised q, k; z, o; a, b; decays
    assert stages.hbm_bytes - fused.hbm_bytes == 2 * B * (raw + 4 * fp32)
    assert fused.hbm_scratch_bytes == stages.hbm_scratch_bytes == 0


def test_a_total_is_the_sum_of_the_launches() -> None:
    modelled = model_stages(MODELS["Qwen3.5-0.8B"].dims, 1)
    assert len(modelled.schedules) == 5
    assert modelled.modelled_us == pytest.approx(sum(s.total for s in modelled.schedules) / 1e3)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("B", [1, 8])
def test_fusion_saves_time(B: int, lnc: int) -> None:
    dims = MODELS["Qwen3.5-2B"].dims
    fused, stages = model_block(dims, B, lnc), model_stages(dims, B, lnc)
    assert fused.floor_us == stages.floor_us
    assert fused.modelled_us < stages.modelled_us < 3 * fused.modelled_us


def test_the_table_says_what_it_holds() -> None:
    saving = Saving(("one", "two"), 8, 100.0, 150.0, 80.0)
    plain = savings_table([saving, replace(saving, B=16)], 2, "trn2")
    assert plain.startswith("Modelled, not measured: trn2, LNC 2.")
    assert plain.splitlines()[-2].split() == ["one,", "two", "8", "100.0", "150.0", "1.50", "80.0", "1.25", "1.88"]
    markdown = savings_table([saving], 2, "trn2", markdown=True).splitlines()
    assert markdown[-1] == "| one, two | 8 | 100.0 | 150.0 | 1.50 | 80.0 | 1.25 | 1.88 |"
    assert {line.count("|") for line in markdown[2:]} == {9}
