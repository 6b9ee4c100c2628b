"""environment.yml and constraints.txt against pyproject.toml, so that they can't drift apart."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

INDEX_OPTION = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
NEURON_WHEELS = {"neuronx-cc", "torch-neuronx", "nki"}


def conda_requirements(environment: dict[str, Any]) -> dict[str, SpecifierSet]:
    """The conda packages by name. Conda's single `=` means "this version and its sub-versions"."""
    found = {}
    for line in environment["dependencies"]:
        if isinstance(line, str):
            name, versions = re.fullmatch(r"([A-Za-z0-9_-]+)(.*)", line).groups()
            found[name] = SpecifierSet(re.sub(r"^=(?!=)(.*)$", r"==\1.*", versions))
    return found


def disagreements(environment_text: str, pyproject_text: str) -> list[str]:
    """What environment.yml and pyproject.toml say differently; empty when they agree."""
    environment = yaml.safe_load(environment_text)
    project = tomllib.loads(pyproject_text)["project"]
    extras = {name: [Requirement(r) for r in lines] for name, lines in project["optional-dependencies"].items()}
    conda = conda_requirements(environment)
    pip_lines = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    pip = {r.name: r.specifier for r in (Requirement(line) for line in pip_lines if not line.startswith("-"))}
    pins = {r.name: r.specifier for r in extras["neuron"] if r.name in NEURON_WHEELS}
    numpy = next((r.specifier for r in extras["neuron"] if r.name == "numpy"), None)
    python = next((s.version.removesuffix(".*") for s in conda.get("python", ())), None)

    problems = []
    if environment["channels"][:1] != ["conda-forge"]:
        problems.append("channels: conda-forge isn't first")
    if python is None or python not in SpecifierSet(project["requires-python"]):
        problems.append(f"python: {python} isn't in requires-python {project['requires-python']}")
    if numpy is None or conda.get("numpy") != numpy:
        problems.append(f"numpy: {conda.get('numpy')} in the environment, {numpy} in the extra")
    for r in extras["notebooks"]:
        if conda.get(r.name) != r.specifier:
            problems.append(f"{r.name}: {conda.get(r.name)} in the environment, {r.specifier} in the extra `notebooks`")
    if set(pins) != NEURON_WHEELS or pip != pins:
        problems.append(f"neuron wheels: {pip} in the environment, {pins} in the extra `neuron`")
    if any([s.operator for s in specifier] != ["=="] or "*" in str(specifier) for specifier in pip.values()):
        problems.append(f"neuron wheels: not exact versions: {pip}")
    if INDEX_OPTION not in pip_lines:
        problems.append("pip: the Neuron index is missing")
    if "-e ." not in pip_lines:
        problems.append("pip: this package is missing")
    return problems


@pytest.fixture(scope="module")
def environment_text(root: Path) -> str:
    return (root / "environment.yml").read_text()


@pytest.fixture(scope="module")
def pyproject_text(root: Path) -> str:
    return (root / "pyproject.toml").read_text()


def test_environment_agrees_with_pyproject(environment_text: str, pyproject_text: str) -> None:
    assert disagreements(environment_text, pyproject_text) == []


@pytest.mark.parametrize(
    ("line", "drifted", "complaint"),
    [
        ("  - conda-forge\n", "  - defaults\n", "channels"),
        ("  - python=3.12\n", "  - python=3.14\n", "python"),
        ("  - python=3.12\n", "", "python"),
        ("  - numpy>=2.2,<2.4\n", "  - numpy>=2.2\n", "numpy"),
        ("  - numpy>=2.2,<2.4\n", "", "numpy"),
        ("  - nbval>=0.11\n", "", "nbval"),
        ("  - jupyterlab>=4.2\n", "  - jupyterlab>=3\n", "jupyterlab"),
        ("      - nki==0.5.0\n", "      - nki==0.6.0\n", "neuron wheels"),
        ("      - nki==0.5.0\n", "", "neuron wheels"),
        ("      - neuronx-cc==2.26.6360.0\n", "      - neuronx-cc==2.*\n", "neuron wheels: not exact"),
        (f"      - {INDEX_OPTION}\n", "", "pip: the Neuron index"),
        ("      - -e .\n", "", "pip: this package"),
    ],
)
def test_drifted_environment_is_noticed(
    environment_text: str, pyproject_text: str, line: str, drifted: str, complaint: str
) -> None:
    assert environment_text.count(line) == 1
    problems = disagreements(environment_text.replace(line, drifted), pyproject_text)
    assert any(problem.startswith(complaint) for problem in problems)


@pytest.mark.parametrize(
    ("text", "drifted", "complaint"),
    [
        ('requires-python = ">=3.11,<3.14"', 'requires-python = ">=3.13"', "python"),
        ('"nki==0.5.0"', '"nki==0.7.0"', "neuron wheels"),
        ('    "numpy>=2.2,<2.4",\n', "", "numpy"),
        ('"ipywidgets>=8.1"', '"ipywidgets>=8.1", "bokeh"', "bokeh"),
    ],
)
def test_drifted_pyproject_is_noticed(
    environment_text: str, pyproject_text: str, text: str, drifted: str, complaint: str
) -> None:
    assert pyproject_text.count(text) == 1
    problems = disagreements(environment_text, pyproject_text.replace(text, drifted))
    assert any(problem.startswith(complaint) for problem in problems)


def test_environment_explains_stand_ins_and_preinstalled_environments(environment_text: str) -> None:
    for words in ("stand-ins", "raise ImportError", "/opt/aws_neuronx_venv_pytorch_2_9", "no Neuron device has run"):
        assert words in environment_text


def test_constraints_lie_in_the_ranges_of_pyproject(root: Path, pyproject_text: str) -> None:
    lines = (root / "constraints.txt").read_text().splitlines()
    pinned = {r.name.lower(): r.specifier for r in (Requirement(x) for x in lines if x and not x.startswith("#"))}
    assert str(pinned["torch"]) == "==2.13.0"
    project = tomllib.loads(pyproject_text)["project"]
    extras = project["optional-dependencies"]
    for text in (
        *project["dependencies"],
        *(x for name in ("test", "hf", "notebooks", "fast", "cluster") for x in extras[name]),
    ):
        requirement = Requirement(text)
        (pin,) = pinned[requirement.name.lower()]
        assert pin.operator == "==" and Version(pin.version) in requirement.specifier, text


def test_extras_are_complete(pyproject_text: str) -> None:
    project = tomllib.loads(pyproject_text)["project"]
    names = {extra: {Requirement(x).name for x in lines} for extra, lines in project["optional-dependencies"].items()}
    assert {Requirement(x).name for x in project["dependencies"]} == {"numpy", "ml_dtypes", "safetensors", "tqdm"}
    assert names["notebooks"] == {"jupyterlab", "matplotlib", "nbval", "ipywidgets", "numba"}
    assert names["fast"] == {"numba"} and names["cluster"] == {"dask"}
    assert names["hf"] == {"torch", "transformers"}
    assert names["neuron"] == NEURON_WHEELS | {"numpy"}
