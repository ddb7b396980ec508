"""What a result says shows on a page as it is, whatever characters it holds."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import markdown
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lab35_course.plain import Markdown, code, outcome, plain
from lab35_course.results import ROOT, Result, Table

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "a*b* _c_ **d** `e`",
    "[a](javascript:alert(1)) ![b](c) <https://d.example>",
    "$x$ and $|x|$ and \\(y\\)",
    "a | b | c",
    "x {: onclick=alert(1) } {.python}",
    "&lt;b&gt; &amp;",
    "<!-- /table --> <!-- value: a b -->",
    "# heading",
    "- item",
    "*[HTML]: nothing  [^1]",
    "#!python print()",
    "a\\*b\\",
    "two\nlines\r\nand\ttabs",
    "``",
    "~~a~~ ^b^ ==c== :d:",
]


class Seen(HTMLParser):
    """Collect the text of a page's first cell below its head, and every element in it."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.elements, self._inside = "", [], False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the element."""
        if self._inside:
            self.elements.append((tag, attrs))
        self._inside |= tag == "td"

    def handle_endtag(self, tag: str) -> None:
        """Leave the cell."""
        self._inside &= tag != "td"

    def handle_data(self, data: str) -> None:
        """Add text."""
        self.text += data if self._inside else ""


@pytest.fixture(scope="module")
def converter() -> markdown.Markdown:
    """Set Markdown up as the site does."""

    class Loader(yaml.SafeLoader):
        """Read past the tags that only MkDocs knows."""

    Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    told = yaml.load(Path(ROOT, "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    names, options = [], {}
    for entry in told["markdown_extensions"]:
        name, chosen = next(iter(entry.items())) if isinstance(entry, dict) else (entry, {})
        names.append(name)
        options[name] = chosen
    return markdown.Markdown(extensions=names, extension_configs=options)


def shown(converter: markdown.Markdown, cell: str) -> Seen:
    """Render a table of one cell, and look at what a reader gets."""
    converter.reset()
    seen = Seen()
    seen.feed(converter.convert(Table(["head"], [[cell]], "l").markdown()))
    return seen


def as_read(text: str) -> str:
    """Leave what a browser shows: white space as one space, no control characters."""
    text = " ".join(text.split())
    return re.sub(r"[\0-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", text)


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec=None), max_size=30))
@example("\u2028a\x85b\xa0c")
def test_any_text_in_a_cell_shows_as_it_is(converter: markdown.Markdown, text: str) -> None:
    """No character of a result turns into emphasis, a formula, a link or an element."""
    seen = shown(converter, text)
    assert as_read(text) == as_read(seen.text)
    assert [] == seen.elements


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_in_a_cell_shows_as_it_is(converter: markdown.Markdown, text: str) -> None:
    """The spellings that do harm where nothing is escaped."""
    seen = shown(converter, text)
    assert as_read(text) == as_read(seen.text)
    assert [] == seen.elements


@pytest.mark.parametrize("text", [*HOSTILE, "a_b * c", "x<y>", "max_new_tokens", "a|b"])
def test_hostile_text_as_code_shows_as_it_is(converter: markdown.Markdown, text: str) -> None:
    """A code span shows its text and brings no element but itself; what it cannot is plain."""
    seen = shown(converter, code(text))
    assert as_read(text) == as_read(seen.text)
    assert {tag for tag, _ in seen.elements} <= {"code"}


def test_hostile_processor_name_shows_as_it_is(converter: markdown.Markdown) -> None:
    """The small print under a table is escaped too: a processor may be called anything."""
    provenance = dict.fromkeys(("torch", "date", "engine"), "x") | {"threads": 1, "samples": 1}
    provenance["processor"] = "<img src=x onerror=alert(1)> *R*"
    line = Result("a", "measured", {}, provenance).line()
    assert "<img" not in converter.convert(line)
    assert "&lt;img src=x onerror=alert(1)&gt; &#42;R&#42;" in converter.reset().convert(line)


def test_markdown_on_purpose_stays_markdown() -> None:
    """Whoever builds Markdown says so, once; it is not escaped a second time."""
    assert "**all**" == plain(Markdown("**all**"))
    assert plain("a*b") == plain(plain("a*b"))
    assert ["12", "`ValueError`"] == [outcome("12"), outcome("ValueError")]
