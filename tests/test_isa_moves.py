"""Data movement against plain NumPy: DMA, shuffles, gathers, index patterns, and what two cores exchange."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isa_programs import (
    BF16,
    F32,
    FLOATS,
    anything,
    flags,
    launch,
    new,
    partitions,
    rounded,
    run,
    same,
    seeds,
    sizes,
    tile,
    to_hbm,
    to_sbuf,
    values,
)

from gdn_kernels import interpreter
from gdn_kernels.interpreter import NkiRuleError, rules
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl

SKIP = nisa.oob_mode.skip


def f32(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(np.float32)


# ---- DMA ----


@settings(max_examples=30)
@given(P=partitions, N=sizes, source=anything, to=anything, seed=seeds)
def test_dma_copy_converts_and_reorders(P: int, N: int, source: Any, to: Any, seed: int) -> None:
    x = values(np.random.default_rng(seed), (2, P, N), source)

    def kernel(x: Any) -> Any:
        staged, out = new((P, 2, N), to), new((P, N, 2), to, nl.shared_hbm)
        with rules.without("short-runs", "element-runs"):
            nisa.dma_copy(dst=staged, src=x.permute((1, 0, 2)), dge_mode=nisa.dge_mode.swdge)
            nisa.dma_copy(dst=out, src=staged.permute((0, 2, 1)))
        return out

    found = launch(kernel, x=x).outputs[0]
    expected = x if source == to else rounded(f32(x), to)
    same(found, expected.transpose(1, 2, 0))


def test_dma_copy_broadcasts_rows_from_hbm() -> None:
    x = np.arange(6, dtype=np.float32)

    def kernel(x: Any) -> Any:
        staged = new((4, 6))
        nisa.dma_copy(dst=staged, src=x.ap(pattern=[[0, 4], [1, 6]], offset=0))
        return to_hbm(staged)

    assert np.array_equal(launch(kernel, x=x).outputs[0], np.tile(x, (4, 1)))


@settings(max_examples=25)
@given(rows=st.integers(1, 32), seed=seeds, skip=flags, scatter=flags, to=st.sampled_from((F32, BF16)))
def test_rows_chosen_by_a_vector(rows: int, seed: int, skip: bool, scatter: bool, to: Any) -> None:
    rng = np.random.default_rng(seed)
    table = values(rng, (40, 5), to if scatter else F32, special=False)
    index = rng.permutation(60 if skip else 40)[:rows, None].astype(np.int32)
    data = values(rng, (rows, 5), F32, special=False)
    mode = {"oob_mode": SKIP} if skip else {}

    def kernel(table: Any, index: Any, data: Any) -> Any:
        chosen = table.ap(pattern=[[5, rows], [1, 5]], offset=0, vector_offset=to_sbuf(index))
        if scatter:
            nisa.dma_copy(dst=chosen, src=to_sbuf(data), **mode)
            return table
        gathered = tile(rows, 5, dtype=to, value=7.0)
        nisa.dma_copy(dst=gathered, src=chosen, **mode)
        return to_hbm(gathered)

    expected = table.copy() if scatter else np.full((rows, 5), 7, to)
    for number, row in enumerate(index[:, 0]):
        if row < 40 and scatter:
            expected[row] = rounded(data[number], to)
        elif row < 40:
            expected[number] = rounded(table[row], to)
    same(launch(kernel, table=table.copy(), index=index, data=data).outputs[0], expected)


def test_an_index_out_of_bounds_is_an_error_by_default() -> None:
    def kernel(table: Any, index: Any) -> Any:
        rows = new((2, 5))
        nisa.dma_copy(dst=rows, src=table.ap(pattern=[[5, 2], [1, 5]], offset=0, vector_offset=to_sbuf(index)))
        return to_hbm(rows)

    arguments = {"table": np.zeros((4, 5), np.float32), "index": np.int32([[3], [4]])}
    with pytest.raises(NkiRuleError, match="bounds"):
        launch(kernel, **arguments)


def test_a_moved_view_is_copied_or_skipped_as_a_whole() -> None:
    table = np.arange(40, dtype=np.float32).reshape(8, 5)

    def kernel(table: Any, index: Any) -> Any:
        out = tile(2, 5, value=-1.0)
        start = to_sbuf(index)
        moved = table.ap(pattern=[[5, 2], [1, 5]], offset=0, scalar_offset=start)
        nisa.dma_copy(dst=out, src=moved, oob_mode=SKIP)
        return to_hbm(out)

    assert np.array_equal(launch(kernel, table=table, index=np.int32([[6]])).outputs[0], table[6:8])
    assert np.array_equal(launch(kernel, table=table, index=np.int32([[7]])).outputs[0], np.full((2, 5), -1))


@settings(max_examples=25)
@given(
    case=st.sampled_from((((1, 0), 2), ((2, 1, 0), 3), ((3, 1, 2, 0), 4))), dtype=anything, seed=seeds, from_hbm=flags
)
def test_dma_transpose(case: Any, dtype: Any, seed: int, from_hbm: bool) -> None:
    axes, ndim = case
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 9, ndim).tolist())
    x = values(rng, shape, dtype)

    def kernel(x: Any) -> Any:
        dst = new([shape[axis] for axis in axes], dtype)
        with rules.without("short-runs", "element-runs"):
            nisa.dma_transpose(dst=dst, src=x if from_hbm else to_sbuf(x), axes=axes)
            return to_hbm(dst)

    assert launch(kernel, x=x).outputs[0].tobytes() == x.transpose(axes).tobytes()


def test_dma_transpose_gathers_rows() -> None:
    rng = np.random.default_rng(0)
    x, index = values(rng, (50, 64), BF16), rng.permutation(50)[:32, None].astype(np.uint32)

    def kernel(x: Any, index: Any) -> Any:
        dst = new((64, 32), BF16)
        rows = x.ap(pattern=[[64, 32], [1, 64]], offset=0, vector_offset=to_sbuf(index))
        nisa.dma_transpose(dst=dst, src=rows, axes=(1, 0))
        return to_hbm(dst)

    assert launch(kernel, x=x, index=index).outputs[0].tobytes() == x[index[:, 0]].T.tobytes()


@settings(max_examples=20)
@given(count=st.integers(1, 16), dtypes=st.tuples(anything, anything), seed=seeds)
def test_dma_compute_adds(count: int, dtypes: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sources = [values(rng, (4, 6), dtypes[0]) for _ in range(count)]

    def program(*tiles: Any) -> Any:
        dst = new((4, 6), dtypes[1])
        nisa.dma_compute(dst, list(tiles), nl.add, scales=[1.0] * count)
        return dst

    total = f32(sources[0])
    with np.errstate(all="ignore"):
        for source in sources[1:]:
            total = total + f32(source)
    same(run(program, *sources), rounded(total, dtypes[1]))


def test_dma_compute_scatters_and_gathers() -> None:
    rng = np.random.default_rng(1)
    table, data = rng.standard_normal((9, 4)).astype(F32), rng.standard_normal((3, 4)).astype(F32)
    index = np.int32([[7], [0], [4]])

    def kernel(table: Any, index: Any, data: Any) -> Any:
        rows = table.ap(pattern=[[4, 3], [1, 4]], offset=0, vector_offset=to_sbuf(index))
        mine = to_sbuf(data)
        nisa.dma_compute(dst=rows, srcs=(rows, mine), reduce_op=nl.add)
        nisa.dma_compute(dst=mine, srcs=(mine, rows), reduce_op=nl.add)
        return table, to_hbm(mine)

    scattered = table.copy()
    scattered[index[:, 0]] += data
    found = launch(kernel, table=table.copy(), index=index, data=data).outputs
    same(found[0], scattered)
    same(found[1], data + scattered[index[:, 0]])


@pytest.mark.parametrize("skip", (False, True))
def test_dma_compute_leaves_out_what_is_out_of_bounds_or_refuses_it(skip: bool) -> None:
    def kernel(table: Any, index: Any) -> Any:
        rows, mine = table.ap(pattern=[[2, 3], [1, 2]], offset=0, vector_offset=to_sbuf(index)), tile(3, 2)
        nisa.dma_compute(mine, (mine, rows), nl.add, oob_mode=SKIP if skip else nisa.oob_mode.error)
        return to_hbm(mine)

    arguments = {"table": np.arange(8, dtype=np.float32).reshape(4, 2), "index": np.int32([[3], [4], [0]])}
    if skip:
        assert launch(kernel, **arguments).outputs[0].tolist() == [[7, 8], [1, 1], [1, 2]]
        return
    with pytest.raises(NkiRuleError, match="bounds"):
        launch(kernel, **arguments)


# ---- shuffles ----


@settings(max_examples=25)
@given(P=st.sampled_from((32, 64, 96, 128)), dtype=anything, seed=seeds, in_place=flags, psum=flags)
def test_nc_stream_shuffle(P: int, dtype: Any, seed: int, in_place: bool, psum: bool) -> None:
    rng = np.random.default_rng(seed)
    x, old = values(rng, (P, 5), dtype), values(rng, (P, 5), dtype)
    mask = np.where(rng.random(32) < 0.2, 255, rng.integers(0, 32, 32)).tolist()

    def program(x: Any, old: Any) -> Any:
        dst = x if in_place else old
        nisa.nc_stream_shuffle(src=x, dst=dst, shuffle_mask=mask)
        return dst

    expected = (x if in_place else old).copy()
    for partition in range(P):
        if mask[partition % 32] != 255:
            expected[partition] = x[partition // 32 * 32 + mask[partition % 32]]
    assert run(program, x, old).tobytes() == expected.tobytes()


def test_a_shuffle_broadcasts_a_row_and_reads_only_it() -> None:
    def program() -> Any:
        source, dst = new((128, 3)), new((32, 3))
        nisa.memset(dst=source[64:65], value=5.0)
        nisa.nc_stream_shuffle(dst, source[64:65], [0] * 32)
        return dst

    assert np.array_equal(run(program), np.full((32, 3), 5))


# ---- gathers ----


@settings(max_examples=20)
@given(P=partitions, N=sizes, count=st.integers(1, 20), dtype=anything, seed=seeds)
def test_nc_n_gather(P: int, N: int, count: int, dtype: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, index = values(rng, (P, N, 2), dtype), rng.integers(0, 2 * N, (P, count)).astype(np.uint32)

    def program(x: Any, index: Any) -> Any:
        dst = new((P, count), dtype)
        nisa.nc_n_gather(dst=dst, data=x, indices=index)
        return dst

    expected = np.stack([x.reshape(P, -1)[p, index[p]] for p in range(P)])
    assert run(program, x, index).tobytes() == expected.tobytes()


@settings(max_examples=20)
@given(cores=st.integers(1, 8), N=st.integers(32, 70), width=st.sampled_from((1, 2, 8)), dtype=anything, data=st.data())
def test_local_gather(cores: int, N: int, width: int, dtype: Any, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(seeds))
    P, valid = 16 * cores, data.draw(st.integers(1, 48))
    x, index = values(rng, (P, N), dtype), rng.integers(0, N - width + 1, (P, 3)).astype(np.uint16)

    def program(x: Any, index: Any) -> Any:
        dst = new((P, valid, width), dtype)
        with rules.without("documents-disagree"):
            nisa.local_gather(dst, x, index, num_elem_per_idx=width, num_valid_indices=valid)
        return dst

    expected = np.empty((P, valid, width), dtype)
    for p in range(P):
        for j in range(valid):
            first = index[p // 16 * 16 + j % 16, j // 16]
            expected[p, j] = x[p, first : first + width]
    assert run(program, x, index).tobytes() == expected.tobytes()


# ---- index patterns ----

steps = st.integers(-300, 300)


@settings(max_examples=30)
@given(
    P=partitions,
    pattern=st.lists(st.tuples(steps, st.integers(1, 5)), min_size=1, max_size=4),
    offset=st.one_of(steps, st.integers(-(2**31), 2**31 - 1)),
    multiplier=st.one_of(steps, st.integers(-(2**24), 2**24)),
    dtype=anything,
)
def test_iota(P: int, pattern: Any, offset: int, multiplier: int, dtype: Any) -> None:
    counts = [num for _, num in pattern]

    def program() -> Any:
        dst = new((P, int(np.prod(counts))), dtype)
        nisa.iota(dst, [list(pair) for pair in pattern], offset=offset, channel_multiplier=multiplier)
        return dst

    exact = []
    for p in range(P):
        for at in np.ndindex(*counts):
            exact.append(offset + p * multiplier + sum(i * step for i, (step, _) in zip(at, pattern, strict=True)))
    wrapped = np.array([(value + 2**31) % 2**32 - 2**31 for value in exact]).reshape(P, -1).astype(np.int32)
    same(run(program), wrapped if dtype == np.int32 else rounded(wrapped.astype(np.float32), dtype))


COMPARE = {"equal": np.equal, "not_equal": np.not_equal, "less": np.less, "less_equal": np.less_equal}
COMPARE.update(greater=np.greater, greater_equal=np.greater_equal)


@settings(max_examples=30)
@given(
    P=partitions, N=sizes, name=st.sampled_from(sorted(COMPARE)), dtypes=st.tuples(anything, anything), data=st.data()
)
def test_affine_select(P: int, N: int, name: str, dtypes: Any, data: st.DataObject) -> None:
    step, offset, multiplier = (data.draw(st.integers(-3, 3)) for _ in range(3))
    x = values(np.random.default_rng(data.draw(seeds)), (P, N), dtypes[0])

    def program(x: Any) -> Any:
        dst = new((P, N), dtypes[1])
        nisa.affine_select(dst, [[step, N]], multiplier, x, -9.5, cmp_op=getattr(nl, name), offset=offset)
        return dst

    holds = COMPARE[name](offset + multiplier * np.arange(P)[:, None] + step * np.arange(N), 0)
    kept = x if dtypes[0] == dtypes[1] else rounded(f32(x), dtypes[1])
    same(run(program, x), np.where(holds, kept, rounded(np.float32(-9.5), dtypes[1])))


# ---- sequences ----


@settings(max_examples=25)
@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=30), dtype=st.sampled_from((np.float32, np.int32)))
def test_sequence_bounds(ids: list[int], dtype: Any) -> None:
    N = len(ids)

    def program(x: Any) -> Any:
        dst = new((1, 2, N), dtype)
        nisa.sequence_bounds(dst=dst, segment_ids=x)
        return dst

    start, end = [N if i == 0 else -7 for i in ids], [-1 if i == 0 else -7 for i in ids]
    for i in range(N):
        if ids[i]:
            start[i] = start[i - 1] if i and ids[i - 1] == ids[i] else i
    for i in reversed(range(N)):
        if ids[i]:
            end[i] = end[i + 1] if i + 1 < N and ids[i + 1] == ids[i] else i + 1
    assert run(program, np.array([ids], dtype))[0].tolist() == [start, end]


@settings(max_examples=20)
@given(P=partitions, N=sizes, dtype=st.sampled_from((np.float32, np.int32)), seed=seeds)
def test_nonzero_with_count(P: int, N: int, dtype: Any, seed: int) -> None:
    x = np.random.default_rng(seed).integers(-1, 2, (P, N)).astype(dtype)

    def program(x: Any) -> Any:
        dst = tile(P, N + 1, dtype=nl.int32, value=77)
        nisa.nonzero_with_count(dst=dst, src=x, index_offset=5, padding_val=-2)
        return dst

    expected = np.full((P, N + 1), 77, np.int32)
    for p in range(0, P, 16):
        found = [i + 5 for i in range(N) if x[p, i] != 0]
        expected[p] = [*found, *[-2] * (N - len(found)), len(found)]
    assert np.array_equal(run(program, x), expected)


# ---- two cores ----


def test_cores_exchange_tiles_and_meet() -> None:
    def kernel(x: Any) -> Any:
        core = nl.program_id(axis=0)
        mine, theirs = to_sbuf(x[core]), new(x.shape[1:])
        nisa.sendrecv(src=mine, dst=theirs, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
        staged, out = new(x.shape, F32, nl.shared_hbm), new(x.shape, F32, nl.shared_hbm)
        nisa.dma_copy(dst=staged[core], src=theirs)
        nisa.core_barrier(data=staged, cores=(0, 1))
        nisa.dma_copy(dst=out[core], src=to_sbuf(staged[1 - core]))
        return out

    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    with rules.without("subset", "subset-unclear"):
        assert np.array_equal(interpreter.launch(kernel, {"x": x}, cores=2).outputs[0], x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_column_of_one_element_moves_in_both_directions(dtype: Any) -> None:
    x = values(np.random.default_rng(2), (7,), dtype)

    def kernel(x: Any) -> Any:
        column, out = new((7, 1), dtype), new((7,), dtype, nl.shared_hbm)
        nisa.dma_copy(dst=column, src=x.ap(pattern=[[1, 7], [1, 1]], offset=0))
        nisa.dma_copy(dst=out, src=column)
        return out

    assert launch(kernel, x=x).outputs[0].tobytes() == x.tobytes()
