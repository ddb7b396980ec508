"""Markers: the places in Markdown pages where stored results are written, and checked.

A table stands between two markers on lines of their own:

    <!-- table: loop.cost -->
    …
    <!-- /table -->

A number stands inside a sentence, after its first word: the marker holds the result's name, a
dotted path into its data, and optionally a Python format:

    It is <!-- value: loop.speed variants.cached.speedup.median .1f -->5.2<!-- /value --> × faster.

What is between two markers is written by `scripts/tables.py`, never by hand. Markers inside fences
and code spans are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lab35.checkpoint import replacing
from lab35_course.fences import scan
from lab35_course.figure import Drawing
from lab35_course.plain import plain
from lab35_course.results import (
    Data,
    Problem,
    Registry,
    Result,
    check_results,
    fitted,
    read_results,
)

__all__ = [
    "Marker",
    "Sources",
    "check",
    "check_pages",
    "lookup",
    "pages",
    "parse",
    "render",
    "shown",
]

_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)")
_PICTURE = re.compile(r"!\[[^\]]*\]\((?:\.\./)*assets/figures/([\w.-]+)\.svg\)")
_FORMAT = re.compile(r",?d?|,?\.\d[f%]|\.\d[eg]")
_TAG = re.compile(r"<!--\s*(?P<close>/?)\s*(?P<kind>table|value)\b(?P<rest>.*?)-->")

Kind = Literal["table", "value"]


@dataclass(frozen=True)
class Marker:
    """A pair of markers in a page, and the span of characters between them."""

    kind: Kind
    words: tuple[str, ...]
    start: int
    end: int
    indent: str
    line: int


@dataclass(frozen=True)
class Sources:
    """What markers refer to."""

    registry: Registry
    stored: Mapping[str, Result]

    def result_of(self, marker: Marker) -> str:
        """Name the result that a marker shows, which may not exist."""
        name = marker.words[0]
        if marker.kind == "value":
            return name
        return self.registry.tables[name].result if name in self.registry.tables else name

    def content(self, marker: Marker) -> str:
        """Write what belongs between a pair of markers.

        Args:
            marker: The pair.

        Returns:
            The text from marker to marker, with the line breaks and the indent of a table.

        Raises:
            ValueError: If the table, result, path or format is unknown, with what to do.
        """
        name = marker.words[0]
        if marker.kind == "value":
            path, spec = (*marker.words[1:], "")[:2]
            return shown(lookup(self._result(name).data, path), spec)
        if name not in self.registry.tables:
            known = ", ".join(self.registry.tables) or "none"
            raise ValueError(f"no registered table is called {name!r}; known: {known}")
        view = self.registry.tables[name]
        result = self._result(view.result)
        lines = [
            "",
            *fitted(view.function, result.data).markdown().splitlines(),
            "",
            f"<small>{result.line()}</small>",
            "",
            marker.indent,
        ]
        return "\n" + "\n".join(marker.indent + line if line.strip() else line for line in lines)

    def _result(self, name: str) -> Result:
        if name in self.stored:
            return self.stored[name]
        if name in self.registry.measurements:
            remedy = f"run `python scripts/tables.py --only {name}`"
        else:
            remedy = f"known: {', '.join(self.registry.measurements) or 'none'}"
        raise ValueError(f"no stored result is called {name!r}; {remedy}")


def shown(value: int | float | str, spec: str) -> str:
    """Write one value of a result as it stands in a sentence.

    Args:
        value: A number or a text.
        spec: One of Python's formats that say only how many digits are told: `,`, `d`, `.2f`,
            `,.0f`, `.1e`, `.3g`, `.0%`. Others could fill, cut or sign a number, so that another
            one is read.

    Returns:
        The number, or Markdown that shows the text.

    Raises:
        ValueError: If the format is none of these, does not fit the value, or leaves nothing of a
            number that is not zero.
    """
    if isinstance(value, str):
        if spec:
            raise ValueError(f"{value!r} is a text and has no format {spec!r}; leave it away")
        return plain(value)
    if not _FORMAT.fullmatch(spec):
        raise ValueError(f"{value!r} has no format {spec!r}; give one such as , d .2f ,.0f .1e .0%")
    try:
        text = format(value, spec)
    except ValueError:
        raise ValueError(f"{value!r} has no format {spec!r}; d is for whole numbers") from None
    if value and not re.search("[1-9]", text.partition("e")[0]):
        raise ValueError(f"{value!r} shows as {text} in the format {spec!r}; give it more digits")
    return text


def lookup(data: Data, path: str) -> int | float | str:
    """Follow a dotted path into a result's data.

    Args:
        data: The data.
        path: Keys, and positions in lists, joined by dots: `curve.0.train`.

    Returns:
        The number or text at its end.

    Raises:
        ValueError: If the path leads nowhere, or not to a single number or text.
    """
    value: Any = data
    for part in path.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise ValueError(f"path {path!r} stops at {part!r}; {_holds(value)}")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"path {path!r} ends too early; {_holds(value)}")
    return value


def _holds(value: object) -> str:
    match value:
        case dict():
            return f"there are {', '.join(value)}"
        case list():
            return f"there are positions 0 to {len(value) - 1}"
        case _:
            return f"there is {value!r}"


def pages(root: Path) -> list[Path]:
    """List the Markdown pages of a project: all of `docs`, and the README.

    Args:
        root: The project's folder.

    Returns:
        The files that exist, sorted.
    """
    found = [*(root / "docs").rglob("*.md"), root / "README.md"]
    return sorted(path for path in found if path.is_file())


def parse(text: str, where: str) -> tuple[list[Marker], list[Problem]]:
    """Find the markers of a page.

    Args:
        text: The page's Markdown.
        where: What to call the page in a problem.

    Returns:
        The pairs of markers in order, and each marker that belongs to no proper pair.

    Raises:
        FenceError: If it cannot be told what is code and what is not.
    """
    markers: list[Marker] = []
    problems: list[Problem] = []
    opened: re.Match[str] | None = None

    def line_of(tag: re.Match[str]) -> int:
        return text.count("\n", 0, tag.start()) + 1

    def complain(tag: re.Match[str], message: str) -> None:
        problems.append(Problem(f"{where}:{line_of(tag)}", f"`{tag[0]}` {message}"))

    for tag in _TAG.finditer(_without_code(text, where)):
        if not tag["close"]:
            if opened:
                complain(
                    opened, f"is not closed before `{tag[0]}`; add `<!-- /{opened['kind']} -->`"
                )
            opened = tag
            continue
        if opened is None or opened["kind"] != tag["kind"]:
            complain(tag, "closes nothing; delete it, or open it")
            continue
        begin, opened = opened, None
        indent = text[text.rfind("\n", 0, begin.start()) + 1 : begin.start()]
        fault = _fault(begin, tag, text, indent)
        if fault:
            complain(begin, fault)
            continue
        words = tuple(begin["rest"].removeprefix(":").split())
        marker = Marker(begin["kind"], words, begin.end(), tag.start(), indent, line_of(begin))
        markers.append(marker)
    if opened:
        complain(opened, f"is not closed; add `<!-- /{opened['kind']} -->`")
    return markers, problems


def _fault(begin: re.Match[str], end: re.Match[str], text: str, before: str) -> str | None:
    """Say what is wrong with how a pair of markers is written, if anything is."""
    words = begin["rest"].removeprefix(":").split()
    if begin["kind"] == "value":
        if not begin["rest"].startswith(":") or len(words) not in (2, 3):
            return "must read `<!-- value: NAME PATH FORMAT -->`; the format may be left away"
        if "\n" in text[begin.end() : end.start()]:
            return "must be closed in its own line"
        if not before.strip():
            return "must not begin a line, where Markdown takes it for HTML; put a word before it"
        return None
    if not begin["rest"].startswith(":") or len(words) != 1:
        return "must read `<!-- table: NAME -->`"
    rest_of_line = text[begin.end() :].split("\n", 1)[0]
    before_end = text[: end.start()].rsplit("\n", 1)[-1]
    after_end = text[end.end() :].split("\n", 1)[0]
    if any(part.strip() for part in (before, rest_of_line, before_end, after_end)):
        return "and its closing marker must stand on lines of their own"
    return None


def _without_code(text: str, where: str) -> str:
    """Blank out fences and code spans, so that every other character keeps its place."""
    lines = [_CODE_SPAN.sub(lambda code: " " * len(code[0]), line) for line in text.split("\n")]
    for fence in scan(text, Path(where)):
        for row in range(fence.line - 1, fence.end):
            lines[row] = " " * len(lines[row])
    return "\n".join(lines)


def render(text: str, where: str, sources: Sources) -> tuple[str, list[Problem]]:
    """Write the stored results between a page's markers.

    Args:
        text: The page's Markdown.
        where: What to call the page in a problem.
        sources: The registered tables and the stored results.

    Returns:
        The new text, and the markers that could not be filled and stay as they are.
    """
    markers, problems = parse(text, where)
    parts, position = [], 0
    for marker in markers:
        try:
            content = sources.content(marker)
        except ValueError as error:
            problems.append(Problem(f"{where}:{marker.line}", str(error)))
            continue
        parts += [text[position : marker.start], content]
        position = marker.end
    return "".join([*parts, text[position:]]), problems


def write_pages(root: Path, sources: Sources) -> tuple[list[Path], list[Problem]]:
    """Render every page of a project in place.

    Args:
        root: The project's folder.
        sources: The registered tables and the stored results.

    Returns:
        The pages that changed, and the markers that could not be filled.
    """
    changed, problems = [], []
    for path in pages(root):
        before = path.read_text(encoding="utf-8")
        after, found = render(before, str(path.relative_to(root)), sources)
        problems += found
        if after != before:
            with replacing(path) as temporary:
                temporary.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed, problems


def check_pages(root: Path, sources: Sources, drawings: Sequence[Drawing]) -> Iterator[Problem]:
    """Hold every page against the stored results, and the results against the pages.

    Args:
        root: The project's folder.
        sources: The registered tables and the stored results.
        drawings: The registered figures, which use results too.

    Yields:
        Each marker that does not say what its result says, and each result, table or figure that
        no page shows.
    """
    remedy = "run `python scripts/tables.py --render`"
    shown: set[str] = set()
    used = {name for drawing in drawings for name in drawing.results}
    pictured: set[str] = set()
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        pictured |= set(_PICTURE.findall(_without_code(text, str(path.relative_to(root)))))
        where = str(path.relative_to(root))
        markers, problems = parse(text, where)
        yield from problems
        for marker in markers:
            shown |= {marker.words[0]} if marker.kind == "table" else set()
            used.add(sources.result_of(marker))
            found, here = text[marker.start : marker.end], f"{where}:{marker.line}"
            try:
                expected = sources.content(marker)
            except ValueError as error:
                yield Problem(here, str(error))
                continue
            subject = f"{marker.kind} {' '.join(marker.words)}"
            if not found.strip():
                yield Problem(here, f"{subject} is empty; {remedy}")
            elif found != expected:
                yield Problem(here, f"{subject} {_change(found, expected)}; {remedy}")
    for name in sorted(sources.stored.keys() - used):
        yield Problem(
            f"results/{name}.json", "no table, value or figure uses it; delete it or use it"
        )
    for name, view in sources.registry.tables.items():
        if name not in shown:
            module = view.function.__module__
            yield Problem(module, f"table {name} is on no page; delete it or show it")
    for drawing in drawings:
        if drawing.name not in pictured:
            module = drawing.function.__module__
            yield Problem(module, f"figure {drawing.name} is on no page; delete it or show it")


def _change(found: str, expected: str) -> str:
    """Tell the first line in which a page differs from what its result says."""
    before, after = found.splitlines(), expected.splitlines()
    pairs = zip(before, after, strict=False)
    old, new = next(
        ((old, new) for old, new in pairs if old != new), (f"{len(before)} lines", f"{len(after)}")
    )
    return f"says {old.strip()!r}, but its result says {new.strip()!r}"


def check(root: Path, registry: Registry, drawings: Sequence[Drawing]) -> list[Problem]:
    """Check results and pages of a project, writing nothing.

    Args:
        root: The project's folder, with `docs`, `results` and the README.
        registry: The registered measurements.
        drawings: The registered figures.

    Returns:
        Every problem found.

    Raises:
        ValueError: If a stored result cannot be read.
    """
    stored = read_results(root / "results")
    return [
        *check_results(registry, stored),
        *check_pages(root, Sources(registry, stored), drawings),
    ]
