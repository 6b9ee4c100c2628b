"""What share of a decode step the block is: the bytes of a whole model's step, by part.

At the batch sizes of decoding, weights, caches and states are read faster than they are needed by any engine, so bytes
are time. Everything is bf16 but the states and the small parameters of the block. Activations are left out: kilobytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from gdn_kernels.dims import MODELS, ModelPreset
from gdn_kernels.latency.floor import floor_bytes

BF16 = 2  # bytes


@dataclass(frozen=True)
class RestOfModel:
    """What a model has beside its Gated DeltaNet layers.

    Attributes:
        heads, kv_heads, head_dim: of the full-attention layers, whose queries come with as wide a gate.
        vocabulary: rows of the output head.
        intermediate: width of the dense MLP, 0 with experts.
        experts, active, expert, shared: experts in a layer, how many a token takes, width of one and of the shared one.
    """

    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    intermediate: int = 0
    experts: int = 0
    active: int = 0
    expert: int = 0
    shared: int = 0


# 9B, 35B-A3B and Next: the defaults of transformers 5.24's configuration classes. The others: other people's public
# launch scripts, as their config.json could not be read here. Models whose MLP width isn't known here are left out.
REST: Mapping[str, RestOfModel] = {
    "Qwen3.5-0.8B": RestOfModel(8, 2, 256, 248_320, intermediate=3584),
    "Qwen3.5-9B": RestOfModel(16, 4, 256, 248_320, intermediate=12_288),
    "Qwen3.5-27B": RestOfModel(24, 4, 256, 248_320, intermediate=17_408),
    "Qwen3.5-35B-A3B": RestOfModel(16, 2, 256, 248_320, experts=256, active=8, expert=512, shared=512),
    "Qwen3-Next-80B-A3B": RestOfModel(16, 2, 256, 151_936, experts=512, active=10, expert=512, shared=512),
    "Qwen3.5-397B-A17B": RestOfModel(32, 2, 256, 248_320, experts=512, active=10, expert=1024, shared=1024),
}


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step moves, by part.

    Attributes:
        block: all Gated DeltaNet layers, as far as the block goes: weights, windows and states, in and out.
        out_proj: their output projections.
        attention: weights of the full-attention layers. kv_cache: their keys and values, read, and the new ones.
        mlp: dense, or the router and the experts that the batch takes.
        head: output head, norms, and one embedding row a sequence.
    """

    block: float
    out_proj: float
    attention: float
    kv_cache: float
    mlp: float
    head: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    @property
    def share(self) -> float:
        """Of the block in all bytes."""
        return self.block / self.total

    def gain(self, speedup: float) -> float:
        """How much faster a step gets, as a factor, when the block alone gets faster by `speedup`."""
        return 1 / (1 - self.share + self.share / speedup)


def step_bytes(name: str, B: int = 1, context: int = 4096) -> StepBytes:
    """Bytes of one decode step of a published model.

    Args:
        name: a key of REST.
        B: sequences. Each takes its experts by itself and evenly, so that some are shared: an expectation.
        context: tokens in the KV cache of each.

    Raises:
        ValueError: for a model that isn't in REST.
    """
    if name not in REST:
        raise ValueError(f"name must be one of {', '.join(REST)}, got {name!r}")
    return bytes_of(MODELS[name], REST[name], B, context)


def bytes_of(model: ModelPreset, rest: RestOfModel, B: int = 1, context: int = 4096) -> StepBytes:
    """The same for any model of the family."""
    dims, H = model.dims, model.dims.H
    attention_layers = model.layers - model.gdn_layers
    width, kv_width = rest.heads * rest.head_dim, rest.kv_heads * rest.head_dim
    attention = H * (2 * width + 2 * kv_width) + width * H + 2 * rest.head_dim
    norms = (2 * model.layers + 1) * H
    return StepBytes(
        block=model.gdn_layers * floor_bytes(dims, B),
        out_proj=BF16 * model.gdn_layers * dims.value_dim * H,
        attention=BF16 * attention_layers * attention,
        kv_cache=BF16 * attention_layers * B * 2 * kv_width * (context + 1),
        mlp=BF16 * model.layers * _mlp(rest, H, B),
        head=BF16 * (H * rest.vocabulary + norms + B * H),
    )


def _mlp(rest: RestOfModel, H: int, B: int) -> float:
    """Weights of one layer's MLP that a step reads."""
    if not rest.experts:
        return 3 * H * rest.intermediate
    taken = rest.experts * (1 - (1 - rest.active / rest.experts) ** B)
    router = H * rest.experts + H  # and the shared expert's gate
    return router + 3 * H * (taken * rest.expert + rest.shared)
