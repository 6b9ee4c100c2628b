"""Arrays without values, for launches that check and record every instruction but compute nothing.

A `Hollow` array has a shape and a dtype over a single element of memory. NumPy functions on it give another one without
visiting any element, and what is assigned to it is dropped, so instructions need not know that a launch is dry. Every
value in it reads as zero. Integers are not hollow: addresses are made of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from gdn_kernels.interpreter.memory import Shape


@dataclass(frozen=True)
class Spec:
    """A shape and a dtype standing for a tensor: an argument, or a result, of a dry launch."""

    shape: Shape
    dtype: np.dtype


class Hollow(np.ndarray):
    """Zeros of any shape that take up, and compute on, one element. Made by `hollow`."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **keywords: Any) -> Any:
        if out is not None:
            return out[0]
        if method == "__call__" and ufunc.signature is None:
            shape = _broadcast(inputs)
            return hollow(shape, _ufunc_dtype(ufunc, *map(_kind, inputs)))
        if method == "__call__" and ufunc is np.matmul:
            left, right = inputs
            shape = (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), left.shape[-2], right.shape[-1])
            return hollow(shape, np.result_type(left.dtype, right.dtype))
        if method == "reduce":
            kept = _reduced(inputs[0].shape, keywords.get("axis", 0), keywords.get("keepdims", False))
            return hollow(kept, _reduction_dtype(ufunc, inputs[0].dtype))
        return _wrap(getattr(ufunc, method)(*map(_plain, inputs), **{k: _plain(v) for k, v in keywords.items()}))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.where and len(args) == 3:
            shape = _broadcast(args)
            return hollow(shape, np.result_type(*map(_kind, args[1:])))
        if function is np.copyto:
            return None
        return _wrap(function(*map(_plain, args), **{key: _plain(value) for key, value in kwargs.items()}))

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __getitem__(self, key: Any) -> Any:
        picked = super().__getitem__(key)
        if isinstance(picked, Hollow) and any(picked.strides):  # picked by an index array, which copies
            return hollow(picked.shape, picked.dtype)
        return picked

    def fill(self, value: Any) -> None:
        pass

    def copy(self, order: Any = "C") -> "Hollow":
        return self

    def astype(self, dtype: Any, *_: Any, **__: Any) -> "Hollow":
        return hollow(self.shape, np.dtype(dtype))


def hollow(shape: Shape, dtype: np.dtype) -> Hollow:
    """An array of `shape` and `dtype` without values."""
    return Hollow(shape, dtype, _element(dtype).data, 0, (0,) * len(shape))


@cache
def _element(dtype: np.dtype) -> np.ndarray:
    return np.zeros(dtype.itemsize, np.uint8)


@cache
def _ufunc_dtype(ufunc: np.ufunc, *kinds: Any) -> np.dtype:
    """The dtype of an element-wise result, found on one element of each operand."""
    operands = [np.ones((), kind) if isinstance(kind, np.dtype) else kind(1) for kind in kinds]
    return np.asarray(ufunc(*operands)).dtype


@cache
def _reduction_dtype(ufunc: np.ufunc, dtype: np.dtype) -> np.dtype:
    return np.asarray(ufunc.reduce(np.ones(1, dtype))).dtype


def _broadcast(values: Sequence[Any]) -> Shape:
    """The shape of an element-wise result; numbers have none, and most operands have the same."""
    shapes = {value.shape for value in values if hasattr(value, "shape")}
    return shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*shapes)


def _reduced(shape: Shape, axis: Any, keepdims: bool) -> Shape:
    """The shape after a reduction over `axis`."""
    gone = range(len(shape)) if axis is None else [a % len(shape) for a in np.atleast_1d(axis)]
    if keepdims:
        return tuple(1 if dim in gone else size for dim, size in enumerate(shape))
    return tuple(size for dim, size in enumerate(shape) if dim not in gone)


def _kind(value: Any) -> Any:
    """What decides the dtype of a result: the dtype of an array, the type of a Python number."""
    return value.dtype if hasattr(value, "dtype") else type(value)


def _plain(value: Any) -> Any:
    """The zeros themselves, for the functions that have no short way."""
    if isinstance(value, Hollow):
        return value.view(np.ndarray)
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    return value


def _wrap(result: Any) -> Any:
    if isinstance(result, np.ndarray) and result.ndim:
        return hollow(result.shape, result.dtype)
    if isinstance(result, tuple):
        return tuple(map(_wrap, result))
    return result
