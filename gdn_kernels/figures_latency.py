"""The figures of notebook 08: what the floor is made of, predicted beside published, what the ratio depends on.

Each function takes numbers and returns one figure, without a background and in inks that can be read on light and dark
pages; `gdn_kernels.notebook.picture` shows it. All times in them are modelled, but those called published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gdn_kernels.figure_style import COLOURS, INK, plain, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gdn_kernels.latency.sensitivity import Case, Sensitivity
    from gdn_kernels.timeline.published.table import Row

BAND = 5.0  # %, the difference from a published total that this project allows itself


def floor_parts(parts: Mapping[int, Mapping[str, float]], title: str) -> Figure:
    """Batch -> {what moves: us}: the floor as stacked bars, a bar a batch, its sum above it."""
    figure, ax = _one(8, 3.4)
    bottoms = [0.0] * len(parts)
    for number, name in enumerate(next(iter(parts.values()))):
        heights = [part[name] for part in parts.values()]
        ax.bar(range(len(parts)), heights, bottom=bottoms, width=0.62, color=COLOURS[number], lw=0, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, total in enumerate(bottoms):
        ax.text(place, total, f"{total:.0f}", ha="center", va="bottom", fontsize="small")
    ax.set(xticks=range(len(parts)), xticklabels=[str(B) for B in parts], xlabel="sequences B", ylabel="us at the peak")
    ax.legend(frameon=False, fontsize="small", loc="upper left")
    return _finished(figure, title)


def lower_bounds(bounds: Mapping[str, float], total: float, title: str) -> Figure:
    """us that each resource needs by itself, a bar each, and the time of the whole as a line that none may cross."""
    figure, ax = _one(8, 0.9 + 0.36 * len(bounds))
    ax.barh(range(len(bounds)), list(bounds.values()), height=0.62, color=COLOURS[0], lw=0)
    ax.axvline(total, color=COLOURS[1], lw=1.5, label=f"the timeline: {total:.0f} us")
    labels = [f"{name}: {us:.0f}" for name, us in bounds.items()]
    ax.set(yticks=range(len(bounds)), yticklabels=labels, ylim=(len(bounds) - 0.5, -0.5), xlabel="us, modelled")
    ax.set_xlim(0, 1.08 * total)
    ax.legend(frameon=False, fontsize="small", loc="lower center")
    return _finished(figure, title)


def launches_in_a_row(launches: Mapping[str, float], fused_us: float, floor_us: float, title: str) -> Figure:
    """us of each launch, one after the other in one bar; below it the fused block; the floor as a line."""
    figure, ax = _one(8, 2.2)
    start = 0.0
    for number, (name, us) in enumerate(launches.items()):
        ax.barh(0, us, left=start, height=0.6, color=COLOURS[number], lw=0, label=f"{name}: {us:.0f}")
        start += us
    ax.barh(1, fused_us, height=0.6, color=INK, lw=0)
    for row, us in enumerate((start, fused_us)):
        ax.text(us, row, f" {us:.0f}", va="center", fontsize="small")
    ax.axvline(floor_us, color=COLOURS[7], lw=1.5, ls="--", label=f"DMA floor: {floor_us:.0f}")
    ax.set(yticks=(0, 1), yticklabels=("five launches", "fused"), ylim=(1.5, -0.5), xlabel="us, modelled")
    ax.set_xlim(0, 1.08 * start)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small")
    return _finished(figure, title)


def published_differences(rows: Sequence[Row], title: str) -> Figure:
    """How far each predicted figure is from the published one, in % of it; the band is what totals should keep to.
    In brackets: the number of a row's note, in the order in which they first occur."""
    figure, ax = _one(8.5, 0.9 + 0.27 * len(rows))
    ax.axvspan(-BAND, BAND, color=COLOURS[2], alpha=0.15, lw=0)
    ax.axvline(0, color=INK, lw=0.8)
    for place, row in enumerate(rows):
        difference = 100 * row.difference
        ax.plot([0, difference], [place, place], color=COLOURS[0], lw=1.2)
        ax.plot([difference], [place], "o", color=COLOURS[0], ms=5)
    notes = list(dict.fromkeys(row.note for row in rows if row.note))
    marks = [f" [{notes.index(row.note) + 1}]" if row.note else "" for row in rows]
    names = [f"{row.kernel}: {row.quantity.removesuffix(', mean of 16 engines')}" for row in rows]
    labels = [name + mark for name, mark in zip(names, marks, strict=True)]
    ax.set(yticks=range(len(rows)), yticklabels=labels, ylim=(len(rows) - 0.5, -0.5))
    ax.set_xlabel("predicted (modelled) against published (vendor), %")
    ax.tick_params(axis="y", labelsize="small")
    return _finished(figure, title)


def ratio_over_batch(ratios: Mapping[str, Mapping[int, float]], title: str) -> Figure:
    """Model -> {batch: modelled time / floor}, a line each."""
    figure, ax = _one(8, 3.6)
    marks = "osD^vP*X"
    for number, (name, line) in enumerate(ratios.items()):
        colour, mark = COLOURS[number % len(COLOURS)], marks[number % len(marks)]
        ax.plot(list(line), list(line.values()), f"{mark}-", color=colour, lw=1.2, ms=5, label=name)
    batches = sorted({B for line in ratios.values() for B in line})
    ax.set(xscale="log", xticks=batches, xticklabels=[str(B) for B in batches], xlabel="sequences B")
    ax.set(ylabel="modelled time / floor", ylim=(1.0, None))
    ax.minorticks_off()
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small")
    return _finished(figure, title)


def us_per_sequence(times: Mapping[str, Mapping[int, float]], title: str) -> Figure:
    """Name -> {batch: modelled us of a step}, drawn as us a sequence; names that end in "floor" are dashed."""
    figure, ax = _one(8, 3.6)
    for number, (name, line) in enumerate(times.items()):
        style = "--" if name.endswith("floor") else "o-"
        values = [us / B for B, us in line.items()]
        ax.plot(list(line), values, style, color=COLOURS[number // 2], lw=1.3, ms=4, label=name)
    batches = sorted({B for line in times.values() for B in line})
    ax.set(xscale="log", yscale="log", xticks=batches, xticklabels=[str(B) for B in batches])
    ax.set(xlabel="sequences B", ylabel="us a sequence, modelled")
    ax.minorticks_off()
    ax.set_yticks([5, 10, 20, 50, 100, 200], ["5", "10", "20", "50", "100", "200"])
    ax.legend(frameon=False, fontsize="small")
    return _finished(figure, title)


def sensitivity_dots(rows: Sequence[Sensitivity], cases: Sequence[Case], title: str) -> Figure:
    """The ratio of every case under every change of a constant; the first row is the model as it is, its ratios thin
    lines through all rows."""
    figure, ax = _one(9, 1.2 + 0.3 * len(rows))
    for number, (model, B, lnc) in enumerate(cases):
        colour = COLOURS[number]
        ax.axvline(rows[0].ratios[number], color=colour, lw=0.7)
        values = [row.ratios[number] for row in rows]
        label = f"{model.removeprefix('Qwen3.5-')}, B {B}, LNC {lnc}"
        ax.plot(values, range(len(rows)), "osD^"[number % 4], color=colour, ms=5, label=label)
    ax.set(yticks=range(len(rows)), yticklabels=[row.change for row in rows], ylim=(len(rows) - 0.5, -0.5))
    ax.set_xlabel("modelled time / floor")
    ax.tick_params(axis="y", labelsize="small")
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False, fontsize="small")
    return _finished(figure, title)


def _one(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _finished(figure: Figure, title: str) -> Figure:
    for ax in figure.axes:
        plain(ax)
    return titled(figure, title)
