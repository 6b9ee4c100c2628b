"""Stage 3, before the recurrence: l2 norms of q and k, decay and beta, and their way to where they are used."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.finite import KEY, VALUE, clamp
from gdn_kernels.kernels.layout import BANK, view

L2_EPS = 1e-6
SOFTPLUS_TAIL = -20.0  # below it softplus(x) = exp(x) to 1e-9
LARGEST_EXPONENT = 80.0  # exp of it is finite, and as a decay rate leaves nothing
LN2 = 0.6931472  # a decay rate that halves the state


@dataclass
class Keys(nl.NKIObject):
    """q and k of a group, normalised. kq: [P, n, 2, X], q then k, column x = tile * B + sequence. wide: their
    block diagonal [P, classes * n * 2 * X, n], each class of lanes by itself. dots: q.k of every key head on all V
    partitions, [V, G * n, B]."""

    kq: nl.ndarray
    wide: nl.ndarray
    dots: nl.ndarray


@dataclass
class Gates(nl.NKIObject):
    """Decay and beta of a group where they are used. decay_beta: exp(g) and beta on all V partitions,
    [V, 2, heads, B]. split: e and c, exp(g) = c + e, on key lanes, [P, G * T, 2, B]."""

    decay_beta: nl.ndarray
    split: nl.ndarray


def keys_of(c, wide, mask, identity, layout, K, V):
    """The Keys of convolved q and k in c [P, n, 2, X], which is normalised in place. wide: a `block_diagonal` tile."""
    l2norm(c, mask, layout, K)
    fill_block_diagonal(wide, c, mask, layout)
    return Keys(c, wide, query_dot_key(c, mask, identity, layout, V))


def gates_of(a, b, A_log, dt_bias, identity, layout, V):
    """The Gates of a group: a, b [heads, B] fp32, A_log, dt_bias columns [heads, 1]."""
    decay_beta, split = gates(a, b, A_log, dt_bias)
    return Gates(to_value_lanes(decay_beta, identity, V), to_key_lanes(split, identity, layout))


def l2norm(c, mask, layout, K):
    """q = q * rsqrt(sum(q*q) + 1e-6) / sqrt(K);  k = k * rsqrt(sum(k*k) + 1e-6), in place of q|k in c [P, n, 2, X].

    The sums run over the partitions of a head and over its n key rows: a product with the head mask, whose columns are
    broadcast so that every partition of the head gets the sum."""
    n, P, X = layout.n, layout.partitions(), c.shape[3]
    clamp(c, c, KEY)
    squares = nl.ndarray((P, n, 2, X), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=squares, data1=c, data2=c, op=nl.multiply)
    sums = nl.ndarray((P, 2 * X), dtype=nl.float32, buffer=nl.psum)
    for s in range(layout.classes * n):
        nisa.nc_matmul(
            dst=sums,
            stationary=view(mask, P, s // n * n, [[1, n], [0, layout.lanes]]),  # [P, P], 1 from a class to its head
            moving=squares[:, s % n, :, :],
            accumulate=s > 0,
        )
    scale = nl.ndarray((P, 2, X), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=scale, op=nl.rsqrt, data=sums, bias=L2_EPS)
    nisa.tensor_scalar(dst=scale[:, 0, :], data=scale[:, 0, :], op0=nl.multiply, operand0=K**-0.5)
    nisa.tensor_tensor(dst=c, data1=c, data2=view(scale, P, 0, [[0, n], [1, 2 * X]]), op=nl.multiply)


def block_diagonal(layout, X):
    """A tile for q and k with columns x < X: 8 KiB a partition at 64 sequences. One serves all groups: later it might
    find no place between smaller tiles."""
    columns = layout.classes * layout.n * 2 * X
    return nl.ndarray((layout.partitions(), columns, layout.n), dtype=nl.float32, buffer=nl.sbuf)


def fill_block_diagonal(wide, kq, mask, layout):
    """wide [P, classes * n * 2 * X, n]: every column of kq [P, n, 2, X] once for each class and head, zero off the
    partitions of these.

    One product with a state tile then serves all n heads of the tile without mixing them."""
    n, m, P, columns = layout.n, layout.classes, layout.partitions(), layout.n * 2 * kq.shape[3]
    nisa.tensor_tensor(
        dst=view(wide, P, 0, [[columns * n, m], [n, columns], [1, n]]),
        data1=view(kq, P, 0, [[0, m], [1, columns], [0, n]]),
        data2=view(mask, P, 0, [[n, m], [0, columns], [1, n]]),
        op=nl.multiply,
        engine=nisa.engine.gpsimd,  # idle here; 3.5 us at 64 sequences (modelled), in which Vector convolves v
    )


def query_dot_key(kq, mask, identity, layout, V):
    """q.k of each key head and sequence on all V partitions, [V, G * n, B]."""
    n, P, X = layout.n, layout.partitions(), kq.shape[3]
    B = X // layout.G
    products = nl.ndarray((P, n, X), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=products, data1=kq[:, :, 0, :], data2=kq[:, :, 1, :], op=nl.multiply)
    if layout.classes == 1:
        partial = nl.ndarray((P, X), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=partial, op=nl.add, data=view(products, P, 0, [[1, X], [X, n]]), axis=2)
    else:
        partial, mask = _lanes_added_up(products, identity, layout)
        P = P // layout.classes
    sums = nl.ndarray((V, layout.keys(), B), dtype=nl.float32, buffer=nl.psum)
    for j in range(n):
        of_head = view(sums, V, j * B, [[n * B, layout.G], [1, B]])
        nisa.nc_matmul(dst=of_head, stationary=view(mask, P, j, [[0, V]]), moving=partial, accumulate=False)
    dots = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=dots, src=sums)
    return dots


def _lanes_added_up(products, identity, layout):
    """The rows of products [P, n, X] added up one by one, over a partition and its neighbours of the other classes,
    [P / classes, X], and the head mask for these, [P / classes, n]."""
    n, m, X = layout.n, layout.classes, products.shape[2]
    P = layout.partitions() // m
    sums = nl.ndarray((P, X), dtype=nl.float32, buffer=nl.psum)
    for s in range(m * n):
        of_class = view(identity, layout.partitions(), s // n, [[m, P]])
        nisa.nc_matmul(dst=sums, stationary=of_class, moving=products[:, s % n, :], accumulate=s > 0)
    partial = nl.ndarray((P, X), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=partial, src=sums)
    mask = nl.ndarray((P, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=mask, op=nl.add, data=view(identity, P, 0, [[P // n, n], [1, P // n]]), axis=2)
    return partial, mask


def gates(a, b, A_log, dt_bias):
    """beta = sigmoid(b);  g = -exp(A_log) * softplus(a + dt_bias), with heads on partitions.

    a, b: [heads, B] fp32. A_log, dt_bias: columns [heads, 1].
    Returns [heads, 2, B] of (exp(g), beta) and [heads, 2, B] of (e, c), where exp(g) = c + e and c is 1 for a decay
    above 1/2 and 0 for a faster one. S * c is exact, so S * exp(g) = S * c + S * e rounds at the size of S once: a
    product S * exp(g) would repeat the rounding error of exp(g), which is the same, in the same direction, at every
    token.
    """
    heads, B = a.shape
    rate = _decay_rate(a, A_log, dt_bias)  # -g
    decay_beta = nl.ndarray((heads, 2, B), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=decay_beta[:, 0, :], op=nl.exp, data=rate, scale=-1.0)
    nisa.activation(dst=decay_beta[:, 1, :], op=nl.sigmoid, data=b)
    split = nl.ndarray((heads, 2, B), dtype=nl.float32, buffer=nl.sbuf)
    slow = split[:, 1, :]
    nisa.tensor_scalar(dst=slow, data=rate, op0=nl.less, operand0=LN2)
    change = nl.ndarray((heads, B), dtype=nl.float32, buffer=nl.sbuf)  # expm1(g) = tanh(g/2) * (1 + exp(g))
    nisa.activation(dst=change, op=nl.tanh, data=rate, scale=-0.5)
    nisa.scalar_tensor_tensor(
        dst=change, data=decay_beta[:, 0, :], op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=change
    )
    nisa.tensor_tensor(dst=change, data1=change, data2=slow, op=nl.multiply)
    fast = nl.ndarray((heads, B), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=fast, data=slow, op0=nl.multiply, operand0=-1.0, op1=nl.add, operand1=1.0)
    nisa.tensor_tensor(dst=fast, data1=fast, data2=decay_beta[:, 0, :], op=nl.multiply)
    nisa.tensor_tensor(dst=split[:, 0, :], data1=change, data2=fast, op=nl.add)
    return decay_beta, split


def _decay_rate(a, A_log, dt_bias):
    """exp(A_log) * softplus(x), x = a + dt_bias, as

        min(exp(A_log) * softplus(max(x, -20)), exp(a + (A_log + dt_bias)))

    softplus(x) is at most exp(x), and exp(x) to 1e-9 below -20: the minimum takes over where softplus would underflow
    while exp(A_log) overflows."""
    heads, B = a.shape
    scale = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=scale, data=A_log, op0=nl.minimum, operand0=LARGEST_EXPONENT)
    nisa.activation(dst=scale, op=nl.exp, data=scale)
    offset = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=offset, data1=A_log, data2=dt_bias, op=nl.add)
    soft = nl.ndarray((heads, B), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=soft, data=a, op0=nl.add, operand0=dt_bias, op1=nl.minimum, operand1=VALUE)
    nisa.tensor_scalar(dst=soft, data=soft, op0=nl.maximum, operand0=SOFTPLUS_TAIL)
    nisa.activation(dst=soft, op=nl.softplus, data=soft)
    bound = nl.ndarray((heads, B), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=bound, data=a, op0=nl.add, operand0=offset, op1=nl.minimum, operand1=LARGEST_EXPONENT)
    nisa.activation(dst=bound, op=nl.exp, data=bound)
    rate = nl.ndarray((heads, B), dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=rate, data=soft, op0=nl.multiply, operand0=scale, op1=nl.minimum, operand1=bound)
    return rate


def to_key_lanes(values, identity, layout):
    """values [heads, 2, B] as columns [P, G * T, 2, B]: lane (j, i) gets value head (I*n + j)*T + t at I*T + t."""
    n, T, P, B = layout.n, layout.T, layout.partitions(), values.shape[2]
    lanes = nl.ndarray((P, layout.G * T, 2, B), dtype=nl.float32, buffer=nl.sbuf)
    at_once = max(1, min(layout.G * T, BANK // (2 * B)))
    for first in range(0, layout.G * T, at_once):
        count = min(at_once, layout.G * T - first)
        spread = nl.ndarray((P, count, 2, B), dtype=nl.float32, buffer=nl.psum)
        for i in range(count):
            head = (first + i) // T * n * T + (first + i) % T
            nisa.nc_matmul(
                dst=spread[:, i, :, :],
                stationary=view(identity, layout.heads(), head, [[T, n], [0, layout.lanes]]),  # [heads, P]
                moving=values,
                accumulate=False,
            )
        nisa.tensor_copy(dst=lanes[:, first : first + count, :, :], src=spread)
    return lanes


def to_value_lanes(values, identity, V):
    """values [heads, 2, B] on all V partitions, [V, 2, heads, B]."""
    heads, B = values.shape[0], values.shape[2]
    lanes = nl.ndarray((V, 2, heads, B), dtype=nl.float32, buffer=nl.sbuf)
    at_once = min(heads, BANK // (2 * B))
    for h0 in range(0, heads, at_once):
        count = min(at_once, heads - h0)
        spread = nl.ndarray((V, count, 2 * B), dtype=nl.float32, buffer=nl.psum)
        for h in range(count):
            nisa.nc_matmul(
                dst=spread[:, h, :],
                stationary=view(identity, heads, h0 + h, [[0, V]]),  # [heads, V], row h0 + h is 1
                moving=values,
                accumulate=False,
            )
        nisa.tensor_copy(
            dst=view(lanes, V, h0 * B, [[B, count], [heads * B, 2], [1, B]]),
            src=spread,
        )
    return lanes
