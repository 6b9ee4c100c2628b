"""What `import nki.isa as nisa` means under the interpreter."""

from typing import Any

from gdn_kernels.interpreter.isa.activations import activation, activation_reduce
from gdn_kernels.interpreter.isa.constants import (
    dge_mode,
    dma_engine,
    engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
)
from gdn_kernels.interpreter.isa.dma import dma_compute, dma_copy, dma_transpose
from gdn_kernels.interpreter.isa.elementwise import memset, reciprocal, scalar_tensor_tensor, tensor_copy, tensor_tensor
from gdn_kernels.interpreter.isa.gather import local_gather, nc_n_gather
from gdn_kernels.interpreter.isa.gpsimd import affine_select, iota
from gdn_kernels.interpreter.isa.multicore import core_barrier, get_nc_sub_version, get_nc_version, sendrecv
from gdn_kernels.interpreter.isa.operands import Issued as NkiInstruction
from gdn_kernels.interpreter.isa.reduce import tensor_partition_reduce, tensor_reduce, tensor_scalar_reduce
from gdn_kernels.interpreter.isa.refused import (
    dropout,
    nc_matmul_mx,
    quantize_mx,
    rand2,
    rand_get_state,
    rand_set_state,
    rng,
    set_rng_seed,
    topk,
)
from gdn_kernels.interpreter.isa.registers import (
    VirtualRegister,
    register_alloc,
    register_load,
    register_move,
    register_store,
)
from gdn_kernels.interpreter.isa.scalars import tensor_scalar
from gdn_kernels.interpreter.isa.scan import tensor_scalar_cumulative, tensor_tensor_scan
from gdn_kernels.interpreter.isa.search import max8, nc_find_index8, nc_match_replace8
from gdn_kernels.interpreter.isa.select import range_select, select_reduce, tensor_copy_predicated
from gdn_kernels.interpreter.isa.sequences import nonzero_with_count, sequence_bounds
from gdn_kernels.interpreter.isa.statistics import bn_aggr, bn_stats
from gdn_kernels.interpreter.isa.tensor_engine import nc_matmul
from gdn_kernels.interpreter.isa.transpose import nc_stream_shuffle, nc_transpose
from gdn_kernels.interpreter.isa.trn3 import activate2, exponential
from gdn_kernels.interpreter.rules import NkiRuleError as NkiValidationError
from gdn_kernels.interpreter.rules import UnknownName

# Deprecated names of the engines, which the vendor's library uses.
tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown

__all__ = [
    "NkiInstruction",
    "NkiValidationError",
    "VirtualRegister",
    "activate2",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "dropout",
    "engine",
    "exponential",
    "get_nc_sub_version",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_matmul_mx",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "quantize_mx",
    "rand2",
    "rand_get_state",
    "rand_set_state",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "rng",
    "scalar_engine",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "sequence_bounds",
    "set_rng_seed",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "topk",
    "unknown_engine",
    "vector_engine",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise UnknownName("unknown-instruction", f"nki.isa.{name} isn't an instruction the interpreter knows", name)
