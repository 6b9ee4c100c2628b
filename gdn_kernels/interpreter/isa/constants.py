"""`nki.isa.constants`: the enumerations under the import path that the vendor's library uses."""

from gdn_kernels.interpreter.isa.enums import DgeMode as dge_mode
from gdn_kernels.interpreter.isa.enums import DmaEngine as dma_engine
from gdn_kernels.interpreter.isa.enums import Engine as engine
from gdn_kernels.interpreter.isa.enums import NcVersion as nc_version
from gdn_kernels.interpreter.isa.enums import OobMode as oob_mode
from gdn_kernels.interpreter.isa.enums import PerfMode as matmul_perf_mode
from gdn_kernels.interpreter.isa.enums import ReduceCmd as reduce_cmd

__all__ = ["dge_mode", "dma_engine", "engine", "matmul_perf_mode", "nc_version", "oob_mode", "reduce_cmd"]
