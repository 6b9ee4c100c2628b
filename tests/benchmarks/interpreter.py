"""What the interpreter costs: time an instruction above the NumPy work in it, and one decode step at model size.

Every instruction is timed beside bare NumPy that computes the same from the same memory, in turns, in this process. The
sizes are those of tiles in the kernels. Run by `make bench`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

from gdn_kernels import backends, interpreter
from gdn_kernels.cli.step import random_arguments
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl

Pair = tuple[Callable[[], Any], Callable[[], Any]]


def tile(*shape: int, dtype: Any = nl.float32, buffer: Any = nl.sbuf) -> Any:
    made = nl.ndarray(shape, dtype=dtype, buffer=buffer)
    nisa.memset(dst=made, value=1.5)
    return made


def mix(x: np.ndarray) -> dict[str, Pair]:
    """The fixed mix: name -> (instruction, its NumPy equivalent), to be called in a kernel. x: [128, 512] fp32."""
    rows, a, b, out = tile(128, 512), tile(128, 64), tile(128, 64), tile(128, 64)
    column, total, acc = tile(128, 1), tile(128, 1), nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.psum)
    left, right = tile(128, 128, dtype=nl.bfloat16), tile(128, 128, dtype=nl.bfloat16)
    turned, narrow = nl.ndarray((128, 128), dtype=nl.bfloat16, buffer=nl.psum), tile(128, 64, dtype=nl.bfloat16)
    source = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=source, src=rows)
    n_rows, n_a, n_b, n_out = x.copy(), x[:, :64].copy(), x[:, :64].copy(), x[:, :64].copy()
    n_column, n_left = x[:, :1].copy(), x[:, :128].astype(ml_dtypes.bfloat16)
    n_acc, n_turned, n_narrow = np.zeros((128, 128), np.float32), n_left.copy(), n_left[:, :64].copy()

    def assign(target: np.ndarray, values: Any) -> None:
        target[...] = values

    def product() -> None:
        n_acc[...] = (n_left.astype(np.float64).T @ n_left.astype(np.float64)).astype(np.float32)

    return {
        "dma_copy": (lambda: nisa.dma_copy(dst=rows, src=source), lambda: assign(n_rows, x)),
        "memset": (lambda: nisa.memset(dst=out, value=0.5), lambda: assign(n_out, 0.5)),
        "tensor_copy": (lambda: nisa.tensor_copy(dst=out, src=a), lambda: assign(n_out, n_a)),
        "tensor_copy to bf16": (
            lambda: nisa.tensor_copy(dst=narrow, src=a),
            lambda: assign(n_narrow, n_a.astype(ml_dtypes.bfloat16)),
        ),
        "tensor_tensor": (
            lambda: nisa.tensor_tensor(dst=out, data1=a, data2=b, op=nl.multiply),
            lambda: assign(n_out, n_a * n_b),
        ),
        "tensor_scalar": (
            lambda: nisa.tensor_scalar(dst=out, data=a, op0=nl.multiply, operand0=column, op1=nl.add, operand1=0.5),
            lambda: assign(n_out, n_a * n_column + np.float32(0.5)),
        ),
        "scalar_tensor_tensor": (
            lambda: nisa.scalar_tensor_tensor(
                dst=out, data=a, op0=nl.multiply, operand0=column, op1=nl.add, operand1=b
            ),
            lambda: assign(n_out, n_a * n_column + n_b),
        ),
        "activation": (
            lambda: nisa.activation(dst=out, op=nl.exp, data=a, scale=0.5),
            lambda: assign(n_out, np.exp((n_a * np.float32(0.5)).astype(np.float64))),
        ),
        "tensor_reduce": (
            lambda: nisa.tensor_reduce(dst=total, op=nl.add, data=a, axis=1),
            lambda: np.add.accumulate(n_a, axis=1)[:, -1:].copy(),
        ),
        "nc_matmul": (lambda: nisa.nc_matmul(dst=acc, stationary=left, moving=right, accumulate=False), product),
        "nc_transpose": (lambda: nisa.nc_transpose(dst=turned, data=left), lambda: assign(n_turned, n_left.T)),
        "slice of a slice": (
            lambda: nisa.tensor_copy(dst=out[:, 0:32][:, 0:16], src=rows[:, 32:64][:, 0:16]),
            lambda: assign(n_out[:, 0:16], n_rows[:, 32:48]),
        ),
    }


def overheads(repeats: int = 300) -> dict[str, tuple[float, float]]:
    """Name -> (median microseconds of the instruction, of its NumPy equivalent)."""
    found: dict[str, tuple[float, float]] = {}

    def kernel() -> Any:
        x = np.random.default_rng(0).standard_normal((128, 512)).astype(np.float32)
        for name, pair in mix(x).items():
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(repeats):
                for function, spent in zip(pair, times, strict=True):
                    started = time.perf_counter()
                    function()
                    spent.append(time.perf_counter() - started)
            found[name] = (median(times[0]) * 1e6, median(times[1]) * 1e6)
        out = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile(1, 1))
        return out

    interpreter.launch(kernel, {})
    return found


def step_seconds(cores: int, repeats: int = 3) -> float:
    """The shortest of a few steps of Qwen3.5-35B-A3B's block at batch 1, with all checks."""
    arguments = random_arguments("Qwen3.5-35B-A3B", 1, 0)
    kernel, seconds = backends.interpreted("gdn_block_tkg")[cores], []
    for _ in range(repeats):
        started = time.perf_counter()
        kernel(**arguments, norm_eps=1e-6)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    found = overheads()
    above = median(own - bare for own, bare in found.values())
    steps = {cores: step_seconds(cores) for cores in (1, 2)}
    if args.json:
        print(json.dumps({"instructions_us": found, "median_overhead_us": above, "step_seconds": steps}))
        return
    print(f"{'us, median':24s}{'instruction':>12s}{'NumPy':>9s}{'above':>9s}")
    for name, (own, bare) in found.items():
        print(f"{name:24s}{own:12.1f}{bare:9.1f}{own - bare:9.1f}")
    print(f"median overhead of an instruction: {above:.1f} us")
    for cores, seconds in steps.items():
        print(f"Qwen3.5-35B-A3B block, one step, {cores} core(s): {seconds:.3f} s")


if __name__ == "__main__":
    main()
