"""The enumerations instructions take, with the members and values of NKI's own."""

from enum import Enum


class Engine(Enum):
    """`nisa.engine`."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class DgeMode(Enum):
    """`nisa.dge_mode`: who makes the descriptors of a DMA."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class OobMode(Enum):
    """`nisa.oob_mode`: what a run-time index out of bounds does."""

    error = 0
    skip = 1


class PerfMode(Enum):
    """`nisa.matmul_perf_mode`."""

    none = "none"
    double_row = "double_row"


class ReduceCmd(Enum):
    """`nisa.reduce_cmd`: what an instruction does with its engine's accumulator registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class NcVersion(Enum):
    """`nisa.nc_version`: the generation of a NeuronCore."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class DmaEngine(Enum):
    """`nisa.dma_engine`: who moves the tiles of a `sendrecv`."""

    dma = 1
    gpsimd_dma = 2
