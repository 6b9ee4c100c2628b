"""Other projects' layouts of the two states of a GDN layer, and the way from them to ours and back.

Ours, which is also that of transformers:

    conv_state       [B, conv_dim, K_win]  the last K_win columns of q|k|v before the conv, oldest first
    recurrent_state  [B, Hv, K, V]         S, key-major: the key dimension before the value dimension

Column 0 of the conv state is dead: a step drops it before it looks at the others. Projects that keep K_win - 1 columns
(vLLM, mlx, FlashInfer) leave it out, and FlashInfer, vLLM and mlx hold S value-major, [B, Hv, V, K]. With K = V, as in
every published model, no shape tells the two orders of S apart, so the order has to be named there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gdn_kernels.dims import BlockDims
from gdn_kernels.dtypes import Array

ORDERS = ("key-major", "value-major")


def widen_conv_state(columns: Array, dims: BlockDims) -> Array:
    """K_win - 1 columns, as others keep them, to our K_win: a dead column of zeros before them.

    Args:
        columns: [B, conv_dim, K_win - 1], oldest first.
        dims: the layer's dimensions.

    Returns:
        [B, conv_dim, K_win], a new array in the dtype of `columns`.

    Raises:
        ValueError: for another shape, K_win columns or the two axes swapped among them.
    """
    shape = (*np.shape(columns)[:1], dims.conv_dim, dims.K_win - 1)
    check_shape("columns", columns, shape, "[B, conv_dim, K_win - 1]")
    return np.concatenate([np.zeros_like(columns[..., :1]), columns], axis=-1)  # [B, conv_dim, K_win]


def narrow_conv_state(conv_state: Array, dims: BlockDims) -> Array:
    """Our K_win columns to the K_win - 1 that live: [B, conv_dim, K_win] -> [B, conv_dim, K_win - 1], a new array.

    What the dead column held is lost; nothing reads it.

    Raises:
        ValueError: for another shape, K_win - 1 columns or the two axes swapped among them.
    """
    shape = (*np.shape(conv_state)[:1], dims.conv_dim, dims.K_win)
    check_shape("conv_state", conv_state, shape, "[B, conv_dim, K_win]")
    return np.ascontiguousarray(conv_state[..., 1:])


def to_key_major(state: Array, dims: BlockDims, *, order: str | None = None) -> Array:
    """S in our order, [B, Hv, K, V], from either order.

    Args:
        state: [B, Hv, K, V] or [B, Hv, V, K], any dtype.
        dims: the layer's dimensions.
        order: the order `state` comes in, "key-major" or "value-major". It may be left out where K != V, as the shape
            shows it; where K = V it must be given.

    Returns:
        A contiguous array, the same one if nothing had to be done.

    Raises:
        ValueError: if the shape is neither, or not that of `order`, or if K = V and no order is given.
    """
    return _swapped(state, dims, order, "key-major")


def to_value_major(state: Array, dims: BlockDims, *, order: str | None = None) -> Array:
    """S in the order [B, Hv, V, K] from either order; the arguments and errors of `to_key_major`."""
    return _swapped(state, dims, order, "value-major")


def _swapped(state: Array, dims: BlockDims, order: str | None, wanted: str) -> Array:
    if order is not None and order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    shapes = {"key-major": (dims.Hv, dims.K, dims.V), "value-major": (dims.Hv, dims.V, dims.K)}
    found = [name for name in ORDERS if np.ndim(state) == 4 and np.shape(state)[1:] == shapes[name]]
    if not found or (order is not None and order not in found):
        allowed = " or ".join(
            f"[B, {Hv}, {m}, {n}] ({name})" for name, (Hv, m, n) in shapes.items() if order in (None, name)
        )
        raise ValueError(f"state must have shape {allowed}, got {list(np.shape(state))}")
    if order is None and len(found) > 1:
        raise ValueError(f"order must be named where K = V = {dims.K}: key-major or value-major, got None")
    swap = (order or found[0]) != wanted
    return np.ascontiguousarray(np.swapaxes(state, -1, -2) if swap else state)


def check_shape(name: str, array: Any, shape: tuple[int, ...], meaning: str) -> None:
    """ValueError that names the argument unless it has `shape`; `meaning` says it in letters."""
    if np.shape(array) != shape:
        raise ValueError(f"{name} must have shape {meaning} = {list(shape)}, got {list(np.shape(array))}")
