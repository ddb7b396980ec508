"""The site, built once for all the tests that look at it, and a reader of its pages."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))

_HOME = tempfile.TemporaryDirectory(prefix="lab35-site-")  # removed when the tests have ended
_VOID = {"base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"}


@functools.cache
def _build() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", _HOME.name]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def site() -> Path:
    """Build the site in strict mode, once, and return its folder; a warning fails who asks."""
    done = _build()
    told = [line for line in done.stderr.splitlines() if line.startswith(("WARN", "ERR", "Abort"))]
    assert done.returncode == 0, "\n".join(["mkdocs build --strict:", *(told or [done.stderr])])
    return Path(_HOME.name)


def built(page: str) -> Path:
    """Say where a page of `docs/` lies in the built site."""
    return site() / Path(page).with_suffix(".html")


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


def pages() -> Iterator[tuple[Path, list[Element]]]:
    """Yield every built page with its elements."""
    for path in sorted(site().rglob("*.html")):
        yield path, elements(path.read_text(encoding="utf-8"))
