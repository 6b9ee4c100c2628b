"""Mean and variance of each partition, on Vector: statistics of up to 512 elements, and their aggregation."""

import numpy as np

from gdn_kernels.interpreter import machine
from gdn_kernels.interpreter.isa.operands import Array, check, check_overlap, instruction, read, write
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

MAX_ELEMENTS = 512


@instruction
def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """dst[P, 6] = count, mean, count * variance of the even elements, then of the odd ones; at most 512 elements."""
    op = "bn_stats"
    _check(op, dst, data, 6)
    if data.free_size > MAX_ELEMENTS:
        limit = MAX_ELEMENTS
        refuse("shape", f"{data.free_size} elements, at most {limit}", op, "data", limit=limit, found=data.free_size)
    x = read(op, "data", data).reshape(data.shape[0], -1).astype(np.float64)
    stats = np.concatenate([_statistics(x[:, ::2]), _statistics(x[:, 1::2])], axis=1)
    write(dst, stats.astype(np.float32))
    machine.current().record(op, "vector", (data,), (dst,), name)


@instruction
def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """dst[P, 2] = mean, variance of everything that the triples (count, mean, count * variance) in data describe."""
    op = "bn_aggr"
    _check(op, dst, data, 2)
    if data.free_size % 3:
        refuse("shape", f"{data.free_size} elements a partition, expected triples", op, "data")
    triples = read(op, "data", data).reshape(data.shape[0], -1, 3).astype(np.float64)
    count, mean, spread = triples[..., 0], triples[..., 1], triples[..., 2]
    total = count.sum(axis=1, keepdims=True)
    overall = (count * mean).sum(axis=1, keepdims=True) / total
    variance = (spread + count * (mean - overall) ** 2).sum(axis=1, keepdims=True) / total
    write(dst, np.concatenate([overall, variance], axis=1).astype(np.float32))
    machine.current().record(op, "vector", (data,), (dst,), name)


def _check(op: str, dst: NkiTensor, data: NkiTensor, elements: int) -> None:
    check(op, "dst", dst)
    check(op, "data", data)
    check_overlap(op, dst, data)
    if dst.shape[0] != data.shape[0] or dst.free_size != elements:
        refuse("shape", f"{dst.shape}, expected ({data.shape[0]}, {elements})", op, "dst")


def _statistics(x: Array) -> Array:
    """[P, 3] of x [P, n]; zeros for n = 0."""
    if x.shape[1] == 0:
        return np.zeros((x.shape[0], 3))
    mean = x.mean(axis=1, keepdims=True)
    spread = ((x - mean) ** 2).sum(axis=1, keepdims=True)
    return np.concatenate([np.full_like(mean, x.shape[1]), mean, spread], axis=1)
