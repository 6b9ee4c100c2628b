"""The interpreter is quick enough to run in every test. `make bench` prints the figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patient import best


@pytest.mark.timing
def test_an_instruction_costs_40_us_above_numpy_and_a_step_a_second(root: Path) -> None:
    command = [sys.executable, str(root / "tests" / "benchmarks" / "interpreter.py"), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def excess() -> float:
        """The worst of the figures as a share of its bound."""
        found = json.loads(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)
        assert len(found["instructions_us"]) >= 10
        return max(found["median_overhead_us"] / 40, *found["step_seconds"].values())

    assert best(excess, 1, tries=5) < 1
