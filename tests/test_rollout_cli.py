"""`gdn-kernels rollout` and `attribute`, on real rollouts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdn_kernels.cli import main
from gdn_kernels.drift import store
from gdn_kernels.policy import PRESETS

SMALL = ["--tokens", "300", "--heads", "1,3", "--head-dims", "32,16", "--hidden", "128", "--seed", "3"]
Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """build/drift of a test is its own."""
    monkeypatch.chdir(tmp_path)


def rollout(*words: str) -> int:
    return main(["rollout", *SMALL, *words])


def reported(capsys: Output, *words: str) -> dict[str, Any]:
    assert rollout("--json", *words) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_json_has_the_errors_at_the_recorded_tokens(capsys: Output, tmp_path: Path) -> None:
    report = reported(capsys, "--policy", "nkilib", "--tau", "1:1e4", "--stream", "independent", "--save", "a.npz")
    result = store.load(tmp_path / "a.npz")
    assert set(report) == {
        "tokens", "state_error", "output_error", "worst_state_error", "seconds", "tokens_per_second",
    }  # fmt: skip
    assert report["tokens"] == result.records["tokens"].tolist()
    assert report["tokens"][0] == 1 and report["tokens"][-1] == 300
    errors = result.records["state_error"]
    assert errors.shape == (len(report["tokens"]), 3)
    assert report["state_error"] == np.median(errors, axis=1).tolist()
    assert report["worst_state_error"] == errors.max(axis=1).tolist()
    assert 1e-4 < report["state_error"][-1] < 2e-2
    assert report["tokens_per_second"] == pytest.approx(300 / report["seconds"], rel=0.2)
    assert result.config["policy"] == "nkilib" and result.config["tau"] == [1, 1e4] and result.config["seed"] == 3
    assert result.made_by["policy"]["table"]["S_mem"] == "bf16"


def test_the_table_says_the_same(capsys: Output) -> None:
    assert rollout("--policy", "exact") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "policy exact, emulated, stream independent, seed 3"
    assert lines[2].split() == ["token", "state", "error", "output", "error", "worst", "head"]
    assert lines[3].split()[0] == "1" and re.search(r"tokens/s, the oracle included", lines[-1])
    assert not Path("build").exists()


def test_the_interpreter_runs_the_same_rollout(capsys: Output) -> None:
    few = ["--tokens", "4", "--head-dims", "128,128"]
    report = reported(capsys, "--backend", "interpreter", *few)
    assert report["state_error"] == reported(capsys, *few)["state_error"]
    assert report["worst_model_error"] == [0.0] * len(report["tokens"])
    assert rollout("--backend", "interpreter", *few) == 0
    assert "to our model" in capsys.readouterr().out


LONG = ["--policy", "bf16_state_sr", "--tokens", "6000", "--checkpoint-every", "128"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("uninterrupted") / "a.npz"
    assert rollout(*LONG, "--save", str(path)) == 0
    return path.read_bytes()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_and_resumed_it_gives_the_bytes_of_an_uninterrupted_run(
    how: signal.Signals, uninterrupted: bytes, capsys: Output
) -> None:
    words = [*SMALL, *LONG, "--save", "a.npz"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gdn_kernels", "rollout", *words], stderr=subprocess.PIPE, text=True
    )
    checkpoint = Path("a.checkpoint.npz")
    while not checkpoint.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    time.sleep(0.05)
    process.send_signal(how)
    error = process.communicate()[1]
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert ("to go on:\n  python -m gdn_kernels rollout" in error and "--resume" in error) == (how == signal.SIGINT)
    assert not Path("a.npz").exists()
    with np.load(checkpoint) as file:
        assert 0 < json.loads(file["meta"].item())["token"] < 6000
    assert rollout(*LONG, "--save", "a.npz") == 2  # not by accident
    assert "a.checkpoint.npz: is an unfinished rollout" in capsys.readouterr().err
    assert rollout(*LONG, "--save", "a.npz", "--seed", "4", "--resume") == 2
    assert "is the checkpoint of another rollout: seed is 3 there and 4 here" in capsys.readouterr().err
    assert rollout(*LONG, "--save", "a.npz", "--resume") == 0
    assert Path("a.npz").read_bytes() == uninterrupted
    assert not checkpoint.exists()


SWEEP = ["--policies", "exact,nkilib", "--seeds", "1", "--tau", "1e3:1e5"]


def test_a_sweep_stores_what_single_rollouts_store(capsys: Output) -> None:
    report = reported(capsys, *SWEEP, "--save", "sweep", "--workers", "2")
    rows = report["rollouts"]
    assert not report["failed"] and len(rows) == 2
    assert [(row["policy"], row["tau"], row["seed"]) for row in rows] == [
        (policy, [1e3, 1e5], 3) for policy in ("exact", "nkilib")
    ]
    row = rows[-1]
    assert rollout("--policy", row["policy"], "--tau", "1000:1e5", "--seed", str(row["seed"]), "--save", "a") == 0
    assert Path("a").read_bytes() == Path(row["file"]).read_bytes()
    capsys.readouterr()
    assert rollout(*SWEEP, "--save", "sweep") == 0
    printed = capsys.readouterr().out
    assert "0 stored in sweep, 2 were there already" in printed
    assert len(re.findall(r"^(?:exact|nkilib) .* 1 .*e-\d\d \(.* to .*\)", printed, flags=re.MULTILINE)) == 2


def test_figures_are_small_pngs(capsys: Output) -> None:
    words = ["--tau", "1:1e4", "--tau", "1e3:1e5", "--workers", "2"]
    assert rollout(*words, "--figure", "figures/error.png", "--heat-map", "figures/heat.png") == 0
    for name in ("error", "heat"):
        data = Path(f"figures/{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) < 150_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "0"], "tokens must be a whole number of at least 1, got 0"),
        (["--heads", "2,3"], "Hv"),
        (["--tau", "5:1"], "tau must be (lowest, highest) memory length"),
        (["--stream", "noise"], "stream must be one of"),
        (["--seeds", "0"], "--seeds: expected 1 or more, got 0"),
        (["--checkpoint-every", "0"], "--checkpoint-every: expected 1 or more, got 0"),
        (["--policies", "exact,ourz"], "policy must be one of"),
        (["--backend", "simulate"], "nki"),
        (
            ["--backend", "trn2"],
            "backend 'trn2' is not available: nki is not installed; install neuronx-cc and nki from",
        ),
        (["--checkpoint", "absent"], "absent"),
    ],
)
def test_what_it_cannot_run_is_one_line_and_2(capsys: Output, words: list[str], message: str) -> None:
    assert rollout(*words) == 2
    output = capsys.readouterr()
    assert output.out == "" and message in output.err
    assert output.err.splitlines()[-1].startswith("gdn-kernels rollout: ")


@pytest.mark.parametrize("words", [["--policy", "ourz"], ["--tau", "1"], ["--heads", "2"], ["--backend", "gpu"]])
def test_wrong_options_are_wrong_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        rollout(*words)
    assert stop.value.code == 2


def test_a_result_of_another_rollout_is_not_overwritten(capsys: Output) -> None:
    assert rollout("--save", "a.npz") == 0
    before = Path("a.npz").read_bytes()
    assert rollout("--save", "a.npz", "--seed", "4") == 2
    assert "a.npz: holds another rollout: seed is 3 there and 4 here" in capsys.readouterr().err
    assert Path("a.npz").read_bytes() == before


def test_an_infinite_error_is_null_in_json() -> None:
    from gdn_kernels.cli.rollout import strict_json

    assert strict_json({"state_error": [1.0, float("inf")], "x": {"y": float("nan")}}) == (
        '{"state_error": [1.0, null], "x": {"y": null}}'
    )


def attribute(*words: str) -> int:
    return main(["attribute", *SMALL, "--tokens", "20", *words])


def test_attribution_ranks_what_the_policy_rounds(capsys: Output) -> None:
    words = ["--policy", "nkilib", "--figure", "figures/costs.png"]
    assert attribute("--json", *words) == 0
    report = json.loads(capsys.readouterr().out)
    ranked, together = report["ranked"], report["together"]
    assert {row["site"] for row in ranked} == set(PRESETS["nkilib"].table) - {"conv_out"}
    costs = [row["alone"]["state"] for row in ranked]
    assert costs == sorted(costs, reverse=True) and costs[-1] == 0 < costs[0] < 2 * together["state"]
    assert sum(row["share"] for row in ranked) == pytest.approx(1)
    assert {row["site"] for row in ranked if not row["alone"]["state"]} == {"z", "q", "S_out", "core_out"}
    data = Path("figures/costs.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) < 150_000


def test_attribution_prints_a_ranked_table(capsys: Output) -> None:
    assert attribute("--policy", "bf16_state", "--seeds", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].split()[:4] == ["site", "format", "alone", "without"]
    assert [line.split()[1] for line in lines[5:8]] == ["state", "window", "core_out"]
    assert lines[8].split()[0] == "all"


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--policy", "ours"], "policy must round float64 steps"), (["--seeds", "0"], "--seeds: expected 1 or more")],
)
def test_what_it_cannot_attribute_is_one_line_and_2(capsys: Output, words: list[str], message: str) -> None:
    assert attribute(*words) == 2
    assert capsys.readouterr().err.startswith(f"gdn-kernels attribute: {message}")


@pytest.mark.parametrize("command", [["rollout", *SMALL], ["attribute", *SMALL, "--policy", "bf16_state"]])
def test_without_numba_it_runs_and_says_how_to_be_fast(command: list[str]) -> None:
    code = "import sys; sys.modules['numba'] = None; from gdn_kernels.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *command, "--tokens", "3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pip install 'gdn-kernels[fast]'" in done.stderr and "state" in done.stdout
