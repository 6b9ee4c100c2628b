"""What is said of finished rollouts: the numbers of one, the statistics of many, the lines and cells of the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from gdn_kernels import reference
from gdn_kernels.drift.config import RolloutConfig
from gdn_kernels.drift.heads import layer_weights
from gdn_kernels.drift.store import Result
from gdn_kernels.dtypes import Array
from gdn_kernels.metrics import first_past, growth_exponent
from gdn_kernels.plots import HeadErrors, Line

PAST = 1e-3  # of the state error, whose first token past it the table of a sweep names
COLUMNS = {
    "state_error": "state error",
    "output_error": "output error",
    "worst_state_error": "worst head",
    "worst_model_error": "to our model",
}


def over_heads(result: Result, measure: str, how: Callable[..., Any] = np.median) -> Array:
    """A record [records, heads] as one number a record: `how`, np.median or np.max, over sequences and heads."""
    return np.asarray(how(result.records[measure], axis=1))


def report_of(result: Result) -> dict[str, list[Any]]:
    """The recorded tokens, and there: the medians over sequences and heads of both errors, the worst state error; with
    a backend also how far its worst state is from the emulation's."""
    report = {
        "tokens": result.records["tokens"].tolist(),
        "state_error": over_heads(result, "state_error").tolist(),
        "output_error": over_heads(result, "output_error").tolist(),
        "worst_state_error": over_heads(result, "state_error", np.max).tolist(),
    }
    if "model_error" in result.records:
        report["worst_model_error"] = over_heads(result, "model_error", np.max).tolist()
    return report


def report_text(config: RolloutConfig, report: dict[str, Any]) -> str:
    """The table of one rollout; `report` has `seconds` and `tokens_per_second` too."""
    columns = {name: heading for name, heading in COLUMNS.items() if name in report}
    lines = [
        f"policy {config.policy}, {config.backend or 'emulated'}, stream {config.stream}, seed {config.seed}",
        "",
        f"{'token':>9}" + "".join(f"  {heading:>12}" for heading in columns.values()),
    ]
    for token, *errors in zip(report["tokens"], *(report[name] for name in columns), strict=True):
        lines.append(f"{token:9,d}" + "".join(f"  {error:12.2e}" for error in errors))
    rate = f"{report['tokens_per_second']:,.0f} tokens/s, the oracle included"
    return "\n".join([*lines, "", f"{report['seconds']:.1f} s, {rate}"])


def names_of(result: Result) -> dict[str, Any]:
    """What tells a sweep's rollouts apart."""
    return {name: result.config[name] for name in ("policy", "backend", "tau", "stream", "seed")}


def sweep_text(results: Iterable[Result]) -> str:
    """The table of a sweep: errors at the last token, the median over seeds and their range; how the state errors grow
    (`metrics.growth_exponent`) and when the worst head's first passed PAST, the median over seeds."""
    errors, past = f"{'state error':>30}  {'worst head':>30}", f"past {PAST:g}"
    lines = [f"{'policy and memory':30} {'seeds':>5}  {errors} {'growth':>6} {past:>10}"]
    for label, group in _groups(results).items():
        cells = []
        for how in (np.median, np.max):
            last = [float(over_heads(result, "state_error", how)[-1]) for result in group]
            cells.append(f"{np.median(last):.2e} ({min(last):.2e} to {max(last):.2e})")
        growth = np.median([_growth(result) for result in group])
        lines.append(f"{label:30} {len(group):5d}  {cells[0]:>30}  {cells[1]:>30} {growth:6.2f} {_past(group):>10}")
    return "\n".join(lines)


def _growth(result: Result) -> float:
    return float(growth_exponent(result.records["tokens"], over_heads(result, "state_error")))


def _past(group: list[Result]) -> str:
    worst = (over_heads(result, "state_error", np.max) for result in group)
    tokens = [int(first_past(result.records["tokens"], w, PAST)) for result, w in zip(group, worst, strict=True)]
    passed = sorted(token for token in tokens if token > 0)
    return f"{np.median(passed):,.0f}" if 2 * len(passed) > len(tokens) else "never"


def lines_of(results: Iterable[Result], measure: str, how: Callable[..., Any] = np.median) -> list[Line]:
    """A line for each policy and range of memory lengths, over its seeds; `measure` is a record [records, heads]."""
    return [
        Line(label, group[0].records["tokens"], np.stack([over_heads(result, measure, how) for result in group]))
        for label, group in _groups(results).items()
    ]


def head_errors(results: Iterable[Result]) -> dict[str, HeadErrors]:
    """State errors by head and token for each policy and range, the median over seeds and sequences."""
    return {
        label: HeadErrors(
            memory_lengths_of(group[0]),
            group[0].records["tokens"],
            np.median([_by_head(result) for result in group], axis=0),  # [records, Hv]
        )
        for label, group in _groups(results).items()
    }


def memory_lengths_of(result: Result) -> Array:
    """Memory lengths of the value heads in tokens, [Hv]: -1 / g for a = 0."""
    tau = result.config["tau"]
    weights = layer_weights(RolloutConfig(**{**result.config, "tau": tau and tuple(tau)}))
    zeros = np.zeros((1, weights.dims.Hv))
    g, _ = reference.gates(zeros, zeros, weights.A_log.astype(np.float64), weights.dt_bias.astype(np.float64))
    return np.asarray(-1 / g[0])


def _by_head(result: Result) -> Array:
    """State errors [records, Hv], the median over sequences."""
    errors = result.records["state_error"]  # [records, B * Hv]
    return np.asarray(np.median(errors.reshape(len(errors), result.config["B"], -1), axis=1))


def _groups(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Rollouts that differ in nothing but the seed, by policy; with several ranges of memory, by range too."""
    results = list(results)
    ranges = {str(result.config["tau"]) for result in results}
    groups: dict[str, list[Result]] = {}
    for result in results:
        tau = result.config["tau"]
        memory = f", tau {tau[0]:g} to {tau[1]:g}" if tau and len(ranges) > 1 else ""
        groups.setdefault(result.config["policy"] + memory, []).append(result)
    return groups
