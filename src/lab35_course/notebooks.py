"""Turn a chapter into a notebook: its prose as Markdown cells, its Python fences as code cells.

A notebook holds what the page holds, in its order: the outputs that the tests compare are stored in
it, figures are part of it, folded answers are folded. What Jupyter has no form for becomes what is
nearest: a note is a quotation, a tab a bold title, a link to another page is absolute where the
address of the site is known, and text where it is not.
"""

from __future__ import annotations

import ast
import base64
import mimetypes
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lab35_course.fences import Example, Fence, examples, scan

__all__ = ["NOT_CHAPTERS", "chapters", "notebook", "written"]

NOT_CHAPTERS = frozenset({"index", "notation"})
"""Pages beside the chapters."""

_PAPER = "background:#fdfcf9;color:#25221e"  # ink that follows the page would vanish on a dark one

_CONTAINER = re.compile(
    r'(?P<kind>!!!|\?\?\?\+?|===\+?!?) *(?P<class>[\w -]*?) *(?:"(?P<title>.*)")?'
)
_HEADING = re.compile(r"(?m)^(?=#{1,6} )")
# A comment is dropped; code and formulas are kept as they are, whatever they look like.
_OPAQUE = re.compile(
    r"(?P<comment><!--.*?-->)|(?<!`)(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)"
    r"|(?<![\\$])\$\$?[^$]+\$\$?",
    re.DOTALL,
)
_PICTURE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<source>[^)\s]+)\)")
_CAPTION = re.compile(r"<figcaption>(.*?)</figcaption>", re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]*)\]\((?P<target>[^)\s]+)\)")
_ATTRIBUTES = re.compile(r"(?<=[\])*_>\x00])\{:?[ \t]*[.#][^}\n]*\}|(?m:^\{:[^}\n]*\}$)")
_TAG = re.compile(r"</?(?P<name>[a-zA-Z][\w-]*)(?:\s[^<>]*)?/?>")
_TAGS = {"b", "br", "code", "em", "i", "kbd", "small", "strong", "sub", "sup"}


def chapters(docs: Path) -> list[Path]:
    """List the pages of which notebooks are made, by name."""
    return sorted(page for page in docs.glob("*.md") if page.stem not in NOT_CHAPTERS)


def written(book: NotebookNode) -> str:
    """Write a notebook as the text of its file: the same bytes for the same page."""
    return nbformat.writes(book, version=4) + "\n"


def notebook(page: Path, site_url: str = "") -> NotebookNode:
    """Make the notebook of a chapter.

    Args:
        page: The chapter's Markdown file.
        site_url: The address of the site, if it is known; links to other pages begin with it.

    Returns:
        A notebook of format 4.5 that no cell of which was run.

    Raises:
        FenceError: If a fence of the page is malformed.
        FileNotFoundError: If a picture is missing.
    """
    text = page.read_text(encoding="utf-8")
    writer = _Writer(page, site_url)
    python = {example.fence: example for example in examples(page, text)}
    outputs = {example.output for example in python.values()}
    fences = {fence.line: fence for fence in scan(text, page)}
    lines, row = text.split("\n"), 0
    while row < len(lines):
        fence = fences.get(row + 1)
        if fence is None:
            writer.line(lines[row])
            row += 1
            continue
        row = fence.end
        if fence in python:
            writer.code(python[fence])
        elif fence not in outputs:
            writer.shown(fence)
    writer.flush()
    return writer.book()


@dataclass
class _Container:
    """An admonition, a folded answer or a tab, whose content is indented."""

    indent: int
    kind: str
    title: str
    told: bool = False

    def around(self, text: str) -> str:
        """Put its form around a piece of its content; the title comes with the first one."""
        title, first = self.title, not self.told
        self.told = True
        if self.kind.startswith("???"):
            opening = "<details open>" if self.kind == "???+" else "<details>"
            summary = title if first else f"{title}, continued"
            return f"{opening}\n<summary>{summary}</summary>\n\n{text}\n\n</details>"
        told = f"**{title}**\n\n{text}".strip("\n") if first and title else text
        if self.kind == "!!!":
            return "\n".join(f"> {line}".rstrip() for line in told.split("\n"))
        return told


@dataclass
class _Writer:
    """Collect prose until a code cell ends it, and make the cells."""

    page: Path
    site_url: str
    cells: list[NotebookNode] = field(default_factory=list)
    around: list[_Container] = field(default_factory=list)
    prose: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    pictures: dict[str, str] = field(default_factory=dict)

    def line(self, line: str) -> None:
        """Take a line of prose, or the beginning of a container."""
        if line.strip():
            self._leave(len(line) - len(line.lstrip(" ")))
        opening = _CONTAINER.fullmatch(line.strip())
        if opening is None:
            self.prose.append(line[self._indent() :].rstrip(" "))
            return
        self.flush()
        title = opening["title"]
        if title is None:
            title = opening["class"].partition(" ")[0].capitalize()
        indent = len(line) - len(line.lstrip(" ")) + 4
        self.around.append(_Container(indent, opening["kind"], title))

    def shown(self, fence: Fence) -> None:
        """Take a fence that is not run: it stays a block of code in the prose."""
        self._leave(len(fence.indent))
        self._convert()
        title = f"**{fence.title}**\n\n" if fence.title else ""
        self.pieces.append(f"{title}{fence.marker}{fence.language}\n{fence.code}{fence.marker}")

    def code(self, example: Example) -> None:
        """Take a Python fence: a code cell with its output, below its title."""
        fence = example.fence
        self._leave(len(fence.indent))
        if example.reason is not None:
            self.shown(fence)
            return
        if fence.title:
            self.prose += ["", f"**{fence.title}**"]
        self.flush(titles=True)
        outputs = [new_output("stream", name="stdout", text=example.expected)]
        folded = any(container.kind == "???" for container in self.around)
        self.cells.append(
            new_code_cell(
                _silent(fence.code.strip("\n")),
                id=self._id(),
                outputs=outputs if example.expected else [],
                metadata={"jupyter": {"source_hidden": True, "outputs_hidden": True}}
                if folded
                else {},
            )
        )

    def flush(self, *, titles: bool = False) -> None:
        """Make Markdown cells of the prose so far: one for each heading and what is below it.

        Args:
            titles: Whether a container that begins with code is told by a cell of its title.
        """
        self._convert()
        text = "\n\n".join(self.pieces)
        self.pieces.clear()
        if not text and (not titles or all(container.told for container in self.around)):
            return
        for container in reversed(self.around):
            text = container.around(text)
        for part in [text] if self.around else _sections(text):
            used = [name for name in self.pictures if f"][{name}]" in part]
            definitions = "\n".join(f"[{name}]: {self.pictures[name]}" for name in used)
            self.cells.append(
                new_markdown_cell(f"{part}\n\n{definitions}".strip("\n"), id=self._id())
            )

    def book(self) -> NotebookNode:
        """Put the cells together."""
        where = self._address(f"{self.page.stem}.md")
        course = f"[lab35]({where})" if where else "lab35"
        title, _, text = self.cells[0].source.partition("\n")
        note = (
            f"<small>A chapter of {course}, as a notebook. It needs the package `lab35`, and "
            "nothing else. Its outputs are those of the page, which tests compare.</small>"
        )
        self.cells[0].source = f"{title}\n\n{note}\n{text}"
        metadata = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
        book = new_notebook(cells=self.cells, metadata=metadata, nbformat_minor=5)
        nbformat.validate(book)
        return book

    def _id(self) -> str:
        return f"{self.page.stem}-{len(self.cells) + 1}"

    def _indent(self) -> int:
        return self.around[-1].indent if self.around else 0

    def _leave(self, indent: int) -> None:
        """Close the containers that a line with this indentation is no part of."""
        while self.around and indent < self._indent():
            self.flush()
            self.around.pop()

    def _convert(self) -> None:
        """Turn the lines of prose into Markdown that Jupyter shows."""
        text = self._markdown("\n".join(self.prose)).strip("\n")
        self.prose.clear()
        if text:
            self.pieces.append(text)

    def _markdown(self, text: str) -> str:
        kept: list[str] = []

        def keep(found: re.Match[str]) -> str:
            if found["comment"]:
                return ""
            kept.append(found[0])
            return f"\x00{len(kept) - 1}\x00"

        text = _OPAQUE.sub(keep, text)
        text = _ATTRIBUTES.sub("", text)
        text = _PICTURE.sub(self._picture, text)
        text = _CAPTION.sub(r"\n<small>\1</small>\n", text)
        text = _LINK.sub(self._link, text)
        text = _TAG.sub(lambda found: found[0] if found["name"].lower() in _TAGS else "", text)
        text = re.sub(r"\x00(\d+)\x00", lambda found: kept[int(found[1])], text)
        return re.sub(r"\n{3,}", "\n\n", text)

    def _picture(self, found: re.Match[str]) -> str:
        if urlsplit(found["source"]).scheme:
            return found[0]
        path = self.page.parent / found["source"]
        data, name = path.read_bytes(), path.stem
        if path.suffix == ".svg":
            data = re.sub(rb"<svg\b[^>]*>", _on_paper, data, count=1)
        kind = mimetypes.guess_type(path.name)[0]
        self.pictures[name] = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        return f"![{found['alt']}][{name}]"

    def _link(self, found: re.Match[str]) -> str:
        if urlsplit(found["target"]).scheme:
            return found[0]
        where = self._address(found["target"])
        return f"[{found['text']}]({where})" if where else found["text"]

    def _address(self, target: str) -> str:
        """Say where a page of the site is, or nothing if the site has no address."""
        if not self.site_url:
            return ""
        path, _, fragment = target.partition("#")
        path = re.sub(r"\.md$", ".html", path or f"{self.page.stem}.md")
        return urljoin(self.site_url, path + (f"#{fragment}" if fragment else ""))


def _on_paper(opening: re.Match[bytes]) -> bytes:
    """Give a drawing that stands alone the ink and the paper of the light page."""
    tag = opening[0]
    if b' style="' in tag:
        return tag.replace(b' style="', f' style="{_PAPER};'.encode(), 1)
    return tag.replace(b"<svg", f'<svg style="{_PAPER}"'.encode(), 1)


def _silent(code: str) -> str:
    """End code with a semicolon where Jupyter would show the value of its last line."""
    last = ast.parse(code).body[-1]
    shows = isinstance(last, ast.Expr) and not ast.unparse(last).startswith("print(")
    return f"{code};" if shows else code


def _sections(text: str) -> Iterator[str]:
    """Split Markdown before its headings; a line of a block of code is none."""
    blocks = re.split(r"(?ms)(^(?:`{3,}|~{3,}).*?^(?:`{3,}|~{3,})$)", text)
    section = ""
    for number, block in enumerate(blocks):
        if number % 2:
            section += block
            continue
        first, *others = _HEADING.split(block)
        section += first
        for other in others:
            if section.strip():
                yield section.strip("\n")
            section = other
    if section.strip():
        yield section.strip("\n")
