"""The kernels that the vendor published profiles of: they compute what they should, and take about as long."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from small_kernels import normal

from gdn_kernels.interpreter import NkiRuleError, Spec, launch, without
from gdn_kernels.timeline.costs import NEURONCORE_V2, TRN2
from gdn_kernels.timeline.published import mamba, matmul, table, transfers
from gdn_kernels.timeline.published.table import Row, as_markdown, as_text, mamba_arguments, profile
from gdn_kernels.timeline.schedule import schedule

SMALL_BLOCKS = {"rows": 2, "columns": 1, "depth": 2}
PRODUCTS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "2": (matmul.version_2, {}),
    "3": (matmul.version_3, {}),
    "4": (matmul.version_4, {"rows": 2, "columns": 1}),
    "5": (matmul.version_5, SMALL_BLOCKS),
}
SCANS = (mamba.version_1, mamba.version_2, mamba.version_2_shared, mamba.version_3, mamba.version_3_shared)


def dry_and_real(kernel: Callable[..., Any], arrays: dict[str, np.ndarray], **options: int) -> np.ndarray:
    """The result of a launch whose trace is that of a dry one."""
    real = launch(kernel, {**arrays, **options})
    specs = {name: Spec(array.shape, array.dtype) for name, array in arrays.items()}
    dry = launch(kernel, {**specs, **options}, dry=True)
    assert dry.outputs == tuple(Spec(output.shape, output.dtype) for output in real.outputs)
    ours, theirs = (result.machines[0] for result in (dry, real))
    assert ours.trace.instructions == theirs.trace.instructions
    assert ours.lifetimes == theirs.lifetimes
    output: np.ndarray = real.outputs[0]
    return output


@pytest.mark.parametrize("version", PRODUCTS)
def test_matmul_multiplies(version: str) -> None:
    kernel, options = PRODUCTS[version]
    lhsT, rhs = normal(768 if version == "2" else 512, 256), normal(768 if version == "2" else 512, 1024, seed=1)
    result = dry_and_real(kernel, {"lhsT": lhsT, "rhs": rhs}, **options)
    np.testing.assert_allclose(result, lhsT.astype(np.float64).T @ rhs, rtol=1e-5, atol=1e-4)


def scanned(delta: np.ndarray, u: np.ndarray, A: np.ndarray, B: np.ndarray, C: np.ndarray) -> np.ndarray:
    """The layer step by step, in float64."""
    h = np.zeros(A.shape)
    result = np.empty(delta.shape)
    for t in range(delta.shape[2]):
        steps = delta[0, :, t, None].astype(np.float64)
        h = np.exp(steps * A) * h + steps * u[0, :, t, None] * B[0, None, :, t]
        result[0, :, t] = (h * C[0, None, :, t]).sum(axis=1)
    return result


@pytest.mark.parametrize("version", SCANS, ids=lambda version: version.__name__)
def test_mamba_scans(version: Callable[..., Any]) -> None:
    specs = mamba_arguments(256, 1024, 3)
    arrays = {name: normal(*spec.shape, seed=seed) for seed, (name, spec) in enumerate(specs.items())}
    arrays["delta"], arrays["A"] = np.abs(arrays["delta"]) / 10, -np.abs(arrays["A"])
    result = dry_and_real(version, arrays)
    np.testing.assert_allclose(result, scanned(**arrays), rtol=1e-4, atol=1e-4)


def test_a_transfer_arrives() -> None:
    x = normal(128, 128).astype(ml_dtypes.bfloat16)
    assert np.array_equal(dry_and_real(transfers.there_and_back, {"x": x}), x)


def rows_by_name(rows: Any) -> dict[tuple[str, str], Row]:
    found = list(rows)
    return {(row.kernel, row.quantity): row for row in found}


@pytest.fixture(scope="module")
def products() -> dict[tuple[str, str], Row]:
    """Of versions 2 to 4 a quarter of the result's rows, each of which takes as long; all of version 5."""
    with table.no_collection():
        return rows_by_name([*table.matmul_2(4), *table.matmul_3(4), *table.matmul_4(4), *table.matmul_5()])


@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_totals_of_the_matrix_multiply_are_within_5_percent(products: dict[tuple[str, str], Row], version: int) -> None:
    assert abs(products[f"matmul {version}", "total"].difference) < 0.05


@pytest.mark.parametrize("version", [3, 4, 5])
def test_tensor_active_times_are_within_3_percent(products: dict[tuple[str, str], Row], version: int) -> None:
    assert abs(products[f"matmul {version}", "Tensor active"].difference) < 0.03


def test_version_2_hides_stationary_loads_that_the_device_does_not(products: dict[tuple[str, str], Row]) -> None:
    row = products["matmul 2", "Tensor active"]
    assert "stationary" in row.note
    missing = (row.published - row.predicted) * 1e6 / 32_768  # ns a product
    load = 4 * 128 / TRN2.clocks["tensor"]
    landing = TRN2.tensor_latency / TRN2.clocks["tensor"]
    assert 0 < missing < load - landing + 10


def test_vector_active_time_is_within_5_percent(products: dict[tuple[str, str], Row]) -> None:
    assert abs(products["matmul 5", "Vector active"].difference) < 0.05


@pytest.mark.parametrize("version", [2, 3])
def test_dma_times_that_the_source_explains_are_within_1_percent(
    products: dict[tuple[str, str], Row], version: int
) -> None:
    assert abs(products[f"matmul {version}", table.DMA].difference) < 0.01


def test_transfers_are_within_5_percent() -> None:
    rows = list(table.transfer_rows())
    assert len(rows) == 2
    assert all(abs(row.difference) < 0.05 for row in rows)


def test_kernels_that_do_not_fit_need_more_memory_to_be_laid_out() -> None:
    arguments = {"lhsT": Spec((8192, 256), table.F32), "rhs": Spec((8192, 1024), table.F32)}
    with pytest.raises(NkiRuleError, match="capacity"):
        launch(matmul.version_4, arguments, dry=True)
    with without("capacity", "capacity-safe"):
        machine = launch(matmul.version_4, arguments, dry=True).machines[0]
    with pytest.raises(NkiRuleError, match="capacity"):
        schedule(machine)
    assert schedule(machine, sbuf_bytes=table.MORE_SBUF).total > 0


def test_ratios_between_the_versions_of_mamba() -> None:
    """What section 2 is evidence for: hoisted products explain the published step from version 1 to 2, and long
    sequences in tiles cost what short ones do."""

    def total(version: Callable[..., Any], channels: int, length: int) -> float:
        return profile(version, mamba_arguments(channels, length, 16), NEURONCORE_V2).total

    first, second, shared = (total(v, 1024, 512) for v in (mamba.version_1, mamba.version_2, mamba.version_2_shared))
    assert first == pytest.approx(second, rel=0.02)
    vector = 2.34 * 0.9216 / (1.61 * 0.9963)  # published Vector time of version 1 above that of version 2
    assert first / shared == pytest.approx(vector, rel=0.05)
    assert 4 * shared / 1e6 == pytest.approx(1.61, rel=0.05)
    assert 32 * total(mamba.version_3_shared, 128, 8192) / 1e6 == pytest.approx(27.8, rel=0.05)


ROWS = [
    Row("matmul 5", "Vector active", "ms", 2.99, 3.05),
    Row("transfer", "transfer", "ns", 1416.0, 1476.0, "why"),
    Row("mamba 1", "Vector active", "%", 92.16, 99.9, "why"),
    Row("mamba 2", "total", "ms", 0.17293, 0.1326, "another"),
]


def test_the_table_as_text_says_whose_figure_is_whose() -> None:
    text = as_text(ROWS)
    assert "(vendor)" in text and "(modelled)" in text
    assert [line.split()[-1] for line in text.splitlines()[2:6]] == ["+2.0%", "[1]", "[1]", "[2]"]
    assert "[1] why" in text and "[2] another" in text
    assert "1,416 ns" in text and "0.173 ms" in text and "92.2 %" in text


def test_the_table_as_markdown() -> None:
    lines = as_markdown(ROWS).splitlines()
    assert len(lines) == len(ROWS) + 2
    assert {line.count("|") for line in lines} == {7}
    assert lines[2] == "| matmul 5 | Vector active | 2.99 ms | 3.05 ms | +2.0% |  |"
    assert "vendor" in lines[0] and "modelled" in lines[0]
