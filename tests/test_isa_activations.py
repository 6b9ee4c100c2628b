"""Activations against independent formulas, their valid intervals, and the Scalar engine's running sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isa_programs import (
    BF16,
    F32,
    anything,
    flags,
    floats,
    launch,
    new,
    partitions,
    rounded,
    run,
    same,
    seeds,
    sizes,
    tile,
    to_hbm,
    values,
)

from gdn_kernels.interpreter import NkiRuleError, hardware
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl

CMD = nisa.reduce_cmd


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def softplus(x: float) -> float:
    return x if x > 40 else math.log1p(math.exp(x))


def derivative(function: Any) -> Any:
    """By a central difference with a step that leaves nine digits."""
    step = 1e-4
    return lambda x: (
        (8 * (function(x + step) - function(x - step)) - function(x + 2 * step) + function(x - 2 * step)) / (12 * step)
    )


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# name: the function of one float, its domain, the relative and absolute error allowed
FUNCTIONS: dict[str, tuple[Any, float, float, float]] = {
    "copy": (lambda x: x, -80, 80, 0),
    "square": (lambda x: x * x, -80, 80, 0),
    "abs": (abs, -80, 80, 0),
    "sign": (lambda x: (x > 0) - (x < 0), -80, 80, 0),
    "relu": (lambda x: max(x, 0), -80, 80, 0),
    "exp": (math.exp, -80, 80, 0),
    "tanh": (math.tanh, -20, 20, 0),
    "sigmoid": (sigmoid, -80, 80, 0),
    "silu": (lambda x: x * sigmoid(x), -80, 80, 0),
    "softplus": (softplus, -80, 80, 0),
    "mish": (lambda x: x * math.tanh(softplus(x)), -80, 80, 0),
    "gelu": (lambda x: x * cdf(x), -30, 30, 0),
    "gelu_apprx_tanh": (gelu_tanh, -3, 30, 1e-13),
    "gelu_apprx_sigmoid": (lambda x: x * sigmoid(1.702 * x), -40, 40, 0),
    "erf": (math.erf, -5, 5, 0),
    "erf_dx": (lambda x: 2 / math.sqrt(math.pi) * math.exp(-x * x), -8, 8, 0),
    "silu_dx": (derivative(lambda x: x * sigmoid(x)), -20, 20, 1e-8),
    "gelu_dx": (derivative(lambda x: x * cdf(x)), -8, 8, 1e-8),
    "gelu_apprx_sigmoid_dx": (derivative(lambda x: x * sigmoid(1.702 * x)), -12, 12, 1e-8),
    "sin": (math.sin, -math.pi, math.pi, 0),
    "arctan": (math.atan, -math.pi / 2, math.pi / 2, 0),
    "log": (math.log, 2.0**-64, 2.0**64, 0),
    "sqrt": (math.sqrt, 2.0**-116, 2.0**118, 0),
    "rsqrt": (lambda x: x**-0.5, 2.0**-87, 2.0**97, 0),
    "reciprocal": (lambda x: 1 / x, 2.0**-42, 2.0**42, 0),
}


def activate(name: str, x: np.ndarray, to: Any = F32, **options: Any) -> np.ndarray:
    def program(x: Any) -> Any:
        dst = new(x.shape, to)
        nisa.activation(dst=dst, op=getattr(nl, name), data=x, **options)
        return dst

    return run(program, x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_is_the_function_rounded_once(name: str) -> None:
    function, low, high, absolute = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    x = np.exp2(rng.uniform(np.log2(low), np.log2(high), (16, 40))) if low > 0 else rng.uniform(low, high, (16, 40))
    x = np.clip(x.astype(np.float32), np.float32(low), np.float32(high))
    exact = np.vectorize(function, otypes=[float])(x.astype(np.float64))
    found = activate(name, x)
    assert np.all(np.abs(found - exact) <= np.spacing(np.abs(exact).astype(np.float32)) * 0.51 + absolute)


LIMITS = {
    "relu": (0, np.inf),
    "sigmoid": (0, 1),
    "silu": (0, np.inf),
    "silu_dx": (0, 1),
    "softplus": (0, np.inf),
    "mish": (0, np.inf),
    "gelu": (0, np.inf),
    "gelu_dx": (0, 1),
    "gelu_apprx_tanh": (0, np.inf),
    "gelu_apprx_sigmoid": (0, np.inf),
    "gelu_apprx_sigmoid_dx": (0, 1),
    "tanh": (-1, 1),
    "erf": (-1, 1),
    "erf_dx": (0, 0),
    "exp": (0, np.inf),
    "sign": (-1, 1),
    "abs": (np.inf, np.inf),
    "square": (np.inf, np.inf),
}


@pytest.mark.parametrize("name", LIMITS)
def test_functions_of_all_numbers_have_their_limits(name: str) -> None:
    found = activate(name, np.float32([[-np.inf, np.inf, -3e38, 3e38, np.nan]]))[0]
    assert found[:2].tolist() == list(LIMITS[name])
    finite = [{np.inf: 3e38}.get(limit, limit) for limit in LIMITS[name]]
    assert all(
        np.isclose(f, w) or (name in ("exp", "square") and f == np.inf) for f, w in zip(found[2:4], finite, strict=True)
    )
    assert np.isnan(found[4])


@pytest.mark.parametrize("name", ("sin", "arctan", "log", "sqrt", "rsqrt", "reciprocal"))
@pytest.mark.parametrize("side", (0, 1))
def test_the_valid_interval_is_closed_and_what_lies_outside_is_refused(name: str, side: int) -> None:
    edge = np.float32(FUNCTIONS[name][1 + side])
    outward = np.float32(-np.inf if side == 0 else np.inf)
    activate(name, np.full((2, 3), edge))
    for outside in (np.nextafter(edge, outward), np.float32(np.nan)):
        with pytest.raises(NkiRuleError, match="activation-range"):
            activate(name, np.float32([[edge, outside]]))


def test_a_negative_reciprocal_is_valid_by_its_magnitude() -> None:
    assert activate("reciprocal", np.float32([[-4, 2]])).tolist() == [[-0.25, 0.5]]


@settings(max_examples=40)
@given(
    P=partitions,
    N=sizes,
    dtypes=st.tuples(anything, anything, anything),
    columns=st.tuples(flags, flags),
    biased=flags,
    seed=seeds,
)
def test_scale_and_bias_are_applied_in_fp32(P: int, N: int, dtypes: Any, columns: Any, biased: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, scale, bias = values(rng, (P, N), dtypes[0]), values(rng, (P, 1), F32), values(rng, (P, 1), dtypes[1])
    constant = float(values(rng, (), F32))

    def program(x: Any, *tiles: Any) -> Any:
        dst = new((P, N), dtypes[2])
        options = {"bias": tiles[1] if columns[1] else constant} if biased else {}
        nisa.activation(dst, nl.copy, x, scale=tiles[0] if columns[0] else constant, **options)
        return dst

    with np.errstate(all="ignore"):
        result = x.astype(np.float32) * (scale if columns[0] else np.float32(constant))
        if biased:
            result = result + (bias.astype(np.float32) if columns[1] else np.float32(constant))
    same(run(program, x, scale, bias), rounded(result, dtypes[2]))


def left_to_right(x: np.ndarray) -> np.ndarray:
    total = x[:, 0].copy()
    with np.errstate(all="ignore"):
        for column in range(1, x.shape[1]):
            total = total + x[:, column]
    return total[:, None]


@settings(max_examples=25)
@given(P=partitions, N=st.integers(1, 70), dtype=floats, seed=seeds)
def test_running_sums(P: int, N: int, dtype: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = (values(rng, (P, N), dtype, special=False) for _ in range(2))

    def program(x: Any, y: Any) -> Any:
        dst, first, both, again, cleared = new((P, N), dtype), new((P, 1)), new((P, 1), BF16), new((P, 1)), new((P, 1))
        options = {"dst": dst, "op": nl.square, "reduce_op": nl.add}
        nisa.activation(data=x, reduce_cmd=CMD.reset_reduce, reduce_res=first, **options)
        nisa.activation(data=y, reduce_cmd=CMD.reduce, **options)
        nisa.activation(dst=dst, op=nl.exp, data=x, scale=0.0)  # idle leaves the registers alone
        nisa.activation(dst=dst, op=nl.copy, data=x, reduce_res=both)
        nisa.activation_reduce(dst=dst, op=nl.copy, data=y, reduce_op=nl.add, reduce_res=again)
        nisa.activation(dst=dst, op=nl.copy, data=x, reduce_cmd=CMD.reset, reduce_res=cleared)
        return first, both, again, cleared

    squares = [np.square(each.astype(np.float32)) for each in (x, y)]
    sums = [left_to_right(square) for square in squares]
    found = run(program, x, y)
    same(found[0], sums[0])
    same(found[1], rounded(sums[0] + sums[1], BF16))
    same(found[2], left_to_right(y.astype(np.float32)))
    same(found[3], np.zeros((P, 1), np.float32))


def test_registers_belong_to_lanes() -> None:
    def program() -> Any:
        x, total = tile(128, 4), new((128, 1))
        for start, cmd in ((0, CMD.reset_reduce), (64, CMD.reset_reduce), (0, CMD.reduce)):
            half = slice(start, start + 64)
            nisa.activation(new((64, 4)), nl.copy, x[half], reduce_op=nl.add, reduce_cmd=cmd, reduce_res=total[half])
        return total

    assert run(program).tolist() == [[8.0]] * 64 + [[4.0]] * 64


def test_dst_and_the_sum_may_share_a_tile() -> None:
    def program(x: Any) -> Any:
        nisa.activation_reduce(dst=x[:, 0:3], op=nl.copy, data=x[:, 0:3], reduce_op=nl.add, reduce_res=x[:, 3:4])
        return x

    assert run(program, np.float32([[1, 2, 3, 9]])).tolist() == [[1, 2, 3, 6]]


@settings(max_examples=15)
@given(seed=seeds, cmd=st.sampled_from(("reset_reduce", "load_reduce")), N=st.integers(1, 40))
def test_exponential_of_trn3(seed: int, cmd: str, N: int) -> None:
    rng = np.random.default_rng(seed)
    x, top, init = (rng.standard_normal(shape).astype(np.float32) for shape in ((20, N), (20, 1), (20, 1)))

    def program(x: Any, top: Any, init: Any) -> Any:
        dst, total = new(x.shape), new((20, 1))
        extra = {"reduce_init": init} if cmd == "load_reduce" else {}
        nisa.exponential(dst=dst, src=x, max_value=top, reduce_cmd=getattr(CMD, cmd), **extra)
        nisa.exponential(dst=dst, src=x, max_value=top, reduce_cmd=CMD.reduce, reduce_res=total)
        return dst, total

    dst, total = run(program, x, top, init, target=hardware.TRN3)
    y = np.exp((x - top).astype(np.float64)).astype(np.float32)
    same(dst, y)
    start = init if cmd == "load_reduce" else np.zeros_like(init)
    same(total, (start + left_to_right(y)) + left_to_right(y))


def test_activate2_of_trn3() -> None:
    x = values(np.random.default_rng(4), (8, 20), F32, special=False)

    def program(x: Any) -> Any:
        one, two, top = new(x.shape), new(x.shape), new((8, 1))
        nisa.activate2(one, nl.prelu, x, 2.0, 0.5, nl.multiply, nl.subtract, relu_param=0.1, reverse1=True)
        nisa.activate2(two, nl.copy, x, 1.0, 0.0, nl.subtract, nl.bypass, reduce_op=nl.maximum,
                       reduce_cmd=CMD.reset_reduce, reduce_res=top)  # fmt: skip
        return one, two, top

    one, two, top = run(program, x, target=hardware.TRN3)
    y = np.float32(0.5) - x * np.float32(2)
    same(one, np.where(y > 0, y, y * np.float32(0.1)))
    same(two, x - np.float32(1))
    same(top, (x - np.float32(1)).max(axis=1, keepdims=True))


@pytest.mark.parametrize("name", ("exponential", "activate2"))
def test_instructions_of_trn3_are_refused_on_trn2(name: str) -> None:
    def kernel() -> Any:
        args = (new((8, 4)), tile(8, 4)) if name == "exponential" else (
            new((8, 4)), nl.copy, tile(8, 4), 1.0, 0.0, nl.bypass, nl.bypass)  # fmt: skip
        getattr(nisa, name)(*args)
        return to_hbm(tile(8, 4))

    with pytest.raises(NkiRuleError, match=f"{name} needs trn3, the target is trn2"):
        launch(kernel)
