"""The block stage by stage, to show what fusion saves: the kernels of `kernels.unfused` composed, and modelled.

A total is the sum of the five launches, each from its first issue to its last result. What a launch itself costs the
host and the runtime has no published figure and is left out, of five launches as of one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gdn_kernels import backends
from gdn_kernels.dims import MODELS, BlockDims
from gdn_kernels.interpreter.machine import Machine
from gdn_kernels.latency.floor import argument_specs, floor_us
from gdn_kernels.latency.model import Modelled, model_block, model_machines
from gdn_kernels.latency.tables import table
from gdn_kernels.timeline.costs import TRN2, Costs

Launch = Callable[[str, Mapping[str, Any]], Any]


def stage_by_stage(launch: Launch, arguments: Mapping[str, Any], norm_eps: float = 1e-6) -> tuple[Any, Any, Any]:
    """One decode step as five launches.

    Args:
        launch: runs a kernel of `kernels.unfused` by name with the given arguments and returns its results: a tuple,
            or a single one as it is or in a tuple. `backends.run` of a backend will do.
        arguments: those of `gdn_block_tkg` but `norm_eps`, arrays or, of a dry launch, their `Spec`s.

    Returns:
        core_out, new_conv_state, new_recurrent_state, as `gdn_block_tkg` does.
    """
    hidden, state = arguments["hidden"], arguments["recurrent_state"]
    _, Hv, K, V = state.shape
    Hk = (arguments["W_in_qkv"].shape[1] - Hv * V) // (2 * K)

    def given(*names: str) -> dict[str, Any]:
        return {name: arguments[name] for name in names}

    projected = {**given("hidden", "W_in_qkv", "W_in_z", "W_in_a", "W_in_b"), "Hk": Hk}
    q, k, v, z, a, b = launch("in_proj_stage", projected)
    convolved = {"q": q, "k": k, "v": v, **given("conv_state", "conv_weight"), "Hk": Hk, "Hv": Hv}
    q, k, v, new_conv_state = launch("conv1d_stage", convolved)
    q, k, decay_beta, split = launch(
        "gates_stage", {"q": q, "k": k, "a": a, "b": b, **given("A_log", "dt_bias"), "Hk": Hk}
    )
    recurrence = {"q": q, "k": k, "v": v, "decay_beta": decay_beta, "split": split, "recurrent_state": state}
    o, new_state = launch("delta_rule_stage", recurrence)
    normed = {"o": o, "z": z, **given("norm_weight"), "norm_eps": norm_eps, "dtype": hidden.dtype}
    core_out = launch("gated_norm_stage", normed)
    return core_out[0] if isinstance(core_out, tuple) else core_out, new_conv_state, new_state


def model_stages(dims: BlockDims, B: int, lnc: int = 1, costs: Costs = TRN2) -> Modelled:
    """The stage-by-stage baseline for B sequences on `lnc` cores, with the floor of the whole block."""
    launches: list[list[Machine]] = []

    def launch(kernel: str, given: Mapping[str, Any]) -> tuple[Any, ...]:
        result = backends.interpreted(kernel)[lnc].launch(**given, dry=True)
        launches.append(result.machines)
        outputs: tuple[Any, ...] = result.outputs
        return outputs

    stage_by_stage(launch, argument_specs(dims, B))
    return model_machines(launches, floor_us(dims, B, lnc, costs), costs)


@dataclass(frozen=True)
class Saving:
    """Fused beside stage by stage, both modelled, in us. models: all names that share the dimensions."""

    models: tuple[str, ...]
    B: int
    fused_us: float
    stages_us: float
    floor_us: float


def savings(batches: Iterable[int], lnc: int = 1, costs: Costs = TRN2) -> Iterator[Saving]:
    """Every published model at every batch, each set of dimensions once."""
    names: dict[BlockDims, list[str]] = {}
    for name, preset in MODELS.items():
        names.setdefault(preset.dims, []).append(name)
    for B in batches:
        for dims, models in names.items():
            fused, stages = model_block(dims, B, lnc, costs), model_stages(dims, B, lnc, costs)
            yield Saving(tuple(models), B, fused.modelled_us, stages.modelled_us, fused.floor_us)


def savings_table(found: Sequence[Saving], lnc: int, target: str, markdown: bool = False) -> str:
    """The table that the README shows."""
    header = (
        "model",
        "B",
        "fused, us",
        "stage by stage, us",
        "times",
        "floor, us",
        "fused / floor",
        "stages / floor",
    )
    cells = [
        (
            ", ".join(saving.models),
            str(saving.B),
            f"{saving.fused_us:.1f}",
            f"{saving.stages_us:.1f}",
            f"{saving.stages_us / saving.fused_us:.2f}",
            f"{saving.floor_us:.1f}",
            f"{saving.fused_us / saving.floor_us:.2f}",
            f"{saving.stages_us / saving.floor_us:.2f}",
        )
        for saving in found
    ]
    title = f"Modelled, not measured: {target}, LNC {lnc}. Launch overhead is left out, of one launch as of five."
    return f"{title}\n\n{table(header, cells, markdown)}"
