import json
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from gdn_kernels import backends
from gdn_kernels.cli import doctor, main

RAISES = 'raise ImportError("WRONG PACKAGE")\n'


def install(site: Path, name: str, files: dict[str, str], version: str = "1.0") -> None:
    """Lay out a distribution as pip leaves it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    record = [*files, f"{info.name}/METADATA", f"{info.name}/RECORD"]
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in record))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_report_is_whole_and_plain_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"system", "devices", "wheels", "variables", "backends", "auto"}
    assert report["wheels"]["numpy"] == {"state": "installed", "version": metadata.version("numpy")}
    assert {b["name"] for b in report["backends"]} == {"trn2", "simulate", "interpreter"}
    assert all(b["why"] for b in report["backends"])
    assert report["auto"]["name"] == backends.choose("auto")
    assert report["auto"]["why"]


def test_text_names_every_backend_and_wheel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in (*doctor.NEURON_WHEELS, *doctor.OTHER_WHEELS, "trn2", "simulate", "interpreter", "auto"):
        assert name in text


def test_stand_ins_are_told_from_real_wheels(site: Path) -> None:
    install(site, "nki", {"nki/__init__.py": RAISES}, "0.0.1")
    # The stand-in of neuronx-cc installs a folder whose name Python can't import.
    install(site, "neuronx-cc", {"neuronx-cc/__init__.py": '"""Stand-in."""\n' + RAISES}, "1.0.post1")
    install(site, "torch-neuronx", {"torch_neuronx/__init__.py": "import os\n", "torch_neuronx/xla.py": RAISES}, "2.9")
    assert doctor.wheel("nki") == {"state": "stand-in", "version": "0.0.1"}
    assert doctor.wheel("neuronx-cc") == {"state": "stand-in", "version": "1.0.post1"}
    assert doctor.wheel("torch-neuronx") == {"state": "installed", "version": "2.9"}


def test_stand_in_is_explained(site: Path) -> None:
    install(site, "nki", {"nki/__init__.py": RAISES}, "0.0.1")
    line = next(line for line in doctor.as_text(doctor.examine()).splitlines() if line.startswith("  nki "))
    assert "stand-in" in line and "pip.repos.neuron.amazonaws.com" in line


def test_damaged_installation_is_reported(site: Path) -> None:
    install(site, "nki", {"nki/__init__.py": RAISES})
    (site / "nki/__init__.py").unlink()
    assert doctor.wheel("nki")["state"] == "damaged"
    assert "damaged" in doctor.as_text(doctor.examine())


def test_failing_backends_do_not_stop_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> list[object]:
        raise OSError("driver went away")

    monkeypatch.setattr(backends, "available", fail)
    assert main(["doctor"]) == 0
    assert "driver went away" in capsys.readouterr().out


def test_devices_and_variables_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "glob", SimpleNamespace(glob=lambda pattern: ["/dev/neuron1", "/dev/neuron0"]))
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    monkeypatch.setenv("UNRELATED_SECRET", "not to be shown")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "/dev/neuron0, /dev/neuron1" in text
    assert "NEURON_LOGICAL_NC_CONFIG=2" in text
    assert "UNRELATED_SECRET" not in text


def test_unknown_system_does_not_stop_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, str]:
        raise OSError("no os-release")

    monkeypatch.setattr(doctor.platform, "freedesktop_os_release", fail)
    assert doctor.examine()["system"]["os"]


@pytest.mark.timing
def test_doctor_is_fast_and_imports_no_heavy_package() -> None:
    code = (
        "import sys; from gdn_kernels.cli import main; main(['doctor']); "
        "print([m for m in ('torch', 'transformers', 'matplotlib', 'torch_neuronx') if m in sys.modules])"
    )
    start = time.perf_counter()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert time.perf_counter() - start < 3
    assert out.splitlines()[-1] == "[]"
