"""The figures: each function takes numbers, draws one figure and saves it. matplotlib is imported inside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """One error over decode steps: label, {step: error}, and the largest error allowed."""

    label: str
    errors: Mapping[int, float]
    tolerance: float


def decode_errors(panels: Mapping[str, Sequence[Curve]], title: str, path: Path) -> None:
    """Errors over decode steps, one panel for each entry (its key is the heading), with the tolerances dashed.

    Curves of fewer than ten steps are drawn as points. An error of exactly zero has no place on the log axis and is
    left out.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    figure = Figure(figsize=(5.5 * len(panels), 5.5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (heading, curves) in zip(axes, panels.items(), strict=True):
        for i, curve in enumerate(curves):
            shown = {step: error for step, error in curve.errors.items() if error > 0}
            style = "o" if len(curve.errors) < 10 else "-"
            ax.plot(list(shown), list(shown.values()), style, color=f"C{i}", label=curve.label, lw=1.2, ms=5)
            ax.axhline(curve.tolerance, color=f"C{i}", ls="--", lw=0.8, alpha=0.6)
        ax.set(yscale="log", xlabel="decode step", title=heading)
        ax.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(0, -0.12), frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("relative error (dashed: tolerance)")
    figure.suptitle(title, fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
