"""Stage 5, the gated RMS norm: core_out = round(o * rsqrt(mean(o*o) + norm_eps) * norm_weight * silu(z)).

In two functions, as the norm is done long before z is there: z is the last thing to stream in."""

import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.finite import MEAN_SQUARE, VALUE, clamp
from gdn_kernels.kernels.layout import BANK, COLUMNS, view
from gdn_kernels.kernels.queues import store


def normalise(o, parameters, norm_eps):
    """o * rsqrt(mean over V of o*o + norm_eps) * gain, in place of o [V, heads, B] fp32.

    The mean runs over partitions: a product with ones leaves it on all of them."""
    V, heads, B = o.shape
    N = heads * B
    squares = nl.ndarray((V, N), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=squares, data1=o, data2=o, op=nl.multiply)
    scale = nl.ndarray((V, N), dtype=nl.float32, buffer=nl.sbuf)
    for c0 in range(0, N, BANK):
        here = slice(c0, min(c0 + BANK, N))
        sums = nl.ndarray((V, here.stop - c0), dtype=nl.float32, buffer=nl.psum)
        ones = view(parameters.ones, V, 0, [[0, V]])  # [V, V]
        nisa.nc_matmul(dst=sums, stationary=ones, moving=squares[:, here], accumulate=False)
        mean = scale[:, here]
        nisa.tensor_scalar(dst=mean, data=sums, op0=nl.multiply, operand0=1.0 / V, op1=nl.minimum, operand1=MEAN_SQUARE)
    nisa.activation(dst=scale, op=nl.rsqrt, data=scale, bias=norm_eps)
    nisa.scalar_tensor_tensor(dst=o, data=o, op0=nl.multiply, operand0=parameters.gain, op1=nl.multiply, operand1=scale)


def gate(out, normed, z):
    """out[V, heads, B] = normed * silu(z), rounded to out's dtype. z: list of views [V, some heads, B]."""
    gates = nl.ndarray(normed.shape, dtype=nl.float32, buffer=nl.sbuf)
    h = 0
    for part in z:
        some = gates[:, h : h + part.shape[1], :]
        clamp(some, part, VALUE)
        h = h + part.shape[1]
    nisa.activation(dst=gates, op=nl.silu, data=gates)
    nisa.tensor_tensor(dst=out, data1=normed, data2=gates, op=nl.multiply)


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
        store(target.ap(pattern=[[V, count], [row, B], [1, V]], offset=b0 * row + (h0 + h) * V), rows)
