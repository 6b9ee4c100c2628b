"""`gdn-kernels check`: somebody's kernel file in, a report and an exit status out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gdn_kernels.cli import main

KERNELS = '''"""Somebody's kernels."""
import nki
import nki.isa as nisa
import nki.language as nl
from someones_helpers import load

@nki.jit
def double(x, factor=2.0):
    tile = load(x)
    scratch = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
    nisa.dma_copy(dst=scratch, src=tile)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=scratch)
    return out

@nki.jit
def halves(x):
    rows = x.shape[0] // nl.num_programs()
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    mine = nl.ds(nl.program_id() * rows, rows)
    nisa.dma_copy(dst=out[mine, :], src=load(x[mine, :]))
    return out

@nki.jit
def turned(x):
    out = nl.ndarray((x.shape[1], x.shape[0]), dtype=x.dtype, buffer=nl.shared_hbm)
    if x is not None:
        for _ in range(2):
            nisa.dma_copy(dst=out, src=load(x.permute((1, 0))))
    return out

@nki.jit
def too_tall(x):
    return load(x.reshape((256, 4)))

@nki.jit
def wrong(x):
    return x.nonsense()

def plain(x, n, name=None):
    assert (n, name) == ((2, 3), "a") and x.dtype == nl.int32
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=load(x))
    return out
'''
HELPERS = """import nki.isa as nisa
import nki.language as nl

def load(x):
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf, name="loaded")
    nisa.dma_copy(dst=tile, src=x)
    return tile
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "someones_helpers.py").write_text(HELPERS)
    (tmp_path / "someones_kernels.py").write_text(KERNELS)
    return tmp_path / "someones_kernels.py"


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["check", *words])
    out, err = capsys.readouterr()
    return status, out, err


def report(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status, out, _ = check(capsys, *words, "--json")
    return status, json.loads(out)


def test_a_clean_kernel_is_reported_with_its_memory_instructions_and_bytes(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = check(capsys, f"{file}:double", "--args", "x=float32[128,512]", "factor=3.0")
    assert (status, err) == (0, "")
    for line in (
        "rules: none broken",
        "core 0 sbuf: 2,048 of 212,984 bytes a partition, at instruction 0",
        f"       2,048 loaded [128, 512] from {file.parent / 'someones_helpers.py'}:5",
        "instructions: 4 (dma 3, vector 1)",
        "DMA hbm -> sbuf: 262,144 bytes",
        "DMA hbm -> hbm: 262,144 bytes",
        "HBM scratch: 262,144 bytes",
    ):
        assert line in out
    assert "<= 8192 B: 0, > 8192 B: 786,432" in out


def test_two_cores_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = report(capsys, f"{file}:halves", "--args", "x=bfloat16[64,256]", "--lnc", "2")
    assert status == 0 and found["broken"] is None and found["warnings"] == []
    assert found["instructions"] == 4 and found["dma_bytes"] == {"hbm -> sbuf": 32768, "sbuf -> hbm": 32768}
    assert {(peak["core"], peak["memory"], peak["peak"]) for peak in found["memory"]} == {
        (0, "sbuf", 512),
        (1, "sbuf", 512),
        (0, "psum", 0),
        (1, "psum", 0),
    }
    assert sum(found["run_bytes"].values()) == 65536


def test_a_dry_run_reports_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"{file}:double", "--args", "x=float32[128,512]")
    assert report(capsys, *words) == report(capsys, *words, "--dry")


def test_warnings_are_grouped_by_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = report(capsys, f"{file}:turned", "--args", "x=float32[128,128]")
    assert status == 0
    groups = {(entry["rule"], entry["count"], entry["severity"]) for entry in found["warnings"]}
    assert groups == {("element-runs", 2, "slow"), ("subset-unclear", 1, "unclear")}
    _, out, _ = check(capsys, f"{file}:turned", "--args", "x=float32[128,128]")
    assert "warning (slow), 2 times: dma_copy: 16384 runs of 4 bytes" in out


def test_a_broken_rule_gives_status_1_and_says_where(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = check(capsys, f"{file}:too_tall", "--args", "x=float32[1024]")
    assert status == 1
    assert "rule broken: ndarray operand shape: 256 partitions, at most 128 [rule partition-count" in out
    assert "someones_helpers.py:5" in out
    _, found = report(capsys, f"{file}:too_tall", "--args", "x=float32[1024]")
    assert (found["broken"]["limit"], found["broken"]["found"]) == (128, 256)


def test_a_python_error_of_the_kernel_gives_its_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = check(capsys, f"{file}:wrong", "--args", "x=float32[4]")
    assert status == 1 and "AttributeError" in out and f"{file}:39" in out


def test_an_undecorated_function_and_literals(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys, f"{file}:plain", "--args", "x=int32[4, 8]", "n=(2,3)", "name='a'")[0] == 0


def test_the_figure(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    figure = tmp_path / "figure.png"
    assert check(capsys, f"{file}:double", "--args", "x=float32[8,8]", "--figure", str(figure))[0] == 0
    assert figure.read_bytes()[:4] == b"\x89PNG"


def test_a_kernel_of_a_package_may_import_its_neighbours(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = root / "gdn_kernels" / "kernels" / "conv1d.py"
    tensors = ("x=bfloat16[2,200,1]", "conv_state=bfloat16[2,200,4]", "conv_weight=float32[200,4]")
    status, found = report(capsys, f"{kernel}:gdn_conv1d_decode", "--args", *tensors, "--lnc", "2")
    assert status == 0 and found["broken"] is None and found["warnings"] == []


def test_nothing_of_the_kernels_stays_imported(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(sys.modules), list(sys.path)
    assert check(capsys, f"{file}:double", "--args", "x=float32[8,8]")[0] == 0
    assert check(capsys, f"{file}:wrong", "--args", "x=float32[8,8]")[0] == 1
    left = {name for name in set(sys.modules) - before[0] if name.startswith(("someones", "nki"))}
    assert (left, sys.path) == (set(), before[1])


USAGE = {
    "no such file": ("nowhere.py:kernel", (), "expected FILE.py:KERNEL"),
    "no kernel named": ("{file}", (), "expected FILE.py:KERNEL"),
    "no such kernel": ("{file}:dubble", (), "no kernel 'dubble'; decorated with nki.jit: double, halves"),
    "no value": ("{file}:double", ("x",), "takes NAME=VALUE, got 'x'"),
    "no dtype": ("{file}:double", ("x=float33[4]",), "dtype 'float33' is none of bfloat16"),
    "no literal": ("{file}:double", ("x=float32",), "must be DTYPE[SHAPE] or a Python literal, got 'float32'"),
    "missing argument": ("{file}:double", (), "double(x, factor=2.0): missing a required argument: 'x'"),
    "unknown argument": ("{file}:double", ("x=float32[4]", "y=1"), "unexpected keyword argument 'y'"),
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage_gives_status_2(name: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel, words, message = USAGE[name]
    status, out, err = check(capsys, kernel.format(file=file), "--args", *words)
    assert (status, out) == (2, "") and message in err and err.startswith("gdn-kernels check: ")


def test_a_file_that_does_not_import_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken_file.py").write_text("import nki\nimport nothing_of_the_kind\n")
    status, _, err = check(capsys, f"{tmp_path / 'broken_file.py'}:kernel")
    assert status == 2 and "ModuleNotFoundError: No module named 'nothing_of_the_kind'" in err
