"""Long runs: stopped at any point, in any way, they go on to the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_rollouts import SlowRollout, SmallRollout

from gdn_kernels.drift import runs, store
from gdn_kernels.drift.config import RolloutConfig

CONFIG = RolloutConfig(policy="ours", tokens=300, Hk=1, Hv=3, seed=5)


def whole(config: RolloutConfig = CONFIG) -> bytes:
    return store.encode(runs.run(config, engine=SmallRollout).result)


@pytest.mark.parametrize("every", [1, 7, 300, None])
def test_checkpoints_change_nothing(tmp_path: Path, every: int | None) -> None:
    finished = runs.run(CONFIG, tmp_path / "c.npz", every=every, engine=SmallRollout)
    assert store.encode(finished.result) == whole()
    assert (tmp_path / "c.npz").exists() == (every is not None)


@pytest.mark.parametrize("stop", [1, 123, 299])
def test_a_resumed_rollout_gives_the_same_bytes_and_adds_up_its_time(tmp_path: Path, stop: int) -> None:
    path, rollout = tmp_path / "c.npz", SmallRollout(CONFIG)
    rollout.advance(stop)
    store.save_checkpoint(path, CONFIG, stop, 1000.0, rollout.to_arrays())
    finished = runs.run(CONFIG, path, resume=True, engine=SmallRollout)
    assert store.encode(finished.result) == whole()
    assert 1000 < finished.seconds < 1001


def test_a_checkpoint_is_neither_overwritten_nor_taken_for_anothers(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    runs.run(CONFIG, path, every=100, engine=SmallRollout)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"c\.npz: is an unfinished rollout"):
        runs.run(CONFIG, path, engine=SmallRollout)
    with pytest.raises(store.DriftFileError, match="policy is 'ours' there and 'exact' here"):
        runs.run(replace(CONFIG, policy="exact"), path, resume=True, engine=SmallRollout)
    assert path.read_bytes() == before


def test_resume_without_a_checkpoint_begins(tmp_path: Path) -> None:
    finished = runs.run(CONFIG, tmp_path / "c.npz", resume=True, engine=SmallRollout)
    assert store.encode(finished.result) == whole()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_a_whole_token_with_a_checkpoint(tmp_path: Path, signum: signal.Signals) -> None:
    class Interrupting(SmallRollout):
        def step(self) -> None:
            if self.done == 123:
                signal.raise_signal(signum)
            super().step()

    before, path = signal.getsignal(signum), tmp_path / "c.npz"
    with pytest.raises(runs.Interrupted) as interrupted:
        runs.run(CONFIG, path, engine=Interrupting)
    assert signal.getsignal(signum) == before
    assert interrupted.value.checkpoint == path and interrupted.value.signal == signum
    assert 123 <= interrupted.value.token == store.load_checkpoint(path, CONFIG)[0] < 300
    assert store.encode(runs.run(CONFIG, path, resume=True, engine=SmallRollout).result) == whole()


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    class Hanging(SmallRollout):
        def step(self) -> None:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as interrupted:
        runs.run(CONFIG, tmp_path / "c.npz", engine=Hanging)
    assert not isinstance(interrupted.value, runs.Interrupted)


@pytest.mark.parametrize("delay", [0.03, 0.11])
def test_killed_at_any_moment_it_resumes_to_the_same_bytes(tmp_path: Path, delay: float) -> None:
    path, config = tmp_path / "c.npz", replace(CONFIG, tokens=2000)
    script = f"""
        from pathlib import Path
        from small_rollouts import SlowRollout
        from gdn_kernels.drift import runs
        from gdn_kernels.drift.config import RolloutConfig
        runs.run({config!r}, Path({str(path)!r}), every=5, engine=SlowRollout)
        print("finished")
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, stdout=subprocess.PIPE, text=True
    )
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    assert process.communicate()[0] == ""
    assert 0 < store.load_checkpoint(path, config)[0] < 2000
    resumed = runs.run(config, path, resume=True, engine=SmallRollout)
    assert store.encode(resumed.result) == whole(config)


def test_kept_records_are_small_and_never_warn() -> None:
    kept = runs.compact(
        {"tokens": np.array([1]), "state_error": np.array([1e-7, 1e300]), "cosine": np.array([1 - 1e-12])}
    )
    assert kept["state_error"].dtype == np.float32 and np.isinf(kept["state_error"][1])
    assert kept["tokens"].dtype == np.int64 and kept["cosine"][0] < 1


def test_progress_starts_where_the_checkpoint_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, rollout = tmp_path / "c.npz", SmallRollout(CONFIG)
    rollout.advance(200)
    store.save_checkpoint(path, CONFIG, 200, 1.0, rollout.to_arrays())
    runs.run(CONFIG, path, resume=True, progress=True, engine=SlowRollout)
    printed = capsys.readouterr().err
    assert "ours" in printed and "200/300" in printed and "300/300" in printed
