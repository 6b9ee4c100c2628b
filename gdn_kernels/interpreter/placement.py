"""Tiles that a kernel places itself: `nl.ndarray(..., address=(partition, byte))`.

An address is checked when it is given; whether two tiles share memory while both are in use, when the program is over.
"""

from collections.abc import Sequence
from typing import Any

from gdn_kernels.interpreter import hardware
from gdn_kernels.interpreter.memory import PSUM, SBUF, Lifetime
from gdn_kernels.interpreter.rules import refuse, report
from gdn_kernels.interpreter.tensor import NkiTensor
from gdn_kernels.interpreter.trace import Instruction


def place(tensor: NkiTensor, address: Any, target: hardware.Target) -> None:
    """Put a new on-chip tensor at (partition, byte of the partition). A PSUM tile begins at a bank."""
    if not isinstance(address, (tuple, list)) or len(address) != 2 or None in address:
        refuse("argument", f"{address!r}, expected (partition, byte)", "ndarray", "address")
    partition, byte = int(address[0]), int(address[1])
    if not tensor.buffer.on_chip:
        refuse("placement", f"{tensor!r}: only on-chip tensors are placed", "ndarray", "address")
    psum = tensor.buffer is PSUM
    size = hardware.PSUM_BANKS * hardware.PSUM_BANK_BYTES if psum else target.sbuf_bytes
    alignment = hardware.PSUM_BANK_BYTES if psum else tensor.dtype.itemsize
    row = tensor.storage.allocation.row_bytes
    if byte % alignment:
        refuse("placement", f"byte {byte} isn't a multiple of {alignment}", "ndarray", "address")
    if not 0 <= partition <= hardware.PARTITIONS - tensor.shape[0]:
        refuse("placement", f"{tensor.shape[0]} partitions from {partition}", "ndarray", "address")
    if not 0 <= byte <= size - row:
        refuse("placement", f"{row} bytes from {byte}, {tensor.buffer} has {size}", "ndarray", "address")
    tensor.storage.lifetime.address = (partition, byte)


def check_placement(lifetimes: Sequence[Lifetime], instructions: Sequence[Instruction]) -> None:
    """Refuse two placed tiles that share bytes and are both between their first and their last use."""
    placed = {life.allocation.id: life for life in lifetimes if life.address is not None and life.last_use >= 0}
    if not placed:
        return
    first: dict[int, int] = {}
    for number, instruction in enumerate(instructions):
        for operand in (*instruction.reads, *instruction.writes):
            first.setdefault(operand.allocation.id, number)
    for buffer in (SBUF, PSUM):
        tiles = [life for life in placed.values() if life.allocation.buffer is buffer]
        tiles.sort(key=lambda life: first.get(life.allocation.id, 0))
        live: list[Lifetime] = []
        for tile in tiles:
            born = first.get(tile.allocation.id, 0)
            live = [other for other in live if other.last_use >= born]
            for other in live:
                if _share(tile, other):
                    file, line = instructions[born].line
                    report("placement", _clash(tile, other), instructions[born].op, line=f"{file}:{line}")
            live.append(tile)


def _clash(tile: Lifetime, other: Lifetime) -> str:
    names = [f"{life.allocation.name or 'tile'} {life.allocation.shape} at {life.address}" for life in (tile, other)]
    return f"{names[0]} shares memory with {names[1]}, which is in use until instruction {other.last_use}"


def _share(one: Lifetime, other: Lifetime) -> bool:
    assert one.address is not None and other.address is not None
    return all(
        start < other_start + other_size and other_start < start + size
        for start, size, other_start, other_size in (
            (one.address[0], one.allocation.shape[0], other.address[0], other.allocation.shape[0]),
            (one.address[1], one.allocation.row_bytes, other.address[1], other.allocation.row_bytes),
        )
    )
