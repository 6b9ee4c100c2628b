"""The operations that `op=` arguments name: what each computes, which class it is of, where its input is valid.

Arithmetic operations run in fp32 whatever the operands' dtypes are; bitvec ones take integers as bit patterns.
Operations of two operands and those marked `scalar_unary` run on the Vector and GpSimd engines, activations on the
Scalar engine. The engine evaluates activations by piecewise polynomials; here they are exact functions, rounded once
to fp32. Classes, reductions and valid intervals are those of the API reference ("supported math operators",
"supported activation functions").
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Op:
    """A named operation.

    binary: its meaning for two fp32 (bitvec: unsigned) operands. unary: for one. kind: "arithmetic" or "bitvec".
    valid: the closed input interval of the activation (of the magnitude, for reciprocal).
    activation: the Scalar engine has it. scalar_unary: `tensor_scalar` takes it, without an operand.
    reduces: reductions take it. generation: the first NeuronCore generation that has it outside the Scalar engine.
    exact: the activation is a selection or a sign change, exact in fp32.
    """

    name: str
    binary: Callable[[Any, Any], Any] | None = None
    unary: Callable[[Array], Array] | None = None
    valid: tuple[float, float] | None = None
    kind: str = "arithmetic"
    activation: bool = False
    scalar_unary: bool = False
    reduces: bool = False
    generation: int = 3
    exact: bool = False

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        """`nl.add(x, y)`: a new tile with the result (see `convenience`)."""
        from gdn_kernels.interpreter import convenience

        return convenience.call(self, *operands, **keywords)

    def apply_unary(self, x: Array) -> Array:
        """The operation of one operand on fp32 x, in float64 and rounded once."""
        assert self.unary is not None
        return self.unary(x) if self.exact else self.unary(x.astype(np.float64)).astype(np.float32)


# ---- operations of two operands ----


def _true(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A condition as 1.0 or 0.0."""
    return lambda x, y: function(x, y).astype(np.float32)


def _power(x: Any, y: Any) -> Any:
    return np.power(np.asarray(x, np.float64), np.asarray(y, np.float64)).astype(np.float32)


def _shift(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A logical shift of a bit pattern; by the width or more it leaves nothing."""
    return lambda x, y: np.where(y < 8 * x.dtype.itemsize, function(x, y), x.dtype.type(0))


# ---- activations, of float64 ----


def _sigmoid(x: Array) -> Array:
    decayed = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + decayed), decayed / (1 + decayed))


def _silu(x: Array) -> Array:
    return np.where(x > -800, x, 0) * _sigmoid(x)  # -inf * 0 would be NaN


def _silu_dx(x: Array) -> Array:
    x = np.clip(x, -800, 800)
    s = _sigmoid(x)
    return s * (1 + x * (1 - s))


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _mish(x: Array) -> Array:
    return np.where(x > -800, x, 0) * np.tanh(_softplus(x))


def _erf(x: Array) -> Array:
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x), np.float64)


def _normal_cdf(x: Array) -> Array:
    return 0.5 * np.asarray(np.frompyfunc(math.erfc, 1, 1)(-x / math.sqrt(2)), np.float64)


def _gelu(x: Array) -> Array:
    return np.where(x > -800, x, 0) * _normal_cdf(x)


def _gelu_dx(x: Array) -> Array:
    x = np.clip(x, -800, 800)
    return _normal_cdf(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: Array) -> Array:
    """0.5 x (1 + tanh u) is x sigmoid(2u), which keeps its digits for negative x."""
    inner = np.clip(x, -1e4, 1e4)
    return np.where(x > -1e4, x, 0) * _sigmoid(2 * math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3))


def _gelu_sigmoid(x: Array) -> Array:
    return np.where(x > -800, x, 0) * _sigmoid(1.702 * x)


def _gelu_sigmoid_dx(x: Array) -> Array:
    x = np.clip(x, -800, 800)
    s = _sigmoid(1.702 * x)
    return s * (1 + 1.702 * x * (1 - s))


PI = float(np.float32(math.pi))  # an fp32 input can't come closer


OPS = {
    op.name: op
    for op in (
        Op("add", np.add, reduces=True),
        Op("subtract", np.subtract, reduces=True),
        Op("multiply", np.multiply, reduces=True),
        Op("maximum", np.maximum, reduces=True),
        Op("minimum", np.minimum, reduces=True),
        Op("power", _power),
        Op("equal", _true(np.equal)),
        Op("not_equal", _true(np.not_equal)),
        Op("greater", _true(np.greater)),
        Op("greater_equal", _true(np.greater_equal)),
        Op("less", _true(np.less)),
        Op("less_equal", _true(np.less_equal)),
        Op("logical_and", _true(np.logical_and), reduces=True),
        Op("logical_or", _true(np.logical_or), reduces=True),
        Op("logical_xor", _true(np.logical_xor), reduces=True),
        Op("abs_max", lambda x, y: np.where(np.abs(x) >= np.abs(y), x, y), generation=4),
        Op("abs_min", lambda x, y: np.where(np.abs(x) <= np.abs(y), x, y), generation=4),
        Op("bitwise_and", np.bitwise_and, kind="bitvec", reduces=True),
        Op("bitwise_or", np.bitwise_or, kind="bitvec", reduces=True),
        Op("bitwise_xor", np.bitwise_xor, kind="bitvec", reduces=True),
        Op("left_shift", _shift(np.left_shift), kind="bitvec"),
        Op("right_shift", _shift(np.right_shift), kind="bitvec"),
        Op("invert", unary=np.invert, kind="bitvec", scalar_unary=True, exact=True),
        Op("average"),  # of tensor_partition_reduce only
        Op("bypass"),  # of activate2 only
        Op("copy", unary=lambda x: x, activation=True, exact=True),
        Op("abs", unary=np.abs, activation=True, scalar_unary=True, exact=True),
        Op("relu", unary=lambda x: np.maximum(x, 0), activation=True, scalar_unary=True, generation=4, exact=True),
        Op("sign", unary=np.sign, activation=True, exact=True),
        Op("prelu", activation=True),
        Op("square", unary=np.square, activation=True, scalar_unary=True, generation=4),
        Op("exp", unary=np.exp, activation=True),
        Op("tanh", unary=np.tanh, activation=True),
        Op("sigmoid", unary=_sigmoid, activation=True),
        Op("silu", unary=_silu, activation=True),
        Op("silu_dx", unary=_silu_dx, activation=True),
        Op("softplus", unary=_softplus, activation=True),
        Op("mish", unary=_mish, activation=True),
        Op("gelu", unary=_gelu, activation=True),
        Op("gelu_dx", unary=_gelu_dx, activation=True),
        Op("gelu_apprx_tanh", unary=_gelu_tanh, activation=True),
        Op("gelu_apprx_sigmoid", unary=_gelu_sigmoid, activation=True),
        Op("gelu_apprx_sigmoid_dx", unary=_gelu_sigmoid_dx, activation=True),
        Op("erf", unary=_erf, activation=True),
        Op("erf_dx", unary=lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x), activation=True),
        Op("sin", unary=np.sin, valid=(-PI, PI), activation=True),
        Op("arctan", unary=np.arctan, valid=(-PI / 2, PI / 2), activation=True),
        Op("sqrt", unary=np.sqrt, valid=(2.0**-116, 2.0**118), activation=True),
        Op("rsqrt", unary=lambda x: 1 / np.sqrt(x), valid=(2.0**-87, 2.0**97), activation=True, scalar_unary=True),
        Op("reciprocal", unary=lambda x: 1 / x, valid=(2.0**-42, 2.0**42), activation=True, scalar_unary=True),
        Op("log", unary=np.log, valid=(2.0**-64, 2.0**64), activation=True),
    )
}
