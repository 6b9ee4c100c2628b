"""The figures of the notebooks 04 to 06: the state over tokens, what it forgets, where it lies, what streams when.

Each function takes numbers or a schedule and returns one figure, without a background and in inks that can be read on
light and dark pages; `gdn_kernels.notebook.picture` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.figure_style import COLOURS, DASHES, INK, plain, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gdn_kernels.dims import BlockDims
    from gdn_kernels.interpreter.trace import Instruction
    from gdn_kernels.timeline.schedule import Schedule

Array = npt.NDArray[Any]

CORNER = 20  # a noisy picture of whole states would take more bytes than a notebook should carry


def state_over_tokens(states: Mapping[int, Array], heads: Mapping[int, str], title: str) -> Figure:
    """A corner of the states of some heads after some tokens, a row a head and a column a token: the first CORNER key
    rows downwards, the first CORNER value columns to the right. Every picture has its own colour scale, from minus to
    plus the number above it, the 99.5th percentile of its state.

    Args:
        states: token -> S [Hv, K, V].
        heads: head -> what its row is called.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.8 + 1.75 * len(states), 0.9 + 1.9 * len(heads)), layout="constrained")
    axes = figure.subplots(len(heads), len(states), squeeze=False)
    for row, (head, label) in enumerate(heads.items()):
        for ax, (token, S) in zip(axes[row], states.items(), strict=True):
            limit = float(np.quantile(np.abs(S[head]), 0.995))
            corner = S[head, :CORNER, :CORNER]
            ax.imshow(corner, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="none")
            ax.set(xticks=[], yticks=[])
            ax.set_title(f"token {token}: \u00b1{limit:.2f}", fontsize="small")
        axes[row, 0].set_ylabel(label, fontsize="small")
    figure.supxlabel(f"value columns 0 to {CORNER - 1}, key rows 0 to {CORNER - 1} downwards", fontsize="small")
    return titled(figure, title)


def state_at_token(states: Sequence[Array], heads: Mapping[int, str], token: int) -> Figure:
    """What `state_over_tokens` shows, of all heads side by side after one token; states: S [Hv, K, V] of each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.3 * len(heads), 2.7), layout="constrained")
    for ax, (head, label) in zip(figure.subplots(1, len(heads)), heads.items(), strict=True):
        S = states[token - 1][head]
        limit = float(np.quantile(np.abs(S), 0.995))
        ax.imshow(S[:CORNER, :CORNER], cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="none")
        ax.set(xticks=[], yticks=[])
        ax.set_title(label, fontsize="small")
        ax.set_xlabel(f"\u00b1{limit:.2f}", fontsize="small")
    return titled(figure, f"Token {token}: value columns 0 to {CORNER - 1}, key rows 0 to {CORNER - 1} downwards")


def forgetting(kept: Mapping[str, tuple[Array, Array]], title: str) -> Figure:
    """What is left of one write over the tokens after it: label -> (by decay alone, really), both [tokens]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.8), layout="constrained")
    ax = figure.subplots()
    for colour, (label, (decayed, left)) in zip(COLOURS, kept.items(), strict=False):
        tokens = np.arange(1, len(left) + 1)
        ax.plot(tokens, decayed, DASHES[1], color=colour, lw=1.2)
        ax.plot(tokens, left, color=colour, lw=1.8, label=label)
    ax.set(xscale="log", yscale="log", ylim=(1e-3, 1.5), xlabel="tokens after the write", ylabel="share that is left")
    ax.plot([], [], DASHES[1], color=INK, lw=1.2, label="decay alone")
    plain(ax)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small")
    return titled(figure, title)


def errors_over_tokens(curves: Mapping[str, Array], title: str) -> Figure:
    """Relative errors [tokens] over tokens, both axes logarithmic; a token without an error is left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    ax = figure.subplots()
    for colour, (label, errors) in zip(COLOURS, curves.items(), strict=False):
        shown = np.unique(np.geomspace(1, len(errors), 400).astype(int))
        shown = shown[errors[shown - 1] > 0]
        ax.plot(shown, errors[shown - 1], color=colour, lw=1.6, label=label)
    ax.set(xscale="log", yscale="log", xlabel="token", ylabel="relative error of S")
    plain(ax)
    ax.legend(frameon=False, fontsize="small")
    return titled(figure, title)


def step_errors(errors: Array, limit: float, title: str) -> Figure:
    """A relative error a decode step [steps], with the largest that is allowed, dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.8), layout="constrained")
    ax = figure.subplots()
    ax.plot(np.arange(1, len(errors) + 1), errors, "o-", color=COLOURS[0], ms=4, lw=1.2, label="kernel against float64")
    ax.axhline(limit, ls=DASHES[1], color=COLOURS[1], lw=1.4, label="limit")
    ax.set(xlabel="decode step", ylabel="relative error of S", ylim=(0, 1.1 * limit))
    plain(ax)
    ax.legend(frameon=False, fontsize="small", loc="center right")
    return titled(figure, title)


def state_places(load: Instruction) -> Array:
    """Which element of the HBM tensor each partition begins with, [partitions].

    `load` is a DMA from `recurrent_state` to a tile whose first dimension is the partition.
    """
    source, tile = load.reads[0], load.writes[0]
    elements = source.offset + sum(
        np.arange(size).reshape([-1 if axis == i else 1 for i in range(len(source.shape))]) * stride
        for axis, (size, stride) in enumerate(zip(source.shape, source.strides, strict=True))
    )
    return np.asarray(elements).reshape(tile.shape[0], -1)[:, 0]


def lane_layout(load: Instruction, K: int, V: int, title: str) -> Figure:
    """Which key rows of which head lie on which partition, by rows (one a partition) and as `load` puts them.

    A partition is a line, a key row of V fp32 values a cell of it, coloured by value head and shaded by key row.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    first = state_places(load) // V  # row number in HBM of each partition's first key row
    partitions, n = len(first), K * len(np.unique(first // K)) // len(first)
    heads = np.unique(first // K)
    by_rows = np.arange(partitions)[:, None] + heads * K  # [partitions, heads], a cell a head
    lanes = first[:, None] + np.arange(n)  # [partitions, n]
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    shades = {head: np.array(to_rgb(COLOURS[i])) for i, head in enumerate(heads)}
    names = ("a key row a partition: runs of 512 B", f"{n} key rows a partition: runs of {n * V * 4:,} B")
    for ax, name, rows in zip(panels, names, (by_rows, lanes), strict=True):
        cells = np.array([[shades[row // K] * (0.45 + 0.55 * (row % K) / (K - 1)) for row in line] for line in rows])
        ax.imshow(cells, aspect="auto", interpolation="nearest", extent=(0, rows.shape[1] * V * 4, partitions, 0))
        ax.set(xticks=np.arange(rows.shape[1] + 1) * V * 4, xlabel="bytes of a partition")
        ax.set_title(name, fontsize="small")
        ax.set_yticks(np.arange(0, partitions + 1, 32))
        ax.spines[["top", "right"]].set_visible(False)
    panels[0].vlines(np.arange(1, len(heads)) * V * 4, 0, partitions, color="white", lw=1.5)
    panels[0].set_ylabel("partition")
    handles = [Patch(color=shades[head], label=f"value head {head}") for head in heads]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(heads), frameon=False, fontsize="small")
    return titled(figure, title)


def engine_bars(times: Mapping[str, float], label: str, title: str) -> Figure:
    """Modelled us by engine, a bar each, the longest marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.9 + 0.36 * len(times)), layout="constrained")
    ax = figure.subplots()
    longest = max(times.values())
    for row, time in enumerate(times.values()):
        ax.barh(row, time, height=0.6, color=COLOURS[1] if time == longest else COLOURS[0], lw=0)
        ax.text(time + longest / 80, row, f"{time:.2f}", va="center", fontsize="small")
    ax.set(yticks=range(len(times)), yticklabels=list(times), xlabel=label, ylim=(len(times) - 0.5, -0.5))
    plain(ax)
    return titled(figure, title)


def norm_before_after(before: Array, after: Array, title: str) -> Figure:
    """RMS of every head over tokens, [tokens, Hv], on a log axis: before the norm and after it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.3), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for ax, name, values in zip(panels, ("readout o", "after the norm"), (before, after), strict=True):
        for head, line in enumerate(values.T):
            ax.plot(np.arange(1, len(line) + 1), line, color=COLOURS[head], lw=1.5, label=f"head {head}")
        ax.set(yscale="log", xlabel="token")
        ax.set_title(name, fontsize="small")
        plain(ax)
    panels[0].set_ylabel("root mean square of a head")
    panels[0].legend(frameon=False, fontsize="small", ncols=2)
    return titled(figure, title)


def ones_product(squares: Array, title: str) -> Figure:
    """squares [V, N] and what the product with a matrix of ones makes of it: the column's sum on every partition."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    names = ("squares [V, N]", "ones.T @ squares [V, N]")
    for ax, name, values in zip(panels, names, (squares, np.ones((len(squares), len(squares))) @ squares), strict=True):
        logs = np.log10(np.maximum(values, 1e-12))
        image = ax.imshow(logs, aspect="auto", cmap="viridis", interpolation="nearest", vmin=logs.max() - 6)
        ax.set(xlabel="column: head x sequence")
        ax.set_title(name, fontsize="small")
        bar = figure.colorbar(image, ax=ax, label="log10")
        bar.outline.set_visible(False)
    panels[0].set_ylabel("partition: value column")
    return titled(figure, title)


def gate_curves(z: Array, title: str) -> Figure:
    """silu and sigmoid over z, and above them how often the values of z occur."""
    from matplotlib.figure import Figure

    from gdn_kernels.reference import sigmoid, silu

    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    top, ax = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1, 3]})
    reach = float(np.abs(z).max())
    x = np.linspace(-max(6.0, reach), max(6.0, reach), 400)
    top.hist(z.ravel(), bins=80, color=COLOURS[2], lw=0)
    top.set(yticks=[])
    top.set_ylabel("z here", fontsize="small")
    ax.plot(x, silu(x), color=COLOURS[0], lw=1.8, label="silu(z) = z sigmoid(z)")
    ax.plot(x, sigmoid(x), DASHES[1], color=COLOURS[1], lw=1.4, label="sigmoid(z)")
    ax.plot(x, np.maximum(x, 0), DASHES[3], color=INK, lw=1.2, label="relu(z)")
    ax.set(xlabel="z", ylabel="gate")
    ax.legend(frameon=False, fontsize="small")
    for each in (top, ax):
        plain(each)
    return titled(figure, title)


STREAMS = {
    "W_in_qkv": "weights of q, k, v",
    "conv_state": "windows in",
    "recurrent_state": "states in",
    "W_in_z": "weights of z",
}


def stream_spans(schedule: Schedule) -> dict[str, list[tuple[float, float]]]:
    """When the bytes of each argument of STREAMS are on their way, and when any result leaves, in us; then when each
    of the stages 4 and 5 has an engine at work."""
    spans: dict[str, list[tuple[float, float]]] = {
        **{label: [] for label in STREAMS.values()},
        "delta rule": [],
        "gated norm": [],
        "results out": [],
    }
    for instruction, span in zip(schedule.instructions, schedule.spans, strict=True):
        stage = {"delta_rule.py": "delta rule", "gated_norm.py": "gated norm"}.get(Path(instruction.line[0]).name)
        if instruction.engine == "dma":
            source = STREAMS.get(instruction.reads[0].allocation.name)
            name = source or ("results out" if not instruction.writes[0].allocation.buffer.on_chip else None)
            if name:
                spans[name].append(((span.start + schedule.costs.dma_latency) / 1e3, span.end / 1e3))
        elif stage:
            spans[stage].append((span.start / 1e3, span.end / 1e3))
    return spans


def stream_order(schedule: Schedule, title: str) -> Figure:
    """What streams when, a row an argument, and the compute that runs under it."""
    from matplotlib.figure import Figure

    spans = stream_spans(schedule)
    figure = Figure(figsize=(10, 3.3), layout="constrained")
    ax = figure.subplots()
    for row, bars in enumerate(spans.values()):
        colour = COLOURS[1] if list(spans)[row] in ("delta rule", "gated norm") else COLOURS[0]
        shown = [(start, max(end - start, schedule.total / 1e3 / 1000)) for start, end in bars]
        ax.broken_barh(shown, (row - 0.36, 0.72), color=colour, lw=0)
    ax.set(yticks=range(len(spans)), yticklabels=list(spans), ylim=(len(spans) - 0.5, -0.5))
    ax.set(xlabel="us, modelled", xlim=(0, schedule.total / 1e3 * 1.01))
    ax.tick_params(axis="y", length=0)
    plain(ax)
    return titled(figure, title)


def data_way(dims: BlockDims, B: int, title: str) -> Figure:
    """The way of the data through the fused block: HBM above, tiles in SBUF and PSUM below it, shapes in the boxes."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    K, V, Hk, Hv = dims.K, dims.V, dims.Hk, dims.Hv
    stages = (
        ("in_proj", "Tensor", f"q, k, v, a, b\nchannels on\n{K} partitions"),
        ("conv1d", "Vector, GpSimd", f"silu(conv)\nwindow of {dims.K_win}\ncolumns"),
        ("gates", "Scalar, Vector", f"q, k of {Hk} heads\ndecay, beta\nof {Hv} heads"),
        ("delta_rule", "all four", f"S, a sequence:\n{Hv} x {K} x {V}\n{Hv * K * V * 4 / 2**20:.0f} MiB"),
        ("gated_norm", "Tensor, Scalar", f"o and z\n[{V}, {Hv}, {B}]"),
    )
    above = (
        (0, "hidden, W_in_qkv,\nW_in_a, W_in_b", True),
        (1, "conv_weight,\nconv_state", True),
        (1, "new_conv_state", False),
        (2, "A_log, dt_bias", True),
        (3, "recurrent_state", True),
        (3, "new_recurrent_state", False),
        (4, "W_in_z,\nnorm_weight", True),
        (4, "core_out", False),
    )
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    ax = figure.subplots()
    ax.set(xlim=(-0.6, 4.6), ylim=(-0.75, 3.1), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    for y, height, name, place in ((2.15, 0.8, "HBM", 2.87), (-0.65, 2.0, "SBUF and PSUM", -0.5)):
        box = FancyBboxPatch((-0.52, y), 5.05, height, boxstyle="round,pad=0.02", fc="none", ec=INK, lw=1)
        ax.add_patch(box)
        ax.text(-0.5, place, name, fontsize="medium", va="center")
    for x, (name, engines, text) in enumerate(stages):
        ax.add_patch(
            FancyBboxPatch((x - 0.38, -0.3), 0.76, 1.2, boxstyle="round,pad=0.02", fc=f"{COLOURS[x]}1a", ec=COLOURS[x])
        )
        ax.text(x, 0.74, name, ha="center", weight="bold", fontsize="medium")
        ax.text(x, 0.28, text, ha="center", va="center", fontsize="small")
        ax.text(x, -0.22, engines, ha="center", fontsize="small", style="italic")
        if x:
            ax.add_patch(
                FancyArrowPatch((x - 0.62, 0.3), (x - 0.38, 0.3), arrowstyle="-|>", color=INK, mutation_scale=10)
            )
    for x, name, goes_in in above:
        paired = any(other != name and place == x for place, other, _ in above)
        at = x + (-0.2 if goes_in and paired else 0.2 if paired else 0)
        ends = ((at, 2.15), (at, 0.95)) if goes_in else ((at, 0.95), (at, 2.15))
        colour = COLOURS[0] if goes_in else COLOURS[1]
        ax.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", color=colour, mutation_scale=12, lw=1.5))
        ax.text(at, 2.22 if goes_in else 2.6, name, va="bottom", ha="center", fontsize="small")
    return titled(figure, title)


def fused_and_staged(cases: Mapping[str, tuple[float, float, float]], title: str) -> Figure:
    """Modelled us of each case: (the floor, the fused block, its stages one by one)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.1 + 0.62 * len(cases)), layout="constrained")
    ax = figure.subplots()
    names = ("DMA floor", "fused", "stage by stage")
    for row, times in enumerate(cases.values()):
        for part, (name, time) in enumerate(zip(names, times, strict=True)):
            y = row + (part - 1) * 0.27
            colour = (INK, COLOURS[0], COLOURS[1])[part]
            ax.barh(y, time, height=0.25, color=colour, lw=0, label=name if row == 0 else None)
            ax.text(time, y, f" {time:.0f}", va="center", fontsize="x-small")
    ax.set(yticks=range(len(cases)), yticklabels=list(cases), ylim=(len(cases) - 0.5, -0.5), xlabel="us, modelled")
    plain(ax)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small")
    return titled(figure, title)
