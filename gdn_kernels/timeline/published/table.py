"""Predicted beside published: what the timeline says of kernels whose profiles the vendor printed.

The published figures are the vendor's, read from the pages named in `SOURCES`; the predicted ones are modelled. The
operations, shapes and dtypes are those of the pages, the kernels are this package's own.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdn_kernels.dtypes import bfloat16
from gdn_kernels.interpreter import Spec, launch, without
from gdn_kernels.interpreter.hardware import TRN2 as HARDWARE
from gdn_kernels.timeline.costs import NEURONCORE_V2, TRN2, Costs
from gdn_kernels.timeline.published import mamba, matmul, transfers
from gdn_kernels.timeline.report import active
from gdn_kernels.timeline.schedule import Schedule, schedule

SOURCES = {
    "matmul": 'AWS Neuron documentation, "Introduction to NKI kernel optimization", profiles on Trn2',
    "mamba": 'AWS Neuron documentation, "Fused Mamba", profiles of 2024, of a NeuronCore-v2',
    "transfer": 'AWS Neuron documentation, "DMA overview", profiles on Trn2',
}
K, M, N = 8192, 4096, 8192  # of every version of the matrix multiply
STATES = 16
MORE_SBUF = 512 << 10  # bytes a partition, for kernels that as published need more than there is
F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Row:
    """One figure. kernel: its family (a key of SOURCES) and name. published: the vendor's; predicted: modelled; both in
    `unit`. note: what to know when the two differ, or what the figure rests on."""

    kernel: str
    quantity: str
    unit: str
    published: float
    predicted: float
    note: str = ""

    @property
    def difference(self) -> float:
        """Of the prediction, as a share of what was published."""
        return self.predicted / self.published - 1


def published_table() -> list[Row]:
    """Every figure, in the order of the families."""
    with no_collection():
        return [*matmul_rows(), *mamba_rows(), *transfer_rows()]


def profile(
    kernel: Callable[..., Any],
    arguments: dict[str, Spec],
    costs: Costs = TRN2,
    sbuf_bytes: int = HARDWARE.sbuf_safe_bytes,
) -> Schedule:
    """The schedule of a dry launch on one core; with more `sbuf_bytes` than there are, without the capacity rule."""
    with without(*(("capacity", "capacity-safe") if sbuf_bytes > HARDWARE.sbuf_safe_bytes else ())):
        machine = launch(kernel, arguments, dry=True).machines[0]
    return schedule(machine, costs, sbuf_bytes)


# ---- matrix multiply ----

TENSOR, VECTOR = "Tensor active", "Vector active"
DMA = "DMA packets, mean of 16 engines"
RESTS_ON_IT = "the cost of software descriptors comes from this figure"
PACKETS = "the packet times come from these figures"
TOO_LARGE = "as published it needs {} KiB a partition, more than SBUF has: laid out with 512"
STATIONARY = "the device takes 203 ns a product above the formula, about one load of a stationary tile left unhidden"
RELOADS = "not from its source: it moves more bytes than that asks for"


def matmul_rows() -> Iterator[Row]:
    """Versions 2 to 5, in ms."""
    for version in (matmul_2, matmul_3, matmul_4, matmul_5):
        yield from version()


def matmul_2(times: int = 1) -> Iterator[Row]:
    """With `times`, here and below, one part in so many of the result's rows is laid out, and counted `times`."""
    laid_out = _multiply(matmul.version_2, times)
    yield _ms("matmul 2", "total", 39.89, times * laid_out.total, RESTS_ON_IT)
    yield _ms("matmul 2", TENSOR, 34.82, times * active(laid_out, "tensor"), STATIONARY)
    yield _ms("matmul 2", DMA, 32.47, times * laid_out.busy()["dma"], PACKETS)


def matmul_3(times: int = 1) -> Iterator[Row]:
    laid_out = _multiply(matmul.version_3, times)
    yield _ms("matmul 3", "total", 28.20, times * laid_out.total)
    yield _ms("matmul 3", TENSOR, 28.16, times * active(laid_out, "tensor"))
    yield _ms("matmul 3", DMA, 25.13, times * laid_out.busy()["dma"], PACKETS)


def matmul_4(times: int = 1) -> Iterator[Row]:
    laid_out = _multiply(matmul.version_4, times, MORE_SBUF)
    yield _ms("matmul 4", "total", 28.41, times * laid_out.total, TOO_LARGE.format(320))
    yield _ms("matmul 4", TENSOR, 28.28, times * active(laid_out, "tensor"))
    yield _ms("matmul 4", DMA, 24.42, times * laid_out.busy()["dma"], RELOADS)


def matmul_5(times: int = 1) -> Iterator[Row]:
    laid_out = _multiply(matmul.version_5, times, MORE_SBUF)
    yield _ms("matmul 5", "total", 28.30, times * laid_out.total, TOO_LARGE.format(228))
    yield _ms("matmul 5", TENSOR, 28.16, times * active(laid_out, "tensor"))
    yield _ms("matmul 5", VECTOR, 2.99, times * active(laid_out, "vector"))
    yield _ms("matmul 5", DMA, 5.11, times * laid_out.busy()["dma"], RELOADS)


def _multiply(version: Callable[..., Any], times: int, sbuf_bytes: int = HARDWARE.sbuf_safe_bytes) -> Schedule:
    arguments = {"lhsT": Spec((K, M // times), F32), "rhs": Spec((K, N), F32)}
    return profile(version, arguments, sbuf_bytes=sbuf_bytes)


# ---- fused Mamba ----

LAUNCH = "published with start-up and tear-down, and 60 cycles an instruction may be too few on this generation"
RELOADED = "the device waited for reloads of delta and u, which here hide behind the Vector engine"
WRITTEN = "as written; published, version 2 has a quarter less Vector time than version 1, which has the same work"
HOISTED = "with delta * u taken out of the loop over states, as a compiler may: the missing quarter"
SPILLS = "published with spills, which its source doesn't show: laid out with 512 KiB a partition, without any"


def mamba_rows() -> Iterator[Row]:
    """Device times in ms, and Vector active time as a share of them. Tiles of 128 channels are alike and follow each
    other, so of the long sequences a quarter of the channels is laid out and counted four times."""
    yield from _scan("mamba 1, 256 x 512", mamba.version_1, 0.17293, 0.9871, LAUNCH)
    yield from _scan("mamba 1, 4096 x 512", mamba.version_1, 2.34, 0.9216, RELOADED)
    yield from _scan("mamba 2, 4096 x 512", mamba.version_2, 1.61, 0.9963, WRITTEN)
    yield from _scan("mamba 2, 4096 x 512", mamba.version_2_shared, 1.61, 0.9963, HOISTED)
    yield from _scan("mamba 2, 4096 x 8192", mamba.version_2, 53.33, 0.5893, SPILLS, 4, MORE_SBUF)
    yield from _scan("mamba 3, 4096 x 8192", mamba.version_3, 27.8, 0.9485, WRITTEN, 4)
    yield from _scan("mamba 3, 4096 x 8192", mamba.version_3_shared, 27.8, 0.9485, HOISTED, 4)


def _scan(
    name: str,
    version: Callable[..., Any],
    published: float,
    share: float,
    note: str,
    times: int = 1,
    sbuf_bytes: int = HARDWARE.sbuf_safe_bytes,
) -> Iterator[Row]:
    channels, length = map(int, name.split(", ")[1].split(" x "))
    arguments = mamba_arguments(channels // times, length, STATES)
    laid_out = profile(version, arguments, NEURONCORE_V2, sbuf_bytes)
    yield _ms(name, "total", published, times * laid_out.total, note)
    yield Row(name, VECTOR, "%", 100 * share, 100 * active(laid_out, "vector") / laid_out.total, note)


def mamba_arguments(channels: int, length: int, states: int) -> dict[str, Spec]:
    """delta, u, A, B and C for one sequence."""
    sequences, rows = Spec((1, channels, length), F32), Spec((1, states, length), F32)
    return {"delta": sequences, "u": sequences, "A": Spec((channels, states), F32), "B": rows, "C": rows}


# ---- single transfers ----


def transfer_rows() -> Iterator[Row]:
    """From the start of the transfer to its last byte, in ns."""
    for shape, published, note in (
        ((4, 4096), 1416.0, "one engine moves four runs of 8 KiB"),
        ((128, 128), 97.0, "16 engines move 2 KiB each, eight adjacent rows as one packet"),
    ):
        laid_out = profile(transfers.there_and_back, {"x": Spec(shape, bfloat16())})
        load = laid_out.spans[0]
        name = f"transfer [{shape[0]}, {shape[1]}] bf16"
        yield Row(name, "transfer", "ns", published, load.end - load.start - laid_out.costs.dma_latency, note)


def _ms(kernel: str, quantity: str, published: float, ns: float, note: str = "") -> Row:
    return Row(kernel, quantity, "ms", published, ns / 1e6, note)


@contextmanager
def no_collection() -> Iterator[None]:
    """Traces are hundreds of thousands of tuples and no cycles: going through them again and again costs a fifth."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


# ---- printing ----

HEADINGS = ("kernel", "figure", "published (vendor)", "predicted (modelled)", "difference", "note")


def as_text(rows: Sequence[Row]) -> str:
    """Columns for a terminal; notes are numbered below."""
    notes = list(dict.fromkeys(row.note for row in rows if row.note))
    lines = [f"{'':28s}{'':34s}{'published':>12s}{'predicted':>12s}"]
    lines.append(f"{'kernel':28s}{'figure':34s}{'(vendor)':>12s}{'(modelled)':>12s}{'difference':>12s}")
    for row in rows:
        mark = f"  [{notes.index(row.note) + 1}]" if row.note else ""
        figures = f"{_figure(row.published, row.unit):>12s}{_figure(row.predicted, row.unit):>12s}"
        lines.append(f"{row.kernel:28s}{row.quantity:34s}{figures}{row.difference:>+12.1%}{mark}")
    lines += ["", *(f"[{number}] {note}" for number, note in enumerate(notes, 1))]
    return "\n".join([*lines, "", *(f"{family}: {source}" for family, source in SOURCES.items())])


def as_markdown(rows: Sequence[Row]) -> str:
    """One table with the notes in its last column."""
    cells = [HEADINGS, ("---", "---", "---:", "---:", "---:", "---")]
    for row in rows:
        figures = _figure(row.published, row.unit), _figure(row.predicted, row.unit)
        cells.append((row.kernel, row.quantity, *figures, f"{row.difference:+.1%}", row.note))
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _figure(value: float, unit: str) -> str:
    digits = {"ms": 3 if value < 1 else 2, "%": 1, "ns": 0}[unit]
    return f"{value:,.{digits}f} {unit}"
