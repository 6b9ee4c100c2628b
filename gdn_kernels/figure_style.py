"""What the figures share: inks and colours for any background, light axes, a title.

Most figures have no background of their own. The inks and colours have a contrast of 3 or more to white and to near
black, so that they can be read on a light page and on a dark one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID = "#7a7a7a", "#7a7a7a50"
COLOURS = ("#3a86d8", "#e0622f", "#1f9d78", "#c455a0", "#a87f16", "#7e6fdc", "#1b9fb3", "#d3455b")
DASHES = ("-", "--", "-.", ":")


def plain(ax: Axes) -> None:
    """A light grid behind the data and no frame at the top and on the right."""
    ax.grid(color=GRID, lw=0.5)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def titled(figure: Figure, title: str) -> Figure:
    """The figure with a title, everything written and every frame in the ink."""
    from matplotlib.text import Text

    figure.suptitle(title, fontsize="medium")
    for ax in figure.axes:
        ax.tick_params(which="both", colors=INK)
        for spine in ax.spines.values():
            spine.set_edgecolor(INK)
    for text in figure.findobj(Text):
        text.set_color(INK)
    return figure
