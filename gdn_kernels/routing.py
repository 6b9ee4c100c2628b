"""Which experts the routers of a model choose: recorded in one run, replayed in another, and where two runs part.

A router takes a few of its experts, and which ones is a jump, not a rounding: where one more was almost as much wanted
as the last one taken, two correct implementations that round differently take different experts, and their logits then
differ by far more than rounding. So two runs of a model with experts are compared twice: as they are, with the routers'
own margins where they part, and once more with the reference's choices, which leaves rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.agreement import Agreement

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Choice:
    """What one call of a router chose for each of its N tokens, the rows of a batch one after the other.

    Attributes:
        experts: [N, k] integer tensor.
        margins: [N], the smallest logit of a chosen expert minus the largest of the others: 0.01 means that the last
            one taken was 1 % likelier than the first one left out. Infinite where all are taken.
    """

    experts: Any
    margins: Array


Routing = dict[str, list[Choice]]
"""The calls of every router of a model by its name, both in the model's order."""


@dataclass(frozen=True)
class Flip:
    """The first place where a row's routers chose other experts than in the reference run.

    Attributes:
        token: place of the token that the call led to, from 0.
        router: its name in the model.
        margin: how clear the reference's choice was there; as in `Choice`.
    """

    token: int
    router: str
    margin: float


@contextmanager
def recorded(model: Any) -> Iterator[Routing]:
    """What the routers of a transformers model choose meanwhile; empty for a model without experts."""
    routing: Routing = {name: [] for name in _routers(model)}
    with _hooked(model, lambda name: partial(_record, routing[name])):
        yield routing


@contextmanager
def replayed(model: Any, routing: Routing) -> Iterator[None]:
    """Every router gives the experts that it gave in `routing`, call by call, weighted by the logits it has now."""
    with _hooked(model, lambda name: partial(_replay, iter(routing[name]))):
        yield


def first_flips(run: Routing, reference: Routing, rows: Sequence[Agreement]) -> list[Flip | None]:
    """The first flip of each row of a batch; None where there was none as long as its texts were the same.

    `run` and `reference` are records of one `greedy` each: a call of each router a token, the first with the prompts.
    """
    first: list[Flip | None] = [None] * len(rows)
    for token in range(min(map(len, (*run.values(), *reference.values())), default=0)):
        for router, calls in reference.items():
            ours, theirs = run[router][token], calls[token]
            last = np.arange(1, len(rows) + 1) * (len(theirs.margins) // len(rows)) - 1  # of each row's tokens
            other = (_in_order(ours)[last] != _in_order(theirs)[last]).any(-1)  # [rows]
            for row in np.flatnonzero(other).tolist():
                if first[row] is None and token <= _last(rows[row]):
                    first[row] = Flip(token, router, float(theirs.margins[last[row]]))
    return first


def _last(row: Agreement) -> int:
    """The last token that both runs chose after the same text."""
    return row.tokens - 1 if row.first is None else row.first


def _routers(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if type(module).__name__.endswith("TopKRouter")}


@contextmanager
def _hooked(model: Any, hook: Callable[[str], Callable[..., Any]]) -> Iterator[None]:
    with ExitStack() as handles:
        for name, router in _routers(model).items():
            handles.callback(router.register_forward_hook(hook(name)).remove)
        yield


def _record(calls: list[Choice], router: Any, inputs: Any, outputs: Any) -> None:
    logits, _, experts = outputs  # [N, experts], [N, k], [N, k]
    values = logits.detach().float().cpu().numpy()
    taken = np.zeros(values.shape, bool)
    np.put_along_axis(taken, experts.cpu().numpy(), True, axis=-1)
    margins = np.where(taken, values, np.inf).min(-1) - np.where(taken, -np.inf, values).max(-1)  # [N]
    calls.append(Choice(experts.clone(), margins))


def _replay(calls: Iterator[Choice], router: Any, inputs: Any, outputs: Any) -> Any:
    logits, weights, _ = outputs
    experts = next(calls).experts
    probabilities = logits.float().softmax(-1).gather(-1, experts)  # [N, k]
    if getattr(router, "norm_topk_prob", True):  # Qwen3.5's has no choice
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return logits, probabilities.to(weights.dtype), experts


def _in_order(choice: Choice) -> Array:
    return np.sort(choice.experts.cpu().numpy(), axis=-1)
