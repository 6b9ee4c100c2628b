"""`nki.language`: what a kernel makes, asks and calls besides instructions."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from gdn_kernels import interpreter
from gdn_kernels.interpreter import NkiRuleError, NkiRuleWarning, hardware
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl
from gdn_kernels.interpreter.alu import OPS

TRN3 = hardware.TRN3


def run(kernel: Callable[..., Any], *, target: Any = hardware.TRN2, cores: int = 1, **arguments: Any) -> Any:
    result = interpreter.launch(kernel, arguments, cores, target)
    return result.outputs[0] if result.single else result.outputs


def broken(kernel: Callable[..., Any], target: Any = hardware.TRN2, **arguments: Any) -> NkiRuleError:
    with pytest.raises(NkiRuleError) as caught:
        run(kernel, target=target, **arguments)
    return caught.value


def to_hbm(tile: Any) -> Any:
    if tile.buffer == nl.psum:
        tile = nl.copy(tile)
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


# ---- dtypes ----

NAMES = [
    *("int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "tfloat32"),
    *("float8_e4m3", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu"),
    *("float4_e2m1fn_x4", "float8_e4m3fn_x4", "float8_e5m2_x4"),
]


def test_every_dtype_has_its_name_and_can_be_a_key() -> None:
    assert [str(getattr(nl, name)) for name in NAMES] == NAMES
    assert len({getattr(nl, name): name for name in (*NAMES, "bool_")}) == len(NAMES) + 1
    assert nl.float32 == np.dtype(np.float32) != nl.tfloat32


def allocate(dtype: Any) -> Any:
    return to_hbm(nl.zeros((4, 8), dtype=dtype))


@pytest.mark.parametrize(
    ("name", "on_trn2", "on_trn3"),
    [
        ("float8_e4m3", None, None),
        ("float8_e5m2", None, None),
        ("float8_e4m3fn", "target", None),
        ("float8_e8m0fnu", "target", None),
        ("float4_e2m1fn_x4", "target", "not-modelled"),
        ("float8_e4m3fn_x4", "target", "not-modelled"),
        ("tfloat32", "not-modelled", "not-modelled"),
    ],
)
def test_a_dtype_belongs_to_a_target(name: str, on_trn2: str | None, on_trn3: str | None) -> None:
    for target, rule in ((hardware.TRN2, on_trn2), (TRN3, on_trn3)):
        if rule is None:
            assert run(allocate, target=target, dtype=getattr(nl, name)).dtype == getattr(nl, name)
        else:
            assert broken(allocate, target, dtype=getattr(nl, name)).rule.name == rule


@pytest.mark.parametrize(
    ("dtype", "rule"), [("float32", "objects-not-strings"), (np.dtype(np.float64), "dtype"), (3, "objects-not-strings")]
)
def test_what_is_no_dtype(dtype: Any, rule: str) -> None:
    assert broken(allocate, dtype=dtype).rule.name == rule


def test_arguments_have_no_64_bit_types() -> None:
    assert broken(to_hbm, tile=np.zeros((4, 4))).rule.name == "dtype"
    assert broken(to_hbm, tile=np.zeros((4, 4), np.int64)).rule.name == "dtype"


# ---- tensors a kernel makes ----


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm])
@pytest.mark.parametrize("dtype", [nl.float32, nl.bfloat16, nl.int32])
def test_filled_tensors(buffer: Any, dtype: Any) -> None:
    def kernel(buffer: Any, dtype: Any) -> Any:
        ones = nl.ones((6, 5), dtype, buffer=buffer)
        made = nl.zeros((6, 5), dtype, buffer=buffer), nl.full((6, 5), 3, dtype, buffer=buffer), nl.zeros_like(ones)
        results = []
        for tensor in (ones, *made, nl.full((5, 6), 7, dtype)):
            assert tensor.dtype == dtype and (tensor.buffer == buffer or tensor.shape == (5, 6))
            results.append(tensor if tensor.buffer == nl.shared_hbm else to_hbm(tensor))
        return results

    ones, zeros, threes, zeros_again, sevens = run(kernel, buffer=buffer, dtype=dtype)
    assert (ones == 1).all() and (zeros == 0).all() and (threes == 3).all() and (zeros_again == 0).all()
    assert (sevens == 7).all()


def test_an_uninitialised_tensor_is_like_another_but_holds_nothing() -> None:
    def kernel() -> Any:
        like = nl.empty_like(nl.zeros((4, 4), dtype=nl.bfloat16, buffer=nl.psum))
        assert (like.shape, like.dtype, like.buffer) == ((4, 4), nl.bfloat16, nl.psum)
        return to_hbm(like)

    assert broken(kernel).rule.name == "uninitialised"


def test_constants(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.save(tmp_path / "values.npy", values)

    def kernel(path: str) -> Any:
        identity = nl.shared_identity_matrix(4, dtype=nl.bfloat16)
        own = nl.ndarray((4, 4), dtype=nl.float32)
        assert nl.shared_identity_matrix(4, dst=own) == own
        return nl.shared_constant(values), to_hbm(nl.load(nl.shared_constant(path))), to_hbm(identity), to_hbm(own)

    given_array, from_file, identity, own = run(kernel, path=str(tmp_path / "values.npy"))
    assert np.array_equal(given_array, values) and np.array_equal(from_file, values)
    assert not np.shares_memory(given_array, values)
    assert np.array_equal(identity, np.eye(4)) and np.array_equal(own, np.eye(4)) and identity.dtype == nl.bfloat16


def test_ndarray_can_stand_in_an_annotation() -> None:
    assert typing.get_args(nl.ndarray | None) and typing.get_args(typing.Optional[nl.ndarray])  # noqa: UP045
    assert list[nl.ndarray] and typing.Union[int, nl.ndarray]  # noqa: UP007


MISUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "buffer by name": ("objects-not-strings", lambda: nl.ndarray((4, 4), dtype=nl.float32, buffer="sbuf")),
    "a size for a shape": ("argument", lambda: nl.ndarray(4, dtype=nl.float32)),
    "no size": ("argument", lambda: nl.ndarray((4, 0), dtype=nl.float32)),
    "a list for a constant": ("argument", lambda: nl.shared_constant([1.0])),
    "a 64-bit constant": ("dtype", lambda: nl.shared_constant(np.zeros(3))),
    "an identity of another size": ("shape", lambda: nl.shared_identity_matrix(4, dst=nl.zeros((8, 8), nl.int8))),
    "second axis": ("argument", lambda: nl.program_id(1)),
    "unknown name": ("unknown-instruction", lambda: nl.arange(4)),
    "unknown limit": ("unknown-instruction", lambda: nl.tile_size.sbuf_banks),
    "unknown instruction": ("unknown-instruction", lambda: nisa.tensor_copy_dynamic_src),
    "random numbers": ("not-modelled", lambda: nl.rand((4, 4), nl.float32)),
    "division": ("operation", lambda: nl.divide(nl.ones((4, 4), nl.float32), 2.0)),
    "printing PSUM": ("memory-space", lambda: nl.device_print("x", nl.zeros((4, 4), nl.float32, buffer=nl.psum))),
    "a number to exp": ("objects-not-strings", lambda: nl.exp(1.0)),
    "an HBM tensor to exp": ("memory-space", lambda: nl.exp(nl.zeros((4, 4), nl.float32, buffer=nl.hbm))),
    "an op without a function": ("operation", lambda: nl.average(nl.ones((4, 4), nl.float32))),
    "tiles of two shapes": ("shape", lambda: nl.add(nl.ones((4, 4), nl.float32), nl.ones((4, 1), nl.float32))),
    "the partition axis": ("shape", lambda: nl.sum(nl.ones((4, 4), nl.float32), axis=0)),
    "an axis before the last": ("shape", lambda: nl.sum(nl.ones((4, 4, 4), nl.float32), axis=1)),
    "loading a tile": ("memory-space", lambda: nl.load(nl.ones((4, 4), nl.float32))),
    "storing PSUM": (
        "memory-space",
        lambda: nl.store(nl.ndarray((4, 4), nl.float32, buffer=nl.hbm), nl.ones((4, 4), nl.float32, buffer=nl.psum)),
    ),
    "broadcast of 2": ("shape", lambda: nl.broadcast_to(nl.ones((2, 4), nl.float32), (4, 4))),
    "three dimensions transposed": ("shape", lambda: nl.transpose(nl.ones((4, 4, 4), nl.float32))),
}


@pytest.mark.parametrize("name", MISUSED)
def test_misuse_is_named(name: str) -> None:
    rule, misuse = MISUSED[name]

    def kernel() -> Any:
        misuse()
        return to_hbm(nl.ones((4, 4), nl.float32))

    with interpreter.rules.without("subset"):
        assert broken(kernel).rule.name == rule


# ---- manual placement ----


def place(first: Any, second: Any, psum: bool, interleaved: bool) -> Any:
    """Two tiles at addresses; interleaved, both are in use at once."""
    buffer = nl.psum if psum else nl.sbuf
    tiles = []
    for address in (first, second):
        tiles.append(nl.ndarray((32, 128), dtype=nl.float32, buffer=buffer, address=address))
    out = nl.ndarray((32, 128), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=tiles[0], value=1.0)
    if interleaved:
        nisa.memset(dst=tiles[1], value=2.0)
    nisa.tensor_copy(dst=out, src=tiles[0])
    if not interleaved:
        nisa.memset(dst=tiles[1], value=2.0)
    nisa.tensor_copy(dst=out, src=tiles[1])
    return to_hbm(out)


@pytest.mark.parametrize(
    ("first", "second", "psum", "interleaved", "legal"),
    [
        ((0, 0), (0, 512), False, True, True),
        ((0, 0), (0, 508), False, True, False),
        ((0, 0), (0, 508), False, False, True),  # the first is no longer in use
        ((0, 0), (32, 0), False, True, True),  # the same bytes of other partitions
        ((0, 0), (96, 512), False, True, True),
        ((0, 0), (97, 512), False, True, False),
        ((0, 0), (0, 229376 - 512), False, True, True),
        ((0, 0), (0, 229376 - 508), False, True, False),
        ((0, 0), (0, 514), False, True, False),  # no multiple of the element
        ((0, 0), (0, 2048), True, True, True),
        ((0, 0), (0, 2048 * 8), True, True, False),
        ((0, 0), (0, 512), True, True, False),  # a PSUM tile begins at a bank
    ],
)
def test_a_placed_tile_is_aligned_in_bounds_and_alone(
    first: Any, second: Any, psum: bool, interleaved: bool, legal: bool
) -> None:
    arguments = {"first": first, "second": second, "psum": psum, "interleaved": interleaved}
    if legal:
        assert (run(place, **arguments) == 2).all()
    else:
        assert broken(place, **arguments).rule.name == "placement"


def test_a_tile_placed_off_a_legal_partition_is_no_engine_operand() -> None:
    arguments = {"first": (0, 0), "second": (33, 0), "psum": False, "interleaved": True}
    assert broken(place, **arguments).rule.name == "start-partition"


# ---- the grid, limits, ranges ----


def test_limits_and_grid() -> None:
    def kernel() -> Any:
        size = nl.tile_size
        limits = (size.pmax, size.gemm_stationary_fmax, size.gemm_moving_fmax, size.psum_bank_fmax, size.psum_fmax)
        assert limits == (128, 128, 512, 512, 512)
        assert size.psum_num_banks * size.psum_bank_fmax_bytes == 16384 and size.bn_stats_fmax == 512
        assert size.total_available_sbuf_size == size.sbuf_fmax_bytes == size.sbuf_fmax * 4
        assert size.sbuf_size_bytes == size.sbuf_fmax_bytes * 128
        assert nl.is_hbm(nl.hbm) and nl.is_hbm(nl.shared_hbm) and nl.is_sbuf(nl.sbuf) and nl.is_psum(nl.psum)
        assert nl.is_on_chip(nl.psum) and not nl.is_on_chip(nl.hbm) and nl.hbm == nl.private_hbm
        out = nl.ndarray((2, 4), dtype=nl.int32, buffer=nl.shared_hbm)
        for row in nl.affine_range(nl.program_id(0), 2, nl.num_programs(axes=0)):
            for _ in nl.sequential_range(1):
                tile = nl.full((1, 4), nl.program_ndim(), dtype=nl.int32)
                nisa.dma_copy(dst=out[row : row + 1], src=tile)
        with nl.no_reorder():
            nl.device_print("tile", tile)
        return out

    assert (run(kernel) == 0).all()
    assert (run(kernel, cores=2) == 1).all()


# ---- loops on the device ----


def sum_of_rows(x: Any, count: Any) -> Any:
    """Adds up `count` rows of x with a loop whose bound only the device knows."""
    total = nl.zeros((1, x.shape[1]), dtype=nl.float32)
    row = nl.ndarray((1, x.shape[1]), dtype=nl.float32)
    bound = nisa.register_alloc()
    nisa.register_load(bound, nl.load(count))

    def body(i: Any) -> None:
        nisa.dma_copy(dst=row, src=x.select(0, i))
        nisa.tensor_tensor(dst=total, data1=total, data2=row, op=nl.add)

    nl.fori_loop(1, bound, body, step=2)
    return to_hbm(total)


def count_down(count: Any) -> Any:
    counter, steps = nl.load(count), nl.zeros((1, 1), dtype=nl.int32)
    register = nisa.register_alloc()
    nisa.register_load(register, counter)

    def body(r: Any) -> Any:
        nisa.tensor_scalar(dst=steps, data=steps, op0=nl.add, operand0=1)
        nisa.tensor_scalar(dst=counter, data=counter, op0=nl.subtract, operand0=1)
        nisa.register_load(r, counter)
        return r

    nl.while_loop(register, body)
    return to_hbm(steps)


def choose(flag: Any) -> Any:
    tile = nl.zeros((1, 4), dtype=nl.float32)
    register = nisa.register_alloc()
    nisa.register_load(register, nl.load(flag))

    def fill() -> None:
        nisa.memset(dst=tile, value=1.0)

    nl.if_else(register, fill)
    return to_hbm(tile)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_loops_and_conditions_with_run_time_values(count: int) -> None:
    x, number = np.arange(20, dtype=np.float32).reshape(5, 4), np.full((1, 1), count, np.int32)
    assert np.array_equal(run(sum_of_rows, x=x, count=number)[0], x[1:count:2].sum(0))
    assert run(count_down, count=number).item() == count
    assert (run(choose, flag=number) == (count != 0)).all()


def test_registers_move_and_store() -> None:
    def kernel() -> Any:
        a, b = nisa.register_alloc(7), nisa.register_alloc()
        nisa.register_move(b, a)
        nisa.register_move(a, -1)
        tile = nl.ndarray((1, 2), dtype=nl.int32)
        nisa.register_store(tile[:, 0:1], a)
        nisa.register_store(tile[:, 1:2], b)
        return to_hbm(tile)

    assert run(kernel).tolist() == [[-1, 7]]


def old_loop(x: Any) -> Any:
    tile = nl.load(x)
    for _ in nl.dynamic_range(nisa.register_alloc(3)):
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    return to_hbm(tile)


def old_while(x: Any) -> Any:
    tile, left = nl.load(x), nl.full((1, 1), 3, dtype=nl.int32)
    register = nisa.register_alloc(3)
    while register:
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
        nisa.tensor_scalar(dst=left, data=left, op0=nl.subtract, operand0=1)
        nisa.register_load(register, left)
    return to_hbm(tile)


@pytest.mark.parametrize("kernel", [old_loop, old_while])
def test_loops_that_later_versions_dropped_run_with_a_warning(kernel: Any) -> None:
    x = np.zeros((4, 4), np.float32)
    with pytest.warns(NkiRuleWarning, match="dynamic-loop"):
        assert (run(kernel, x=x) == 3).all()


def loop_in_order(register: Any) -> None:
    with nl.no_reorder():
        nl.fori_loop(0, register, nisa.register_alloc)


def store_too_much(register: Any) -> None:
    nisa.register_move(register, 300)
    nisa.register_store(nl.ndarray((1, 1), dtype=nl.int8), register)


REGISTERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "arithmetic": ("operators", lambda register: register + 1),
    "as a Python range": ("operators", lambda register: range(register)),
    "as a number": ("operators", lambda register: int(register)),
    "as an index of a list": ("operators", lambda register: [1, 2, 3, 4][register]),
    "a step": ("operation", lambda register: nl.fori_loop(0, 4, nisa.register_alloc, step=register)),
    "a loop in no_reorder": ("operation", loop_in_order),
    "a body without a result": ("operation", lambda register: nl.while_loop(register, nisa.register_alloc)),
    "33 bits": ("dtype", lambda register: nisa.register_move(register, 2**31)),
    "too much for int8": ("dtype", store_too_much),
    "a float": ("shape", lambda register: nisa.register_load(register, nl.zeros((1, 1), nl.float32))),
    "two elements": ("shape", lambda register: nisa.register_load(register, nl.zeros((1, 2), nl.int32))),
    "nothing": ("uninitialised", lambda register: nisa.register_move(register, nisa.register_alloc())),
    "a tensor for a register": ("objects-not-strings", lambda _: nisa.register_move(nl.zeros((1, 1), nl.int32), 1)),
}


@pytest.mark.parametrize("name", REGISTERS)
def test_what_a_register_cannot_do(name: str) -> None:
    rule, misuse = REGISTERS[name]

    def kernel() -> Any:
        misuse(nisa.register_alloc(3))
        return to_hbm(nl.ones((4, 4), nl.float32))

    with interpreter.rules.without("subset"):
        assert broken(kernel).rule.name == rule


# ---- functions that return a tile ----


def called(function: Any, x: Any, y: Any, options: dict[str, Any]) -> Any:
    """`function` of tiles loaded from x and, if given, y."""
    tile = nl.load(x)
    if y is None:
        return to_hbm(function(tile, **options))
    return to_hbm(function(tile, y if isinstance(y, (int, float)) else nl.load(y), **options))


def of(function: Any, x: Any, y: Any = None, **options: Any) -> Any:
    def kernel(x: Any, y: Any) -> Any:
        return called(function, x, y, options)

    return run(kernel, x=x, y=y)


FLOATS = npst.arrays(np.float32, st.tuples(st.integers(1, 8), st.integers(1, 9)), elements=st.floats(-50, 50, width=16))

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "greater": np.greater,
    "less_equal": np.less_equal,
    "not_equal": np.not_equal,
    "logical_and": np.logical_and,
}
UNARY: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "tanh": np.tanh,
    "square": np.square,
    "abs": np.abs,
    "sign": np.sign,
    "relu": lambda x: np.maximum(x, 0),
    "negative": np.negative,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "copy": lambda x: x,
}


@settings(max_examples=15)
@given(x=FLOATS, name=st.sampled_from(sorted(BINARY)), seed=st.integers(0, 99))
def test_functions_of_two_operands(x: np.ndarray, name: str, seed: int) -> None:
    y = np.random.default_rng(seed).permutation(x.reshape(-1)).reshape(x.shape)
    function, expected = getattr(nl, name), BINARY[name]
    assert np.array_equal(of(function, x, y), expected(x, y).astype(np.float32))
    assert np.array_equal(of(function, x, 1.5), expected(x, np.float32(1.5)).astype(np.float32))
    rounded = of(function, x, y, dtype=nl.bfloat16)
    assert rounded.dtype == nl.bfloat16
    assert np.array_equal(rounded, expected(x, y).astype(np.float32).astype(ml_dtypes.bfloat16))

    def reversed_operands(x: Any) -> Any:
        return to_hbm(function(2.0, nl.load(x)))

    assert np.array_equal(run(reversed_operands, x=x), expected(np.float32(2.0), x).astype(np.float32))


@settings(max_examples=15)
@given(x=FLOATS, name=st.sampled_from(sorted(UNARY)))
def test_functions_of_one_operand(x: np.ndarray, name: str) -> None:
    exact = UNARY[name](x.astype(np.float64))
    assert np.allclose(of(getattr(nl, name), x), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["log", "sqrt", "rsqrt", "reciprocal", "cos", "sin", "tan", "arctan"])
def test_functions_with_a_valid_interval(name: str) -> None:
    x = np.linspace(0.1, 1.2, 24, dtype=np.float32).reshape(4, 6)
    exact = {"rsqrt": lambda v: v**-0.5, "reciprocal": lambda v: 1 / v}.get(name) or getattr(np, name)
    assert np.allclose(of(getattr(nl, name), x), exact(x.astype(np.float64)), rtol=1e-6, atol=1e-7)


def test_bits_and_logic() -> None:
    x = np.array([[0, 1, 6, 255]], np.uint8)
    y = np.array([[1, 1, 3, 2]], np.uint8)
    assert np.array_equal(of(nl.bitwise_and, x, y), x & y)
    assert np.array_equal(of(nl.left_shift, x, y), x << y)
    assert np.array_equal(of(nl.invert, x), ~x)
    flags = np.array([[0, 1, 1, 0]], np.float32)
    assert np.array_equal(of(nl.logical_not, flags), 1 - flags)


@pytest.mark.parametrize("axis", [1, -1, [1], (1, 2), [2], 2])
def test_reductions(axis: Any) -> None:
    rng = np.random.default_rng(0)
    shape = (6, 4, 5) if axis in ((1, 2), [2], 2, -1) else (6, 20)
    x = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    axes = tuple(axis) if isinstance(axis, (list, tuple)) else axis
    cases = {nl.sum: np.sum, nl.max: np.max, nl.min: np.min, nl.prod: np.prod, nl.mean: np.mean}
    for function, expected in cases.items():
        exact = expected(x.astype(np.float64), axes, keepdims=True)
        assert np.allclose(of(function, x, axis=axis, keepdims=True), exact, rtol=1e-6)
        dropped = of(function, x, axis=axis)
        assert dropped.shape == ((6, 4) if exact.shape == (6, 4, 1) else (6, 1))
        assert np.allclose(dropped.reshape(-1), exact.reshape(-1), rtol=1e-6)
    assert np.allclose(of(nl.var, x, axis=axis), np.var(x.astype(np.float64), axes, keepdims=True), rtol=1e-5)
    assert np.array_equal(of(nl.all, np.round(x), axis=axis).reshape(-1), np.all(np.round(x), axes).reshape(-1))
    powers = np.exp(x.astype(np.float64))
    assert np.allclose(of(nl.softmax, x, axis=axis), powers / powers.sum(axes, keepdims=True), rtol=1e-5)


def test_rms_norm_and_where() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((6, 32)).astype(np.float32), rng.standard_normal((6, 32)).astype(np.float32)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * w
    assert np.allclose(of(nl.rms_norm, x, w, axis=1, n=32), expected, rtol=1e-5)

    def pick(condition: Any, x: Any, w: Any) -> Any:
        held = nl.load(condition)
        both, one = nl.where(held, nl.load(x), nl.load(w)), nl.where(held, nl.load(x), 0.0)
        return to_hbm(both), to_hbm(one)

    condition = (x > 0).astype(np.float32)
    both, one = run(pick, condition=condition, x=x, w=w)
    assert np.array_equal(both, np.where(x > 0, x, w)) and np.array_equal(one, np.where(x > 0, x, 0))


@pytest.mark.parametrize(("shape", "wanted"), [((1, 7), (128, 7)), ((1, 1), (70, 3)), ((5, 1, 3), (5, 4, 3))])
@pytest.mark.parametrize("dtype", [None, nl.bfloat16])
def test_broadcast_to_reaches_every_partition(shape: Any, wanted: Any, dtype: Any) -> None:
    x = np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)
    found = of(nl.broadcast_to, x, shape=wanted, dtype=dtype)
    assert found.dtype == (dtype or nl.float32)
    assert np.array_equal(found, np.broadcast_to(x, wanted).astype(found.dtype))


def test_matrices() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((48, 32)).astype(np.float32), rng.standard_normal((32, 20)).astype(np.float32)
    product = x.astype(np.float64) @ y
    assert np.allclose(of(nl.matmul, x, y), product, rtol=1e-5, atol=1e-5)
    assert np.allclose(of(nl.matmul, x.T.copy(), y, transpose_x=True), product, rtol=1e-5, atol=1e-5)
    assert np.array_equal(of(nl.transpose, x), x.T)
    assert np.array_equal(of(nl.transpose, x, dtype=nl.bfloat16), x.T.astype(ml_dtypes.bfloat16))
    assert of(nl.expand_dims, x, axis=1).shape == (48, 1, 32)
    index = rng.integers(0, 32, (48, 5)).astype(np.uint32)
    assert np.array_equal(of(nl.gather_flattened, x, index), np.take_along_axis(x, index.astype(int), 1))


def test_load_and_store() -> None:
    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
        nl.store(out, value=nl.load(x, dtype=nl.float32))
        return out, to_hbm(nl.load_transpose2d(x))

    x = np.arange(32 * 16, dtype=np.float32).reshape(32, 16).astype(ml_dtypes.bfloat16)
    stored, turned = run(kernel, x=x)
    assert np.array_equal(stored, x.astype(np.float32)) and np.array_equal(turned, x.T)


def test_every_operation_is_named_by_the_language_and_probing_for_a_name_works() -> None:
    assert all(getattr(nl, name) is op for name, op in OPS.items())
    assert not hasattr(nl, "mgrid") and not hasattr(nisa, "tensor_copy_dynamic_src") and hasattr(nl, "softmax")
    with pytest.raises(ImportError, match="par_dim"):
        from gdn_kernels.interpreter.language import par_dim  # noqa: F401
