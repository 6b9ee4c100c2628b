"""Two cores: whose turn it is, barriers and exchanges, races, deadlocks and programs that differ."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_kernels import load, normal, run, run_body, shared, stored, tile

from gdn_kernels import interpreter
from gdn_kernels.interpreter import NkiRuleError, NkiRuleWarning
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl

X = normal(2, 8)


def exchange_through_hbm(x: Any, barriers: int = 1, on: str = "meeting") -> Any:
    """Each core doubles a row, and stores the other's doubled row."""
    core = nl.program_id()
    meeting, elsewhere, out = shared(2, 8), shared(1, 8), shared(2, 8)
    mine = load(x[core : core + 1, :])
    nisa.tensor_tensor(dst=mine, data1=mine, data2=mine, op=nl.add)
    nisa.dma_copy(dst=meeting[core : core + 1, :], src=mine)
    for _ in range(barriers):
        nisa.core_barrier(data=meeting if on == "meeting" else elsewhere, cores=(0, 1))
    theirs = load(meeting[1 - core : 2 - core, :])
    nisa.dma_copy(dst=out[core : core + 1, :], src=theirs)
    return out


def test_a_barrier_hands_over_what_the_other_core_wrote() -> None:
    with interpreter.strict():
        out = run(exchange_through_hbm, 2, x=X)
    assert np.array_equal(out, 2 * X[::-1])


def test_a_missing_barrier_is_a_race_with_both_lines() -> None:
    with pytest.raises(NkiRuleError) as caught:
        run(exchange_through_hbm, 2, x=X, barriers=0)
    assert caught.value.rule.name in ("race", "uninitialised")


def write_then_read(data: Any, barrier: bool) -> Any:
    """Core 0 writes row 0 of an argument; core 1 reads it, or row 1."""
    core = nl.program_id()
    out = shared(2, 8)
    scratch = nl.ndarray((1, 8), dtype=nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=data[0:1, :] if core == 0 else scratch, src=tile(1, 8))
    if barrier:
        nisa.core_barrier(data=data, cores=(0, 1))
    nisa.dma_copy(dst=out[core : core + 1, :], src=load(data[1 - core : 2 - core, :]))
    return out


def test_an_argument_that_one_core_writes_and_the_other_reads_is_a_race() -> None:
    with pytest.raises(NkiRuleError) as caught:
        run(write_then_read, 2, data=X.copy(), barrier=False)
    assert caught.value.rule.name == "race"
    assert re.search(
        r"writes data.* at .*test_cores.py:\d+ and core 1 reads data.* at .*small_kernels.py:\d+", str(caught.value)
    )
    assert np.array_equal(run(write_then_read, 2, data=X.copy(), barrier=True)[1], np.ones(8))


def test_a_barrier_on_another_tensor_is_warned_about() -> None:
    with pytest.warns(NkiRuleWarning, match="race-barrier"):
        run(exchange_through_hbm, 2, x=X, on="elsewhere")


@pytest.mark.parametrize("overlap", [0, 1])
def test_two_writers_may_not_share_an_element(overlap: int) -> None:
    def kernel() -> Any:
        out = shared(1, 8)
        first = 4 * nl.program_id() - overlap * nl.program_id()
        nisa.dma_copy(dst=out[:, first : first + 4 + overlap], src=tile(1, 4 + overlap))
        return out

    if overlap:
        with pytest.raises(NkiRuleError, match="writes"):
            run(kernel, 2)
    else:
        run(kernel, 2)


@given(data=st.data())
def test_races_are_those_of_a_brute_force_search(data: st.DataObject) -> None:
    slices = st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 2))
    uses = data.draw(st.lists(st.tuples(st.integers(0, 1), st.booleans(), slices), min_size=1, max_size=5))
    touched: list[list[set[int]]] = [[set(), set()], [set(), set()]]  # [core][writes]
    for core, writes, (start, count, step) in uses:
        touched[core][writes] |= set(range(start, start + count * step, step))
    expected = bool(touched[0][1] & (touched[1][0] | touched[1][1]) or touched[1][1] & touched[0][0])

    def kernel(x: Any) -> Any:
        private = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
        nisa.dma_copy(dst=private, src=tile(1, 12))
        for core, writes, (start, count, step) in uses:
            of = x if core == nl.program_id() else private
            view, values = of[:, start : start + (count - 1) * step + 1 : step], tile(1, count)
            nisa.dma_copy(dst=view if writes else values, src=values if writes else view)
        return stored_half()

    def stored_half() -> Any:
        out = shared(2, 4)
        nisa.dma_copy(dst=out[nl.program_id() : nl.program_id() + 1, :], src=tile(1, 4))
        return out

    try:
        run(kernel, 2, x=np.zeros((1, 12), np.float32))
        found = False
    except NkiRuleError as error:
        assert error.rule.name == "race"
        found = True
    assert found == expected


def test_a_dynamic_write_races_where_it_lands() -> None:
    def kernel(x: Any, index: Any, apart: bool) -> Any:
        row = load(index[nl.program_id() : nl.program_id() + 1, :] if apart else index[0:1, :])
        nisa.dma_copy(dst=x.select(0, row), src=tile(1, 8))
        return x

    index = np.array([[0], [1]], np.int32)
    assert np.array_equal(run(kernel, 2, x=X.copy(), index=index, apart=True), np.ones((2, 8)))
    with pytest.raises(NkiRuleError, match="race"):
        run(kernel, 2, x=X.copy(), index=index, apart=False)


def swap(x: Any, pipes: tuple[int, int] = (0, 0), ranks: tuple[int, int] = (1, 0)) -> Any:
    core = nl.program_id()
    mine, theirs = load(x[core : core + 1, :]), tile(1, 8, value=None)
    nisa.sendrecv(src=mine, dst=theirs, send_to_rank=ranks[core], recv_from_rank=ranks[core], pipe_id=pipes[core])
    out = shared(2, 8)
    nisa.dma_copy(dst=out[core : core + 1, :], src=theirs)
    return out


def test_sendrecv_swaps_tiles() -> None:
    assert np.array_equal(run(swap, 2, x=X), X[::-1])
    assert np.array_equal(run(swap, 2, x=X, ranks=(0, 1)), X)  # each to itself


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [({"pipes": (0, 1)}, "deadlock"), ({"ranks": (1, 1)}, "deadlock"), ({"ranks": (1, 2)}, "shape")],
)
def test_an_exchange_that_does_not_match_is_refused(arguments: dict[str, Any], rule: str) -> None:
    with pytest.raises(NkiRuleError) as caught:
        run(swap, 2, x=X, **arguments)
    assert caught.value.rule.name == rule


def test_ranks_that_differ_leave_the_other_core_waiting() -> None:
    def kernel() -> None:
        nisa.sendrecv(src=tile(1, 8), dst=tile(1, 8), send_to_rank=1, recv_from_rank=0, pipe_id=0)

    with pytest.raises(NkiRuleError, match="sendrecv"):
        run_body(kernel, 2)


def test_a_received_tile_has_the_shape_that_was_sent() -> None:
    def kernel() -> None:
        free = 8 + nl.program_id()
        nisa.sendrecv(
            src=tile(1, free),
            dst=tile(1, free),
            send_to_rank=1 - nl.program_id(),
            recv_from_rank=1 - nl.program_id(),
            pipe_id=0,
        )

    with pytest.raises(NkiRuleError, match="receives"):
        run_body(kernel, 2)


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("cores_before", [0, 2])
def test_a_core_that_never_arrives_is_a_deadlock_not_a_hang(missing: int, cores_before: int) -> None:
    def kernel() -> None:
        data = shared(2, 4)
        for _ in range(cores_before):
            nisa.core_barrier(data=data, cores=(0, 1))
        if nl.program_id() != missing:
            nisa.core_barrier(data=data, cores=(0, 1))

    threads = threading.active_count()
    with pytest.raises(NkiRuleError, match="whose program has ended") as caught:
        run_body(kernel, 2)
    assert caught.value.rule.name == "deadlock" and "test_cores.py" in caught.value.line
    assert threading.active_count() == threads


def test_a_barrier_and_an_exchange_do_not_meet() -> None:
    def kernel() -> None:
        data = shared(2, 4)
        if nl.program_id() == 0:
            nisa.core_barrier(data=data, cores=(0, 1))
        else:
            nisa.sendrecv(src=tile(1, 4), dst=tile(1, 4), send_to_rank=0, recv_from_rank=0, pipe_id=0)

    with pytest.raises(NkiRuleError, match="don't agree"):
        run_body(kernel, 2)


def test_a_barrier_needs_two_cores() -> None:
    with pytest.raises(NkiRuleError, match="deadlock"):
        run_body(lambda: nisa.core_barrier(data=shared(2, 4), cores=(0, 1)))


@pytest.mark.parametrize("failing", [0, 1])
def test_the_first_failure_of_either_core_is_raised(failing: int) -> None:
    def kernel() -> None:
        data = shared(2, 4)
        nisa.core_barrier(data=data, cores=(0, 1))
        if nl.program_id() == failing:
            raise RuntimeError("on purpose")
        nisa.core_barrier(data=data, cores=(0, 1))

    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="on purpose"):
        run_body(kernel, 2)
    assert threading.active_count() == threads


STREAMS: dict[str, Any] = {
    "another instruction": lambda: (
        nisa.tensor_copy(dst=tile(1, 4), src=tile(1, 4))
        if nl.program_id()
        else nisa.memset(dst=tile(1, 4, value=None), value=0.0)
    ),
    "another shape": lambda: nisa.memset(dst=tile(1, 4 + nl.program_id(), value=None), value=0.0),
    "another dtype": lambda: nisa.memset(
        dst=tile(1, 4, dtype=nl.bfloat16 if nl.program_id() else nl.float32, value=None), value=0.0
    ),
    "another engine": lambda: nisa.memset(
        dst=tile(1, 4, value=None), value=0.0, engine=nisa.engine.gpsimd if nl.program_id() else nisa.engine.vector
    ),
    "another op": lambda: nisa.tensor_tensor(
        dst=tile(1, 4), data1=tile(1, 4), data2=tile(1, 4), op=nl.add if nl.program_id() else nl.subtract
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_programs_that_differ_are_refused_at_the_first_difference(name: str) -> None:
    with pytest.raises(NkiRuleError) as caught:
        run_body(lambda: STREAMS[name](), 2)
    assert caught.value.rule.name == "unequal-streams"
    assert str(caught.value).count("test_cores.py:") >= 2 or str(caught.value).count("small_kernels.py:") >= 1


def test_a_longer_program_is_refused() -> None:
    def kernel() -> Any:
        out = shared(2, 4)
        nisa.dma_copy(dst=out[nl.program_id() : nl.program_id() + 1, :], src=tile(1, 4))
        if nl.program_id():
            tile(1, 4)
        return out

    with pytest.raises(NkiRuleError, match="core 0 runs 2 instructions and core 1 3"):
        run(kernel, 2)


def test_programs_may_differ_in_addresses_and_constants() -> None:
    def kernel() -> None:
        source = tile(8, 8)
        nisa.tensor_scalar(
            dst=tile(8, 4),
            data=source[:, 4 * nl.program_id() :][:, :4],
            op0=nl.multiply,
            operand0=1.0 + nl.program_id(),
        )

    run_body(kernel, 2)


def test_the_cores_return_the_same_outputs() -> None:
    def kernel() -> Any:
        outs = [stored(tile(1, 4)[:, 2 * nl.program_id() :][:, :2]) for _ in range(0)] or [shared(2, 4), shared(2, 4)]
        for out in outs:
            nisa.dma_copy(dst=out[nl.program_id() : nl.program_id() + 1, :], src=tile(1, 4))
        return outs[nl.program_id()]

    with pytest.raises(NkiRuleError, match="core 1 returns"):
        run(kernel, 2)


def test_the_same_bytes_every_time() -> None:
    results = {run(exchange_through_hbm, 2, x=X).tobytes() for _ in range(20)}
    assert len(results) == 1
