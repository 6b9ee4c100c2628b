"""Greedy decoding with a record of how clear every choice was, and how far two such runs agree.

Two correct implementations that round differently choose different tokens where the two largest logits are almost
equal, and from there on they write different texts. So a first difference is judged by the reference's margin there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.metrics import bf16_spacing

Array = npt.NDArray[Any]


@dataclass
class Greedy:
    """A greedy run as it goes: one entry a token in each list.

    Attributes:
        tokens: [B] each, the tokens chosen.
        margins: [B] each, the largest logit minus the second largest.
        steps: [B] each, the same in bf16 steps: the spacing of bf16 numbers at the larger of the two, in size.
    """

    tokens: list[Array] = field(default_factory=list)
    margins: list[Array] = field(default_factory=list)
    steps: list[Array] = field(default_factory=list)

    def row(self, index: int = 0) -> list[int]:
        """The tokens of one row of the batch."""
        return [int(tokens[index]) for tokens in self.tokens]


@dataclass(frozen=True)
class Agreement:
    """How far one row of a run agrees with the same row of a reference run of the same model.

    Attributes:
        tokens: how many were compared.
        equal: how many are equal, place by place; after the first difference that is chance.
        first: place of the first difference, from 0; None if there is none.
        margin, steps: the reference's margin there, in logits and in bf16 steps; None likewise.
    """

    tokens: int
    equal: int
    first: int | None
    margin: float | None
    steps: float | None


def greedy(
    model: Any,
    input_ids: Any,
    *,
    tokens: int,
    attention_mask: Any = None,
    into: Greedy | None = None,
    show: Callable[[Array], None] | None = None,
    **options: Any,
) -> Greedy:
    """Decode with `model.generate`, always taking the most likely token.

    Args:
        input_ids, attention_mask: [B, length] int64 tensors; left padding has 0 in the mask.
        tokens: how many at most; fewer where every row has ended.
        into: where to record, for a caller who wants what there is after an interruption.
        show: called with every [B] tokens as they come.
        options: further ones of `generate`, such as `cache`.
    """
    run = Greedy() if into is None else into
    mask = input_ids.new_ones(input_ids.shape) if attention_mask is None else attention_mask
    model.generate(
        input_ids=input_ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        logits_processor=[_Margins(run)],
        streamer=_Tokens(run, show),
        **options,
    )
    return run


def logits_along(model: Any, input_ids: Any, tokens: list[Array], *, attention_mask: Any = None) -> Array:
    """What a model makes of a given text: its logits [tokens, B, vocabulary] float64 before each of `tokens`.

    Args:
        input_ids, attention_mask: [B, length], as for `greedy`.
        tokens: [B] each, as in `Greedy.tokens`; they are taken one at a time, whatever the model would have chosen.
    """
    given = _Given(tokens)
    mask = input_ids.new_ones(input_ids.shape) if attention_mask is None else attention_mask
    model.generate(
        input_ids=input_ids,
        attention_mask=mask,
        max_new_tokens=len(tokens),
        do_sample=False,
        num_beams=1,
        logits_processor=[given],
    )
    return np.stack(given.logits).astype(np.float64)


def agreement(run: Greedy, reference: Greedy) -> list[Agreement]:
    """How far each row of `run` agrees with `reference`, whose margins count; over the tokens that both have."""
    count = min(len(run.tokens), len(reference.tokens))
    if not count:
        return []
    ours, theirs = np.stack(run.tokens[:count]), np.stack(reference.tokens[:count])  # [count, B]
    return [
        _agreement(ours[:, row] == theirs[:, row], *(np.stack(x)[:, row] for x in (reference.margins, reference.steps)))
        for row in range(ours.shape[1])
    ]


def _agreement(same: Array, margins: Array, steps: Array) -> Agreement:
    equal = int(same.sum())
    if same.all():
        return Agreement(len(same), equal, None, None, None)
    first = int(same.argmin())
    return Agreement(len(same), equal, first, float(margins[first]), float(steps[first]))


def margins_of(logits: Array) -> tuple[Array, Array]:
    """logits [B, vocabulary] float -> the top-2 margin [B], and the same in bf16 steps."""
    second, first = np.partition(logits.astype(np.float64), (-2, -1), axis=-1)[:, -2:].T  # [B] each
    size = np.maximum(np.abs(first), np.abs(second))
    return first - second, (first - second) / bf16_spacing(size)


@dataclass
class _Margins:
    """A logits processor that changes nothing."""

    run: Greedy

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        margins, steps = margins_of(scores.float().cpu().numpy())
        self.run.margins.append(margins)
        self.run.steps.append(steps)
        return scores


@dataclass
class _Given:
    """A logits processor that leaves one token a row to choose."""

    tokens: list[Array]
    logits: list[Array] = field(default_factory=list)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        token = input_ids.new_tensor(self.tokens[len(self.logits)])[:, None]  # [B, 1]
        self.logits.append(scores.float().cpu().numpy())
        return scores.new_full(scores.shape, -np.inf).scatter(1, token, 0.0)


@dataclass
class _Tokens:
    """A streamer: `generate` gives it the prompt, then the tokens of each step."""

    run: Greedy
    show: Callable[[Array], None] | None
    prompt_seen: bool = False

    def put(self, value: Any) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        tokens = np.atleast_1d(value.numpy())
        self.run.tokens.append(tokens)
        if self.show is not None:
            self.show(tokens)

    def end(self) -> None:
        self.prompt_seen = False
