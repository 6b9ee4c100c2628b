"""The functions of `nki.language` that return a tile: each allocates it and issues the documented instructions.

They are experimental in NKI and cost what the instructions cost. Tiles aren't broadcast against each other: two tile
operands have one shape. A result has the dtype of its (first) tile operand unless `dtype` says otherwise.
"""

from collections.abc import Callable, Sequence
from math import pi, prod
from typing import Any, NoReturn

from gdn_kernels.interpreter import isa
from gdn_kernels.interpreter.alu import OPS, Op
from gdn_kernels.interpreter.creation import ndarray
from gdn_kernels.interpreter.dtypes import float32, int32, uint8
from gdn_kernels.interpreter.memory import PSUM, SBUF, Shape
from gdn_kernels.interpreter.rules import refuse
from gdn_kernels.interpreter.tensor import NkiTensor

FUNCTIONS: dict[str, Callable[..., Any]] = {}  # by their name in nki.language
QUADRANT = 32  # partitions that one shuffle mask covers


def _exported(function: Callable[..., Any]) -> Callable[..., Any]:
    FUNCTIONS[function.__name__.rstrip("_")] = function
    return function


# ---- operations ----


def call(op: Op, x: Any, y: Any = None, dtype: Any = None) -> NkiTensor:
    """`nl.add(x, y)`, `nl.exp(x)`: the operation on a tile, with another tile or a number."""
    if op.binary is not None:
        return _binary(op, x, y, dtype)
    if y is not None:
        refuse("operation", f"{op!r} takes one tile and dtype=", op.name)
    out = _like(op.name, x, dtype)
    if op.name == "copy":
        isa.tensor_copy(dst=out, src=x)
    elif op.name == "reciprocal":
        isa.reciprocal(dst=out, data=x)
    elif op.name == "rsqrt":
        isa.tensor_scalar(dst=out, data=x, op0=op, operand0=None, engine=isa.engine.gpsimd)
    elif op.activation and op.unary is not None:
        isa.activation(dst=out, op=op, data=x)
    elif op.scalar_unary:
        isa.tensor_scalar(dst=out, data=x, op0=op, operand0=None)
    else:
        refuse("operation", f"{op!r} is only an op= of instructions", op.name)
    return out


def _binary(op: Op, x: Any, y: Any, dtype: Any) -> NkiTensor:
    if isinstance(x, NkiTensor) and isinstance(y, NkiTensor):
        if x.shape != y.shape:
            refuse("shape", f"{x.shape} and {y.shape}; tiles aren't broadcast", op.name, "y")
        out = _like(op.name, x, dtype)
        isa.tensor_tensor(dst=out, data1=x, data2=y, op=op)
        return out
    tile, number, reverse = (x, y, False) if isinstance(x, NkiTensor) else (y, x, True)
    out = _like(op.name, tile, dtype)
    isa.tensor_scalar(dst=out, data=tile, op0=op, operand0=number, reverse0=reverse)
    return out


def _like(op: str, x: Any, dtype: Any = None, shape: Shape | None = None) -> NkiTensor:
    """A fresh SBUF tile for the result of `op` on x."""
    if not isinstance(x, NkiTensor):
        refuse("objects-not-strings", f"expected a tile, got {x!r}", op, "x")
    if not x.buffer.on_chip:
        refuse("memory-space", f"{x!r}, expected a tile in SBUF or PSUM", op, "x")
    return ndarray(x.shape if shape is None else shape, x.dtype if dtype is None else dtype, SBUF)


@_exported
def negative(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    return _binary(OPS["multiply"], x, -1.0, dtype)


@_exported
def logical_not(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """1 where x is 0, for an x of zeros and ones."""
    return _binary(OPS["logical_xor"], x, 1.0, dtype)


@_exported
def cos(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """sin(x + pi/2), so x ends at pi/2."""
    out = _like("cos", x, dtype)
    isa.activation(dst=out, op=OPS["sin"], data=x, bias=pi / 2)
    return out


@_exported
def tan(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    inverse = call(OPS["reciprocal"], cos(x, float32))
    return _binary(OPS["multiply"], call(OPS["sin"], x, dtype=float32), inverse, dtype or x.dtype)


@_exported
def floor(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """The nearest integer, less one where that is above x. |x| < 2**31."""
    nearest = _nearest(x)
    above = _binary(OPS["greater"], nearest, x, None)
    return _binary(OPS["subtract"], nearest, above, dtype or x.dtype)


@_exported
def ceil(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """The nearest integer, plus one where that is below x. |x| < 2**31."""
    nearest = _nearest(x)
    below = _binary(OPS["less"], nearest, x, None)
    return _binary(OPS["add"], nearest, below, dtype or x.dtype)


@_exported
def trunc(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    size = floor(call(OPS["abs"], x, dtype=float32))
    return _binary(OPS["multiply"], size, call(OPS["sign"], x, dtype=float32), dtype or x.dtype)


def _nearest(x: NkiTensor) -> NkiTensor:
    """x rounded to an integer, in fp32: a cast rounds to nearest even."""
    return call(OPS["copy"], call(OPS["copy"], x, dtype=int32), dtype=float32)


@_exported
def where(condition: NkiTensor, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """x where the condition is 1, y where it is 0; x and y tiles or numbers."""
    tile = x if isinstance(x, NkiTensor) else y if isinstance(y, NkiTensor) else condition
    out = _like("where", condition, dtype or tile.dtype)
    if isinstance(y, NkiTensor):
        isa.tensor_copy(dst=out, src=y)
    else:
        isa.memset(dst=out, value=int(y) if out.dtype.kind in "iu" else float(y))
    source = x if not isinstance(x, NkiTensor) or x.dtype == out.dtype else call(OPS["copy"], x, dtype=out.dtype)
    isa.tensor_copy_predicated(dst=out, src=source, predicate=call(OPS["copy"], condition, dtype=uint8))
    return out


@_exported
def divide(*_: Any, **__: Any) -> NoReturn:
    refuse("operation", "the hardware doesn't divide: multiply by nl.reciprocal", "divide")


@_exported
def mod(*_: Any, **__: Any) -> NoReturn:
    refuse("operation", "the hardware has no remainder", "mod")


@_exported
def fmod(*_: Any, **__: Any) -> NoReturn:
    refuse("operation", "the hardware has no remainder", "fmod")


# ---- reductions over the last free axes ----


def _axes(op: str, x: NkiTensor, axis: Any) -> tuple[int, ...]:
    axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    found = tuple(sorted(a + x.ndim if a < 0 else a for a in axes))
    if not found or found != tuple(range(x.ndim - len(found), x.ndim)) or found[0] < 1:
        refuse("shape", f"axis {axis} of {x.ndim} dimensions: only the last free axes reduce", op, "axis")
    return found


def _reduce(name: str, op: Op, x: NkiTensor, axis: Any, dtype: Any, keepdims: bool) -> NkiTensor:
    out = _like(name, x, dtype, x.shape)  # refuses what is no tile
    axes = _axes(name, x, axis)
    kept = x.shape[: axes[0]]
    ones = len(axes) if keepdims else len(kept) < 2  # a tile keeps two dimensions
    shape = (*kept, *(1,) * ones)
    out = ndarray(shape, out.dtype, SBUF)
    isa.tensor_reduce(dst=out, op=op, data=x, axis=axes)
    return out


@_exported
def sum_(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    return _reduce("sum", OPS["add"], x, axis, dtype, keepdims)


@_exported
def max_(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    return _reduce("max", OPS["maximum"], x, axis, dtype, keepdims)


@_exported
def min_(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    return _reduce("min", OPS["minimum"], x, axis, dtype, keepdims)


@_exported
def prod_(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    return _reduce("prod", OPS["multiply"], x, axis, dtype, keepdims)


@_exported
def all_(x: NkiTensor, axis: Any, dtype: Any = None) -> NkiTensor:
    nonzero = _binary(OPS["not_equal"], x, 0.0, float32)
    return _reduce("all", OPS["minimum"], nonzero, axis, dtype or x.dtype, False)


@_exported
def mean(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """The sum in fp32, times 1/n."""
    total = _reduce("mean", OPS["add"], x, axis, float32, keepdims)
    count = prod(x.shape[_axes("mean", x, axis)[0] :])
    return _binary(OPS["multiply"], total, 1.0 / count, dtype or x.dtype)


@_exported
def var(x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """The mean of squared distances from the mean; the reduced axes stay, of size 1."""
    distance = _binary(OPS["subtract"], _fp32(x), _repeated(mean(x, axis, float32, True), x.shape), None)
    return mean(call(OPS["square"], distance), axis, dtype or x.dtype, True)


@_exported
def softmax(x: NkiTensor, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    largest = max_(x, axis, float32, True)
    shifted = _binary(OPS["subtract"], _fp32(x), _repeated(largest, x.shape), None)
    powers = call(OPS["exp"], shifted)
    inverse = call(OPS["reciprocal"], sum_(powers, axis, float32, True))
    return _binary(OPS["multiply"], powers, _repeated(inverse, x.shape), dtype or x.dtype)


@_exported
def rms_norm(
    x: NkiTensor,
    w: NkiTensor,
    axis: Any,
    n: int,
    epsilon: float = 1e-6,
    dtype: Any = None,
    compute_dtype: Any = None,
) -> NkiTensor:
    """x * w / sqrt(sum(x * x) / n + epsilon)."""
    working = compute_dtype or float32
    squares = sum_(call(OPS["square"], x, dtype=working), axis, float32, True)
    scale = ndarray(squares.shape, float32, SBUF)
    isa.activation(dst=scale, op=OPS["rsqrt"], data=squares, scale=1.0 / n, bias=epsilon)
    normed = _binary(OPS["multiply"], call(OPS["copy"], x, dtype=working), _repeated(scale, x.shape), None)
    return _binary(OPS["multiply"], normed, w, dtype or x.dtype)


def _fp32(x: NkiTensor) -> NkiTensor:
    return x if x.dtype == float32 and x.buffer is SBUF else call(OPS["copy"], x, dtype=float32)


def _repeated(x: NkiTensor, shape: Shape) -> NkiTensor:
    """x, whose free dimensions of size 1 repeat to `shape`, as a view."""
    for dim in range(1, len(shape)):
        if x.shape[dim] == 1 and shape[dim] != 1:
            x = x.broadcast(dim, shape[dim])
    return x


# ---- movement ----


@_exported
def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the elements of an HBM tensor."""
    _in_hbm("load", "src", src)
    tile = ndarray(src.shape, dtype or src.dtype, SBUF)
    isa.dma_copy(dst=tile, src=src)
    return tile


@_exported
def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Write an SBUF tile to HBM."""
    _in_hbm("store", "dst", dst)
    isa.dma_copy(dst=dst, src=value)


@_exported
def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with an HBM matrix transposed."""
    _in_hbm("load_transpose2d", "src", src)
    if src.ndim != 2:
        refuse("shape", f"{src.shape}, expected two dimensions", "load_transpose2d", "src")
    tile = ndarray((src.shape[1], src.shape[0]), src.dtype, SBUF)
    isa.dma_transpose(dst=tile, src=src)
    return tile if dtype is None or dtype == src.dtype else call(OPS["copy"], tile, dtype=dtype)


def _in_hbm(op: str, role: str, view: Any) -> None:
    if not isinstance(view, NkiTensor):
        refuse("objects-not-strings", f"expected a tensor, got {view!r}", op, role)
    if view.buffer.on_chip:
        refuse("memory-space", f"{view!r}, expected HBM", op, role)


@_exported
def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    return x.expand_dim(axis + x.ndim + 1 if axis < 0 else axis)


@_exported
def broadcast_to(x: NkiTensor, shape: Any, dtype: Any = None) -> NkiTensor:
    """x repeated along its dimensions of size 1, the partition too: row 0 is shuffled into every quadrant."""
    wanted = tuple(shape)
    tile = _like("broadcast_to", x, dtype, wanted)
    if len(wanted) != x.ndim or any(size not in (1, want) for size, want in zip(x.shape, wanted, strict=True)):
        refuse("shape", f"{x.shape} doesn't broadcast to {wanted}", "broadcast_to", "shape")
    if wanted == x.shape and tile.dtype == x.dtype:
        return x
    if x.shape[0] == wanted[0]:
        isa.tensor_copy(dst=tile, src=_repeated(x, wanted))
        return tile
    row = ndarray((1, *wanted[1:]), tile.dtype, SBUF)
    isa.tensor_copy(dst=row, src=_repeated(x, (1, *wanted[1:])))
    for first in range(0, wanted[0], QUADRANT):
        quadrant = tile[first : min(first + QUADRANT, wanted[0])]
        isa.nc_stream_shuffle(dst=quadrant, src=row, shuffle_mask=[0] * QUADRANT)
    return tile


@_exported
def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """Partitions and free elements swapped, in PSUM; in SBUF if the dtype changes."""
    _like("transpose", x)
    if x.ndim != 2:
        refuse("shape", f"{x.shape}, expected two dimensions", "transpose", "x")
    out = ndarray((x.shape[1], x.shape[0]), x.dtype, PSUM)
    isa.nc_transpose(dst=out, data=x, engine=isa.engine.tensor)
    return out if dtype is None or dtype == x.dtype else call(OPS["copy"], out, dtype=dtype)


@_exported
def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """x @ y, or x.T @ y with transpose_x, as fp32 in PSUM."""
    _like("matmul", x)
    _like("matmul", y)
    left = x if transpose_x else call(OPS["copy"], transpose(x))
    out = ndarray((left.free_size, y.free_size), float32, PSUM)
    isa.nc_matmul(dst=out, stationary=left, moving=y)
    return out


@_exported
def gather_flattened(data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None) -> NkiTensor:
    """data[p, indices[p, j]], with the free elements of each partition counted from 0."""
    if axis != 0:
        refuse("not-modelled", f"axis {axis}", "gather_flattened", "axis")
    out = _like("gather_flattened", data, None, indices.shape)
    isa.nc_n_gather(dst=out, data=data, indices=indices)
    return out if dtype is None or dtype == data.dtype else call(OPS["copy"], out, dtype=dtype)


# ---- random numbers: the streams aren't documented ----


@_exported
def rand(*_: Any, **__: Any) -> NoReturn:
    refuse("not-modelled", "random numbers", "rand")


@_exported
def random_seed(*_: Any, **__: Any) -> NoReturn:
    refuse("not-modelled", "random numbers", "random_seed")


@_exported
def dropout(*_: Any, **__: Any) -> NoReturn:
    refuse("not-modelled", "random numbers", "dropout")
