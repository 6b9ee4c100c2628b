"""What the modelled NeuronCores are made of: sizes and limits, one row a target.

Sources are the public AWS Neuron pages named beside each figure: the Trainium2 and Trainium3 architecture
guides ("arch"), the `nki.isa` / `nki.language` API reference ("api") and the NKI Library's allocators ("lib").
"""

from dataclasses import dataclass

PARTITIONS = 128  # rows of SBUF and PSUM, and of the Tensor engine (arch)
PSUM_BANK_BYTES = 2048  # one bank of one partition: 512 fp32 (arch)
PSUM_BANKS = 8  # (arch)
MATMUL_STATIONARY_FREE = 128  # columns of the Tensor engine (api nc_matmul)
BN_STATS_FREE = 512  # elements a partition of one bn_stats (api tile_size)
VECTOR_TRANSPOSE = 32  # the Vector engine transposes blocks of 32 x 32 (api nc_transpose)
SHUFFLE_PARTITIONS = 32  # one quadrant (api nc_stream_shuffle)
MAX_DIMS = 5  # partition + at most 4 free dimensions in one access pattern (access-pattern guide)
MAX_COUNT, MAX_STRIDE = 2**16 - 1, 2**15 - 1  # uint16 counts, int16 strides (access-pattern guide)

# The largest partition count that may start at each partition (arch, "partition start"): an operand of more than 64
# partitions starts at 0, of more than 32 at 0 or 64, a smaller one at any multiple of 32.
START_STEP = ((32, 32), (64, 64), (PARTITIONS, PARTITIONS))


@dataclass(frozen=True)
class Target:
    """One NeuronCore generation.

    sbuf_bytes: bytes a partition (arch). sbuf_usable_bytes: what is left after the runtime's own reservations (lib).
    sbuf_safe_bytes: the smaller figure other pages still give; beyond it the interpreter warns.
    matmul_moving_free: largest free size of the moving operand (api nc_matmul).
    """

    name: str
    generation: int
    sbuf_bytes: int
    sbuf_usable_bytes: int
    sbuf_safe_bytes: int
    matmul_moving_free: int


TRN2 = Target("trn2", 3, 224 * 1024, 212_984, 192 * 1024, 512)
TRN3 = Target("trn3", 4, 256 * 1024, 245_752, 256 * 1024 - 16_384, 4096)
TARGETS = {target.name: target for target in (TRN2, TRN3)}


def legal_start(start: int, count: int) -> bool:
    """Whether an engine operand of `count` partitions may start at partition `start` (arch)."""
    step = next(step for limit, step in START_STEP if count <= limit)
    return start % step == 0
