"""Elementwise instructions against plain NumPy: every operation, dtype and memory, with special values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isa_programs import (
    BF16,
    F32,
    FLOATS,
    INTS,
    anything,
    flags,
    floats,
    ints,
    new,
    partitions,
    rounded,
    run,
    same,
    seeds,
    sizes,
    to_psum,
    values,
)

from gdn_kernels.interpreter import hardware
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl

ARITHMETIC: dict[str, Any] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": lambda x, y: x == y,
    "not_equal": lambda x, y: x != y,
    "greater": lambda x, y: x > y,
    "greater_equal": lambda x, y: x >= y,
    "less": lambda x, y: x < y,
    "less_equal": lambda x, y: x <= y,
    "logical_and": lambda x, y: (x != 0) & (y != 0),
    "logical_or": lambda x, y: (x != 0) | (y != 0),
    "logical_xor": lambda x, y: (x != 0) ^ (y != 0),
}
ON_VECTOR = sorted(ARITHMETIC)
# Half the draws are of an operation whose operands can't be exchanged.
names_of = st.one_of(st.just("subtract"), st.sampled_from(ON_VECTOR))


def op(name: str) -> Any:
    return getattr(nl, name)


def f32(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(np.float32)


def calculate(name: str, x: Any, y: Any, reverse: bool = False) -> np.ndarray:
    with np.errstate(all="ignore"):
        x, y = (y, x) if reverse else (x, y)
        if name == "power":
            return np.power(x.astype(np.float64), y).astype(np.float32)
        return np.asarray(ARITHMETIC[name](x, y)).astype(np.float32)


@settings(max_examples=40)
@given(P=partitions, N=sizes, source=anything, to=anything, seed=seeds, engine=st.sampled_from(("vector", "gpsimd")))
def test_tensor_copy(P: int, N: int, source: Any, to: Any, seed: int, engine: str) -> None:
    x = values(np.random.default_rng(seed), (P, N), source)

    def program(x: Any) -> Any:
        dst = new((P, N), to)
        nisa.tensor_copy(dst=dst, src=x, engine=getattr(nisa.engine, engine))
        return dst

    found = run(program, x)
    if source == to:
        assert found.tobytes() == x.tobytes()
    else:
        same(found, rounded(f32(x), to))


@settings(max_examples=25)
@given(P=partitions, N=sizes, dtype=anything, seed=seeds)
def test_memset(P: int, N: int, dtype: Any, seed: int) -> None:
    value = values(np.random.default_rng(seed), (), dtype).item() if dtype in INTS else None
    constant = float(np.random.default_rng(seed).choice([0.0, -1.5, 1e-40, np.inf, 3.3e38, np.nan]))

    def program() -> Any:
        dst = new((P, N), dtype)
        nisa.memset(dst=dst, value=constant if value is None else value)
        return dst

    expected = np.full((P, N), value, dtype) if value is not None else rounded(np.full((P, N), constant), dtype)
    same(run(program), expected)


@settings(max_examples=60)
@given(
    P=partitions,
    N=sizes,
    name=names_of,
    dtypes=st.tuples(anything, anything, anything),
    psum=st.sampled_from((None, 0, 1)),
    seed=seeds,
)
def test_tensor_tensor(P: int, N: int, name: str, dtypes: Any, psum: int | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = values(rng, (P, N), dtypes[0]), values(rng, (P, N), dtypes[1])
    y = np.where(rng.random((P, N)) < 0.2, rounded(f32(x), dtypes[1]), y)  # comparisons meet equal values

    def program(*tiles: Any) -> Any:
        left, right = (to_psum(each) if psum == number else each for number, each in enumerate(tiles))
        dst = new((P, N), dtypes[2])
        nisa.tensor_tensor(dst=dst, data1=left, data2=right, op=op(name), engine=nisa.engine.vector)
        return dst

    same(run(program, x, y), rounded(calculate(name, f32(x), f32(y)), dtypes[2]))


@settings(max_examples=25)
@given(name=st.sampled_from(ON_VECTOR), seed=seeds, dtype=st.sampled_from((np.int32, np.uint32)))
def test_32_bit_integers_are_exact_on_gpsimd(name: str, seed: int, dtype: Any) -> None:
    rng = np.random.default_rng(seed)
    x, y = values(rng, (16, 9), dtype), values(rng, (16, 9), dtype)

    def program(x: Any, y: Any) -> Any:
        dst = new((16, 9), dtype)
        nisa.tensor_tensor(dst=dst, data1=x, data2=y, op=op(name))
        return dst

    exact = np.asarray(ARITHMETIC[name](x.astype(object), y.astype(object)))
    expected = np.array([int(v) % 2**32 for v in exact.reshape(-1)], np.uint32).reshape(16, 9)
    assert np.array_equal(run(program, x, y).view(np.uint32), expected)


@settings(max_examples=20)
@given(seed=seeds, dtype=floats)
def test_power_on_gpsimd(seed: int, dtype: Any) -> None:
    rng = np.random.default_rng(seed)
    x, y = values(rng, (8, 12), dtype), values(rng, (8, 12), dtype)

    def program(x: Any, y: Any) -> Any:
        dst = new((8, 12), F32)
        nisa.tensor_tensor(dst=dst, data1=x, data2=y, op=nl.power)
        return dst

    same(run(program, x, y), calculate("power", f32(x), f32(y)))


@settings(max_examples=60)
@given(
    shape=st.sampled_from(((1, 1), (33, 5), (128, 2, 3), (64, 2, 2, 2))),
    names=st.tuples(names_of, st.one_of(st.none(), names_of)),
    dtypes=st.tuples(anything, anything),
    reverse=st.tuples(flags, flags),
    columns=st.tuples(flags, flags),
    seed=seeds,
)
def test_tensor_scalar(shape: Any, names: Any, dtypes: Any, reverse: Any, columns: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, scalars = values(rng, shape, dtypes[0]), [values(rng, (shape[0], 1), F32) for _ in range(2)]

    def program(x: Any, *tiles: Any) -> Any:
        dst = new(shape, dtypes[1])
        first, second = (t if c else float(s[0, 0]) for t, c, s in zip(tiles, columns, scalars, strict=True))
        rest = {"op1": op(names[1]), "operand1": second, "reverse1": reverse[1]} if names[1] else {}
        nisa.tensor_scalar(dst=dst, data=x, op0=op(names[0]), operand0=first, reverse0=reverse[0], **rest)
        return dst

    result = f32(x)
    for name, scalar, column, turned in zip(names, scalars, columns, reverse, strict=True):
        if name is not None:
            result = calculate(
                name, result, (scalar if column else scalar[:1]).reshape(-1, *(1,) * (x.ndim - 1)), turned
            )
    same(run(program, x, *scalars), rounded(result, dtypes[1]))


UNARY = {"abs": (np.abs, hardware.TRN2), "reciprocal": (lambda x: np.float32(1) / x, hardware.TRN2)}
UNARY["square"] = (lambda x: x * x, hardware.TRN3)
UNARY["relu"] = (lambda x: np.maximum(x, 0), hardware.TRN3)


@pytest.mark.parametrize("name", UNARY)
def test_unary_operations_of_tensor_scalar(name: str) -> None:
    x = values(np.random.default_rng(0), (64, 40), F32)
    function, target = UNARY[name]

    def program(x: Any) -> Any:
        dst = new(x.shape)
        nisa.tensor_scalar(dst=dst, data=x, op0=op(name), operand0=0.0, op1=nl.add, operand1=1.0)
        return dst

    with np.errstate(all="ignore"):
        same(run(program, x, target=target), f32(function(x)) + np.float32(1))


def test_rsqrt_of_tensor_scalar_runs_precisely_on_gpsimd() -> None:
    x = np.abs(values(np.random.default_rng(1), (8, 60), F32))

    def program(x: Any) -> Any:
        dst = new(x.shape)
        nisa.tensor_scalar(dst=dst, data=x, op0=nl.rsqrt, operand0=None)
        return dst

    with np.errstate(all="ignore"):
        same(run(program, x), (1 / np.sqrt(x.astype(np.float64))).astype(np.float32))


@pytest.mark.parametrize("name", ("abs_max", "abs_min"))
def test_abs_max_and_min_keep_the_sign_on_trn3(name: str) -> None:
    x, y = np.float32([[-5, 2, -3, 1]]), np.float32([[3, -4, 1, -0.5]])

    def program(x: Any, y: Any) -> Any:
        dst = new(x.shape)
        nisa.tensor_tensor(dst=dst, data1=x, data2=y, op=op(name))
        return dst

    expected = {"abs_max": [[-5, -4, -3, 1]], "abs_min": [[3, 2, 1, -0.5]]}
    same(run(program, x, y, target=hardware.TRN3), np.float32(expected[name]))


BITS: dict[str, Any] = {
    "bitwise_and": lambda x, y, width: x & y,
    "bitwise_or": lambda x, y, width: x | y,
    "bitwise_xor": lambda x, y, width: x ^ y,
    "left_shift": lambda x, y, width: (x << y) % 2**width if y < width else 0,
    "right_shift": lambda x, y, width: x >> y if y < width else 0,
}


def bits(name: str, x: np.ndarray, y: np.ndarray, dtype: Any) -> np.ndarray:
    width = 8 * dtype.itemsize
    unsigned = np.dtype(f"uint{width}")
    pairs = zip(x.reshape(-1).view(unsigned).tolist(), y.reshape(-1).view(unsigned).tolist(), strict=True)
    return np.array([BITS[name](a, b, width) for a, b in pairs], unsigned).reshape(x.shape).view(dtype)


@settings(max_examples=40)
@given(name=st.sampled_from(sorted(BITS)), dtype=ints, seed=seeds, shift=flags)
def test_bit_operations_of_tensor_tensor(name: str, dtype: Any, seed: int, shift: bool) -> None:
    rng = np.random.default_rng(seed)
    x, y = values(rng, (5, 7), dtype), values(rng, (5, 7), dtype)
    y = (np.abs(y) % 34).astype(dtype) if shift else y

    def program(x: Any, y: Any) -> Any:
        dst = new(x.shape, dtype)
        nisa.tensor_tensor(dst=dst, data1=x, data2=y, op=op(name))
        return dst

    assert np.array_equal(run(program, x, y), bits(name, x, y, dtype))


@settings(max_examples=40)
@given(
    names=st.tuples(st.sampled_from(sorted(BITS)), st.sampled_from(sorted(BITS))),
    dtype=ints,
    seed=seeds,
    column=flags,
    reverse=flags,
    small=flags,
)
def test_bit_operations_of_tensor_scalar(
    names: Any, dtype: Any, seed: int, column: bool, reverse: bool, small: bool
) -> None:
    rng = np.random.default_rng(seed)
    x, operand = values(rng, (5, 7), dtype), values(rng, (5, 1), dtype)
    if small:  # shifts that leave something
        x, operand = (np.abs(x) % 9).astype(dtype), (np.abs(operand) % 9).astype(dtype)
    wide = np.broadcast_to(operand if column else operand[:1], x.shape).copy()
    constant = int(operand.view(np.dtype(f"int{8 * dtype.itemsize}"))[0, 0])

    def program(x: Any, operand: Any) -> Any:
        dst = new(x.shape, dtype)
        first = operand if column else constant
        nisa.tensor_scalar(dst, x, op(names[0]), first, reverse0=reverse, op1=op(names[1]), operand1=3)
        return dst

    left, right = (wide, x) if reverse else (x, wide)
    expected = bits(names[1], bits(names[0], left, right, dtype), np.full(x.shape, 3, dtype), dtype)
    assert np.array_equal(run(program, x, operand), expected)


@pytest.mark.parametrize("dtype", INTS)
def test_invert(dtype: Any) -> None:
    x = values(np.random.default_rng(2), (3, 5), dtype)

    def program(x: Any) -> Any:
        dst = new(x.shape, dtype)
        nisa.tensor_scalar(dst=dst, data=x, op0=nl.invert, operand0=None)
        return dst

    assert np.array_equal(run(program, x), ~x)


@settings(max_examples=50)
@given(
    P=partitions,
    N=sizes,
    names=st.tuples(names_of, names_of),
    dtypes=st.tuples(floats, floats, floats),
    reverse=st.tuples(flags, flags),
    column=flags,
    seed=seeds,
)
def test_scalar_tensor_tensor(P: int, N: int, names: Any, dtypes: Any, reverse: Any, column: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, scalar, y = values(rng, (P, N), dtypes[0]), values(rng, (P, 1), F32), values(rng, (P, N), dtypes[1])

    def program(x: Any, scalar: Any, y: Any) -> Any:
        dst = new((P, N), dtypes[2])
        nisa.scalar_tensor_tensor(
            dst=dst,
            data=to_psum(x),
            op0=op(names[0]),
            operand0=scalar if column else float(values_of[0, 0]),
            op1=op(names[1]),
            operand1=y,
            reverse0=reverse[0],
            reverse1=reverse[1],
        )
        return dst

    values_of = scalar
    first = calculate(names[0], f32(x), scalar if column else scalar[:1], reverse[0])
    same(run(program, x, scalar, y), rounded(calculate(names[1], first, f32(y), reverse[1]), dtypes[2]))


@settings(max_examples=20)
@given(P=partitions, N=sizes, source=floats, to=floats, seed=seeds)
def test_reciprocal(P: int, N: int, source: Any, to: Any, seed: int) -> None:
    x = values(np.random.default_rng(seed), (P, N), source)

    def program(x: Any) -> Any:
        dst = new((P, N), to)
        nisa.reciprocal(dst=dst, data=x)
        return dst

    with np.errstate(all="ignore"):
        same(run(program, x), rounded(np.float32(1) / f32(x), to))


@pytest.mark.parametrize("dtype", (*FLOATS, *INTS))
def test_rounding_to_every_dtype_is_that_of_ml_dtypes_at_the_halves(dtype: Any) -> None:
    """Every finite bfloat16, and what lies half way to the next."""
    x = np.arange(2**16, dtype=np.uint32) << 16
    x = np.concatenate([x, x | 0x8000, x | 0x7FFF, x | 0x8001]).astype(np.uint32).view(np.float32).reshape(128, -1)

    def program(x: Any) -> Any:
        dst = new(x.shape, dtype)
        nisa.tensor_copy(dst=dst, src=x)
        return dst

    same(run(program, x), rounded(x, dtype))


def test_views_of_other_shapes_and_broadcasts_work_as_operands() -> None:
    rng = np.random.default_rng(3)
    x, y = values(rng, (64, 4, 6), F32, special=False), values(rng, (64, 4), BF16, special=False)

    def program(x: Any, y: Any) -> Any:
        dst = new((64, 24))
        nisa.tensor_tensor(dst=dst, data1=x, data2=y.expand_dim(2).broadcast(2, 6), op=nl.multiply)
        nisa.tensor_tensor(dst=dst, data1=dst, data2=x.permute((0, 2, 1)), op=nl.add)
        nisa.tensor_tensor(dst=x[:, 1, :], data1=x[:, 1, :], data2=dst[:, 0:6], op=nl.add)  # in place
        return dst, x

    product = (x * f32(y)[:, :, None]).reshape(64, 24) + x.transpose(0, 2, 1).reshape(64, 24)
    changed = x.copy()
    changed[:, 1] += product[:, :6]
    found = run(program, x, y)
    same(found[0], product)
    same(found[1], changed)
