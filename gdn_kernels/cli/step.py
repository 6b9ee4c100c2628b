"""`gdn-kernels step`: one interpreted decode step at the size of a published model, timed and checked.

The time is the interpreter's own on this machine. It says nothing about a Trainium device.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from gdn_kernels import MODELS, gdn_block_tkg, reference
from gdn_kernels.dtypes import Array, bfloat16
from gdn_kernels.metrics import relative_error


def add_parser(subparsers: Any) -> None:
    """Declare the command's options on the action that `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser("step", help="time one interpreted step", description=__doc__)
    parser.add_argument("--model", default="Qwen3.5-35B-A3B", choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default 1)")
    parser.add_argument("--lnc", type=int, default=1, choices=(1, 2), help="cores (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights and states")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.batch < 1:
        print(f"gdn-kernels step: --batch must be at least 1, got {args.batch}", file=sys.stderr)
        return 2
    arguments: Any = random_arguments(args.model, args.batch, args.seed)
    started = time.perf_counter()
    core_out, window, state = gdn_block_tkg(**arguments, lnc=args.lnc, backend="interpreter")
    seconds = time.perf_counter() - started
    peak = peak_rss_mb()
    exact_out, _, exact_state = reference.gdn_block_tkg(**arguments, window=window)
    report = {
        "model": args.model,
        "batch": args.batch,
        "lnc": args.lnc,
        "backend": "interpreter",
        "seconds": round(seconds, 3),
        "peak_rss_mb": round(peak),
        "state_error": relative_error(state, exact_state),
        "output_error": relative_error(core_out, exact_out),
    }
    if args.json:
        print(json.dumps(report))
    else:
        print("interpreter: no device was used")
        for name, value in report.items():
            print(f"{name:13s} {value}")
    return 0


def peak_rss_mb() -> float:
    """The most memory this process has had resident, in MB.

    Linux keeps the figure of getrusage over a fork, so a child of a large process would report its parent's; the one in
    /proc is the program's own.
    """
    status = Path("/proc/self/status")
    if status.exists():
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def random_arguments(model: str, B: int, seed: int) -> dict[str, Array]:
    """Arguments of `gdn_block_tkg` at a model's size: unit-variance activations, decays from fast to slow."""
    dims = MODELS[model].dims
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return rng.standard_normal(shape, np.float32) * np.float32(scale)

    def weight(columns: int) -> Array:
        return normal(dims.H, columns, scale=dims.H**-0.5).astype(bfloat16())

    return {
        "hidden": normal(B, 1, dims.H).astype(bfloat16()),
        "W_in_qkv": weight(dims.conv_dim),
        "W_in_z": weight(dims.value_dim),
        "W_in_a": weight(dims.Hv),
        "W_in_b": weight(dims.Hv),
        "conv_weight": normal(dims.conv_dim, dims.K_win, scale=0.5),
        "conv_state": normal(B, dims.conv_dim, dims.K_win).astype(bfloat16()),
        "A_log": rng.uniform(-8, 1, dims.Hv).astype(np.float32),
        "dt_bias": normal(dims.Hv),
        "norm_weight": 1 + normal(dims.V, scale=0.1),
        "recurrent_state": normal(B, dims.Hv, dims.K, dims.V),
    }
