"""Every dimension of the block, derived from shapes and checked; the published models' dimensions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Layout = Mapping[str, tuple[str | int, ...]]

BLOCK_SHAPES: Layout = {
    "hidden": ("B", 1, "H"),
    "W_in_qkv": ("H", "conv_dim"),
    "W_in_z": ("H", "value_dim"),
    "W_in_a": ("H", "Hv"),
    "W_in_b": ("H", "Hv"),
    "conv_weight": ("conv_dim", "K_win"),
    "conv_state": ("B", "conv_dim", "K_win"),
    "A_log": ("Hv",),
    "dt_bias": ("Hv",),
    "norm_weight": ("V",),
    "recurrent_state": ("B", "Hv", "K", "V"),
}
# Those that are all bf16 or, in the fp32 form, all fp32; the others are always fp32.
BLOCK_FORMED = ("hidden", "W_in_qkv", "W_in_z", "W_in_a", "W_in_b", "conv_state")
TKG_SHAPES: Layout = {
    "q": ("BH", "K"),
    "k": ("BH", "K"),
    "v": ("BH", "V"),
    "b": ("BH",),
    "a": ("BH",),
    "A_log": ("Hv",),
    "dt_bias": ("Hv",),
    "z": ("BH", "V"),
    "norm_weight": ("V",),
    "state_in": ("BH", "K", "V"),
}
CONV1D_SHAPES: Layout = {
    "x": ("B", "C", 1),
    "conv_state": ("B", "C", "K_win"),
    "conv_weight": ("C", "K_win"),
}


# The argument to look at when a dimension breaks a rule of its own.
_OWNERS = {
    "H": "hidden",
    "Hk": "W_in_qkv",
    "Hv": "recurrent_state",
    "K": "recurrent_state",
    "V": "recurrent_state",
    "K_win": "conv_weight",
}


def resolve(layout: Layout, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The size of every dimension named in `layout`, each the one that most arguments agree on.

    Args:
        layout: argument name -> its dimensions, each a name or a fixed size.
        shapes: argument name -> its shape.

    Raises:
        ValueError: naming the argument whose rank or size disagrees, the shape it should have and the shape it has.
    """
    for name, symbols in layout.items():
        if len(shapes[name]) != len(symbols):
            raise ValueError(f"{name} must have shape {_text(symbols)}, got {_text(shapes[name])}")
    votes: dict[str, list[tuple[int, str]]] = {}
    for name, symbols in layout.items():
        for symbol, size in zip(symbols, shapes[name], strict=True):
            if isinstance(symbol, str):
                votes.setdefault(symbol, []).append((int(size), name))
    if {"value_dim", "Hv", "V"} <= votes.keys():  # W_in_z settles which of norm_weight and recurrent_state is wrong
        Hv = _most_common(votes["Hv"])
        votes["V"] += [(size // Hv, name) for size, name in votes["value_dim"] if Hv > 0 and size % Hv == 0]
    sizes = {symbol: _most_common(cast) for symbol, cast in votes.items()}
    if "value_dim" in sizes:
        sizes["value_dim"] = sizes["Hv"] * sizes["V"]
    for name, symbols in layout.items():
        expected = tuple(s if isinstance(s, int) else sizes[s] for s in symbols)
        if tuple(shapes[name]) != expected:
            wrong = [s for s, size, want in zip(symbols, shapes[name], expected, strict=True) if size != want]
            others = sorted({other for s in wrong for _, other in votes.get(str(s), []) if other != name})
            source = f" by {', '.join(others)}" if others else ""
            raise ValueError(
                f"{name} must have shape {_text(symbols)} = {_text(expected)}{source}, got {_text(shapes[name])}"
            )
    return sizes


def _most_common(cast: list[tuple[int, str]]) -> int:
    return Counter(size for size, _ in cast).most_common(1)[0][0]


def _text(shape: Sequence[str | int]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


@dataclass(frozen=True)
class BlockDims:
    """The dimensions of one Gated DeltaNet decode block; the batch is not one of them.

    Attributes:
        H: hidden size, a multiple of 128.
        Hk, Hv: key heads and value heads, Hv a multiple of Hk.
        K, V: size of a key head and of a value head, each at most 128.
        K_win: columns of the conv window, 2 to 8.

    Raises:
        ValueError: naming the dimension that breaks one of these rules.
    """

    H: int
    Hk: int
    Hv: int
    K: int
    V: int
    K_win: int = 4

    def __post_init__(self) -> None:
        for name in ("H", "Hk", "Hv", "K", "V", "K_win"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.H % 128:
            raise ValueError(f"H must be a multiple of 128, got {self.H}")
        for name in ("K", "V"):
            if getattr(self, name) > 128:
                raise ValueError(f"{name} must be at most 128, got {getattr(self, name)}")
        if self.Hv % self.Hk:
            raise ValueError(f"Hv must be a multiple of Hk, got Hv = {self.Hv}, Hk = {self.Hk}")
        if not 2 <= self.K_win <= 8:
            raise ValueError(f"K_win must be 2 to 8, got {self.K_win}")

    @property
    def gqa(self) -> int:
        """Value heads that share one key head."""
        return self.Hv // self.Hk

    @property
    def key_dim(self) -> int:
        """Channels of q, and of k."""
        return self.Hk * self.K

    @property
    def value_dim(self) -> int:
        """Channels of v, z and core_out."""
        return self.Hv * self.V

    @property
    def conv_dim(self) -> int:
        """Channels of q|k|v together, those the conv runs over."""
        return 2 * self.key_dim + self.value_dim

    @classmethod
    def from_shapes(
        cls,
        hidden: Sequence[int],
        W_in_qkv: Sequence[int],
        W_in_z: Sequence[int],
        W_in_a: Sequence[int],
        W_in_b: Sequence[int],
        conv_weight: Sequence[int],
        conv_state: Sequence[int],
        A_log: Sequence[int],
        dt_bias: Sequence[int],
        norm_weight: Sequence[int],
        recurrent_state: Sequence[int],
    ) -> BlockDims:
        """The dimensions from the shapes of `gdn_block_tkg`'s arguments, in its order; every shape is checked.

        Hk is not the size of any axis; it follows from conv_dim = 2 * Hk * K + Hv * V.

        Raises:
            ValueError: naming the argument whose shape does not fit the others, or the dimension out of its range.
        """
        shapes = {name: shape for name, shape in locals().items() if name != "cls"}
        sizes = resolve(BLOCK_SHAPES, shapes)
        K, conv_dim, value_dim = sizes["K"], sizes["conv_dim"], sizes["value_dim"]
        if K < 1:
            raise ValueError(f"recurrent_state must have K of at least 1, got shape {_text(recurrent_state)}")
        Hk, rest = divmod(conv_dim - value_dim, 2 * K)
        if rest or Hk < 1:
            raise ValueError(
                f"W_in_qkv must have conv_dim = 2 * Hk * K + Hv * V columns for a whole Hk, with K = {K} and "
                f"Hv * V = {value_dim} by recurrent_state and W_in_z, got {conv_dim}"
            )
        try:
            return cls(H=sizes["H"], Hk=Hk, Hv=sizes["Hv"], K=K, V=sizes["V"], K_win=sizes["K_win"])
        except ValueError as error:  # the rule is about a dimension; the caller knows arguments
            owner = _OWNERS[str(error).split()[0]]
            raise ValueError(f"{owner} {_text(BLOCK_SHAPES[owner])} {_text(shapes[owner])}: {error}") from None


@dataclass(frozen=True)
class ModelPreset:
    """A published model: its name, the dimensions of its Gated DeltaNet layers, and how many of its layers are such."""

    name: str
    dims: BlockDims
    layers: int
    gdn_layers: int


def _preset(name: str, H: int, layers: int, Hv: int) -> ModelPreset:
    # One layer in four is full attention in the whole family.
    return ModelPreset(name, BlockDims(H=H, Hk=16, Hv=Hv, K=128, V=128, K_win=4), layers, layers * 3 // 4)


# From `text_config` of the checkpoints that Qwen publishes.
MODELS: dict[str, ModelPreset] = {
    preset.name: preset
    for preset in (
        _preset("Qwen3.5-0.8B", 1024, 24, 16),
        _preset("Qwen3.5-2B", 2048, 24, 16),
        _preset("Qwen3.5-4B", 2560, 32, 32),
        _preset("Qwen3.5-9B", 4096, 32, 32),
        _preset("Qwen3.5-27B", 5120, 64, 48),
        _preset("Qwen3.6-27B", 5120, 64, 48),
        _preset("Qwen3.8-27B", 5120, 64, 48),
        _preset("Qwen3.5-35B-A3B", 2048, 40, 32),
        _preset("Qwen3.6-35B-A3B", 2048, 40, 32),
        _preset("Qwen3-Next-80B-A3B", 2048, 48, 32),
        _preset("Qwen3.5-122B-A10B", 3072, 48, 64),
        _preset("Qwen3.5-397B-A17B", 4096, 60, 64),
    )
}
