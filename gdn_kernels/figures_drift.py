"""The figures of notebook 07 that the command line doesn't draw: errors by memory, a number that fades, bytes by batch.

Each function takes numbers and returns one figure, without a background and in inks that can be read on light and dark
pages; `gdn_kernels.notebook.picture` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.figure_style import COLOURS, DASHES, INK, plain, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[Any]


def errors_by_memory(
    memory: Array, measured: Mapping[str, Array], predicted: Mapping[str, Array], title: str
) -> Figure:
    """Errors over the memory lengths of heads, both logarithmic: label -> [seeds, Hv], the median and the range over
    seeds; predicted: label -> [Hv], dashed, in the colour of the same label."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3.8), layout="constrained")
    ax = figure.subplots()
    for colour, (label, errors) in zip(COLOURS, measured.items(), strict=False):
        ax.plot(memory, np.median(errors, axis=0), "o-", color=colour, ms=4, lw=1.6, label=label)
        ax.fill_between(memory, errors.min(0), errors.max(0), color=colour, alpha=0.22, lw=0)
        if label in predicted:
            ax.plot(memory, predicted[label], DASHES[1], color=colour, lw=1.2)
    ax.plot([], [], DASHES[1], color=INK, lw=1.2, label="predicted")
    ax.set(xscale="log", yscale="log", xlabel="memory of the head, tokens", ylabel="relative error of its state")
    plain(ax)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small")
    return titled(figure, title)


def one_head(tokens: Array, curves: Mapping[str, Array], memory: Array, head: int) -> Figure:
    """Errors of one head over tokens, both logarithmic: label -> [seeds, records, Hv], the median and the range over
    seeds; memory: [Hv], tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    ax = figure.subplots()
    for i, (label, errors) in enumerate(curves.items()):
        shown = errors[..., head]
        ax.plot(tokens, np.median(shown, axis=0), color=COLOURS[i], lw=2.6 - 1.4 * i / len(curves), label=label)
        ax.fill_between(tokens, shown.min(0), shown.max(0), color=COLOURS[i], alpha=0.22, lw=0)
    ax.set(xscale="log", yscale="log", ylim=(3e-9, 0.3), xlabel="token", ylabel="relative error of its state")
    plain(ax)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small")
    return titled(figure, f"Head {head}, a memory of {memory[head]:,.0f} tokens")


def decaying_number(curves: Mapping[str, Array], title: str) -> Figure:
    """What is left of a number that should fade: label -> [tokens]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 3.3), layout="constrained")
    ax = figure.subplots()
    for i, (label, values) in enumerate(curves.items()):
        every = max(1, len(values) // 500)
        tokens = np.arange(1, len(values) + 1)[::every]
        ax.plot(tokens, values[::every], color=COLOURS[i], lw=1.8, ls=DASHES[i], label=label)
    ax.set(xlabel="token", ylabel="value", ylim=(0, 1.05))
    plain(ax)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small")
    return titled(figure, title)


def shares_by_batch(batches: Sequence[int], shares: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Shares of the bytes of a decode step over the batch: label -> one of each batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.3), layout="constrained")
    ax = figure.subplots()
    for i, (label, values) in enumerate(shares.items()):
        ax.plot(batches, np.multiply(values, 100), "o-", color=COLOURS[i], ms=4, lw=1.6, label=label)
    ax.set(xscale="log", xticks=batches, xticklabels=[str(batch) for batch in batches], ylim=(0, 100))
    ax.minorticks_off()
    ax.set(xlabel="sequences in the batch, B", ylabel="% of the bytes of a step")
    plain(ax)
    ax.legend(frameon=False, fontsize="small")
    return titled(figure, title)
