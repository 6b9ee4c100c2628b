"""The interpreter's foundations: views, memory, rounding, and a matmul whose elements don't depend on the tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from gdn_kernels import backends, interpreter
from gdn_kernels.interpreter import NkiRuleError, NkiRuleWarning
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl

BF16 = np.dtype(ml_dtypes.bfloat16)


def run(kernel: Callable[..., Any], **arguments: Any) -> Any:
    result = interpreter.launch(kernel, arguments)
    return result.outputs[0] if result.single else result.outputs


def to_sbuf(x: Any) -> Any:
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    return tile


def to_hbm(tile: Any) -> Any:
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def multiply(stationary: Any, moving: Any) -> Any:
    left, right = to_sbuf(stationary), to_sbuf(moving)
    acc = nl.ndarray((left.shape[1], right.shape[1]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=acc, stationary=left, moving=right)
    out = nl.ndarray(acc.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=out, src=acc)
    return to_hbm(out)


@settings(max_examples=30)
@given(
    K=st.sampled_from([1, 7, 64, 128]),
    M=st.integers(1, 128),
    N=st.integers(1, 512),
    dtype=st.sampled_from([BF16, np.dtype(np.float32)]),
    seed=st.integers(0, 99),
)
def test_a_matmul_element_depends_on_its_row_and_column_alone(K: int, M: int, N: int, dtype: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    left, right = rng.standard_normal((K, M)).astype(dtype), rng.standard_normal((K, N)).astype(dtype)
    whole = run(multiply, stationary=left, moving=right)
    m, n = rng.integers(M), rng.integers(N)
    alone = run(multiply, stationary=left[:, m : m + 1].copy(), moving=right[:, n : n + 1].copy())
    assert alone.tobytes() == whole[m : m + 1, n : n + 1].tobytes()
    exact = left.astype(np.longdouble).T @ right.astype(np.longdouble)
    assert np.all(np.abs(whole - exact) <= np.spacing(np.abs(exact).astype(np.float32)) * 0.500001)


VALUES = npst.arrays(
    np.float32,
    npst.array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
)


@given(x=VALUES)
def test_a_copy_to_bf16_rounds_as_ml_dtypes_does(x: np.ndarray) -> None:
    def kernel(x: Any) -> Any:
        tile = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(dst=tile, src=to_sbuf(x))
        return to_hbm(tile)

    with np.errstate(all="ignore"):
        expected = x.astype(BF16)
    assert run(kernel, x=x).tobytes() == expected.tobytes()


@given(data=st.data())
def test_views_are_numpys(data: st.DataObject) -> None:
    x = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)
    a, b = sorted(data.draw(st.tuples(st.integers(0, 5), st.integers(1, 6))))
    step = data.draw(st.integers(1, 3))
    first, count = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))

    def kernel(x: Any) -> Any:
        tile = to_sbuf(x)
        cut = tile[:, a : max(b, a + 1), ::step]
        out = nl.ndarray(cut.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=out, src=cut)
        pattern = nl.ndarray((4, count, 3), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=pattern, src=tile.ap(pattern=[[48, 4], [8, count], [0, 3]], offset=first))
        turned = nl.ndarray((4, 8, 6), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=turned, src=tile.permute((0, 2, 1)))
        return to_hbm(out), to_hbm(pattern), to_hbm(turned)

    cut, pattern, turned = run(kernel, x=x)
    assert np.array_equal(cut, x[:, a : max(b, a + 1), ::step])
    expected = np.lib.stride_tricks.as_strided(x.reshape(-1)[first:], (4, count, 3), (192, 32, 0))
    assert np.array_equal(pattern, expected)
    assert np.array_equal(turned, x.transpose(0, 2, 1))


def tile(*shape: int, dtype: Any = nl.float32, buffer: Any = nl.sbuf, value: float | None = 1.0) -> Any:
    made = nl.ndarray(shape, dtype=dtype, buffer=buffer)
    if value is not None:
        nisa.memset(dst=made, value=value)
    return made


def bank_overflow() -> None:
    nisa.nc_matmul(dst=tile(8, 520, buffer=nl.psum, value=None)[:, 8:], stationary=tile(8, 8), moving=tile(8, 512))


def accumulate_on_memset() -> None:
    nisa.nc_matmul(dst=tile(8, 8, buffer=nl.psum), stationary=tile(8, 8), moving=tile(8, 8), accumulate=True)


def accumulate_after_read() -> None:
    acc = tile(8, 8, buffer=nl.psum, value=None)
    nisa.nc_matmul(dst=acc, stationary=tile(8, 8), moving=tile(8, 8), accumulate=False)
    nisa.tensor_copy(dst=tile(8, 8), src=acc)
    nisa.nc_matmul(dst=acc, stationary=tile(8, 8), moving=tile(8, 8), accumulate=True)


def partly_written() -> None:
    acc = tile(8, 8, value=None)
    nisa.memset(dst=acc[:, :7], value=0.0)
    nisa.tensor_copy(dst=tile(8, 8), src=acc)


FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "unwritten lane": ("uninitialised", partly_written),
    "129 partitions": ("partition-count", lambda: tile(129, 4)),
    "one dimension": ("rank", lambda: tile(4)),
    "start partition": ("start-partition", lambda: nisa.memset(dst=tile(64, 4)[5:9, :], value=0.0)),
    "40 partitions from 32": ("start-partition", lambda: nisa.memset(dst=tile(128, 4)[32:72, :], value=0.0)),
    "slice off by one": ("bounds", lambda: tile(8, 4)[:, 1:5]),
    "index": ("bounds", lambda: tile(8, 4, 4)[:, 4]),
    "pattern out of bounds": ("bounds", lambda: nisa.memset(tile(8, 4).ap(pattern=[[4, 8], [1, 4]], offset=1), 0.0)),
    "partition stride": ("pattern", lambda: tile(8, 4).ap(pattern=[[8, 4], [1, 4]], offset=0)),
    "moved partition": ("partition-first", lambda: tile(8, 4, 4).permute((1, 0, 2))),
    "stepped partition": ("partition-first", lambda: tile(8, 4)[::2, :]),
    "bank": ("psum-bank", bank_overflow),
    "accumulate on memset": ("accumulate", accumulate_on_memset),
    "accumulate after a read": ("accumulate", accumulate_after_read),
    "dma to psum": ("memory-space", lambda: nisa.dma_copy(dst=tile(8, 8, buffer=nl.psum), src=tile(8, 8))),
    "gpsimd to psum": (
        "memory-space",
        lambda: nisa.tensor_copy(dst=tile(8, 8, buffer=nl.psum), src=tile(8, 8), engine=nisa.engine.gpsimd),
    ),
    "mixed dtypes": (
        "dtype",
        lambda: nisa.nc_matmul(
            dst=tile(8, 8, buffer=nl.psum, value=None), stationary=tile(8, 8, dtype=nl.bfloat16), moving=tile(8, 8)
        ),
    ),
    "element counts": ("shape", lambda: nisa.tensor_copy(dst=tile(8, 5), src=tile(8, 4))),
    "overlap": ("overlap", lambda: (lambda t: nisa.tensor_copy(dst=t[:, 1:], src=t[:, :3]))(tile(8, 4))),
    "bf16 scalar": (
        "scalar-operand",
        lambda: nisa.tensor_scalar(dst=tile(8, 4), data=tile(8, 4), op0=nl.add, operand0=tile(8, 1, dtype=nl.bfloat16)),
    ),
    "rsqrt of 0": (
        "activation-range",
        lambda: nisa.activation(dst=tile(8, 4), op=nl.rsqrt, data=tile(8, 4, value=0.0)),
    ),
    "unknown keyword": ("unknown-instruction", lambda: nisa.tensor_copy(dst=tile(8, 4), src=tile(8, 4), mask=None)),
    "unknown instruction": ("unknown-instruction", lambda: nisa.tensor_copi(dst=tile(8, 4))),
    "buffer as a string": ("objects-not-strings", lambda: nl.ndarray((8, 4), dtype=nl.float32, buffer="sbuf")),
    "both in psum": (
        "two-psum-inputs",
        lambda: nisa.tensor_tensor(
            dst=tile(8, 4), data1=tile(8, 4, buffer=nl.psum), data2=tile(8, 4, buffer=nl.psum), op=nl.add
        ),
    ),
    "too much sbuf": ("capacity", lambda: [nisa.tensor_copy(dst=tile(8, 30000), src=tile(8, 30000))]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_rule_is_named_with_its_line(name: str) -> None:
    rule, fault = FAULTS[name]

    def kernel() -> Any:
        fault()
        return to_hbm(tile(8, 4))

    with pytest.raises(NkiRuleError) as caught:
        run(kernel)
    assert caught.value.rule.name == rule
    assert rule == "capacity" or "test_interpreter.py:" in str(caught.value)


def test_an_output_that_is_partly_written_is_refused() -> None:
    def kernel() -> Any:
        out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out[:, :3], src=tile(8, 3))
        return out

    with pytest.raises(NkiRuleError, match=r"never written at \(0, 3\)"):
        run(kernel)


def test_an_unaligned_16_bit_transpose_is_warned_about() -> None:
    def kernel() -> Any:
        turned = nl.ndarray((4, 2, 3), dtype=nl.bfloat16, buffer=nl.psum)
        nisa.nc_transpose(dst=turned[:, 1, :], data=tile(3, 4, dtype=nl.bfloat16))
        return to_hbm(tile(8, 4))

    with pytest.warns(NkiRuleWarning, match="psum-alignment"):
        run(kernel)


@pytest.fixture
def kernel_text(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "someones_kernel.py").write_text(
        "import nki\nimport nki.isa as nisa\nimport nki.language as nl\n\n"
        "@nki.jit\ndef double(x):\n"
        "    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)\n"
        "    nisa.dma_copy(dst=tile, src=x)\n"
        "    nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)\n"
        "    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)\n"
        "    nisa.dma_copy(dst=out, src=tile)\n"
        "    return out\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield


def test_a_kernel_file_imports_nki_inside_installed_only(kernel_text: None) -> None:
    with interpreter.installed():
        import nki  # type: ignore[import-not-found]
        from someones_kernel import double  # type: ignore[import-not-found]

        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        assert np.array_equal(nki.simulate(double)(x), 2 * x)
    assert np.array_equal(double(x), 2 * x)
    assert "nki" not in __import__("sys").modules


def test_the_interpreted_kernels_leave_no_modules_behind() -> None:
    import sys

    assert backends.interpreted("gdn_tkg") is backends.interpreted("gdn_tkg")
    assert not [name for name in sys.modules if name.startswith("gdn_kernels.kernels")]
