"""The figures of notebook 09: how clear every choice of a model was, and where the bytes of its decode step go.

Each function takes numbers and returns one figure, without a background and in inks that can be read on light and dark
pages; `gdn_kernels.notebook.picture` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from gdn_kernels.agreement import Agreement, Greedy
from gdn_kernels.figure_style import COLOURS, INK, plain, titled
from gdn_kernels.step_bytes import StepBytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST = 0.5  # bf16 steps; equal logits have no place on a logarithmic axis and are drawn here
PARTS = {
    "block": "the block",
    "out_proj": "its out_proj",
    "attention": "full attention",
    "kv_cache": "KV cache",
    "mlp": "MLP or experts",
    "head": "output head",
}


def margins_over_tokens(reference: Greedy, rows: Sequence[Agreement], limit: float, title: str) -> Figure:
    """The reference's top-2 margin at every token, in bf16 steps, for all rows; where a row of the other run first
    takes another token it is ringed. Up to there both have seen the same text. `limit` is dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    ax = figure.subplots()
    steps = np.maximum(np.stack(reference.steps), LEAST)  # [tokens, B]
    for index, row in enumerate(rows):
        before = row.tokens if row.first is None else row.first + 1
        ax.plot(np.arange(1, before + 1), steps[:before, index], "s", color=COLOURS[0], ms=2.4, mew=0)
        if row.first is not None:
            ax.plot(row.first + 1, steps[row.first, index], "o", color=COLOURS[1], ms=9, mfc="none", mew=1.8)
    ax.plot([], [], "s", color=COLOURS[0], ms=2.4, mew=0, label="same token")
    ax.plot([], [], "o", color=COLOURS[1], mfc="none", mew=1.8, label="first other token of a row")
    ax.axhline(limit, color=INK, ls="--", lw=1, label=f"{limit:g} steps")
    ax.set(yscale="log", xlabel="token", ylabel="top-2 margin, bf16 steps")
    plain(ax)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small")
    return titled(figure, title)


def bytes_by_part(cases: Mapping[str, StepBytes], title: str) -> Figure:
    """One bar for each case: the parts of a decode step's bytes in percent, the block's own written beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.1 + 0.33 * len(cases)), layout="constrained")
    ax = figure.subplots()
    left = np.zeros(len(cases))
    for colour, (part, label) in zip(COLOURS, PARTS.items(), strict=False):
        widths = np.array([100 * asdict(case)[part] / case.total for case in cases.values()])
        ax.barh(range(len(cases)), widths, left=left, color=colour, height=0.7, lw=0, label=label)
        left += widths
    for place, case in enumerate(cases.values()):
        ax.text(101, place, f"block {case.share:.0%}", va="center", fontsize="x-small")
    ax.set(yticks=range(len(cases)), yticklabels=list(cases), xlim=(0, 100), ylim=(len(cases) - 0.5, -0.5))
    ax.set_xlabel("percent of a step's bytes, modelled")
    plain(ax)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small")
    return titled(figure, title)
