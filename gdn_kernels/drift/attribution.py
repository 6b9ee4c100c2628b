"""Who costs what: a policy's roundings one at a time, and all but one, each in a rollout of its own.

Errors do not add up: roundings that follow one another may hide or cancel. So each is judged twice, by what it does
alone and by what is saved without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from gdn_kernels.drift.config import RolloutConfig
from gdn_kernels.drift.rollout import Rollout
from gdn_kernels.policy import PRESETS, Roundings

LATE = 0.1  # errors are those of the records from this share of the tokens on


@dataclass(frozen=True)
class Variant:
    """One rollout of an attribution. kind: "all", "alone" or "without"; site and format: what it is about, or ""."""

    kind: str
    site: str
    format: str
    policy: Roundings


@dataclass(frozen=True)
class Errors:
    """Medians over the late records: of the median head, and of the worst."""

    state: float
    worst_state: float
    output: float
    worst_output: float


@dataclass(frozen=True)
class Cost:
    """What the rounding at one site costs.

    alone: the errors with this rounding only. without: with all the others. share: of the sum of all squared state
    (`output_share`: output) errors alone, this one's part; 1 together.
    """

    site: str
    format: str
    alone: Errors
    without: Errors
    share: float
    output_share: float


def variants(policy: Roundings) -> list[Variant]:
    """Every rollout that attributing `policy` takes: all roundings, each alone, all but each.

    Raises:
        ValueError: for the kernel's arithmetic, whose roundings are not sites, and a policy without any.
    """
    if policy.arithmetic != "float64" or not policy.table:
        raise ValueError(
            f"policy must round float64 steps somewhere, to be taken apart; got {policy.name!r}, arithmetic "
            f"{policy.arithmetic!r}, {len(policy.table)} sites"
        )
    table = {site: fmt for site, fmt in policy.table.items() if site != "conv_out"}  # no site of the block
    found = [Variant("all", "", "", policy)]
    for site, fmt in table.items():
        others = {other: of for other, of in table.items() if other != site}
        found.append(Variant("alone", site, fmt, Roundings(f"{site} alone", {site: fmt})))
        found.append(Variant("without", site, fmt, Roundings(f"{policy.name} without {site}", others)))
    return found


def run(config: RolloutConfig, variant: Variant) -> Errors:
    """The errors of one variant, beside an oracle that rounds nothing, not even the window."""
    rollout = Rollout(replace(config, oracle_window="exact", backend=None), policy=variant.policy)
    rollout.advance(config.tokens)
    return late_errors(rollout.records)


def late_errors(records: dict[str, np.ndarray]) -> Errors:
    """The errors of a whole rollout in four numbers, from its last nine tenths."""
    late = records["tokens"] >= LATE * records["tokens"][-1]
    state, output = records["state_error"][late], records["output_error"][late]
    median = [float(np.median(x)) for x in (np.median(state, 1), state.max(1), np.median(output, 1), output.max(1))]
    return Errors(*median)


def ranked(results: Iterable[tuple[Variant, Errors]]) -> list[Cost]:
    """The costs, the dearest for the state first; those that never touch the state by their cost for the output."""
    found = {(variant.kind, variant.site): (variant, errors) for variant, errors in results}
    alone = {site: pair for (kind, site), pair in found.items() if kind == "alone"}
    state = sum(errors.state**2 for _, errors in alone.values()) or 1.0
    output = sum(errors.output**2 for _, errors in alone.values()) or 1.0
    costs = [
        Cost(
            site, variant.format, errors, found["without", site][1], errors.state**2 / state, errors.output**2 / output
        )
        for site, (variant, errors) in alone.items()
    ]
    return sorted(costs, key=lambda cost: (cost.alone.state, cost.alone.output), reverse=True)


def attribute(config: RolloutConfig) -> tuple[Errors, list[Cost]]:
    """The errors of config.policy with all its roundings, and the ranked costs of each, one rollout after the other."""
    results = [(variant, run(config, variant)) for variant in variants(PRESETS[config.policy])]
    return results[0][1], ranked(results)
