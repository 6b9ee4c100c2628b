"""One rollout from start to end, safely: progress, checkpoints, and a Ctrl-C that loses nothing.

A rollout that was stopped, by Ctrl-C or by force, goes on from its last checkpoint to the same bytes as one that was
not. A rollout is deterministic and its state between two tokens is all in the checkpoint, so nothing more is needed.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from gdn_kernels.drift import store
from gdn_kernels.drift.config import RolloutConfig
from gdn_kernels.dtypes import Array

if TYPE_CHECKING:  # the interpreter and ml_dtypes come with it: a second, which a wrong option needn't wait for
    from gdn_kernels.drift.rollout import Rollout

CHECKPOINT_SECONDS = 60.0
"""Between checkpoints, unless the caller asks for a number of tokens: the most that a kill can cost."""

CHUNK_SECONDS = 0.2
"""Tokens are taken in chunks of about this long, after which the bar moves and Ctrl-C is heard."""


class Interrupted(KeyboardInterrupt):
    """The rollout was asked to stop and did, after a whole token.

    Attributes:
        token: how many tokens are done.
        checkpoint: the file from which it can go on; None if none was asked for.
        signal: what asked, signal.SIGINT or signal.SIGTERM.
    """

    def __init__(self, token: int, checkpoint: Path | None, signum: int) -> None:
        super().__init__(f"stopped after {token} tokens")
        self.token, self.checkpoint, self.signal = token, checkpoint, signum


@dataclass(frozen=True)
class Finished:
    """A result, and the seconds that its tokens took, over all sessions; checkpoints and progress are not counted."""

    result: store.Result
    seconds: float


@dataclass
class _Session:
    """A rollout under way: how far it is, and what it took to get there."""

    rollout: Rollout
    seconds: float = 0.0
    chunk: int = 1
    saved_token: int = 0
    saved_at: float = field(default_factory=time.monotonic)

    def advance(self, limit: int) -> int:
        """Take a chunk of at most `limit` tokens, and return how many that were."""
        tokens = min(self.chunk, limit)
        started = time.perf_counter()
        self.rollout.advance(tokens)
        took = time.perf_counter() - started
        if took < CHUNK_SECONDS / 2:
            self.chunk *= 2
        elif took > CHUNK_SECONDS * 2:
            self.chunk = max(1, self.chunk // 2)
        self.seconds += took
        return tokens


def run(
    config: RolloutConfig,
    checkpoint: Path | None = None,
    *,
    every: int | None = None,
    resume: bool = False,
    progress: bool = False,
    engine: type[Rollout] | None = None,
) -> Finished:
    """Run a rollout to its end.

    Args:
        checkpoint: where to keep checkpoints; the caller removes the file once the result is safe. None: none kept.
        every: tokens between checkpoints; None for one every CHECKPOINT_SECONDS.
        resume: go on from `checkpoint` if that file exists.
        progress: show a bar on standard error.
        engine: another class in the place of Rollout.

    Raises:
        Interrupted: on SIGINT or SIGTERM, after a last checkpoint. A second signal is not waited for.
        DriftFileError: if `checkpoint` is damaged, or of another rollout.
        FileExistsError: if `checkpoint` exists and `resume` is false: it may be hours of work.
    """
    from tqdm import tqdm

    session = _start(config, checkpoint, resume, engine or _rollout())
    begun = session.rollout.done
    bar = tqdm(total=config.tokens, initial=begun, desc=config.policy, unit="token", disable=not progress)
    with _held_signals() as received, bar:
        while session.rollout.done < config.tokens:
            if received:
                _save(session, config, checkpoint)
                raise Interrupted(session.rollout.done, checkpoint, received[0])
            limit = config.tokens - session.rollout.done
            bar.update(session.advance(min(limit, every - session.rollout.done % every) if every else limit))
            if _is_due(session, every):
                _save(session, config, checkpoint)
    records = compact(session.rollout.records)
    return Finished(store.Result(store.plain(config), records, store.provenance(config)), session.seconds)


@np.errstate(over="ignore")
def compact(records: Mapping[str, Array]) -> dict[str, Array]:
    """The records as they are kept: errors in float32, which halves a file; an error of an error of 1e-7 is nothing.

    Over a state that silence has taken to 1e-300 an error may be beyond float32; it is infinity then.
    """
    return {name: array.astype(np.float32) if "error" in name else array for name, array in records.items()}


def _rollout() -> type[Rollout]:
    from gdn_kernels.drift.rollout import Rollout

    return Rollout


def _start(config: RolloutConfig, checkpoint: Path | None, resume: bool, engine: type[Rollout]) -> _Session:
    if checkpoint is None or not checkpoint.exists():
        return _Session(engine(config))
    if not resume:
        raise FileExistsError(f"{checkpoint}: is an unfinished rollout; resume it, or delete the file")
    token, seconds, arrays = store.load_checkpoint(checkpoint, config)
    return _Session(engine.from_arrays(config, arrays), seconds, saved_token=token)


def _is_due(session: _Session, every: int | None) -> bool:
    if every:
        return session.rollout.done % every == 0
    return time.monotonic() - session.saved_at > CHECKPOINT_SECONDS


def _save(session: _Session, config: RolloutConfig, checkpoint: Path | None) -> None:
    if checkpoint is not None and session.rollout.done > session.saved_token:
        store.save_checkpoint(checkpoint, config, session.rollout.done, session.seconds, session.rollout.to_arrays())
        session.saved_token, session.saved_at = session.rollout.done, time.monotonic()


@contextmanager
def _held_signals() -> Iterator[list[int]]:
    """A list to which SIGINT and SIGTERM are added when they arrive; a second one of a kind does what it did before.

    Python lets only the main thread ask for signals; in another one the list stays empty.
    """
    received: list[int] = []
    before: dict[int, Any] = {}

    def hold(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        signal.signal(signum, before[signum])

    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, hold)
    try:
        yield received
    finally:
        for held, handler in before.items():
            signal.signal(held, handler)
