import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
from patient import best

from gdn_kernels.cli import COMMANDS, main

HEAVY = ("torch", "transformers", "matplotlib", "ml_dtypes", "jupyterlab")


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.timing
def test_import_takes_under_300_ms() -> None:
    # The process measures itself: the start of Python is no part of an import.
    code = "import time; t = time.perf_counter(); import gdn_kernels; print(time.perf_counter() - t)"
    assert best(lambda: float(fresh(code)), 0.3) < 0.3


@pytest.mark.timing
def test_help_takes_under_half_a_second() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "gdn_kernels", "--help"], capture_output=True, check=True)
        return time.perf_counter() - start

    assert best(seconds, 0.5) < 0.5


@pytest.mark.parametrize("module", ["gdn_kernels", "gdn_kernels.cli"])
def test_import_leaves_heavy_packages_alone(module: str) -> None:
    assert fresh(f"import sys, {module}; print(*[m for m in {HEAVY} if m in sys.modules])") == ""


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        assert import_module(f"gdn_kernels.cli.{command}").run
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert f"gdn-kernels {command}" in capsys.readouterr().out


def test_every_module_of_the_command_line_is_a_command(root: Path) -> None:
    assert {path.stem for path in (root / "gdn_kernels/cli").glob("*.py")} - {"__init__"} == set(COMMANDS)


@pytest.mark.parametrize("words", [[], ["nonsense"], ["doctor", "--nonsense"]])
def test_wrong_usage_ends_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "usage: gdn-kernels" in capsys.readouterr().err


def test_version_is_that_of_pyproject_and_changelog(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == version
    released = re.findall(r"^## \[(\d[^]]*)\]", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert released[:1] in ([], [version])


@pytest.fixture(scope="module")
def wheel(tracked: list[Path], root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of what is tracked, built without a network, as `pip install` of a clone would build it."""
    source = tmp_path_factory.mktemp("source")
    for path in tracked:
        copy = source / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(target), str(source)], check=True)
    (built,) = target.glob("gdn_kernels-*.whl")
    return built


def test_wheel_has_the_code_the_types_and_the_sample(wheel: Path, tracked: list[Path], root: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {str(path.relative_to(root)) for path in tracked if path.is_relative_to(root / "gdn_kernels")}
    assert {name for name in names if ".dist-info/" not in name} == package
    assert "gdn_kernels/py.typed" in names
    assert any(name.startswith("gdn_kernels/sample/") and name.endswith(".safetensors") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_run_works_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    where = [sys.executable, "-c", "import gdn_kernels; print(gdn_kernels.__file__)"]
    found = subprocess.run(where, cwd=elsewhere, env=environment, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(site)
    command = [sys.executable, "-m", "gdn_kernels", "run", "--steps", "8"]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert list((elsewhere / "build").iterdir())
