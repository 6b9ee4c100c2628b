"""The compiler's Python subset: what a kernel's source may contain, and which functions are kernel code."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gdn_kernels import backends, interpreter
from gdn_kernels.interpreter import NkiRuleError, NkiRuleWarning, subset

HEAD = """import time
from dataclasses import dataclass
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl

TABLE = [1, 2]

def noted(function):
    return function

"""
REST = """
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    nisa.dma_copy(dst=out, src=tile)
    return out
"""


def module_of(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with interpreter.installed():
        sys.modules[path.stem] = module
        try:
            spec.loader.exec_module(module)
        finally:
            del sys.modules[path.stem]
    return module


def kernel_of(tmp_path: Path, statements: str, before: str = "", signature: str = "x, n=3") -> Any:
    body = "".join(f"    {line}\n" for line in statements.splitlines())
    text = f"{HEAD}{before}\n@nki.jit\ndef kernel({signature}):\n{body}{REST}"
    return module_of(tmp_path / "someones.py", text).kernel


# Statement, and the rule that it breaks; None for what is in the subset.
STATEMENTS: dict[str, tuple[str, str | None]] = {
    "list comprehension": ("y = [i for i in range(n)]", "subset"),
    "loop that appends": ("y = []\nfor i in range(n):\n    y.append(i)", None),
    "set comprehension": ("y = {i for i in range(n)}", "subset"),
    "dict comprehension": ("y = {str(i): i for i in range(n)}", "subset"),
    "generator": ("y = sum(i for i in range(n))", "subset"),
    "lambda": ("f = lambda i: i", "subset"),
    "nested function": ("def f(i):\n    return i\ny = f(n)", None),
    "try": ("try:\n    y = 1\nexcept ValueError:\n    y = 2", "subset"),
    "with": ("with open('/dev/null') as f:\n    pass", "subset"),
    "no_reorder": ("with nl.no_reorder():\n    pass", None),
    "is None": ("y = n is None", "subset-unclear"),
    "is not None": ("if n is not None:\n    pass", "subset-unclear"),
    "== None": ("y = n == None", None),
    "global": ("global TABLE\nTABLE = [n]", "subset"),
    "a global's entry": ("TABLE[0] = n", "subset"),
    "a local list's entry": ("table = [0]\ntable[0] = n", None),
    "match": ("match n:\n    case _:\n        pass", "subset"),
    "walrus": ("if (y := n) > 1:\n    pass", "subset"),
    "raise": ("if n > 5:\n    raise ValueError(n)", "subset-unclear"),
    "assert": ("assert n < 5, f'n is {n}'", None),
    "star": ("y = [*range(n)]", "subset-unclear"),
    "list + list": ("y = [n] + [1]", None),
    "while": ("i = 0\nwhile i < n:\n    i += 1\n    if i == 2:\n        break", None),
    "for else": ("for i in range(n):\n    pass\nelse:\n    pass", "subset-unclear"),
    "dict of strings": ("y = {'a': n}\nz = y['a']", None),
    "dict of numbers": ("y = {1: n}", "subset"),
    "set": ("y = {1, n}", "subset-unclear"),
    "del": ("y = n\ndel y", "subset-unclear"),
    "local import": ("import math", "subset-unclear"),
    "local class": ("class A(nl.NKIObject):\n    pass", "subset-unclear"),
    "clock": ("y = time.time()", "purity"),
    "random": ("y = np.random.rand()", "purity"),
    "ternary": ("y = 1 if n > 2 else 2", None),
    "f-string, tuple, slice": ("y = (f'{n}', slice(0, n), min(n, 2))", None),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_each_construct_is_in_the_subset_or_named_with_its_line(name: str, tmp_path: Path) -> None:
    statements, rule = STATEMENTS[name]
    kernel, x = kernel_of(tmp_path, statements), np.ones((2, 4), np.float32)
    if rule is None:
        with interpreter.strict():
            kernel(x)
        return
    with pytest.raises(NkiRuleError) as caught, interpreter.strict():
        kernel(x)
    assert caught.value.rule.name == rule
    first = HEAD.count("\n") + 4
    last = first + statements.count("\n")
    file, _, line = caught.value.line.rpartition(":")
    assert file.endswith("someones.py") and first <= int(line) <= last
    if rule == "subset-unclear":
        with pytest.warns(NkiRuleWarning, match="subset-unclear"):
            kernel(x)


@pytest.mark.parametrize(
    ("signature", "rule"), [("x, *, n=3", "subset"), ("x, *rest", "subset-unclear"), ("x, n=3", None)]
)
def test_signatures(signature: str, rule: str | None, tmp_path: Path) -> None:
    found = subset.findings(kernel_of(tmp_path, "y = 1", signature=signature).function)
    assert [finding.rule for finding in found] == ([rule] if rule else [])


CALLED: dict[str, tuple[str, str]] = {
    "a function": ("def helper(n):\n    return n is None\n", "y = helper(n)"),
    "a function of a function": (
        "def inner(n):\n    return n is None\ndef helper(n):\n    return inner(n)\n",
        "helper(n)",
    ),
    "a method": (
        "@dataclass\nclass Plan(nl.NKIObject):\n    n: int\n    def ask(self):\n        return self.n is None\n",
        "y = Plan(n).ask()",
    ),
    "a kernel": ("@nki.jit\ndef helper(n):\n    return n is None\n", "y = helper(n)"),
    "a recursive function": ("def helper(n):\n    return n is None or helper(None)\n", "y = helper(n)"),
    "a decorated function": ("@noted\ndef helper(n):\n    return n is None\n", "y = helper(n)"),
}


@pytest.mark.parametrize("name", CALLED)
def test_what_a_kernel_calls_is_kernel_code(name: str, tmp_path: Path) -> None:
    before, statement = CALLED[name]
    found = subset.findings(kernel_of(tmp_path, statement, before).function)
    assert [finding.rule for finding in found] == ["subset-unclear"]


def test_functions_of_a_closure_are_kernel_code(tmp_path: Path) -> None:
    text = HEAD + (
        "def make():\n    def helper(n):\n        return n is None\n    @nki.jit\n    def kernel(x):\n"
        "        y = helper(x)\n        return y\n    return kernel\n"
    )
    found = subset.findings(module_of(tmp_path / "closed.py", text).make().function)
    assert [finding.construct.split()[0] for finding in found] == ["is"]


def test_other_packages_and_what_is_not_called_are_left_alone(tmp_path: Path) -> None:
    before = "def unused(n):\n    return [i for i in n]\n"
    kernel = kernel_of(tmp_path, "y = np.log2(8.0)\nz = np.zeros((2, 2)).sum()", before)
    assert subset.findings(kernel.function) == ()


def test_a_function_without_source_has_no_findings() -> None:
    scope: dict[str, Any] = {}
    exec("def kernel(x):\n    return [i for i in x]\n", scope)
    assert subset.findings(scope["kernel"]) == ()


def test_it_can_be_switched_off_and_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = kernel_of(tmp_path, "y = [i for i in range(n)]"), np.ones((2, 4), np.float32)
    with interpreter.without("subset"):
        kernel(x)
    with pytest.raises(NkiRuleError):
        kernel(x)
    monkeypatch.setattr(subset, "_findings", lambda function: pytest.fail("looked at twice"))
    with pytest.raises(NkiRuleError):
        kernel(x)


@pytest.mark.parametrize("name", ["gdn_block_tkg", "gdn_tkg", "gdn_conv1d_decode"])
def test_our_kernels_are_in_the_subset(name: str) -> None:
    kernel = backends.interpreted(name)
    code = subset._kernel_code(kernel.function)
    assert {function.__module__.rpartition(".")[2] for function in code} >= {"layout", "finite"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert subset.findings(kernel.function) == ()
