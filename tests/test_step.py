"""`gdn-kernels step` at the size of Qwen3.5-35B-A3B."""

import json
import subprocess
import sys

import pytest
from patient import best

from gdn_kernels.cli import main


@pytest.mark.timing
def test_one_step_at_model_size_takes_under_a_second_and_a_gigabyte() -> None:
    command = [sys.executable, "-m", "gdn_kernels", "step", "--model", "Qwen3.5-35B-A3B", "--batch", "1", "--json"]
    reports = []

    def seconds() -> float:
        reports.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
        return float(reports[-1]["seconds"])

    assert best(seconds, 1) < 1
    for report in reports:
        assert report["peak_rss_mb"] < 1000
        assert report["state_error"] <= 5e-7
        assert report["output_error"] <= 4e-3


def test_a_wrong_batch_and_an_unknown_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", "--batch", "0"]) == 2
    assert "--batch must be at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["step", "--model", "Qwen2"])
    assert "Qwen3.5-35B-A3B" in capsys.readouterr().err


def test_the_small_models_step_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", "--model", "Qwen3.5-0.8B", "--lnc", "2"]) == 0
    printed = capsys.readouterr().out
    assert "no device was used" in printed and "state_error" in printed
