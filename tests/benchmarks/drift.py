"""Tokens per second of the drift lab, beside transformers' own recurrent rule in torch on the same work.

Both get the same convolved q, k and v and raw gates of the same tokens, on one thread, and give the readouts and the
last state: norms of q and k, decay, recurrence. Ours also computes the gates from a and b, and rounds as the kernel
does. No oracle, nothing recorded. Then a whole rollout, with and without its oracle. Run by `make bench`.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np

from gdn_kernels import reference
from gdn_kernels.drift.config import RolloutConfig
from gdn_kernels.drift.emulate import Kernel
from gdn_kernels.drift.heads import first_state, layer_weights
from gdn_kernels.drift.recurrence import loops
from gdn_kernels.drift.rollout import Rollout
from gdn_kernels.policy import OURS


def seconds(call: Callable[[], object], repeats: int) -> float:
    call()  # compiles, and touches the memory
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def rules(config: RolloutConfig, tokens: int, repeats: int) -> tuple[float, float, float]:
    """Seconds of ours and of torch's on `tokens` tokens, and how far their readouts are apart."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule as torch_rule
    torch.set_num_threads(1)
    weights, d, B = layer_weights(config), config.dims, config.B
    state = first_state(config, d).recurrent_state
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((tokens, B, d.Hk, d.K)).astype(np.float32) for _ in range(2))
    v = rng.standard_normal((tokens, B, d.Hv, d.V)).astype(np.float32)
    a, b = (rng.standard_normal((tokens, B, d.Hv)).astype(np.float32) for _ in range(2))
    kernel = Kernel(weights, state, "bf16", OURS)
    o = np.empty_like(v)

    def ours() -> None:
        kernel.S[...] = state
        queries, keys = kernel._l2norm(q, np.float32(d.K**-0.5)), kernel._l2norm(k, np.float32(1))
        decay_beta, split = kernel._gates(a, b)
        dots = kernel._dots(queries, keys)
        loops().kernel_steps(kernel.S, queries, keys, v, decay_beta, split, dots, kernel.n, o)

    g, beta = reference.gates(a, b, weights.A_log, weights.dt_bias)
    theirs = [torch.from_numpy(np.ascontiguousarray(x.swapaxes(0, 1), np.float32)) for x in (q, k, v, g, beta)]
    first = torch.from_numpy(state)

    def torchs() -> torch.Tensor:
        with torch.no_grad():
            return torch_rule(*theirs, initial_state=first, output_final_state=True, use_qk_l2norm_in_kernel=True)[0]

    apart = np.abs(torchs().numpy().swapaxes(0, 1) - (ours(), o)[1]).max()  # type: ignore[func-returns-value]
    return seconds(ours, repeats), seconds(torchs, repeats), float(apart)


def rollout_rate(config: RolloutConfig, oracle: bool) -> float:
    """Tokens per second of a whole rollout, from projections to records."""
    rollout = Rollout(config, oracle=oracle)
    rollout.advance(1)
    start = time.perf_counter()
    rollout.advance(config.tokens)
    return (rollout.done - 1) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    config = RolloutConfig(tokens=4 * options.tokens, B=options.batch)
    ours, theirs, apart = rules(config, options.tokens, options.repeats)
    print(f"recurrent rule, Hk {config.Hk}, Hv {config.Hv}, K = V = {config.K}, B {config.B}, {options.tokens} tokens")
    print(f"  ours ({loops().__name__.rpartition('.')[2]})     {options.tokens / ours:10,.0f} tokens/s")
    print(f"  transformers, torch {options.tokens / theirs:10,.0f} tokens/s")
    print(f"  ratio {theirs / ours:.1f}; readouts at most {apart:.1e} apart")
    print(f"whole rollout of {config.tokens} tokens, H {config.H}")
    for oracle in (False, True):
        print(f"  {'with' if oracle else 'without'} oracle {rollout_rate(config, oracle):10,.0f} tokens/s")


if __name__ == "__main__":
    main()
