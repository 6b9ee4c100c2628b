"""The notebooks as files: what nbval can notice, pictures, and that they hold nothing of one machine."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gdn_kernels import notebook

pytest.importorskip("nbval")
NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
MACHINE = r"(?<![\w.])/(?:root|home|work|Users|tmp|var|usr|private)/\w+|\.venv|site-packages"
IGNORED = "# NBVAL_IGNORE_OUTPUT"

TINY = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
}


def cells(path: Path) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return content


def text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "".join(value)


def nbval(path: Path) -> subprocess.CompletedProcess[str]:
    config = NOTEBOOKS[0].parent / "nbval.cfg"
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-sanitize-with", str(config), str(path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(path), "-rf"]
    return subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)


def first_cells(source: Path, target: Path, replace: tuple[str, str] = ("", "")) -> None:
    """Copy a notebook up to and with the first compared cell that prints a number, and change its stored output."""
    content = json.loads(source.read_text())
    for index, cell in enumerate(content["cells"]):
        printed = [output for output in cell.get("outputs", []) if output["output_type"] == "stream"]
        if printed and not text(cell["source"]).startswith(IGNORED):
            stored = text(printed[0]["text"])
            assert replace[0] in stored
            printed[0]["text"] = stored.replace(*replace)
            content["cells"] = content["cells"][: index + 1]
            target.write_text(json.dumps(content))
            return
    raise AssertionError(f"{source.name} has no compared number")


def test_a_changed_number_in_a_stored_output_is_noticed(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.ipynb", tmp_path / "bad.ipynb"
    first_cells(NOTEBOOKS[0], good)
    first_cells(NOTEBOOKS[0], bad, ("2048", "2049"))
    done = nbval(tmp_path)
    assert done.returncode == 1
    assert re.findall(r"^FAILED (?:.*/)?(\w+)\.ipynb", done.stdout, re.MULTILINE) == ["bad"], done.stdout
    assert "2049" in done.stdout


def test_command_names_the_notebook_and_the_cell_that_fails(tmp_path: Path) -> None:
    sources = ["print(1)", "# the culprit\n1 / 0"]
    content = [
        {"cell_type": "code", "id": f"c{i}", "source": source, "metadata": {}, "outputs": [], "execution_count": None}
        for i, source in enumerate(sources)
    ]
    broken = tmp_path / "broken.ipynb"
    broken.write_text(json.dumps({**TINY, "cells": content}))
    command = [sys.executable, "-m", "gdn_kernels", "notebooks", str(broken), "--out", str(tmp_path / "html"), "--save"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "broken.ipynb, cell 1 (# the culprit)" in done.stderr and "ZeroDivisionError" in done.stderr
    assert (tmp_path / "html/broken.html").is_file() and "broken.html" in (tmp_path / "html/index.html").read_text()
    assert cells(broken)[0]["outputs"] == []  # a notebook that failed keeps its stored outputs


def test_command_names_the_notebook_that_gets_no_kernel(tmp_path: Path) -> None:
    lost = tmp_path / "lost.ipynb"
    kernel = {"display_name": "None", "language": "python", "name": "no-such-kernel"}
    lost.write_text(json.dumps({**TINY, "metadata": {"kernelspec": kernel}, "cells": []}))
    command = [sys.executable, "-m", "gdn_kernels", "notebooks", str(lost), "--out", str(tmp_path / "html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "lost.ipynb: no kernel" in done.stderr and "no-such-kernel" in done.stderr, done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored_without_errors_or_traces_of_the_machine(path: Path) -> None:
    content = path.read_text()
    assert set(json.loads(content)["metadata"]) == {"kernelspec", "language_info"}
    assert json.loads(content)["metadata"]["language_info"] == {"name": "python"}
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert "execution" not in cell["metadata"]
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr"


def traces(output: dict[str, Any]) -> list[str]:
    """Folders and names of the machine that an output was made on, pictures included."""
    shown = [output.get("text", ""), *output.get("data", {}).values(), json.dumps(output.get("metadata", {}))]
    return re.findall(f"{MACHINE}|\\b{re.escape(platform.node())}\\b", "\n".join(text(each) for each in shown))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_of_the_machine_is_shown(path: Path) -> None:
    assert [trace for cell in cells(path) for output in cell.get("outputs", []) for trace in traces(output)] == []
    assert re.findall(MACHINE, "".join(text(cell["source"]) for cell in cells(path))) == []


@pytest.mark.parametrize("path", ["/" + name + "/x" for name in ("root", "home", "tmp", "work")] + [platform.node()])
def test_a_trace_of_the_machine_is_noticed(path: str) -> None:
    outputs = (
        {"output_type": "stream", "text": ["saved\n", f"in {path}\n"]},
        {"output_type": "display_data", "data": {"text/plain": "a picture", "image/svg+xml": f"<text>{path}</text>"}},
    )
    assert all(traces(output) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_code_cell_shows_versions_and_backend(path: Path) -> None:
    first = next(cell for cell in cells(path) if cell["cell_type"] == "code")
    assert text(first["source"]).startswith(IGNORED)
    printed = "".join(text(output.get("text", "")) for output in first["outputs"])
    assert "numpy" in printed and "backend" in printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_cell_defines_what_belongs_in_a_module(path: Path) -> None:
    for cell in cells(path):
        if cell["cell_type"] == "code":
            assert not re.search(r"^\s*(def|class) ", text(cell["source"]), re.MULTILINE)


def compared(output: dict[str, Any]) -> str:
    """What nbval compares of an output: nothing of a picture."""
    data = output.get("data", {})
    return (
        "" if any(kind.startswith("image/") for kind in data) else text(output.get("text", data.get("text/plain", "")))
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pictures_are_small_described_and_beside_a_printed_number(path: Path) -> None:
    seen, code = 0, [cell for cell in cells(path) if cell["cell_type"] == "code"]
    for cell, following in zip(code, [*code[1:], {"outputs": []}], strict=True):
        for output in cell.get("outputs", []):
            for kind, data in output.get("data", {}).items():
                if kind.startswith("image/"):
                    seen += 1
                    assert len(text(data)) <= notebook.LARGEST_PICTURE
                    assert len(output["metadata"][kind]["alt"]) > 20
                    beside = "".join(compared(other) for other in [*cell["outputs"], *following["outputs"]])
                    assert re.search(r"\d", beside)
    assert seen


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_takeaways_have_a_number_and_exercises_their_answers(path: Path) -> None:
    plain = [text(o["data"].get("text/plain", "")) for c in cells(path) for o in c.get("outputs", []) if "data" in o]
    boxes = [box for box in plain if box.startswith("Takeaway: ")]
    assert boxes and all(re.search(r"\d", box) for box in boxes)
    prose = "".join(text(cell["source"]) for cell in cells(path) if cell["cell_type"] == "markdown")
    assert path.stem.startswith("00") or prose.count("<details>") == prose.count("</details>") >= 2


def test_source_is_read_from_the_file() -> None:
    whole = notebook.source("kernels.conv1d", "_past_columns")
    assert whole.startswith("def _past_columns(")
    part = notebook.source("kernels.conv1d", "conv1d", first="shifted, old", last="nisa.activation")
    assert part.strip().startswith("shifted") and part.splitlines()[-1].strip().startswith("nisa.activation")
    assert notebook.source("kernels.block", "Inputs").startswith("@dataclass")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("kernels.nothing", "f"), "module"),
        (("kernels.conv1d", "nothing"), "name"),
        (("kernels.conv1d", "conv1d", "no such line"), "first"),
        (("kernels.conv1d", "conv1d", "", "no such line"), "last"),
    ],
)
def test_source_that_is_not_there_is_refused(arguments: tuple[str, ...], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} must"):
        notebook.source(*arguments)


def test_check_fails_when_the_error_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    notebook.check("a sum", 1e-7, below=1e-6)
    assert capsys.readouterr().out == "ok  a sum: below 1e-06\n"
    for error in (1e-6, float("nan")):
        with pytest.raises(AssertionError, match="a sum"):
            notebook.check("a sum", error, below=1e-6)


def test_figures_are_the_same_bytes_each_time() -> None:
    from gdn_kernels import diagrams

    first, second = (notebook.svg(diagrams.conv_window(4), 'a "window"') for _ in range(2))
    assert first == second
    assert "&quot;window&quot;" in first or "'a \"window\"'" in first
    assert not re.search(r"20\d\d-\d\d-\d\d", first)


def test_jupyter_is_there_for_make_lab() -> None:
    assert shutil.which("jupyter-lab", path=str(Path(sys.executable).parent))
