"""`installed()`: a kernel file written for NKI runs as it is, on what the caller has, and leaves the caller's `nki`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gdn_kernels import interpreter
from gdn_kernels.interpreter import NkiRuleError, NkiRuleWarning

KERNELS = '''
from dataclasses import dataclass
from enum import Enum
from typing import Optional

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
from nki.isa.constants import dge_mode, matmul_perf_mode
from nki.language import NKIObject, affine_range
from nki.typing import tensor


class Mode(Enum):
    PLAIN = 0
    TWICE = 1


@dataclass
class Plan(NKIObject):
    factor: float
    dtype: nki.dtype = nl.float32


def load(x, dtype=None):
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x, dge_mode=dge_mode.none)
    return tile


@nki.jit
def scaled(x: tensor[128, 512], factor=2.0, mode=Mode.PLAIN, pair=(1, 1), bias: Optional[nl.ndarray] = None):
    tile = load(x)
    times = 2 if mode == Mode.TWICE else 1
    for i in affine_range(times * pair[0]):
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
    if bias != None:
        nisa.tensor_tensor(dst=tile, data1=tile, data2=load(bias), op=nl.add)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit()
def planned(x, plan):
    return scaled(x, factor=plan.factor)


@nki.jit(mode="torch")
def accumulate(cache, x):
    tile = load(cache)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=load(x), op=nl.add)
    nisa.dma_copy(dst=cache, src=tile)
    return cache


@nki.jit
def accumulate_and_sum(caches, x):
    accumulate(caches[0], x)
    total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=total, src=load(caches[1]))
    return total


@nki.jit
def halves(x):
    """Each core scales its half of the columns by its number plus one."""
    core, cores = nl.program_id(0), nl.num_programs(0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    size = x.shape[1] // cores
    part = nl.ds(core * size, size)
    tile = load(x[:, part])
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=core + 1.0)
    nisa.dma_copy(dst=out[:, part], src=tile)
    return out, out.shape[0] == nl.tile_size.pmax and out


@nki.jit
def both_halves(x):
    whole, _ = halves(x)
    return whole


@nki.jit
def sbuf_kib(x):
    tile = nl.full(x.shape, nl.tile_size.sbuf_fmax_bytes // 1024, dtype=nl.int32)
    out = nl.ndarray(x.shape, dtype=nl.int32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def undecorated(x):
    return scaled(x)


@nki.jit
def reduced(x):
    ncc.all_reduce(srcs=[x], dsts=[x], replica_group=None, op=nl.add)
    return x
'''


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    path = tmp_path_factory.mktemp("kernels") / "their_kernels.py"
    path.write_text(KERNELS)
    with interpreter.installed():
        yield load(path)
    sys.modules.pop(path.stem)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


X = np.arange(48, dtype=np.float32).reshape(6, 8)


@pytest.fixture(params=["numpy", "torch"])
def kind(request: pytest.FixtureRequest) -> Any:
    """A function from an array to what a caller has, over the same memory."""
    if request.param == "numpy":
        return lambda array: array
    return pytest.importorskip("torch").from_numpy


def test_arrays_and_tensors_go_in_and_the_same_kind_comes_out(kernels: ModuleType, kind: Any) -> None:
    out = kernels.scaled(kind(X.copy()), 3.0)
    assert type(out) is type(kind(X)) and np.array_equal(np.asarray(out), 3 * X)
    assert np.array_equal(np.asarray(kernels.scaled(kind(X.copy()), bias=kind(X.copy()))), 3 * X)


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bfloat16", "bfloat16"), ("float8_e5m2", "float8_e5m2")])
def test_torch_dtypes_that_numpy_lacks(kernels: ModuleType, dtype: str, torch_dtype: str) -> None:
    torch = pytest.importorskip("torch")
    values = torch.from_numpy(X).to(getattr(torch, torch_dtype))
    out = kernels.scaled(values, 0.5)
    expected = (X.astype(getattr(ml_dtypes, dtype)).astype(np.float32) * 0.5).astype(getattr(ml_dtypes, dtype))
    assert out.dtype is values.dtype and np.array_equal(out.float().numpy(), expected.astype(np.float32))


def test_a_torch_dtype_of_another_target_is_refused(kernels: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(NkiRuleError, match="rule target"):
        kernels.scaled(torch.zeros(6, 8).to(torch.float8_e4m3fn))


def test_arguments_that_are_no_tensors(kernels: ModuleType) -> None:
    assert np.array_equal(kernels.scaled(X.copy(), mode=kernels.Mode.TWICE, pair=[2, 1]), 16 * X)
    assert np.array_equal(kernels.planned(X.copy(), kernels.Plan(5.0)), 5 * X)


def test_a_kernel_is_simulated_on_one_core_and_on_two(kernels: ModuleType) -> None:
    import nki

    one = nki.simulate(kernels.both_halves)(X.copy())
    two = nki.simulate(kernels.both_halves[2])(X.copy())
    assert np.array_equal(one, X) and np.array_equal(two, X * np.repeat([1, 2], 4))
    assert np.array_equal(kernels.both_halves[2](X.copy()), two)
    assert np.array_equal(nki.simulate(kernels.undecorated)(X.copy()), 2 * X)
    assert np.array_equal(nki.jit(kernels.undecorated)(X.copy()), 2 * X)
    assert np.array_equal(kernels.scaled.with_schedule([("second", "first")])(X.copy()), 2 * X)


@pytest.mark.parametrize("grid", [0, 3, (2,), (2, 1), "2"])
def test_a_grid_is_one_or_two(kernels: ModuleType, grid: Any) -> None:
    with pytest.raises(NkiRuleError, match="rule argument"):
        kernels.halves[grid]


def test_an_argument_that_the_kernel_writes_is_changed_and_may_be_returned(kernels: ModuleType, kind: Any) -> None:
    cache = X.copy()
    returned = kernels.accumulate(kind(cache), kind(X.copy()))
    assert np.array_equal(cache, 2 * X) and np.shares_memory(np.asarray(returned), cache)


def test_a_view_with_gaps_is_changed_too_and_nothing_around_it(kernels: ModuleType, kind: Any) -> None:
    around = np.full((6, 16), -1, np.float32)
    around[:, ::2] = X
    kernels.accumulate(kind(around)[:, ::2], kind(X.copy()))
    assert np.array_equal(around[:, ::2], 2 * X) and (around[:, 1::2] == -1).all()


def test_a_read_only_argument_stays_as_it_is(kernels: ModuleType) -> None:
    cache = X.copy()
    cache.flags.writeable = False
    assert np.array_equal(kernels.accumulate(cache, X.copy()), 2 * X)
    assert np.array_equal(cache, X)


def test_tensors_in_a_tuple(kernels: ModuleType) -> None:
    first, second = X.copy(), 10 * X
    assert np.array_equal(kernels.accumulate_and_sum([first, second], X.copy()), 10 * X)
    assert np.array_equal(first, 2 * X)


@pytest.mark.parametrize(
    ("value", "kib"), [(None, 224), ("trn2", 224), ("gen3", 224), ("trn3", 256), ("gen4", 256), ("trn1", 224)]
)
def test_the_environment_names_the_target(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, value: str | None, kib: int
) -> None:
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    if value is not None:
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", value)
    if value == "trn1":
        with pytest.warns(NkiRuleWarning, match="older-target"):
            assert (kernels.sbuf_kib(X.copy()) == kib).all()
    else:
        assert (kernels.sbuf_kib(X.copy()) == kib).all()


def test_an_unknown_target_is_refused(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn9")
    with pytest.raises(NkiRuleError, match="trn9"):
        kernels.sbuf_kib(X.copy())


def test_calls_that_do_not_fit_the_signature(kernels: ModuleType) -> None:
    import nki

    for arguments, keywords in (((), {}), ((X,), {"factr": 2.0}), ((X, 2.0), {"factor": 2.0})):
        with pytest.raises(NkiRuleError, match="rule argument"):
            kernels.scaled(*arguments, **keywords)
    with pytest.raises(NkiRuleError, match="rule argument"):
        kernels.scaled(X.copy(), factor={"a": 1})
    with pytest.raises(NkiRuleError, match="platform_target"):
        nki.jit(platform_target="trn2")


def test_a_returned_value_that_is_no_tensor_is_refused(kernels: ModuleType) -> None:
    with pytest.raises(NkiRuleError, match="rule output"):
        kernels.halves(X.copy())


def test_collectives_are_known_and_refused_when_called(kernels: ModuleType) -> None:
    with pytest.raises(NkiRuleError, match="rule not-modelled") as caught:
        kernels.reduced(X.copy())
    assert caught.value.instruction == "collectives.all_reduce"


def test_what_nki_does_not_have_cannot_be_imported() -> None:
    with interpreter.installed():
        with pytest.raises(ModuleNotFoundError):
            import nki.benchmarks  # noqa: F401
        with pytest.raises(ImportError, match="par_dim"):
            from nki.language import par_dim  # noqa: F401


def test_modules_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, their_isa = ModuleType("nki"), ModuleType("nki.isa")
    monkeypatch.setitem(sys.modules, "nki", theirs)
    monkeypatch.setitem(sys.modules, "nki.isa", their_isa)
    for absent in ("nki.language", "nki.typing"):
        monkeypatch.delitem(sys.modules, absent, raising=False)
    with pytest.raises(RuntimeError, match="inside"), interpreter.installed():
        ours = importlib.import_module("nki")
        assert ours is not theirs and ours.isa is sys.modules["nki.isa"] is not their_isa
        with interpreter.installed():
            assert importlib.import_module("nki.typing").tensor[128, 512]
        assert sys.modules["nki"] is ours
        raise RuntimeError("inside")
    assert sys.modules["nki"] is theirs and sys.modules["nki.isa"] is their_isa
    assert "nki.language" not in sys.modules and "nki.typing" not in sys.modules


def test_kernels_keep_working_outside(kernels: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "kept_kernels.py"
    path.write_text(KERNELS)
    with interpreter.installed():
        kept = load(path)
    sys.modules.pop(path.stem)
    assert np.array_equal(kept.both_halves[2](X.copy()), kernels.both_halves[2](X.copy()))
