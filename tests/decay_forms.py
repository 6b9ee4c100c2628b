"""The two forms of the decay that the kernel does not have, as pieces of it: what the decision is judged by.

Run as a program it prints what each form costs, modelled, and which error it leaves, from the saved rollouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gdn_kernels import MODELS, backends
from gdn_kernels.drift import store
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl
from gdn_kernels.latency.model import model_block

SAVED = Path(__file__).parent.parent / "data/drift"
FORMS = ("ours_product", "ours_expm1", "ours")  # policies of the emulation; the last is the kernel
CASES = (("Qwen3.5-35B-A3B", 1), ("Qwen3.5-35B-A3B", 32), ("Qwen3.5-0.8B", 8), ("Qwen3.5-0.8B", 32))  # B, one core


@contextmanager
def kernel_with(form: str) -> Iterator[None]:
    """The interpreter's copy of the kernel has that form of the decay inside."""
    block = backends.interpreted("gdn_block_tkg").function.__globals__
    rule, gates = block["delta_rule"].__globals__, block["gates_of"].__globals__
    before = rule["_update_tile"], gates["gates"]
    if form != "ours":
        rule["_update_tile"] = _update_of(rule["view"], form == "ours_product")
        gates["gates"] = _gates_of(gates["_decay_rate"], form == "ours_product")
    try:
        yield
    finally:
        rule["_update_tile"], gates["gates"] = before


def _update_of(view: Callable[..., Any], product: bool) -> Callable[..., None]:
    """`delta_rule._update_tile` as S = S * e + k outer delta, or as S = S + (S * e + k outer delta)."""

    def update(S, delta, b, tile, t, kq, split, identity, layout, column, buffers):  # type: ignore[no-untyped-def]
        n, T, P = layout.n, layout.T, layout.partitions()
        V, _, count = delta.shape
        slot, key_column = tile * T + t, tile * split.shape[3] + column
        rows = nl.ndarray((P, V), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=rows,
            stationary=view(delta, V, (tile * n * T + t) * count + b, [[T * count, n], [0, layout.lanes]]),
            moving=identity[0:V, 0:V],
            is_moving_onezero=True,
            accumulate=False,
        )
        written = nl.ndarray((P, n, V), dtype=nl.float32, buffer=nl.psum)
        key = view(kq, P, kq.shape[3] + key_column, [[2 * kq.shape[3], n], [0, V]])
        nisa.tensor_tensor(dst=written, data1=view(rows, P, 0, [[0, n], [1, V]]), data2=key, op=nl.multiply)
        change, state = buffers.changes.next(), S[:, slot, :]
        nisa.activation(dst=change, op=nl.copy, data=state, scale=split[:, slot, 0, column : column + 1])
        nisa.tensor_tensor(dst=state if product else change, data1=written, data2=change, op=nl.add)
        if not product:
            nisa.tensor_tensor(dst=state, data1=state, data2=change, op=nl.add, engine=nisa.engine.gpsimd)

    return update


def _gates_of(decay_rate: Callable[..., Any], product: bool) -> Callable[..., Any]:
    """`gates.gates` with e = exp(g), or e = expm1(g), for every head; c is there and nobody reads it."""

    def gates(a, b, A_log, dt_bias):  # type: ignore[no-untyped-def]
        heads, B = a.shape
        rate = decay_rate(a, A_log, dt_bias)
        decay_beta = nl.ndarray((heads, 2, B), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=decay_beta[:, 0, :], op=nl.exp, data=rate, scale=-1.0)
        nisa.activation(dst=decay_beta[:, 1, :], op=nl.sigmoid, data=b)
        split = nl.ndarray((heads, 2, B), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=split[:, 1, :], value=0.0)
        e = split[:, 0, :]
        if product:
            nisa.tensor_copy(dst=e, src=decay_beta[:, 0, :])
        else:
            nisa.activation(dst=e, op=nl.tanh, data=rate, scale=-0.5)
            nisa.scalar_tensor_tensor(
                dst=e, data=decay_beta[:, 0, :], op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=e
            )
        return decay_beta, split

    return gates


def modelled_us(form: str) -> list[float]:
    """What the block takes with that form, us, modelled, for each case."""
    with kernel_with(form):
        return [model_block(MODELS[model].dims, B).modelled_us for model, B in CASES]


@cache
def saved_errors() -> dict[tuple[str, int, str], np.ndarray]:
    """(stream, tokens, policy) -> state errors of the saved rollouts at the last token, [seeds, heads]."""
    found: dict[tuple[str, int, str], list[np.ndarray]] = defaultdict(list)
    for path in sorted(SAVED.glob("*/*.npz")):
        if ".checkpoint." not in path.name:
            result = store.load(path)
            key = result.config["stream"], result.config["tokens"], result.config["policy"]
            found[key].append(result.records["state_error"][-1])
    return {key: np.stack(errors) for key, errors in found.items()}


def main() -> None:
    print("modelled us on one core: " + ", ".join(f"{model} B {B}" for model, B in CASES))
    for form in FORMS:
        print(f"  {form:14}" + "".join(f" {us:9.2f}" for us in modelled_us(form)))
    print("state error at the last token, median over seeds: of each head, fast to slow; of the worst (its range)")
    for (stream, tokens, policy), errors in sorted(saved_errors().items()):
        heads = "".join(f" {error:7.1e}" for error in np.median(errors, axis=0))
        worst = errors.max(1)
        spread = f"{np.median(worst):7.1e} ({worst.min():.1e} to {worst.max():.1e})"
        print(f"  {stream:11} {tokens:6} {policy:13} {len(errors)} seeds {heads}  {spread}")


if __name__ == "__main__":
    main()
