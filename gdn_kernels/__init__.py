"""A fused Gated DeltaNet decode kernel for AWS Trainium2, its reference, and an interpreter that runs it anywhere."""

from gdn_kernels.backends import BackendUnavailable
from gdn_kernels.dims import MODELS, BlockDims
from gdn_kernels.ops import gdn_block_tkg, gdn_block_tkg_slots, gdn_conv1d_decode, gdn_tkg
from gdn_kernels.state import DecodeState
from gdn_kernels.weights import BlockWeights

__all__ = [
    "MODELS",
    "BackendUnavailable",
    "BlockDims",
    "BlockWeights",
    "DecodeState",
    "gdn_block_tkg",
    "gdn_block_tkg_slots",
    "gdn_conv1d_decode",
    "gdn_tkg",
]
