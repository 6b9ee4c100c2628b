"""Many independent rollouts: in processes of this machine, or on an existing Dask cluster, with the same results.

Every rollout is a task of its own, and what it returns is the content of its file, which is written the moment it is
there. A rollout whose file exists is skipped, so a sweep that was stopped goes on when it is started again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdn_kernels.drift import runs, store
from gdn_kernels.drift.config import RolloutConfig

if TYPE_CHECKING:
    from gdn_kernels.drift.rollout import Rollout

ATTEMPTS = 3
"""How often a rollout is tried whose worker dies: one that runs out of memory would die for ever."""

CONNECT_SECONDS = 10

# The variables that size the thread pools of the BLAS libraries and of numba. They are read at import, so they have to
# be set before a process starts.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)


@dataclass(frozen=True)
class Done:
    """A rollout's file, as bytes."""

    data: bytes


@dataclass(frozen=True)
class Failed:
    """Why there is none."""

    reason: str


Tasks = Mapping[Path, RolloutConfig]
Endings = Generator[tuple[Path, Done | Failed], None, None]


@dataclass
class Outcome:
    """What became of a sweep's rollouts, by the files of their results.

    Attributes:
        stored: finished now.
        skipped: found finished.
        failed: why there is no result.
    """

    stored: list[Path] = field(default_factory=list)
    skipped: list[Path] = field(default_factory=list)
    failed: dict[Path, str] = field(default_factory=dict)


def grid(
    base: RolloutConfig, policies: Sequence[str], taus: Sequence[tuple[float, float] | None], seeds: Iterable[int]
) -> list[RolloutConfig]:
    """`base` with every combination of policy, range of memory lengths (low, high), in tokens, and seed."""
    return [replace(base, policy=policy, tau=tau, seed=seed) for policy, tau, seed in product(policies, taus, seeds)]


def sweep(
    configs: Iterable[RolloutConfig],
    folder: Path,
    *,
    workers: int = 1,
    dask: str | None = None,
    progress: bool = False,
    engine: type[Rollout] | None = None,
) -> Outcome:
    """Run the rollouts that `folder` has no result of, and store each as soon as it is there.

    Args:
        workers: processes on this machine, each with one BLAS thread.
        dask: address of a scheduler, "tcp://HOST:PORT"; its workers, which need this package, take the place of
            processes here. They keep no checkpoints.
        progress: show a bar on standard error.
        engine: the class of the rollouts.

    Raises:
        DriftFileError: if a file in `folder` with the name of a result is damaged, or another rollout's.
        OSError: if a result can't be written, or the scheduler not be reached.
        ImportError: if dask[distributed] is needed and not installed.
        KeyboardInterrupt: on Ctrl-C. Local rollouts leave checkpoints, from which the next sweep goes on.
    """
    from tqdm import tqdm

    outcome = Outcome()
    pending: dict[Path, RolloutConfig] = {}
    for config in configs:
        path = folder / store.file_name(config)
        if path.exists():
            check_config(path, config)
            outcome.skipped.append(path)
        else:
            pending[path] = config
    endings = _on_dask(pending, dask, engine) if dask else _in_processes(pending, workers, engine)
    bar = tqdm(total=len(pending), desc="rollouts", unit="rollout", disable=not progress)
    with bar, closing(endings):
        for path, ending in endings:
            if isinstance(ending, Done):
                store.write(path, ending.data)
                checkpoint_of(path).unlink(missing_ok=True)
                outcome.stored.append(path)
            else:
                outcome.failed[path] = ending.reason
            bar.update()
    return outcome


def checkpoint_of(path: Path) -> Path:
    """Where the checkpoint of a result's rollout is kept."""
    return path.with_suffix(".checkpoint.npz")


def check_config(path: Path, config: RolloutConfig) -> None:
    """Raise a DriftFileError unless the file is the result of that rollout."""
    if differ := store.differences(store.load(path).config, store.plain(config)):
        raise store.DriftFileError(path, f"holds another rollout: {differ}")


def _roll(config: RolloutConfig, checkpoint: Path | None, engine: type[Rollout] | None) -> Done | Failed:
    """One rollout, wherever it runs. An error is an answer, not a reason to try again."""
    try:
        return Done(store.encode(runs.run(config, checkpoint, resume=True, engine=engine).result))
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}")


def _in_processes(tasks: Tasks, workers: int, engine: type[Rollout] | None) -> Endings:
    """A process for each rollout: one that dies takes nothing with it, as it would from a pool.

    The next attempt goes on from the checkpoint of the one before.
    """
    waiting = [(path, 1) for path in reversed(list(tasks))]
    running: dict[Any, tuple[Path, int, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                path, attempt = waiting.pop()
                connection, process = _spawn(tasks[path], checkpoint_of(path), engine)
                running[connection] = path, attempt, process
            for ready in wait(list(running)):
                path, attempt, process = running.pop(ready)
                ending = _received(ready)
                process.join()
                if ending is None and attempt < ATTEMPTS:
                    waiting.append((path, attempt + 1))
                else:
                    yield path, ending or Failed(f"its worker died {attempt} times, the last with {_death(process)}")
    finally:
        _stop(process for _, _, process in running.values())


def _spawn(config: RolloutConfig, checkpoint: Path, engine: type[Rollout] | None) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")  # a fork would inherit whatever threads the caller has
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, config, checkpoint, engine), daemon=True)
    with _for_workers():
        process.start()
    theirs.close()  # the worker's is the only one left, so its death is the end of the pipe
    return ours, process


def _work(connection: Connection, config: RolloutConfig, checkpoint: Path, engine: type[Rollout] | None) -> None:
    with suppress(runs.Interrupted, BrokenPipeError):  # asked to stop, or nobody is left to tell
        connection.send(_roll(config, checkpoint, engine))


def _received(connection: Any) -> Done | Failed | None:
    """What the worker sent, or None if it died before."""
    with connection:
        try:
            ending: Done | Failed = connection.recv()
        except (EOFError, OSError):
            return None
    return ending


def _death(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _stop(processes: Iterable[BaseProcess]) -> None:
    processes = list(processes)
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()


@contextmanager
def _for_workers() -> Iterator[None]:
    """What a process started inside inherits: one thread, and no SIGINT, which a terminal sends to every process; the
    parent stops its workers itself, once. Python's resource tracker lets SIGINT in as it starts, so it starts first.
    """
    resource_tracker.ensure_running()
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _on_dask(tasks: Tasks, address: str, engine: type[Rollout] | None) -> Endings:
    """A task for each rollout. Dask itself gives that of a dead worker to another one, a few times."""
    try:
        from distributed import Client, as_completed
    except ImportError as error:
        raise ImportError(f"a Dask cluster needs pip install 'gdn-kernels[cluster]': {error}") from error

    with Client(address, timeout=CONNECT_SECONDS) as client:
        futures = {client.submit(_roll, config, None, engine, pure=False): path for path, config in tasks.items()}
        try:
            for future in as_completed(list(futures)):
                path = futures.pop(future)
                try:
                    ending = future.result()
                except Exception as error:  # not the rollout's: its worker kept dying, or lacks this package
                    ending = Failed(f"{type(error).__name__}: {error}")
                future.release()
                yield path, ending
        finally:
            client.cancel(list(futures))
