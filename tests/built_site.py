"""The site, built once for all the tests that look at it, and a reader of its pages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))

_VOID = {"base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"}


@dataclass
class Element:
    """An HTML element with the text directly in it."""

    tag: str
    attributes: dict[str, str]
    parents: tuple[Element, ...] = field(repr=False)
    text: str = ""

    @property
    def classes(self) -> set[str]:
        """The names in its class attribute."""
        return set(self.attributes.get("class", "").split())

    def inside(self, *names: str) -> bool:
        """Say whether an element around this one has one of the tags or classes."""
        return any(parent.tag in names or parent.classes & set(names) for parent in self.parents)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        element = Element(tag, attributes, tuple(self._open))
        self.elements.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        while any(element.tag == tag for element in self._open) and self._open.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1].text += data


def elements(html: str) -> list[Element]:
    """List the elements of a page, in order."""
    reader = _Reader()
    reader.feed(html)
    return reader.elements


class Site:
    """The built site: its folder, and its pages as elements, each of which is read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, list[Element]] = {}

    def built(self, page: str) -> Path:
        """Say where a page of `docs/` lies in the built site."""
        return self.folder / Path(page).with_suffix(".html")

    def elements(self, page: str) -> list[Element]:
        """List the elements of a page of `docs/` as it was built."""
        return self._elements(self.built(page))

    def pages(self) -> Iterator[tuple[Path, list[Element]]]:
        """Yield every built page with its elements."""
        for path in sorted(self.folder.rglob("*.html")):
            yield path, self._elements(path)

    def _elements(self, path: Path) -> list[Element]:
        if path not in self._read:
            self._read[path] = elements(path.read_text(encoding="utf-8"))
        return self._read[path]


def build(folder: Path, **settings: str) -> str:
    """Build the site in strict mode, and return what was wrong; nothing is the empty string.

    Args:
        folder: Where it is built.
        settings: Variables of the environment to set.
    """
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "SITE_URL": ""} | settings
    for command in (
        ["-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        ["scripts/notebooks.py", str(folder / "notebooks")],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            lines = done.stderr.splitlines()
            told = [line for line in lines if line.startswith(("WARN", "ERR", "Abort"))]
            return "\n".join(told or [done.stderr])
    return ""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Site:
    """The site, built once for all workers; a warning of the build fails each test that asks.

    LAB35_SITE names a folder with a site that something else built from the same sources.
    """
    if "LAB35_SITE" in os.environ:
        return Site(Path(os.environ["LAB35_SITE"]))
    home = tmp_path_factory.getbasetemp()
    if worker_id != "master":  # the folder of a worker lies in that of the run
        home = home.parent
    folder, told = home / "site", home / "site-problems.txt"
    with FileLock(home / "site.lock"):
        if not told.is_file():
            told.write_text(build(folder), encoding="utf-8")
    assert told.read_text(encoding="utf-8") == "", "mkdocs build --strict"
    return Site(folder)
