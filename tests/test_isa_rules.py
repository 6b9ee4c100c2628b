"""For every operand rule of the instructions one program that obeys it narrowly and one that breaks it narrowly."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from isa_programs import BF16, E4M3, F32, launch, new, run, tile, to_hbm, to_psum

from gdn_kernels import interpreter
from gdn_kernels.interpreter import NkiRuleError, NkiRuleWarning, dry, hardware, rules
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl

CMD, DGE, ENGINE, DMA = nisa.reduce_cmd, nisa.dge_mode, nisa.engine, nisa.dma_engine
I8, I16, I32, U8, U16, U32 = nl.int8, nl.int16, nl.int32, nl.uint8, nl.uint16, nl.uint32
MASK = list(range(32))
PSUM, HBM = nl.psum, nl.shared_hbm


def given(value: Any, make: Any, /, *args: Any, **options: Any) -> Any:
    """The value, or a fresh tile: a tensor has no truth value to choose by."""
    return make(*args, **options) if value is None else value


def hbm(*shape: int, dtype: Any = F32) -> Any:
    made = new(shape, dtype, nl.private_hbm)
    flat = int(np.prod(shape))
    with rules.without("short-runs", "element-runs"):
        nisa.dma_copy(dst=made, src=tile(1, flat, dtype=dtype))
    return made


def copy(dst: Any, src: Any, **options: Any) -> None:
    nisa.tensor_copy(dst=dst, src=src, **options)


def plus(dst: Any, left: Any, right: Any, op: Any = None, **options: Any) -> None:
    nisa.tensor_tensor(dst=dst, data1=left, data2=right, op=op or nl.add, **options)


def scale(dst: Any, data: Any, op0: Any = None, operand0: Any = 2.0, **options: Any) -> None:
    nisa.tensor_scalar(dst=dst, data=data, op0=op0 or nl.multiply, operand0=operand0, **options)


def both(dst: Any, left: Any, right: Any, op0: Any = None, op1: Any = None, **options: Any) -> None:
    nisa.scalar_tensor_tensor(dst, left, op0 or nl.add, options.pop("operand0", 1.0), op1 or nl.add, right, **options)


def matmul(dst: Any, left: Any, right: Any, **options: Any) -> None:
    nisa.nc_matmul(dst, left, right, **options)


def act(op: Any = None, data: Any = None, dst: Any = None, **options: Any) -> None:
    nisa.activation(dst=given(dst, new, (8, 4)), op=op or nl.exp, data=given(data, tile, 8, 4), **options)


def cumulative(op0: Any = None, op1: Any = None, dtype: Any = F32, **options: Any) -> None:
    nisa.tensor_scalar_cumulative(new((8, 4)), tile(8, 4, dtype=dtype), op0 or nl.add, op1 or nl.add, 0.0, **options)


def tsr(op0: Any = None, reduce_op: Any = None, **options: Any) -> None:
    nisa.tensor_scalar_reduce(new((8, 4)), tile(8, 4), op0 or nl.add, 0.0, reduce_op or nl.add, **options)


def select(predicate: Any = None, on_true: Any = None, **options: Any) -> None:
    predicate, on_true = given(predicate, tile, 8, 4, dtype=U8), given(on_true, tile, 8, 4)
    nisa.select_reduce(new((8, 4)), predicate, on_true, options.pop("on_false", 0.0), **options)


def ranged(op0: Any = None, bound: Any = None, **options: Any) -> None:
    data, bound = given(options.pop("data", None), tile, 8, 4), given(bound, tile, 8, 1)
    nisa.range_select(new((8, 4)), data, op0 or nl.less, nl.less, bound, tile(8, 1), **options)


def shuffle(dst: Any, src: Any, mask: Any = MASK) -> None:
    nisa.nc_stream_shuffle(dst=dst, src=src, shuffle_mask=mask)


def gather(dst: Any = None, data: Any = None, index: Any = None) -> None:
    dst, data = given(dst, new, (8, 4)), given(data, tile, 8, 2)
    nisa.nc_n_gather(dst, data, given(index, tile, 8, 4, dtype=U32, value=1))


def local(P: int = 16, N: int = 4, columns: int = 1, out: int | None = None, dtype: Any = U16, **options: Any) -> None:
    index = tile(P, columns, dtype=dtype, value=options.pop("index", 0))
    nisa.local_gather(new((P, out or 16 * columns)), tile(P, N), index, **options)


def find(N: int = 8, vals: int = 8, dtype: Any = U32) -> None:
    nisa.nc_find_index8(new((8, 8), dtype), tile(8, N), tile(8, vals))


def transposed(src: Any, shape: Any, **options: Any) -> None:
    with rules.without("short-runs", "element-runs"):
        nisa.dma_transpose(dst=new(shape, src.dtype), src=src, **options)


def moved(dst: Any, src: Any, **options: Any) -> None:
    with rules.without("short-runs", "element-runs"):
        nisa.dma_copy(dst=dst, src=src, **options)


def twice(cmd: Any, first: Any = None) -> None:
    """An activation that reduces with `cmd` after one with `first`."""
    if first is not None:
        act(reduce_op=nl.add, reduce_cmd=first)
    act(reduce_op=nl.add, reduce_cmd=cmd)


def vector_twice(first: Any, second: Any) -> None:
    for cmd in (first, second):
        select(reduce_cmd=cmd)


def partly(width: int) -> Any:
    made = new((8, 4))
    nisa.memset(dst=made[:, 0:width], value=1.0)
    return made


def shifted(start: int) -> None:
    t = tile(8, 8)
    copy(t[:, start : start + 4], t[:, 0:4])


def beside(count: int) -> None:
    t = tile(64, 4)
    copy(t[32 : 32 + count], t[0:count])
    copy(t[0:count], t[32 : 32 + count])


def turned_in_place(dims: tuple[int, ...]) -> None:
    t = tile(8, 2, 2)
    copy(t, t.permute(dims))


def cast_in_place(dtype: Any) -> None:
    t = tile(8, 8)
    narrow = t.view(dtype)[:, 8:16] if dtype != F32 else t[:, 0:8]
    copy(narrow, t)


Program = Callable[[], Any]
TABLE: dict[str, tuple[str, Program, Program]] = {
    # every engine operand
    "partition 32 for 32": (
        "start-partition",
        lambda: copy(new((32, 4)), tile(96, 4)[32:64]),
        lambda: copy(new((33, 4)), tile(96, 4)[32:65]),
    ),
    "partition 64 for 64": (
        "start-partition",
        lambda: copy(new((64, 4)), tile(128, 4)[64:]),
        lambda: copy(new((65, 4)), tile(128, 4)[63:]),
    ),
    "a multiple of 32": (
        "start-partition",
        lambda: copy(new((1, 4)), tile(128, 4)[96:97]),
        lambda: copy(new((1, 4)), tile(128, 4)[97:98]),
    ),
    "on chip": ("memory-space", lambda: copy(new((8, 4)), tile(8, 4)), lambda: copy(new((8, 4)), hbm(8, 4))),
    "a tensor": ("objects-not-strings", lambda: copy(new((8, 4)), tile(8, 4)), lambda: copy(new((8, 4)), 1.0)),
    "dimensions": (
        "pattern",
        lambda: copy(new((8, 1, 1, 1, 4)), tile(8, 4)),
        lambda: copy(new((8, 1, 1, 1, 1, 4)), tile(8, 4)),
    ),
    "written before read": (
        "uninitialised",
        lambda: copy(new((8, 4)), partly(4)),
        lambda: copy(new((8, 4)), partly(3)),
    ),
    "elements": ("shape", lambda: copy(new((8, 2, 2)), tile(8, 4)), lambda: copy(new((8, 2, 2)), tile(8, 5))),
    "partitions": ("shape", lambda: copy(new((8, 4)), tile(8, 4)), lambda: copy(new((4, 8)), tile(8, 4))),
    "apart": ("overlap", lambda: shifted(4), lambda: shifted(3)),
    "the same view": ("overlap", lambda: cast_in_place(F32), lambda: cast_in_place(BF16)),
    "beside": ("shape", lambda: beside(32), lambda: copy(tile(32, 4), tile(31, 4))),
    "in the same order": ("overlap", lambda: turned_in_place((0, 1, 2)), lambda: turned_in_place((0, 2, 1))),
    "written once": (
        "pattern",
        lambda: copy(new((8, 1, 4)), tile(8, 4)),
        lambda: copy(new((8, 1, 4)).broadcast(1, 2), tile(8, 8)),
    ),
    # memset
    "memset: a float for a float": (
        "value-kind",
        lambda: nisa.memset(new((8, 4)), 0.0),
        lambda: nisa.memset(new((8, 4)), 0),
    ),
    "memset: an int for an int": (
        "dtype",
        lambda: nisa.memset(new((8, 4), I8), 0),
        lambda: nisa.memset(new((8, 4), I8), 0.0),
    ),
    "memset: in range": (
        "dtype",
        lambda: nisa.memset(new((8, 4), I8), -128),
        lambda: nisa.memset(new((8, 4), I8), -129),
    ),
    "memset: engine": (
        "engine",
        lambda: nisa.memset(new((8, 4)), 0.0, engine=ENGINE.gpsimd),
        lambda: nisa.memset(new((8, 4)), 0.0, engine=ENGINE.scalar),
    ),
    # tensor_copy
    "tensor_copy: gpsimd": (
        "memory-space",
        lambda: copy(tile(8, 4), tile(8, 4), engine=ENGINE.gpsimd),
        lambda: copy(new((8, 4), F32, PSUM), tile(8, 4), engine=ENGINE.gpsimd),
    ),
    "tensor_copy: scalar": (
        "documents-disagree",
        lambda: copy(new((8, 4), I16), tile(8, 4, dtype=I16), engine=nisa.scalar_engine),
        lambda: copy(new((8, 4), I32), tile(8, 4, dtype=I32), engine=nisa.scalar_engine),
    ),
    "engine as an object": (
        "objects-not-strings",
        lambda: copy(new((8, 4)), tile(8, 4), engine=nisa.vector_engine),
        lambda: copy(new((8, 4)), tile(8, 4), engine="vector"),
    ),
    # tensor_tensor
    "tensor_tensor: one in psum": (
        "two-psum-inputs",
        lambda: plus(new((8, 4)), to_psum(tile(8, 4)), tile(8, 4)),
        lambda: plus(new((8, 4)), to_psum(tile(8, 4)), to_psum(tile(8, 4))),
    ),
    "tensor_tensor: power": (
        "engine",
        lambda: plus(new((8, 4)), tile(8, 4), tile(8, 4), nl.power),
        lambda: plus(new((8, 4)), tile(8, 4), tile(8, 4), nl.power, engine=ENGINE.vector),
    ),
    "tensor_tensor: power in sbuf": (
        "memory-space",
        lambda: plus(new((8, 4)), tile(8, 4), tile(8, 4), nl.power),
        lambda: plus(new((8, 4)), to_psum(tile(8, 4)), tile(8, 4), nl.power),
    ),
    "tensor_tensor: bits of integers": (
        "dtype",
        lambda: plus(new((8, 4), I32), tile(8, 4, dtype=I32), tile(8, 4, dtype=U32), nl.bitwise_or),
        lambda: plus(new((8, 4), I32), tile(8, 4, dtype=I32), tile(8, 4, dtype=F32), nl.bitwise_or),
    ),
    "tensor_tensor: bits of one width": (
        "dtype",
        lambda: plus(new((8, 4), U8), tile(8, 4, dtype=I8), tile(8, 4, dtype=U8), nl.bitwise_or),
        lambda: plus(new((8, 4), U16), tile(8, 4, dtype=I8), tile(8, 4, dtype=U8), nl.bitwise_or),
    ),
    "tensor_tensor: bits on vector": (
        "engine",
        lambda: plus(new((8, 4), U8), tile(8, 4, dtype=U8), tile(8, 4, dtype=U8), nl.bitwise_or),
        lambda: plus(new((8, 4), U8), tile(8, 4, dtype=U8), tile(8, 4, dtype=U8), nl.bitwise_or, engine=ENGINE.gpsimd),
    ),
    "tensor_tensor: binary": (
        "operation",
        lambda: plus(new((8, 4)), tile(8, 4), tile(8, 4)),
        lambda: plus(new((8, 4)), tile(8, 4), tile(8, 4), nl.square),
    ),
    "tensor_tensor: trn3": (
        "target",
        lambda: plus(new((8, 4)), tile(8, 4), tile(8, 4), nl.maximum),
        lambda: plus(new((8, 4)), tile(8, 4), tile(8, 4), nl.abs_max),
    ),
    "op as an object": (
        "objects-not-strings",
        lambda: plus(new((8, 4)), tile(8, 4), tile(8, 4)),
        lambda: plus(new((8, 4)), tile(8, 4), tile(8, 4), "add"),
    ),
    # tensor_scalar
    "tensor_scalar: a column": (
        "scalar-operand",
        lambda: scale(new((8, 4)), tile(8, 4), operand0=tile(8, 1)),
        lambda: scale(new((8, 4)), tile(8, 4), operand0=tile(8, 2)),
    ),
    "tensor_scalar: of its partitions": (
        "scalar-operand",
        lambda: scale(new((8, 4)), tile(8, 4), operand0=tile(8, 1)),
        lambda: scale(new((8, 4)), tile(8, 4), operand0=tile(7, 1)),
    ),
    "tensor_scalar: fp32": (
        "scalar-operand",
        lambda: scale(new((8, 4)), tile(8, 4, dtype=BF16), operand0=tile(8, 1)),
        lambda: scale(new((8, 4)), tile(8, 4, dtype=BF16), operand0=tile(8, 1, dtype=BF16)),
    ),
    "tensor_scalar: a number": (
        "scalar-operand",
        lambda: scale(new((8, 4)), tile(8, 4), operand0=1),
        lambda: scale(new((8, 4)), tile(8, 4), operand0=True),
    ),
    "tensor_scalar: scalar engine": (
        "engine",
        lambda: scale(new((8, 4)), tile(8, 4), op1=nl.add, operand1=1.0, engine=ENGINE.scalar),
        lambda: scale(new((8, 4)), tile(8, 4), op1=nl.multiply, operand1=1.0, engine=ENGINE.scalar),
    ),
    "tensor_scalar: gpsimd": (
        "engine",
        lambda: scale(new((8, 4)), tile(8, 4), nl.rsqrt, None, engine=ENGINE.gpsimd),
        lambda: scale(new((8, 4)), tile(8, 4), nl.add, engine=ENGINE.gpsimd),
    ),
    "tensor_scalar: rsqrt": (
        "engine",
        lambda: scale(new((8, 4)), tile(8, 4), nl.rsqrt, 0.0),
        lambda: scale(new((8, 4)), tile(8, 4), nl.rsqrt, 0.0, engine=ENGINE.vector),
    ),
    "tensor_scalar: rsqrt in sbuf": (
        "memory-space",
        lambda: scale(new((8, 4)), tile(8, 4), nl.rsqrt, 0.0),
        lambda: scale(new((8, 4)), to_psum(tile(8, 4)), nl.rsqrt, 0.0),
    ),
    "tensor_scalar: one class": (
        "operation",
        lambda: scale(new((8, 4), I32), tile(8, 4, dtype=I32), nl.bitwise_and, 1, op1=nl.left_shift, operand1=1),
        lambda: scale(new((8, 4), I32), tile(8, 4, dtype=I32), nl.bitwise_and, 1, op1=nl.add, operand1=1),
    ),
    "tensor_scalar: bits by an int": (
        "scalar-operand",
        lambda: scale(new((8, 4), I32), tile(8, 4, dtype=I32), nl.bitwise_and, 1),
        lambda: scale(new((8, 4), I32), tile(8, 4, dtype=I32), nl.bitwise_and, 1.0),
    ),
    "tensor_scalar: unary": (
        "operation",
        lambda: scale(new((8, 4)), tile(8, 4), nl.abs, 0.0),
        lambda: scale(new((8, 4)), tile(8, 4), nl.abs, 1.0),
    ),
    "tensor_scalar: no activation": (
        "operation",
        lambda: scale(new((8, 4)), tile(8, 4), nl.abs, None),
        lambda: scale(new((8, 4)), tile(8, 4), nl.exp, None),
    ),
    "tensor_scalar: trn3": (
        "target",
        lambda: scale(new((8, 4)), tile(8, 4), nl.abs, None),
        lambda: scale(new((8, 4)), tile(8, 4), nl.square, None),
    ),
    "tensor_scalar: operand1": (
        "operation",
        lambda: scale(new((8, 4)), tile(8, 4)),
        lambda: scale(new((8, 4)), tile(8, 4), operand1=1.0),
    ),
    # scalar_tensor_tensor, scans
    "scalar_tensor_tensor: one in psum": (
        "two-psum-inputs",
        lambda: both(new((8, 4)), tile(8, 4), to_psum(tile(8, 4))),
        lambda: both(new((8, 4)), to_psum(tile(8, 4)), to_psum(tile(8, 4))),
    ),
    "scalar_tensor_tensor: arithmetic": (
        "operation",
        lambda: both(new((8, 4)), tile(8, 4), tile(8, 4)),
        lambda: both(new((8, 4)), tile(8, 4), tile(8, 4), op1=nl.bitwise_or),
    ),
    "scalar_tensor_tensor: a column": (
        "scalar-operand",
        lambda: both(new((8, 4)), tile(8, 4), tile(8, 4), operand0=tile(8, 1)),
        lambda: both(new((8, 4)), tile(8, 4), tile(8, 4), operand0=tile(8, 4)),
    ),
    "scan: one in psum": (
        "two-psum-inputs",
        lambda: nisa.tensor_tensor_scan(new((8, 4)), to_psum(tile(8, 4)), tile(8, 4), 0.0, nl.add, nl.add),
        lambda: nisa.tensor_tensor_scan(new((8, 4)), to_psum(tile(8, 4)), to_psum(tile(8, 4)), 0.0, nl.add, nl.add),
    ),
    "scan: arithmetic": (
        "operation",
        lambda: nisa.tensor_tensor_scan(new((8, 4)), tile(8, 4), tile(8, 4), 0.0, nl.add, nl.add),
        lambda: nisa.tensor_tensor_scan(new((8, 4)), tile(8, 4), tile(8, 4), 0.0, nl.bitwise_or, nl.add),
    ),
    "scan: initial": (
        "scalar-operand",
        lambda: nisa.tensor_tensor_scan(new((8, 4)), tile(8, 4), tile(8, 4), tile(8, 1), nl.add, nl.add),
        lambda: nisa.tensor_tensor_scan(new((8, 4)), tile(8, 4), tile(8, 4), tile(8, 2), nl.add, nl.add),
    ),
    "cumulative: op1": ("operation", lambda: cumulative(op1=nl.minimum), lambda: cumulative(op1=nl.logical_or)),
    "cumulative: op0": ("operation", lambda: cumulative(nl.less), lambda: cumulative(nl.bitwise_or)),
    "cumulative: dtype": ("dtype", lambda: cumulative(dtype=I16), lambda: cumulative(dtype=I32)),
    "cumulative: imm1": (
        "registers",
        lambda: cumulative(imm1=1.0, reduce_cmd=CMD.load_reduce),
        lambda: cumulative(imm1=1.0),
    ),
    "cumulative: kept": (
        "registers",
        lambda: (cumulative(), cumulative(reduce_cmd=CMD.reduce)),
        lambda: cumulative(reduce_cmd=CMD.reduce),
    ),
    # reductions
    "tensor_reduce: last axes": (
        "shape",
        lambda: nisa.tensor_reduce(new((8, 2)), nl.add, tile(8, 2, 3), axis=2),
        lambda: nisa.tensor_reduce(new((8, 3)), nl.add, tile(8, 2, 3), axis=1),
    ),
    "tensor_reduce: free axes": (
        "shape",
        lambda: nisa.tensor_reduce(new((8, 1)), nl.add, tile(8, 2, 3), axis=(1, 2)),
        lambda: nisa.tensor_reduce(new((8, 1)), nl.add, tile(8, 2, 3), axis=(0, 1, 2)),
    ),
    "tensor_reduce: result": (
        "shape",
        lambda: nisa.tensor_reduce(new((8, 2)), nl.add, tile(8, 2, 3), axis=2, keepdims=True),
        lambda: nisa.tensor_reduce(new((8, 3)), nl.add, tile(8, 2, 3), axis=2),
    ),
    "tensor_reduce: op": (
        "operation",
        lambda: nisa.tensor_reduce(new((8, 1)), nl.logical_or, tile(8, 2), axis=1),
        lambda: nisa.tensor_reduce(new((8, 1)), nl.less, tile(8, 2), axis=1),
    ),
    "tensor_reduce: bits aren't negated": (
        "operation",
        lambda: nisa.tensor_reduce(new((8, 1), U8), nl.bitwise_or, tile(8, 2, dtype=U8), axis=1),
        lambda: nisa.tensor_reduce(new((8, 1), U8), nl.bitwise_or, tile(8, 2, dtype=U8), axis=1, negate=True),
    ),
    "partition_reduce: in sbuf": (
        "memory-space",
        lambda: nisa.tensor_partition_reduce(new((1, 4)), nl.add, tile(8, 4)),
        lambda: nisa.tensor_partition_reduce(new((1, 4)), nl.add, to_psum(tile(8, 4))),
    ),
    "partition_reduce: one partition": (
        "shape",
        lambda: nisa.tensor_partition_reduce(new((1, 4)), nl.add, tile(8, 4)),
        lambda: nisa.tensor_partition_reduce(new((2, 4)), nl.add, tile(8, 4)),
    ),
    "partition_reduce: op": (
        "operation",
        lambda: nisa.tensor_partition_reduce(new((1, 4)), nl.maximum, tile(8, 4)),
        lambda: nisa.tensor_partition_reduce(new((1, 4)), nl.minimum, tile(8, 4)),
    ),
    "scalar_reduce: op0": ("operation", lambda: tsr(nl.less), lambda: tsr(nl.bitwise_or)),
    "scalar_reduce: reduce_op": ("operation", lambda: tsr(reduce_op=nl.minimum), lambda: tsr(reduce_op=nl.subtract)),
    "scalar_reduce: reverse0": ("operation", lambda: tsr(reverse0=False), lambda: tsr(reverse0=True)),
    "scalar_reduce: loaded": (
        "registers",
        lambda: tsr(reduce_cmd=CMD.load_reduce, reduce_init=1.0),
        lambda: tsr(reduce_cmd=CMD.load_reduce),
    ),
    "scalar_reduce: command": ("operation", lambda: tsr(reduce_cmd=CMD.reset_reduce), lambda: tsr(reduce_cmd=CMD.idle)),
    "scalar_reduce: result": (
        "scalar-operand",
        lambda: tsr(reduce_res=new((8, 1))),
        lambda: tsr(reduce_res=new((8, 2))),
    ),
    "scalar_reduce: a float result": (
        "dtype",
        lambda: tsr(reduce_res=new((8, 1), BF16)),
        lambda: tsr(reduce_res=new((8, 1), I32)),
    ),
    "vector registers after idle": (
        "registers",
        lambda: vector_twice(CMD.reset_reduce, CMD.reduce),
        lambda: (vector_twice(CMD.reset_reduce, CMD.idle), select(reduce_cmd=CMD.reduce)),
    ),
    # activations
    "activation: a function": ("operation", lambda: act(nl.silu), lambda: act(nl.add)),
    "activation: prelu": ("not-modelled", lambda: act(nl.relu), lambda: act(nl.prelu)),
    "activation: range": (
        "activation-range",
        lambda: act(nl.log, tile(8, 4, value=2.0**-64)),
        lambda: act(nl.log, tile(8, 4, value=2.0**-65)),
    ),
    "activation: scale is fp32": (
        "scalar-operand",
        lambda: act(scale=tile(8, 1)),
        lambda: act(scale=tile(8, 1, dtype=BF16)),
    ),
    "activation: bias of any dtype": (
        "scalar-operand",
        lambda: act(bias=tile(8, 1, dtype=BF16)),
        lambda: act(bias=tile(8, 2, dtype=BF16)),
    ),
    "activation: sums": (
        "operation",
        lambda: act(reduce_op=nl.add, reduce_cmd=CMD.reset_reduce),
        lambda: act(reduce_op=nl.maximum, reduce_cmd=CMD.reset_reduce),
    ),
    "activation: names its sum": (
        "operation",
        lambda: act(reduce_op=nl.add, reduce_cmd=CMD.reset_reduce),
        lambda: act(reduce_cmd=CMD.reset_reduce),
    ),
    "activation: no load": (
        "operation",
        lambda: twice(CMD.reduce, CMD.reset),
        lambda: twice(CMD.load_reduce, CMD.reset),
    ),
    "activation: reset first": ("registers", lambda: twice(CMD.reduce, CMD.reset), lambda: twice(CMD.reduce)),
    "activation: the result of a sum": (
        "registers",
        lambda: act(reduce_op=nl.add, reduce_cmd=CMD.reset_reduce, reduce_res=new((8, 1))),
        lambda: act(reduce_op=nl.add, reduce_res=new((8, 1))),
    ),
    "command as an object": (
        "enum-value",
        lambda: act(reduce_op=nl.add, reduce_cmd=CMD.reset),
        lambda: act(reduce_op=nl.add, reduce_cmd=1),
    ),
    # the Tensor engine
    "matmul: 128 columns": (
        "shape",
        lambda: matmul(new((128, 4), F32, PSUM), tile(4, 128), tile(4, 4)),
        lambda: matmul(new((128, 4), F32, PSUM), tile(4, 129), tile(4, 4)),
    ),
    "matmul: 512 columns": (
        "shape",
        lambda: matmul(new((4, 512), F32, PSUM), tile(4, 4), tile(4, 2, 256)),
        lambda: matmul(new((4, 513), F32, PSUM), tile(4, 4), tile(4, 3, 171)),
    ),
    "matmul: one bank": (
        "psum-bank",
        lambda: matmul(new((4, 1024), F32, PSUM)[:, 512:], tile(4, 4), tile(4, 512)),
        lambda: matmul(new((4, 1024), F32, PSUM)[:, 511:1023], tile(4, 4), tile(4, 512)),
    ),
    "matmul: contraction": (
        "shape",
        lambda: matmul(new((4, 4), F32, PSUM), tile(5, 4), tile(5, 4)),
        lambda: matmul(new((4, 4), F32, PSUM), tile(5, 4), tile(4, 4)),
    ),
    "matmul: result": (
        "shape",
        lambda: matmul(new((4, 2, 2), F32, PSUM), tile(5, 4), tile(5, 4)),
        lambda: matmul(new((4, 5), F32, PSUM), tile(5, 4), tile(5, 4)),
    ),
    "matmul: from sbuf": (
        "memory-space",
        lambda: matmul(new((4, 4), F32, PSUM), tile(5, 4), tile(5, 4)),
        lambda: matmul(new((4, 4), F32, PSUM), tile(5, 4), to_psum(tile(5, 4))),
    ),
    "matmul: to psum": (
        "memory-space",
        lambda: matmul(new((4, 4), F32, PSUM), tile(5, 4), tile(5, 4)),
        lambda: matmul(new((4, 4)), tile(5, 4), tile(5, 4)),
    ),
    "matmul: fp32 with fp32": (
        "dtype",
        lambda: matmul(new((4, 4), F32, PSUM), tile(5, 4, dtype=BF16), tile(5, 4, dtype=E4M3)),
        lambda: matmul(new((4, 4), F32, PSUM), tile(5, 4, dtype=BF16), tile(5, 4)),
    ),
    "matmul: floats": (
        "dtype",
        lambda: matmul(new((4, 4), F32, PSUM), tile(5, 4, dtype=BF16), tile(5, 4, dtype=BF16)),
        lambda: matmul(new((4, 4), F32, PSUM), tile(5, 4, dtype=BF16), tile(5, 4, dtype=I8)),
    ),
    "matmul: fp32 result": (
        "target",
        lambda: matmul(new((4, 4), F32, PSUM), tile(5, 4), tile(5, 4)),
        lambda: matmul(new((4, 4), BF16, PSUM), tile(5, 4), tile(5, 4)),
    ),
    "transpose: 32 on vector": (
        "shape",
        lambda: nisa.nc_transpose(new((32, 32)), tile(32, 32)),
        lambda: nisa.nc_transpose(new((33, 32)), tile(32, 33)),
    ),
    "transpose: psum on tensor": (
        "memory-space",
        lambda: nisa.nc_transpose(new((4, 8), F32, PSUM), tile(8, 4), engine=ENGINE.tensor),
        lambda: nisa.nc_transpose(new((4, 8)), tile(8, 4), engine=ENGINE.tensor),
    ),
    "transpose: dtype": (
        "dtype",
        lambda: nisa.nc_transpose(new((4, 8), BF16, PSUM), tile(8, 4, dtype=BF16)),
        lambda: nisa.nc_transpose(new((4, 8), F32, PSUM), tile(8, 4, dtype=BF16)),
    ),
    "transpose: turned": (
        "shape",
        lambda: nisa.nc_transpose(new((4, 8)), tile(8, 4)),
        lambda: nisa.nc_transpose(new((8, 4)), tile(8, 4)),
    ),
    "transpose: aligned": (
        "psum-alignment",
        lambda: nisa.nc_transpose(new((4, 16), BF16, PSUM)[:, 2:10], tile(8, 4, dtype=BF16)),
        lambda: nisa.nc_transpose(new((4, 16), BF16, PSUM)[:, 1:9], tile(8, 4, dtype=BF16)),
    ),
    # shuffles
    "shuffle: dtype": (
        "dtype",
        lambda: shuffle(new((32, 4)), tile(32, 4)),
        lambda: shuffle(new((32, 4), BF16), tile(32, 4)),
    ),
    "shuffle: elements": (
        "shape",
        lambda: shuffle(new((32, 4)), tile(32, 4)),
        lambda: shuffle(new((32, 4)), tile(32, 3)),
    ),
    "shuffle: 32 entries": (
        "shape",
        lambda: shuffle(new((32, 4)), tile(32, 4)),
        lambda: shuffle(new((32, 4)), tile(32, 4), MASK[:31]),
    ),
    "shuffle: within the source": (
        "bounds",
        lambda: shuffle(new((32, 4)), tile(2, 4), [1] * 32),
        lambda: shuffle(new((32, 4)), tile(2, 4), [2] * 32),
    ),
    "shuffle: entries": (
        "bounds",
        lambda: shuffle(tile(32, 4), tile(32, 4), [255] + [31] * 31),
        lambda: shuffle(tile(32, 4), tile(32, 4), [32] * 32),
    ),
    "shuffle: start": (
        "start-partition",
        lambda: shuffle(tile(128, 4)[64:], tile(64, 4)),
        lambda: shuffle(tile(128, 4)[32:65], tile(33, 4), [0] * 32),
    ),
    # selections and searches
    "predicated: mask": (
        "dtype",
        lambda: nisa.tensor_copy_predicated(tile(8, 4), tile(8, 4), tile(8, 4, dtype=U32)),
        lambda: nisa.tensor_copy_predicated(tile(8, 4), tile(8, 4), tile(8, 4, dtype=I32)),
    ),
    "predicated: dtype": (
        "dtype",
        lambda: nisa.tensor_copy_predicated(tile(8, 4), tile(8, 4), tile(8, 4, dtype=U8)),
        lambda: nisa.tensor_copy_predicated(tile(8, 4), tile(8, 4, dtype=BF16), tile(8, 4, dtype=U8)),
    ),
    "predicated: what isn't copied was there": (
        "uninitialised",
        lambda: copy(new((8, 4)), predicated(1)),
        lambda: copy(new((8, 4)), predicated(0)),
    ),
    "select: mask": ("dtype", lambda: select(tile(8, 4, dtype=I16)), lambda: select(tile(8, 4, dtype=U32))),
    "select: dtype": (
        "dtype",
        lambda: select(on_true=tile(8, 4, dtype=I16)),
        lambda: select(on_true=tile(8, 4, dtype=I32)),
    ),
    "select: one in psum": (
        "two-psum-inputs",
        lambda: select(on_true=to_psum(tile(8, 4))),
        lambda: select(to_psum(tile(8, 4, dtype=U8)), to_psum(tile(8, 4))),
    ),
    "select: on_false": ("scalar-operand", lambda: select(on_false=tile(8, 1)), lambda: select(on_false=tile(8, 4))),
    "select: maximum": ("operation", lambda: select(reduce_op=nl.maximum), lambda: select(reduce_op=nl.add)),
    "range: op": ("operation", lambda: ranged(nl.equal), lambda: ranged(nl.not_equal)),
    "range: bounds": ("dtype", lambda: ranged(bound=tile(8, 1)), lambda: ranged(bound=tile(8, 1, dtype=I32))),
    "range: floats": ("dtype", lambda: ranged(data=tile(8, 4, dtype=BF16)), lambda: ranged(data=tile(8, 4, dtype=I8))),
    "range: fill": ("operation", lambda: ranged(on_false_value=-3.4028235e38), lambda: ranged(on_false_value=-1e38)),
    "range: counted": ("bounds", lambda: ranged(range_start=2**24 - 4), lambda: ranged(range_start=2**24 - 3)),
    "max8: eight": ("shape", lambda: nisa.max8(new((8, 8)), tile(8, 8)), lambda: nisa.max8(new((8, 8)), tile(8, 7))),
    "max8: at most": (
        "shape",
        lambda: nisa.max8(new((1, 8)), tile(1, 16384)),
        lambda: nisa.max8(new((1, 8)), tile(1, 16385)),
    ),
    "find: eight": ("shape", lambda: find(), lambda: find(vals=7)),
    "find: dtype": ("dtype", lambda: find(dtype=U16), lambda: find(dtype=I32)),
    "replace: found": (
        "not-modelled",
        lambda: nisa.nc_match_replace8(new((8, 8)), tile(8, 8), tile(8, 8), 0.0, new((8, 8), U32)),
        lambda: nisa.nc_match_replace8(new((8, 8)), tile(8, 8), tile(8, 8, value=2.0), 0.0, new((8, 8), U32)),
    ),
    # statistics
    "bn_stats: 512": (
        "shape",
        lambda: nisa.bn_stats(new((8, 6)), tile(8, 512)),
        lambda: nisa.bn_stats(new((8, 6)), tile(8, 513)),
    ),
    "bn_stats: six": (
        "shape",
        lambda: nisa.bn_stats(new((8, 6)), tile(8, 4)),
        lambda: nisa.bn_stats(new((8, 5)), tile(8, 4)),
    ),
    "bn_aggr: triples": (
        "shape",
        lambda: nisa.bn_aggr(new((8, 2)), tile(8, 9)),
        lambda: nisa.bn_aggr(new((8, 2)), tile(8, 8)),
    ),
    # GpSimd
    "gather: range": (
        "bounds",
        lambda: gather(index=tile(8, 4, dtype=U32, value=1)),
        lambda: gather(index=tile(8, 4, dtype=U32, value=2)),
    ),
    "gather: indices": ("dtype", lambda: gather(), lambda: gather(index=tile(8, 4, dtype=I32))),
    "gather: elements": ("shape", lambda: gather(), lambda: gather(new((8, 3)))),
    "gather: dtype": ("dtype", lambda: gather(), lambda: gather(new((8, 4), BF16))),
    "gather: in sbuf": ("memory-space", lambda: gather(), lambda: gather(data=to_psum(tile(8, 2)))),
    "local: 16 partitions": ("shape", lambda: local(32), lambda: local(24)),
    "local: indices": ("dtype", lambda: local(), lambda: local(dtype=U32)),
    "local: range": ("bounds", lambda: local(index=3), lambda: local(index=4)),
    "local: width": ("shape", lambda: local(num_elem_per_idx=1), lambda: local(num_elem_per_idx=3, out=48)),
    "local: counted in elements": (
        "documents-disagree",
        lambda: local(num_elem_per_idx=1),
        lambda: local(num_elem_per_idx=2, out=32),
    ),
    "local: valid": ("shape", lambda: local(num_valid_indices=16), lambda: local(num_valid_indices=17, out=17)),
    "local: 4096": ("shape", lambda: local(16, 4, 256), lambda: local(16, 4, 257)),
    "iota: pattern": ("shape", lambda: nisa.iota(new((8, 4)), [[1, 4]]), lambda: nisa.iota(new((8, 4)), [[1, 5]])),
    "iota: pairs": (
        "pattern",
        lambda: nisa.iota(new((8, 4)), [[1, 1]] * 3 + [[1, 4]]),
        lambda: nisa.iota(new((8, 4)), [[1, 1]] * 4 + [[1, 4]]),
    ),
    "iota: 32 bits": (
        "scalar-operand",
        lambda: nisa.iota(new((8, 4)), [[1, 4]], offset=2**31 - 1),
        lambda: nisa.iota(new((8, 4)), [[1, 4]], offset=2**31),
    ),
    "iota: in sbuf": (
        "memory-space",
        lambda: nisa.iota(new((8, 4)), [[1, 4]]),
        lambda: nisa.iota(new((8, 4), F32, PSUM), [[1, 4]]),
    ),
    "affine: comparison": (
        "operation",
        lambda: nisa.affine_select(new((8, 4)), [[1, 4]], 0, tile(8, 4), 0.0, nl.less),
        lambda: nisa.affine_select(new((8, 4)), [[1, 4]], 0, tile(8, 4), 0.0, nl.add),
    ),
    "bounds: shape": (
        "shape",
        lambda: nisa.sequence_bounds(new((1, 2, 4)), tile(1, 4)),
        lambda: nisa.sequence_bounds(new((2, 2, 4)), tile(2, 4)),
    ),
    "bounds: dtype": (
        "dtype",
        lambda: nisa.sequence_bounds(new((1, 2, 4), I32), tile(1, 4)),
        lambda: nisa.sequence_bounds(new((1, 2, 4), I16), tile(1, 4)),
    ),
    "nonzero: one more": (
        "shape",
        lambda: nisa.nonzero_with_count(new((8, 5), I32), tile(8, 4)),
        lambda: nisa.nonzero_with_count(new((8, 4), I32), tile(8, 4)),
    ),
    "nonzero: dtype": (
        "dtype",
        lambda: nisa.nonzero_with_count(new((8, 5), I32), tile(8, 4)),
        lambda: nisa.nonzero_with_count(new((8, 5)), tile(8, 4)),
    ),
    # DMA
    "dma: not psum": (
        "memory-space",
        lambda: moved(new((8, 4)), tile(8, 4)),
        lambda: moved(new((8, 4)), to_psum(tile(8, 4))),
    ),
    "dma: elements": ("dma", lambda: moved(new((8, 4)), tile(4, 8)), lambda: moved(new((8, 4)), tile(4, 9))),
    "dma: any partition": (
        "bounds",
        lambda: moved(new((8, 4))[5:8], tile(128, 4)[97:100]),
        lambda: moved(new((8, 4))[5:9], tile(128, 4)[97:101]),
    ),
    "dma: hwdge converts nothing": (
        "dma",
        lambda: moved(new((8, 4)), tile(8, 4), dge_mode=DGE.hwdge),
        lambda: moved(new((8, 4), BF16), tile(8, 4), dge_mode=DGE.hwdge),
    ),
    "dma: hwdge from an engine": (
        "dma",
        lambda: moved(new((8, 4)), tile(8, 4), dge_mode=DGE.hwdge, engine=ENGINE.sync),
        lambda: moved(new((8, 4)), tile(8, 4), dge_mode=DGE.hwdge, engine=ENGINE.vector),
    ),
    "dma: an engine with hwdge": (
        "dma",
        lambda: moved(new((8, 4)), tile(8, 4), dge_mode=DGE.hwdge, engine=ENGINE.scalar),
        lambda: moved(new((8, 4)), tile(8, 4), engine=ENGINE.scalar),
    ),
    "dma: priority": (
        "target",
        lambda: moved(new((8, 4)), tile(8, 4)),
        lambda: moved(new((8, 4)), tile(8, 4), priority=0),
    ),
    "dma: mode as an object": (
        "enum-value",
        lambda: moved(new((8, 4)), tile(8, 4), dge_mode=DGE.none),
        lambda: moved(new((8, 4)), tile(8, 4), dge_mode=3),
    ),
    "dma: a mode": (
        "objects-not-strings",
        lambda: moved(new((8, 4)), tile(8, 4), dge_mode=DGE.none),
        lambda: moved(new((8, 4)), tile(8, 4), dge_mode=4),
    ),
    "dma_transpose: to sbuf": (
        "memory-space",
        lambda: transposed(tile(8, 4), (4, 8)),
        lambda: nisa.dma_transpose(new((4, 8), F32, nl.private_hbm), tile(8, 4)),
    ),
    "dma_transpose: shape": (
        "shape",
        lambda: transposed(tile(8, 4), (4, 8)),
        lambda: transposed(tile(8, 4), (4, 4, 2)),
    ),
    "dma_transpose: axes": (
        "shape",
        lambda: transposed(tile(8, 4, 2), (2, 4, 8), axes=(2, 1, 0)),
        lambda: transposed(tile(8, 4, 2), (8, 2, 4), axes=(0, 2, 1)),
    ),
    "dma_transpose: dtype": (
        "dtype",
        lambda: transposed(tile(8, 4), (4, 8)),
        lambda: nisa.dma_transpose(new((4, 8), BF16), tile(8, 4)),
    ),
    "dma_transpose: 16 rows": (
        "dma",
        lambda: transposed(tile(16, 4, dtype=BF16), (4, 16), dge_mode=DGE.hwdge),
        lambda: transposed(tile(17, 4, dtype=BF16), (4, 17), dge_mode=DGE.hwdge),
    ),
    "dma_transpose: 16 rows in two": (
        "dma",
        lambda: transposed(tile(8, 2, 4, dtype=BF16), (4, 2, 8), dge_mode=DGE.hwdge),
        lambda: transposed(tile(8, 3, 4, dtype=BF16), (4, 3, 8), dge_mode=DGE.hwdge),
    ),
    "dma_transpose: two bytes": (
        "dma",
        lambda: transposed(tile(16, 4, dtype=BF16), (4, 16), dge_mode=DGE.hwdge),
        lambda: transposed(tile(16, 4), (4, 16), dge_mode=DGE.hwdge),
    ),
    "dma_transpose: mode": (
        "dma",
        lambda: transposed(tile(8, 4), (4, 8)),
        lambda: transposed(tile(8, 4), (4, 8), dge_mode=DGE.swdge),
    ),
    "dma_compute: 16 sources": (
        "dma",
        lambda: nisa.dma_compute(new((8, 4)), [tile(8, 4)] * 16, nl.add),
        lambda: nisa.dma_compute(new((8, 4)), [tile(8, 4)] * 17, nl.add),
    ),
    "dma_compute: add": (
        "operation",
        lambda: nisa.dma_compute(new((8, 4)), [tile(8, 4)], nl.add),
        lambda: nisa.dma_compute(new((8, 4)), [tile(8, 4)], nl.maximum),
    ),
    "dma_compute: scales": (
        "dma",
        lambda: nisa.dma_compute(new((8, 4)), [tile(8, 4)], nl.add, [1.0]),
        lambda: nisa.dma_compute(new((8, 4)), [tile(8, 4)], nl.add, [2.0]),
    ),
    # two cores
    "barrier: shared": ("memory-space", lambda: None, lambda: nisa.core_barrier(tile(8, 4), (0, 1))),
    "barrier: both cores": ("shape", lambda: None, lambda: nisa.core_barrier(new((8, 4), F32, HBM), (0,))),
    "sendrecv: in sbuf": (
        "memory-space",
        lambda: None,
        lambda: nisa.sendrecv(to_psum(tile(8, 4)), new((8, 4)), 1, 1, 0),
    ),
    "sendrecv: shape": ("shape", lambda: None, lambda: nisa.sendrecv(tile(8, 4), new((8, 5)), 1, 1, 0)),
    "sendrecv: dtype": ("dtype", lambda: None, lambda: nisa.sendrecv(tile(8, 4), new((8, 4), BF16), 1, 1, 0)),
    "sendrecv: ranks": ("shape", lambda: None, lambda: nisa.sendrecv(tile(8, 4), new((8, 4)), 2, 1, 0)),
    "sendrecv: bytes": (
        "dma",
        lambda: None,
        lambda: nisa.sendrecv(tile(8, 257), new((8, 257)), 1, 1, 0, dma_engine=DMA.gpsimd_dma),
    ),
    # names
    "keywords": (
        "unknown-instruction",
        lambda: copy(new((8, 4)), tile(8, 4), name="copy"),
        lambda: copy(new((8, 4)), tile(8, 4), mask=None),
    ),
    "instructions": ("unknown-instruction", lambda: nisa.max8, lambda: nisa.max9),
}


def predicated(value: int) -> Any:
    made = new((8, 4))
    nisa.tensor_copy_predicated(made, 2.0, tile(8, 4, dtype=U8, value=value))
    return made


def kernel_of(program: Program) -> Any:
    def kernel() -> Any:
        program()
        return to_hbm(tile(8, 4))

    return kernel


@pytest.mark.parametrize("name", TABLE)
def test_a_rule_is_obeyed_narrowly_and_broken_narrowly(name: str) -> None:
    rule, legal, illegal = TABLE[name]
    launch(kernel_of(legal))
    with pytest.raises((NkiRuleError, NkiRuleWarning)) as caught:
        launch(kernel_of(illegal))
    assert caught.value.rule.name == rule
    assert "test_isa_rules.py:" in str(caught.value)


def test_a_broken_rule_names_the_instruction_its_name_and_the_operand() -> None:
    with pytest.raises(NkiRuleError, match=r"tensor_copy 'evict' operand src: 8 partitions of 5 elements"):
        launch(kernel_of(lambda: copy(new((8, 4)), tile(8, 5), name="evict")))


NOT_MODELLED = ("rng", "dropout", "set_rng_seed", "rand_set_state", "rand_get_state", "topk")
OF_TRN3 = ("rand2", "nc_matmul_mx", "quantize_mx")


@pytest.mark.parametrize("name", NOT_MODELLED + OF_TRN3)
def test_instructions_without_a_model_are_recognised(name: str) -> None:
    for target in (hardware.TRN2, hardware.TRN3):
        with pytest.raises(NkiRuleError) as caught:
            launch(kernel_of(lambda: getattr(nisa, name)(dst=None)), target)
        late = name in OF_TRN3 and target is hardware.TRN2
        assert caught.value.rule.name == ("target" if late else "not-modelled") and name in str(caught.value)


def test_trn3_has_its_own_limits() -> None:
    def program() -> Any:
        acc = new((4, 1024), F32, PSUM)
        nisa.nc_matmul(acc, tile(2, 4), tile(2, 1024))
        scaled = new((4, 1024))
        scale(scaled, acc, nl.square, None)
        moved(scaled, scaled, priority=3)
        scale(scaled, scaled, nl.subtract, 1.0, engine=ENGINE.scalar)
        return scaled

    assert np.all(run(program, target=hardware.TRN3) == 3.0)


def test_instructions_return_a_handle_that_orders_them() -> None:
    def kernel() -> Any:
        first = nisa.memset(new((8, 4)), 0.0)
        second = nisa.memset(new((8, 4)), 0.0)
        assert nisa.memset(new((8, 4)), 0.0).depends_on(first, second) is not None
        return to_hbm(tile(8, 4))

    trace = launch(kernel).machines[0].trace
    assert trace.instructions[2].options["depends_on"] == [0, 1]


def test_the_target_is_what_get_nc_version_says() -> None:
    def kernel() -> Any:
        versions.append(nisa.get_nc_version())
        return to_hbm(tile(8, 4))

    versions: list[Any] = []
    for target in (hardware.TRN2, hardware.TRN3):
        launch(kernel, target)
    assert versions == [nisa.nc_version.gen3, nisa.nc_version.gen4] and nisa.get_nc_version() == nisa.nc_version.gen3


def test_constants_have_the_import_path_of_the_library() -> None:
    with interpreter.installed():
        from nki.isa.constants import dge_mode, matmul_perf_mode  # type: ignore[import-not-found]

    assert matmul_perf_mode is nisa.matmul_perf_mode and dge_mode(3) is nisa.dge_mode.none
    assert [member.value for member in ENGINE] == [0, 1, 2, 3, 4, 5, 6] and ENGINE.vector.value == 5


INSTRUCTIONS = [name for name in nisa.__all__ if inspect.isfunction(getattr(nisa, name)) and name.islower()]


def test_every_instruction_takes_a_name_and_says_what_it_does() -> None:
    without = {"get_nc_version", "get_nc_sub_version", *NOT_MODELLED, *OF_TRN3}
    for name in INSTRUCTIONS:
        function = getattr(nisa, name)
        assert function.__doc__ and len(function.__doc__) > 20, name
        if name not in without and not name.startswith("register_"):
            assert "name" in inspect.signature(function).parameters, name


DRY = {name: legal for name, (_, legal, _) in TABLE.items()}


def test_dry_launches_check_the_same_and_compute_nothing() -> None:
    """Each legal program of the table runs on tensors without bytes, and records what it records otherwise."""
    with rules.without("subset", "subset-unclear"):
        for name, program in DRY.items():
            if name.startswith(("replace", "predicated: what")):  # about values
                continue
            wet = interpreter.launch(kernel_of(program), {})
            hollow = interpreter.launch(kernel_of(program), {}, dry=True)
            assert isinstance(hollow.outputs[0], dry.Spec)
            kinds = [
                [
                    (i.op, i.engine, i.options, [(o.shape, o.dtype) for o in i.reads + i.writes])
                    for i in m.trace.instructions
                ]
                for m in (wet.machines[0], hollow.machines[0])
            ]
            assert kinds[0] == kinds[1], name
