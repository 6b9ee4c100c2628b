"""The README's examples run as they stand there, and what it says about the repository is so."""

import re
from pathlib import Path

import pytest

from gdn_kernels.cli import COMMANDS

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_readme_has_examples() -> None:
    assert any("gdn_block_tkg(" in example for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_runs(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # as another project would run it
    exec(compile(example, "README.md", "exec"), {"__name__": "example"})


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


def test_links_in_the_readme_exist(root: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links and [link for link in links if not (root / link).exists()] == []
