"""Streams depend on seed and position alone, and are what their names say."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from gdn_kernels.drift.streams import Stream, load_recording
from gdn_kernels.dtypes import round_to

SIZE, B, H = 64, 2, 128
NAMES = ["independent", "repeated", "ar1", "ar1:0.5", "bursts", "silence"]


def stream(name: str, seed: int = 0, form: str = "bf16") -> Stream:
    return Stream(name, B, H, SIZE, seed, form)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_come_in_any_order(name: str) -> None:
    forth = stream(name)
    blocks = [forth.block(index) for index in range(5)]
    back = stream(name)
    for index in (4, 0, 3, 3, 1):
        np.testing.assert_array_equal(back.block(index), blocks[index])
    np.testing.assert_array_equal(blocks[1], round_to(blocks[1], "bf16"))
    assert blocks[0].shape == (SIZE, B, H) and blocks[0].dtype == np.float32
    assert not np.array_equal(stream(name, seed=1).block(0), blocks[0])


@pytest.mark.parametrize(("name", "expected"), [("independent", 0.0), ("ar1", 0.99), ("ar1:0.5", 0.5), ("repeated", 1)])
def test_neighbours_correlate_as_named(name: str, expected: float) -> None:
    one = stream(name, form="fp32")
    x = np.concatenate([one.block(index) for index in range(6)]).astype(np.float64)
    correlation = (x[1:] * x[:-1]).sum() / (x[1:] ** 2).sum()
    assert abs(correlation - expected) < 0.02
    assert 0.8 < x.std() < 1.2


def test_bursts_and_silence() -> None:
    bursts = stream("bursts")
    active = [bool(bursts.block(index).any()) for index in range(200)]
    assert active[0] and 10 < sum(active) < 80
    silence = stream("silence")
    assert silence.block(0).all(-1).all() or silence.block(0).any()
    assert not silence.block(1).any() and not silence.block(50).any()


def test_text_is_deterministic_and_read_in_context() -> None:
    pytest.importorskip("transformers")
    blocks = [Stream("text", 2, 128, size, 3, "bf16") for size in (64, 256)]
    whole = np.concatenate([blocks[0].block(index) for index in range(4)])
    np.testing.assert_array_equal(whole, blocks[1].block(0))
    assert 0.5 < whole.std() < 2
    assert not np.array_equal(whole[:, 0], whole[:, 1])  # sequences read different places


def test_recordings(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((50, H)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", hidden=np.stack([x, -x], 1))
    for name, sign in (("x.npy", 1), ("x.npz", -1)):
        block = Stream(f"file:{tmp_path / name}", B, H, SIZE, 0, "fp32").block(1)  # tokens 64 to 127 of 50
        np.testing.assert_array_equal(block[:, 0], x[np.arange(64, 128) % 50])
        np.testing.assert_array_equal(block[:, 1], sign * x[np.arange(64, 128) % 50])


def test_bad_recordings_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", np.zeros((5, H + 1), np.float32))
    np.save(tmp_path / "ints.npy", np.zeros((5, H), np.int32))
    np.savez(tmp_path / "other.npz", states=np.zeros((5, H)))
    (tmp_path / "damaged.npy").write_bytes(b"\x93NUMPY\x01\x00")
    for name in ("wide.npy", "ints.npy", "other.npz", "damaged.npy", "missing.npy"):
        with pytest.raises(ValueError, match=name):
            load_recording(tmp_path / name, B, H)
    np.save(tmp_path / "three.npy", np.zeros((5, 3, H), np.float32))
    with pytest.raises(ValueError, match=r"expected 2 sequences in .*three.npy, got 3"):
        load_recording(tmp_path / "three.npy", B, H)


def test_unknown_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="stream must be one of"):
        stream("noise")


def test_text_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"pip install 'gdn-kernels\[hf\]'"):
        Stream("text", 1, 64, 8, seed=99, form="bf16").block(0)
