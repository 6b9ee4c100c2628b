"""Stage 5, the gated RMS norm: core_out = round(o * rsqrt(mean(o*o) + norm_eps) * norm_weight * silu(z))."""

import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.finite import MEAN_SQUARE, VALUE, clamp
from gdn_kernels.kernels.layout import BANK, COLUMNS, view


def gated_norm(out, o, z, parameters, norm_eps):
    """out[V, heads, B] = o * rsqrt(mean over V of o*o + norm_eps) * gain * silu(z), rounded to out's dtype.

    o: [V, heads, B] fp32. z: list of views [V, some heads, B].
    The mean runs over partitions: a product with ones leaves it on all of them."""
    V, heads, B = o.shape
    N = heads * B
    squares = nl.ndarray((V, N), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=squares, data1=o, data2=o, op=nl.multiply)
    scale = nl.ndarray((V, N), dtype=nl.float32, buffer=nl.sbuf)
    for c0 in range(0, N, BANK):
        width = min(BANK, N - c0)
        sums = nl.ndarray((V, width), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=sums,
            stationary=view(parameters.ones, V, 0, [[0, V]]),
            moving=squares[:, c0 : c0 + width],
            accumulate=False,
        )
        nisa.tensor_scalar(
            dst=scale[:, c0 : c0 + width],
            data=sums,
            op0=nl.multiply,
            operand0=1.0 / V,
            op1=nl.minimum,
            operand1=MEAN_SQUARE,
        )
    nisa.activation(dst=scale, op=nl.rsqrt, data=scale, bias=norm_eps)
    normed = nl.ndarray((V, heads, B), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=normed, data1=o, data2=scale, op=nl.multiply)
    gate = _silu(z, V, heads, B)
    nisa.scalar_tensor_tensor(
        dst=out, data=normed, op0=nl.multiply, operand0=parameters.gain, op1=nl.multiply, operand1=gate
    )


def _silu(z, V, heads, B):
    gate = nl.ndarray((V, heads, B), dtype=nl.float32, buffer=nl.sbuf)
    h = 0
    for part in z:
        some = gate[:, h : h + part.shape[1], :]
        clamp(some, part, VALUE)
        h = h + part.shape[1]
    nisa.activation(dst=gate, op=nl.silu, data=gate)
    return gate


def store_heads(target, out, b0, h0):
    """out [V, heads, B] to rows of target [batch, Hv * V] in HBM, heads h0 onwards of sequences b0 onwards.

    Turned on PE first: a store by columns would have runs of one element."""
    V, heads, B = out.shape
    row = target.shape[1]
    at_once = COLUMNS // B
    for h in range(0, heads, at_once):
        count = min(at_once, heads - h)
        turned = nl.ndarray((count * B, V), dtype=out.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=out[:, h : h + count, :])  # [V, count * B] -> [count * B, V]
        rows = nl.ndarray((count * B, V), dtype=out.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=rows, src=turned)
        nisa.dma_copy(
            dst=target.ap(pattern=[[V, count], [row, B], [1, V]], offset=b0 * row + (h0 + h) * V),
            src=rows,
        )
