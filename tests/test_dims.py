"""BlockDims: dimensions from shapes, each wrong one named; and the model presets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdn_kernels.dims import BLOCK_SHAPES, MODELS, BlockDims

DIMS = BlockDims(H=256, Hk=3, Hv=6, K=48, V=80, K_win=5)


def shapes_of(dims: BlockDims, B: int) -> dict[str, tuple[int, ...]]:
    return {
        "hidden": (B, 1, dims.H),
        "W_in_qkv": (dims.H, dims.conv_dim),
        "W_in_z": (dims.H, dims.value_dim),
        "W_in_a": (dims.H, dims.Hv),
        "W_in_b": (dims.H, dims.Hv),
        "conv_weight": (dims.conv_dim, dims.K_win),
        "conv_state": (B, dims.conv_dim, dims.K_win),
        "A_log": (dims.Hv,),
        "dt_bias": (dims.Hv,),
        "norm_weight": (dims.V,),
        "recurrent_state": (B, dims.Hv, dims.K, dims.V),
    }


some_dims = st.builds(
    lambda tiles, Hk, gqa, K, V, K_win: BlockDims(128 * tiles, Hk, Hk * gqa, K, V, K_win),
    *(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    *(st.integers(1, 128), st.integers(1, 128), st.integers(2, 8)),
)


@given(some_dims, st.integers(0, 5))
def test_shapes_give_the_dimensions_back(dims: BlockDims, B: int) -> None:
    assert BlockDims.from_shapes(**shapes_of(dims, B)) == dims


def test_derived_dimensions() -> None:
    assert (DIMS.gqa, DIMS.key_dim, DIMS.value_dim, DIMS.conv_dim) == (2, 144, 480, 768)


@pytest.mark.parametrize(
    ("name", "axis"), [(name, axis) for name, symbols in BLOCK_SHAPES.items() for axis in range(len(symbols))]
)
@pytest.mark.parametrize("by", [-1, 1])
def test_one_wrong_size_is_blamed_on_its_argument(name: str, axis: int, by: int) -> None:
    shapes = shapes_of(DIMS, 2)
    wrong = list(shapes[name])
    wrong[axis] += by
    shapes[name] = tuple(wrong)
    with pytest.raises(ValueError) as error:
        BlockDims.from_shapes(**shapes)
    message = str(error.value)
    assert name in message
    if (name, axis) not in {("conv_weight", 1), ("recurrent_state", 2)}:  # two arguments' word against each other; K
        assert message.startswith(name) and f"got [{', '.join(map(str, wrong))}]" in message


@pytest.mark.parametrize("name", BLOCK_SHAPES)
def test_a_wrong_rank_is_blamed_on_its_argument(name: str) -> None:
    shapes = shapes_of(DIMS, 2)
    shapes[name] += (1,)
    with pytest.raises(ValueError, match=rf"^{name} must have shape .* got "):
        BlockDims.from_shapes(**shapes)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("H", 192, "multiple of 128"),
        ("H", 0, "positive"),
        ("Hk", -1, "positive"),
        ("Hv", 7, "multiple of Hk"),
        ("K", 129, "at most 128"),
        ("V", 256, "at most 128"),
        ("K_win", 1, "2 to 8"),
        ("K_win", 9, "2 to 8"),
    ],
)
def test_rules(name: str, value: int, rule: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*{rule}.*{value}"):
        BlockDims(**{**vars(DIMS), name: value})


def test_presets() -> None:
    largest = MODELS["Qwen3.5-397B-A17B"]
    assert (largest.layers, largest.gdn_layers, largest.dims.conv_dim) == (60, 45, 12288)
    assert MODELS["Qwen3.6-35B-A3B"].dims == MODELS["Qwen3-Next-80B-A3B"].dims
    for name, preset in MODELS.items():
        assert preset.name == name
        assert preset.dims.Hk == 16 and preset.dims.K == preset.dims.V == 128
        assert preset.gdn_layers * 4 == preset.layers * 3
