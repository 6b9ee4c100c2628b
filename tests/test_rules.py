"""Every rule: a program that obeys it narrowly and one that breaks it narrowly, and what is said about it.

CHECKLIST lists what a kernel that passes here is likely to survive on hardware, with the rules that check it.
gdn_kernels/interpreter/RULES.md shows both tables to readers and is held to them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from arguments import block_arguments, form_dtype, tkg_arguments
from small_kernels import copied, load, normal, psum, run_body, shared, stored, tile

from gdn_kernels import BlockDims, backends, interpreter
from gdn_kernels.interpreter import NkiRuleError, NkiRuleWarning, hardware
from gdn_kernels.interpreter import isa as nisa
from gdn_kernels.interpreter import language as nl
from gdn_kernels.interpreter.rules import OPTIONAL, RULES

BF16, F32 = nl.bfloat16, nl.float32


class Case(NamedTuple):
    """`obeys` and `breaks`: bodies of kernels. `cores`: to run them on. `target`: to run them for."""

    obeys: Callable[[], Any]
    breaks: Callable[[], Any]
    cores: int = 1
    target: hardware.Target = hardware.TRN2


def matmul(dst: Any, K: int, dtype: Any = F32, other: Any = None, **options: Any) -> None:
    moving = tile(K, dst.free_size, dtype=other or dtype)
    nisa.nc_matmul(dst=dst, stationary=tile(K, dst.shape[0], dtype=dtype), moving=moving, **options)


def copy(dst: Any, src: Any) -> None:
    nisa.tensor_copy(dst=dst, src=src)


def activation(op: Any, value: float, **options: Any) -> None:
    nisa.activation(dst=tile(8, 4), op=op, data=tile(8, 4, value=value), **options)


def scalar(operand: Any, **options: Any) -> None:
    nisa.tensor_scalar(dst=tile(8, 4), data=tile(8, 4), op0=nl.multiply, operand0=operand, **options)


def output(make: Callable[[], Any]) -> Callable[[], Any]:
    """A body that is run as a kernel of its own, whose result is what is looked at."""
    return lambda: interpreter.launch(make, {})


def argument(value: Any) -> Callable[[], Any]:
    return lambda: interpreter.launch(lambda value: stored(tile(2, 2)), {"value": value})


def partly(count: int) -> Any:
    out = shared(8, 4)
    nisa.dma_copy(dst=out[:, 0:count], src=tile(8, count))
    return out


def transposed_to(offset: int) -> None:
    nisa.nc_transpose(dst=psum(4, 8, dtype=BF16)[:, offset : offset + 3], data=tile(3, 4, dtype=BF16))


def runs(run_bytes: int) -> None:
    """128 partitions of 64 KiB, in runs of that many bytes."""
    source = nl.ndarray((128, 1 << 15), dtype=F32, buffer=nl.private_hbm)
    width = run_bytes // 4
    step = width * 2
    if run_bytes == 4:
        view, count = source[:, 0:1024:2], 512
    else:
        count = 32 * width
        view = source.ap(pattern=[[1 << 15, 128], [step, 32], [1, width]], offset=0)
    values = tile(128, count)
    nisa.dma_copy(dst=view, src=values)


def meeting(cores_there: tuple[int, ...]) -> None:
    data = shared(2, 4)
    if nl.program_id() in cores_there:
        nisa.core_barrier(data=data, cores=(0, 1))


def exchange(to: int) -> None:
    core = nl.program_id()
    nisa.sendrecv(src=tile(1, 4), dst=tile(1, 4), send_to_rank=1 - core, recv_from_rank=(1 - core + to) % 2, pipe_id=0)


def both_write(apart: int) -> None:
    nisa.dma_copy(dst=shared(1, 8)[:, nl.program_id() * apart : nl.program_id() * apart + 4], src=tile(1, 4))


def barrier_on(own: bool) -> None:
    data, other = shared(1, 4), shared(1, 4)
    private = nl.ndarray((1, 4), dtype=F32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=data if nl.program_id() == 0 else private, src=tile(1, 4))
    nisa.core_barrier(data=data if own else other, cores=(0, 1))
    load(data)


def differing(extra: int) -> None:
    nisa.memset(dst=tile(1, 4 + extra * nl.program_id()), value=0.0)


def placed(apart: int) -> None:
    left = nl.ndarray((8, 4), dtype=F32, buffer=nl.sbuf, address=(0, 0))
    right = nl.ndarray((8, 4), dtype=F32, buffer=nl.sbuf, address=(0, apart))
    nisa.memset(dst=left, value=0.0)
    nisa.memset(dst=right, value=0.0)
    nisa.tensor_tensor(dst=left, data1=left, data2=right, op=nl.add)


def running_sum(command: Any) -> None:
    total = tile(8, 1)
    activation(nl.square, 1.0, reduce_op=nl.add, reduce_res=total, reduce_cmd=command)


def live(bytes_a_partition: int) -> None:
    whole = tile(8, (bytes_a_partition - 16) // 4, value=None)
    nisa.memset(dst=whole[:, 0:4], value=0.0)
    copied(whole[:, 0:4])


def scalar_engine_copy(dtype: Any) -> None:
    source = tile(8, 4, dtype=dtype, value=1.0 if dtype == F32 else 1)
    nisa.tensor_copy(dst=tile(8, 4), src=source, engine=nisa.engine.scalar)


def while_register(dynamic: bool) -> None:
    if dynamic:
        for _ in nl.dynamic_range(0, 2):
            tile(8, 4)
    else:
        nl.fori_loop(0, 2, lambda i: nisa.memset(dst=tile(8, 4), value=0.0))


def tiled(first: int) -> None:
    acc, left, right = psum(64, 8), tile(64, 32), tile(64, 8)
    nisa.nc_matmul(
        dst=acc[first : first + 32, :],
        stationary=left[0:32, :],
        moving=right[0:32, :],
        tile_position=(0, 0),
        tile_size=(32, 32),
    )


CASES: dict[str, Case] = {
    "unknown-instruction": Case(lambda: nisa.tensor_copy(dst=tile(8, 4), src=tile(8, 4)), lambda: nisa.tensor_copi()),
    "not-modelled": Case(lambda: tile(8, 4), lambda: nisa.rng(dst=tile(8, 4))),
    "target": Case(lambda: matmul(psum(8, 8), 8), lambda: matmul(psum(8, 8, dtype=BF16), 8, BF16)),
    "objects-not-strings": Case(lambda: tile(8, 4, buffer=nl.sbuf), lambda: tile(8, 4, buffer="sbuf")),
    "partition-count": Case(lambda: tile(128, 4), lambda: tile(129, 4)),
    "partition-first": Case(lambda: tile(8, 4, 4).permute((0, 2, 1)), lambda: tile(8, 4, 4).permute((1, 0, 2))),
    "rank": Case(lambda: tile(4, 1), lambda: tile(4)),
    "start-partition": Case(
        lambda: [nisa.memset(dst=tile(128, 4)[s : s + n, :], value=0.0) for s, n in ((0, 65), (64, 64), (96, 32))],
        lambda: nisa.memset(dst=tile(128, 4)[32:65, :], value=0.0),
    ),
    "memory-space": Case(lambda: copied(psum_of(8, 4)), lambda: stored(psum_of(8, 4))),
    "bounds": Case(lambda: tile(8, 4)[:, 1:4], lambda: tile(8, 4)[:, 1:5]),
    "pattern": Case(
        lambda: copied(tile(8, 4).ap(pattern=[[4, 8], [1, 2]], offset=2)),
        lambda: copied(tile(8, 4).ap(pattern=[[3, 8], [1, 2]], offset=2)),
    ),
    "ap-on-view": Case(
        lambda: tile(8, 4).ap(pattern=[[4, 8], [1, 2]], offset=1),
        lambda: tile(8, 4)[:, 1:4].ap(pattern=[[4, 8], [1, 2]], offset=0),
    ),
    "operators": Case(lambda: tile(8, 4) == None, lambda: tile(8, 4) + tile(8, 4)),  # noqa: E711
    "dynamic-loop": Case(lambda: while_register(False), lambda: while_register(True)),
    "placement": Case(lambda: placed(16), lambda: placed(12)),
    "psum-bank": Case(lambda: matmul(psum(8, 520)[:, 0:512], 8), lambda: matmul(psum(8, 520)[:, 8:520], 8)),
    "capacity": Case(lambda: live(212_984), lambda: live(212_988)),
    "capacity-safe": Case(lambda: live(196_608), lambda: live(196_612)),
    "uninitialised": Case(lambda: copied(written(4)[:, 0:4]), lambda: copied(written(4)[:, 0:5])),
    "overlap": Case(
        lambda: (lambda t: copy(t[:, 2:4], t[:, 0:2]))(tile(8, 4)),
        lambda: (lambda t: copy(t[:, 1:3], t[:, 0:2]))(tile(8, 4)),
    ),
    "shape": Case(lambda: copy(tile(8, 2, 2), tile(8, 4)), lambda: copy(tile(8, 5), tile(8, 4))),
    "scalar-operand": Case(lambda: scalar(tile(8, 1)), lambda: scalar(tile(8, 1, dtype=BF16))),
    "dtype": Case(lambda: matmul(psum(8, 8), 8, BF16, nl.float16), lambda: matmul(psum(8, 8), 8, BF16, F32)),
    "operation": Case(lambda: activation(nl.exp, 1.0), lambda: activation(nl.maximum, 1.0)),
    "engine": Case(lambda: scalar(2.0, engine=nisa.engine.scalar), lambda: scalar(2.0, engine=nisa.engine.tensor)),
    "two-psum-inputs": Case(lambda: summed(psum_of(8, 4), tile(8, 4)), lambda: summed(psum_of(8, 4), psum_of(8, 4))),
    "accumulate": Case(
        lambda: (lambda acc: (matmul(acc, 8, accumulate=False), matmul(acc, 8, accumulate=True)))(psum(8, 8)),
        lambda: matmul(psum(8, 8), 8, accumulate=True),
    ),
    "activation-range": Case(lambda: activation(nl.rsqrt, 2.0**-87), lambda: activation(nl.rsqrt, 2.0**-88)),
    "output": Case(output(lambda: partly(4)), output(lambda: partly(3))),
    "argument": Case(argument((1, "a", None)), argument({1, 2})),
    "dma": Case(
        lambda: nisa.dma_copy(dst=tile(8, 4), src=tile(4, 8)), lambda: nisa.dma_copy(dst=tile(8, 4), src=tile(4, 9))
    ),
    "enum-value": Case(
        lambda: matmul(psum(8, 8), 8, perf_mode=nisa.matmul_perf_mode.none),
        lambda: matmul(psum(8, 8), 8, perf_mode="none"),
    ),
    "value-kind": Case(lambda: nisa.memset(dst=tile(8, 4), value=0.0), lambda: nisa.memset(dst=tile(8, 4), value=0)),
    "documents-disagree": Case(lambda: scalar_engine_copy(F32), lambda: scalar_engine_copy(nl.int32)),
    "registers": Case(lambda: running_sum(nisa.reduce_cmd.reset_reduce), lambda: running_sum(nisa.reduce_cmd.reduce)),
    "tile-position": Case(lambda: tiled(0), lambda: tiled(32)),
    "psum-alignment": Case(lambda: transposed_to(2), lambda: transposed_to(3)),
    "short-runs": Case(lambda: runs(512), lambda: runs(128)),
    "element-runs": Case(lambda: runs(512), lambda: runs(4)),
    "race": Case(lambda: both_write(4), lambda: both_write(3), cores=2),
    "same-bytes": Case(lambda: both_write(4), lambda: both_write(0), cores=2),
    "race-barrier": Case(lambda: barrier_on(True), lambda: barrier_on(False), cores=2),
    "deadlock": Case(lambda: meeting((0, 1)), lambda: meeting((1,)), cores=2),
    "sendrecv": Case(lambda: exchange(0), lambda: exchange(1), cores=2),
    "unequal-streams": Case(lambda: differing(0), lambda: differing(1), cores=2),
}
ELSEWHERE = {  # rule: the file of tests that has its cases
    "subset": "test_subset.py",
    "subset-unclear": "test_subset.py",
    "purity": "test_subset.py",
}


def psum_of(partitions: int, columns: int) -> Any:
    acc = psum(partitions, columns)
    matmul(acc, 8)
    return acc


def written(columns: int) -> Any:
    whole = tile(8, 8, value=None)
    nisa.memset(dst=whole[:, 0:columns], value=0.0)
    return whole


def summed(left: Any, right: Any) -> None:
    nisa.tensor_tensor(dst=tile(8, 4), data1=left, data2=right, op=nl.add)


# What to check so that a kernel which passes is likely to run on hardware: (what, rules, other tests).
CHECKLIST: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("the source is in the compiler's Python subset", ("subset", "subset-unclear", "operators", "argument"), ""),
    (
        "objects instead of strings; documented instructions and keywords only",
        ("objects-not-strings", "enum-value", "unknown-instruction", "not-modelled", "value-kind"),
        "",
    ),
    ("no clock and no random numbers", ("purity",), ""),
    ("arguments are in HBM; outputs are shared_hbm, returned once, fully written", ("output", "argument"), ""),
    (
        "at most 128 partitions, two dimensions or more, dimension 0 whole",
        ("partition-count", "rank", "partition-first"),
        "",
    ),
    ("engine operands start where their partition count allows", ("start-partition",), ""),
    ("each engine touches only the memories it reaches", ("memory-space",), ""),
    ("live tiles fit SBUF and PSUM", ("capacity", "capacity-safe", "placement"), "test_memory.py"),
    ("a matmul result stays in one PSUM bank", ("psum-bank",), ""),
    ("nothing is read before it is written, byte for byte", ("uninitialised",), "test_memory.py"),
    ("access patterns are legal and in bounds", ("pattern", "bounds", "ap-on-view"), ""),
    ("source and destination are equal or disjoint", ("overlap",), ""),
    ("operands agree in partitions and elements; (P, 1) operands are that", ("shape", "scalar-operand"), ""),
    (
        "matmul sizes, dtypes, accumulation groups, tiles",
        ("shape", "dtype", "accumulate", "tile-position"),
        "test_memory.py",
    ),
    ("transposes keep the dtype and are aligned", ("dtype", "shape", "psum-alignment"), ""),
    ("two tile operands are not both in PSUM", ("two-psum-inputs",), ""),
    ("tensor_scalar's operations by engine", ("operation", "engine"), ""),
    ("activations: known, in their valid range, sums reset first", ("operation", "activation-range", "registers"), ""),
    ("DMA: memories, counts, dtypes, run lengths", ("dma", "memory-space", "short-runs", "element-runs"), ""),
    ("shapes and masks of the other data movers", ("shape", "dtype"), ""),
    ("nothing that only another chip has", ("target", "older-target"), ""),
    ("every instruction runs on an engine that has it", ("engine", "memory-space", "documents-disagree"), ""),
    ("values are stored in their dtype, rounded to nearest even", (), "test_interpreter.py"),
    ("matmuls sum exact products; compare with tolerances", (), "test_interpreter.py"),
    ("activations are exact functions here", (), "test_interpreter.py"),
    (
        "two cores: no races, equal instructions",
        ("race", "same-bytes", "race-barrier", "unequal-streams"),
        "test_cores.py",
    ),
    ("exchanges pair up and nothing waits for ever", ("sendrecv", "deadlock"), "test_cores.py"),
    ("instructions, bytes, run lengths and peaks are reported", (), "test_check.py"),
    ("the same inputs give the same bytes", (), "test_rules.py"),
)


@pytest.mark.parametrize("name", CASES)
def test_a_program_that_obeys_narrowly_passes_with_warnings_as_errors(name: str) -> None:
    case = CASES[name]
    near = {"capacity": ("capacity-safe",), "element-runs": ()}.get(name, ())
    with interpreter.strict(), interpreter.without(*near):
        run_body(case.obeys, case.cores, target=case.target)


@pytest.mark.parametrize("name", CASES)
def test_a_program_that_breaks_narrowly_is_told_which_rule_and_where(name: str) -> None:
    case, rule = CASES[name], RULES[name]
    if rule.severity == "error":
        with pytest.raises(NkiRuleError) as error:
            run_body(case.breaks, case.cores, target=case.target)
        told: NkiRuleError | NkiRuleWarning = error.value
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_body(case.breaks, case.cores, target=case.target)
        (told,) = {warning.message.rule.name: warning.message for warning in caught}.values()  # type: ignore[union-attr]
    assert told.rule is rule
    assert rule.source in str(told) and told.detail in str(told)
    assert any(f"{file}.py:" in told.line for file in ("test_rules", "small_kernels"))


@pytest.mark.parametrize("name", [name for name in CASES if RULES[name].severity != "error"])
def test_a_warning_is_an_error_where_strict_and_nothing_where_switched_off(name: str) -> None:
    case = CASES[name]
    with interpreter.strict(), pytest.raises(NkiRuleError) as caught:
        run_body(case.breaks, case.cores, target=case.target)
    assert caught.value.rule.name == name
    with interpreter.without(name), interpreter.strict():
        run_body(case.breaks, case.cores, target=case.target)


@pytest.mark.parametrize(
    "name", ["start-partition", "uninitialised", "activation-range", "capacity", "race", "unequal-streams"]
)
def test_an_optional_error_can_be_switched_off(name: str) -> None:
    case = CASES[name]
    with interpreter.without(name, "capacity-safe"):
        run_body(case.breaks, case.cores, target=case.target)


def test_only_optional_rules_can_be_switched_off() -> None:
    with pytest.raises(ValueError, match=r"rule must be one of .*capacity.*got 'shape'"), interpreter.without("shape"):
        pass
    assert "shape" not in OPTIONAL


def test_every_rule_has_its_cases_and_its_place_in_the_checklist() -> None:
    host = {"older-target"}  # of the launch, not of a kernel
    assert set(CASES) | set(ELSEWHERE) | host == set(RULES)
    listed = {rule for _, rules, _ in CHECKLIST for rule in rules}
    assert listed | {"dynamic-loop"} == set(RULES)
    assert len(CHECKLIST) == 29
    here = Path(__file__).parent
    assert all((here / tests).exists() for _, _, tests in CHECKLIST if tests)


def test_the_documentation_lists_every_rule_and_the_checklist(root: Path) -> None:
    text = (root / "gdn_kernels/interpreter/RULES.md").read_text()
    for rule in RULES.values():
        assert f"| `{rule.name}` | {rule.severity} | {rule.text} | {rule.source} |" in text
    for number, (what, rules, _) in enumerate(CHECKLIST, 1):
        assert f"| {number} | {what} | {', '.join(f'`{rule}`' for rule in rules) or 'by tests'} |" in text


def test_an_error_says_all_it_knows() -> None:
    def kernel() -> None:
        nisa.nc_matmul(dst=psum(8, 8), stationary=tile(8, 129), moving=tile(8, 8), name="scores")

    with pytest.raises(NkiRuleError) as caught:
        run_body(kernel)
    error = caught.value
    assert (error.instruction, error.name, error.operand) == ("nc_matmul", "scores", "stationary")
    assert (error.rule.name, error.rule.source) == ("shape", "API common fields")
    assert (error.limit, error.found) == (128, 129)
    assert error.line.endswith("test_rules.py:" + error.line.rpartition(":")[2])
    assert str(error).startswith("nc_matmul 'scores' operand stationary: 129 columns, at most 128 [rule shape: ")


def test_a_slow_dma_says_what_it_costs() -> None:
    with pytest.warns(NkiRuleWarning) as caught:
        run_body(lambda: runs(4))
    (warning,) = (entry.message for entry in caught)
    assert isinstance(warning, NkiRuleWarning)
    assert warning.detail == "65536 runs of 4 bytes over 16 engines: modelled 122.9 us, 0.71 us as whole runs"
    assert (warning.limit, warning.found, warning.instruction) == (512, 4, "dma_copy")


FORMS = ("bf16", "fp32")


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gdn_block_tkg", "gdn_tkg", "gdn_conv1d_decode"])
def test_our_kernels_pass_with_warnings_as_errors(name: str, form: str, cores: int) -> None:
    for B in (1, 3):
        arguments: dict[str, Any] = {
            "gdn_block_tkg": {**block_arguments(BlockDims(256, 4, 8, 128, 128, 4), B, form), "norm_eps": 1e-6},
            "gdn_tkg": {**tkg_arguments(B, 8, 128, 128, form), "norm_eps": 1e-6},
            "gdn_conv1d_decode": {
                "x": normal(B, 300, 1, dtype=form_dtype(form)),
                "conv_state": normal(B, 300, 4, dtype=form_dtype(form)),
                "conv_weight": normal(300, 4),
            },
        }[name]
        with interpreter.strict():
            backends.interpreted(name)[cores].launch(**arguments)


def test_the_same_inputs_give_the_same_bytes() -> None:
    arguments = {**block_arguments(BlockDims(128, 2, 4, 32, 16, 4), 2), "norm_eps": 1e-6}
    kernel = backends.interpreted("gdn_block_tkg")
    results = {b"".join(out.tobytes() for out in kernel[cores](**arguments)) for cores in (1, 2, 1)}
    assert len(results) == 1
