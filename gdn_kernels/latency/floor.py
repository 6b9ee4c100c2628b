"""The DMA floor: the time in which every argument and every result could cross HBM once."""

from math import prod

import numpy as np

from gdn_kernels.dims import BLOCK_FORMED, BLOCK_SHAPES, BlockDims
from gdn_kernels.dtypes import bfloat16
from gdn_kernels.interpreter.dry import Spec
from gdn_kernels.timeline.costs import Costs


def argument_specs(dims: BlockDims, B: int) -> dict[str, Spec]:
    """Shape and dtype of every argument of `gdn_block_tkg` in the bf16 form."""
    sizes = {"B": B, "conv_dim": dims.conv_dim, "value_dim": dims.value_dim}
    specs = {}
    for name, symbols in BLOCK_SHAPES.items():
        shape = tuple(s if isinstance(s, int) else sizes[s] if s in sizes else getattr(dims, s) for s in symbols)
        specs[name] = Spec(shape, bfloat16() if name in BLOCK_FORMED else np.dtype(np.float32))
    return specs


def floor_bytes(dims: BlockDims, B: int) -> int:
    """Bytes of every argument and every result, once."""
    arguments = argument_specs(dims, B)
    results = (Spec((B, 1, dims.value_dim), bfloat16()), arguments["conv_state"], arguments["recurrent_state"])
    return sum(prod(spec.shape) * spec.dtype.itemsize for spec in (*arguments.values(), *results))


def floor_us(dims: BlockDims, B: int, lnc: int, costs: Costs) -> float:
    """us at the documented peak of the DMA engines of `lnc` cores."""
    return floor_bytes(dims, B) / (costs.core_rate * lnc) / 1e3
