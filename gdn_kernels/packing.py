"""How checkpoints pack projections, and their way back to one matrix each: Qwen3-Next's key heads, FP8 in blocks.

Matrices here are in the (out, in) order of a checkpoint. Qwen3-Next stores q, k, v and z in one matrix and b and a in
another, key head after key head, each with the value heads that read it (gqa = Hv / Hk of them):

    in_proj_qkvz  rows of key head j: q_j (K), k_j (K), its v heads (gqa * V), its z heads (gqa * V)
    in_proj_ba    rows of key head j: b of its value heads (gqa), a of its value heads (gqa)

Value head h = j * gqa + i then belongs to key head j = h // gqa, as everywhere here.
"""

from __future__ import annotations

import numpy as np

from gdn_kernels.dims import BlockDims
from gdn_kernels.dtypes import Array, bfloat16, to_fp32

# Rows and columns that share a scale; `quantization_config.weight_block_size` of a checkpoint says otherwise.
FP8_BLOCK = (128, 128)


def packed_shapes(dims: BlockDims) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of in_proj_qkvz and of in_proj_ba."""
    return (2 * dims.key_dim + 2 * dims.value_dim, dims.H), (2 * dims.Hv, dims.H)


def unpack_qkvz(packed: Array, dims: BlockDims) -> tuple[Array, Array]:
    """in_proj_qkvz [2 * key_dim + 2 * value_dim, H] -> in_proj_qkv [conv_dim, H] and in_proj_z [value_dim, H]."""
    values = dims.gqa * dims.V
    heads = packed.reshape(dims.Hk, 2 * dims.K + 2 * values, dims.H)
    parts = np.split(heads, np.cumsum([dims.K, dims.K, values]), axis=1)
    q, k, v, z = (part.reshape(-1, dims.H) for part in parts)  # [Hk * rows of the part, H]
    return np.concatenate([q, k, v]), z


def unpack_ba(packed: Array, dims: BlockDims) -> tuple[Array, Array]:
    """in_proj_ba [2 * Hv, H] -> in_proj_b and in_proj_a, [Hv, H] each."""
    heads = packed.reshape(dims.Hk, 2, dims.gqa, dims.H)
    return heads[:, 0].reshape(dims.Hv, dims.H), heads[:, 1].reshape(dims.Hv, dims.H)


def scale_shape(rows: int, columns: int, block: tuple[int, int] = FP8_BLOCK) -> tuple[int, int]:
    """Blocks along each axis of a matrix; the last ones may be ragged."""
    return -(-rows // block[0]), -(-columns // block[1])


def dequantise(quantised: Array, scale_inv: Array, block: tuple[int, int] = FP8_BLOCK) -> Array:
    """FP8 weights times their block's scale: in fp32, then rounded once to bf16, as transformers does.

    The scale multiplies, whatever `weight_scale_inv` sounds like: it is the inverse of the one used when quantising.

    Args:
        quantised: [rows, columns], float8_e4m3fn.
        scale_inv: [ceil(rows / block[0]), ceil(columns / block[1])], any float dtype; fp32 and bf16 are published.
        block: rows and columns that share a scale.

    Returns:
        [rows, columns] bf16.
    """
    rows, columns = quantised.shape
    scales = to_fp32(scale_inv)
    weights = np.empty((rows, columns), bfloat16())
    for i in range(scales.shape[0]):  # by rows of blocks: an fp32 copy of a whole matrix is four times its size
        top, bottom = i * block[0], min((i + 1) * block[0], rows)
        per_column = np.repeat(scales[i], block[1])[:columns]
        weights[top:bottom] = (quantised[top:bottom].astype(np.float32) * per_column).astype(bfloat16())
    return weights
