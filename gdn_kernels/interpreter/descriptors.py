"""What a DMA is made of: the packets that its 16 engines move.

A packet is a run of bytes that is contiguous on both sides. In SBUF a run ends with its partition, but where the rows
of neighbouring partitions are neighbours in HBM too, one engine moves them as one packet (the DMA overview's 128 x 128
example takes 97 ns an engine only so). An engine serves 8 partitions (DMA overview).
"""

from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

from gdn_kernels.interpreter.memory import Shape
from gdn_kernels.interpreter.trace import Operand

ENGINES = 16
PARTITIONS_AN_ENGINE = 8


class Packets(NamedTuple):
    """`bytes` a packet, and how many packets each of the engines moves."""

    bytes: int
    counts: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return self.bytes * sum(self.counts)


def packets(dst: Operand, src: Operand) -> Packets:
    """The packets of a copy from `src` to `dst`."""
    size = max(dst.dtype.itemsize, src.dtype.itemsize)  # a casting DMA moves the wider one
    there, here = dst.allocation.buffer.on_chip, src.allocation.buffer.on_chip
    chip = dst if there else src
    first = chip.offset * chip.dtype.itemsize // chip.allocation.row_bytes
    return _packets((dst.shape, dst.strides, there), (src.shape, src.strides, here), size, first)


_Side = tuple[Shape, Shape, bool]  # shape, strides, on chip


@lru_cache(maxsize=4096)
def _packets(dst: _Side, src: _Side, size: int, first: int) -> Packets:
    """first: the partition where the on-chip side begins."""
    run = gcd(_run(*dst), _run(*src))
    (shape, _, on_chip), far = (dst, src) if dst[2] else (src, dst)
    if not on_chip:  # HBM to HBM: spread evenly
        count = prod(shape) // run
        return Packets(run * size, tuple(count // ENGINES + (engine < count % ENGINES) for engine in range(ENGINES)))
    row = prod(shape[1:])
    by_engine = [0] * ENGINES
    for partition in range(first, first + shape[0]):
        by_engine[partition // PARTITIONS_AN_ENGINE] += 1
    if run == row and not far[2] and _suffix(*far[:2]) % (row * PARTITIONS_AN_ENGINE) == 0:
        whole = gcd(*(rows for rows in by_engine if rows))  # rows of one engine, in packets of equal size
        return Packets(row * whole * size, tuple(rows // whole for rows in by_engine))
    return Packets(run * size, tuple(rows * (row // run) for rows in by_engine))


def _run(shape: Shape, strides: Shape, on_chip: bool) -> int:
    """Elements that lie next to each other, from the last dimension outwards; on chip not beyond a partition."""
    return _suffix(shape[1:], strides[1:]) if on_chip else _suffix(shape, strides)


def _suffix(shape: Shape, strides: Shape) -> int:
    run = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if stride != run:
            break
        run *= size
    return run
