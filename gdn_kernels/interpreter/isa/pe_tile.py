"""The part of the Tensor engine a matmul uses: 128 x 128 elements, or a tile of 32, 64 or 128 rows and columns."""

from gdn_kernels.interpreter import hardware
from gdn_kernels.interpreter.rules import refuse, report
from gdn_kernels.interpreter.tensor import NkiTensor

SIZES = (32, 64, hardware.PARTITIONS)


def check_position(op: str, stationary: NkiTensor, moving: NkiTensor) -> None:
    """Partition p of both operands feeds row p of the engine."""
    if (stationary.offset or moving.offset) and stationary.start_partition != moving.start_partition:
        starts = f"partition {stationary.start_partition}, moving at {moving.start_partition}"
        report("tile-position", f"starts at {starts}", op, "stationary")


def check_tiling(
    op: str, dst: NkiTensor, stationary: NkiTensor, position: tuple[int, ...], size: tuple[int, ...], double: bool
) -> None:
    """A tile is given by (row, column) position and size, holds the operand, and lies over its partitions."""
    for role, pair in (("tile_position", position), ("tile_size", size)):
        if len(pair) != 2 or not all(isinstance(part, int) for part in pair):
            refuse("shape", f"{pair!r}: position and size are both given, as (row, column)", op, role)
    wanted = (stationary.shape[0], dst.shape[0])
    for axis, start, extent, needed in zip(("rows", "columns"), position, size, wanted, strict=True):
        if extent not in SIZES:
            refuse("shape", f"{extent} {axis}, expected one of {SIZES}", op, "tile_size")
        if start % extent or not 0 <= start <= hardware.PARTITIONS - extent:
            refuse("shape", f"{axis} from {start}, expected a multiple of their number, {extent}", op, "tile_position")
        if needed > extent:
            refuse("shape", f"{needed} {axis} in a tile of {extent}", op, "tile_size", limit=extent, found=needed)
    if double and size[1] != hardware.PARTITIONS:
        refuse("operation", f"double_row excludes column tiles, here of {size[1]} columns", op, "tile_size")
    found = (stationary.start_partition, dst.start_partition)
    if found != position:
        report("tile-position", f"operands start at partition {found[0]} and dst at {found[1]}, tile {position}", op)
