"""DecodeState: rows cleared, other layouts, files, transformers' cache; K != V, asymmetric states, put-in faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arguments import block_arguments
from hypothesis import given
from hypothesis import strategies as st

from gdn_kernels import BlockDims, DecodeState, reference
from gdn_kernels.dtypes import bfloat16
from gdn_kernels.state import narrow_conv_state, to_key_major, to_value_major, widen_conv_state

Array = np.ndarray[Any, Any]

DIMS = BlockDims(H=128, Hk=2, Hv=6, K=16, V=8, K_win=3)
SQUARE = BlockDims(H=128, Hk=1, Hv=3, K=16, V=16, K_win=4)


def some_state(dims: BlockDims = DIMS, B: int = 4, form: str = "bf16") -> DecodeState:
    arguments = block_arguments(dims, B, form)
    return DecodeState(arguments["conv_state"], arguments["recurrent_state"], dims)


def copy_of(state: DecodeState) -> DecodeState:
    return DecodeState(state.conv_state.copy(), state.recurrent_state.copy(), state.dims)


def same(one: DecodeState, other: DecodeState) -> bool:
    arrays = zip(one.arguments().values(), other.arguments().values(), strict=True)
    return one.dims == other.dims and all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in arrays)


def step(state: DecodeState, seed: int = 0, **changes: Any) -> tuple[Array, Array, Array]:
    """One step of the reference from this state."""
    arguments = block_arguments(state.dims, state.batch, state.form, seed)
    return reference.gdn_block_tkg(**{**arguments, **state.arguments(), **changes})


def differ(one: tuple[Array, ...], other: tuple[Array, ...]) -> bool:
    return any(x.tobytes() != y.tobytes() for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("form", ["bf16", "fp32"])
def test_zeros_is_the_state_before_the_first_token(form: str) -> None:
    state = DecodeState.zeros(DIMS, 5, form=form)
    assert (state.batch, state.form) == (5, form)
    assert state.conv_state.shape == (5, DIMS.conv_dim, 3) and state.recurrent_state.shape == (5, 6, 16, 8)
    assert not state.conv_state.any() and not state.recurrent_state.any()
    step(state)


@pytest.mark.parametrize(("batch", "form"), [(-1, "bf16"), (True, "bf16"), (1.0, "bf16"), (1, "fp16"), (1, "bfloat16")])
def test_zeros_of_nothing_sensible_is_refused(batch: Any, form: str) -> None:
    with pytest.raises(ValueError, match=r"^(batch|form) must be"):
        DecodeState.zeros(DIMS, batch, form=form)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recurrent_state": (4, 6, 8, 16)}, r"recurrent_state must have shape \[B, Hv, K, V\] = \[4, 6, 16, 8\]"),
        ({"recurrent_state": (3, 6, 16, 8)}, r"recurrent_state must have shape .* = \[4, 6, 16, 8\], got \[3, "),
        ({"conv_state": (4, DIMS.conv_dim, 4)}, r"conv_state must have shape \[B, conv_dim, K_win\] = \[4, 112, 3\]"),
        ({"conv_state": (4, DIMS.conv_dim, 2)}, r"conv_state must have shape .* got \[4, 112, 2\]"),
        ({"conv_state": (4, 3, DIMS.conv_dim)}, r"conv_state must have shape .* got \[4, 3, 112\]"),
    ],
)
def test_transposed_or_too_wide_states_are_refused(change: dict[str, tuple[int, ...]], message: str) -> None:
    arrays = some_state(form="fp32").arguments() | {n: np.zeros(shape, np.float32) for n, shape in change.items()}
    with pytest.raises(ValueError, match=message):
        DecodeState(**arrays, dims=DIMS)


def test_other_dtypes_and_strided_views_are_refused() -> None:
    state = some_state()
    with pytest.raises(ValueError, match="conv_state must be bfloat16 or float32, got float16"):
        DecodeState(state.conv_state.astype(np.float16), state.recurrent_state, DIMS)
    with pytest.raises(ValueError, match="recurrent_state must be float32, got bfloat16"):
        DecodeState(state.conv_state, state.recurrent_state.astype(bfloat16()), DIMS)
    with pytest.raises(ValueError, match="recurrent_state must be C-contiguous"):
        DecodeState(state.conv_state, np.ascontiguousarray(state.recurrent_state.swapaxes(2, 3)).swapaxes(2, 3), DIMS)


@given(rows=st.lists(st.integers(0, 3), max_size=6))
def test_reset_clears_these_rows_and_no_other(rows: list[int]) -> None:
    state, before = some_state(), some_state()
    state.reset(np.array(rows, np.int64))
    for row in range(4):
        for got, held in zip(state.arguments().values(), before.arguments().values(), strict=True):
            assert got[row].tobytes() == (bytes(held[row].nbytes) if row in rows else held[row].tobytes())


@pytest.mark.parametrize("form", ["bf16", "fp32"])
def test_reset_row_decodes_as_a_new_sequence(form: str) -> None:
    state = some_state(form=form)
    state.recurrent_state[2], state.conv_state[2] = np.nan, np.inf
    state.reset([2, 2])
    fresh = step(DecodeState.zeros(DIMS, 4, form=form))
    for got, expected in zip(step(state), fresh, strict=True):
        assert got[2].tobytes() == expected[2].tobytes()


def test_row_that_was_not_cleared_is_noticed() -> None:
    fresh = step(DecodeState.zeros(DIMS, 4))
    for name in ("conv_state", "recurrent_state"):
        state = DecodeState.zeros(DIMS, 4)
        getattr(state, name)[2] = getattr(some_state(), name)[2]
        assert differ(tuple(x[2] for x in step(state)), tuple(x[2] for x in fresh))


@pytest.mark.parametrize("rows", [[4], [-1], [0, 99], [1.0], [True], ["1"], np.array([True, False, True, False])])
def test_rows_that_are_none_are_refused_and_nothing_is_cleared(rows: Any) -> None:
    state = some_state()
    with pytest.raises(ValueError, match=r"^rows must be "):
        state.reset([0, *rows])
    assert same(state, some_state())


@pytest.mark.parametrize("form", ["bf16", "fp32"])
def test_narrow_window_and_back_changes_nothing_that_lives(form: str) -> None:
    state = some_state(form=form)
    narrow = narrow_conv_state(state.conv_state, DIMS)
    assert narrow.shape == (4, DIMS.conv_dim, 2) and narrow.flags.c_contiguous
    wide = widen_conv_state(narrow, DIMS)
    assert wide.shape == state.conv_state.shape and wide.dtype == state.conv_state.dtype and wide.flags.c_contiguous
    assert not wide[..., 0].any()
    np.testing.assert_array_equal(wide[..., 1:], state.conv_state[..., 1:])
    assert not differ(step(state), step(DecodeState(wide, state.recurrent_state, DIMS)))


def test_dead_column_on_the_wrong_side_is_noticed() -> None:
    state = some_state()
    narrow = narrow_conv_state(state.conv_state, DIMS)
    wrong = np.concatenate([narrow, np.zeros_like(narrow[..., :1])], axis=-1)
    assert differ(step(state), step(state, conv_state=wrong))


@pytest.mark.parametrize("shape", [(4, 112, 3), (4, 2, 112), (4, 112, 1), (112, 2)])
def test_window_of_another_width_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"columns must have shape \[B, conv_dim, K_win - 1\] = \["):
        widen_conv_state(np.zeros(shape, np.float32), DIMS)
    with pytest.raises(ValueError, match=r"conv_state must have shape \[B, conv_dim, K_win\] = \["):
        narrow_conv_state(np.zeros((4, 112, 2) if shape == (4, 112, 3) else shape, np.float32), DIMS)


def test_orders_of_the_state() -> None:
    S = some_state().recurrent_state
    swapped = to_value_major(S, DIMS)
    assert swapped.shape == (4, 6, 8, 16) and swapped.flags.c_contiguous
    np.testing.assert_array_equal(swapped, np.einsum("bhkv->bhvk", S))
    for order in (None, "value-major"):
        np.testing.assert_array_equal(to_key_major(swapped, DIMS, order=order), S)
    np.testing.assert_array_equal(to_key_major(S, DIMS), S)
    np.testing.assert_array_equal(to_value_major(swapped, DIMS, order="value-major"), swapped)


def test_order_is_checked_where_the_shape_tells() -> None:
    S = some_state().recurrent_state
    with pytest.raises(ValueError, match=r"state must have shape \[B, 6, 8, 16\] \(value-major\), got \[4, 6, 16, 8\]"):
        to_key_major(S, DIMS, order="value-major")
    with pytest.raises(
        ValueError, match=r"must have shape \[B, 6, 16, 8\] \(key-major\) or \[B, 6, 8, 16\] \(value-maj"
    ):
        to_key_major(S[:, :5], DIMS)
    with pytest.raises(ValueError, match=r"state must have shape .*, got \[6, 16, 8\]"):
        to_value_major(S[0], DIMS)
    with pytest.raises(ValueError, match="order must be one of key-major, value-major, got 'VK'"):
        to_key_major(S, DIMS, order="VK")


def test_order_has_to_be_named_where_no_shape_tells() -> None:
    state = some_state(SQUARE)
    S = state.recurrent_state
    for convert in (to_key_major, to_value_major):
        with pytest.raises(
            ValueError, match="order must be named where K = V = 16: key-major or value-major, got None"
        ):
            convert(S, SQUARE)
    swapped = to_value_major(S, SQUARE, order="key-major")
    np.testing.assert_array_equal(swapped, S.swapaxes(2, 3))
    np.testing.assert_array_equal(to_key_major(swapped, SQUARE, order="value-major"), S)
    # The fault that no shape shows: taken as it is, it decodes to something else.
    assert differ(step(state), step(state, recurrent_state=swapped))


@pytest.mark.parametrize("form", ["bf16", "fp32"])
@pytest.mark.parametrize("B", [0, 3])
def test_file_keeps_every_byte(tmp_path: Path, form: str, B: int) -> None:
    state = some_state(B=B, form=form)
    if B:
        state.recurrent_state[0, 0, 0, :3] = [np.nan, -0.0, np.inf]
    state.save(tmp_path / "state")
    assert same(DecodeState.load(str(tmp_path / "state")), state)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_state().save(tmp_path / "state")
    other = some_state(B=2)

    def full(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="disk full"):
            other.save(tmp_path / "state")
    assert same(DecodeState.load(tmp_path / "state"), some_state())
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    other.save(tmp_path / "state")
    assert same(DecodeState.load(tmp_path / "state"), other)


def test_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    file = tmp_path / "state"
    some_state().save(file)
    whole = file.read_bytes()
    refusal = f"^{file}: expected a file that DecodeState.save wrote, could not read it: "
    for length in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=refusal):
            DecodeState.load(file)
    for place in (-1, -5000, -13000):  # in S, in S, in the window
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"^{file}: expected checksum [0-9a-f]+, found [0-9a-f]+: damaged"):
            DecodeState.load(file)
    save_file(some_state().arguments(), file)
    with pytest.raises(ValueError, match=refusal + "its format is None"):
        DecodeState.load(file)
    assert b"K_win" in whole
    file.write_bytes(whole.replace(b"K_win", b"K_won"))
    with pytest.raises(ValueError, match=refusal):
        DecodeState.load(file)
    with pytest.raises(FileNotFoundError, match="absent"):
        DecodeState.load(tmp_path / "absent")


def test_nothing_heavy_is_imported_with_the_state() -> None:
    code = "import sys, gdn_kernels.state; sys.exit(bool({'ml_dtypes', 'torch', 'safetensors'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# transformers' cache


@pytest.fixture(scope="module")
def small() -> Any:
    """A small Qwen3.5: K 48, V 32, K_win 4, gqa 3."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    from gdn_kernels.small_models import small_model

    return small_model("qwen3_5")


CACHED = BlockDims(H=128, Hk=2, Hv=6, K=48, V=32, K_win=4)


def filled(model: Any, B: int = 3) -> Any:
    """The model's cache after a prompt."""
    import torch

    from gdn_kernels.small_models import prompts

    with torch.no_grad():
        return model(**prompts(B), use_cache=True).past_key_values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_gives_its_states(small: Any, dtype: str) -> None:
    import copy

    import torch

    model = copy.deepcopy(small).to(getattr(torch, dtype))
    cache = filled(model)
    for layer in range(3):
        state = DecodeState.from_cache(cache, layer, CACHED)
        held = cache.layers[layer]
        assert state.form == ("fp32" if dtype == "float32" else "bf16")
        np.testing.assert_array_equal(state.conv_state.astype(np.float32), held.conv_states[0].float().numpy())
        np.testing.assert_array_equal(state.recurrent_state, held.recurrent_states[0].numpy())
        state.reset([0, 1, 2])  # a copy: the cache keeps what it has
        assert held.recurrent_states[0].abs().sum() > 0 and held.conv_states[0].abs().sum() > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("used", [True, False])
def test_cache_takes_states_and_goes_on_from_them(small: Any, dtype: str, used: bool) -> None:
    import copy

    import torch
    import transformers

    model = copy.deepcopy(small).to(getattr(torch, dtype))
    source = filled(model)
    target = transformers.DynamicCache(config=model.config)
    if used:
        target = filled(model)
        addresses = [target.layers[layer].recurrent_states[0].data_ptr() for layer in range(3)]
        for layer in range(3):
            DecodeState.zeros(CACHED, 3, form="fp32" if dtype == "float32" else "bf16").to_cache(target, layer)
    for layer in range(3):
        DecodeState.from_cache(source, layer, CACHED).to_cache(target, layer)
    if used:
        assert addresses == [target.layers[layer].recurrent_states[0].data_ptr() for layer in range(3)]
    hidden = torch.randn(3, 1, 128, generator=torch.Generator().manual_seed(4)).to(model.dtype)
    for layer in range(3):
        assert same(DecodeState.from_cache(target, layer, CACHED), DecodeState.from_cache(source, layer, CACHED))
        with torch.no_grad():
            got, expected = (model.model.layers[layer].linear_attn(hidden, cache=c) for c in (target, source))
        assert torch.equal(got, expected)


def test_caches_that_hold_no_such_state_are_refused(small: Any) -> None:
    import transformers

    cache = transformers.DynamicCache(config=small.config)
    state = DecodeState.zeros(CACHED, 3, form="fp32")
    with pytest.raises(ValueError, match=r"cache must hold states of layer 0, it has none yet; DecodeState\.zeros"):
        DecodeState.from_cache(cache, 0, CACHED)
    cache = filled(small)
    for call in (
        lambda layer: DecodeState.from_cache(cache, layer, CACHED),
        lambda layer: state.to_cache(cache, layer),
    ):
        with pytest.raises(ValueError, match="layer must be a linear-attention layer of the cache, layer 3 is Dynamic"):
            call(3)
        with pytest.raises(ValueError, match="layer must be 0 to 3 in this cache, got 4"):
            call(4)
    with pytest.raises(ValueError, match="cache must be a transformers cache with linear-attention layers, got dict"):
        DecodeState.from_cache({}, 0, CACHED)
    cache.reset()
    with pytest.raises(ValueError, match="it has none yet"):
        DecodeState.from_cache(cache, 0, CACHED)


def test_states_of_another_shape_or_dtype_are_refused(small: Any) -> None:
    cache = filled(small)
    turned = BlockDims(H=128, Hk=3, Hv=9, K=32, V=32, K_win=4)
    with pytest.raises(ValueError, match=r"recurrent_state must have shape|conv_state must have shape"):
        DecodeState.from_cache(cache, 0, turned)
    with pytest.raises(
        ValueError, match=r"conv_state must have shape \[3, 384, 4\] and dtype torch.float32 like the one"
    ):
        DecodeState.zeros(CACHED, 2, form="fp32").to_cache(cache, 0)
    with pytest.raises(ValueError, match=r"conv_state must have .* got \[3, 384, 4\] and torch.bfloat16"):
        DecodeState.zeros(CACHED, 3, form="bf16").to_cache(cache, 0)


def test_cache_that_records_its_past_is_refused(small: Any) -> None:
    # It holds a column a token: one too many at least, and which ones stay is not known yet.
    cache = filled(small)
    cache.layers[0].activate_past_recording()
    for call in (
        lambda: DecodeState.from_cache(cache, 0, CACHED),
        lambda: DecodeState.zeros(CACHED, 3, form="fp32").to_cache(cache, 0),
    ):
        with pytest.raises(ValueError, match="cache must not be recording its past, it is in layer 0"):
            call()
