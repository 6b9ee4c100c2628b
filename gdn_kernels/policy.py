"""Where an implementation rounds, as data: a table from site to format, and the tables of the known implementations.

There is one reference code path. It offers every intermediate value to the policy under the name of its site, and the
policy rounds it, or leaves it alone where its table has no such site.
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

# The dtype of the form: bf16, or fp32 when the call's activations are fp32.
FORM = "form"


@dataclass(frozen=True)
class Roundings:
    """A rounding policy: which sites are rounded, and to what.

    A site that the table does not name keeps the dtype in which the run computes. To change single sites, make another:
    `Roundings("exact but bf16 delta", {**EXACT.table, "delta": "bf16"})`.

    Attributes:
        name: how reports call it.
        table: site (a key of SITES) -> one of dtypes.FORMATS, or "form", the dtype of the call's activations.

    Raises:
        ValueError: for an unknown site or format.
    """

    name: str
    table: Mapping[str, str]

    def __post_init__(self) -> None:
        for site, fmt in self.table.items():
            if site not in SITES:
                raise ValueError(f"table: a site must be one of {', '.join(SITES)}, got {site!r}")
            if fmt not in (*FORMATS, FORM):
                raise ValueError(f"table[{site!r}] must be one of {', '.join((*FORMATS, FORM))}, got {fmt!r}")

    def of_form(self, form: str) -> Roundings:
        """The same policy for a call whose activations are `form`, "bf16" or "fp32"."""
        return replace(self, table={site: form if fmt == FORM else fmt for site, fmt in self.table.items()})

    def round(self, site: str, x: Array) -> Array:
        """`x` (float32 or float64, any shape) as this policy leaves it at `site`, in the dtype of `x`."""
        if site not in SITES:
            raise ValueError(f"site must be one of {', '.join(SITES)}, got {site!r}")
        return round_to(x, self.table[site]) if site in self.table else x


# The contract's: what is stored is rounded, nothing else is.
EXACT = Roundings("exact", {"window": FORM, "conv_out": FORM, "state": "fp32", "core_out": FORM})

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
