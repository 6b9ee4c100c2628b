"""The operations that `op=` arguments name: what each computes in fp32, and where its input is valid.

Two-operand operations run on the Vector and GpSimd engines, activations on the Scalar engine. The engine evaluates
activations by piecewise polynomials; here they are exact functions, rounded once to fp32. Valid intervals are those
of the API reference (`nki.isa.activation`, "supported activation functions").
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Op:
    """A named operation. `binary` and `unary` are its fp32 meanings, where it has them; `valid` the closed input
    interval of the unary one (of the magnitude, for reciprocal)."""

    name: str
    binary: Callable[[Any, Any], Any] | None = None
    unary: Callable[[Array], Array] | None = None
    valid: tuple[float, float] | None = None
    kind: str = "arithmetic"  # or "bitvec"

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def activate(self, x: Array) -> Array:
        """The activation in float64, rounded once to fp32."""
        assert self.unary is not None
        if self.name == "copy":
            return x
        return self.unary(x.astype(np.float64)).astype(np.float32)


def _compare(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda x, y: function(x, y).astype(np.float32)


def _sigmoid(x: Array) -> Array:
    decayed = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + decayed), decayed / (1 + decayed))


def _silu(x: Array) -> Array:
    return np.where(x > -800, x, 0) * _sigmoid(x)  # -inf * 0 would be NaN


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


OPS = {
    op.name: op
    for op in (
        Op("add", binary=np.add),
        Op("subtract", binary=np.subtract),
        Op("multiply", binary=np.multiply),
        Op("maximum", binary=np.maximum),
        Op("minimum", binary=np.minimum),
        Op("power", binary=np.power),
        Op("equal", binary=_compare(np.equal)),
        Op("not_equal", binary=_compare(np.not_equal)),
        Op("greater", binary=_compare(np.greater)),
        Op("greater_equal", binary=_compare(np.greater_equal)),
        Op("less", binary=_compare(np.less)),
        Op("less_equal", binary=_compare(np.less_equal)),
        Op("copy", unary=lambda x: x),
        Op("square", unary=np.square),
        Op("relu", unary=lambda x: np.maximum(x, 0)),
        Op("abs", unary=np.abs),
        Op("exp", unary=np.exp),
        Op("tanh", unary=np.tanh),
        Op("sigmoid", unary=_sigmoid),
        Op("silu", unary=_silu),
        Op("softplus", unary=_softplus),
        Op("sqrt", unary=np.sqrt, valid=(2.0**-116, 2.0**118)),
        Op("rsqrt", unary=lambda x: 1 / np.sqrt(x), valid=(2.0**-87, 2.0**97)),
        Op("reciprocal", unary=lambda x: 1 / x, valid=(2.0**-42, 2.0**42)),
        Op("log", unary=np.log, valid=(2.0**-64, 2.0**64)),
    )
}
