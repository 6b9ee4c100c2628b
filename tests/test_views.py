"""Views of tensors against NumPy's, the limits views have on chip, and addresses known at run time only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdn_kernels import interpreter
from gdn_kernels.interpreter import NkiRuleError, NkiRuleWarning
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl
from gdn_kernels.interpreter.memory import SBUF, SHARED_HBM, Allocation, Storage
from gdn_kernels.interpreter.tensor import NkiTensor


def tensor(values: np.ndarray, buffer: Any = SHARED_HBM) -> Any:
    """A tensor over an array's memory, without a kernel around it."""
    allocation = Allocation(0, "t", buffer, values.shape, values.dtype, "here")
    return NkiTensor.whole(Storage.of_array(allocation, values))


def run(kernel: Callable[..., Any], **arguments: Any) -> Any:
    result = interpreter.launch(kernel, arguments)
    return result.outputs[0] if result.single else result.outputs


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


# ---- against NumPy ----


def a_slice(data: st.DataObject, view: Any, expected: np.ndarray, first: int) -> tuple[Any, np.ndarray]:
    dim = data.draw(st.integers(first, view.ndim - 1))
    start = data.draw(st.integers(0, view.shape[dim] - 1))
    stop, step = data.draw(st.integers(start + 1, view.shape[dim])), data.draw(st.integers(1, 3))
    key = (slice(None),) * dim + (slice(start, stop, step),)
    made = data.draw(st.sampled_from([view[key], view.slice(dim, start, stop, step), view[(*key, ...)]]))
    return made, expected[key]


def a_dynamic_slice(data: st.DataObject, view: Any, expected: np.ndarray, first: int) -> tuple[Any, np.ndarray]:
    dim = data.draw(st.integers(first, view.ndim - 1))
    start = data.draw(st.integers(0, view.shape[dim] - 1))
    size = data.draw(st.integers(1, view.shape[dim] - start))
    before = (slice(None),) * dim
    return view[(*before, nl.ds(start, size))], expected[(*before, slice(start, start + size))]


def an_index(data: st.DataObject, view: Any, expected: np.ndarray, first: int) -> tuple[Any, np.ndarray]:
    if view.ndim < 2 + first:  # the last dimension stays
        return view, expected
    dim = data.draw(st.integers(first, view.ndim - 1))
    index = data.draw(st.integers(-view.shape[dim], view.shape[dim] - 1))
    key = (slice(None),) * dim + (index,)
    return data.draw(st.sampled_from([view[key], view.select(dim, index)])), expected[key]


def a_permutation(data: st.DataObject, view: Any, expected: np.ndarray, first: int) -> tuple[Any, np.ndarray]:
    order = [*range(first), *data.draw(st.permutations(range(first, view.ndim)))]
    return view.permute(order), expected.transpose(order)


def a_new_dimension(data: st.DataObject, view: Any, expected: np.ndarray, first: int) -> tuple[Any, np.ndarray]:
    dim, size = data.draw(st.integers(first, view.ndim)), data.draw(st.integers(1, 3))
    view, expected = view.expand_dim(dim), np.expand_dims(expected, dim)
    if data.draw(st.booleans()):
        return view.squeeze_dim(dim), expected.squeeze(dim)
    return view.broadcast(dim, size), np.repeat(expected, size, dim)


def a_reshape(data: st.DataObject, view: Any, expected: np.ndarray, first: int) -> tuple[Any, np.ndarray]:
    """Split a dimension, then merge it again or leave it; merge all that lies contiguous."""
    dim = data.draw(st.integers(first, view.ndim - 1))
    size = view.shape[dim]
    part = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    split = (*view.shape[:dim], part, size // part, *view.shape[dim + 1 :])
    made = data.draw(st.sampled_from([view.reshape_dim(dim, (part, -1)), view.reshape(split)]))
    if data.draw(st.booleans()):
        return made.flatten_dims(dim, dim + 1), expected
    return made, expected.reshape(split)


def a_rearrangement(data: st.DataObject, view: Any, expected: np.ndarray, first: int) -> tuple[Any, np.ndarray]:
    names = tuple("abcdefghijkl"[: view.ndim])
    size = view.shape[-1]
    part = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    if view.ndim <= first:
        return view, expected
    source = (*names[:-1], ("y", "z"))
    made = view.rearrange(source, (*names[:-1], "z", "y"), {"z": part})
    split = expected.reshape(*expected.shape[:-1], size // part, part)
    return made, split.swapaxes(-1, -2)


STEPS = (a_slice, a_dynamic_slice, an_index, a_permutation, a_new_dimension, a_reshape, a_rearrangement)


@settings(max_examples=150)
@given(data=st.data(), on_chip=st.booleans())
def test_any_chain_of_views_is_numpys(data: st.DataObject, on_chip: bool) -> None:
    values = numbers(4, 6, 2, 4)
    view, expected, first = tensor(values, SBUF if on_chip else SHARED_HBM), values, int(on_chip)
    for step in data.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=5)):
        try:
            view, expected = step(data, view, expected, first)
        except NkiRuleError as error:  # only a reshape of what isn't contiguous may be refused
            assert error.rule.name == "pattern" and step in (a_reshape, a_rearrangement)
            with pytest.raises(ValueError, match="copy"):
                np.reshape(expected, -1, copy=False)
        assert view.shape == expected.shape
        assert np.array_equal(view.array, expected)
        assert view.size == expected.size and view.ndim == expected.ndim


@given(data=st.data())
def test_an_access_pattern_is_as_strided(data: st.DataObject) -> None:
    values = numbers(4, 60)
    pattern = [[60, data.draw(st.integers(1, 4))]]
    for _ in range(data.draw(st.integers(1, 4))):
        pattern.append([data.draw(st.integers(0, 4)), data.draw(st.integers(1, 3))])
    offset = data.draw(st.integers(0, 20))
    strides = tuple(4 * stride for stride, _ in pattern)
    expected = np.lib.stride_tricks.as_strided(values.reshape(-1)[offset:], [count for _, count in pattern], strides)
    for buffer in (SBUF, SHARED_HBM):
        view = tensor(values, buffer).ap(pattern=pattern, offset=offset)
        assert np.array_equal(view.array, expected)
        assert view.get_pattern() == pattern and view.offset == offset


@given(first=st.integers(0, 3), dtype=st.sampled_from([np.uint8, np.int16, np.int32, ml_dtypes.bfloat16]))
def test_a_reinterpreted_view_has_numpys_bits(first: int, dtype: Any) -> None:
    values = numbers(4, 8)
    view = tensor(values, SBUF)[first:, 2:6].view(np.dtype(dtype))
    assert view.array.tobytes() == values[first:, 2:6].copy().view(dtype).tobytes()
    again = view.reinterpret_cast(nl.float32)
    assert np.array_equal(again.array, values[first:, 2:6])
    size = np.dtype(dtype).itemsize
    pattern = [[32 // size, 4], [1, 16 // size]]
    as_pattern = tensor(values, SBUF).ap(pattern=pattern, offset=8 // size, dtype=np.dtype(dtype))
    assert as_pattern.array.tobytes() == values[:, 2:6].copy().view(dtype).tobytes()


def test_integer_indices_leave_two_dimensions_on_chip_and_one_in_hbm() -> None:
    values = numbers(6, 5, 4)
    tile, array = tensor(values, SBUF), tensor(values)
    shapes = [tile[0, 0, 2].shape, tile[:, 0].shape, tile[:, 0, 2].shape, tile[3].shape, tile[..., 2].shape]
    assert shapes == [(1, 1), (6, 4), (6, 1), (1, 5, 4), (6, 5)]
    shapes = [array[0, 0, 2].shape, array[:, 0].shape, array[:, 0, 2].shape, array[3].shape, array[..., 2].shape]
    assert shapes == [(1,), (6, 4), (6,), (5, 4), (6, 5)]
    assert tile[4, 3, 2].array.item() == array[4, 3, 2].array.item() == values[4, 3, 2]


def test_views_share_memory_whatever_their_shape() -> None:
    """A view made before a reshape stays what it was; what is written through one is seen through all."""

    def kernel() -> Any:
        tile = nl.zeros((8, 12), dtype=nl.float32)
        before, reshaped = tile[:, 3:6], tile.reshape((8, 3, 4))
        nisa.memset(dst=reshaped[:, 0, 3:4], value=7.0)
        out = nl.ndarray((8, 3), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=before)
        return out

    assert np.array_equal(run(kernel), np.repeat([[7, 0, 0]], 8, 0))


def test_contiguity_on_chip_is_a_matter_of_each_partition() -> None:
    values = numbers(4, 6, 8)
    assert tensor(values, SBUF)[:, 2:4].is_contiguous()
    assert not tensor(values)[:, 2:4].is_contiguous()
    assert not tensor(values, SBUF)[:, :, ::2].is_contiguous()
    assert tensor(values)[1:2, 2:3, 0:1].is_contiguous()  # one element has no order


@pytest.mark.filterwarnings("ignore::gdn_kernels.interpreter.NkiRuleWarning")
def test_only_a_view_of_every_element_makes_a_tensor_written() -> None:
    def overlapping() -> Any:
        out = nl.ndarray((16,), dtype=nl.float32, buffer=nl.shared_hbm)
        tile = nl.zeros((4, 4), dtype=nl.float32)
        nisa.dma_copy(dst=out.ap(pattern=[[1, 4], [1, 4]]), src=tile)  # 16 elements, of which 7 differ
        return out

    with pytest.raises(NkiRuleError, match=r"rule (output|pattern|overlap)"):
        run(overlapping)

    def turned() -> Any:
        out = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out.permute((1, 0)), src=nl.ones((6, 4), dtype=nl.float32))
        return out

    assert run(turned).sum() == 24


# ---- what is refused ----


REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "step over partitions": ("partition-first", lambda t: t[::2]),
    "permuted partition": ("partition-first", lambda t: t.permute((1, 0, 2))),
    "permuted single partition": ("partition-first", lambda t: t[0:1].permute((1, 0, 2))),
    "split partition": ("partition-first", lambda t: t.reshape((2, 4, 6, 4))),
    "merged partition": ("partition-first", lambda t: t.flatten_dims(0, 1)),
    "column to row": ("partition-first", lambda t: t[:, 0, 0:1].reshape((1, 8))),
    "dimension before the partition": ("partition-first", lambda t: t.expand_dim(0)),
    "dropped partition": ("partition-first", lambda t: t[0:1].squeeze_dim(0)),
    "broadcast partition": ("partition-first", lambda t: t[0:1].broadcast(0, 8)),
    "rearranged partition": ("partition-first", lambda t: t.rearrange(("a", "b", "c"), ("b", "a", "c"))),
    "slice over the end": ("bounds", lambda t: t[:, 0:7]),
    "slice is never clipped": ("bounds", lambda t: t.slice(2, 1, 5)),
    "empty slice": ("bounds", lambda t: t[:, 3:3]),
    "negative step": ("bounds", lambda t: t[:, ::-1]),
    "index over the end": ("bounds", lambda t: t[:, 6]),
    "too many indices": ("bounds", lambda t: t[0, 0, 0, 0]),
    "no such dimension": ("bounds", lambda t: t.select(3, 0)),
    "new axis": ("pattern", lambda t: t[:, None]),
    "boolean index": ("bounds", lambda t: t[:, True]),
    "float index": ("pattern", lambda t: t[:, 1.0]),
    "element count": ("pattern", lambda t: t.reshape((8, 23))),
    "two unknown sizes": ("pattern", lambda t: t.reshape_dim(1, (-1, -1))),
    "not contiguous": ("pattern", lambda t: t.permute((0, 2, 1)).reshape((8, 24))),
    "merged over a gap": ("pattern", lambda t: t[:, :, 0:2].flatten_dims(1, 2)),
    "squeezed size": ("pattern", lambda t: t.squeeze_dim(1)),
    "broadcast size": ("pattern", lambda t: t.broadcast(1, 12)),
    "unknown names": ("pattern", lambda t: t.rearrange(("a", "b", "c"), ("a", "b", "d"))),
    "unknown sizes": ("pattern", lambda t: t.rearrange(("a", ("b", "d"), "c"), ("a", "b", "d", "c"))),
    "indivisible size": ("pattern", lambda t: t.rearrange(("a", ("b", "d"), "c"), ("a", "b", "d", "c"), {"b": 4})),
    "partition stride": ("pattern", lambda t: t.ap(pattern=[[48, 4], [1, 24]])),
    "no partition": ("rank", lambda t: t.ap(pattern=[[24, 4]])),
    "too many partitions": ("pattern", lambda t: t.ap(pattern=[[24, 9], [1, 24]])),
    "count below one": ("pattern", lambda t: t.ap(pattern=[[24, 8], [1, 0]])),
    "no pairs": ("pattern", lambda t: t.ap(pattern=[24, 8])),
    "odd width": ("pattern", lambda t: t[:, :, 1:2].view(nl.bfloat16).view(nl.int8)[:, :, 1:3].view(nl.int16)),
    "strided last dimension": ("pattern", lambda t: t[:, :, ::2].view(nl.int16)),
    "dtype by name": ("objects-not-strings", lambda t: t.view("int16")),
    "sum": ("operators", lambda t: t + t),
    "sum with a number": ("operators", lambda t: 1.0 + t),
    "product in place": ("operators", lambda t: t.__imul__(2.0)),
    "assignment": ("operators", lambda t: t.__setitem__(slice(None), 0.0)),
    "comparison": ("operators", lambda t: t == 0.0),
    "comparison of tensors": ("operators", lambda t: t[:, 0] != t),
    "ordering": ("operators", lambda t: t < t),
    "truth": ("operators", lambda t: not t),
    "iteration": ("operators", lambda t: list(t)),
    "number": ("operators", lambda t: int(t)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_view_that_the_hardware_cannot_address_is_refused(name: str) -> None:
    rule, view = REFUSED[name]
    with pytest.raises(NkiRuleError) as caught:
        view(tensor(numbers(8, 6, 4), SBUF))
    assert caught.value.rule.name == rule


def test_hbm_has_no_partition() -> None:
    values = numbers(8, 6, 4)
    array = tensor(values)
    assert np.array_equal(array[::2].permute((1, 0, 2)).array, values[::2].transpose(1, 0, 2))
    assert np.array_equal(array.reshape((48, 4)).expand_dim(0).broadcast(0, 3).array[2], values.reshape(48, 4))
    assert np.array_equal(array.ap(pattern=[[0, 128], [1, 24]]).array, np.repeat(values.reshape(1, -1)[:, :24], 128, 0))


def test_a_tensor_may_be_compared_with_none_and_with_itself() -> None:
    tile = tensor(numbers(8, 4), SBUF)
    assert tile != None and tile in [tile] and {tile: 1}[tile] == 1  # noqa: E711
    assert not (tile == None or tile == nl.sbuf or tile != tile)  # noqa: E711


# ---- checked where an instruction uses the view ----


BEYOND = {
    "a partition's row": lambda t: t.ap(pattern=[[4, 8], [1, 4]], offset=1),
    "the last partition": lambda t: t.ap(pattern=[[4, 8], [1, 4]], offset=4),
    "the start": lambda t: t.ap(pattern=[[4, 8], [-1, 3]], offset=1),
    "a row, as another dtype": lambda t: t.ap(pattern=[[8, 8], [1, 8]], offset=1, dtype=nl.bfloat16),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_pattern_out_of_bounds_may_be_made_but_not_used(name: str) -> None:
    def kernel(use: bool) -> Any:
        tile = nl.zeros((8, 4), dtype=nl.float32)
        view = BEYOND[name](tile)
        if use:
            out = nl.ndarray(view.shape, dtype=view.dtype)
            nisa.tensor_copy(dst=out, src=view)
        out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    assert not run(kernel, use=False).any()
    with pytest.raises(NkiRuleError) as caught:
        run(kernel, use=True)
    assert (caught.value.rule.name, caught.value.instruction, caught.value.operand) == ("bounds", "tensor_copy", "src")


def test_a_part_of_a_pattern_out_of_bounds_may_lie_inside() -> None:
    values = numbers(8, 4)
    view = tensor(values, SBUF).ap(pattern=[[4, 8], [1, 6]], offset=1)
    assert np.array_equal(view[:, 0:3].array, values[:, 1:])
    with pytest.raises(NkiRuleError, match="rule bounds"):
        view.array  # noqa: B018


def test_ap_on_a_view_adds_to_its_offset_and_warns() -> None:
    values = numbers(8, 12)
    view = tensor(values, SBUF)[:, 4:8]
    with pytest.warns(NkiRuleWarning, match="ap-on-view"):
        moved = view.ap(pattern=[[12, 8], [1, 3]], offset=2)
    assert np.array_equal(moved.array, values[:, 6:9])
    with pytest.warns(NkiRuleWarning, match="ap-on-view"):
        inherited = view.ap(pattern=[[12, 8], [1, 3]])
    assert np.array_equal(inherited.array, values[:, 4:7])


@pytest.mark.parametrize(("columns", "step", "legal"), [(32768, 1, True), (65536, 32767, True), (65540, 32769, False)])
def test_an_engine_steps_by_an_int16(columns: int, step: int, legal: bool) -> None:
    def kernel(columns: int, step: int) -> Any:
        tile = nl.ndarray((1, columns), dtype=nl.uint8)
        nisa.memset(dst=tile[:, 0:2], value=1)
        out = nl.ndarray((1, 2), dtype=nl.uint8)
        nisa.memset(dst=tile.ap(pattern=[[columns, 1], [step, 2]], offset=0), value=3)
        nisa.tensor_copy(dst=out, src=tile.ap(pattern=[[columns, 1], [step, 2]], offset=0))
        result = nl.ndarray((1, 2), dtype=nl.uint8, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=result, src=out)
        return result

    if legal:
        assert run(kernel, columns=columns, step=step).tolist() == [[3, 3]]
    else:
        with pytest.raises(NkiRuleError, match="int16"):
            run(kernel, columns=columns, step=step)


# ---- addresses known at run time only ----


def index_tile(index: Any) -> Any:
    tile = nl.ndarray(index.shape, dtype=index.dtype)
    nisa.dma_copy(dst=tile, src=index)
    return tile


def to_hbm(view: Any, shape: tuple[int, ...]) -> Any:
    out = nl.ndarray(shape, dtype=view.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=view)
    return out


def select_row(x: Any, index: Any) -> Any:
    return to_hbm(x.select(0, index_tile(index)), x.shape[1:])


def subscript_row(x: Any, index: Any) -> Any:
    return to_hbm(x[index_tile(index)], x.shape[1:])


def register_row(x: Any, index: Any) -> Any:
    register = nisa.register_alloc()
    nisa.register_load(register, index_tile(index))
    return to_hbm(x[register], x.shape[1:])


def pattern_row(x: Any, index: Any) -> Any:
    row = x.shape[1] * x.shape[2]
    pattern = [[row, 1], [1, row]]
    return to_hbm(x.ap(pattern=pattern, scalar_offset=index_tile(index), indirect_dim=0), x.shape[1:])


@pytest.mark.parametrize("kernel", [select_row, subscript_row, register_row, pattern_row])
@pytest.mark.parametrize("number", [0, 4])
def test_a_row_chosen_at_run_time(kernel: Any, number: int) -> None:
    x, index = numbers(5, 6, 8), np.full((1, 1), number, np.int32)
    assert np.array_equal(run(kernel, x=x, index=index), x[number])
    for wrong in (-1, 5):
        with pytest.raises(NkiRuleError, match="rule bounds") as caught:
            run(kernel, x=x, index=np.full((1, 1), wrong, np.int32))
        assert caught.value.instruction == "dma_copy"


def test_a_column_chosen_at_run_time_on_chip() -> None:
    def kernel(x: Any, index: Any) -> Any:
        tile, column = index_tile(x), index_tile(index)
        one = nl.ndarray((8, 1), dtype=nl.float32)
        nisa.tensor_copy(dst=one, src=tile.select(1, column).expand_dim(1)[:, 0])
        pair = nl.ndarray((8, 2), dtype=nl.float32)
        nisa.tensor_copy(dst=pair, src=tile[:, nl.ds(column, 2)])
        shifted = nl.zeros((8, 4), dtype=nl.float32)
        nisa.tensor_copy(dst=shifted.ap(pattern=[[4, 8], [1, 2]], scalar_offset=column, indirect_dim=1), src=pair)
        return to_hbm(one, (8, 1)), to_hbm(pair, (8, 2)), to_hbm(shifted, (8, 4))

    x = numbers(8, 4)
    one, pair, shifted = run(kernel, x=x, index=np.full((1, 1), 2, np.int32))
    assert np.array_equal(one, x[:, 2:3]) and np.array_equal(pair, x[:, 2:4])
    assert np.array_equal(shifted, np.where(np.arange(4) >= 2, x, 0))


def test_the_index_is_read_when_the_instruction_runs() -> None:
    def kernel(x: Any) -> Any:
        index = nl.zeros((1, 1), dtype=nl.int32)
        view = x.select(0, index)
        nisa.memset(dst=index, value=3)
        return to_hbm(view, x.shape[1:])

    x = numbers(5, 6)
    assert np.array_equal(run(kernel, x=x), x[3])


def gather(x: Any, rows: Any, by_pattern: bool, oob_mode: Any) -> Any:
    tile, chosen = nl.zeros((rows.shape[0], x.shape[1]), dtype=x.dtype), index_tile(rows)
    view = x.vector_select(0, chosen)
    if by_pattern:
        view = x.ap(pattern=[[x.shape[1], rows.shape[0]], [1, x.shape[1]]], vector_offset=chosen)
    nisa.dma_copy(dst=tile, src=view, oob_mode=oob_mode)
    return to_hbm(tile, tile.shape)


def scatter(x: Any, rows: Any, y: Any, oob_mode: Any) -> Any:
    tile = index_tile(y)
    pattern = [[x.shape[1], rows.shape[0]], [1, x.shape[1]]]
    nisa.dma_copy(dst=x.ap(pattern=pattern, vector_offset=index_tile(rows)), src=tile, oob_mode=oob_mode)
    return x


@given(data=st.data(), by_pattern=st.booleans())
def test_rows_chosen_by_a_vector(data: st.DataObject, by_pattern: bool) -> None:
    rows = np.array(data.draw(st.lists(st.integers(-1, 7), min_size=1, max_size=12)), np.int32).reshape(-1, 1)
    x, inside = numbers(7, 5), (rows >= 0) & (rows < 7)
    found = run(gather, x=x, rows=rows, by_pattern=by_pattern, oob_mode=nisa.oob_mode.skip)
    assert np.array_equal(found, np.where(inside, x[rows[:, 0] % 7], 0))
    if not inside.all():
        with pytest.raises(NkiRuleError, match="rule bounds"):
            run(gather, x=x, rows=rows, by_pattern=by_pattern, oob_mode=nisa.oob_mode.error)


def test_rows_scattered_by_a_vector_change_the_argument() -> None:
    x, rows = numbers(7, 5), np.array([[6], [9], [0]], np.int32)
    y, expected = -numbers(3, 5) - 1, numbers(7, 5)
    expected[[6, 0]] = y[[0, 2]]
    returned = run(scatter, x=x, rows=rows, y=y, oob_mode=nisa.oob_mode.skip)
    assert np.array_equal(x, expected) and returned is not x and np.shares_memory(returned, x)
    with pytest.raises(NkiRuleError, match="rule bounds"):
        run(scatter, x=x, rows=rows, y=y, oob_mode=nisa.oob_mode.error)


def unwritten_index(x: Any) -> Any:
    return to_hbm(x.select(0, nl.ndarray((1, 1), dtype=nl.int32)), x.shape[1:])


def float_index(x: Any) -> Any:
    return to_hbm(x.select(0, nl.zeros((1, 1), dtype=nl.float32)), x.shape[1:])


def two_indices(x: Any) -> Any:
    index = nl.zeros((1, 1), dtype=nl.int32)
    return to_hbm(x.select(0, index).select(0, index), (8,))


def partition_index(x: Any) -> Any:
    tile = nl.zeros((8, 4), dtype=nl.float32)
    return to_hbm(tile.select(0, nl.zeros((1, 1), dtype=nl.int32)), (4,))


def rows_on_chip(x: Any) -> Any:
    tile = nl.zeros((8, 4), dtype=nl.float32)
    return to_hbm(tile.vector_select(0, nl.zeros((8, 1), dtype=nl.int32)), (8, 4))


def sliced_rows(x: Any) -> Any:
    return to_hbm(x.vector_select(0, nl.zeros((8, 1), dtype=nl.int32))[0:4], (4, 6, 8))


def cast_of_indirect(x: Any) -> Any:
    return to_hbm(x.select(0, nl.zeros((1, 1), dtype=nl.int32)).view(nl.int32), (6, 8))


def empty_register(x: Any) -> Any:
    return to_hbm(x.select(0, nisa.register_alloc()), x.shape[1:])


def both_offsets(x: Any) -> Any:
    one, many = nl.zeros((1, 1), dtype=nl.int32), nl.zeros((5, 1), dtype=nl.int32)
    return to_hbm(x.ap(pattern=[[48, 5], [1, 48]], scalar_offset=one, vector_offset=many), x.shape)


@pytest.mark.parametrize(
    ("kernel", "rule"),
    [
        (unwritten_index, "uninitialised"),
        (float_index, "scalar-operand"),
        (two_indices, "pattern"),
        (partition_index, "partition-first"),
        (rows_on_chip, "memory-space"),
        (sliced_rows, "pattern"),
        (cast_of_indirect, "pattern"),
        (empty_register, "uninitialised"),
        (both_offsets, "pattern"),
    ],
)
def test_what_an_index_cannot_do(kernel: Any, rule: str) -> None:
    with pytest.raises(NkiRuleError) as caught:
        run(kernel, x=numbers(5, 6, 8))
    assert caught.value.rule.name == rule
