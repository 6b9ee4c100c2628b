"""Where a model meets the block, public projects have gone wrong in six ways. Each has a test on a state that is not
symmetric, and a fault put in on purpose that the test must see. Three of them are here, K != V:

- heads mapped tiled, h % Hk, in place of h // gqa (with K = V: test_block; in a rank's part: test_parallel);
- A_log rounded to bf16 (read from a checkpoint or a module: test_weights);
- rows of a batch that leak into one another (in a prefill: test_prefill).

The other three: a transposed state with K = V (test_block, test_state; tokens in a model: test_hf), a conv state one
column too wide (test_state), a reused row or slot that was not cleared (test_state, test_slots).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from arguments import Arguments, block_arguments, check_block

from gdn_kernels import BlockDims, gdn_block_tkg, reference
from gdn_kernels.dtypes import bfloat16, to_fp32

DIMS = BlockDims(H=128, Hk=3, Hv=9, K=48, V=24, K_win=4)
PER_ROW = ("hidden", "conv_state", "recurrent_state")


def check(given: Arguments, computed_from: Arguments) -> None:
    """The results for `computed_from` pass for those of `given`."""
    check_block(given, gdn_block_tkg(**computed_from))


@pytest.mark.parametrize("form", ["bf16", "fp32"])
def test_value_heads_read_runs_of_key_heads(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = block_arguments(DIMS, 2, form)
    check_block(arguments, reference.gdn_block_tkg(**arguments))
    check(arguments, arguments)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "expand_heads", lambda x, gqa: np.tile(x, (1, gqa, 1)))
        tiled = reference.gdn_block_tkg(**arguments)
    with pytest.raises(AssertionError):
        check_block(arguments, tiled)


@pytest.mark.parametrize("form", ["bf16", "fp32"])
def test_A_log_keeps_its_fp32_digits(form: str) -> None:
    arguments = block_arguments(DIMS, 2, form)
    check(arguments, arguments)
    rounded = {**arguments, "A_log": to_fp32(arguments["A_log"].astype(bfloat16()))}
    with pytest.raises(AssertionError):
        check(arguments, rounded)
    with pytest.raises(ValueError, match="A_log must be float32, got bfloat16"):
        check(arguments, {**arguments, "A_log": arguments["A_log"].astype(bfloat16())})


LEAKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the next row": lambda x: np.roll(x, 1, axis=0),
    "the first row for all": lambda x: np.repeat(x[:1], len(x), axis=0),
    "a little of the next row": lambda x: (to_fp32(x) + 0.01 * to_fp32(np.roll(x, 1, axis=0))).astype(x.dtype),
}


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("name", PER_ROW)
def test_rows_keep_to_themselves(name: str, leak: str) -> None:
    arguments = block_arguments(DIMS, 3)
    check(arguments, arguments)
    with pytest.raises(AssertionError):
        check(arguments, {**arguments, name: LEAKS[leak](arguments[name])})


@pytest.mark.parametrize("name", PER_ROW)
def test_a_row_of_huge_values_disturbs_no_other(name: str) -> None:
    arguments = block_arguments(DIMS, 3)
    spoiled = arguments[name].copy()
    spoiled[1] = 2.0**40
    before, after = gdn_block_tkg(**arguments), gdn_block_tkg(**{**arguments, name: spoiled})
    assert any(x[1].tobytes() != y[1].tobytes() for x, y in zip(before, after, strict=True))
    for x, y in zip(before, after, strict=True):
        assert x[[0, 2]].tobytes() == y[[0, 2]].tobytes()
