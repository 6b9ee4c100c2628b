"""The sample: one GDN layer as a checkpoint folder, and what transformers' own layer gave for it.

The folder of this package is a checkpoint (config.json, model.safetensors) that `BlockWeights.from_checkpoint` reads
like any other: H = 256, Hk = 2, Hv = 4, K = V = 128, K_win = 4, one layer. `recorded.safetensors` beside it holds a
64-token prefill and 64 decode steps (B = 1) of `Qwen3_5GatedDeltaNet` on these weights, once as an fp32 and once as
a bf16 model; its metadata names the torch and transformers versions. make_sample.py made all three files.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from gdn_kernels.dtypes import bfloat16
from gdn_kernels.weights import BlockWeights

PATH = Path(__file__).parent
LAYER = 0
PREFILL_TOKENS = 64
DECODE_STEPS = 64
RECORDED_STEPS = (0, 1, 8, 64)
"""States are recorded after the prefill (0) and after these decode steps."""


@dataclass(frozen=True)
class Recording:
    """Inputs and results of transformers' layer in one form; the arrays have its dtype, recurrent states are fp32.

    prefill_hidden   [1, 64, H], input of the prefill
    hidden           [64, 1, 1, H], input of each decode step: hidden[i] is that of step i + 1
    core_out         [64, 1, 1, value_dim], input of out_proj at each decode step
    conv_state       step -> [1, conv_dim, K_win], after RECORDED_STEPS
    recurrent_state  step -> [1, Hv, K, V], after RECORDED_STEPS
    """

    prefill_hidden: npt.NDArray[Any]
    hidden: npt.NDArray[Any]
    core_out: npt.NDArray[Any]
    conv_state: dict[int, npt.NDArray[Any]]
    recurrent_state: dict[int, npt.NDArray[Any]]


def load_weights() -> BlockWeights:
    """The sample layer."""
    return BlockWeights.from_checkpoint(PATH, LAYER)


def load_recording(form: str, folder: Path = PATH) -> Recording:
    """The recording of `form`, "fp32" or "bf16"; ValueError for another name."""
    from safetensors import safe_open

    if form not in ("fp32", "bf16"):
        raise ValueError(f'form: expected "fp32" or "bf16", got {form!r}')
    # safetensors finds bf16 by NumPy's name for it, which exists once ml_dtypes is imported.
    dtype = bfloat16() if form == "bf16" else "float32"
    bfloat16()
    with safe_open(folder / "recorded.safetensors", framework="numpy") as file:
        return Recording(
            prefill_hidden=file.get_tensor("prefill_hidden").astype(dtype),
            hidden=file.get_tensor("decode_hidden").astype(dtype),
            core_out=file.get_tensor(f"{form}.core_out"),
            conv_state={step: file.get_tensor(f"{form}.conv_state.{step}") for step in RECORDED_STEPS},
            recurrent_state={step: file.get_tensor(f"{form}.recurrent_state.{step}") for step in RECORDED_STEPS},
        )
