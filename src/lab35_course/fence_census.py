"""Hold what the site shows as code against what the tests read.

The scanner follows lines; this reader renders the page with the site's own extensions, and looks
at the HTML. Whatever it is nested in and however it is spelled, a block of code that the one sees
and the other does not is an error: indented code, raw HTML, a fence that the site takes for prose.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from lab35_course.fences import Fence, FenceError, scan
from lab35_course.results import ROOT

__all__ = ["check_page", "problems"]

_RAW = {"a", "foreignobject", "iframe", "script", "style"}
# What Markdown, the extensions and the course's few elements by hand are made of, with attributes.
# Whatever acts, fetches, hides or restyles is not among it, however it is spelled.
_PLAIN = {
    "a",
    "abbr",
    "article",
    "aside",
    "b",
    "blockquote",
    "br",
    "caption",
    "code",
    "col",
    "colgroup",
    "dd",
    "del",
    "details",
    "div",
    "dl",
    "dt",
    "em",
    "figcaption",
    "figure",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "hr",
    "i",
    "img",
    "input",
    "ins",
    "label",
    "li",
    "mark",
    "math",
    "ol",
    "p",
    "pre",
    "q",
    "section",
    "small",
    "span",
    "strong",
    "sub",
    "summary",
    "sup",
    "svg",
    "table",
    "tbody",
    "td",
    "tfoot",
    "th",
    "thead",
    "tr",
    "ul",
}
_ATTRIBUTES = {
    None: {"class", "id", "title"},
    "a": {"href", "rel"},
    "details": {"open"},
    "div": {"data-continues"},  # of fences
    "img": {"alt", "height", "src", "width"},
    "input": {"checked", "name", "type"},  # of tabs
    "label": {"for"},
    "li": {"value"},
    "math": {"display"},
    "ol": {"start"},
    "td": {"colspan", "rowspan", "style"},
    "th": {"colspan", "rowspan", "scope", "style"},
}
_ADDRESS = re.compile(r"(?!//)(?:https?://|mailto:|(?![\w+.-]*:))[^\0-\x1f]*")
_ALIGNED = re.compile(r"text-align: (?:left|center|right);?")


def _acts(tag: str, given: dict[str, str]) -> bool:
    """Say whether an element may do more than show text, a picture of the site or a link."""
    known = _ATTRIBUTES[None] | _ATTRIBUTES.get(tag, set())
    addresses = [given[name].strip() for name in ("href", "src") if name in given]
    return (
        tag not in _PLAIN
        or not known >= {name for name in given if not name.startswith("data-tabs")}
        or not all(map(_ADDRESS.fullmatch, addresses))
        or not _ALIGNED.fullmatch(given.get("style", "text-align: left"))
        or (tag == "input" and given.get("type") not in ("radio", "checkbox"))
    )


def check_page(path: Path) -> None:
    """Check one page, rendered as the site renders it.

    Args:
        path: A Markdown file.

    Raises:
        FenceError: If it shows code that is no fence, a fence that is no code, another language or
            text than the fence has, or a list whose numbers are not those of the source.
    """
    text = path.read_text(encoding="utf-8")
    for problem in problems(text, path):
        raise FenceError(path, *problem)


def problems(text: str, path: Path) -> Iterator[tuple[int | None, str]]:
    """Say what differs between a page's source and what the site makes of it.

    Args:
        text: The page.
        path: Where it comes from.

    Yields:
        A line, where one is known, and what is wrong.
    """
    reader = _Reader()
    reader.feed(_render(text))
    fences = scan(text, path)
    shown = Counter((block.language, block.text.strip("\n")) for block in reader.blocks)
    for fence in fences:
        key = (fence.language, fence.code.strip("\n"))
        if not shown[key]:
            yield fence.line, "the site does not show this fence as a block of its code"
        shown[key] -= 1
    for (language, code), count in shown.items():
        if count > 0:
            what = f"the site shows code that is no fence ({language or 'no language'}): {code!r}"
            yield None, f"{what}; write it as a fence, with its indentation a multiple of four"
    for odd in reader.odd:
        yield (
            None,
            f"the site shows {odd}; code belongs into fences, and a page does nothing by itself",
        )
    numbers = list(_numbers(text, fences))
    if numbers != reader.numbers:
        what = f"numbered {numbers} in the source, {reader.numbers} on the site"
        yield None, f"{what}; what continues an item is indented by four spaces"


def _numbers(text: str, fences: list[Fence]) -> Iterator[int]:
    lines = text.split("\n")
    for fence in fences:
        lines[fence.line - 1 : fence.end] = [""] * (fence.end - fence.line + 1)
    prose = re.sub(r"(?s)<!--.*?-->", "", "\n".join(lines))
    for item in re.finditer(r"^[ \t>]*(\d+)\.[ \t]", prose, re.MULTILINE):
        yield int(item[1])


@functools.cache
def _extensions() -> tuple[list[str], dict[str, dict]]:
    from mkdocs.config import load_config  # here: a run of the tests alone does without it

    config = load_config(str(ROOT / "mkdocs.yml"))
    return config["markdown_extensions"], config["mdx_configs"]


def _render(text: str) -> str:
    from markdown import Markdown

    extensions, configs = _extensions()
    return Markdown(extensions=extensions, extension_configs=configs).convert(text)


class _Block:
    def __init__(self, language: str) -> None:
        self.language = language
        self.text = ""


class _Reader(HTMLParser):
    """Collect the blocks of code, the numbers of list items, and code in other clothes."""

    _VOID = frozenset({"br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"})

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[_Block] = []
        self.odd: list[str] = []
        self.numbers: list[int] = []
        self._open: list[tuple[str, set[str]]] = []
        self._lists: list[int] = []
        self._code: str | None = None  # the text of an inline `code` element

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        classes = set(given.get("class", "").split())
        in_block = self._inside("pre")
        if tag == "pre" and not in_block:
            around = set().union(*(names for _, names in self._open)) | classes
            names = [n.removeprefix("language-") for n in around if n.startswith("language-")]
            self.blocks.append(_Block(names[0] if len(names) == 1 else ""))
        elif self._inside("math") or self._inside("svg") or tag == "svg":
            # Made by the extensions, which check it; by hand, it could hold anything.
            if tag in _RAW or any(name.startswith("on") for name in given):
                self.odd.append(f"<{tag}> in a drawing or a formula")
        elif _acts(tag, given):
            self.odd.append(f"<{tag} {given}>".replace(" {}", ""))
        elif tag == "code" and not in_block:
            if classes:
                self.odd.append(f"inline code with the classes {sorted(classes)}")
            self._code = ""
        elif tag == "br" and self._code is not None:
            self._code += "\n"
        elif tag in ("ol", "ul"):
            self._lists.append(int(given.get("start", 1)) if tag == "ol" else -1)
        elif tag == "li" and self._lists and self._lists[-1] >= 0:
            if not any("footnote" in names for _, names in self._open):
                self.numbers.append(self._lists[-1])
            self._lists[-1] += 1
        if tag not in self._VOID:
            self._open.append((tag, classes))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._VOID:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("ol", "ul") and self._lists:
            self._lists.pop()
        if tag == "code" and self._code is not None:
            if "\n" in self._code:
                self.odd.append(f"inline code on several lines: {self._code!r}")
            self._code = None
        while self._inside(tag) and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._inside("pre"):
            self.blocks[-1].text += data
        elif self._code is not None:
            self._code += data

    def _inside(self, tag: str) -> bool:
        return any(name == tag for name, _ in self._open)
