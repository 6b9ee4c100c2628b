"""Sweeps: the same bytes however they are run, and a worker's death costs no other rollout anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_rollouts import AlwaysDyingRollout, DyingRollout, FailingRollout, SlowRollout, SmallRollout

from gdn_kernels.cli import main
from gdn_kernels.drift import runs, store, sweep
from gdn_kernels.drift.config import RolloutConfig

BASE = RolloutConfig(tokens=50, Hk=1, Hv=3)
SEEDS = range(3)


def configs(base: RolloutConfig = BASE) -> list[RolloutConfig]:
    return sweep.grid(base, ["ours"], [(1.0, 1e6)], SEEDS)


def expected(base: RolloutConfig = BASE) -> dict[str, bytes]:
    results = {store.file_name(c): runs.run(c, engine=SmallRollout).result for c in configs(base)}
    return {name: store.encode(result) for name, result in results.items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import dask
    from distributed import LocalCluster

    # Without its dashboard and with as few processes as a death needs; two seconds to start.
    options = {"distributed.worker.memory.terminate": False, "distributed.comm.timeouts.connect": "30s"}
    with (
        dask.config.set(options),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, protocol="tcp") as started,
    ):
        yield started


def test_a_grid_has_every_combination() -> None:
    found = sweep.grid(BASE, ["ours", "exact"], [(1.0, 10.0), (1e3, 1e6)], [4, 5])
    assert len({(c.policy, c.tau, c.seed) for c in found}) == len(found) == 8
    assert {c.tokens for c in found} == {50}


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_give_the_bytes_of_single_runs(tmp_path: Path, workers: int) -> None:
    outcome = sweep.sweep(configs(), tmp_path, workers=workers, engine=SmallRollout)
    assert contents(tmp_path) == expected()
    assert len(outcome.stored) == 3 and not outcome.skipped and not outcome.failed


def test_a_cluster_gives_the_same_bytes(tmp_path: Path, cluster: Any) -> None:
    outcome = sweep.sweep(configs(), tmp_path, dask=cluster.scheduler_address, engine=SmallRollout)
    assert contents(tmp_path) == expected()
    assert len(outcome.stored) == 3 and not outcome.failed


def test_what_is_there_is_skipped(tmp_path: Path) -> None:
    sweep.sweep(configs()[:2], tmp_path, engine=SmallRollout)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    outcome = sweep.sweep(configs(), tmp_path, engine=SmallRollout)
    assert sorted(outcome.skipped) == sorted(times) and len(outcome.stored) == 1
    assert all(path.stat().st_mtime_ns == before for path, before in times.items())


def test_a_damaged_or_foreign_file_is_an_error_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / store.file_name(configs()[0])
    path.write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(store.DriftFileError, match="damaged or cut short"):
        sweep.sweep(configs(), tmp_path, engine=SmallRollout)
    store.save(path, runs.run(configs()[1], engine=SmallRollout).result)
    with pytest.raises(store.DriftFileError, match="holds another rollout: seed is 1 there and 0 here"):
        sweep.sweep(configs(), tmp_path, engine=SmallRollout)


def dying(tmp_path: Path) -> RolloutConfig:
    return RolloutConfig(tokens=50, Hk=1, Hv=3, stream=f"file:{tmp_path / 'died'}")


def test_a_process_that_dies_is_tried_again(tmp_path: Path) -> None:
    base, folder = dying(tmp_path), tmp_path / "results"
    outcome = sweep.sweep(configs(base), folder, workers=2, engine=DyingRollout)
    assert (tmp_path / "died").exists() and len(outcome.stored) == 3 and not outcome.failed
    assert contents(folder) == expected(base)


def test_a_cluster_worker_that_dies_is_tried_again(tmp_path: Path, cluster: Any) -> None:
    base, folder = dying(tmp_path), tmp_path / "results"
    outcome = sweep.sweep(configs(base), folder, dask=cluster.scheduler_address, engine=DyingRollout)
    assert (tmp_path / "died").exists() and len(outcome.stored) == 3 and not outcome.failed
    assert contents(folder) == expected(base)


def test_one_that_always_dies_is_given_up_and_the_others_are_not(tmp_path: Path) -> None:
    outcome = sweep.sweep(configs(), tmp_path, engine=AlwaysDyingRollout)
    path = tmp_path / store.file_name(configs()[1])
    assert outcome.failed == {path: "its worker died 3 times, the last with SIGKILL"}
    assert len(outcome.stored) == 2


@pytest.mark.parametrize("on_cluster", [False, True])
def test_an_error_is_told_and_costs_no_other_rollout(tmp_path: Path, cluster: Any, on_cluster: bool) -> None:
    address = cluster.scheduler_address if on_cluster else None
    outcome = sweep.sweep(configs(), tmp_path, dask=address, engine=FailingRollout)
    path = tmp_path / store.file_name(configs()[1])
    assert outcome.failed == {path: "ValueError: seed 1 is not lucky"}
    assert len(outcome.stored) == 2


def test_a_dead_workers_checkpoint_is_used(tmp_path: Path) -> None:
    config = configs()[0]
    path, rollout = tmp_path / store.file_name(config), SmallRollout(config)
    rollout.advance(20)
    rollout.x += 1  # so that the result tells where it began
    store.save_checkpoint(sweep.checkpoint_of(path), config, 20, 0.0, rollout.to_arrays())
    rollout.advance(30)
    sweep.sweep([config], tmp_path, engine=SmallRollout)
    assert (store.load(path).records["state_error"][-1] == abs(rollout.x).astype(np.float32)).all()
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_leaves_checkpoints_and_no_process(tmp_path: Path) -> None:
    base = RolloutConfig(tokens=200_000, Hk=1, Hv=3, stream=f"file:{tmp_path / 'begun'}")
    script = f"""
        from pathlib import Path
        from small_rollouts import AnnouncedRollout
        from gdn_kernels.drift import sweep
        from gdn_kernels.drift.config import RolloutConfig
        if __name__ == "__main__":
            configs = sweep.grid({base!r}, ["ours"], [(1.0, 1e6)], range(3))
            sweep.sweep(configs, Path({str(tmp_path / "results")!r}), workers=2, engine=AnnouncedRollout)
    """
    file = tmp_path / "sweeping.py"
    file.write_text(textwrap.dedent(script))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, str(file)], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while len(list(tmp_path.glob("begun.*"))) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0
    assert error.count("Traceback") == 1  # the parent's own
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # Python's resource tracker ends a moment after its parent
            os.killpg(process.pid, 0)
            time.sleep(0.02)
    names = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert len(names) == 2 and all(name.endswith(".checkpoint.npz") for name in names)


def test_workers_have_one_thread_and_the_caller_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    with sweep._for_workers():
        code = "import os, signal; print(os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'],"
        code += " signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
        printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["1", "1", "True"]
    assert os.environ["OMP_NUM_THREADS"] == "5" and "MKL_NUM_THREADS" not in os.environ
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_cluster_that_is_not_there_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "CONNECT_SECONDS", 0.3)
    with pytest.raises(OSError, match=r"Timed out|refused"):
        sweep.sweep(configs(), tmp_path, dask="tcp://127.0.0.1:9", engine=SlowRollout)


def test_without_dask_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ImportError, match=r"pip install 'gdn-kernels\[cluster\]'"):
        sweep.sweep(configs(), tmp_path, dask="tcp://127.0.0.1:9", engine=SmallRollout)


def test_the_command_gives_the_same_files_on_a_cluster(tmp_path: Path, cluster: Any) -> None:
    words = ["--tokens", "40", "--heads", "1,3", "--head-dims", "32,16", "--hidden", "128", "--seeds", "2"]
    words += ["--policies", "exact,ours"]
    assert main(["rollout", *words, "--save", str(tmp_path / "a"), "--dask", cluster.scheduler_address]) == 0
    base = RolloutConfig(tokens=40, H=128, Hk=1, Hv=3, K=32, V=16)
    configs = sweep.grid(base, ["exact", "ours"], [(1.0, 1e6)], range(2))
    assert contents(tmp_path / "a") == {store.file_name(c): store.encode(runs.run(c).result) for c in configs}
