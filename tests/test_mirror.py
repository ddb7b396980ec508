"""The house: a subject has four rooms under one name, and imports run one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lab35"
ROOMS = {
    "chapter": "docs/{}.md",
    "module": "src/lab35/{}.py",
    "tests": "tests/test_{}.py",
    "API page": "docs/api/{}.md",
}

NO_CHAPTER = {"tokenizer", "checkpoint", "trace", "terminal"}
"""Modules that chapters use and none is about; they have the other three rooms."""
NOT_CHAPTERS = {"index", "notation"}
"""Pages beside the chapters."""

LAYERS = [
    {"model"},
    {"cache"},
    {"speed"},
    {"loop"},
    {"verification", "batching", "timing", "faults"},
]
"""Imports run from the right to the left; within a layer, and from `cli`, they are free."""
KNOW_NO_MODEL = {"sampling", "streaming", "context"}
"""Modules that work on logits, ids and text alone."""
MODEL_SIDE = set().union(*LAYERS) | {"checkpoint", "cli"}


def stems(pattern: str, prefix: str = "") -> set[str]:
    """List the names of the files that match, without prefix and suffix."""
    return {path.stem.removeprefix(prefix) for path in ROOT.glob(pattern)}


FILES = stems("src/lab35/*.py") - {"__init__", "__main__"} | {
    path.parent.name for path in PACKAGE.glob("*/__init__.py")
}
"""Each is a file, or, where it has outgrown one, a folder of the same name."""
MODULES = {name for name in FILES if not name.startswith("_")}
"""What has rooms of its own; a file with an underscore serves the others."""
CHAPTERS = stems("docs/*.md") - NOT_CHAPTERS


def sources(package: Path, module: str) -> list[Path]:
    """List the files of a module, whether it is one file or a folder."""
    return sorted({*package.glob(f"{module}.py"), *(package / module).rglob("*.py")})


def rooms(subject: str) -> set[str]:
    """Name the rooms that a subject has."""
    found = {room for room, path in ROOMS.items() if (ROOT / path.format(subject)).is_file()}
    return found | ({"module"} if sources(PACKAGE, subject) else set())


@pytest.mark.parametrize("subject", sorted(CHAPTERS | MODULES - NO_CHAPTER))
def test_a_subject_has_its_four_rooms(subject: str) -> None:
    """Guards the promise that a name finds everything about it."""
    assert set(ROOMS) == rooms(subject)


@pytest.mark.parametrize("module", sorted(NO_CHAPTER))
def test_a_module_without_a_chapter_has_the_other_rooms(module: str) -> None:
    """Guards the named exceptions: still a module, tests and an API page, and no chapter."""
    assert {"module", "tests", "API page"} == rooms(module)


def test_no_api_page_is_about_nothing() -> None:
    """Guards the way back: an API page belongs to a module."""
    assert MODULES == stems("docs/api/*.md") - {"index"}


@pytest.mark.parametrize("subject", sorted(CHAPTERS))
def test_chapter_and_api_page_link_to_each_other(subject: str) -> None:
    """Guards the doors between the rooms: `api/X.md` one way, or a name in it, and `../X.md`."""
    chapter = (ROOT / "docs" / f"{subject}.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "api" / f"{subject}.md").read_text(encoding="utf-8")

    assert f"](api/{subject}.md" in chapter or f"][lab35.{subject}" in chapter
    assert f"](../{subject}.md" in page
    assert f"::: lab35.{subject}" in page


def imports(source: str) -> set[str]:
    """Name the modules of the package that a module imports to run; types alone do not count."""
    tree = ast.parse(source)
    found = set()
    for node in _run_time(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "lab35":
            found |= {f"lab35.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name.split(".")[1] for name in found if name.startswith("lab35.")}


def _run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree, past the bodies of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _run_time(child)


def above(module: str) -> set[str]:
    """Name what a module may not import."""
    if module in KNOW_NO_MODEL:
        return MODEL_SIDE
    for level, layer in enumerate(LAYERS):
        if module in layer:
            return set().union(*LAYERS[level + 1 :]) | {"cli"}
    return {"cli"}


@pytest.mark.parametrize("module", sorted(FILES))
def test_imports_run_one_way(module: str) -> None:
    """Guards the order model, cache, loop, the rest, cli: no module needs what is built on it."""
    files = sources(PACKAGE, module)
    used = set().union(*(imports(path.read_text(encoding="utf-8")) for path in files))

    assert files
    assert set() == used & above(module) - {module}


def test_a_module_is_a_file_or_a_folder(tmp_path: Path) -> None:
    """Guards the check above: every file of a folder counts, however deep, and none beside it."""
    for name in ("speed/__init__.py", "speed/deep/down.py", "loop.py", "loops/other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    assert [tmp_path / "loop.py"] == sources(tmp_path, "loop")
    assert ["speed/__init__.py", "speed/deep/down.py"] == [
        str(path.relative_to(tmp_path)) for path in sources(tmp_path, "speed")
    ]
    assert [] == sources(tmp_path, "cache")


def test_imports_are_seen_wherever_they_stand() -> None:
    """Guards the check above: an import inside a function counts, and one for types does not."""
    source = (
        "import lab35.loop\nfrom lab35 import model\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lab35.cli import app\n"
        "def f():\n    from lab35.cache import KVCache\n"
    )

    assert {"loop", "model", "cache"} == imports(source)
    assert {"cache", "loop"} <= above("model")
    assert "model" in above("sampling")
    assert set() == above("loop") & {"model", "cache", "sampling", "checkpoint"}
