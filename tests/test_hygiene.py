"""What must never be in a tracked file. The forbidden words are built from pieces: this file must pass its own test."""

import re
from pathlib import Path

import pytest

LARGEST = 4 << 20  # bytes
NEURON_INDEX = "https://pip.repos.neuron.amazonaws.com"  # the one package registry that the project has to name
FORBIDDEN = {
    "machine path": "|".join("/" + name + "/" for name in ("root", "home", "work", "Users")) + "|/tmp/" + "venv",
    "registry": "py" + r"pi\.org|python" + r"hosted\.org|download" + r"\.pytorch\.org|index" + "-url|find" + "-links",
    "secret": "AKIA"
    + "[0-9A-Z]{16}|gh[pousr]"
    + "_[A-Za-z0-9]{36}|hf"
    + "_[A-Za-z0-9]{34}|BEGIN [A-Z ]*"
    + "PRIVATE KEY",
}


def offences(text: str) -> list[str]:
    """The forbidden things in one file's text, each with its kind and its line."""
    lines = text.replace("--extra-index" + f"-url {NEURON_INDEX}", "").splitlines()
    return [f"{kind}: {line.strip()}" for line in lines for kind, words in FORBIDDEN.items() if re.search(words, line)]


def text_of(path: Path) -> str:
    """The file as text; the readable pieces of a binary one."""
    return path.read_bytes().decode("utf-8", errors="replace")


def test_no_file_is_large(tracked: list[Path]) -> None:
    assert {path.name: path.stat().st_size for path in tracked if path.stat().st_size > LARGEST} == {}


def test_no_machine_path_registry_or_secret(tracked: list[Path], root: Path) -> None:
    assert len(tracked) > 10
    found = {str(path.relative_to(root)): offences(text_of(path)) for path in tracked}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        "see " + "/ro" + "ot/notes",
        "in " + "/ho" + "me/someone",
        "/tmp/v" + "env/bin/python",
        "token = 'AK" + "IA" + "A1B2C3D4E5F6G7H8'",
        "gh" + "p_" + "a" * 36,
        "-----BEGIN RSA PRIV" + "ATE KEY-----",
        "pip install --index" + "-url https://example.com torch",
        "https://files.python" + "hosted.org/x.whl",
    ],
)
def test_each_of_them_is_noticed(text: str) -> None:
    assert offences(f"before\n{text}\nafter")


def test_neuron_index_is_allowed_and_no_other() -> None:
    option = "--extra-index" + "-url "
    assert offences(f"      - {option}{NEURON_INDEX}") == []
    assert offences(f"      - {option}https://example.com") != []
