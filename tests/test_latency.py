"""The block on the timeline: close to the DMA floor, within memory, every weight read once. All of it modelled."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdn_kernels import MODELS, BlockDims, backends
from gdn_kernels.cli import main
from gdn_kernels.dtypes import bfloat16
from gdn_kernels.interpreter.machine import Machine
from gdn_kernels.interpreter.memory import PSUM, SBUF, occupancy
from gdn_kernels.latency.floor import argument_specs, floor_bytes, floor_us
from gdn_kernels.latency.growth import BATCHES, over_batch, over_hidden
from gdn_kernels.latency.model import Modelled, model_block
from gdn_kernels.latency.sensitivity import CASES, efficiency, sensitivity, sensitivity_table
from gdn_kernels.timeline.costs import TRN2, TRN3, packet_time
from gdn_kernels.timeline.report import path_by_line

LARGE = "Qwen3.5-35B-A3B"
FAMILY = {preset.dims: name for name, preset in reversed(MODELS.items())}  # every set of dimensions once
WEIGHTS = ("W_in_qkv", "W_in_z", "W_in_a", "W_in_b")


@cache
def modelled(model: str, B: int, lnc: int) -> Modelled:
    return model_block(MODELS[model].dims, B, lnc)


def dry(dims: BlockDims, B: int, lnc: int) -> list[Machine]:
    kernel = backends.interpreted("gdn_block_tkg")[lnc]
    machines: list[Machine] = kernel.launch(**argument_specs(dims, B), norm_eps=1e-6, dry=True).machines
    return machines


# ---- close to the floor ----


@pytest.mark.parametrize(("B", "lnc", "ratio"), [(1, 1, 1.10), (1, 2, 1.15), (8, 2, 1.18), (32, 2, 1.15)])
def test_the_block_is_close_to_the_floor(B: int, lnc: int, ratio: float) -> None:
    assert 1 < modelled(LARGE, B, lnc).ratio <= ratio


@pytest.mark.parametrize("name", FAMILY.values())
def test_every_model_is_close_to_the_floor_on_one_core(name: str) -> None:
    assert 1 < modelled(name, 1, 1).ratio <= 1.20


def test_the_block_is_close_to_the_floor_even_if_short_runs_are_slow() -> None:
    costs = efficiency(0.4, TRN2)
    assert 512 / packet_time(512, costs) == pytest.approx(0.4 * 23)
    assert packet_time(8192, costs) == packet_time(8192, TRN2)
    assert model_block(MODELS[LARGE].dims, 32, 2, costs).ratio <= 1.20


def test_the_floor_is_every_argument_and_result_once() -> None:
    dims = MODELS[LARGE].dims
    assert floor_us(dims, 1, 1, TRN2) == pytest.approx(149.6, abs=0.05)
    assert floor_us(dims, 1, 2, TRN2) == floor_us(dims, 1, 1, TRN2) / 2
    per_sequence = floor_bytes(dims, 2) - floor_bytes(dims, 1)
    state, window = dims.Hv * dims.K * dims.V * 4, dims.conv_dim * dims.K_win * 2
    assert per_sequence == 2 * (state + window) + (dims.H + dims.value_dim) * 2


def test_trn3_is_faster_and_its_floor_lower() -> None:
    on_trn3 = model_block(MODELS[LARGE].dims, 1, 1, TRN3)
    on_trn2 = modelled(LARGE, 1, 1)
    assert on_trn3.modelled_us < on_trn2.modelled_us
    assert on_trn3.floor_us / on_trn2.floor_us == pytest.approx(23 / 33)


# ---- bytes ----


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("name", FAMILY.values())
def test_every_model_runs_up_to_64_sequences_within_sbuf_and_without_scratch(name: str, lnc: int) -> None:
    assert modelled(name, 1, lnc).sbuf_peak_bytes <= 192 << 10
    assert modelled(name, 1, lnc).hbm_scratch_bytes == 0
    for machine in dry(MODELS[name].dims, 64, lnc):  # which refuses more than there is
        assert occupancy(machine.lifetimes, SBUF).peak <= 192 << 10
        assert occupancy(machine.lifetimes, PSUM).peak <= 16 << 10


@pytest.mark.parametrize("B", [3, 5, 17, 31, 33])
def test_odd_batches_run_within_sbuf_too(B: int) -> None:
    for machine in dry(MODELS[LARGE].dims, B, 2):
        assert occupancy(machine.lifetimes, SBUF).peak <= 192 << 10


def times_read(machines: list[Machine], weight: str, size: int) -> Counter[int]:
    """How many elements of a weight are read how many times, by DMAs of all cores."""
    count = np.zeros(size, np.uint8)
    for machine in machines:
        for instruction in machine.trace.instructions:
            for read in instruction.reads:
                if read.allocation.name == weight:
                    assert instruction.engine == "dma"
                    view = np.lib.stride_tricks.as_strided(count[read.offset :], read.shape, read.strides)
                    view += 1
    return Counter(dict(enumerate(np.bincount(count))))


@pytest.mark.parametrize(("B", "lnc"), [(1, 1), (1, 2), (8, 2), (33, 1), (64, 2)])
@pytest.mark.parametrize("name", [LARGE, "Qwen3.5-0.8B"])
def test_every_weight_byte_is_read_once(name: str, B: int, lnc: int) -> None:
    dims = MODELS[name].dims
    machines, specs = dry(dims, B, lnc), argument_specs(dims, B)
    for weight in WEIGHTS:
        size = int(np.prod(specs[weight].shape))
        once = lnc if weight in ("W_in_a", "W_in_b") else 1
        allowed = {0: 0, 1: size} if once == 1 else {0: 0, 1: size, 2: size}
        found = times_read(machines, weight, size)
        assert sum(found.values()) == size
        assert all(count <= allowed.get(times, 0) for times, count in found.items()), (weight, found)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("name", FAMILY.values())
def test_no_batch_up_to_64_is_cut(name: str, lnc: int) -> None:
    """Every tile of a batch reads all weights."""
    dims = MODELS[name].dims
    block = backends.interpreted("gdn_block_tkg").function.__globals__
    mine = block["core_heads"](dims.Hk, dims.gqa, lnc, 0)
    for B in range(1, 65):
        sizes = dims.Hk, dims.Hv, dims.K, dims.V, dims.H, dims.K_win, B
        assert block["plan_of"](*sizes, bfloat16(), mine, lnc).B == B


def test_a_weight_read_twice_would_be_noticed() -> None:
    machines = dry(MODELS["Qwen3.5-0.8B"].dims, 1, 1)
    size = int(np.prod(argument_specs(MODELS["Qwen3.5-0.8B"].dims, 1)["W_in_z"].shape))
    assert times_read(machines * 2, "W_in_z", size)[2] == size


@pytest.mark.parametrize("lnc", [1, 2])
def test_a_dry_launch_records_what_a_real_one_does(lnc: int) -> None:
    dims = BlockDims(256, 2, 6, 64, 48, 4)
    arrays = {name: np.zeros(spec.shape, spec.dtype) for name, spec in argument_specs(dims, 3).items()}
    real = backends.interpreted("gdn_block_tkg")[lnc].launch(**arrays, norm_eps=1e-6)
    for ours, theirs in zip(dry(dims, 3, lnc), real.machines, strict=True):
        assert ours.trace.instructions == theirs.trace.instructions
        assert ours.lifetimes == theirs.lifetimes


# ---- growth ----


@pytest.fixture(scope="module", params=[1, 2], ids=["LNC 1", "LNC 2"])
def batches(request: pytest.FixtureRequest) -> dict[int, Modelled]:
    return over_batch(MODELS[LARGE].dims, request.param)


def test_nothing_grows_faster_than_the_batch(batches: dict[int, Modelled]) -> None:
    assert list(batches) == list(BATCHES)
    for B in BATCHES[:-1]:
        once, twice = batches[B], batches[2 * B]
        assert twice.instructions <= 2 * once.instructions
        assert twice.sbuf_peak_bytes <= min(2 * once.sbuf_peak_bytes, 192 << 10)


def test_time_grows_no_faster_with_the_batch_than_the_bytes_that_move(batches: dict[int, Modelled]) -> None:
    first = batches[1]
    for case in batches.values():
        assert case.modelled_us / first.modelled_us <= case.hbm_bytes / first.hbm_bytes
        assert case.ratio <= first.ratio


@pytest.mark.parametrize("name", FAMILY.values())
def test_other_models_keep_near_that(name: str) -> None:
    """In the smallest, Vector and GpSimd are nearly as busy as the DMA engines at large B, and they wait in turn."""
    for B in (16, 43, 64):
        assert modelled(name, B, 1).ratio <= 1.12 * modelled(name, 1, 1).ratio


@pytest.mark.parametrize("B", [1, 8])
def test_nothing_grows_faster_than_the_hidden_size(B: int) -> None:
    sizes = over_hidden(MODELS[LARGE].dims, B)
    first = sizes[min(sizes)]
    for case in sizes.values():
        assert case.modelled_us / first.modelled_us <= case.hbm_bytes / first.hbm_bytes
        assert case.ratio <= first.ratio
    for H in list(sizes)[:-1]:
        once, twice = sizes[H], sizes[2 * H]
        assert twice.instructions <= 2 * once.instructions
        assert twice.sbuf_peak_bytes <= 2 * once.sbuf_peak_bytes


# ---- sensitivity ----


def test_the_sensitivity_table_starts_from_the_model_and_moves_with_the_constants() -> None:
    cases = ((LARGE, 1, 1), ("Qwen3.5-0.8B", 8, 2))
    rows = sensitivity(cases)
    assert rows[0].ratios == pytest.approx([modelled(*case).ratio for case in cases])
    by_change = {row.change: row.ratios for row in rows}
    assert len(by_change) == len(rows) >= 12
    slow, fast = (by_change[f"runs of 512 bytes reach {share}% of the DMA peak"] for share in (40, 100))
    assert all(a >= b for a, b in zip(slow, fast, strict=True))
    assert slow[1] > fast[1]
    assert by_change["semaphore latency x 2"] > rows[0].ratios > by_change["semaphore latency x 0.5"]
    text = sensitivity_table(rows, cases)
    assert len(text.splitlines()) == len(rows) + 1 and f"{LARGE}, B = 1, LNC 1" in text
    assert sensitivity_table(rows, cases, markdown=True).splitlines()[1] == "| --- | ---: | ---: |"


def test_the_table_is_of_the_cases_with_a_bar() -> None:
    assert CASES == ((LARGE, 1, 1), (LARGE, 1, 2), (LARGE, 8, 2), (LARGE, 32, 2))


# ---- the command and the figures ----


def test_the_command_prints_json_and_writes_a_trace_and_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    trace, figure = tmp_path / "trace.json", tmp_path / "figure.png"
    words = ["latency", "--model", "Qwen3.5-0.8B", "--batch", "2", "--lnc", "2", "--target", "trn3", "--json"]
    assert main([*words, "--trace", str(trace), "--figure", str(figure)]) == 0
    row = json.loads(capsys.readouterr().out)
    assert set(row) >= {
        *("modelled_us", "floor_us", "ratio", "engine_busy"),
        *("hbm_bytes", "hbm_scratch_bytes", "sbuf_peak_bytes", "instructions"),
    }
    assert row["ratio"] == pytest.approx(row["modelled_us"] / row["floor_us"], rel=1e-3)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert figure.stat().st_size > 10_000


def test_the_report_says_what_it_is_and_where_the_time_goes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latency", "--model", "Qwen3.5-0.8B"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("modelled from published costs, not measured")
    for part in ("critical path by source line", "longest waits of a queue", "simplifications", "in_proj.py:"):
        assert part in text


def test_the_critical_path_of_the_block_adds_up_to_its_time() -> None:
    for case in (modelled(LARGE, 1, 1), modelled(LARGE, 8, 2)):
        for schedule in case.schedules:
            assert sum(ns for _, ns, _ in path_by_line(schedule)) == pytest.approx(schedule.total)


def test_the_block_is_laid_out_the_same_every_time() -> None:
    again = model_block(MODELS[LARGE].dims, 1, 1)
    first = modelled(LARGE, 1, 1)
    assert [schedule.spans for schedule in again.schedules] == [schedule.spans for schedule in first.schedules]


def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from gdn_kernels.plots import gantt, latency_growth

    dims = MODELS["Qwen3.5-0.8B"].dims
    small = {H: model_block(replace(dims, H=H), 1) for H in (512, 1024)}
    latency_growth({"H": small, "B": small}, "growth", tmp_path / "sub" / "growth.png")
    gantt(small[512].schedules, "one core", tmp_path / "sub" / "gantt.png")
    for name in ("growth", "gantt"):
        path: Any = tmp_path / "sub" / f"{name}.png"
        assert path.read_bytes().startswith(b"\x89PNG")
