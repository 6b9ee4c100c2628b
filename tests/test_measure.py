"""Latency rows, how they are measured, and modelled beside measured. Device and vendor modules are stand-ins here."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gdn_kernels import MODELS, backends
from gdn_kernels.cli import main
from gdn_kernels.cli.step import random_arguments
from gdn_kernels.latency import compare, measure, rows
from gdn_kernels.latency.model import model_block
from gdn_kernels.latency.modelled import BATCHES, modelled_row
from gdn_kernels.latency.rows import Row, RowError
from gdn_kernels.timeline.costs import COSTS

SMALL = "Qwen3.5-0.8B"
CASE = measure.Case(SMALL, 1, 1)
VERSIONS = {"nki": "0.6.0", "neuronx-cc": "2.27.1", "torch-neuronx": None, "nrtpy": "2.34.10", "runtime": None}
MEASURED = Row(
    kind="measured",
    model=SMALL,
    dims=MODELS[SMALL].dims,
    B=1,
    lnc=1,
    target="trn2",
    median_us=70.0,
    spread={"min": 66.0, "p10": 67.0, "p90": 75.0, "max": 90.0},
    repeats=100,
    warmup=10,
    how="by hand",
    versions=VERSIONS,
    instance="trn2.3xlarge",
    package="0.1.0",
    date="2026-10-01",
)
MODELLED = modelled_row(SMALL, 1, 1, "trn2", 61.6, "0.1.0")


# ---- rows ----


def test_rows_come_back_as_they_went(tmp_path: Path) -> None:
    path = tmp_path / "new" / "measured.jsonl"
    assert rows.read(path) == []
    other = replace(MEASURED, model=None, dims=replace(MEASURED.dims, Hv=48), instance=None)
    rows.append(path, MEASURED)
    rows.append(path, other)
    assert rows.read(path) == [MEASURED, other]
    rows.save(path, [MODELLED])
    assert rows.read_folder(path.parent) == [MODELLED]
    assert [file.name for file in path.parent.iterdir()] == ["measured.jsonl"]


def test_a_last_line_without_an_end_is_no_trap(tmp_path: Path) -> None:
    path = tmp_path / "measured.jsonl"
    rows.append(path, MEASURED)
    path.write_text(path.read_text().rstrip("\n"))
    rows.append(path, MEASURED)
    assert rows.read(path) == [MEASURED, MEASURED]


def test_a_saved_row_that_says_the_same_keeps_its_date(tmp_path: Path) -> None:
    path = tmp_path / "modelled.jsonl"
    old = replace(MODELLED, date="2026-01-01")
    rows.save(path, [old])
    rows.save(path, [MODELLED, replace(MODELLED, B=8)])
    assert [row.date for row in rows.read(path)] == ["2026-01-01", MODELLED.date]
    rows.save(path, [replace(MODELLED, median_us=60.0)])
    assert rows.read(path) == [replace(MODELLED, median_us=60.0)]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "guessed"},
        {"kind": "modelled"},  # with the fields of a measured one
        {"model": "no such model"},
        {"dims": replace(MEASURED.dims, H=2048)},
        {"B": 0},
        {"B": True},
        {"lnc": 3},
        {"target": "v2"},
        {"median_us": float("nan")},
        {"median_us": -1.0},
        {"median_us": 100.0},  # outside of its own spread
        {"spread": None},
        {"spread": {"min": 66.0, "max": 90.0}},
        {"repeats": None},
        {"warmup": -1},
        {"how": ""},
        {"versions": None},
        {"versions": {"nki": "0.6.0"}},
        {"date": "yesterday"},
    ],
    ids=str,
)
def test_a_row_that_breaks_the_schema_cannot_be_made(change: dict[str, Any]) -> None:
    with pytest.raises(RowError):
        replace(MEASURED, **change)


@pytest.mark.parametrize(
    "change", [{"kind": "measured"}, {"spread": MEASURED.spread}, {"repeats": 1}, {"instance": "x"}]
)
def test_a_modelled_row_has_nothing_of_a_measured_one(change: dict[str, Any]) -> None:
    with pytest.raises(RowError, match=r"modelled|spread"):
        replace(MODELLED, **change)


GOOD = json.dumps(asdict(MEASURED))


@pytest.mark.parametrize(
    "line",
    [
        GOOD[:-9],
        "",
        "[1, 2]",
        "null",
        json.dumps({"name": "somebody else's file"}),
        json.dumps({**asdict(MEASURED), "colour": "red"}),
        json.dumps({**asdict(MEASURED), "dims": {"H": 128}}),
        json.dumps({**asdict(MEASURED), "dims": "large"}),
        json.dumps({**asdict(MEASURED), "dims": {**asdict(MEASURED.dims), "H": 100}}),
        json.dumps({**asdict(MEASURED), "model": ["a"]}),
        json.dumps({**asdict(MEASURED), "lnc": "one"}),
        json.dumps({**asdict(MEASURED), "spread": [1, 2, 3, 4]}),
    ],
)
def test_a_damaged_or_foreign_file_gives_one_error_with_file_and_line(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(RowError, match=f"^{path}:2: "):
        rows.read(path)
    with pytest.raises(RowError, match=f"^{path}:2: "):
        rows.append(path, MEASURED)
    assert path.read_text() == f"{GOOD}\n{line}\n"
    assert main(["latency", "--compare", "--data", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{path}:2: " in error


def test_a_file_that_is_no_text_gives_one_too(tmp_path: Path) -> None:
    path = tmp_path / "measured.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RowError, match=f"^{path}:1: "):
        rows.read(path)


# ---- the rows that are kept in the repository ----


def test_modelled_rows_cover_every_model_and_can_be_computed_again(root: Path) -> None:
    kept = rows.read(root / "data" / "latency" / "modelled.jsonl")
    cases = {(row.model, row.B, row.lnc, row.target) for row in kept}
    assert cases == {(name, B, lnc, "trn2") for name in MODELS for B in BATCHES for lnc in (1, 2)}
    assert len(kept) == len(cases) and {row.kind for row in kept} == {"modelled"}
    again = [row for row in kept if (row.model, row.B) in {(SMALL, 1), (SMALL, 8), ("Qwen3.5-35B-A3B", 1)}]
    assert len(again) == 6
    for row in again:
        us = model_block(row.dims, row.B, row.lnc, COSTS[row.target]).modelled_us
        assert row.median_us == round(us, 2), "out of date: run `gdn-kernels latency --save`"


def test_save_writes_what_is_modelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gdn_kernels.latency.modelled.model_block", lambda *_: SimpleNamespace(modelled_us=12.345))
    assert main(["latency", "--save", "--data", str(tmp_path)]) == 0
    assert main(["latency", "--save", "--data", str(tmp_path), "--target", "trn3"]) == 0
    kept = rows.read(tmp_path / "modelled.jsonl")
    assert {row.target for row in kept} == {"trn2", "trn3"} and len(kept) == 2 * 2 * len(BATCHES) * len(MODELS)
    assert {row.median_us for row in kept} == {12.35}
    assert f"{len(kept)} modelled rows" in capsys.readouterr().out


# ---- compare ----


def test_compare_puts_each_measured_row_beside_the_modelled_one_of_its_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows.save(tmp_path / "modelled.jsonl", [MODELLED, modelled_row(SMALL, 8, 1, "trn2", 126.7, "0.1.0")])
    # In whichever file a row is, its kind decides.
    for row in (MEASURED, replace(MEASURED, B=32), replace(MEASURED, lnc=2, median_us=71.0), MODELLED):
        rows.append(tmp_path / "measured.jsonl", row)
    found = compare.compare(rows.read_folder(tmp_path))
    assert [(c.measured.B, c.measured.lnc) for c in found] == [(1, 1), (32, 1), (1, 2)]
    assert [c.modelled for c in found] == [MODELLED, None, None]
    assert main(["latency", "--compare", "--data", str(tmp_path)]) == 0
    header, first, second, third = capsys.readouterr().out.splitlines()
    assert header.index("modelled, us") < header.index("measured, us")
    assert first.split()[:6] == [SMALL, "1", "1", "trn2", "61.6", "70.0"] and "1.14" in first
    assert second.split()[4] == third.split()[4] == "none"


def test_a_modelled_row_cannot_stand_for_a_measured_one() -> None:
    for measured, modelled in ((MODELLED, None), (MODELLED, MODELLED), (MEASURED, MEASURED)):
        with pytest.raises(ValueError, match="must be a"):
            compare.Comparison(measured, modelled)
    with pytest.raises(ValueError, match="one case"):
        compare.Comparison(MEASURED, replace(MODELLED, B=8))


def test_without_measured_rows_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows.save(tmp_path / "modelled.jsonl", [MODELLED])
    for folder in (tmp_path, tmp_path / "none"):
        assert main(["latency", "--compare", "--data", str(folder)]) == 0
        out = capsys.readouterr().out
        assert out.count("\n") == 1 and out.startswith("no measured rows")


# ---- measuring ----


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that looks like an instance."""
    monkeypatch.setattr(measure.glob, "glob", lambda _: ["/dev/neuron0"])
    monkeypatch.setattr(measure, "_output", lambda *command: OUTPUTS.get(command[0], ""))
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")  # so that what is set in a test is undone


OUTPUTS = {"neuron-ls": "instance-type: trn2.3xlarge\ninstance-id: i-0\n+---+", "dpkg-query": "2.34.10.0"}


class FakeNrtpy(ModuleType):
    """nrtpy as far as it is documented; `calls` is what was asked of it."""

    def __init__(self, durations: list[float]) -> None:
        super().__init__("nrtpy")
        self.__spec__ = SimpleNamespace()  # type: ignore[assignment]
        self.calls: list[tuple[str, Any]] = []
        module = self

        class NrtpyTensor:
            @classmethod
            def from_numpy(cls, array: np.ndarray, name: str | None = None, core_id: int = 0) -> Any:
                return SimpleNamespace(array=array, name=name)

        class NrtpyModel:
            input_tensors_info = dict.fromkeys(random_arguments(SMALL, 1, 0), None)

            @classmethod
            def load_from_neff(cls, neff_path: Path, name: str | None = None, core_id: int = 0) -> Any:
                module.calls.append(("load", neff_path))
                return cls()

            def benchmark(self, inputs: dict[str, Any], **options: Any) -> Any:
                module.calls.append(("benchmark", (inputs, options)))
                return SimpleNamespace(durations_ms=durations)

        self.NrtpyModel, self.NrtpyTensor = NrtpyModel, NrtpyTensor


def a_neff(folder: Path) -> Path:
    path = folder / "block.neff"
    path.write_bytes(b"neff")
    about = {"model": SMALL, "B": 1, "lnc": 2, "versions": {**VERSIONS, "nrtpy": None}}
    (folder / "block.neff.json").write_text(json.dumps(about))
    return path


@pytest.mark.usefixtures("device")
def test_nrtpy_is_asked_to_warm_up_and_its_times_become_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nrtpy = FakeNrtpy([0.001 * us for us in (50, 10, 40, 20, 30)])
    monkeypatch.setitem(sys.modules, "nrtpy", nrtpy)
    monkeypatch.setattr(measure, "_wheel_version", {"nrtpy": "2.34.10"}.get)
    path = a_neff(tmp_path)
    words = ["latency", "--measure", "--neff", str(path), "--warmup", "3", "--repeats", "5", "--data", str(tmp_path)]
    assert main(words) == 0
    assert nrtpy.calls[0] == ("load", path)
    inputs, options = nrtpy.calls[1][1]
    assert options == {"warmup_iter": 3, "benchmark_iter": 5, "mode": "device"}
    arguments = random_arguments(SMALL, 1, 0)
    assert inputs.keys() == arguments.keys() and all(tensor.name == name for name, tensor in inputs.items())
    assert {inputs[n].array.dtype for n in ("hidden", "W_in_z", "conv_state")} == {np.dtype(np.uint16)}
    assert all(inputs[name].array.tobytes() == value.tobytes() for name, value in arguments.items())
    (row,) = rows.read(tmp_path / "measured.jsonl")
    assert (row.kind, row.model, row.B, row.lnc, row.target) == ("measured", SMALL, 1, 2, "trn2")
    assert row.median_us == 30 and row.spread == {"min": 10, "p10": 14, "p90": 46, "max": 50}
    assert (row.repeats, row.warmup, row.how) == (5, 3, measure.NRTPY_HOW)
    assert row.versions == {**VERSIONS, "runtime": "2.34.10.0"}  # of both environments
    assert row.instance == "trn2.3xlarge"
    assert json.loads(capsys.readouterr().out)["median_us"] == 30
    assert measure.os.environ["NEURON_LOGICAL_NC_CONFIG"] == "2"


@pytest.mark.usefixtures("device")
def test_a_file_that_is_not_the_block_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    neff, arguments = measure.read_neff(a_neff(tmp_path)), random_arguments(SMALL, 1, 0)
    monkeypatch.setitem(sys.modules, "nrtpy", FakeNrtpy([0.01] * 10))
    with pytest.raises(measure.CannotMeasure, match="10 executions in 5 calls"):
        measure.with_nrtpy(neff, arguments, 1, 5, "0.1.0")
    with pytest.raises(measure.CannotMeasure, match="its inputs are"):
        measure.with_nrtpy(neff, {"x": arguments["hidden"]}, 1, 10, "0.1.0")


def test_timing_warms_up_first_and_waits_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    clock = iter(np.cumsum([0, 1e-6, 5, 2e-6, 5, 9e-6]))

    def tick() -> float:
        log.append("clock")
        return float(next(clock))

    monkeypatch.setattr(measure.time, "perf_counter", tick)
    us = measure.timed(lambda: log.append("work"), lambda: log.append("wait"), warmup=2, repeats=3)
    assert us == pytest.approx([1, 2, 9])
    assert log == ["work", "work", "wait", *["clock", "work", "wait", "clock"] * 3]


@pytest.mark.usefixtures("device")
def test_torch_steps_on_from_their_own_states(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    log: list[Any] = []

    def run(kernel: str, arguments: dict[str, Any], lnc: int, backend: str) -> tuple[Any, ...]:
        log.append((kernel, lnc, backend, float(arguments["conv_state"][0, 0, 0]), arguments["norm_eps"]))
        return torch.zeros(1), arguments["conv_state"] * 0 + len(log), arguments["recurrent_state"]

    monkeypatch.setattr(backends, "run", run)
    monkeypatch.setattr(measure, "_require_module", lambda *_: None)
    monkeypatch.setattr(measure, "_torch", lambda: ("cpu", lambda: log.append("wait")))
    clock = iter(np.arange(0, 8, 1) * 300e-6)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(clock)))
    arguments = random_arguments(SMALL, 1, 0)
    row = measure.with_torch(CASE, arguments, warmup=1, repeats=4, package="0.1.0")
    assert row.median_us == 30.0 and row.repeats == 4 and row.how == measure.TORCH_HOW
    steps = [entry for entry in log if entry != "wait"]
    assert len(steps) == (1 + 4) * measure.LAUNCHES and log.count("wait") == 1 + 4
    assert {entry[:3] for entry in steps} == {("gdn_block_tkg", 1, "trn2")}
    before = float(arguments["conv_state"][0, 0, 0])
    assert [entry[3] for entry in steps[: measure.LAUNCHES]] == [before, *range(1, measure.LAUNCHES)]
    assert steps[measure.LAUNCHES][3] == before  # the next repeat is the same work


@pytest.mark.usefixtures("device")
def test_compile_keeps_what_nki_leaves_and_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(kernel: str, arguments: dict[str, Any], lnc: int, backend: str) -> tuple[Any, ...]:
        assert measure.os.environ["NEURON_LOGICAL_NC_CONFIG"] == "2"
        (Path(measure.os.environ["NKI_ARTIFACTS_DIR"]) / "kernel.neff").write_bytes(b"compiled")
        return ()

    monkeypatch.setenv("NKI_ARTIFACTS_DIR", "to be restored")
    monkeypatch.setattr(backends, "run", run)
    monkeypatch.setattr(measure, "_wheel_version", {"nki": "0.6.0"}.get)
    path = tmp_path / "build" / "block.neff"
    assert main(["latency", "--compile", str(path), "--model", SMALL, "--lnc", "2"]) == 0
    assert path.read_bytes() == b"compiled"
    neff = measure.read_neff(path)
    assert neff.case == measure.Case(SMALL, 1, 2) and neff.versions["nki"] == "0.6.0"
    monkeypatch.setattr(backends, "run", lambda *_: ())
    with pytest.raises(measure.CannotMeasure, match="0 compiled files"):
        measure.compile_neff(path, CASE, {})


def one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["latency", *words]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and error.startswith("gdn-kernels latency: ")
    return error


@pytest.mark.parametrize("words", [["--measure"], ["--measure", "--neff"], ["--compile"]], ids=" ".join)
def test_without_a_device_there_is_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure.glob, "glob", lambda _: [])
    words = words if words == ["--measure"] else [*words, str(a_neff(tmp_path))]
    assert "no /dev/neuron* device" in one_line([*words, "--model", SMALL, "--data", str(tmp_path)], capsys)
    assert not (tmp_path / "measured.jsonl").exists()


@pytest.mark.usefixtures("device")
def test_on_a_device_without_the_software_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    neff = str(a_neff(tmp_path))
    where = ["--model", SMALL, "--data", str(tmp_path)]
    for name in ("nki", "nrtpy", "torch_neuronx"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("NKI_ARTIFACTS_DIR", "to be restored")
    monkeypatch.setattr(measure.importlib.util, "find_spec", lambda _: None)
    assert "torch_neuronx is not installed" in one_line(["--measure", *where], capsys)
    assert "nrtpy is not installed" in one_line(["--measure", "--neff", neff, *where], capsys)
    monkeypatch.setattr(backends, "_nki_missing", lambda: "nki is not installed")
    assert "nki is not installed" in one_line(["--compile", neff, *where], capsys)
    monkeypatch.setitem(sys.modules, "nki", ModuleType("nki"))
    assert "a process of its own" in one_line(["--compile", neff, *where], capsys)
    (tmp_path / "block.neff.json").write_text('{"model": "none"}')
    assert "not the description" in one_line(["--measure", "--neff", neff, *where], capsys)
    assert "no such file" in one_line(["--measure", "--neff", neff + "x", *where], capsys)
    assert "at least 1" in one_line(["--measure", "--repeats", "0", *where], capsys)


def test_the_tools_that_name_instance_and_runtime_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert measure.instance_type() is None
    assert set(measure.versions()) == set(rows.VERSIONS)
