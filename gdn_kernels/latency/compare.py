"""Modelled beside measured, case by case."""

from collections.abc import Iterable
from dataclasses import dataclass

from gdn_kernels.latency.floor import floor_us
from gdn_kernels.latency.rows import Row
from gdn_kernels.latency.tables import table
from gdn_kernels.timeline.costs import COSTS

NOTHING = "no measured rows: nobody has run `gdn-kernels latency --measure` on a device and kept its row here"


@dataclass(frozen=True)
class Comparison:
    """A measured row, and the modelled row of the same case if there is one.

    Raises:
        ValueError: when either isn't of its kind, or they are about different cases.
    """

    measured: Row
    modelled: Row | None

    def __post_init__(self) -> None:
        if self.measured.kind != "measured":
            raise ValueError(f"measured must be a measured row, got a {self.measured.kind} one")
        if self.modelled is None:
            return
        if self.modelled.kind != "modelled":
            raise ValueError(f"modelled must be a modelled row, got a {self.modelled.kind} one")
        if self.modelled.case != self.measured.case:
            raise ValueError(f"the rows must be of one case, got {self.modelled.case} and {self.measured.case}")


def compare(rows: Iterable[Row]) -> list[Comparison]:
    """Every measured row with the modelled one of its case, in the order in which they were measured."""
    rows = list(rows)
    modelled = {row.case: row for row in rows if row.kind == "modelled"}
    return [Comparison(row, modelled.get(row.case)) for row in rows if row.kind == "measured"]


HEADER = (
    "model",
    "B",
    "LNC",
    "target",
    "modelled, us",
    "measured, us",
    "p10 to p90",
    "measured / modelled",
    "measured / floor",
    "how, where, when",
)


def comparison_table(comparisons: Iterable[Comparison], markdown: bool = False) -> str:
    """The table of `compare`; one line when nothing was measured."""
    cells = [_cells(comparison) for comparison in comparisons]
    return table(HEADER, cells, markdown) if cells else NOTHING


def _cells(comparison: Comparison) -> tuple[str, ...]:
    row, modelled = comparison.measured, comparison.modelled
    d, spread = row.dims, row.spread
    assert spread is not None, "every measured row has a spread"
    floor = floor_us(row.dims, row.B, row.lnc, COSTS[row.target])
    return (
        row.model or f"H {d.H}, Hk {d.Hk}, Hv {d.Hv}, K {d.K}, V {d.V}, K_win {d.K_win}",
        str(row.B),
        str(row.lnc),
        row.target,
        f"{modelled.median_us:.1f}" if modelled else "none",
        f"{row.median_us:.1f}",
        f"{spread['p10']:.1f} to {spread['p90']:.1f}",
        f"{row.median_us / modelled.median_us:.2f}" if modelled else "none",
        f"{row.median_us / floor:.2f}",
        f"{row.how}; {row.instance or 'unknown instance'}; {row.date}",
    )
