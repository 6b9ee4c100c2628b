"""How the block's cost grows with the batch and with the hidden size; everything but that one size stays."""

from dataclasses import replace

from gdn_kernels.dims import BlockDims
from gdn_kernels.latency.model import Modelled, model_block
from gdn_kernels.timeline.costs import TRN2, Costs

BATCHES = (1, 2, 4, 8, 16, 32, 64)
HIDDEN = (512, 1024, 2048, 4096, 8192)


def over_batch(dims: BlockDims, lnc: int = 1, costs: Costs = TRN2) -> dict[int, Modelled]:
    return {B: model_block(dims, B, lnc, costs) for B in BATCHES}


def over_hidden(dims: BlockDims, B: int = 1, lnc: int = 1, costs: Costs = TRN2) -> dict[int, Modelled]:
    return {H: model_block(replace(dims, H=H), B, lnc, costs) for H in HIDDEN}
