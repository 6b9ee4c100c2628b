"""The README's examples run as they stand there, and what it says about the repository is so."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gdn_kernels.cli import COMMANDS

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
RANKS = "init_process_group("  # an example for torchrun


# What each way in is recognised by. The examples are to be taken in at a glance.
WAYS_IN = {
    "plain call": " = gdn_block_tkg(hidden, **layer.arguments(), **state.arguments()",
    "patched transformers": "hf.patch(",
    "slots": " = gdn_block_tkg_slots(",
    "tensor parallelism": "TensorParallelLayer(",
}
MOST_LINES = 15


@pytest.mark.parametrize("way", WAYS_IN)
def test_each_way_in_has_a_short_example(way: str) -> None:
    (example,) = [example for example in EXAMPLES if WAYS_IN[way] in example]
    assert len([line for line in example.splitlines() if line.strip()]) <= MOST_LINES


@pytest.mark.parametrize("example", [e for e in EXAMPLES if RANKS not in e], ids=range(len(EXAMPLES) - 1))
def test_example_runs(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "transformers" in example:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)  # as another project would run it
    file = tmp_path / "example.py"
    file.write_text(example)  # a kernel's source is read back from its file
    exec(compile(example, file, "exec"), {"__name__": "example"})


def test_example_of_several_ranks_runs_as_the_readme_says(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (example,) = [example for example in EXAMPLES if RANKS in example]
    ((options, name),) = re.findall(r"^ {4}torchrun (.*) (\w+\.py)$", README, flags=re.MULTILINE)
    (tmp_path / name).write_text(example)
    command = [sys.executable, "-m", "torch.distributed.run", *options.split(), name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_commands_in_the_readme_exist(root: Path) -> None:
    assert set(re.findall(r"\bgdn-kernels ([a-z]+)", README)) == set(COMMANDS)
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"^ {4}make ([a-z]+)", README, flags=re.MULTILINE)) <= targets
    extras = (root / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in extras for extra in re.findall(r"'\.\[([a-z]+)\]'", README))


def test_layout_in_the_readme_exists(root: Path) -> None:
    listed = re.findall(r"^ {4}(gdn_kernels/\S+|tests/)\s", README, flags=re.MULTILINE)
    assert len(listed) > 5
    assert [path for path in listed if not (root / path).exists()] == []


def test_every_notebook_is_linked_in_order(root: Path) -> None:
    notebooks = [f"notebooks/{path.name}" for path in sorted((root / "notebooks").glob("*.ipynb"))]
    assert re.findall(r"^- \[\d\d .*\]\((notebooks/\w+\.ipynb)\): ", README, flags=re.MULTILINE) == notebooks


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_make_run_ends_by_pointing_to_the_notebooks(root: Path) -> None:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # not a make's make
    command = ["make", "--dry-run", "--no-print-directory", "run"]
    done = subprocess.run(command, cwd=root, env=alone, capture_output=True, text=True, check=True)
    last = done.stdout.splitlines()[-2:]
    assert "'make lab'" in last[0] and "'make notebooks'" in last[1]
