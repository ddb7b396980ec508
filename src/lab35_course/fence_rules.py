"""What the code of a fence may not do: import what a reader may not have, or hide its own checks.

The rules look at the syntax tree, at any depth. What only running can tell is told by running:
each assertion reports that it was reached and whether it held, so that one in a branch that is
never taken, or swallowed by an `except`, fails the fence.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

__all__ = ["REPORT", "assertions", "compiled", "refusals"]

REPORT = "__asserted__"
"""The name under which an assertion reports its line and its outcome."""

_INSTALLED = {"lab35", "torch"}
_ALSO = {
    "docs/about/numbers.md": {"lab35_course"},
    "docs/speed.md": {"numpy"},
    "src/lab35_course/": {"lab35_course"},
    "scripts/": {"lab35_course"},
}
# Modules and names that import by a string, or say which program runs.
_BY_STRING = {"builtins", "imp", "importlib", "pkgutil", "runpy"}
_NAMES = {
    **dict.fromkeys(("__import__", "compile", "eval", "exec"), "hides code from the checks"),
    **dict.fromkeys(("exit", "quit"), "ends the run"),
    **dict.fromkeys(
        ("__builtins__", "__debug__", "__file__", "__name__", "__spec__", "TYPE_CHECKING"),
        "can switch code off where the tests run it",
    ),
}
_PURE = {function.__name__: function for function in (all, any, bool, len, sum)}
_EQUAL = re.compile(r"equal$|^eq$|close$")
_BROAD = {"AssertionError", "BaseException", "Exception"}
_ALWAYS = (ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Constant, ast.JoinedStr, ast.Lambda)


def refusals(code: str, path: Path) -> Iterator[tuple[int, str]]:
    """Say what in a fence's code breaks the rules.

    Args:
        code: The content of the fence. What does not parse is left to the run, which tells it.
        path: The source that holds it; some pages may import more than others.

    Yields:
        The line within the code, from 1, and what is wrong there.
    """
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    allowed = _INSTALLED | set(sys.stdlib_module_names) - _BY_STRING
    for part, names in _ALSO.items():
        if f"/{part}" in path.absolute().as_posix():
            allowed |= names
    for node in ast.walk(tree):
        for reason in _refused(node, allowed):
            yield getattr(node, "lineno", 1), reason


def _refused(node: ast.AST, allowed: set[str]) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (
                _not_allowed(name.name) for name in names if _root(name.name) not in allowed
            )
        case ast.ImportFrom(module=module, level=level):
            if level or _root(module or "") not in allowed:
                yield _not_allowed("." * level + (module or ""))
            for name in node.names:
                if name.name in _NAMES:
                    yield f"{name.name} {_NAMES[name.name]}"
        case ast.Name(id=name) | ast.Attribute(attr="TYPE_CHECKING" as name) if name in _NAMES:
            yield f"{name} {_NAMES[name]}"
        case ast.Attribute(value=ast.Name(id="sys"), attr="modules"):
            yield "sys.modules goes round the rule for imports"
        case ast.Assert(test=test) if _is_constant(test):
            yield "this assertion cannot fail"
        case ast.Expr(value=ast.Call() as call) if _with_itself(call):
            yield "this comparison with itself cannot fail"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if _never(test):
            yield "this branch is never taken"
        case ast.ExceptHandler(type=kind) if kind is None or _BROAD & _names(kind):
            yield "this `except` would swallow a failed assertion; name the error that is expected"
        case ast.Call(func=function, args=args) if _last(function) == "suppress":
            if any(_BROAD & _names(argument) for argument in args):
                yield "this would swallow a failed assertion; name the error that is expected"


def _root(module: str) -> str:
    return module.partition(".")[0]


def _not_allowed(module: str) -> str:
    return f"{module} is not to be imported here: lab35, torch and the standard library are"


def _is_constant(test: ast.expr) -> bool:
    match test:
        case ast.BoolOp(op=ast.Or(), values=values):
            told = {ast.dump(value) for value in values}
            return any(
                _is_constant(value)
                or (isinstance(value, ast.UnaryOp) and ast.dump(value.operand) in told)
                for value in values
            )
        case ast.BoolOp(values=values):
            return any(_is_constant(value) for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _is_constant(operand)
        case ast.Compare(ops=[ast.GtE()], comparators=[ast.Constant(value=0)]) if (
            _last(getattr(test.left, "func", test)) == "len"
        ):
            return True
    return isinstance(test, _ALWAYS) or _holds(test) or any(map(_with_itself, ast.walk(test)))


def _holds(test: ast.expr) -> bool:
    """Say whether nothing but literals and a few functions stands there, and it is true."""
    allowed = (ast.expr, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
    for node in ast.walk(test):
        named = isinstance(node, ast.Name) and node.id not in _PURE
        huge = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift | ast.Mult)
        if named or huge or not isinstance(node, allowed) or isinstance(node, ast.Attribute):
            return False
    try:
        return bool(eval(compile(ast.Expression(test), "", "eval"), {"__builtins__": _PURE}))
    except Exception:  # it fails when it runs, and says why
        return False


def _with_itself(node: ast.AST) -> bool:
    """Say whether something is compared with itself, by an operator or by a function's name."""
    match node:
        case ast.Compare(left=left, comparators=right):
            pairs = itertools.pairwise((left, *right))
        case ast.Call(func=function, args=[one, other, *_]) if _EQUAL.search(_last(function)):
            pairs = [(one, other)]
        case ast.Call(func=ast.Attribute(value=one, attr=name), args=[other]) if _EQUAL.search(
            name
        ):
            pairs = [(one, other)]
        case _:
            return False
    return any(ast.dump(one) == ast.dump(other) and not _is_run(one) for one, other in pairs)


def _is_run(side: ast.expr) -> bool:
    """Say whether this calls a function: what it returns may differ from one call to the next."""
    return isinstance(side, ast.Call) and isinstance(side.func, ast.Name)


def _never(test: ast.expr) -> bool:
    try:
        return not ast.literal_eval(test)
    except ValueError:
        return False


def _names(expression: ast.expr) -> set[str]:
    return {_last(node) for node in ast.walk(expression)}


def _last(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


# --- Compiling -----------------------------------------------------------------------------------


class _Reporting(ast.NodeTransformer):
    """Turn `assert x` into `assert REPORT(line, x)`."""

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        report = ast.Call(
            ast.Name(REPORT, ast.Load()), [ast.Constant(node.lineno), node.test], keywords=[]
        )
        node.test = ast.copy_location(report, node.test)
        return node


def assertions(source: str) -> list[int]:
    """List the lines of the assertions in some code."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]


def compiled(source: str, filename: str) -> CodeType:
    """Compile code whose assertions report, and stay in whatever Python's `-O` says.

    Args:
        source: The code.
        filename: What tracebacks name.

    Returns:
        The code object.

    Raises:
        SyntaxError: If it does not compile, or only with a warning.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", SyntaxWarning)
        compile(source, filename, "exec", dont_inherit=True)  # as written: the warnings
        tree = _Reporting().visit(ast.parse(source, filename))
        return compile(
            ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True, optimize=0
        )
