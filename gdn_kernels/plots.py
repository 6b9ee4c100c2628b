"""The figures: each function takes numbers, draws one figure and saves it. matplotlib is imported inside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.figure_style import COLOURS, DASHES, GRID, INK, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gdn_kernels.interpreter.machine import Machine
    from gdn_kernels.interpreter.memory import Buffer
    from gdn_kernels.interpreter.trace import Instruction
    from gdn_kernels.latency.model import Modelled
    from gdn_kernels.timeline.schedule import Schedule

SITES = 7  # allocation sites with a colour of their own


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


def memory_occupancy(machine: Machine, title: str, path: Path) -> None:
    """Live bytes a partition of SBUF and of PSUM over a core's instructions, stacked by the kernel line that allocated
    them: the largest few by themselves, the rest together. Dashed: the limits.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    from gdn_kernels.interpreter.memory import PSUM, SBUF, limit_of

    figure = Figure(figsize=(9.5, 6), layout="constrained")
    for ax, buffer in zip(figure.subplots(2, 1, sharex=True), (SBUF, PSUM), strict=True):
        labels, live = _by_site(machine, buffer)
        colours = [*COLOURS[: len(labels) - 1], GRID]
        ax.stackplot(range(live.shape[1]), live / 1024, labels=labels, step="post", colors=colours, lw=0)
        limits = [(limit_of(buffer, machine.target), "limit")]
        if buffer is SBUF:
            limits.append((machine.target.sbuf_safe_bytes, "safe everywhere"))
        for limit, name in limits:
            ax.axhline(limit / 1024, color=INK, ls="--", lw=0.8)
            ax.annotate(
                name, (1, limit / 1024), xycoords=("axes fraction", "data"), fontsize="x-small", ha="right", va="bottom"
            )
        ax.set(ylabel=f"{buffer.name.upper()}, KiB a partition", xlim=(0, len(machine.trace.instructions)))
        ax.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_ylim(0, 1.08 * max(limit for limit, _ in limits) / 1024)
    ax.set_xlabel("instruction of the core")
    _save_on_any_background(figure, title, path)


def _by_site(machine: Machine, buffer: Buffer) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Labels and live bytes [labels, instructions] of the sites that hold the most at some time, then of the rest."""
    from gdn_kernels.interpreter.memory import usage

    used = [life for life in machine.lifetimes if life.allocation.buffer is buffer and life.last_use >= 0]
    sites = sorted({life.allocation.line for life in used})
    live = usage(used, buffer, sites)  # [sites, instructions]
    order = np.argsort(-live.max(axis=1, initial=0), kind="stable")
    shown, rest = order[:SITES], order[SITES:]
    labels = [Path(sites[row]).name for row in shown]
    return [*labels, f"{len(rest)} other lines"], np.vstack([live[shown], live[rest].sum(axis=0, keepdims=True)])


LANES = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma sync", "dma scalar", "dma gpsimd")


def gantt(schedules: Sequence[Schedule], title: str, path: Path) -> None:
    """Save `gantt_figure`.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    gantt_figure(schedules, title).savefig(path, dpi=150, transparent=True)


def gantt_figure(schedules: Sequence[Schedule], title: str) -> Figure:
    """When every engine and DMA queue works, a panel a core, coloured by the file that the instruction stands in.

    An engine's row shows instructions, or for a DMA its issue, and beside it its busy share; a DMA row shows bytes on
    their way, those of one queue behind each other.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = [_lanes(schedule) for schedule in schedules]
    stages = list(dict.fromkeys(_stage(instruction) for schedule in schedules for instruction in schedule.instructions))
    colours = {stage: COLOURS[i % len(COLOURS)] for i, stage in enumerate(stages)}
    end = max(schedule.total for schedule in schedules) / 1e3
    rows = sum(len(core) for core in lanes)
    figure = Figure(figsize=(9.5, 1.2 + 0.3 * rows + 0.5 * len(lanes)), layout="constrained")
    panels = figure.subplots(
        len(lanes), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [len(core) for core in lanes]}
    )[:, 0]
    for number, (ax, core) in enumerate(zip(panels, lanes, strict=True)):
        for row, bars in enumerate(core.values()):
            for stage, start, stop in _merged(bars, end / 1500):
                ax.broken_barh([(start, stop - start)], (row - 0.4, 0.8), color=colours[stage], lw=0)
        ax.set(yticks=range(len(core)), yticklabels=list(core), ylim=(len(core) - 0.4, -0.6), xlim=(0, end * 1.005))
        busy = schedules[number].busy()
        for row, lane in enumerate(core):
            if lane in busy:
                ax.text(
                    1.005,
                    row,
                    f"{busy[lane] / schedules[number].total:.0%}",
                    va="center",
                    transform=ax.get_yaxis_transform(),
                )
        ax.axhline(sum(lane in busy for lane in core) - 0.5, color=INK, lw=0.6)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x", color=GRID, lw=0.4)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        if len(lanes) > 1:
            ax.set_title(f"core {number}", fontsize="small", loc="left")
    panels[-1].set_xlabel("us, modelled")
    figure.legend(
        handles=[Patch(color=colours[stage], label=stage) for stage in stages],
        loc="outside lower center",
        ncols=len(stages) if len(stages) <= 7 else (len(stages) + 1) // 2,
        frameon=False,
        fontsize="small",
    )
    return titled(figure, f"{title}: modelled, {end:.1f} us")


def _stage(instruction: Instruction) -> str:
    return Path(instruction.line[0]).stem


Bar = tuple[str, float, float]  # stage, start and end in us


def _lanes(schedule: Schedule) -> dict[str, list[Bar]]:
    """The bars of every row that has any, in order of time."""
    lanes: dict[str, list[Bar]] = {lane: [] for lane in LANES}
    for instruction, span in zip(schedule.instructions, schedule.spans, strict=True):
        stage = _stage(instruction)
        lanes[span.queue].append((stage, span.start / 1e3, span.issued / 1e3))
        if instruction.engine == "dma":
            lane = lanes[f"dma {span.queue}"]
            begins = (span.start + schedule.costs.dma_latency) / 1e3
            lane.append((stage, max(begins, lane[-1][2]) if lane else begins, span.end / 1e3))
    return {lane: bars for lane, bars in lanes.items() if bars}


def _merged(bars: Sequence[Bar], gap: float) -> list[Bar]:
    """Neighbours of one stage as one bar, across gaps too short to be seen."""
    merged: list[Bar] = []
    for stage, start, end in bars:
        if merged and merged[-1][0] == stage and start - merged[-1][2] <= gap:
            merged[-1] = (stage, merged[-1][1], max(end, merged[-1][2]))
        else:
            merged.append((stage, start, end))
    return merged


def latency_growth(panels: Mapping[str, Mapping[int, Modelled]], title: str, path: Path) -> None:
    """Save `growth_figure`.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    growth_figure(panels, title).savefig(path, dpi=120, transparent=True)


def growth_figure(panels: Mapping[str, Mapping[int, Modelled]], title: str) -> Figure:
    """Instructions, SBUF and modelled time over what grows (the key of `panels`, a column each), both axes logarithmic;
    dashed, from the first point on, what growing as fast as the data would be.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figures: tuple[tuple[str, Callable[[Modelled], float]], ...] = (
        ("instructions", lambda case: case.instructions),
        ("SBUF peak, KiB a partition", lambda case: case.sbuf_peak_bytes / 1024),
        ("modelled time, us", lambda case: case.modelled_us),
    )
    figure = Figure(figsize=(4.2 * len(panels), 7.2), layout="constrained")
    axes = figure.subplots(3, len(panels), sharex="col", sharey="row", squeeze=False)
    for column, (name, cases) in enumerate(panels.items()):
        sizes = list(cases)
        first = cases[sizes[0]]
        for ax, (label, value) in zip(axes[:, column], figures, strict=True):
            ax.plot(
                sizes, [value(case) for case in cases.values()], "o-", color=COLOURS[0], ms=4, lw=1.3, label="the block"
            )
            data = [value(first) * case.floor_us / first.floor_us for case in cases.values()]
            ax.plot(sizes, data, "--", color=INK, lw=1, label="as its data grows")
            ax.set(xscale="log", yscale="log", xticks=sizes, xticklabels=[str(size) for size in sizes])
            ax.minorticks_off()
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.grid(color=GRID, lw=0.4)
            ax.spines[["top", "right"]].set_visible(False)
            if column == 0:
                ax.set_ylabel(label)
        axes[-1, column].set_xlabel(name)
    axes[0, 0].legend(frameon=False, fontsize="small")
    return titled(figure, f"{title}: modelled")


@dataclass(frozen=True)
class Line:
    """An error over decode tokens: label, tokens [records], errors [seeds, records]."""

    label: str
    tokens: npt.NDArray[Any]
    errors: npt.NDArray[Any]


@dataclass(frozen=True)
class HeadErrors:
    """An error by head and token: memory lengths [Hv] in tokens, rising; tokens [records]; errors [records, Hv]."""

    memory: npt.NDArray[Any]
    tokens: npt.NDArray[Any]
    errors: npt.NDArray[Any]


def drift_errors(panels: Mapping[str, Sequence[Line]], title: str, path: Path) -> None:
    """Relative errors over tokens, log-log, one panel for each entry (its key is the heading) with the same lines.

    A line is the median over its seeds, its band their whole range. An error of exactly zero or infinity has no place
    on the log axis and is left out.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 4.2 * len(panels), 3.9), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for ax, (heading, lines) in zip(axes, panels.items(), strict=True):
        for i, line in enumerate(lines):
            errors = np.where((line.errors > 0) & np.isfinite(line.errors), line.errors, np.nan)
            shown = ~np.isnan(errors).all(axis=0)
            tokens, errors = line.tokens[shown], errors[:, shown]
            style = {"color": COLOURS[i % len(COLOURS)], "ls": DASHES[i // len(COLOURS) % len(DASHES)]}
            width = 2.6 - 1.4 * i / len(lines)  # of lines that coincide, the lower ones are still seen
            ax.plot(tokens, np.nanmedian(errors, axis=0), lw=width, label=line.label, **style)
            low, high = np.nanmin(errors, axis=0), np.nanmax(errors, axis=0)
            ax.fill_between(tokens, low, high, color=style["color"], alpha=0.22, lw=0)
        ax.set(xscale="log", yscale="log", xlabel="token", title=heading)
        ax.grid(color=GRID, lw=0.5)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("relative error")
    seeds = max((len(line.errors) for lines in panels.values() for line in lines), default=1)
    handles, labels = axes[0].get_legend_handles_labels()
    note = f"median and range\nof {seeds} seeds" if seeds > 1 else None
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize="small", title=note)
    _save_on_any_background(figure, title, path)


def drift_heat_map(panels: Mapping[str, HeadErrors], title: str, path: Path) -> None:
    """Relative errors over token and memory length of the head, both log, one panel for each entry, one colour scale.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.8 + 3.1 * len(panels), 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    every = np.concatenate([panel.errors[panel.errors > 0] for panel in panels.values()])
    every = every[np.isfinite(every)]
    norm = LogNorm(every.min(), every.max()) if every.size and every.min() < every.max() else None
    for ax, (heading, panel) in zip(axes, panels.items(), strict=True):
        edges = _log_edges(panel.tokens), _log_edges(panel.memory)
        mesh = ax.pcolormesh(*edges, panel.errors.T, norm=norm, cmap="viridis", rasterized=True)
        ax.set(xscale="log", yscale="log", xlabel="token", title=heading)
    axes[0].set_ylabel("memory of the head, tokens")
    bar = figure.colorbar(mesh, ax=list(axes), label="relative error of its state", pad=0.01)
    bar.outline.set_visible(False)
    _save_on_any_background(figure, title, path)


@dataclass(frozen=True)
class Costs:
    """Errors of single roundings [sites]: with each alone, with all but it; and that of all together."""

    alone: npt.NDArray[Any]
    without: npt.NDArray[Any]
    together: float


def attribution_bars(sites: Sequence[str], panels: Mapping[str, Costs], title: str, path: Path) -> None:
    """What single roundings cost, a row for each site in the order given, one panel for each entry; log.

    A bar is the error with one rounding alone, a diamond that of all the others without it. A rounding whose bar
    reaches the dashed line of all together, and whose diamond is left of it, is the one to do something about. A bar
    of no error at all is not drawn.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 3.6 * len(panels), 1.6 + 0.26 * len(sites)), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    rows = np.arange(len(sites))[::-1]
    for ax, (heading, costs) in zip(axes, panels.items(), strict=True):
        alone, without = (np.where((x > 0) & np.isfinite(x), x, np.nan) for x in (costs.alone, costs.without))
        ax.barh(rows, alone, height=0.62, color=COLOURS[0], label="this rounding alone", lw=0)
        ax.plot(without, rows, "D", color=COLOURS[1], ms=5, label="all but this one")
        ax.axvline(costs.together, color=INK, ls="--", lw=1, label="all together")
        ax.set(xscale="log", xlabel=f"relative error of the {heading}", yticks=rows, yticklabels=sites)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x", color=GRID, lw=0.5)
        ax.set_axisbelow(True)
        ax.spines[["top", "right", "left"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    _save_on_any_background(figure, title, path)


def _log_edges(centres: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Borders half-way, in the logarithm, between rising positive centres; one centre gets a decade."""
    logs = np.log10(centres)
    steps = np.diff(logs) if len(logs) > 1 else np.ones(1)
    inner = (logs[1:] + logs[:-1]) / 2
    return np.asarray(10 ** np.concatenate([[logs[0] - steps[0] / 2], inner, [logs[-1] + steps[-1] / 2]]))


def _save_on_any_background(figure: Figure, title: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    titled(figure, title).savefig(path, dpi=150, transparent=True)
