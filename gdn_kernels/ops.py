"""The public calls: `gdn_block_tkg`, the same on pools of states as `gdn_block_tkg_slots`, and the two inner kernels
`gdn_tkg` and `gdn_conv1d_decode`.

NumPy arrays (bfloat16 from ml_dtypes) or torch tensors in, the same kind out. Everything about the arguments is checked
before anything runs, so a call that returns an error has done nothing. No input is ever written, but for the pools of
`gdn_block_tkg_slots`.

Letters: B batch, H hidden size, Hk key heads, Hv value heads, K and V the sizes of a key and a value head, K_win the
columns of the conv window, conv_dim = 2 * Hk * K + Hv * V, BH = B * Hv.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdn_kernels import backends, pools
from gdn_kernels.dims import BLOCK_FORMED, CONV1D_SHAPES, TKG_SHAPES, BlockDims, resolve

SMALLEST_EPS = 2.0**-87  # below it rsqrt(0 + eps) leaves the valid range of the Scalar engine's rsqrt
FORMS = ("bfloat16", "float32")


@dataclass(frozen=True)
class _Argument:
    """What the checks need of an argument, whichever library it comes from."""

    kind: str  # "numpy" or "torch"
    shape: tuple[int, ...]
    dtype: str
    contiguous: bool
    device: str


def gdn_block_tkg(
    hidden: Any,
    W_in_qkv: Any,
    W_in_z: Any,
    W_in_a: Any,
    W_in_b: Any,
    conv_weight: Any,
    conv_state: Any,
    A_log: Any,
    dt_bias: Any,
    norm_weight: Any,
    recurrent_state: Any,
    *,
    norm_eps: float = 1e-6,
    lnc: int | None = None,
    backend: str = "auto",
    layer_Hk: int | None = None,
) -> tuple[Any, Any, Any]:
    """One decode step of one Gated DeltaNet layer, all but the output projection, fused in one kernel.

    Args:
        hidden: [B, 1, H] bf16, hidden states of this step; H a multiple of 128.
        W_in_qkv: [H, conv_dim] bf16, q|k|v input projection in (in, out) order.
        W_in_z: [H, Hv * V] bf16, output gate projection.
        W_in_a, W_in_b: [H, Hv] bf16, decay and beta input projections.
        conv_weight: [conv_dim, K_win] fp32, depthwise conv taps, oldest first; K_win is 2 to 8.
        conv_state: [B, conv_dim, K_win] bf16, the last K_win columns before the conv, oldest first.
        A_log, dt_bias: [Hv] fp32.
        norm_weight: [V] fp32, a plain gain, not 1 + w.
        recurrent_state: [B, Hv, K, V] fp32, key dimension before value dimension; K and V at most 128.
        norm_eps: epsilon of the gated RMS norm.
        lnc: cores, 1 or 2; None is the runtime's own setting on a device, 1 elsewhere.
        backend: "auto", "trn2", "simulate" or "interpreter".
        layer_Hk: key heads of the whole layer, where these are some of its heads with all that belongs to them: sums
            over K are then rounded in the order that the whole layer has, and the results have its bytes.

    In the fp32 form, hidden, the four W_in and conv_state are all fp32.

    Returns:
        core_out [B, 1, Hv * V] and new_conv_state [B, conv_dim, K_win] in the dtype of hidden, and
        new_recurrent_state [B, Hv, K, V] fp32. The caller puts the states back into its caches.

    Raises:
        ValueError: naming the argument that doesn't fit, what it should be and what it is.
        gdn_kernels.BackendUnavailable: when the backend can't run here.
    """
    arguments = {
        "hidden": hidden,
        "W_in_qkv": W_in_qkv,
        "W_in_z": W_in_z,
        "W_in_a": W_in_a,
        "W_in_b": W_in_b,
        "conv_weight": conv_weight,
        "conv_state": conv_state,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "norm_weight": norm_weight,
        "recurrent_state": recurrent_state,
    }
    described = _checked(arguments, BLOCK_FORMED, backend)
    dims = BlockDims.from_shapes(**{name: argument.shape for name, argument in described.items()})
    _check_options(norm_eps, lnc)
    _check_part(layer_Hk, dims.Hk)
    if described["hidden"].shape[0] == 0:
        value_dim = described["W_in_z"].shape[1]
        return _empty(hidden, (0, 1, value_dim)), _empty(conv_state), _empty(recurrent_state)
    options = {"norm_eps": float(norm_eps), "layer_Hk": layer_Hk or 0}
    results = backends.run("gdn_block_tkg", {**arguments, **options}, lnc, backend)
    return results[0], results[1], results[2]


def gdn_block_tkg_slots(
    hidden: Any,
    W_in_qkv: Any,
    W_in_z: Any,
    W_in_a: Any,
    W_in_b: Any,
    conv_weight: Any,
    conv_pool: Any,
    A_log: Any,
    dt_bias: Any,
    norm_weight: Any,
    recurrent_pool: Any,
    slots: Any,
    *,
    write_slots: Any = None,
    fresh: Any = None,
    norm_eps: float = 1e-6,
    lnc: int | None = None,
    backend: str = "auto",
) -> Any:
    """As `gdn_block_tkg`, with windows and states in pools **that are updated in place**: row b reads slot `slots[b]`
    and writes slot `write_slots[b]`. Slots that no row writes keep their bytes.

    All reads see the pools as before the call. The kernel keeps no order among rows, so calls in which one would matter
    are refused: two rows that write one slot, and a row that writes a slot which another row reads. Many rows may read
    one slot that none of them writes, such as a shared prefix.

    Args:
        hidden, W_in_qkv, W_in_z, W_in_a, W_in_b, conv_weight, A_log, dt_bias, norm_weight: as for `gdn_block_tkg`.
        conv_pool: [slots, conv_dim, K_win] bf16 (fp32 in the fp32 form), updated.
        recurrent_pool: [slots, Hv, K, V] fp32, updated. Either pool has at most 2**31 - 1 elements.
        slots: [B] int32 on the host. A row of -1 is padding: it touches nothing, its core_out is zero, and what its
            hidden holds reaches no other row.
        write_slots: [B] int32 on the host, -1 where slots is; None for the slots that are read.
        fresh: [B] bool on the host. Such a row starts from zeros, whatever its slot held, be it NaN.
        norm_eps, lnc, backend: as for `gdn_block_tkg`.

    Returns:
        core_out [B, 1, Hv * V] in the dtype of hidden.

    Raises:
        ValueError, gdn_kernels.BackendUnavailable: as `gdn_block_tkg`; the pools on the host are as before.

    On a device the kernel writes its arguments and returns them. If the framework hands them back elsewhere, they are
    copied into the pools: declare the results aliases of the pools there, or every step copies them. Unproven on a
    device, like everything of the two Neuron backends.

    Modelled, Qwen3.5-35B-A3B, above `gdn_block_tkg`: 0.2 % at B = 1 and 8, 1.9 % at 32 on one core; 0.4, 0.2 and 2.0 %
    on two. A compiler that lets every load from a pool wait for all earlier stores to it, as it doesn't know the slots,
    would make a large batch much slower.
    """
    arguments = {
        "hidden": hidden,
        "W_in_qkv": W_in_qkv,
        "W_in_z": W_in_z,
        "W_in_a": W_in_a,
        "W_in_b": W_in_b,
        "conv_weight": conv_weight,
        "conv_pool": conv_pool,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "norm_weight": norm_weight,
        "recurrent_pool": recurrent_pool,
    }
    described = _checked(arguments, pools.FORMED, backend)
    B, count = pools.check_shapes({name: argument.shape for name, argument in described.items()})
    _check_options(norm_eps, lnc)
    pools.check_memory(arguments)
    read, write = pools.check_slots(slots, write_slots, fresh, B, count)
    if B == 0:
        return _empty(hidden, (0, 1, described["W_in_z"].shape[1]))
    indices = {"read_slots": pools.like(hidden, read), "write_slots": pools.like(hidden, write)}
    updated = (conv_pool, recurrent_pool)
    with pools.restored_on_error(updated, write):
        results = backends.run(
            "gdn_block_tkg_slots", {**arguments, **indices, "norm_eps": float(norm_eps)}, lnc, backend
        )
        pools.settle(updated, results[1:])
    return results[0]


def gdn_tkg(
    q: Any,
    k: Any,
    v: Any,
    b: Any,
    a: Any,
    A_log: Any,
    dt_bias: Any,
    z: Any,
    norm_weight: Any,
    state_in: Any,
    *,
    norm_eps: float = 1e-6,
    lnc: int | None = None,
    backend: str = "auto",
) -> tuple[Any, Any]:
    """The gated delta rule of one step with its norms and gates, from raw heads. BH = B * Hv, value head fastest.

    Args:
        q, k: [BH, K] bf16 or fp32, raw, one row a value head.
        v, z: [BH, V], in the dtype of q.
        b, a: [BH] fp32, raw.
        A_log, dt_bias: [Hv] fp32. norm_weight: [V] fp32.
        state_in: [BH, K, V] fp32.
        norm_eps, lnc, backend: as for `gdn_block_tkg`.

    Returns:
        out [BH, V] in the dtype of q, and state_out [BH, K, V] fp32.

    Raises:
        ValueError, gdn_kernels.BackendUnavailable: as `gdn_block_tkg`.
    """
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "b": b,
        "a": a,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "z": z,
        "norm_weight": norm_weight,
        "state_in": state_in,
    }
    described = _checked(arguments, ("q", "k", "v", "z"), backend)
    sizes = resolve(TKG_SHAPES, {name: argument.shape for name, argument in described.items()})
    _check_size("q", "K", sizes["K"], 1, 128)
    _check_size("v", "V", sizes["V"], 1, 128)
    _check_size("A_log", "Hv", sizes["Hv"], 1, None)
    if sizes["BH"] % sizes["Hv"]:
        raise ValueError(
            f"q must have a multiple of Hv = {sizes['Hv']} rows, one for each head of A_log, got {sizes['BH']}"
        )
    _check_options(norm_eps, lnc)
    if sizes["BH"] == 0:
        return _empty(q, (0, sizes["V"])), _empty(state_in)
    results = backends.run("gdn_tkg", {**arguments, "norm_eps": float(norm_eps)}, lnc, backend)
    return results[0], results[1]


def gdn_conv1d_decode(
    x: Any, conv_state: Any, conv_weight: Any, *, lnc: int | None = None, backend: str = "auto"
) -> tuple[Any, Any]:
    """The causal conv of one decode step, with silu.

    Args:
        x: [B, C, 1] bf16 or fp32, the newest column.
        conv_state: [B, C, K_win] in the dtype of x, oldest column first; column 0 is dropped. K_win is 2 to 8.
        conv_weight: [C, K_win] fp32, oldest tap first.
        lnc, backend: as for `gdn_block_tkg`.

    Returns:
        out [B, C, 1] and new_conv_state [B, C, K_win], in the dtype of x.

    Raises:
        ValueError, gdn_kernels.BackendUnavailable: as `gdn_block_tkg`.
    """
    arguments = {"x": x, "conv_state": conv_state, "conv_weight": conv_weight}
    described = _checked(arguments, ("x", "conv_state"), backend)
    sizes = resolve(CONV1D_SHAPES, {name: argument.shape for name, argument in described.items()})
    _check_size("conv_weight", "K_win", sizes["K_win"], 2, 8)
    _check_size("x", "C", sizes["C"], 1, None)
    _check_options(1.0, lnc)
    if sizes["B"] == 0:
        return _empty(x), _empty(conv_state)
    results = backends.run("gdn_conv1d_decode", arguments, lnc, backend)
    return results[0], results[1]


def _checked(arguments: Mapping[str, Any], formed: Sequence[str], backend: str) -> dict[str, _Argument]:
    """Every argument described, once kinds, dtypes and memory are known to fit; `formed` are in the form's dtype."""
    described = _describe(arguments)
    _check_dtypes(described, formed)
    _check_memory(described, backend)
    return described


def _describe(arguments: Mapping[str, Any]) -> dict[str, _Argument]:
    """Every argument's kind, shape, dtype and layout; all are of one kind."""
    described = {name: _argument(name, value) for name, value in arguments.items()}
    usual = Counter(argument.kind for argument in described.values()).most_common(1)[0][0]
    for name, argument in described.items():
        if argument.kind != usual:
            raise ValueError(f"{name} must be a {usual} array like the other arguments, got a {argument.kind} one")
    return described


def _argument(name: str, value: Any) -> _Argument:
    if isinstance(value, np.ndarray):
        return _Argument("numpy", value.shape, value.dtype.name, value.flags.c_contiguous, "cpu")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return _Argument("torch", tuple(value.shape), dtype, value.is_contiguous(), value.device.type)
    raise ValueError(f"{name} must be a NumPy array or a torch tensor, got {type(value).__name__}")


def _check_dtypes(described: Mapping[str, _Argument], formed: Sequence[str]) -> None:
    """The arguments in `formed` share one dtype, bf16 or fp32; all others are fp32."""
    votes = Counter(described[name].dtype for name in formed if described[name].dtype in FORMS)
    if len(votes) == 2 and len(set(votes.values())) == 1:  # as many of each: none is the odd one out
        found = ", ".join(f"{name} {described[name].dtype}" for name in formed)
        raise ValueError(f"{', '.join(formed)} must be all bfloat16 or all float32, got {found}")
    form = votes.most_common(1)[0][0] if votes else FORMS[0]
    for name, argument in described.items():
        if name in formed and argument.dtype != form:
            reason = f"like {', '.join(other for other in formed if other != name)}" if votes else "or float32"
            raise ValueError(f"{name} must be {form} {reason}, got {argument.dtype}")
        if name not in formed and argument.dtype != "float32":
            raise ValueError(f"{name} must be float32, got {argument.dtype}")


def _check_memory(described: Mapping[str, _Argument], backend: str) -> None:
    """Every argument is contiguous, and on a device only if the kernel runs there."""
    for name, argument in described.items():
        if not argument.contiguous:
            raise ValueError(f"{name} must be C-contiguous, got a strided view of shape {list(argument.shape)}")
        if argument.device != "cpu" and backends.choose(backend) != "trn2":
            raise ValueError(f"{name} must be on the CPU for backend {backend!r}, got device {argument.device}")


def _check_options(norm_eps: float, lnc: int | None) -> None:
    number = isinstance(norm_eps, (int, float, np.floating)) and not isinstance(norm_eps, bool)
    if not number or not SMALLEST_EPS <= norm_eps < math.inf:
        raise ValueError(f"norm_eps must be a number from {SMALLEST_EPS:.1e} upwards, got {norm_eps!r}")
    if lnc not in (None, 1, 2) or isinstance(lnc, bool):
        raise ValueError(f"lnc must be 1, 2 or None, got {lnc!r}")


def _check_part(layer_Hk: int | None, Hk: int) -> None:
    whole = isinstance(layer_Hk, int) and not isinstance(layer_Hk, bool)
    if layer_Hk is not None and not (whole and layer_Hk >= Hk and layer_Hk % Hk == 0):
        raise ValueError(f"layer_Hk must be a multiple of these key heads, Hk = {Hk}, or None, got {layer_Hk!r}")


def _check_size(name: str, symbol: str, size: int, least: int, most: int | None) -> None:
    if size < least or (most is not None and size > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} must have {symbol} of {bounds}, got {size}")


def _empty(like: Any, shape: Sequence[int] | None = None) -> Any:
    """No elements, of the kind and dtype of `like`."""
    return (
        like.new_empty(shape or like.shape) if hasattr(like, "new_empty") else np.empty(shape or like.shape, like.dtype)
    )
