"""What `import nki.isa as nisa` means under the interpreter."""

from typing import Any

from gdn_kernels.interpreter.isa.dma import dma_copy
from gdn_kernels.interpreter.isa.elementwise import (
    activation,
    memset,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_scalar,
    tensor_tensor,
)
from gdn_kernels.interpreter.isa.enums import DgeMode as dge_mode
from gdn_kernels.interpreter.isa.enums import Engine as engine
from gdn_kernels.interpreter.isa.enums import PerfMode as matmul_perf_mode
from gdn_kernels.interpreter.isa.enums import ReduceCmd as reduce_cmd
from gdn_kernels.interpreter.isa.gpsimd import affine_select, iota
from gdn_kernels.interpreter.isa.reduce import tensor_reduce
from gdn_kernels.interpreter.isa.tensor_engine import nc_matmul, nc_transpose
from gdn_kernels.interpreter.rules import NkiRuleError

__all__ = [
    "activation",
    "affine_select",
    "dge_mode",
    "dma_copy",
    "engine",
    "iota",
    "matmul_perf_mode",
    "memset",
    "nc_matmul",
    "nc_transpose",
    "reduce_cmd",
    "scalar_tensor_tensor",
    "tensor_copy",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_tensor",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NkiRuleError("unknown-instruction", f"nki.isa.{name} isn't an instruction the interpreter knows", name)
