"""Error measures. `x` is what is judged, `exact` what it is compared with; everything is computed in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gdn_kernels.dtypes import round_to, to_float

Array = npt.NDArray[Any]


def relative_error(x: Array, exact: Array) -> float:
    """Relative Frobenius norm of the difference: |x - exact| / |exact|, over all elements.

    0 when both are zero throughout, infinity when only `exact` is; NaN or infinity in `x` gives infinity.
    """
    return float(norm_error(x, exact, None))


def worst_head_error(x: Array, exact: Array) -> float:
    """The largest relative error of any single head: states [B, Hv, K, V], each [K, V] block by itself."""
    if np.size(x) == 0:
        return 0.0
    return float(norm_error(x, exact, (-2, -1)).max())


def bf16_steps(x: Array, exact: Array) -> Array:
    """|x - bf16(exact)| in bf16 steps, element by element; rows along the last axis.

    The step is the spacing of bf16 numbers at max(|bf16(exact)|, 2^-8 of the largest in its row): an element that
    cancelled to far below its row's size carries the row's error, and its own spacing says nothing.
    """
    rounded = round_to(to_float(exact, np.float64), "bf16")
    size = np.abs(rounded)
    size = np.maximum(size, 2.0**-8 * size.max(-1, keepdims=True, initial=0))
    difference = np.abs(to_float(x, np.float64) - rounded)
    return np.where(np.isfinite(difference), difference / bf16_spacing(size), np.inf)


def bf16_spacing(size: Array) -> Array:
    """The distance of neighbouring bf16 numbers at `size`, element by element; below the normal range it stays."""
    _, exponent = np.frexp(np.maximum(size, 2.0**-126))
    return np.asarray(np.ldexp(1.0, exponent - 8))


def unequal_share(x: Array, exact: Array) -> float:
    """Share of elements of `x` (bf16) that are not bf16(exact)."""
    return float((to_float(x, np.float64) != round_to(to_float(exact, np.float64), "bf16")).mean()) if x.size else 0.0


def projection_misses(x: Array, hidden: Array, W: Array, form: str) -> tuple[int, int]:
    """Elements of x, a rounded `hidden @ W`, that are not the exact sums rounded: (all of them, those that are wrong).

    A sum in fp32 is taken to be within 2^-22 * (|hidden| @ |W|) of the exact one, whatever its order. The proven bound
    is H * 2^-24 times the same, but rounding errors are a random walk: summed one by one, their spread is a sixth of
    ours. An element is wrong when it is not between the roundings of the two ends of that interval. In bf16 one that
    differs without being wrong is a sum at a tie.

    Args:
        x: [B, C], in the dtype of `form`.
        hidden: [B, H]. W: [H, C].
        form: "bf16" or "fp32", the format to which the sums were rounded.
    """
    hidden, W, x = (to_float(array, np.float64) for array in (hidden, W, x))
    sums = hidden @ W
    differ = x != round_to(sums, form)
    columns = differ.any(0)  # the bound is as costly as the sums, so it is computed where it is needed
    bound = 2.0**-22 * (np.abs(hidden) @ np.abs(W[:, columns]))
    low, high = (round_to(sums[:, columns] + end, form) for end in (-bound, bound))
    inside = (low <= x[:, columns]) & (x[:, columns] <= high)
    return int(differ.sum()), int((differ[:, columns] & ~inside).sum())


def _ratio(error: Array, size: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, error / size)
    return np.where(np.isnan(ratio), np.inf, ratio)


# ---- rollouts: errors of every head at one token, and what follows from them over many ----


def frobenius(x: Array, axes: int | tuple[int, ...] | None) -> Array:
    """The Frobenius norm over `axes`, None for all: sqrt(sum(x * x))."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.sqrt(np.square(to_float(x, np.float64)).sum(axis=axes)))


def norm_error(x: Array, exact: Array, axes: int | tuple[int, ...] | None, size: Array | None = None) -> Array:
    """|x - exact| / size in Frobenius norms over `axes`; size: |exact| unless given, such as the largest so far.

    0 where both are equal, whatever the size; infinity where `x` is not finite, or only the size is 0.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        difference = to_float(x, np.float64) - to_float(exact, np.float64)
    return _ratio(frobenius(difference, axes), frobenius(exact, axes) if size is None else size)


def max_error(x: Array, exact: Array, axes: int | tuple[int, ...]) -> Array:
    """max |x - exact| / max |exact| over `axes`, with the exceptions of `norm_error`."""
    exact = to_float(exact, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        difference = np.abs(to_float(x, np.float64) - exact)
    return _ratio(difference.max(axis=axes), np.abs(exact).max(axis=axes))


def cosine(x: Array, exact: Array, axes: int | tuple[int, ...]) -> Array:
    """sum(x * exact) / (|x| * |exact|) over `axes`: 1 where the directions agree, and where both are zero; NaN where
    one is zero or not finite."""
    x, exact = to_float(x, np.float64), to_float(exact, np.float64)
    sizes = frobenius(x, axes), frobenius(exact, axes)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        ratio = (x * exact).sum(axis=axes) / (sizes[0] * sizes[1])
    return np.where((sizes[0] == 0) & (sizes[1] == 0), 1.0, ratio)


def growth_exponent(tokens: Array, error: Array, since: float = 0.1) -> Array:
    """The p of error ~ tokens^p, from `since` times the last token on: 0 a plateau, 1/2 a random walk, 1 a bias.

    The slope of a least-squares line through log(error) against log(tokens); NaN with fewer than two points whose
    error is positive and finite.

    Args:
        tokens: [records]. error: [records, ...].

    Returns:
        [...], an exponent for each column.
    """
    late = np.asarray(tokens) >= since * np.max(tokens)
    x = np.log(np.asarray(tokens, np.float64)[late])
    columns = np.asarray(error, np.float64)[late].reshape(len(x), -1)
    exponents = np.full(columns.shape[1], np.nan)
    for index, column in enumerate(columns.T):
        usable = (column > 0) & np.isfinite(column)
        if usable.sum() >= 2:
            exponents[index] = np.polyfit(x[usable], np.log(column[usable]), 1)[0]
    return exponents.reshape(np.shape(error)[1:])


def first_past(tokens: Array, error: Array, threshold: float) -> Array:
    """The first recorded token at which the error exceeds `threshold`, or is not finite; -1 if it never does.

    tokens [records], error [records, ...] -> int64 [...].
    """
    past = ~(np.asarray(error) <= threshold)
    return np.where(past.any(axis=0), np.asarray(tokens)[past.argmax(axis=0)], -1).astype(np.int64)


def kl_divergence(logits: Array, exact: Array) -> Array:
    """KL(softmax(exact) || softmax(logits)) over the last axis, in nats."""
    p, q = (_log_softmax(to_float(x, np.float64)) for x in (exact, logits))
    return np.asarray((np.exp(p) * (p - q)).sum(-1))


def top_k_agreement(logits: Array, exact: Array, k: int) -> Array:
    """The share of the k largest of `exact` that are among the k largest of `logits`, over the last axis."""
    ours, theirs = (np.argsort(-to_float(x, np.float64), axis=-1, kind="stable")[..., :k] for x in (logits, exact))
    return np.asarray((ours[..., :, None] == theirs[..., None, :]).any(-1).mean(-1))


def _log_softmax(x: Array) -> Array:
    with np.errstate(invalid="ignore"):
        shifted = x - x.max(-1, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
