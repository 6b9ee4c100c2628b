"""The block on pools of states: the bytes of the plain block on gathered states, and nothing else touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from arguments import Arguments, block_arguments
from hypothesis import given, settings
from hypothesis import strategies as st

from gdn_kernels import MODELS, BlockDims, backends, gdn_block_tkg, gdn_block_tkg_slots, interpreter, pools
from gdn_kernels.interpreter import NkiRuleError, Spec
from gdn_kernels.latency.floor import argument_specs, floor_us
from gdn_kernels.latency.model import model_block, model_machines
from gdn_kernels.timeline.costs import TRN2
from gdn_kernels.timeline.schedule import schedule

Array = npt.NDArray[Any]
Rows = list[int]

ODD = BlockDims(128, 3, 9, 16, 24, 4)  # a key head that both of two cores compute
SHARED = BlockDims(128, 1, 3, 16, 8, 3)  # one key head: both cores need its window, and a value head is computed twice
TILE_4 = BlockDims(128, 8, 16, 16, 8, 4)
TILE_2 = BlockDims(256, 4, 4, 24, 16, 2)
LARGE = MODELS["Qwen3.5-35B-A3B"].dims


class Pools:
    """Pools of random states beside the other arguments of a call, and what the plain block makes of them."""

    def __init__(self, dims: BlockDims, B: int, count: int, form: str = "bf16", seed: int = 0) -> None:
        self.arguments = block_arguments(dims, B, form, seed)
        conv, recurrent = self.arguments.pop("conv_state"), self.arguments.pop("recurrent_state")
        self.arguments["norm_weight"][::2] *= -1  # a product with zero may then be a negative zero
        rng = np.random.default_rng(1000 + seed)
        self.conv = rng.standard_normal((count, *conv.shape[1:])).astype(conv.dtype)
        self.recurrent = (rng.standard_normal((count, *recurrent.shape[1:])) + 0.3).astype(np.float32)

    def spoil(self, slots: Rows) -> None:
        """NaN and infinities in slots that must not be looked at."""
        self.conv[slots], self.recurrent[slots] = np.nan, np.nan
        self.recurrent[slots, 0] = np.inf

    def call(self, slots: Rows, **options: Any) -> Array:
        for name, dtype in (("write_slots", np.int32), ("fresh", np.bool_)):
            if options.get(name) is not None:
                options[name] = np.array(options[name], dtype)
        named = {"conv_pool": self.conv, "recurrent_pool": self.recurrent, "slots": np.array(slots, np.int32)}
        core_out: Array = gdn_block_tkg_slots(**self.arguments, **named, **options)
        return core_out

    def expected(
        self, slots: Rows, write_slots: Rows | None = None, fresh: list[bool] | None = None, lnc: int = 1
    ) -> tuple[Array, Array, Array]:
        """core_out and both pools after the call, by the plain block on gathered states."""
        padding, zero = np.array(slots) < 0, (np.array(slots) < 0) | np.array(fresh or [False] * len(slots))
        given = dict(self.arguments)
        given["hidden"] = np.where(padding[:, None, None], 0, given["hidden"]).astype(given["hidden"].dtype)
        given["conv_state"], given["recurrent_state"] = self.conv[slots], self.recurrent[slots]
        given["conv_state"][zero], given["recurrent_state"][zero] = 0, 0
        core_out, windows, states = gdn_block_tkg(**given, lnc=lnc)
        conv, recurrent = self.conv.copy(), self.recurrent.copy()
        for b, slot in enumerate(slots if write_slots is None else write_slots):
            if slot < 0:
                core_out[b] = 0
            else:
                conv[slot], recurrent[slot] = windows[b], states[b]
        return core_out, conv, recurrent

    def check(
        self, slots: Rows, write_slots: Rows | None = None, fresh: list[bool] | None = None, lnc: int = 1
    ) -> None:
        """Byte for byte. Padding rows come in full of NaN."""
        expected = self.expected(slots, write_slots, fresh, lnc)
        for b, slot in enumerate(slots):
            if slot < 0:
                self.arguments["hidden"][b] = np.nan
        core_out = self.call(slots, write_slots=write_slots, fresh=fresh, lnc=lnc)
        for found, wanted in zip((core_out, self.conv, self.recurrent), expected, strict=True):
            assert found.dtype == wanted.dtype
            assert found.tobytes() == wanted.tobytes()


@st.composite
def rows_of(draw: st.DrawFn) -> tuple[int, Rows, Rows, list[bool]]:
    """(slots in the pool, slots, write slots, fresh): any call that keeps no slot for two rows."""
    B = draw(st.integers(1, 5), "B")
    count = draw(st.integers(2 * B, 2 * B + 4), "slots")
    order = draw(st.permutations(range(count)), "order")
    write, kept = order[:B], order[B:]  # kept: written by no row, so any row may read it
    slots = [draw(st.sampled_from([write[b], *kept]), "reads") for b in range(B)]
    fresh = [draw(st.booleans(), "fresh") for _ in range(B)]
    for b in range(B):
        if draw(st.integers(0, 3), "padding") == 0:
            slots[b] = write[b] = -1
    return count, slots, list(write), fresh


@settings(max_examples=40)
@given(st.data())
def test_any_call_gives_the_bytes_of_the_plain_block(data: st.DataObject) -> None:
    Hk = data.draw(st.integers(1, 5), "Hk")
    dims = BlockDims(
        H=128,
        Hk=Hk,
        Hv=Hk * data.draw(st.integers(1, 3), "gqa"),
        K=data.draw(st.sampled_from([4, 7, 16, 32]), "K"),
        V=data.draw(st.sampled_from([1, 8, 24, 40]), "V"),
        K_win=data.draw(st.integers(2, 8), "K_win"),
    )
    count, slots, write, fresh = data.draw(rows_of(), "rows")
    form = data.draw(st.sampled_from(["bf16", "fp32"]), "form")
    case = Pools(dims, len(slots), count, form, data.draw(st.integers(0, 99), "seed"))
    read = {slot for slot, new in zip(slots, fresh, strict=True) if not new}
    case.spoil([slot for slot in range(count) if slot not in read])
    case.check(slots, write, fresh, data.draw(st.sampled_from([1, 2]), "lnc"))


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("dims", [ODD, SHARED, TILE_4, TILE_2], ids=["odd", "shared", "tile of 4", "tile of 2"])
def test_slots_alone_are_read_and_written(dims: BlockDims, lnc: int) -> None:
    Pools(dims, 4, 6).check([4, -1, 0, 5], None, [False, True, True, False], lnc)


@pytest.mark.parametrize("lnc", [1, 2])
def test_batches_are_tiled(lnc: int) -> None:
    slots = np.random.default_rng(0).permutation(80)[:67].tolist()
    slots[0] = slots[64] = -1
    fresh = [b % 5 == 0 for b in range(67)]
    Pools(TILE_2, 67, 80, "fp32").check(slots, None, fresh, lnc)


def test_padding_alone_touches_nothing() -> None:
    case = Pools(ODD, 2, 3)
    case.spoil([0, 1, 2])
    case.check([-1, -1])


def test_many_rows_may_read_one_slot_that_none_writes() -> None:
    Pools(TILE_2, 3, 8).check([6, 6, 6], [1, 0, 7])


def test_an_empty_batch_gives_an_empty_result_and_touches_nothing() -> None:
    case = Pools(ODD, 0, 3)
    before = case.conv.tobytes(), case.recurrent.tobytes()
    assert case.call([]).shape == (0, 1, ODD.value_dim)
    assert before == (case.conv.tobytes(), case.recurrent.tobytes())


def test_only_the_pools_are_written() -> None:
    case = Pools(ODD, 2, 3)
    before = {name: value.tobytes() for name, value in case.arguments.items()}
    slots = np.array([2, 0], np.int32)
    slots.flags.writeable = False
    gdn_block_tkg_slots(**case.arguments, conv_pool=case.conv, recurrent_pool=case.recurrent, slots=slots)
    assert before == {name: value.tobytes() for name, value in case.arguments.items()}


# ---- random calls against a plain model of a pool ----


class Server:
    """Sequences that come, fork and go in pools; each has its own states in `plain` too, decoded alone."""

    def __init__(self, dims: BlockDims, seed: int) -> None:
        self.dims, self.rng, self.case = dims, np.random.default_rng(seed), Pools(dims, 1, 7, seed=seed)
        self.case.spoil(list(range(7)))
        self.free, self.plain = set(range(7)), dict[int, tuple[Array, Array]]()  # by slot

    def step(self) -> None:
        self._leave()
        rows = [(slot, slot, False) for slot in self.rng.permutation(list(self.plain)).tolist()]
        parents = [slot for slot in self.plain if self.rng.random() < 0.3]
        rows = [row for row in rows if row[0] not in parents][: self.rng.integers(0, 4)]
        rows += [(parent, self.free.pop(), False) for parent in parents if self.free]
        if self.free and (not rows or self.rng.random() < 0.6):
            new = self.free.pop()
            rows.append((new, new, True))
        rows.insert(int(self.rng.integers(0, len(rows) + 1)), (-1, -1, bool(self.rng.integers(2))))
        self._decode(rows)

    def _leave(self) -> None:
        for slot in [slot for slot in self.plain if self.rng.random() < 0.15]:
            del self.plain[slot]
            self.free.add(slot)

    def _decode(self, rows: list[tuple[int, int, bool]]) -> None:
        case, seed = self.case, int(self.rng.integers(1 << 30))
        case.arguments["hidden"] = block_arguments(self.dims, len(rows), seed=seed)["hidden"]
        hidden = case.arguments["hidden"].copy()
        read, write, fresh = map(list, zip(*rows, strict=True))
        core_out = case.call(read, write_slots=write, fresh=fresh, lnc=1 + seed % 2)
        changed = {}
        for b, (slot, target, new) in enumerate(rows):
            if slot < 0:
                assert not core_out[b].any()
                continue
            window, state = (np.zeros_like(case.conv[:1]), np.zeros_like(case.recurrent[:1]))
            window, state = (window, state) if new else self.plain[slot]
            alone = {**case.arguments, "hidden": hidden[b : b + 1], "conv_state": window, "recurrent_state": state}
            out, *changed[target] = gdn_block_tkg(**alone)
            assert out.tobytes() == core_out[b : b + 1].tobytes()
        self.plain.update(changed)

    def check(self) -> None:
        for slot, (window, state) in self.plain.items():
            assert window.tobytes() == self.case.conv[slot : slot + 1].tobytes()
            assert state.tobytes() == self.case.recurrent[slot : slot + 1].tobytes()


@pytest.mark.parametrize(("dims", "seed"), [(TILE_2, 0), (ODD, 1), (SHARED, 2)])
def test_calls_one_after_the_other_follow_a_plain_model_of_the_pool(dims: BlockDims, seed: int) -> None:
    server = Server(dims, seed)
    for _ in range(10):
        server.step()
        server.check()


# ---- negative controls: each fault must be seen ----


def kernel_names() -> dict[str, Any]:
    names: dict[str, Any] = backends.interpreted("gdn_block_tkg_slots").function.__globals__
    return names


def write_where_read(monkeypatch: pytest.MonkeyPatch) -> None:
    swap_arguments(monkeypatch, lambda read, write: {"write_slots": np.where(write < 0, write, read)})


def fresh_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    swap_arguments(monkeypatch, lambda read, write: {"read_slots": np.where(read < 0, np.int32(1), read)})


def padding_written(slot: int) -> Callable[[pytest.MonkeyPatch], None]:
    def fault(monkeypatch: pytest.MonkeyPatch) -> None:
        swap_arguments(monkeypatch, lambda read, write: {"write_slots": np.where(write < 0, np.int32(slot), write)})

    return fault


def swap_arguments(monkeypatch: pytest.MonkeyPatch, change: Callable[[Array, Array], dict[str, Array]]) -> None:
    run = backends.run

    def faulty(kernel: str, arguments: Arguments, lnc: int | None, backend: str) -> Any:
        if kernel == "gdn_block_tkg_slots":
            arguments = {**arguments, **change(arguments["read_slots"], arguments["write_slots"])}
        return run(kernel, arguments, lnc, backend)

    monkeypatch.setattr(backends, "run", faulty)


def states_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_names()["SlotStates"], "clear", lambda self, S, b: None)


def states_of_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    load = kernel_names()["SlotStates"].load
    shifted = lambda self, S, layout, b, h0, tile: load(self, S, layout, max(b - 1, 0), h0, tile)  # noqa: E731
    monkeypatch.setattr(kernel_names()["SlotStates"], "load", shifted)


def windows_never_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_names()["SlotRows"], "store_pending", lambda self: None)


def padding_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_names()["SlotRows"], "clear_unnamed", lambda self, columns: None)


def padding_cleared_on_the_way_in_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clear = kernel_names()["SlotRows"].clear_unnamed

    def hidden_only(self: Any, columns: Any) -> None:
        if columns.shape[0] == 128:
            clear(self, columns)

    monkeypatch.setattr(kernel_names()["SlotRows"], "clear_unnamed", hidden_only)


FAULTS = {
    "written where read": write_where_read,
    "fresh ignored": fresh_ignored,
    "padding written to slot 0": padding_written(0),
    "padding written to the last slot": padding_written(7),
    "states not cleared": states_not_cleared,
    "states of the row before": states_of_the_row_before,
    "windows not stored": windows_never_stored,
    "padding not cleared": padding_not_cleared,
    "core_out of padding not cleared": padding_cleared_on_the_way_in_only,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: tuple[Rows, Rows, list[bool]] = ([5, 2, -1, 1], [4, 3, -1, 6], [False, False, False, True])
    Pools(TILE_2, 4, 8).check(*rows)
    FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, NkiRuleError)):
        Pools(TILE_2, 4, 8).check(*rows)


def test_two_cores_without_their_barrier_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one key head the second core reads a window that the first one overwrites."""
    monkeypatch.setattr(kernel_names()["nisa"], "core_barrier", lambda **_: None)
    with pytest.raises(NkiRuleError, match="race"):
        Pools(SHARED, 2, 4).check([3, 1], lnc=2)


def test_a_repeated_head_that_reads_the_pool_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an odd number of key heads the middle one's states are the first core's to write."""
    rows = kernel_names()["SlotRows"]
    states = rows.states

    def reading(self: Any, spare: bool) -> Any:
        found = states(self, spare)
        found.reads = self.reads
        return found

    monkeypatch.setattr(rows, "states", reading)
    with pytest.raises(NkiRuleError, match="race"):
        Pools(ODD, 2, 4).check([3, 1], lnc=2)


# ---- what is refused, by name and with nothing done ----


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pools]:
    """A good case of three rows; a kernel that starts, or a pool that changes, is a failure."""
    monkeypatch.setattr(backends, "run", lambda *_: pytest.fail("a kernel ran"))
    case = Pools(ODD, 3, 5)
    before = case.conv.tobytes(), case.recurrent.tobytes()
    yield case
    assert before == (case.conv.tobytes(), case.recurrent.tobytes())


@pytest.mark.parametrize(
    ("slots", "options", "message"),
    [
        ([0, 1, 0], {}, r"^slots must name a slot once, got slot 0 in rows 0 and 2"),
        ([0, 1, 2], {"write_slots": [3, 4, 3]}, r"^write_slots must name a slot once, got slot 3 in rows 0 and 2"),
        (
            [0, 1, 2],
            {"write_slots": [3, 0, 4]},
            r"^write_slots must not name a slot that another row reads, got slot 0",
        ),
        ([0, 0, 2], {"write_slots": [0, 1, 2]}, r"slot 0, which row 0 writes and row 1 reads"),
        ([1, 0, 2], {"write_slots": [0, 1, 2]}, r"^write_slots must not name a slot that another row reads"),
        ([0, 1, 5], {}, r"^slots must be -1 or 0 to 4, got 5 in row 2"),
        ([0, -2, 2], {}, r"^slots must be -1 or 0 to 4, got -2 in row 1"),
        ([0, 1, 2], {"write_slots": [0, 9, 2]}, r"^write_slots must be -1 or 0 to 4, got 9 in row 1"),
        ([0, -1, 2], {"write_slots": [0, 1, 2]}, r"^write_slots must be -1 where slots is and nowhere else, got 1"),
        ([0, 1, 2], {"write_slots": [0, -1, 2]}, r"^write_slots must be -1 where slots is and nowhere else, got -1"),
        ([0, 1], {}, r"^slots must have shape \[B\] = \[3\] by hidden, got \[2\]"),
        ([0, 1, 2], {"write_slots": [0, 1]}, r"^write_slots must have shape"),
        ([0, 1, 2], {"fresh": [True]}, r"^fresh must have shape"),
        ([0, 1, 2], {"norm_eps": 0.0}, r"^norm_eps must be"),
        ([0, 1, 2], {"lnc": 3}, r"^lnc must be"),
    ],
)
def test_rows_that_can_not_be_served_are_named(
    refused: Pools, slots: Rows, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        refused.call(slots, **options)


def test_a_row_that_starts_from_zeros_reads_no_slot() -> None:
    """So another row may write the slot that it names."""
    Pools(TILE_2, 2, 3).check([0, 1], [1, 0], [True, True])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("slots", np.arange(3), "slots must be int32, got int64"),
        ("slots", np.arange(3.0), "slots must be int32, got float64"),
        ("slots", [0, 1, 2], "slots must be a NumPy array or a torch tensor of int32, got list"),
        ("slots", None, "slots must be a NumPy array or a torch tensor of int32, got NoneType"),
        ("write_slots", np.arange(3, dtype=np.uint32), "write_slots must be int32, got uint32"),
        ("fresh", np.zeros(3, np.int32), "fresh must be bool, got int32"),
    ],
)
def test_wrong_kinds_of_rows_are_named(refused: Pools, name: str, value: Any, message: str) -> None:
    given = {**refused.arguments, "conv_pool": refused.conv, "recurrent_pool": refused.recurrent}
    given["slots"] = np.arange(3, dtype=np.int32)
    with pytest.raises(ValueError, match=message):
        gdn_block_tkg_slots(**{**given, name: value})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("conv_pool", lambda pool: pool.astype(np.float64), "conv_pool must be bfloat16"),
        ("conv_pool", lambda pool: pool.astype(np.float32), "conv_pool must be bfloat16"),
        ("recurrent_pool", lambda pool: pool.astype(np.float64), "recurrent_pool must be float32"),
        ("conv_pool", lambda pool: pool[:, :, ::2].repeat(2, -1)[..., ::-1], "conv_pool must be C-contiguous"),
        ("recurrent_pool", lambda pool: pool.swapaxes(-1, -2), "recurrent_pool must be C-contiguous"),
        ("recurrent_pool", lambda pool: pool.swapaxes(-1, -2).copy(), r"(recurrent_pool|norm_weight) must have"),
        ("conv_pool", lambda pool: pool[..., 1:].copy(), r"conv_pool must have shape \[slots, conv_dim, K_win\]"),
        ("conv_pool", lambda pool: pool[0], r"conv_pool must have shape \[slots, conv_dim, K_win\]"),
        ("conv_pool", lambda pool: pool[:4].copy(), r"(conv_pool|recurrent_pool) must have shape \[slots, "),
        ("recurrent_pool", lambda pool: read_only(pool), "recurrent_pool must be writeable"),
        ("conv_pool", lambda pool: read_only(pool), "conv_pool must be writeable"),
        ("conv_pool", lambda pool: pool.tolist(), "conv_pool must be a NumPy array or a torch tensor"),
    ],
)
def test_pools_that_do_not_fit_are_named(
    refused: Pools, name: str, change: Callable[[Array], Any], message: str
) -> None:
    given = {**refused.arguments, "conv_pool": refused.conv, "recurrent_pool": refused.recurrent}
    with pytest.raises(ValueError, match=message):
        gdn_block_tkg_slots(**{**given, name: change(given[name])}, slots=np.arange(3, dtype=np.int32))


def read_only(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def test_a_wrong_size_of_any_axis_is_named(refused: Pools) -> None:
    given = {**refused.arguments, "conv_pool": refused.conv, "recurrent_pool": refused.recurrent}
    for name, array in given.items():
        for axis, size in enumerate(array.shape):
            for wrong in (size + 1, size - 1):
                shape = (*array.shape[:axis], wrong, *array.shape[axis + 1 :])
                with pytest.raises(ValueError, match=rf"\b{name}\b"):
                    gdn_block_tkg_slots(
                        **{**given, name: np.zeros(shape, array.dtype)}, slots=np.arange(3, dtype=np.int32)
                    )


def test_dimensions_that_the_kernel_does_not_take_are_named_by_pool() -> None:
    shapes = {name: spec.shape for name, spec in slot_specs(WIDE, 1, 3).items()}
    wide = {"W_in_qkv": (128, 274), "conv_weight": (274, 2), "conv_pool": (3, 274, 2), "recurrent_pool": (3, 2, 129, 8)}
    with pytest.raises(ValueError, match=r"^recurrent_pool .*: K must be at most 128, got 129"):
        pools.check_shapes({**shapes, **wide})


def test_pools_over_the_memory_of_another_argument_are_named(refused: Pools) -> None:
    given = {**refused.arguments, "conv_pool": refused.conv, "recurrent_pool": refused.recurrent}
    slots, pool = np.arange(3, dtype=np.int32), refused.recurrent
    inside = pool.reshape(-1)[-ODD.Hv :]
    with pytest.raises(ValueError, match=r"recurrent_pool must not share memory .* overlaps dt_bias"):
        gdn_block_tkg_slots(**{**given, "dt_bias": inside}, slots=slots)
    bits = pool.reshape(-1).view(refused.conv.dtype)[: refused.conv.size].reshape(refused.conv.shape)
    with pytest.raises(ValueError, match=r"conv_pool must not share memory .* overlaps recurrent_pool"):
        gdn_block_tkg_slots(**{**given, "conv_pool": bits}, slots=slots)


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_kernel_that_fails_half_way_leaves_the_pools_as_they_were(
    failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Pools(ODD, 3, 5)
    before = case.conv.tobytes(), case.recurrent.tobytes()
    store, stores = kernel_names()["SlotStates"].store, []

    def failing(self: Any, S: Any, layout: Any, b: int, h0: int, tile: int) -> None:
        store(self, S, layout, b, h0, tile)
        stores.append(b)
        if len(stores) == 3:
            assert before != (case.conv.tobytes(), case.recurrent.tobytes())
            raise failure

    monkeypatch.setattr(kernel_names()["SlotStates"], "store", failing)
    with pytest.raises(failure):
        case.call([4, -1, 2])
    assert before == (case.conv.tobytes(), case.recurrent.tobytes())


def test_pools_that_a_backend_returns_elsewhere_are_copied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device may, where a framework doesn't alias an input with a result."""
    run = backends.run

    def elsewhere(kernel: str, arguments: Arguments, lnc: int | None, backend: str) -> Any:
        apart = {name: value.copy() if name.endswith("_pool") else value for name, value in arguments.items()}
        return run(kernel, apart, lnc, backend)

    monkeypatch.setattr(backends, "run", elsewhere)
    Pools(ODD, 3, 5).check([4, -1, 2])


@pytest.mark.parametrize("slots", [[3, -1, 0], [-1, -1, -1]])
def test_torch_pools_are_updated_in_place(slots: Rows) -> None:
    torch = pytest.importorskip("torch")
    from gdn_kernels.interpreter.torch_arrays import to_numpy, to_torch

    case = Pools(ODD, 3, 5)
    expected = case.expected(slots, None, [True, False, False])
    tensors = {name: to_torch(array) for name, array in case.arguments.items()}
    conv, recurrent = to_torch(case.conv.copy()), to_torch(case.recurrent.copy())
    rows = {"slots": torch.tensor(slots, dtype=torch.int32), "fresh": torch.tensor([True, False, False])}
    core_out = gdn_block_tkg_slots(**tensors, conv_pool=conv, recurrent_pool=recurrent, **rows)
    for found, wanted in zip((core_out, conv, recurrent), expected, strict=True):
        assert isinstance(found, torch.Tensor) and to_numpy(found).tobytes() == wanted.tobytes()
    with pytest.raises(ValueError, match=r"slots must be .* int32, got torch.int64"):
        gdn_block_tkg_slots(**tensors, conv_pool=conv, recurrent_pool=recurrent, slots=torch.tensor(slots))
    with pytest.raises(ValueError, match="conv_pool must not share memory"):
        shared = recurrent.view(-1).view(torch.bfloat16)[: conv.numel()].view(conv.shape)
        gdn_block_tkg_slots(**tensors, conv_pool=shared, recurrent_pool=recurrent, **rows)


# ---- large pools, without their memory ----

WIDE = BlockDims(128, 1, 2, 16, 8, 2)


def test_pools_beyond_32_bits_are_refused() -> None:
    per_slot = WIDE.Hv * WIDE.K * WIDE.V
    shapes = {name: spec.shape for name, spec in slot_specs(WIDE, 1, 2**31 // per_slot).items()}
    with pytest.raises(ValueError, match=rf"^recurrent_pool must have at most 2147483647 elements, .*, {2**31}"):
        pools.check_shapes(shapes)
    shapes = {name: spec.shape for name, spec in slot_specs(WIDE, 1, 2**31 // per_slot - 1).items()}
    assert pools.check_shapes(shapes) == (1, 2**31 // per_slot - 1)


def test_the_largest_pool_is_addressed_rightly(tmp_path: Path) -> None:
    """8 GiB of states in a file with holes: only the slots that are written take up any."""
    case = Pools(WIDE, 3, 3)
    count = pools.LARGEST // (WIDE.Hv * WIDE.K * WIDE.V)
    slots = [count - 1, 0, count // 2]
    core_out, conv, recurrent = case.expected([0, 1, 2])
    large = {}
    for name, small in (("conv_pool", case.conv), ("recurrent_pool", case.recurrent)):
        shape = (count, *small.shape[1:])
        large[name] = np.memmap(tmp_path / name, dtype=np.uint8, mode="w+", shape=int(np.prod(shape)) * small.itemsize)
        large[name] = large[name].view(small.dtype).reshape(shape)
        large[name][slots] = small
    found = gdn_block_tkg_slots(**case.arguments, **large, slots=np.array(slots, np.int32))
    assert found.tobytes() == core_out.tobytes()
    assert large["conv_pool"][slots].tobytes() == conv.tobytes()
    assert large["recurrent_pool"][slots].tobytes() == recurrent.tobytes()
    assert sum((tmp_path / name).stat().st_blocks for name in large) * 512 < 1 << 20


# ---- dry launches: bytes and modelled time ----


def slot_specs(dims: BlockDims, B: int, count: int) -> dict[str, Spec]:
    specs = argument_specs(dims, B)
    conv, recurrent = specs.pop("conv_state"), specs.pop("recurrent_state")
    return {
        **specs,
        "conv_pool": Spec((count, *conv.shape[1:]), conv.dtype),
        "recurrent_pool": Spec((count, *recurrent.shape[1:]), recurrent.dtype),
    }


def dry(dims: BlockDims, slots: Rows, count: int, lnc: int) -> list[Any]:
    rows = {"read_slots": np.array(slots, np.int32), "write_slots": np.array(slots, np.int32)}
    kernel = backends.interpreted("gdn_block_tkg_slots")[lnc]
    with interpreter.strict():
        result = kernel.launch(**slot_specs(dims, len(slots), count), **rows, norm_eps=1e-6, dry=True)
    machines: list[Any] = result.machines
    return machines


def moved_bytes(machines: list[Any], pool: str) -> tuple[int, int]:
    """Bytes read from and written to a pool."""
    read = written = 0
    for machine in machines:
        for instruction in machine.trace.instructions:
            if not instruction.options.get("skipped"):
                read += sum(operand.bytes for operand in instruction.reads if operand.allocation.name == pool)
                written += sum(operand.bytes for operand in instruction.writes if operand.allocation.name == pool)
    return read, written


@pytest.mark.parametrize("lnc", [1, 2])
def test_every_named_byte_is_moved_once_and_padding_never(lnc: int) -> None:
    state, window = LARGE.Hv * LARGE.K * LARGE.V * 4, LARGE.conv_dim * LARGE.K_win * 2
    machines = dry(LARGE, [5, 0, 3], 8, lnc)
    assert moved_bytes(machines, "recurrent_pool") == (3 * state, 3 * state)
    assert moved_bytes(machines, "conv_pool") == (3 * window, 3 * window)
    assert moved_bytes(dry(LARGE, [5, -1, 3], 8, lnc), "recurrent_pool") == (2 * state, 2 * state)


@pytest.mark.parametrize(("B", "lnc"), [(1, 1), (1, 2), (8, 1), (8, 2), (32, 2)])
def test_slots_cost_little(B: int, lnc: int) -> None:
    """Modelled: the block's time and a twentieth."""
    plain = model_block(LARGE, B, lnc).modelled_us
    machines = dry(LARGE, list(range(B)), 2 * B, lnc)
    assert plain < model_machines([machines], floor_us(LARGE, B, lnc, TRN2), TRN2).modelled_us <= 1.05 * plain


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("dims", [ODD, TILE_4], ids=["odd", "tile of 4"])
def test_a_dry_launch_keeps_slots_and_records_what_a_real_one_does(dims: BlockDims, lnc: int) -> None:
    rows = {name: np.array([3, -1, 0], np.int32) for name in ("read_slots", "write_slots")}
    specs = slot_specs(dims, 3, 4)
    arrays = {name: np.zeros(spec.shape, spec.dtype) for name, spec in specs.items()}
    kernel = backends.interpreted("gdn_block_tkg_slots")[lnc]
    with interpreter.without("short-runs", "element-runs"):
        real = kernel.launch(**arrays, **rows, norm_eps=1e-6)
        dried = kernel.launch(**specs, **rows, norm_eps=1e-6, dry=True)
    assert dried.outputs == tuple(Spec(output.shape, output.dtype) for output in real.outputs)
    assert rows["read_slots"].tolist() == [3, -1, 0]
    for ours, theirs in zip(dried.machines, real.machines, strict=True):
        assert ours.trace.instructions == theirs.trace.instructions
        assert ours.lifetimes == theirs.lifetimes


def test_a_transfer_that_is_left_out_takes_no_engine() -> None:
    (named,), (padded,) = dry(TILE_4, [1, 2], 4, 1), dry(TILE_4, [1, -1], 4, 1)
    assert len(named.trace.instructions) == len(padded.trace.instructions)
    busy = [schedule(machine).busy()["dma"] for machine in (named, padded)]
    assert busy[1] < busy[0]
