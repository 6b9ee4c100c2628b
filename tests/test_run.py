"""`gdn-kernels run`: the table, the exit codes, and that it turns red when something is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdn_kernels import backends, ops, sample
from gdn_kernels.cli import main

STEPS = 8  # reaches two of the recorded states
Output = pytest.CaptureFixture[str]
Results = tuple[Any, Any, Any]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    def run(*words: str) -> int:
        return main(["run", "--backend", "interpreter", "--out", str(tmp_path / "build"), *words])

    return run


def lines_with(word: str, output: str) -> list[str]:
    return [line.strip() for line in output.splitlines() if word in line]


def missed(output: str) -> list[str]:
    """The stages of the table that missed their tolerance."""
    return [line[:40].strip() for line in lines_with("MISSED", output) if "tolerances" not in line]


def test_whole_sample_is_within_tolerance(run: Callable[..., int], capsys: Output, tmp_path: Path) -> None:
    status = run()
    output = capsys.readouterr()
    assert status == 0, output.out
    assert "interpreter: no device was used" in output.out
    assert lines_with("tolerance", output.out)[0].split() == ["stage", "error", "tolerance", "time"]
    assert [line.split(",")[1].strip() for line in lines_with("kernel,", output.out)] == ["bf16 form", "fp32 form"]
    assert len(lines_with("state after 1, 8, 64", output.out)) == 2
    assert output.out.splitlines()[-1] == "all 21 within tolerance"
    assert "64/64" in output.err  # the progress bar
    assert (tmp_path / "build/decode_errors.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("lnc", ["1", "2"])
def test_cores_make_no_difference(run: Callable[..., int], capsys: Output, lnc: str) -> None:
    assert run("--steps", "2", "--lnc", lnc) == 0, capsys.readouterr().out


def test_own_checkpoint(run: Callable[..., int], capsys: Output) -> None:
    assert run("--checkpoint", str(sample.PATH), "--layer", "0", "--steps", str(STEPS), "--seed", "7") == 0
    output = capsys.readouterr().out
    assert f"{sample.PATH} layer 0: H 256, Hk 2, Hv 4, K 128, V 128, K_win 4" in output
    assert "recording" not in output
    assert output.splitlines()[-1] == "all 9 within tolerance"


def tampered(form: str, change: Callable[[sample.Recording], sample.Recording]) -> Callable[[str], sample.Recording]:
    load = sample.load_recording
    return lambda asked: change(load(asked)) if asked == form else load(asked)


def scale_state(recording: sample.Recording) -> sample.Recording:
    states = recording.recurrent_state
    return replace(recording, recurrent_state={**states, STEPS: states[STEPS] * np.float32(1 + 1e-5)})


def swap_heads(recording: sample.Recording) -> sample.Recording:
    heads = recording.core_out.reshape(-1, 1, 1, 4, 128)[..., [0, 2, 1, 3], :]
    return replace(recording, core_out=heads.reshape(recording.core_out.shape))


@pytest.mark.parametrize(
    ("form", "change", "stage"),
    [("fp32", scale_state, "state after 1, 8"), ("bf16", swap_heads, "core_out (input of out_proj)")],
)
def test_tampered_recording_is_noticed(
    run: Callable[..., int], capsys: Output, monkeypatch: pytest.MonkeyPatch, form: str, change: Any, stage: str
) -> None:
    monkeypatch.setattr(sample, "load_recording", tampered(form, change))
    assert run("--steps", str(STEPS)) == 1
    output = capsys.readouterr().out
    assert missed(output) == [stage]
    assert output.splitlines()[-1] == "1 of 21 tolerances MISSED"


def bf16_state(core_out: Any, window: Any, S: Any) -> Results:
    """A state that went through bf16."""
    return core_out, window, S.astype(core_out.dtype).astype(S.dtype) if core_out.dtype != S.dtype else S


def transposed_state(core_out: Any, window: Any, S: Any) -> Results:
    return core_out, window, np.ascontiguousarray(S.swapaxes(-1, -2))


def truncated_window(core_out: Any, window: Any, S: Any) -> Results:
    """The newest column one bf16 step too small where it is positive."""
    window = window.copy()
    if window.dtype != S.dtype:
        bits = window[..., -1].view(np.uint16)
        window[..., -1] = np.where((bits > 0) & (bits < 0x8000), bits - 1, bits).view(window.dtype)
    return core_out, window, S


def not_a_number(core_out: Any, window: Any, S: Any) -> Results:
    core_out = core_out.copy()
    core_out[0, 0, 5] = np.nan
    return core_out, window, S


@pytest.mark.parametrize(
    ("fault", "stages"),
    [
        (bf16_state, {"state, given the window", "state, worst head"}),
        (transposed_state, {"state, given the window", "state, drift", "state after 1, 8"}),
        (truncated_window, {"window, wrong elements"}),
        (not_a_number, {"core_out, furthest in bf16 steps", "core_out, drift", "core_out (input of out_proj)"}),
    ],
)
def test_faulty_kernel_is_noticed(
    run: Callable[..., int], capsys: Output, monkeypatch: pytest.MonkeyPatch, fault: Any, stages: set[str]
) -> None:
    kernel = ops.gdn_block_tkg
    monkeypatch.setattr(ops, "gdn_block_tkg", lambda *args, **kwargs: fault(*kernel(*args, **kwargs)))
    assert run("--steps", str(STEPS)) == 1
    assert stages <= set(missed(capsys.readouterr().out))


def test_interrupt_ends_with_one_line_and_130(
    run: Callable[..., int], capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Results:
        raise KeyboardInterrupt

    monkeypatch.setattr(ops, "gdn_block_tkg", interrupted)
    assert run() == 130
    assert capsys.readouterr().err.splitlines()[-1] == "gdn-kernels run: interrupted"


def test_without_matplotlib_it_says_how_to_get_the_figure(
    run: Callable[..., int], capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run("--steps", "1") == 0
    assert "no figure: it needs matplotlib (pip install matplotlib)" in capsys.readouterr().out
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps: expected 1 or more, got 0"),
        (["--steps", "65"], "--steps: expected at most the 64 of the sample, got 65"),
        (["--layer", "0"], "--checkpoint and --layer: expected both or neither"),
        (["--checkpoint", "absent"], "--checkpoint and --layer: expected both or neither"),
        (["--checkpoint", "absent", "--layer", "0"], "absent/config.json: expected"),
        (["--checkpoint", str(sample.PATH), "--layer", "1"], "layer: expected 0 to 0"),
    ],
)
def test_what_it_cannot_run_is_one_line_and_2(
    run: Callable[..., int], capsys: Output, words: list[str], message: str
) -> None:
    assert run(*words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert output.err.startswith(f"gdn-kernels run: {message}")


def test_unavailable_backend_says_why(run: Callable[..., int], capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(name: str) -> str:
        raise backends.BackendUnavailable(f"{name}: no such device")

    monkeypatch.setattr(backends, "choose", choose)
    assert run() == 2
    assert capsys.readouterr().err == "gdn-kernels run: interpreter: no such device\n"
