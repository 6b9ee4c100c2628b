"""Where tiles lie: a static allocation like a compiler's, in program order.

Every tile gets the next free place of a rotation through the memory, and keeps it from its allocation to its last use.
The rotation is what lets loads run ahead of their use: a place comes round again only after the whole memory was
handed out. PSUM is handed out in whole banks.
"""

from bisect import insort

from gdn_kernels.interpreter import hardware
from gdn_kernels.interpreter.memory import PSUM, SBUF, Buffer, Lifetime
from gdn_kernels.interpreter.rules import NkiRuleError

ALIGNMENT = 64  # bytes


def assign(lifetimes: list[Lifetime], sbuf_bytes: int = hardware.TRN2.sbuf_safe_bytes) -> dict[int, tuple[int, int]]:
    """Allocation id -> (first byte, end) of its place in a partition of SBUF, of `sbuf_bytes`, or of PSUM.

    Raises NkiRuleError (capacity) when the tiles that are alive together don't fit.
    """
    places: dict[int, tuple[int, int]] = {}
    banks = hardware.PSUM_BANKS * hardware.PSUM_BANK_BYTES
    for buffer, size, unit in (
        (SBUF, sbuf_bytes, ALIGNMENT),
        (PSUM, banks, hardware.PSUM_BANK_BYTES),
    ):
        places |= _rotate(
            [life for life in lifetimes if life.allocation.buffer is buffer and life.last_use >= 0], buffer, size, unit
        )
    return places


def _rotate(lifetimes: list[Lifetime], buffer: Buffer, size: int, unit: int) -> dict[int, tuple[int, int]]:
    places: dict[int, tuple[int, int]] = {}
    live: list[tuple[int, int, int]] = []  # (first byte, end, last use), by address
    pointer = 0
    for life in sorted(lifetimes, key=lambda life: life.born):
        live = [place for place in live if place[2] >= life.born]
        need = -(-life.allocation.row_bytes // unit) * unit
        start = _next_gap(live, pointer, need, size)
        if start is None:
            raise NkiRuleError(
                "capacity",
                f"no place for {need} bytes of {life.allocation.name or 'a tile'} {life.allocation.shape} in {buffer}: "
                f"{sum(end - first for first, end, _ in live)} of {size} bytes are live",
                line=life.allocation.line,
            )
        places[life.allocation.id] = (start, start + need)
        insort(live, (start, start + need, life.last_use))
        pointer = (start + need) % size
    return places


def _next_gap(live: list[tuple[int, int, int]], pointer: int, need: int, size: int) -> int | None:
    """The first gap of `need` bytes at or after `pointer`, or else from the start."""
    for low, high in ((pointer, size), (0, size)):
        cursor = low
        for first, end, _ in live:
            if end <= cursor:
                continue
            if first - cursor >= need:
                break
            cursor = max(cursor, end)
        if cursor + need <= high:
            return cursor
    return None
