"""Files of the drift lab: what is written is read back, and nothing else is."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdn_kernels.drift import store
from gdn_kernels.drift.config import RolloutConfig
from gdn_kernels.drift.rollout import Rollout
from gdn_kernels.drift.store import DriftFileError, Result
from gdn_kernels.policy import PRESETS

CONFIG = RolloutConfig(policy="ours", tokens=64, H=128, Hk=1, Hv=3, K=16, V=24, B=2, tau=(1.0, 1e4), seed=3)


def result(config: RolloutConfig = CONFIG) -> Result:
    rng = np.random.default_rng(0)
    records = {"tokens": np.array([1, 2, 64]), "state_error": rng.random((3, 2, 3)), "finite": np.array([True, False])}
    return Result(store.plain(config), records, store.provenance(config))


def assert_same(a: Result, b: Result) -> None:
    assert (a.config, a.made_by) == (b.config, b.made_by)
    assert a.records.keys() == b.records.keys()
    for name, array in a.records.items():
        np.testing.assert_array_equal(array, b.records[name])
        assert array.dtype == b.records[name].dtype


def test_a_result_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.npz"
    store.save(path, result())
    assert_same(store.load(path), result())
    assert [p.name for p in path.parent.iterdir()] == ["a.npz"]
    versions = store.load(path).made_by["versions"]
    assert versions["numpy"] == np.__version__ and versions["python"]


def test_the_same_result_is_the_same_bytes() -> None:
    assert store.encode(result()) == store.encode(result())


def test_no_two_configs_share_a_file_name() -> None:
    changes = {"policy": "exact", "tokens": 65, "seed": 4, "tau": (1.0, 1e5), "V": 25, "stream": "repeated"}
    others = [replace(CONFIG, **{name: value}) for name, value in changes.items()]
    names = [store.file_name(config) for config in (CONFIG, *others)]
    assert len(set(names)) == len(names)
    assert all("/" not in name for name in (*names, store.file_name(replace(CONFIG, stream="file:/a b/c.npz"))))


def test_a_checkpoint_comes_back_and_only_for_its_own_rollout(tmp_path: Path) -> None:
    path, arrays = tmp_path / "a.npz", {"S": np.arange(6.0).reshape(2, 3), "token": np.array(7)}
    store.save_checkpoint(path, CONFIG, 7, 1.5, arrays)
    token, seconds, found = store.load_checkpoint(path, CONFIG)
    assert (token, seconds) == (7, 1.5)
    assert found.keys() == arrays.keys() and all((found[name] == arrays[name]).all() for name in arrays)
    with pytest.raises(DriftFileError) as refusal:
        store.load_checkpoint(path, replace(CONFIG, policy="nkilib", seed=4))
    assert str(refusal.value) == (
        f"{path}: is the checkpoint of another rollout: "
        "policy is 'ours' there and 'nkilib' here, seed is 3 there and 4 here"
    )


def foreign_npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def without_a_record() -> bytes:
    """A result whose metadata lists one array more than there is."""
    with np.load(io.BytesIO(store.encode(result()))) as file:
        return foreign_npz(**{name: file[name] for name in file.files if name != "state_error"})


def of_the_future() -> bytes:
    return foreign_npz(meta=np.array(json.dumps({"schema": "gdn_kernels.drift 9"})))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is no .npz file"),
        (b"not an archive", "is no .npz file"),
        (foreign_npz(x=np.zeros(3)), "was not written by this program"),
        (foreign_npz(meta=np.array("{")), "was not written by this program"),
        (foreign_npz(meta=np.zeros(2)), "was not written by this program"),
        (foreign_npz(meta=np.array([{"pickled": 1}], dtype=object)), "damaged: ValueError"),
        (of_the_future(), "has schema 'gdn_kernels.drift 9', this program reads 'gdn_kernels.drift 1'"),
        (without_a_record(), "damaged: arrays missing, added or of another shape: state_error"),
        (store.encode(result())[:-100], "damaged or cut short"),
        (store.encode(result())[:300], "damaged or cut short"),
    ],
)
def test_what_is_no_result_is_refused_with_file_and_reason(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(data)
    with pytest.raises(DriftFileError) as refusal:
        store.load(path)
    assert str(refusal.value).startswith(f"{path}: {reason}")
    assert "\n" not in str(refusal.value)


def test_a_checkpoint_is_no_result(tmp_path: Path) -> None:
    store.save_checkpoint(tmp_path / "a.npz", CONFIG, 7, 1.5, {})
    with pytest.raises(DriftFileError, match="is a checkpoint of a rollout, expected a result"):
        store.load(tmp_path / "a.npz")


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_or_harmless(tmp_path_factory: Any, where: float, bit: int) -> None:
    path = tmp_path_factory.mktemp("flipped") / "a.npz"
    data = bytearray(store.encode(result()))
    data[int(where * len(data))] ^= 1 << bit
    path.write_bytes(data)
    try:
        found = store.load(path)
    except DriftFileError as refusal:
        assert str(path) in str(refusal)
    else:
        assert_same(found, result())  # a date or an attribute in the archive's directory


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "a.npz"
    store.save(path, result())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space left"):
        store.save(path, result(replace(CONFIG, seed=9)))
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]
    assert_same(store.load(path), result())


def test_the_readme_documents_every_field_and_record(root: Path) -> None:
    documented = set(re.findall(r"`([a-z_.0-9]+)`", (root / "data/README.md").read_text().split("## drift/")[1]))
    rollout = Rollout(replace(CONFIG, tokens=1))
    rollout.advance(1)
    assert documented >= {
        *rollout.records,
        *HEAD,
        "model_error",
        "schema",
        "kind",
        "config",
        "arrays",
        "token",
        "seconds",
    }
    assert documented >= {f"made_by.{name}" for name in store.provenance(CONFIG)}


HEAD = ("head_top1_agreement", "head_top_k_agreement", "head_kl", "head_greedy_divergence")

FOLDER = Path(__file__).parent.parent / "data/drift"
SAVED = sorted(path for path in FOLDER.glob("*/*.npz") if ".checkpoint." not in path.name)


def test_saved_results_are_small_and_have_the_names_of_their_configs() -> None:
    assert SAVED and sum(path.stat().st_size for path in SAVED) < 5_000_000
    for path in SAVED:
        assert path.name == store.file_name(config_of(store.load(path)))


def config_of(saved: Result) -> RolloutConfig:
    return RolloutConfig(**{**saved.config, "tau": tuple(saved.config["tau"])})


@pytest.mark.parametrize("path", [path for path in SAVED if "_n8192_s0_" in path.name], ids=lambda path: path.stem)
def test_saved_results_are_what_the_policies_do_now(path: Path) -> None:
    """The first tokens again. Another processor's BLAS may round a sum the other way, so not to the byte."""
    saved = store.load(path)
    rollout = Rollout(replace(config_of(saved), tokens=20))
    rollout.advance(20)
    for name in ("state_error", "output_error"):
        found = rollout.records[name]
        np.testing.assert_allclose(found, saved.records[name][: len(found)], rtol=0.2)
    assert saved.made_by["policy"] == json.loads(json.dumps(asdict(PRESETS[saved.config["policy"]])))
