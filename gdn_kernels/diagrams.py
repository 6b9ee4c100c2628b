"""The pictures of notebooks 00 to 03, drawn by code: each function returns a figure for `notebook.picture`.

They have no background, and inks with a contrast of 3 or more to white and to near black. matplotlib is imported inside
the functions, which raise ImportError without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.dims import BlockDims
from gdn_kernels.figure_style import COLOURS, GRID, INK, plain
from gdn_kernels.timeline.costs import Costs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALL, MEDIUM = 8.5, 10.0  # font sizes, points
BLUE, RED, GREEN, PINK, BROWN = COLOURS[:5]
STAGES = {"in_proj": BLUE, "conv1d": RED, "gates": GREEN, "delta_rule": PINK, "gated_norm": BROWN}


def model_stack() -> Figure:
    """Where the block sits: four layers of the model, and the inside of one Gated DeltaNet layer."""
    figure, ax = _canvas(9, 3.7)
    for row in range(4):
        attention = row == 3
        name = "full attention" if attention else "Gated DeltaNet"
        _box(ax, 0.2, 0.25 + row * 0.8, 1.9, 0.6, name, COLOURS[5] if attention else BLUE)
        _box(ax, 2.2, 0.25 + row * 0.8, 0.9, 0.6, "MLP", INK)
    ax.text(1.65, 3.4, "repeated; one layer in four is full attention", color=INK, fontsize=SMALL, ha="center")
    ax.plot([3.1, 4.0], [0.25, 0.5], color=GRID, lw=1)
    ax.plot([3.1, 4.0], [0.85, 2.9], color=GRID, lw=1)
    _frame(ax, 4.0, 0.5, 4.85, 2.4, "one Gated DeltaNet layer")
    _box(ax, 4.2, 1.2, 0.7, 0.9, "RMS\nnorm", INK)
    _box(ax, 5.2, 0.9, 2.1, 1.5, "the fused block\ngdn_block_tkg", BLUE, weight="bold")
    _box(ax, 7.6, 1.2, 1.05, 0.9, "out_proj", INK)
    for x0, x1 in ((4.9, 5.2), (7.3, 7.6)):
        _arrow(ax, x0, 1.65, x1, 1.65)
    ax.text(6.25, 0.65, "conv window and state S stay between tokens", color=INK, fontsize=SMALL, ha="center")
    return figure


def dataflow(dims: BlockDims, highlight: str = "") -> Figure:
    """Five stages and the shapes between them, of one sequence. `highlight`: the stage to fill; all without one."""
    figure, ax = _canvas(11, 3.2)
    xs = {"in_proj": 1.5, "conv1d": 3.7, "gates": 5.6, "delta_rule": 7.5, "gated_norm": 9.4}
    for stage, x in xs.items():
        strong = highlight in ("", stage)
        _box(ax, x - 0.6, 1.3, 1.2, 0.7, stage, STAGES[stage] if strong else INK, 0.28 if strong else 0.04)
    labels = (
        ("in_proj", "conv1d", f"q|k|v\n{dims.conv_dim:,}"),
        ("conv1d", "gates", f"q, k\n{dims.Hk} × {dims.K}"),
        ("gates", "delta_rule", "q, k\nexp(g), β"),
        ("delta_rule", "gated_norm", f"o\n{dims.Hv} × {dims.V}"),
    )
    for one, other, text in labels:
        _arrow(ax, xs[one] + 0.6, 1.65, xs[other] - 0.6, 1.65)
        ax.text((xs[one] + xs[other]) / 2, 1.72, text, color=INK, fontsize=SMALL, ha="center", va="bottom")
    _arrow(ax, 0.1, 1.65, 0.9, 1.65)
    ax.text(0.45, 1.72, f"hidden\n{dims.H:,}", color=INK, fontsize=SMALL, ha="center", va="bottom")
    _arrow(ax, 10.0, 1.65, 10.9, 1.65)
    ax.text(10.5, 1.72, f"core_out\n{dims.value_dim:,}", color=INK, fontsize=SMALL, ha="center", va="bottom")
    _route(ax, xs["in_proj"], xs["gates"], 2.45, f"a, b: {dims.Hv} each")
    _route(ax, xs["in_proj"], xs["gated_norm"], 2.95, f"z: {dims.value_dim:,}")
    _route(ax, xs["conv1d"], xs["delta_rule"], 0.95, f"v: {dims.Hv} × {dims.V}", below=True)
    for stage, text in (
        ("conv1d", f"window\n{dims.conv_dim:,} × {dims.K_win}"),
        ("delta_rule", f"state S\n{dims.Hv} × {dims.K} × {dims.V}"),
    ):
        _arrow(ax, xs[stage] + 0.3, 0.55, xs[stage] + 0.3, 1.3, both=True)
        ax.text(xs[stage] + 0.3, 0.5, text, color=INK, fontsize=SMALL, ha="center", va="top")
    return figure


def neuron_core() -> Figure:
    """One NeuronCore: HBM, DMA engines, SBUF, PSUM and the engines that work on them."""
    figure, ax = _canvas(9.5, 3.6)
    _box(ax, 0.2, 0.6, 1.4, 2.5, "HBM\n\nweights,\nstates,\nhidden", INK)
    _box(ax, 2.35, 0.9, 1.35, 1.9, "16 DMA\nengines\n\n23 GB/s each", COLOURS[5])
    _frame(ax, 4.4, 0.6, 2.1, 2.5, "SBUF: 128 partitions")
    for row in range(9):
        y = 0.75 + row * 0.25
        ax.add_patch(_rectangle(4.55, y, 1.8, 0.16, BLUE, 0.25))
    ax.text(5.45, 1.83, "192 KiB each", color=INK, fontsize=SMALL, ha="center", va="center", weight="bold")
    engines = (
        ("Tensor (PE)", "matmul, transpose", BLUE),
        ("Vector", "elementwise, sums", RED),
        ("Scalar", "exp, silu, rsqrt ...", GREEN),
        ("GpSimd", "odds and ends", BROWN),
    )
    for row, (name, what, colour) in enumerate(engines):
        _box(ax, 7.2, 2.5 - row * 0.64, 2.1, 0.56, f"{name}\n{what}", colour)
        _arrow(ax, 6.5, 2.78 - row * 0.64, 7.2, 2.78 - row * 0.64, both=True)
    _arrow(ax, 1.6, 1.85, 2.35, 1.85, both=True)
    _arrow(ax, 3.7, 1.85, 4.4, 1.85, both=True)
    ax.text(8.25, 0.38, "matmuls write PSUM, 16 KiB a partition,", color=INK, fontsize=SMALL, ha="center", va="center")
    ax.text(8.25, 0.16, "read by Vector and Scalar", color=INK, fontsize=SMALL, ha="center", va="center")
    return figure


def stationary_and_moving(B: int) -> Figure:
    """The PE array both ways round: weights stationary or hidden stationary, with the cycles of a 128 x 128 tile."""
    figure, ax = _canvas(10, 3.3)
    for x, held, streamed, size, out, cycles in (
        (0.2, "W tile", "hidden", B, f"channels\non partitions\n[128, {B}]", 64),
        (5.2, "hidden", "W tile", 128, f"channels\nalong a row\n[{B}, 128]", 128),
    ):
        _frame(ax, x, 0.3, 4.6, 2.6, f"{held} stationary: {cycles} cycles a tile")
        wide = 1.3 if held == "W tile" else 0.25
        ax.add_patch(_rectangle(x + 1.55, 1.1, wide, 1.3, BLUE, 0.35))
        ax.add_patch(_rectangle(x + 1.55, 1.1, 1.3, 1.3, INK, 0.06))
        columns = 128 if held == "W tile" else B
        ax.text(x + 2.2, 0.98, f"held in PE: [128, {columns}]", color=INK, fontsize=SMALL, ha="center", va="top")
        width = 0.1 if size < 64 else 0.8
        ax.add_patch(_rectangle(x + 1.05 - width, 1.1, width, 1.3, RED, 0.5))
        ax.text(x + 0.65, 0.8, f"streams through:\n{streamed}\n[128, {size}]", **_note("center", "top"))
        _arrow(ax, x + 1.1, 1.75, x + 1.5, 1.75)
        _arrow(ax, x + 2.9, 1.75, x + 3.15, 1.75)
        ax.text(x + 3.88, 1.75, f"PSUM\n\n{out}", **_note("center", "center"))
    return figure


def hidden_layout(H: int) -> Figure:
    """Which element of hidden lies on which partition: h = p * R + r."""
    R = H // 128
    figure, ax = _canvas(9, 2.9)
    shown, per = 4, 0.5
    for p in range(4):
        y = 2.1 - p * 0.5
        name = p if p < 3 else 127
        ax.text(1.0, y + 0.18, f"partition {name}", color=INK, fontsize=SMALL, ha="right", va="center")
        for r in range(shown):
            ax.add_patch(_rectangle(1.15 + r * per, y, per * 0.94, 0.36, COLOURS[p], 0.3))
            index = name * R + (r if r < 3 else R - 1)
            text = f"{index}" if r != 2 else "..."
            ax.text(1.15 + (r + 0.47) * per, y + 0.18, text, color=INK, fontsize=SMALL, ha="center", va="center")
    ax.text(1.15 + shown * per / 2, 2.62, f"h = p × {R} + r", color=INK, fontsize=MEDIUM, ha="center", weight="bold")
    ax.text(2.15, 0.38, f"{R} neighbours a partition", **_note("center", "top"))
    ax.text(4.2, 2.62, "W_in_qkv in HBM, rows h", color=INK, fontsize=MEDIUM, weight="bold")
    for p in range(4):
        y = 2.1 - p * 0.5
        name = p if p < 3 else 127
        ax.add_patch(_rectangle(4.2, y, 4.4, 0.36, COLOURS[p], 0.3))
        text = f"rows {name * R} to {name * R + R - 1} go to partition {name}"
        ax.text(6.4, y + 0.18, text, color=INK, fontsize=SMALL, ha="center", va="center")
    ax.text(6.4, 0.38, "a partition reads its own rows: long runs of neighbouring bytes", **_note("center", "top"))
    return figure


def run_rates(costs: Costs, marks: Mapping[str, int]) -> Figure:
    """GB/s of a core's DMA engines over the bytes of a run, modelled, with named runs marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    ax = figure.subplots()
    runs = 2.0 ** np.arange(1, 14.01, 0.05)

    def rate(run: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return 16 * run / np.maximum(costs.packet_floor, run / costs.packet_rate)

    ax.plot(runs, rate(runs), color=BLUE, lw=1.8)
    ax.axhline(costs.core_rate, color=INK, ls="--", lw=1)
    ax.annotate("documented peak", (2, costs.core_rate), xytext=(0, 3), textcoords="offset points", **_small())
    for i, (name, run) in enumerate(marks.items()):
        y = float(rate(np.array([run]))[0])
        ax.plot([run], [y], "o", color=COLOURS[1 + i % 4], ms=7)
        place: dict[str, Any] = {"xytext": (-9, 0), "ha": "right"}
        if run < 128:
            place = {"xytext": (0, 12 + 14 * (i % 2)), "ha": "left"}
        elif run > 512:
            place = {"xytext": (0, -14 - 14 * (i % 2)), "ha": "center"}
        ax.annotate(name, (run, y), textcoords="offset points", va="center", **place, **_small())
    ax.set(xscale="log", xlabel="bytes in one run", ylabel="GB/s of a core, modelled", ylim=(0, 410))
    ax.set_xticks([2, 8, 32, 128, 512, 2048, 8192], ["2", "8", "32", "128", "512", "2 Ki", "8 Ki"])
    ax.minorticks_off()
    _axes_style(ax)
    return figure


def conv_window(K_win: int) -> Figure:
    """The window slides by one column; the oldest column of the incoming one is dead."""
    figure, ax = _canvas(9.5, 2.9)
    for x, title, before in ((0.3, "conv_state, before", True), (5.0, "new_conv_state, after", False)):
        ax.text(x, 2.6, title, color=INK, fontsize=MEDIUM, weight="bold")
        for column in range(K_win):
            dead = before and column == 0
            colour = INK if dead else COLOURS[(column + (not before)) % len(COLOURS)]
            ax.add_patch(_rectangle(x + column * 0.75, 1.3, 0.68, 1.1, colour, 0.06 if dead else 0.3))
            number = column - K_win if before else column + 1 - K_win
            name = "dead" if dead else "token\nt" if number == 0 else f"token\nt−{-number}"
            tap = "" if before else f"\n\n× w{column}"
            ax.text(x + column * 0.75 + 0.34, 1.85, name + tap, color=INK, fontsize=SMALL, ha="center", va="center")
    _arrow(ax, 3.45, 1.85, 4.85, 1.85)
    ax.text(4.15, 1.95, "drop column 0,\nappend qkv", **_note("center", "bottom"))
    for column in range(K_win):
        _arrow(ax, 5.34 + column * 0.75, 1.25, 6.46, 0.62)
    ax.text(6.46, 0.55, "c = silu(sum)", color=INK, fontsize=MEDIUM, ha="center", va="top", weight="bold")
    return figure


def turned_rows(K_win: int) -> Figure:
    """A row of conv_state as it lies in HBM, and one tap of it turned on to partitions by PE."""
    figure, ax = _canvas(9.5, 2.6)
    ax.text(0.2, 2.3, "a row in HBM and in SBUF: channels side by side", color=INK, fontsize=MEDIUM, weight="bold")
    for channel in range(4):
        for tap in range(K_win):
            x = 0.2 + (channel * K_win + tap) * 0.33
            ax.add_patch(_rectangle(x, 1.55, 0.3, 0.5, COLOURS[channel], 0.55 if tap == K_win - 1 else 0.18))
        middle = 0.2 + (channel + 0.5) * K_win * 0.33
        ax.text(middle, 1.45, f"channel {channel}", **_note("center", "top"))
    ax.text(0.2 + 4 * K_win * 0.33 + 0.1, 1.8, "...", color=INK, fontsize=MEDIUM)
    _arrow(ax, 5.95, 1.5, 7.2, 1.3)
    ax.text(6.5, 1.55, "PE transpose,\none tap at a time", **_note("center", "bottom"))
    ax.text(7.4, 2.3, "turned, in PSUM", color=INK, fontsize=MEDIUM, weight="bold")
    for channel in range(4):
        ax.add_patch(_rectangle(7.4, 1.75 - channel * 0.4, 0.33, 0.34, COLOURS[channel], 0.55))
        ax.text(7.85, 1.92 - channel * 0.4, f"partition {channel}", **_note("left", "center"))
    ax.text(0.2, 0.75, "dark: the tap that is being turned, a step of K_win elements", **_note("left", "center"))
    return figure


def grouped_heads(Hk: int, gqa: int) -> Figure:
    """Which value heads read which key head, the first four key heads."""
    figure, ax = _canvas(9, 2.3)
    for head in range(min(Hk, 4)):
        x = 0.3 + head * 2.15
        _box(ax, x, 1.5, 1.95, 0.5, f"q, k head {head}", COLOURS[head], 0.3)
        width = 1.95 / gqa
        for t in range(gqa):
            _box(ax, x + t * width, 0.35, width * 0.94, 0.5, f"v {head * gqa + t}", COLOURS[head], 0.15)
            _arrow(ax, x + 0.975, 1.5, x + (t + 0.47) * width, 0.85)
    ax.text(0.3, 2.12, "value head h reads key head h // gqa", color=INK, fontsize=MEDIUM, weight="bold")
    return figure


def decays(half_lives: npt.NDArray[Any], beta: npt.NDArray[Any]) -> Figure:
    """By head, fastest first: the tokens after which half of the state is left (log), and the writing strength beta."""
    from matplotlib.figure import Figure

    order = np.argsort(half_lives)
    figure = Figure(figsize=(8.5, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    heads = range(len(half_lives))
    left.bar(heads, half_lives[order], color=GREEN, width=0.6)
    left.set(yscale="log", ylabel="half-life of S, tokens", xlabel="value head")
    right.bar(heads, beta[order], color=PINK, width=0.6)
    right.set(ylabel="beta, share of the old value replaced", xlabel="value head", ylim=(0, 1))
    for ax in (left, right):
        ax.set_xticks(heads, [str(head) for head in order])
        _axes_style(ax)
    return figure


def decay_range(x: npt.NDArray[Any], curves: Sequence[tuple[str, npt.NDArray[Any]]]) -> Figure:
    """The decay exp(g) over x = a + dt_bias, one line for each (name, decays); the first is the widest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    ax = figure.subplots()
    for i, (name, y) in enumerate(curves):
        colour, style = (GREEN, RED, BLUE)[i % 3], ("-", "--", ":")[i % 3]
        ax.plot(x, y, style, color=colour, lw=4 - 1.1 * i, label=name)
    ax.set(xlabel="x = a + dt_bias", ylabel="decay exp(g) a token", ylim=(-0.05, 1.1))
    ax.legend(frameon=False, fontsize=SMALL, labelcolor=INK, loc="lower left")
    _axes_style(ax)
    return figure


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure whose coordinates are inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")
    return figure, ax


def _rectangle(x: float, y: float, width: float, height: float, colour: str, alpha: float) -> Any:
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=to_rgba(colour, alpha), edgecolor=colour, lw=1)


def _box(
    ax: Axes, x: float, y: float, width: float, height: float, text: str, colour: str, fill: float = 0.15, **font: Any
) -> None:
    ax.add_patch(_rectangle(x, y, width, height, colour, fill))
    ax.text(x + width / 2, y + height / 2, text, color=INK, fontsize=SMALL, ha="center", va="center", **font)


def _frame(ax: Axes, x: float, y: float, width: float, height: float, title: str) -> None:
    ax.add_patch(_rectangle(x, y, width, height, INK, 0))
    ax.text(x + width / 2, y + height + 0.06, title, color=INK, fontsize=MEDIUM, ha="center", va="bottom")


def _arrow(ax: Axes, x0: float, y0: float, x1: float, y1: float, both: bool = False) -> None:
    style = {"arrowstyle": "<->" if both else "->", "color": INK, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (x1, y1), (x0, y0), arrowprops=style)


def _route(ax: Axes, x0: float, x1: float, y: float, text: str, below: bool = False) -> None:
    """An arrow from one stage to another, around those between them."""
    edge = 1.3 if below else 2.0
    side = -0.25 if below else 0.0
    ax.plot([x0 + side, x0 + side, x1 + side], [edge, y, y], color=INK, lw=1.2)
    _arrow(ax, x1 + side, y, x1 + side, edge)
    place = ("center", "top") if below else ("center", "bottom")
    ax.text((x0 + x1) / 2, y + (-0.04 if below else 0.03), text, **_note(*place))


def _small() -> dict[str, Any]:
    return {"color": INK, "fontsize": SMALL}


def _note(ha: str, va: str) -> dict[str, Any]:
    return {**_small(), "ha": ha, "va": va}


def _axes_style(ax: Axes) -> None:
    plain(ax)
    ax.spines[["bottom", "left"]].set_color(INK)
    ax.tick_params(which="both", colors=INK)
    for label in (ax.xaxis.label, ax.yaxis.label):
        label.set_color(INK)
