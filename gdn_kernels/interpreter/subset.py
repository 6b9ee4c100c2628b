"""The compiler's Python subset: what a kernel's source may be made of.

The NKI compiler up to 0.6 reads a kernel's source instead of running it, and knows a part of Python. A construct that
the migration guide rules out, or that no document mentions and no kernel of the vendor's library contains, is an error;
one that the library does contain is a warning.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from gdn_kernels.interpreter.rules import PACKAGE, report

_NO = "subset"
_UNPROVEN = "subset-unclear"

# By AST node: the rule it breaks, and what to call it.
_CONSTRUCTS: dict[type[ast.AST], tuple[str, str]] = {
    ast.ListComp: (_NO, "a list comprehension"),
    ast.SetComp: (_NO, "a set comprehension"),
    ast.DictComp: (_NO, "a dict comprehension"),
    ast.GeneratorExp: (_NO, "a generator expression"),
    ast.Lambda: (_NO, "a lambda"),
    ast.Try: (_NO, "try"),
    ast.TryStar: (_NO, "try"),
    ast.Yield: (_NO, "yield"),
    ast.YieldFrom: (_NO, "yield"),
    ast.Await: (_NO, "await"),
    ast.AsyncFunctionDef: (_NO, "an async function"),
    ast.AsyncFor: (_NO, "async for"),
    ast.AsyncWith: (_NO, "async with"),
    ast.Global: (_NO, "global (a kernel has no state of its own)"),
    ast.Nonlocal: (_NO, "nonlocal (a kernel has no state of its own)"),
    ast.Match: (_NO, "match"),
    ast.NamedExpr: (_NO, "an assignment expression"),
    ast.Delete: (_UNPROVEN, "del"),
    ast.Set: (_UNPROVEN, "a set"),
    ast.Raise: (_UNPROVEN, "raise (assert is documented)"),
    ast.Starred: (_UNPROVEN, "an unpacking *"),
    ast.ClassDef: (_UNPROVEN, "a class inside a function"),
    ast.Import: (_UNPROVEN, "an import inside a function"),
    ast.ImportFrom: (_UNPROVEN, "an import inside a function"),
}
# Modules whose values differ from run to run, so that a cached compilation goes stale (API jit).
_IMPURE = ("time", "datetime", "random", "secrets", "uuid", "numpy.random")


class Finding(NamedTuple):
    rule: str
    construct: str
    line: str


def check_subset(function: Callable[..., Any]) -> None:
    """Report what a kernel, and every function of its own package that it calls, has outside the subset."""
    for finding in findings(function):
        report(finding.rule, f"the kernel contains {finding.construct}", line=finding.line)


_looked_at: WeakKeyDictionary[Callable[..., Any], tuple[Finding, ...]] = WeakKeyDictionary()


def findings(function: Callable[..., Any]) -> tuple[Finding, ...]:
    """All of them, the kernel's own first, in the order of the source. Functions without source have none."""
    if function not in _looked_at:
        _looked_at[function] = tuple(_findings(function))
    return _looked_at[function]


def _findings(function: Callable[..., Any]) -> Iterator[Finding]:
    for called in _kernel_code(function):
        definition = _definition(called.__code__)
        if definition is not None:
            for rule, construct, line in sorted(_of_function(definition, called), key=lambda entry: entry[2]):
                yield Finding(rule, construct, f"{called.__code__.co_filename}:{line}")


@lru_cache(maxsize=1024)
def _definition(code: CodeType) -> ast.FunctionDef | None:
    """The source of a function with the line numbers of its file; None for a lambda, or where there is no source."""
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    ast.increment_lineno(tree, first - 1)
    return tree.body[0] if isinstance(tree.body[0], ast.FunctionDef) else None


def _code(definition: ast.FunctionDef) -> Iterator[ast.AST]:
    """Every node of a function's body and defaults. Its decorators and annotations are Python's business."""
    for part in (*definition.body, *definition.args.defaults):
        yield from ast.walk(part)


def _of_function(definition: ast.FunctionDef, function: FunctionType) -> Iterator[tuple[str, str, int]]:
    """(rule, construct, line) of one function."""
    arguments = definition.args
    if arguments.kwonlyargs:
        yield _NO, "a keyword-only *", definition.lineno
    if arguments.vararg or arguments.kwarg:
        yield _UNPROVEN, "*args or **keywords", definition.lineno
    for node in _code(definition):
        yield from _of_node(node, function)


def _of_node(node: ast.AST, function: FunctionType) -> Iterator[tuple[str, str, int]]:
    line = getattr(node, "lineno", 0)
    if type(node) in _CONSTRUCTS:
        rule, construct = _CONSTRUCTS[type(node)]
        yield rule, construct, line
    elif isinstance(node, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
        yield _UNPROVEN, "is or is not (== and != are documented, for None too)", line
    elif isinstance(node, ast.With) and not all(_is_no_reorder(item.context_expr) for item in node.items):
        yield _NO, "with, other than nl.no_reorder()", line
    elif isinstance(node, (ast.For, ast.While)) and node.orelse:
        yield _UNPROVEN, "else of a loop", line
    elif isinstance(node, ast.Dict) and any(_not_a_string(key) for key in node.keys):
        yield _NO, "a dict key that is not a string", line
    elif isinstance(node, ast.FunctionDef) and node.args.kwonlyargs:
        yield _NO, "a keyword-only *", line
    elif isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Subscript) and _is_global(target.value, function):
                yield _NO, f"a change of the global {ast.unparse(target.value)}", line
    elif isinstance(node, (ast.Name, ast.Attribute)):
        module = _resolve(node, function)
        name = (
            getattr(module, "__name__", None) if isinstance(module, ModuleType) else getattr(module, "__module__", None)
        )
        if name in _IMPURE:
            yield "purity", f"{ast.unparse(node)}, whose value differs from run to run", line


def _is_no_reorder(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "no_reorder"


def _not_a_string(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and not isinstance(key.value, str)


def _is_global(node: ast.expr, function: FunctionType) -> bool:
    if not isinstance(node, ast.Name) or node.id in function.__code__.co_varnames:
        return False
    return isinstance(function.__globals__.get(node.id), (list, dict))


# ---- which functions are kernel code ----


def _kernel_code(kernel: Callable[..., Any]) -> list[FunctionType]:
    """The kernel and what it calls, directly or not, of the packages that it comes from."""
    first = _function_of(kernel)
    if first is None:
        return []
    package = _package(first)
    found, ahead = {first: None}, [first]
    while ahead:
        function = ahead.pop()
        for value in _mentioned(function):
            for called in _functions_of(value):
                if called not in found and _package(called) == package and not _is_interpreters(called):
                    found[called] = None
                    ahead.append(called)
    return list(found)


def _function_of(value: Any) -> FunctionType | None:
    """The Python function behind a function, a method, a partial or something decorated."""
    for _ in range(10):
        if isinstance(value, FunctionType) and not hasattr(value, "__wrapped__"):
            return value
        value = getattr(value, "__wrapped__", None) or getattr(value, "__func__", None) or getattr(value, "func", None)
    return None


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """The function that a value is, or the methods of the class that it is."""
    members = vars(value).values() if isinstance(value, type) else (value,)
    for member in members:
        if not isinstance(member, ModuleType):
            function = _function_of(member)
            if function is not None and function.__code__.co_filename.endswith(".py"):  # not what @dataclass writes
                yield function


def _package(function: FunctionType) -> str:
    """What a function comes from: its top-level package, or its file when it is in none."""
    module = function.__module__ or ""
    return module.partition(".")[0] if "." in module else function.__code__.co_filename


def _is_interpreters(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith(PACKAGE)


def _mentioned(function: FunctionType) -> Iterator[Any]:
    """Every value that a name or a dotted name in a function stands for, as far as that is known before it runs."""
    definition = _definition(function.__code__)
    for node in _code(definition) if definition is not None else ():
        if isinstance(node, (ast.Name, ast.Attribute)):
            value = _resolve(node, function)
            if value is not None:
                yield value


def _resolve(node: ast.expr, function: FunctionType) -> Any:
    """What a name, or an attribute of a module or class, stands for; None where that isn't known."""
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, function)
        return getattr(owner, node.attr, None) if isinstance(owner, (ModuleType, type)) else None
    if not isinstance(node, ast.Name) or node.id in function.__code__.co_varnames:
        return None
    closed = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if node.id in closed:
        try:
            return closed[node.id].cell_contents
        except ValueError:
            return None
    return function.__globals__.get(node.id)
