"""The timeline: schedules computed by hand, what no schedule may do, and the published cost of every instruction."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_kernels import tile

from gdn_kernels.interpreter import NkiRuleError, Spec, launch
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl
from gdn_kernels.interpreter.descriptors import packets
from gdn_kernels.interpreter.memory import PSUM, SBUF, SHARED_HBM, Allocation, Lifetime
from gdn_kernels.interpreter.trace import Instruction, Operand
from gdn_kernels.timeline.addresses import assign
from gdn_kernels.timeline.costs import NEURONCORE_V2, TRN2, TRN3, Costs, cycles, duration, issue_time, packet_time
from gdn_kernels.timeline.dependences import dependences
from gdn_kernels.timeline.perfetto import ROWS, write_trace
from gdn_kernels.timeline.report import active, critical_path, gaps, path_by_line
from gdn_kernels.timeline.schedule import Schedule, Span, schedule

# Easy to compute with: a cycle is a ns, and no latency is the sum of others.
EASY = Costs(
    name="easy",
    clocks={"tensor": 1.0, "vector": 1.0, "scalar": 1.0, "gpsimd": 1.0},
    peak_rate=10.0,
    packet_rate=10.0,
    packet_floor=4.0,
    dma_latency=100.0,
    hardware_issue=20.0,
    software_issue=30.0,
    semaphore=5.0,
    overhead=10.0,
    tensor_latency=7.0,
    fast_modes=False,
)
SIMPLE = 74.0  # ns of a Vector, Scalar or GpSimd instruction of up to 64 elements: 64 and the overhead
F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
HWDGE = {"dge_mode": nisa.dge_mode.hwdge}
ON_SYNC, ON_SCALAR = ({**HWDGE, "engine": engine} for engine in (nisa.engine.sync, nisa.engine.scalar))


def lay_out(
    body: Callable[[Any], Any],
    columns: int = 64,
    rows: int = 128,
    dtype: Any = F32,
    costs: Costs = EASY,
    **options: Any,
) -> Schedule:
    """The schedule of a kernel that does `body(x)` for an argument x [rows, columns], and returns x."""

    def kernel(x: Any) -> Any:
        body(x)
        return x

    return schedule(launch(kernel, {"x": Spec((rows, columns), dtype)}, dry=True).machines[0], costs, **options)


def empty(*shape: int, dtype: Any = nl.float32, buffer: Any = nl.sbuf) -> Any:
    return nl.ndarray(shape, dtype=dtype, buffer=buffer)


def starts(laid_out: Schedule) -> list[float]:
    return [span.start for span in laid_out.spans]


def ends(laid_out: Schedule) -> list[float]:
    return [span.end for span in laid_out.spans]


# ---- schedules computed by hand ----


def test_one_engine_runs_one_instruction_after_the_other() -> None:
    def body(_: Any) -> None:
        t = empty(128, 100)
        nisa.memset(dst=t, value=1.0)
        nisa.tensor_copy(dst=empty(128, 100), src=t)
        nisa.memset(dst=empty(128, 8), value=1.0)

    laid_out = lay_out(body)
    # 100 elements and the overhead, twice; then the least there is. No semaphore within an engine.
    assert laid_out.spans == [
        Span("vector", 0, 110, 110, -1),
        Span("vector", 110, 220, 220, -1),
        Span("vector", 220, 294, 294, -1),
    ]
    assert laid_out.total == 294
    assert laid_out.busy() == {"tensor": 0, "vector": 294, "scalar": 0, "gpsimd": 0, "sync": 0, "dma": 0}


def test_another_engine_waits_for_the_result_and_a_semaphore() -> None:
    def body(_: Any) -> None:
        t = empty(128, 64)
        nisa.memset(dst=t, value=1.0)
        nisa.tensor_copy(dst=empty(128, 64), src=t, engine=nisa.engine.scalar)

    assert lay_out(body).spans == [
        Span("vector", 0, SIMPLE, SIMPLE, -1),
        Span("scalar", SIMPLE + 5, 2 * SIMPLE + 5, 2 * SIMPLE + 5, 0),
    ]


def test_engines_that_share_nothing_run_side_by_side() -> None:
    def body(_: Any) -> None:
        for engine in (nisa.engine.vector, nisa.engine.gpsimd):
            nisa.memset(dst=empty(128, 64), value=1.0, engine=engine)

    assert starts(lay_out(body)) == [0, 0]


def test_a_tile_is_overwritten_only_when_it_was_read() -> None:
    def body(_: Any) -> None:
        t = tile(128, 64)
        nisa.tensor_copy(dst=empty(128, 64), src=t, engine=nisa.engine.scalar)  # 79 to 153
        nisa.memset(dst=t[:, 0:32], value=2.0)  # which reads all of it
        nisa.memset(dst=t[:, 32:64], value=2.0)

    laid_out = lay_out(body)
    assert starts(laid_out) == [0, 79, 158, 158 + SIMPLE]
    assert laid_out.spans[2].waited_for == 1


def test_bytes_that_nobody_reads_are_overwritten_at_once() -> None:
    def body(_: Any) -> None:
        t = tile(128, 64)
        nisa.tensor_copy(dst=empty(128, 32), src=t[:, 0:32], engine=nisa.engine.scalar)
        nisa.memset(dst=t[:, 32:64], value=2.0)

    assert starts(lay_out(body)) == [0, 79, SIMPLE]


def test_a_tile_in_the_place_of_another_waits_for_its_last_use() -> None:
    def body(_: Any) -> None:
        wide = 30_000  # 120,000 bytes a partition: two such tiles don't fit
        t = empty(128, wide)
        nisa.memset(dst=t, value=1.0)
        nisa.tensor_copy(dst=empty(128, 1), src=t[:, wide - 1 : wide], engine=nisa.engine.scalar)
        nisa.memset(dst=empty(128, wide), value=1.0)

    first = 30_010
    assert starts(lay_out(body)) == [0, first + 5, first + 5 + SIMPLE + 5]
    roomy = lay_out(body, sbuf_bytes=1 << 20)
    assert starts(roomy) == [0, first + 5, first]


def test_a_matmul_gives_way_to_the_next_before_its_result_is_there() -> None:
    def body(_: Any) -> None:
        left, right = tile(128, 128, dtype=nl.bfloat16), tile(128, 100, dtype=nl.bfloat16)
        sums = [empty(128, 100, buffer=nl.psum) for _ in range(2)]
        for psum in sums:
            nisa.nc_matmul(dst=psum, stationary=left, moving=right)
        nisa.tensor_copy(dst=empty(128, 100), src=sums[0])

    laid_out = lay_out(body)
    ready = laid_out.spans[1].end + 5
    assert starts(laid_out)[2:] == [ready, ready + 100, ready + 100 + 7 + 5]
    assert ends(laid_out)[2:4] == [ready + 107, ready + 207]
    # A profiler counts the Tensor engine as active until the last result is there.
    assert active(laid_out, "tensor") == 207
    assert laid_out.busy()["tensor"] == 200


def test_a_load_is_issued_then_takes_off_then_moves() -> None:
    def body(x: Any) -> None:
        t = empty(128, 64)
        nisa.dma_copy(dst=t, src=x)
        nisa.memset(dst=t, value=1.0)

    laid_out = lay_out(body)
    # Rows of 256 bytes that are neighbours in HBM: 8 of them make a packet of 2,048 bytes of each engine.
    assert laid_out.spans[0] == Span("sync", 0, 20, 100 + 204.8, -1)
    assert starts(laid_out)[1] == pytest.approx(100 + 204.8 + 5)
    assert laid_out.dma_busy == {engine: [(100, 304.8)] for engine in range(16)}


@pytest.mark.parametrize(("columns", "packet"), [(64, 25.6), (10, 4.0), (2, 4.0)])
def test_a_packet_takes_its_bytes_or_the_floor(columns: int, packet: float) -> None:
    def body(x: Any) -> None:
        nisa.dma_copy(dst=empty(128, columns), src=x[:, 0:columns])

    # Rows of an argument with 65 columns are no neighbours: 8 packets of each engine.
    assert ends(lay_out(body, columns=65)) == [pytest.approx(100 + 8 * packet)]


@pytest.mark.parametrize(("rows", "engines"), [(4, 1), (8, 1), (16, 2), (128, 16)])
def test_a_transfer_uses_the_engines_of_its_partitions(rows: int, engines: int) -> None:
    def body(x: Any) -> None:
        nisa.dma_copy(dst=empty(rows, 64), src=x[:, 0:64])

    laid_out = lay_out(body, columns=65, rows=rows)
    assert [engine for engine, busy in laid_out.dma_busy.items() if busy] == list(range(engines))
    assert laid_out.total == pytest.approx(100 + min(rows, 8) * 25.6)


def test_two_queues_take_turns_and_one_queue_does_not() -> None:
    def body(x: Any) -> None:
        nisa.dma_copy(dst=empty(128, 64), src=x[:, 0:64], **ON_SYNC)  # 8 packets of 25.6 an engine
        halves = empty(128, 2, 33)  # 16 packets of 12.8: runs end where the tile's do
        nisa.dma_copy(dst=halves[:, :, 0:32], src=x[:, 0:64].reshape((128, 2, 32)), **ON_SCALAR)

    both = 8 * (25.6 + 12.8)
    assert ends(lay_out(body, columns=65)) == [pytest.approx(100 + both), pytest.approx(100 + both + 8 * 12.8)]

    def one_queue(x: Any) -> None:
        for _ in range(2):
            nisa.dma_copy(dst=empty(128, 64), src=x[:, 0:64], **ON_SYNC)

    assert ends(lay_out(one_queue, columns=65)) == [pytest.approx(100 + 204.8), pytest.approx(100 + 409.6)]


def test_each_queue_issues_at_its_own_pace() -> None:
    def body(x: Any) -> None:
        t = empty(128, 64)
        for options in ({}, {}, ON_SYNC, ON_SCALAR, ON_SCALAR, {"dge_mode": nisa.dge_mode.swdge}):
            nisa.dma_copy(dst=t, src=x, **options)

    laid_out = lay_out(body)
    assert [(span.queue, span.issued - span.start) for span in laid_out.spans] == [
        *[("sync", 20)] * 3,
        *[("scalar", 20)] * 2,
        ("gpsimd", 30),
    ]


def test_a_store_without_a_queue_is_issued_by_gpsimd() -> None:
    def body(x: Any) -> None:
        nisa.dma_copy(dst=x, src=tile(128, 64))

    laid_out = lay_out(body)
    assert laid_out.spans[1] == Span("gpsimd", SIMPLE + 5, SIMPLE + 35, SIMPLE + 5 + 100 + 204.8, 0)


def test_a_queue_is_held_back_by_the_transfer_that_waits() -> None:
    def body(x: Any) -> None:
        t = tile(128, 64)
        nisa.tensor_copy(dst=empty(128, 64), src=t, engine=nisa.engine.scalar)  # 79 to 153
        nisa.dma_copy(dst=t, src=x, **ON_SYNC)
        nisa.dma_copy(dst=empty(128, 64), src=x, **ON_SYNC)

    assert starts(lay_out(body)) == [0, 79, 158, 178]


def test_what_needs_two_transfers_of_a_queue_waits_for_the_later_to_end_not_to_be_issued() -> None:
    def body(x: Any) -> None:
        t = empty(128, 64)
        nisa.dma_copy(dst=t[64:128], src=x[64:128, 0:64])  # 8 packets of each of engines 8 to 15
        nisa.dma_copy(dst=t[0:64, 0:1], src=x[0:64, 0:1])  # of engines 0 to 7, and sooner there
        nisa.tensor_copy(dst=empty(128, 1), src=t[:, 0:1])

    laid_out = lay_out(body, columns=65)
    assert ends(laid_out)[0] == pytest.approx(304.8)
    assert ends(laid_out)[1] == pytest.approx(152)
    assert starts(laid_out)[2] == pytest.approx(309.8)


def test_work_without_a_published_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="device_print on sync"):
        lay_out(lambda _: nl.device_print("t", tile(128, 4)))


# ---- properties ----

ENGINES = (nisa.engine.vector, nisa.engine.scalar, nisa.engine.gpsimd)
# Of a small program, an instruction: the engine that copies, from which tile, to which, how many columns.
COPY = st.tuples(st.sampled_from(ENGINES), st.integers(0, 3), st.integers(0, 3), st.sampled_from([1, 64, 200]))
# A load into a tile, or None for a copy.
STEP = st.tuples(st.one_of(st.none(), st.integers(0, 3)), COPY)


def small_program(steps: list[Any], costs: Costs = EASY, one_engine: bool = False) -> Schedule:
    def body(x: Any) -> None:
        tiles = [tile(128, 200) for _ in range(4)]
        for load, (engine, source, target, columns) in steps:
            if load is not None:
                nisa.dma_copy(dst=tiles[load][:, 0:columns], src=x[:, 0:columns], **ON_SYNC)
            else:
                engine = nisa.engine.vector if one_engine else engine
                nisa.tensor_copy(dst=tiles[target][:, 0:columns], src=tiles[source][:, 0:columns], engine=engine)

    return lay_out(body, columns=201, costs=costs)


@settings(max_examples=60)
@given(st.lists(COPY, min_size=1, max_size=8), st.data())
def test_an_added_instruction_never_makes_one_engine_faster(copies: list[Any], data: st.DataObject) -> None:
    steps = [(None, copy) for copy in copies]
    position = data.draw(st.integers(0, len(steps)))
    added = [*steps[:position], (None, data.draw(COPY)), *steps[position:]]
    assert small_program(added, one_engine=True).total > small_program(steps, one_engine=True).total


@settings(max_examples=60)
@given(st.lists(STEP, min_size=2, max_size=10))
def test_an_instruction_at_the_end_changes_nothing_before_it(steps: list[Any]) -> None:
    longer = small_program(steps)
    assert longer.spans[:-1] == small_program(steps[:-1]).spans


@settings(max_examples=60)
@given(st.lists(STEP, min_size=1, max_size=10))
def test_doubled_bandwidth_is_never_slower(steps: list[Any]) -> None:
    faster = replace(EASY, packet_rate=20.0, packet_floor=2.0)
    before, after = small_program(steps), small_program(steps, faster)
    assert all(b.end <= a.end + 1e-6 for a, b in zip(before.spans, after.spans, strict=True))


@settings(max_examples=60)
@given(st.lists(STEP, min_size=1, max_size=12))
def test_no_schedule_breaks_what_it_promises(steps: list[Any]) -> None:
    laid_out = small_program(steps)
    free: dict[str, float] = {}
    for span, waits in zip(laid_out.spans, laid_out.waits, strict=True):
        assert span.start >= free.get(span.queue, 0.0)  # one at a time, in order
        assert all(span.start >= laid_out.spans[earlier].end for earlier in waits)
        free[span.queue] = span.issued
    for busy in laid_out.dma_busy.values():
        assert all(a[1] <= b[0] for a, b in pairwise(busy))
    again = small_program(steps)
    assert (again.spans, again.waits, again.dma_busy) == (laid_out.spans, laid_out.waits, laid_out.dma_busy)


@settings(max_examples=60)
@given(st.lists(STEP, min_size=1, max_size=12))
def test_the_critical_path_adds_up_to_the_total(steps: list[Any]) -> None:
    laid_out = small_program(steps)
    assert sum(ns for _, ns, _ in path_by_line(laid_out)) == pytest.approx(laid_out.total)
    path = critical_path(laid_out)
    assert path == sorted(path)
    assert laid_out.spans[path[-1]].end == laid_out.total
    assert sum(count for _, _, count in path_by_line(laid_out)) == len(path)


def test_the_longest_gap_names_its_cause() -> None:
    def body(x: Any) -> None:
        t = empty(128, 64)
        nisa.dma_copy(dst=t, src=x)
        nisa.tensor_copy(dst=empty(128, 64), src=t)

    (gap,) = gaps(lay_out(body))
    assert (gap.queue, gap.start, gap.length) == ("vector", 0.0, pytest.approx(309.8))
    assert gap.cause.startswith("test_timeline.py:")


# ---- which bytes overlap ----


def access(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, engine: str, buffer: Any = SHARED_HBM) -> Any:
    """An instruction that writes one view of a tensor of 2-byte elements."""
    whole = (8, 40) if buffer is SBUF else (320,)
    allocation = Allocation(0, "t", buffer, whole, BF16, "")
    operand = Operand("write", allocation, shape, strides, offset, BF16)
    return Instruction("memset", engine, (), (operand,), ("", 0), None, {})


def touched(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> set[int]:
    return {offset + sum(s * i for s, i in zip(strides, index, strict=True)) for index in product(*map(range, shape))}


@st.composite
def views(draw: st.DrawFn) -> Any:
    """Shape, strides and offset inside 320 elements; strides may be 0 or negative."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    strides = tuple(draw(st.integers(-12, 24)) for _ in shape)
    reach = [stride * (count - 1) for stride, count in zip(strides, shape, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return shape, strides, draw(st.integers(-low, max(-low, 319 - high)))


@settings(max_examples=400)
@given(views(), views())
def test_views_depend_on_each_other_where_they_share_an_element(left: Any, right: Any) -> None:
    waits = dependences([access(*left, "vector"), access(*right, "scalar")], {})
    assert waits[1] == ((0,) if touched(*left) & touched(*right) else ())


@settings(max_examples=150)
@given(st.data())
def test_views_on_chip_depend_on_each_other_within_shared_partitions(data: st.DataObject) -> None:
    def draw() -> Any:
        p0, count = data.draw(st.integers(0, 7)), data.draw(st.integers(1, 8))
        shape, strides, offset = data.draw(views().filter(lambda v: max(touched(*v)) < 40))
        return (min(count, 8 - p0), *shape), (40, *strides), 40 * p0 + offset

    left, right = draw(), draw()
    waits = dependences([access(*left, "vector", SBUF), access(*right, "scalar", SBUF)], {0: (0, 80)})
    assert waits[1] == ((0,) if touched(*left) & touched(*right) else ())


def test_reads_wait_for_writes_and_not_for_reads() -> None:
    written = access((4,), (1,), 0, "vector")
    read = written._replace(reads=written.writes, writes=(), engine="scalar")
    again = read._replace(engine="gpsimd")
    assert dependences([written, read, again, written], {}) == [(), (0,), (0,), (1, 2)]


# ---- where tiles lie ----


@st.composite
def lifetimes(draw: st.DrawFn, buffer: Any = SBUF) -> list[Lifetime]:
    found = []
    for number in range(draw(st.integers(1, 30))):
        size = draw(st.integers(1, 3000)) * (16 if buffer is SBUF else 1)
        born = draw(st.integers(0, 20))
        allocation = Allocation(number, "", buffer, (128, size), np.dtype(np.uint8), "")
        found.append(Lifetime(allocation, born, born + draw(st.integers(-1, 8))))
    return found


@pytest.mark.parametrize("buffer", [SBUF, PSUM])
@settings(max_examples=150)
@given(data=st.data())
def test_live_tiles_never_overlap_and_what_does_not_fit_is_refused(buffer: Any, data: st.DataObject) -> None:
    lives = [life for life in data.draw(lifetimes(buffer)) if life.last_use >= 0]
    size, unit = (192 << 10, 64) if buffer is SBUF else (16 << 10, 2048)
    needs = {life.allocation.id: -(-life.allocation.row_bytes // unit) * unit for life in lives}
    peak = max(
        (sum(needs[o.allocation.id] for o in lives if o.born <= at <= o.last_use) for at in range(30)), default=0
    )
    try:
        places = assign(lives)
    except NkiRuleError as error:
        assert error.rule.name == "capacity"
        assert peak > size / 2  # or gaps between live tiles are too short
        return
    assert peak <= size
    assert places.keys() == needs.keys()
    for life in lives:
        first, end = places[life.allocation.id]
        assert 0 <= first < end <= size and first % unit == 0 and end - first == needs[life.allocation.id]
    for one, other in product(lives, lives):
        if one is not other and one.born <= other.last_use and other.born <= one.last_use:
            (a, a_end), (b, b_end) = places[one.allocation.id], places[other.allocation.id]
            assert a_end <= b or b_end <= a


# ---- reports ----


def test_a_trace_has_a_row_an_engine_and_queue_and_a_slice_an_instruction(tmp_path: Path) -> None:
    laid_out = small_program([(0, (ENGINES[0], 0, 1, 64)), (None, (ENGINES[1], 0, 1, 64)), (2, (ENGINES[2], 0, 1, 1))])
    path = tmp_path / "deep" / "trace.json"
    write_trace([laid_out, laid_out], path)
    events = json.loads(path.read_text())["traceEvents"]
    for core in (0, 1):
        names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == core}
        assert list(names.values()) == list(ROWS)
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == core]
        transfers = sum(i.engine == "dma" for i in laid_out.instructions)
        assert len(slices) == len(laid_out.instructions) + transfers
        assert all(e["dur"] >= 0 and 0 <= e["ts"] <= e["ts"] + e["dur"] <= laid_out.total / 1e3 + 1e-9 for e in slices)
        assert {names[e["tid"]] for e in slices} == {"vector", "scalar", "sync", "dma sync"}


# ---- costs ----


def last(body: Callable[[], Any]) -> Instruction:
    """The last instruction of a kernel that does `body()`."""

    def kernel(x: Any) -> Any:
        body()
        return x

    return launch(kernel, {"x": Spec((1, 1), F32)}, dry=True).machines[0].trace.instructions[-1]


def operands(*columns: int, dtype: Any = nl.float32, second: Any = nl.sbuf) -> list[Any]:
    """Two filled tiles and an empty one of these columns; the second perhaps in PSUM."""
    return [
        tile(128, *columns, dtype=dtype),
        tile(128, *columns, dtype=dtype, buffer=second),
        empty(128, *columns, dtype=dtype),
    ]


def added(*columns: int, op: Any = nl.add, **options: Any) -> Instruction:
    def body() -> None:
        a, b, c = operands(*columns, **options)
        nisa.tensor_tensor(dst=c, data1=a, data2=b, op=op)

    return last(body)


def copied(columns: int, dtype: Any = nl.float32, step: int = 1, source: Any = nl.sbuf, **options: Any) -> Instruction:
    def body() -> None:
        src = tile(128, columns * step, dtype=dtype, buffer=source)
        nisa.tensor_copy(dst=empty(128, columns, dtype=dtype), src=src[:, 0 : columns * step : step], **options)

    return last(body)


def multiplied(stationary: int, moving: int, dtype: Any) -> Instruction:
    def body() -> None:
        left, right = tile(128, stationary, dtype=dtype), tile(128, moving, dtype=dtype)
        nisa.nc_matmul(dst=empty(stationary, moving, buffer=nl.psum), stationary=left, moving=right)

    return last(body)


def transposed(rows: int, columns: int, buffer: Any, engine: Any) -> Instruction:
    def body() -> None:
        nisa.nc_transpose(dst=empty(columns, rows, buffer=buffer), data=tile(rows, columns), engine=engine)

    return last(body)


def unary(do: Callable[[Any, Any, Any], Any], columns: int = 200, dtype: Any = nl.float32, out: int = 0) -> Instruction:
    """An instruction from a tile to another, with an fp32 column beside them."""

    def body() -> None:
        do(empty(128, out or columns, dtype=dtype), tile(128, columns, dtype=dtype), empty(128, 1))

    return last(body)


BF, ADD, MUL, MAX = nl.bfloat16, nl.add, nl.multiply, nl.maximum
ON_GPSIMD = nisa.engine.gpsimd
# Every row of the published table: what it costs by the formula, in cycles of its engine.
FORMULAS = {
    "matmul bf16": (lambda: multiplied(128, 300, BF), 300),
    "matmul bf16, few columns": (lambda: multiplied(128, 8, BF), 64),
    "matmul bf16, narrow": (lambda: multiplied(16, 8, BF), 16),
    "matmul fp32": (lambda: multiplied(128, 512, nl.float32), 4 * 512),
    "transpose, Tensor": (lambda: transposed(32, 16, nl.psum, nisa.engine.tensor), 32),
    "transpose, Tensor, wide": (lambda: transposed(32, 100, nl.psum, nisa.engine.tensor), 64),
    "transpose, Vector": (lambda: transposed(32, 32, nl.sbuf, nisa.engine.vector), 64),
    "activation": (lambda: unary(lambda d, s, _: nisa.activation(dst=d, op=nl.exp, data=s)), 200),
    "activation, short": (lambda: unary(lambda d, s, _: nisa.activation(dst=d, op=nl.exp, data=s), 3), 64),
    "activation_reduce": (
        lambda: unary(lambda d, s, c: nisa.activation_reduce(dst=d, op=nl.exp, data=s, reduce_op=ADD, reduce_res=c)),
        264,
    ),
    "copy fp32": (lambda: copied(200), 200),
    "copy bf16": (lambda: copied(400, BF), 100),
    "copy bf16, strided": (lambda: copied(400, BF, step=2), 200),
    "copy bf16 from PSUM": (lambda: copied(400, BF, source=nl.psum), 200),
    "copy bf16 from PSUM, strided": (lambda: copied(400, BF, step=2, source=nl.psum), 400),
    "copy bf16, Scalar": (lambda: copied(400, BF, engine=nisa.engine.scalar), 400),
    "copy bf16, short": (lambda: copied(8, BF), 64),
    "tensor_scalar fp32": (lambda: unary(lambda d, s, _: nisa.tensor_scalar(d, s, MUL, 2.0)), 200),
    "tensor_scalar bf16": (lambda: unary(lambda d, s, _: nisa.tensor_scalar(d, s, MUL, 2.0), 400, BF), 100),
    "tensor_scalar_reduce": (
        lambda: unary(
            lambda d, s, c: nisa.tensor_scalar_reduce(dst=d, data=s, op0=MUL, operand0=2.0, reduce_op=ADD, reduce_res=c)
        ),
        264,
    ),
    "rsqrt, GpSimd": (
        lambda: unary(lambda d, s, _: nisa.tensor_scalar(d, s, nl.rsqrt, None, engine=ON_GPSIMD)),
        800,
    ),
    "tensor_tensor fp32": (lambda: added(200), 400),
    "tensor_tensor with PSUM": (lambda: added(200, second=nl.psum), 200),
    "tensor_tensor bf16": (lambda: added(400, dtype=BF), 200),
    "tensor_tensor bf16, maximum": (lambda: added(400, dtype=BF, op=MAX), 800),
    "scalar_tensor_tensor": (
        lambda: unary(lambda d, s, _: nisa.scalar_tensor_tensor(d, s, MUL, 2.0, ADD, s)),
        400,
    ),
    "scan": (lambda: unary(lambda d, s, _: nisa.tensor_tensor_scan(d, s, s, 0.0, MUL, ADD)), 400),
    "reduce fp32": (lambda: unary(lambda d, s, _: nisa.tensor_reduce(d, ADD, s, axis=1), out=1), 200),
    "reduce bf16": (lambda: unary(lambda d, s, _: nisa.tensor_reduce(d, MAX, s, axis=1), 400, BF, 1), 200),
    "reduce bf16, multiply": (lambda: unary(lambda d, s, _: nisa.tensor_reduce(d, MUL, s, axis=1), 400, BF, 1), 400),
    "reciprocal": (lambda: unary(lambda d, s, _: nisa.reciprocal(d, s)), 1600),
    "shuffle": (lambda: unary(lambda d, s, _: nisa.nc_stream_shuffle(src=s, dst=d, shuffle_mask=[0] * 32)), 200),
    "memset": (lambda: unary(lambda d, s, _: nisa.memset(dst=d, value=1.0), 400, BF), 400),
    "memset zero bf16": (lambda: unary(lambda d, s, _: nisa.memset(dst=d, value=0.0), 400, BF), 200),
    "memset zero fp32": (lambda: unary(lambda d, s, _: nisa.memset(dst=d, value=0.0), 400), 400),
    "iota": (lambda: unary(lambda d, s, _: nisa.iota(d, [[1, 200]])), 350),
    "affine_select": (
        lambda: unary(lambda d, s, _: nisa.affine_select(d, [[1, 200]], 0, s, 0.0)),
        350,
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_an_instruction_costs_what_is_published(name: str) -> None:
    make, expected = FORMULAS[name]
    instruction = make()
    assert cycles(instruction, TRN2) == expected
    extra = 0 if instruction.engine == "tensor" else 60
    assert duration(instruction, TRN2) == (expected + extra) / TRN2.clocks[instruction.engine]


def test_an_older_core_has_no_fast_modes() -> None:
    assert cycles(copied(400, BF), NEURONCORE_V2) == 400
    assert cycles(added(400, dtype=BF), NEURONCORE_V2) == 400
    assert cycles(added(400), NEURONCORE_V2) == 800


def test_a_copy_with_an_address_of_run_time_takes_600_cycles() -> None:
    def kernel(x: Any) -> Any:
        where = tile(1, 1, dtype=nl.int32, value=0)
        nisa.tensor_copy(dst=empty(128, 8), src=tile(128, 64)[:, nl.ds(where, 8)])
        return x

    trace = launch(kernel, {"x": np.zeros((1, 1), np.float32)}).machines[0].trace  # an address needs values
    assert cycles(trace.instructions[-1], TRN2) == 600


@pytest.mark.parametrize(("size", "gigabytes"), [(2, 1.1), (256, 137), (512, 273), (2048, 355), (8192, 355)])
def test_packets_reach_the_published_rates_of_a_core(size: int, gigabytes: float) -> None:
    assert 16 * size / packet_time(size, TRN2) == pytest.approx(gigabytes, rel=0.05)


def test_issue_costs_of_the_targets() -> None:
    def issued(**options: Any) -> Instruction:
        return last(lambda: nisa.dma_copy(dst=empty(1, 4), src=tile(1, 4), **options))

    assert [issue_time(issued(**options), TRN2) for options in ({}, ON_SCALAR, {"dge_mode": nisa.dge_mode.swdge})] == [
        600,
        600,
        590,
    ]
    assert issue_time(issued(), NEURONCORE_V2) == 590


@settings(max_examples=30)
@given(st.lists(STEP, min_size=1, max_size=10))
def test_trn3_is_faster_than_trn2(steps: list[Any]) -> None:
    assert small_program(steps, TRN3).total < small_program(steps, TRN2).total


# ---- packets ----


def moved(shape: tuple[int, ...], of: tuple[int, ...], first: int = 0) -> Any:
    """The packets of a load of [:, 0:shape[1]] of an fp32 argument into a tile from partition `first` on."""

    def kernel(x: Any) -> Any:
        t = empty(128, shape[1])
        nisa.dma_copy(dst=t[first : first + shape[0]], src=x[:, 0 : shape[1]])
        return x

    instruction = launch(kernel, {"x": Spec(of, F32)}, dry=True).machines[0].trace.instructions[0]
    return packets(instruction.writes[0], instruction.reads[0])


def test_neighbouring_rows_of_an_engine_are_one_packet() -> None:
    assert moved((128, 32), (128, 32)) == (8 * 128, (1,) * 16)
    assert moved((128, 32), (128, 33)) == (128, (8,) * 16)
    assert moved((16, 32), (16, 32), first=32) == (8 * 128, (0,) * 4 + (1, 1) + (0,) * 10)
    assert moved((4, 32), (4, 32)).bytes == 128  # too few for what the guide shows of eight
