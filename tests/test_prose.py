"""Spelling, links and anchors of everything that is read: the documents, the notebooks, docstrings and comments."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "data/README.md")),
    *ROOT.rglob("gdn_kernels/**/*.md"),
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MODULES = sorted((ROOT / "gdn_kernels").rglob("*.py"))
NAMES = "arithmetics"  # of constants, which aren't English
FILE_NAME = re.compile(r"(?<![\w./*<-])[a-z_][\w/]*\.(?:py|md|ipynb|jsonl)\b(?![\w/(])")


def prose(path: Path) -> str:
    """What a file says to its reader. That of a module stands on the lines on which it stands in the module."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        return "\n\n".join("".join(cell["source"]) for cell in cells)
    return said_by_code(path.read_text()) if path.suffix == ".py" else path.read_text()


def said_by_code(code: str) -> str:
    """Docstrings and comments, all else blank."""
    lines = [""] * (code.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0]] += token.string
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for number, line in enumerate(node.value.value.splitlines(), node.lineno):
                lines[number] += line
    return "\n".join(lines[1:])


def misspelt(texts: Mapping[str, str], folder: Path) -> list[str]:
    """What codespell finds in texts by their names."""
    for name, text in texts.items():
        file = folder / f"{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    command = [sys.executable, "-m", "codespell_lib", "--disable-colors", f"--ignore-words-list={NAMES}", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 65), done.stderr
    return done.stdout.splitlines()


def anchors(path: Path) -> set[str]:
    """The #parts of a document that lead somewhere: GitHub's of a Markdown file, JupyterLab's of a notebook."""
    text = re.sub(r"^```.*?^```", "", prose(path), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"[`*$]|\]\([^)]*\)|\[", "", line) for line in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    if path.suffix == ".ipynb":
        return {heading.strip().replace(" ", "-") for heading in headings}
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def dead_links(path: Path, text: str) -> list[str]:
    """The links of a document to files and headings of this repository that aren't there."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text):
        target, _, part = "".join(link).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = path.parent / target if target else path
        if not file.exists() or (part and part not in anchors(file)):
            dead.append("".join(link))
    return dead


def missing_files(text: str, there: Iterable[Path]) -> list[str]:
    """The files that a text names and that aren't there, in whatever folder."""
    names = [f"/{path.relative_to(ROOT).as_posix()}" for path in there]
    return [name for name in FILE_NAME.findall(text) if not any(each.endswith(f"/{name}") for each in names)]


def test_spelling(tmp_path: Path) -> None:
    files = [*DOCUMENTS, *NOTEBOOKS, *MODULES]
    assert misspelt({str(file.relative_to(ROOT)): prose(file) for file in files}, tmp_path) == []


def test_a_misspelt_word_is_noticed_in_each_kind_of_text(tmp_path: Path) -> None:
    code = '"""Of teh module."""\nteh = 1  # of teh line\n\n\ndef f():\n    """One.\n\n    Two of teh.\n    """\n'
    texts = {"code.py": said_by_code(code), "README.md": "fine\nThis is teh kernel."}
    found = [line.partition(": ") for line in misspelt(texts, tmp_path)]
    assert {place.removeprefix("./") for place, _, _ in found} == {
        "README.md.txt:2",
        *(f"code.py.txt:{line}" for line in (1, 2, 8)),
    }
    assert {what for _, _, what in found} == {"teh ==> the"}


@pytest.mark.parametrize("path", [*DOCUMENTS, *NOTEBOOKS], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(path: Path) -> None:
    assert dead_links(path, prose(path)) == []


def test_a_dead_link_is_noticed(tmp_path: Path) -> None:
    other = tmp_path / "other.md"
    other.write_text("# A `first` heading, at 1.5 us\n\n```\n# no heading\n```\n")
    notebook = tmp_path / "one.ipynb"
    notebook.write_text(json.dumps({"cells": [{"source": ["# 1. What's `S`\n", "text"]}]}))
    good = ["other.md", "other.md#a-first-heading-at-15-us", "one.ipynb#1.-What's-S", "https://example.com/none#none"]
    bad = ["none.md", "other.md#no-heading", "other.md#first", "one.ipynb#1-whats-s", "#nothing"]
    text = "\n".join(f"see [this]({link})" for link in [*good, *bad]) + '\n<img src="none.png">'
    (tmp_path / "this.md").write_text(text)
    assert dead_links(tmp_path / "this.md", text) == [*bad, "none.png"]


def test_files_that_the_package_speaks_of_exist(tracked: list[Path]) -> None:
    found = {str(path.relative_to(ROOT)): missing_files(prose(path), tracked) for path in MODULES}
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_a_missing_file_is_noticed(tracked: list[Path]) -> None:
    text = "see tests/test_prose.py, kernels/conv1d.py, kernels/none.py and `none.md`"
    assert missing_files(text, tracked) == ["kernels/none.py", "none.md"]
