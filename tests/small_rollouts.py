"""Rollouts that take no time, with the interface of `gdn_kernels.drift.rollout.Rollout`; also in spawned processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from gdn_kernels.drift.config import RolloutConfig

POINTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


class SmallRollout:
    """A random walk in the place of the state; its `errors` are the distance from the start, one a head."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.generator = np.random.default_rng(config.seed)
        self.x = np.zeros((config.B, config.Hv))
        self.done = 0
        self.rows: list[Any] = []

    def advance(self, n: int) -> None:
        for _ in range(min(n, self.config.tokens - self.done)):
            self.done += 1
            self.step()
            if self.done in (*POINTS, self.config.tokens):
                self.rows.append(np.abs(self.x))

    def step(self) -> None:
        self.x = self.x + self.generator.standard_normal(self.x.shape)

    @property
    def records(self) -> dict[str, Any]:
        points = sorted({*POINTS, self.config.tokens})
        errors = np.array(self.rows).reshape(-1, self.x.size)  # [records, heads]
        return {"tokens": np.array(points[: len(errors)]), "state_error": errors, "output_error": errors / 2}

    def to_arrays(self) -> dict[str, Any]:
        state = self.generator.bit_generator.state["state"]
        words = [state[name] >> shift & (1 << 64) - 1 for name in ("state", "inc") for shift in (64, 0)]
        rows = np.array(self.rows).reshape(-1, *self.x.shape)
        return {"x": self.x, "token": np.array(self.done), "words": np.array(words, np.uint64), "rows": rows}

    @classmethod
    def from_arrays(cls, config: RolloutConfig, arrays: dict[str, Any]) -> SmallRollout:
        self = cls(config)
        words = [int(word) for word in arrays["words"]]
        state = {"state": words[0] << 64 | words[1], "inc": words[2] << 64 | words[3]}
        self.generator.bit_generator.state = {**self.generator.bit_generator.state, "state": state}
        self.x, self.done, self.rows = arrays["x"], int(arrays["token"]), list(arrays["rows"])
        return self


class SlowRollout(SmallRollout):
    """A millisecond a token."""

    def step(self) -> None:
        time.sleep(0.001)
        super().step()


class AnnouncedRollout(SlowRollout):
    """Makes a file when it begins: `stream` and the seed name it."""

    def step(self) -> None:
        Path(f"{self.config.stream.removeprefix('file:')}.{self.config.seed}").touch()
        super().step()


class DyingRollout(SlowRollout):
    """With seed 1, kills its process half-way, unless a process did so before: `stream` names the file that tells."""

    def step(self) -> None:
        super().step()
        died = Path(self.config.stream.removeprefix("file:"))
        if self.config.seed == 1 and self.done == self.config.tokens // 2 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class AlwaysDyingRollout(SmallRollout):
    """With seed 1, kills its process at once, every time."""

    def step(self) -> None:
        if self.config.seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().step()


class FailingRollout(SmallRollout):
    """With seed 1, raises."""

    def step(self) -> None:
        if self.config.seed == 1:
            raise ValueError("seed 1 is not lucky")
        super().step()
