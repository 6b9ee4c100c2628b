"""The fused block in the interpreter against the float64 reference: every shape, byte equalities, extremes."""

import numpy as np
import pytest
from arguments import Arguments, block_arguments, check_block, form_dtype, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from gdn_kernels import BlockDims, backends, gdn_block_tkg, reference

PER_ROW = ("hidden", "conv_state", "recurrent_state")

# Head tiles of 4, 2 and 1; gqa 1 to 5; K != V; odd head counts; every window; H one and several partitions' worth.
SHAPES = {
    "sample": BlockDims(256, 2, 4, 128, 128, 4),
    "tile of 4": BlockDims(256, 8, 16, 128, 64, 4),
    "tile of 4, gqa 3": BlockDims(128, 8, 24, 32, 16, 3),
    "tile of 2": BlockDims(128, 4, 4, 64, 128, 4),
    "tile of 2, gqa 5": BlockDims(128, 4, 20, 16, 24, 2),
    "odd keys": BlockDims(384, 3, 9, 48, 80, 5),
    "odd keys, gqa 1": BlockDims(128, 5, 5, 32, 48, 4),
    "one key head": BlockDims(128, 1, 4, 96, 32, 4),
    "one key head, odd values": BlockDims(128, 1, 3, 64, 40, 8),
    "one head": BlockDims(128, 1, 1, 128, 128, 4),
    "many values": BlockDims(128, 1, 34, 16, 8, 4),
    "two keys, many values": BlockDims(128, 2, 36, 16, 8, 4),
    "three keys, many values": BlockDims(128, 3, 60, 16, 8, 4),
    "odd widths": BlockDims(128, 2, 2, 7, 5, 6),
}


def same_bytes(left: tuple[np.ndarray, ...], right: tuple[np.ndarray, ...]) -> bool:
    return all(a.tobytes() == b.tobytes() and a.dtype == b.dtype for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("form", ["bf16", "fp32"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_meets_the_bars_on_one_core_and_two(name: str, form: str) -> None:
    arguments = block_arguments(SHAPES[name], 3, form)
    one = gdn_block_tkg(**arguments, lnc=1)
    two = gdn_block_tkg(**arguments, lnc=2)
    check_block(arguments, one)
    assert same_bytes(one, two)


@settings(max_examples=25)
@given(st.data())
def test_any_shape_meets_the_bars(data: st.DataObject) -> None:
    Hk = data.draw(st.integers(1, 9), "Hk")
    gqa = data.draw(st.integers(1, 5), "gqa")
    wide = st.sampled_from([8, 20, 33, 64, 100, 128])  # a state of few numbers may cancel, and is all rounding then
    dims = BlockDims(
        H=128 * data.draw(st.integers(1, 3), "H / 128"),
        Hk=Hk,
        Hv=Hk * gqa,
        K=data.draw(st.one_of(st.just(1), wide), "K"),
        V=data.draw(wide, "V"),
        K_win=data.draw(st.integers(2, 8), "K_win"),
    )
    form = data.draw(st.sampled_from(["bf16", "fp32"]), "form")
    B = data.draw(st.integers(1, 5), "B")
    arguments = block_arguments(dims, B, form, seed=data.draw(st.integers(0, 99), "seed"))
    results = gdn_block_tkg(**arguments, lnc=1)
    check_block(arguments, results)
    assert same_bytes(results, gdn_block_tkg(**arguments, lnc=2))
    row = data.draw(st.integers(0, B - 1), "row")
    alone = gdn_block_tkg(**rows(arguments, PER_ROW, slice(row, row + 1)), lnc=1)
    assert same_bytes(alone, tuple(result[row : row + 1] for result in results))


@pytest.mark.parametrize("B", [2, 63, 64, 65, 130])
def test_batches_are_tiled_and_each_row_is_that_row_alone(B: int) -> None:
    arguments = block_arguments(BlockDims(128, 4, 8, 16, 8, 4), B)
    results = gdn_block_tkg(**arguments)
    check_block(arguments, results)
    for row in {0, 1, B // 2, B - 1}:
        alone = gdn_block_tkg(**rows(arguments, PER_ROW, slice(row, row + 1)))
        assert same_bytes(alone, tuple(result[row : row + 1] for result in results))


@pytest.mark.parametrize("B", [12, 26, 43])
@pytest.mark.parametrize(("Hk", "gqa"), [(16, 1), (8, 4), (6, 1), (4, 3), (5, 2)])
def test_batches_that_divide_nothing(Hk: int, gqa: int, B: int) -> None:
    """Transposes hold 128 rows and banks 512 columns: a batch cuts the heads of a group into runs for both."""
    arguments = block_arguments(BlockDims(128, Hk, Hk * gqa, 16, 8, 4), B)
    check_block(arguments, gdn_block_tkg(**arguments))


def test_runs_of_heads_hold_every_head_once_within_a_bank_and_a_transpose() -> None:
    layout = backends.interpreted("gdn_block_tkg").function.__globals__["plan_of"].__globals__
    for heads in range(1, layout["GROUP_HEADS"] + 1):
        for B in range(1, layout["BATCH_TILE"] + 1):
            runs = layout["runs_of_heads"](heads, B)
            assert [head for first, count in runs for head in range(first, first + count)] == list(range(heads))
            bank = layout["BANK"] // B
            for first, count in runs:
                assert count * B <= layout["COLUMNS"] and first // bank == (first + count - 1) // bank


def test_the_widest_group_fits_the_memories() -> None:
    """64 sequences, 16 value heads a group, the longest window, fp32: the most memory any call needs, bar H."""
    arguments = block_arguments(BlockDims(128, 8, 32, 128, 128, 8), 64, "fp32")
    check_block(arguments, gdn_block_tkg(**arguments))


def test_the_same_call_twice_gives_the_same_bytes_and_writes_no_input() -> None:
    arguments = block_arguments(SHAPES["sample"], 2)
    before = {name: value.tobytes() for name, value in arguments.items()}
    for value in arguments.values():
        value.flags.writeable = False
    assert same_bytes(gdn_block_tkg(**arguments), gdn_block_tkg(**arguments))
    assert before == {name: value.tobytes() for name, value in arguments.items()}


@pytest.mark.parametrize("form", ["bf16", "fp32"])
def test_an_empty_batch_gives_empty_results(form: str) -> None:
    core_out, window, state = gdn_block_tkg(**block_arguments(SHAPES["odd keys"], 0, form))
    assert (core_out.shape, window.shape, state.shape) == ((0, 1, 720), (0, 1008, 5), (0, 9, 48, 80))
    assert (core_out.dtype, window.dtype, state.dtype) == (form_dtype(form), form_dtype(form), np.float32)


def test_column_0_of_the_window_is_dead() -> None:
    arguments = block_arguments(SHAPES["tile of 2"], 2)
    results = gdn_block_tkg(**arguments)
    arguments["conv_state"][..., 0] = np.nan
    assert same_bytes(results, gdn_block_tkg(**arguments))


def test_decoding_on_from_its_own_states_stays_with_the_reference() -> None:
    arguments = block_arguments(SHAPES["tile of 4"], 2, "fp32")
    free = dict(arguments)
    for step in range(12):
        hidden = block_arguments(SHAPES["tile of 4"], 2, "fp32", seed=100 + step)["hidden"]
        arguments["hidden"] = free["hidden"] = hidden
        core_out, arguments["conv_state"], arguments["recurrent_state"] = gdn_block_tkg(**arguments)
        exact_out, free["conv_state"], free["recurrent_state"] = reference.gdn_block_tkg(**free)
    state, exact = arguments["recurrent_state"], free["recurrent_state"]
    assert np.linalg.norm(state - exact) <= 2e-6 * np.linalg.norm(exact)
    assert np.linalg.norm(core_out - exact_out) <= 1e-5 * np.linalg.norm(exact_out)


# ---- negative controls: each fault is one that users of other kernels met, and the bars must see it ----


def transposed_state(arguments: Arguments) -> Arguments:
    return {**arguments, "recurrent_state": np.ascontiguousarray(arguments["recurrent_state"].swapaxes(-1, -2))}


def tiled_heads(arguments: Arguments) -> Arguments:
    """What a kernel computes that gives value head h the key head h % Hk: here with two key heads of 128 swapped for
    the value heads in between, by permuting value heads on the way in (and out, in `tiled_results`)."""
    order = TILED
    V, value = 128, {}
    for name, axis, width in (("W_in_z", 1, V), ("W_in_a", 1, 1), ("W_in_b", 1, 1), ("A_log", 0, 1), ("dt_bias", 0, 1)):
        value[name] = permute(arguments[name], axis, width, order)
    value["recurrent_state"] = permute(arguments["recurrent_state"], 1, 1, order)
    for name, axis in (("W_in_qkv", 1), ("conv_weight", 0), ("conv_state", 1)):
        keys, values = np.split(arguments[name], [512], axis)
        value[name] = np.ascontiguousarray(np.concatenate([keys, permute(values, axis, V, order)], axis))
    return {**arguments, **value}


TILED = [0, 2, 1, 3]  # value heads in the order whose interleaved mapping is the tiled one of 0, 1, 2, 3; an involution


def permute(array: np.ndarray, axis: int, width: int, order: list[int]) -> np.ndarray:
    index = np.concatenate([np.arange(h * width, (h + 1) * width) for h in order])
    return np.ascontiguousarray(np.take(array, index, axis))


def tiled_results(results: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    core_out, window, state = results
    keys, values = np.split(window, [512], 1)
    window = np.concatenate([keys, permute(values, 1, 128, TILED)], 1)
    return permute(core_out, 2, 128, TILED), window, permute(state, 1, 1, TILED)


def test_the_bars_see_a_transposed_state() -> None:
    arguments = block_arguments(SHAPES["sample"], 2)
    with pytest.raises(AssertionError):
        check_block(arguments, gdn_block_tkg(**transposed_state(arguments)))


def test_the_bars_see_a_tiled_head_mapping() -> None:
    arguments = block_arguments(SHAPES["sample"], 2)
    faulty = tiled_results(gdn_block_tkg(**tiled_heads(arguments)))
    assert faulty[1].tobytes() == gdn_block_tkg(**arguments)[1].tobytes()  # the window can't tell
    with pytest.raises(AssertionError):
        check_block(arguments, faulty)


def test_each_value_head_reads_its_own_key_head() -> None:
    """Keys of one head at a time: only its value heads may change."""
    for gqa in (1, 2, 3, 4):
        dims = BlockDims(128, 4, 4 * gqa, 8, 8, 4)
        arguments = block_arguments(dims, 1)
        _, _, state = gdn_block_tkg(**arguments)
        for key_head in range(4):
            changed = dict(arguments)
            changed["conv_weight"] = arguments["conv_weight"].copy()
            first = dims.key_dim + key_head * dims.K
            changed["conv_weight"][first : first + dims.K] *= -1.5
            _, _, other = gdn_block_tkg(**changed)
            moved = np.flatnonzero((other != state).any(axis=(0, 2, 3)))
            assert moved.tolist() == [h for h in range(dims.Hv) if h // gqa == key_head]


# ---- extremes ----

HUGE = {"bf16": 3.3e38, "fp32": 3.4e38}


def finite(results: tuple[np.ndarray, ...]) -> bool:
    return all(np.isfinite(np.asarray(result, np.float32)).all() for result in results)


@pytest.mark.parametrize("form", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 0.0},
        {"hidden": 0.0, "conv_state": 0.0},
        {"recurrent_state": 0.0},
        {"recurrent_state": 1e-42},
        {"recurrent_state": 3e37},
        {"recurrent_state": -3e37},
        {"conv_state": HUGE["bf16"]},
        {"conv_weight": 1e30},
        {"key conv_weight": HUGE["fp32"]},
        {"key conv_weight": HUGE["fp32"], "key conv_state": HUGE["bf16"]},
        {"key conv_weight": HUGE["fp32"], "key conv_state": -HUGE["bf16"]},
        {"A_log": 1000.0},
        {"A_log": 100.0, "dt_bias": -100.0},
        {"A_log": HUGE["fp32"], "dt_bias": -HUGE["fp32"]},
        {"A_log": -HUGE["fp32"], "dt_bias": HUGE["fp32"]},
        {"dt_bias": HUGE["fp32"]},
        {"dt_bias": -HUGE["fp32"]},
        {"W_in_a": HUGE["bf16"]},
        {"W_in_b": HUGE["bf16"]},
        {"W_in_b": -HUGE["bf16"]},
        {"W_in_z": HUGE["bf16"], "recurrent_state": 0.0, "conv_weight": 0.0},
        {"norm_weight": HUGE["fp32"], "W_in_z": 0.0},
    ],
    ids=lambda change: " ".join(f"{name}={value:.2g}" for name, value in change.items()),
)
def test_finite_input_gives_finite_results_where_the_exact_ones_are(change: dict[str, float], form: str) -> None:
    arguments = block_arguments(BlockDims(128, 2, 4, 32, 16, 4), 2, form)
    for name, value in change.items():
        if name.startswith("key "):  # of q and k, which are normalised; a v of this size has no fp32 state
            channels = arguments[name[4:]].reshape(-1, 192, 4)  # [B or 1, conv_dim, K_win]
            channels[:, :128] = value
        else:
            arguments[name] = np.full_like(arguments[name], value)
    exact = reference.gdn_block_tkg(**arguments)
    assert finite(exact), "the case must have a finite exact result"
    assert finite(gdn_block_tkg(**arguments))


@pytest.mark.parametrize("name", ["hidden", "conv_weight", "conv_state", "recurrent_state", "norm_weight", "W_in_z"])
@pytest.mark.parametrize("exponent", [-40, 40])
def test_values_of_2_to_the_40_keep_the_accuracy(name: str, exponent: int) -> None:
    arguments = block_arguments(BlockDims(128, 2, 4, 64, 32, 4), 2, "fp32")
    arguments[name] = np.asarray(arguments[name] * np.float32(2.0**exponent))
    check_block(arguments, gdn_block_tkg(**arguments))


@pytest.mark.parametrize("A_log", [-40.0, -20.0, 0.0, 3.0, 40.0])
@pytest.mark.parametrize("dt_bias", [-40.0, 0.0, 40.0])
def test_gates_from_no_decay_to_complete_decay_keep_the_accuracy(A_log: float, dt_bias: float) -> None:
    arguments = block_arguments(BlockDims(128, 2, 4, 64, 32, 4), 2, "fp32")
    arguments["A_log"][:] = A_log
    arguments["dt_bias"][:] = dt_bias
    arguments["recurrent_state"] *= np.float32(2.0**20)  # a complete decay must not leave rounding errors behind
    check_block(arguments, gdn_block_tkg(**arguments))
