"""A rollout: a policy or a backend beside the oracle, token after token, recorded at log-spaced tokens."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gdn_kernels.drift.config import RolloutConfig as RolloutConfig
from gdn_kernels.drift.device import Device
from gdn_kernels.drift.emulate import Kernel, columns_of
from gdn_kernels.drift.heads import Start, first_state, layer_weights
from gdn_kernels.drift.model_head import ModelHead
from gdn_kernels.drift.oracle import Rounded
from gdn_kernels.drift.readout import logits, readout_matrix
from gdn_kernels.drift.records import head_figures, sequence_figures
from gdn_kernels.drift.steps import Decoder, Projected
from gdn_kernels.drift.streams import Stream
from gdn_kernels.dtypes import Array, bfloat16, to_fp32
from gdn_kernels.metrics import frobenius, norm_error
from gdn_kernels.policy import OURS, PRESETS, Roundings
from gdn_kernels.weights import BlockWeights

ORACLE = Roundings("oracle", {})  # not even the window
BLOCK = 256  # tokens, over all sequences, whose projections are made at once


def log_spaced(tokens: int, per_decade: int = 10) -> Array:
    """Recording points: 1 to `tokens`, evenly spaced in their logarithm, both ends included; int64, rising."""
    points = np.rint(10 ** (np.arange(0, np.ceil(np.log10(tokens) * per_decade) + 1) / per_decade)).astype(np.int64)
    return np.unique(np.minimum(points, tokens))


class Rollout:
    """A rollout under way. However it is cut into calls of `advance`, or saved and resumed, its bytes are the same."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        policy: Roundings | None = None,
        weights: BlockWeights | None = None,
        start: Start | None = None,
        oracle: bool = True,
    ) -> None:
        """policy, weights, start: used instead of those that `config` describes. oracle: False leaves out the oracle
        and with it all records, to time the rest.

        Raises:
            ValueError: for a stream or a checkpoint that can't be read.
            BackendUnavailable: for a backend that can't run here, from `advance`.
        """
        self.config, self.done = config, 0
        self.policy = policy or (PRESETS[config.policy] if config.backend is None else OURS)
        self.weights = weights or layer_weights(config)
        dims = self.dims = self.weights.dims
        start = start or first_state(config, dims)
        self._block = max(1, BLOCK // config.B)
        self._stream = Stream(config.stream, config.B, dims.H, self._block, config.seed, config.form)
        self._device = None if config.backend is None else Device(self.weights, start, config.form, config.backend)
        self._model = _Side(_decoder(self.policy, self.weights, start, config))
        self._oracle = _Side(Rounded(self.weights, start.recurrent_state, config.form, ORACLE, config.seed))
        self._with_oracle = oracle
        # The raw columns before the next token: those of the policy, and the oracle's own.
        self._tails = [columns_of(dims, start.conv_state).astype(np.float64) for _ in range(2)]
        self._largest = frobenius(start.recurrent_state, (-2, -1))  # [B, Hv], of the oracle's states so far
        self._largest_output = np.zeros((config.B, dims.Hv))
        self._diverged = np.full(config.B, -1, np.int64)
        self._matrix = readout_matrix(dims.value_dim)
        self._head = None if config.checkpoint is None else ModelHead.from_checkpoint(config.checkpoint, self.weights)
        self._points = log_spaced(config.tokens)
        self._recorded: list[dict[str, Array]] = []

    @property
    def records(self) -> dict[str, Array]:
        """What was recorded so far: `tokens` [records] int64, figures of `records.HEAD_FIGURES` [records, heads] and of
        `records.SEQUENCE_FIGURES` [records, B]; with a checkpoint that has the model's head, those of
        `ModelHead.figures` [records, B]; with a backend `model_error` [records, heads], its state against the
        emulation's, over the largest |S*| so far."""
        tokens = self._points[: len(self._recorded)]
        names = self._recorded[0] if self._recorded else {}
        return {"tokens": tokens, **{name: np.stack([record[name] for record in self._recorded]) for name in names}}

    @property
    def state(self) -> Array:
        """The state of the policy or the backend, [B, Hv, K, V]."""
        return self._model.decoder.S if self._device is None else self._device.S

    @property
    def exact_state(self) -> Array:
        """The oracle's state, float64 [B, Hv, K, V]."""
        return self._oracle.decoder.S

    def advance(self, tokens: int) -> None:
        """Run up to `tokens` more tokens, no further than config.tokens."""
        end = min(self.done + tokens, self.config.tokens)
        with ThreadPoolExecutor(1) as beside:
            while self.done < end:
                block_end = (self.done // self._block + 1) * self._block
                point = self._points[np.searchsorted(self._points, self.done, "right")]
                self._chunk(min(end, block_end, int(point)), beside)

    def _chunk(self, stop: int, beside: ThreadPoolExecutor) -> None:
        """Tokens [done, stop), all of one block and none but the last of them recorded."""
        first = self.done
        index = first // self._block
        hidden = self._stream.block(index)
        place = slice(first - index * self._block, stop - index * self._block)
        if self._device is None:
            columns = self._model.projected(hidden, index).qkv[place]
        else:
            columns, decoded = self._device.decode(hidden[place])
        pending = beside.submit(self._exact, hidden, index, place, columns) if self._with_oracle else None
        output = self._model.steps(hidden, index, place, self._tails[0], columns)
        if self._device is not None:
            output = decoded
        if pending is not None:
            exact = pending.result()
            self._follow(output, exact, first)
        self._tails[0] = _tail(self._tails[0], columns)
        self.done = stop
        if self._with_oracle and stop == self._points[len(self._recorded)]:
            self._recorded.append(self._record(output[-1], exact[-1]))

    def _exact(self, hidden: Array, index: int, place: slice, columns: Array) -> Array:
        """The oracle's core_out for the tokens of `place`."""
        if self.config.oracle_window == "policy":
            return self._oracle.steps(hidden, index, place, self._tails[0], columns)
        own = self._oracle.projected(hidden, index).qkv[place]
        output = self._oracle.steps(hidden, index, place, self._tails[1], own)
        self._tails[1] = _tail(self._tails[1], own)
        return output

    def _follow(self, output: Array, exact: Array, first: int) -> None:
        """What every token counts for: the largest sizes so far, and the first divergence."""
        norms = self._oracle.decoder.norms  # type: ignore[attr-defined]
        self._largest = np.maximum(self._largest, norms.max(0))
        self._largest_output = np.maximum(self._largest_output, frobenius(exact, -1).max(0))
        if (self._diverged < 0).any():
            differs = logits(output, self._matrix).argmax(-1) != logits(exact, self._matrix).argmax(-1)  # [n, B]
            now = differs.any(0) & (self._diverged < 0)
            self._diverged = np.where(now, first + 1 + differs.argmax(0), self._diverged)

    def _record(self, output: Array, exact: Array) -> dict[str, Array]:
        sizes = self._largest, self._largest_output
        figures = head_figures(self.state, self.exact_state, output, exact, *sizes)
        figures |= sequence_figures(output, exact, self._matrix, self._diverged)
        if self._head is not None:
            before = self._recorded[-1]["head_greedy_divergence"] if self._recorded else np.full(len(output), -1.0)
            figures |= self._head.figures(output, exact, self.done, before)
        if self._device is not None:
            figures["model_error"] = norm_error(self.state, self._model.decoder.S, (-2, -1), self._largest).reshape(-1)
        return figures

    def to_arrays(self) -> dict[str, Array]:
        """Everything that `from_arrays` needs to continue to the same bytes."""
        arrays = {
            "done": np.array(self.done),
            "model_state": self._model.decoder.S,
            "oracle_state": self._oracle.decoder.S,
            "columns": self._tails[0],
            "oracle_columns": self._tails[1],
            "largest": self._largest,
            "largest_output": self._largest_output,
            "diverged": self._diverged,
            **{f"record_{name}": values for name, values in self.records.items()},
        }
        if self._device is not None:
            arrays |= {"device_state": self._device.S, "device_window": to_fp32(self._device.conv_state)}
        return {name: np.array(array) for name, array in arrays.items()}

    @classmethod
    def from_arrays(cls, config: RolloutConfig, arrays: Mapping[str, Array]) -> Rollout:
        """The rollout that `to_arrays` described.

        Raises:
            ValueError: if an array is missing, or does not fit the configuration.
        """
        rollout = cls(config)
        expected = rollout.to_arrays()
        for name, array in expected.items():
            found = arrays.get(name)
            if found is None or (not name.startswith("record_") and found.shape != array.shape):
                shape = "nothing" if found is None else f"shape {found.shape}"
                raise ValueError(f"arrays[{name!r}] must be of shape {array.shape}, got {shape}")
        rollout.done = int(arrays["done"])
        rollout._model.decoder.S[...] = arrays["model_state"]
        rollout._oracle.decoder.S[...] = arrays["oracle_state"]
        rollout._tails = [np.array(arrays["columns"]), np.array(arrays["oracle_columns"])]
        rollout._largest, rollout._largest_output = np.array(arrays["largest"]), np.array(arrays["largest_output"])
        rollout._diverged = np.array(arrays["diverged"])
        if rollout._device is not None:
            rollout._device.S = np.array(arrays["device_state"])
            window = np.array(arrays["device_window"])
            rollout._device.conv_state = window.astype(bfloat16()) if config.form == "bf16" else window
        names = [name for name in arrays if name.startswith("record_") and name != "record_tokens"]
        rollout._recorded = [
            {name.removeprefix("record_"): np.array(arrays[name][index]) for name in names}
            for index in range(len(arrays["record_tokens"]))
        ]
        return rollout


class _Side:
    """A decoder with the projections of the block that it is in."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._block: tuple[int, Projected] | None = None

    def projected(self, hidden: Array, index: int) -> Projected:
        """Those of block `index`, whose tokens are `hidden`."""
        if self._block is None or self._block[0] != index:
            self._block = index, self.decoder.project(hidden, index * len(hidden))
        return self._block[1]

    def steps(self, hidden: Array, index: int, place: slice, tail: Array, columns: Array) -> Array:
        """Decode the tokens of `place`, whose window columns are `columns` and those before them `tail`."""
        part = self.projected(hidden, index).part(place.start, place.stop)
        return self.decoder.steps(part, np.concatenate([tail, columns]), index * len(hidden) + place.start)


def _decoder(policy: Roundings, weights: BlockWeights, start: Start, config: RolloutConfig) -> Decoder:
    if policy.arithmetic == "kernel":
        return Kernel(weights, start.recurrent_state, config.form, policy)
    return Rounded(weights, start.recurrent_state, config.form, policy, config.seed)


def _tail(tail: Array, columns: Array) -> Array:
    """The last columns of both: [K_win - 1, B, conv_dim]."""
    return np.concatenate([tail, columns])[-len(tail) :]
