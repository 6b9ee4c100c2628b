"""What a rollout is: everything that decides its numbers, checked, in one frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from gdn_kernels.dims import BlockDims
from gdn_kernels.policy import PRESETS

FORMS = ("bf16", "fp32")
STREAMS = ("independent", "repeated", "ar1", "bursts", "silence", "text")  # and "file:PATH"
BACKENDS = ("interpreter", "simulate", "trn2")
ORACLE_WINDOWS = ("policy", "exact")


@dataclass(frozen=True)
class RolloutConfig:
    """One rollout: `tokens` decode steps of one layer, by a rounding policy or a backend, beside a float64 oracle.

    Attributes:
        policy: a name in `policy.PRESETS`, of the roundings that are emulated. With a backend, what it is compared
            with beside the oracle is `ours`, and this names it in reports.
        backend: None for the emulation; "interpreter", "simulate" or "trn2" run the kernel itself.
        tokens: decode steps in all, at least 1.
        H, Hk, Hv, K, V, K_win: as in `BlockDims`; replaced by the checkpoint's where there is one.
        B: sequences, each with tokens of its own.
        tau: (lowest, highest) memory length in tokens, -1 / g for a = 0; value heads are spaced evenly in its
            logarithm, the first forgets fastest. None: the heads of the checkpoint, or (1, 1e6) without one.
        stream: one of STREAMS, "ar1:RHO", or "file:PATH" of a .npy or .npz recording.
        seed: of weights, states, tokens and stochastic rounding, each by a counter of its own.
        form: "bf16" or "fp32", the dtype of hidden and of the window.
        oracle_window: "policy": the oracle is given the window that the policy computed, so that errors are those that
            arise after it; "exact": it computes its own and never rounds it.
        checkpoint, layer: a folder and a layer number, for the weights of a checkpoint.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """

    policy: str = "ours"
    backend: str | None = None
    tokens: int = 4096
    H: int = 256
    Hk: int = 2
    Hv: int = 8
    K: int = 128
    V: int = 128
    K_win: int = 4
    B: int = 1
    tau: tuple[float, float] | None = None
    stream: str = "independent"
    seed: int = 0
    form: str = "bf16"
    oracle_window: str = "policy"
    checkpoint: str | None = None
    layer: int = 0

    def __post_init__(self) -> None:
        _one_of("policy", self.policy, tuple(PRESETS))
        if self.backend is not None:
            _one_of("backend", self.backend, BACKENDS)
        _one_of("form", self.form, FORMS)
        _one_of("oracle_window", self.oracle_window, ORACLE_WINDOWS)
        for name, least in (("tokens", 1), ("B", 1), ("seed", 0), ("layer", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2^63, got {self.seed}")
        self._check_stream()
        if self.tau is not None:
            self._check_tau(self.tau)
        if self.checkpoint is None:
            _ = self.dims

    @property
    def dims(self) -> BlockDims:
        """The dimensions given here, which a checkpoint's own replace."""
        return BlockDims(H=self.H, Hk=self.Hk, Hv=self.Hv, K=self.K, V=self.V, K_win=self.K_win)

    def _check_stream(self) -> None:
        kind, _, option = self.stream.partition(":")
        if kind == "file" and option:
            return
        if kind == "ar1" and option:
            try:
                inside = 0 <= float(option) < 1
            except ValueError:
                inside = False
            if not inside:
                raise ValueError(f"stream must name a correlation in [0, 1) after ar1:, got {self.stream!r}")
            return
        if self.stream not in STREAMS:
            raise ValueError(f"stream must be one of {', '.join(STREAMS)}, ar1:RHO or file:PATH, got {self.stream!r}")

    @staticmethod
    def _check_tau(tau: tuple[float, float]) -> None:
        low, high = tau
        if not 0 < low <= high < float("inf"):
            raise ValueError(f"tau must be (lowest, highest) memory length, 0 < lowest <= highest, got {tau!r}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
