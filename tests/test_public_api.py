"""The public names: each is on its API page, and its docstring says what a caller must know."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent

import griffe
import pytest
from built_site import Site

import lab35

PACKAGE = Path(lab35.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("[!_]*.py"))
SHAPE = re.compile(r"\bshape \(", re.IGNORECASE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def load(package: Path) -> griffe.Module:
    """Read a package without running it."""
    return griffe.load(
        package.name,
        search_paths=[package.parent],
        docstring_parser="google",
        docstring_options={"warnings": False},
    )


@cache
def public(package: Path = PACKAGE) -> dict[str, griffe.Object]:
    """Find what `__all__` of each module names, and the public members of its classes."""
    found: dict[str, griffe.Object] = {}
    for module in load(package).modules.values():
        for name in module.exports or ():
            thing = module[str(name)]
            found[f"{module.path}.{name}"] = thing.final_target if thing.is_alias else thing
    for path, thing in list(found.items()):
        if thing.is_class:
            for name, member in thing.members.items():
                if not name.startswith("_") and (member.is_function or "property" in member.labels):
                    found[f"{path}.{name}"] = member
    return found


def section(thing: griffe.Object, kind: str) -> list:
    """Take the entries of one section of a docstring; none where it has no such section."""
    parsed = thing.docstring.parsed if thing.docstring else []
    return [entry for part in parsed if part.kind.value == kind for entry in part.value]


def says(thing: griffe.Object) -> dict[str, str]:
    """Map each documented parameter, attribute and result to its description."""
    entries = section(thing, "parameters") + section(thing, "attributes")
    described = {entry.name: entry.description for entry in entries}
    results = section(thing, "returns") + section(thing, "yields")
    if results:
        described["return"] = " ".join(entry.description for entry in results)
    elif "property" in thing.labels:
        described["return"] = thing.docstring.value if thing.docstring else ""
    return described


def signature(thing: griffe.Object) -> dict[str, str]:
    """Map each parameter and the result of a function, class or property to its annotation."""
    annotations: dict[str, str] = {}
    if thing.is_class:
        init = thing.members.get("__init__") or thing.all_members.get("__init__")
        if init is None or init.is_alias:
            return annotations
        annotations = {p.name: str(p.annotation or "") for p in init.parameters}
    elif thing.is_function:
        annotations = {p.name: str(p.annotation or "") for p in thing.parameters}
        annotations["return"] = str(thing.returns or "None")
    elif "property" in thing.labels:
        annotations["return"] = str(thing.annotation or "")
    return {n: a for n, a in annotations.items() if n not in ("self", "cls")}


# --- What raises ---------------------------------------------------------------------------------


@cache
def functions(package: Path = PACKAGE) -> dict[str, Function]:
    """Find every function and method of the package, by dotted path."""
    found: dict[str, Function] = {}

    def visit(body: list[ast.stmt], path: str) -> None:
        for node in body:
            if isinstance(node, Function):
                found[f"{path}.{node.name}"] = node
            elif isinstance(node, ast.ClassDef):
                visit(node.body, f"{path}.{node.name}")

    for file in package.rglob("*.py"):  # a subject may be a folder
        path = ".".join(file.relative_to(package.parent).with_suffix("").parts)
        visit(ast.parse(file.read_text(encoding="utf-8")).body, path)
    return found


def callees(path: str, package: Path) -> Iterator[str]:
    """Name what a function calls in the package: `f(…)`, `self.f(…)`, `Class(…)`, `cls(…)`."""
    parent = path.rpartition(".")[0]
    for node in ast.walk(functions(package)[path]):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "cls":
            yield f"{parent}.__init__"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            for known in functions(package):
                owner, _, name = known.rpartition(".")
                is_constructor = name in ("__init__", "__post_init__")
                if (owner.rpartition(".")[2] if is_constructor else name) == node.func.id:
                    yield known
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("self.", "cls.")):
            yield f"{parent}.{ast.unparse(node.func).partition('.')[2]}"


def raises(path: str, package: Path = PACKAGE, seen: frozenset[str] = frozenset()) -> bool:
    """Say whether a function raises, in its own body or in what it calls within the package."""
    if path in seen or path not in functions(package):
        return False
    body = list(ast.walk(functions(package)[path]))
    exits = (isinstance(node, ast.Call) and ast.unparse(node.func) == "sys.exit" for node in body)
    return (
        any(isinstance(node, ast.Raise) for node in body)
        or any(exits)
        or any(raises(called, package, seen | {path}) for called in callees(path, package))
    )


def is_stub(path: str, package: Path) -> bool:
    """Say whether a method is a docstring alone: a promise that others keep."""
    function = functions(package).get(path)
    return function is not None and len(function.body) == 1


# --- The checks ----------------------------------------------------------------------------------


def complaints(path: str, package: Path = PACKAGE) -> list[str]:
    """List what the docstring of a public name fails to say."""
    thing = public(package)[path]
    if thing.docstring is None:
        return ["has no docstring"]
    found = []
    annotations, described = signature(thing), says(thing)
    for name, annotation in annotations.items():
        if name == "return" and annotation.startswith(("None", "NoReturn")):
            continue
        if not described.get(name):
            found.append(f"does not describe {name!r}")
        elif "Tensor" in annotation and not SHAPE.search(described[name]):
            found.append(f"does not give the shape of {name!r}")
    for name in described.keys() - annotations.keys() - {"return"}:
        if thing.is_function:
            found.append(f"describes {name!r}, which is no parameter")

    own = thing.canonical_path
    bodies = [f"{own}.__init__", f"{own}.__post_init__"] if thing.is_class else [own]
    does_raise = any(raises(body, package) for body in bodies)
    documented = bool(section(thing, "raises"))
    if does_raise and not documented:
        found.append("raises, and has no Raises section")
    if documented and not does_raise and not is_stub(own, package):
        found.append("has a Raises section, and nothing in it raises")
    return found


@pytest.mark.parametrize("path", public())
def test_a_public_name_says_what_a_caller_must_know(path: str) -> None:
    """Guards the docstrings: parameters, results, shapes of tensors, and errors iff there are."""
    assert [] == complaints(path)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_on_its_api_page(module: str, site: Site) -> None:
    """Guards the API pages: what `__all__` names, and the methods of its classes, has an anchor."""
    expected = {path for path in public() if path.startswith(f"lab35.{module}.")}
    found = site.elements(f"api/{module}.md")
    ids = {element.attributes.get("id") for element in found}

    assert set() == expected - ids


@pytest.mark.parametrize("module", MODULES)
def test_all_names_what_a_module_defines(module: str) -> None:
    """Guards against a public function that nobody listed: public by its name, or in `__all__`."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, Function | ast.ClassDef)}
    loaded = importlib.import_module(f"lab35.{module}")

    assert all(hasattr(loaded, name) for name in loaded.__all__)
    assert UNLISTED.get(module, set()) == {n for n in defined if n[0] != "_"} - {*loaded.__all__}


UNLISTED = {
    "model": {"Attention", "Block"},  # parts of GPT, named as its weights are
    "cli": {
        "bench",
        "generate",
        "repl",
        "verify",
        "trace",
        "info",
    },  # commands, reached through `app`
}


def test_the_index_lists_what_the_package_exports(site: Site) -> None:
    """Guards `from lab35 import …`: each name stands on the API's first page, with its link."""
    found = site.elements("api/index.md")
    links = [e.attributes["href"] for e in found if "autorefs" in e.classes]
    listed = {link.rpartition(".")[2] for link in links}

    assert set(lab35.__all__) == listed
    assert all(hasattr(lab35, name) for name in lab35.__all__)


GOOD = '''
def double(x: Tensor, times: int = 1) -> Tensor:
    """Double a tensor.

    Args:
        x: Any numbers, shape (B, T).
        times: How often.

    Returns:
        The same, shape (B, T).

    Raises:
        ValueError: If `times` is negative.
    """
    _check(times)
    return x * 2**times


def _check(times: int) -> None:
    if times < 0:
        raise ValueError
'''


def without(*lines: str) -> Callable[[str], str]:
    """Return an edit that deletes lines, which must be there."""

    def edit(source: str) -> str:
        for line in lines:
            assert f"{line}\n" in source
            source = source.replace(f"{line}\n", "")
        return source

    return edit


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda source: source, None),
        (lambda source: re.sub('""".*?"""', "", source, flags=re.DOTALL), "no docstring"),
        (without("        times: How often."), "does not describe 'times'"),
        (without("    Returns:", "        The same, shape (B, T)."), "does not describe 'return'"),
        (lambda source: source.replace("numbers, shape (B, T)", "numbers"), "shape of 'x'"),
        (without("    _check(times)"), "nothing in it raises"),
        (
            without("    Raises:", "        ValueError: If `times` is negative."),
            "raises, and has no Raises",
        ),
        (lambda source: source.replace("times: How", "time: How"), "'time', which is no parameter"),
    ],
)
def test_an_incomplete_docstring_is_found(
    edit: Callable[[str], str], complaint: str | None, tmp_path: Path
) -> None:
    """Guards the check itself: each thing that a docstring may lack, taken from a good one."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    source = '__all__ = ["double"]\n\nfrom torch import Tensor\n' + edit(dedent(GOOD))
    (package / "module.py").write_text(source, encoding="utf-8")

    found = complaints("package.module.double", package)
    assert [] == found if complaint is None else any(complaint in text for text in found)
