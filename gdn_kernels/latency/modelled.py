"""Modelled rows of every published model, as they are kept in data/latency/modelled.jsonl."""

from collections.abc import Iterable, Iterator

from gdn_kernels.dims import MODELS, BlockDims
from gdn_kernels.latency.model import model_block
from gdn_kernels.latency.rows import Row, today
from gdn_kernels.timeline.costs import Costs

BATCHES = (1, 8, 32, 64)


def modelled_rows(costs: Costs, package: str, batches: Iterable[int] = BATCHES) -> Iterator[Row]:
    """Rows of every published model at every batch, on one core and two. `package`: version of this package."""
    found: dict[tuple[BlockDims, int, int], float] = {}  # several models share their dimensions
    for model, preset in MODELS.items():
        for B in batches:
            for lnc in (1, 2):
                case = preset.dims, B, lnc
                if case not in found:
                    found[case] = model_block(*case, costs).modelled_us
                yield modelled_row(model, B, lnc, costs.name, found[case], package)


def modelled_row(model: str, B: int, lnc: int, target: str, us: float, package: str) -> Row:
    """A row for what the timeline says about a published model."""
    return Row(
        kind="modelled",
        model=model,
        dims=MODELS[model].dims,
        B=B,
        lnc=lnc,
        target=target,
        median_us=round(us, 2),
        spread=None,
        repeats=None,
        warmup=None,
        how="timeline with published costs",
        versions=None,
        instance=None,
        package=package,
        date=today(),
    )
