"""Where an implementation rounds, as data: a table from site to format, and the tables of the known implementations.

There is one reference code path. It offers every intermediate value to the policy under the name of its site, and the
policy rounds it, or leaves it alone where its table has no such site. Rollouts (`gdn_kernels.drift`) offer a few more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gdn_kernels.dtypes import FORMATS, Array, round_to

# Every site, in the order in which the block passes them.
SITES: Mapping[str, str] = {
    "conv_weight": "the conv taps, as loaded",
    "A_log": "the log decay, as loaded",
    "dt_bias": "the softplus bias, as loaded",
    "norm_weight": "the gain of the gated norm, as loaded",
    "window": "qkv = hidden @ W_in_qkv, the newest column of the conv window",
    "z": "hidden @ W_in_z",
    "a": "hidden @ W_in_a",
    "b": "hidden @ W_in_b",
    "conv": "the sum over the taps, before silu",
    "c": "the conv's output after silu: q|k|v inside the block",
    "conv_out": "the same where it is a result, that of gdn_conv1d_decode",
    "squares": "q * q and k * k, before they are summed",
    "q": "q, normalised and scaled by 1 / sqrt(K)",
    "k": "k, normalised",
    "beta": "sigmoid(b)",
    "S_mem": "the decayed state as operand of the memory read k^T S1; the update keeps the unrounded one",
    "delta": "(v - k^T S1) * beta",
    "S_out": "the new state as operand of the readout q^T S2; the result keeps the unrounded one",
    "state": "the new state as it is returned",
    "o": "q^T S2",
    "normed": "o * rsqrt(mean(o * o) + norm_eps)",
    "gained": "normed * norm_weight",
    "core_out": "the block's output",
}

# Sites between two operations of a stage, which rollouts offer and the one-step reference does not.
ROLLOUT_SITES: Mapping[str, str] = {
    "v": "v by itself, after the conv",
    "decay": "exp(g)",
    "S1": "S * exp(g), the decayed state that memory read and update both use",
    "memory": "k^T S1",
    "outer": "k outer delta, before it is added to the state",
}

# The dtype of the form: bf16, or fp32 when the call's activations are fp32.
FORM = "form"

# Stochastic rounding: a value between two bf16 neighbours goes to either, the nearer with the higher probability, so
# that the expected result is the value itself.
BF16_SR = "bf16_sr"

# What is computed between the roundings: the equations in float64, or the kernel's own fp32 operations in their order.
ARITHMETICS = ("float64", "kernel")

# How the kernel's arithmetic writes S * exp(g) as S * c + S * e: c = 1 for a decay above 1/2 and 0 for a faster one
# (the kernel), always 0 (a plain product), always 1 (S plus S * expm1(g)).
DECAYS = ("split", "product", "expm1")


@dataclass(frozen=True)
class Roundings:
    """A rounding policy: which sites are rounded, and to what.

    A site that the table does not name keeps the dtype in which the run computes. To change single sites, make another:
    `Roundings("exact but bf16 delta", {**EXACT.table, "delta": "bf16"})`.

    Attributes:
        name: how reports call it.
        table: site (a key of SITES or ROLLOUT_SITES) -> one of dtypes.FORMATS, "form", the dtype of the call's
            activations, or "bf16_sr", for rollouts only: they have the random bits.
        arithmetic: one of ARITHMETICS; rollouts heed it, the reference computes in the dtype it is asked for.
        decay: one of DECAYS, for the kernel's arithmetic.

    Raises:
        ValueError: for an unknown site, format, arithmetic or decay, and for the kernel's arithmetic with other
            roundings than its own.
    """

    name: str
    table: Mapping[str, str]
    arithmetic: str = "float64"
    decay: str = "split"

    def __post_init__(self) -> None:
        sites, formats = (*SITES, *ROLLOUT_SITES), (*FORMATS, BF16_SR, FORM)
        for site, fmt in self.table.items():
            if site not in sites:
                raise ValueError(f"table: a site must be one of {', '.join(sites)}, got {site!r}")
            if fmt not in formats:
                raise ValueError(f"table[{site!r}] must be one of {', '.join(formats)}, got {fmt!r}")
        for name, value, allowed in (
            ("arithmetic", self.arithmetic, ARITHMETICS),
            ("decay", self.decay, DECAYS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if self.arithmetic == "kernel" and self.table != CONTRACT:
            raise ValueError(f"table must be {CONTRACT} with the kernel's arithmetic, got {dict(self.table)}")

    def of_form(self, form: str) -> Roundings:
        """The same policy for a call whose activations are `form`, "bf16" or "fp32"."""
        return replace(self, table={site: form if fmt == FORM else fmt for site, fmt in self.table.items()})

    def round(self, site: str, x: Array) -> Array:
        """`x` (float32 or float64, any shape) as this policy leaves it at `site`, in the dtype of `x`."""
        if site not in SITES and site not in ROLLOUT_SITES:
            raise ValueError(f"site must be one of {', '.join((*SITES, *ROLLOUT_SITES))}, got {site!r}")
        fmt = self.table.get(site)
        if fmt == BF16_SR:
            raise ValueError(f"table[{site!r}] is {fmt!r}, which needs the random bits of a rollout")
        return x if fmt is None else round_to(x, fmt)


# The contract's: what is stored is rounded, nothing else is.
CONTRACT: Mapping[str, str] = {"window": FORM, "conv_out": FORM, "state": "fp32", "core_out": FORM}
EXACT = Roundings("exact", CONTRACT)

# To compare with, where the rounding of the results would hide the error looked for. The window stays rounded: it is
# the input of everything after it.
UNROUNDED = Roundings("unrounded", {"window": FORM})

# Hugging Face transformers 5.24, Qwen3_5GatedDeltaNet in a model loaded in bf16, one-token decode on PyTorch. l2norm,
# recurrence and state are fp32 there. Its softplus turns into the identity above 20; the two differ by 2e-9 there, a
# thousandth of an fp32 step, so that is no site.
HF_BF16 = Roundings(
    "hf_bf16",
    {
        **dict.fromkeys(("conv_weight", "A_log", "dt_bias", "norm_weight"), "bf16"),
        **dict.fromkeys(("window", "z", "a", "b", "conv", "c", "conv_out", "beta"), "bf16"),
        "state": "fp32",
        **dict.fromkeys(("o", "normed", "gained", "core_out"), "bf16"),
    },
)

# NKI Library 2.33, experimental gdn_block_tkg: activations pass from stage to stage through bf16 HBM tensors (a and b
# through fp32 ones), and every operand of a matmul in the recurrence is cast to bf16.
NKILIB = Roundings(
    "nkilib",
    {
        **dict.fromkeys(("window", "z", "c", "conv_out"), "bf16"),
        **dict.fromkeys(("squares", "q", "k", "S_mem", "delta", "S_out"), "bf16"),
        "state": "fp32",
        "core_out": "bf16",
    },
)

# This package's kernel, operation by operation, and what it would be with another form of the decay.
OURS = Roundings("ours", CONTRACT, arithmetic="kernel")
OURS_PRODUCT = Roundings("ours_product", CONTRACT, arithmetic="kernel", decay="product")
OURS_EXPM1 = Roundings("ours_expm1", CONTRACT, arithmetic="kernel", decay="expm1")

# The best any fp32 state can do: every step in float64, and the state rounded once to fp32. `exact` is the same, under
# the name of what it is the yardstick for.
FP64_STEP_FP32_STATE = Roundings("fp64_step_fp32_state", CONTRACT)

# Exact steps whose state is stored narrower.
BF16_STATE = Roundings("bf16_state", {**CONTRACT, "state": "bf16"})
FP16_STATE = Roundings("fp16_state", {**CONTRACT, "state": "fp16"})
FP8_STATE = Roundings("fp8_state", {**CONTRACT, "state": "fp8_e4m3"})
BF16_STATE_SR = Roundings("bf16_state_sr", {**CONTRACT, "state": BF16_SR})

PRESETS: Mapping[str, Roundings] = {
    policy.name: policy
    for policy in (
        EXACT,
        OURS,
        NKILIB,
        HF_BF16,
        BF16_STATE,
        FP16_STATE,
        BF16_STATE_SR,
        FP8_STATE,
        FP64_STEP_FP32_STATE,
        OURS_PRODUCT,
        OURS_EXPM1,
    )
}
