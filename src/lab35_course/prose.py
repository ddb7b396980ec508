"""Typed numbers: find each one in the prose that speaks of a time or a factor.

A measured number on a page stands between markers, where a script writes it. This module finds the
ones that do not: a number, in digits or in words, with a unit of time, a rate, a percent sign,
`times` and `×`, a factor or an order of magnitude, however it is spaced or set. A few are meant,
because they are defined, counted or quoted, and not measured. Each is listed in `typed.toml`,
with its reason; an entry that no page needs is an error.
"""

from __future__ import annotations

import ast
import html
import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lab35_course.fences import scan
from lab35_course.markers import pages
from lab35_course.results import Problem

__all__ = ["Typed", "check_prose", "prose_sources", "read_allowed", "typed_numbers"]

ALLOWED = Path(__file__).with_name("typed.toml")
"""The list of numbers that may be typed, by page."""

_GAP = r"(?:[^\S\n]|-)*(?:\n[^\S\n]*)?"  # any kind of blank, or the end of a line
_PART = r"(?:half|third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?"
_WORD = (
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|sixteen|twenty|"
    r"thirty|forty|fifty|sixty|a hundred|hundred|thousand|million|a dozen|dozens(?: of)?|half an?|"
    r"few|several|couple of)"
)
_DIGITS = r"\d(?:[\d.,]*\d)?k?(?:e[-+]?\d+)?"
_NUMBER = rf"(?:{_DIGITS}|[½⅓⅔¼¾⅕⅛]|\b{_WORD}(?:[ -](?:hundred|thousand|million|and a half))?)"
_SEVERAL = rf"{_NUMBER}(?:(?:\s+(?:to|or|and)\s+|\s?[–-]\s?){_NUMBER})?"
_LONG = (
    r"(?:(?:(?:nano|micro|milli)?sec(?:ond)?s?|[mu]secs?|millis|minutes?|hours?|days?|weeks?)"
    r"(?![\w-]))"
)
_TINY = r"(?-i:ns|µs|μs|us|ms)(?![\w’-]|'\w)"
_SHORT = r"(?-i:s|min|h)(?![\w’-]|'\w)"  # after digits only: "ones" is no time
_FACTOR = r"(?:times|×|x(?![\w-])|fold\b|%|‰|per ?cent(?:age points)?\b)"
_RATE = (
    r"(?:tok(?:en)?s?|[KMGT]i?B|bytes?|GFLOPS?|FLOPs?|calls?)\s?"
    r"(?:/\s?s(?:ec(?:ond)?)?\b|(?:a|each|every|per) second)"
)
_FOUND = re.compile(
    rf"(?<![\w.]){_SEVERAL}{_GAP}(?:{_LONG}|{_TINY}|{_FACTOR}|{_RATE})"
    rf"|(?<![\w.]){_DIGITS}{_GAP}{_SHORT}"
    rf"|(?:\b(?:an?|{_WORD})[ -]{_PART}|[½⅓⅔¼¾⅕⅛])\s+(?:of|as|more|less|faster|slower|longer)\b"
    rf"|\b{_PART} of an? (?:second|minute|hour)\b"
    r"|\b(?:under|within|than|about|nearly|almost) an? (?:second|minute|hour)\b"
    rf"|\b(?:factor|speed-?up)(?: (?:of|is|was|about|nearly))*\s{_NUMBER}"
    r"|\borders? of magnitude\b"
    r"|\b(?:twice|thrice|(?:doubl|tripl|quadrupl)(?:e[ds]?|ing)|halv(?:ed?|ing)|half as"
    r"|half (?:of )?the (?:time|step|work|speed))\b",
    re.IGNORECASE,
)

_WRITTEN = re.compile(r"<!--\s*(table|value):.*?-->.*?<!--\s*/\1\s*-->", re.DOTALL)  # by a script
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_SILENT = (
    re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)"),  # code
    re.compile(r"(?<!\$)\$[^$\n]+\$"),  # formulas
    re.compile(r"(?<=\]\()[^)\s]+"),  # addresses
)
# A number alone is read through whatever makes it bold, code or a formula.
_DRESSED = re.compile(r"(`+|\$)(\d[\d.,]*)(?:[ \t]*\\times[ \t]*(?=\$))?\1")
_DRESS = re.compile(r"</?[a-z]+>|\*+|(?<!\w)_+|_+(?!\w)")


def _undressed(text: str) -> str:
    """Show entities as their characters, and leave out what only changes how a number looks."""
    text = "\n".join(" ".join(html.unescape(line).split("\n")) for line in text.split("\n"))
    text = _DRESSED.sub(lambda found: found[2] + " ×" * (r"\times" in found[0]), text)
    return _DRESS.sub("", text)


@dataclass(frozen=True)
class Typed:
    """A number in the prose that no marker encloses: where it stands, and its sentence."""

    where: str
    line: int
    found: str
    sentence: str


def typed_numbers(text: str, where: str) -> Iterator[Typed]:
    """Find the typed numbers of a page.

    Args:
        text: The page's Markdown, with alternative texts, captions and tables typed by hand.
        where: What to call the page.

    Yields:
        Each number that speaks of a time or a factor, outside markers, fences, code and formulas.
    """
    lines = text.split("\n")
    for fence in scan(text, Path(where)):
        for row in range(fence.line - 1, fence.end):
            lines[row] = ""
    prose = "\n".join(lines)
    prose = _WRITTEN.sub(_blank, prose)
    # A comment shows nothing, so a number and its unit on both sides of it stand together.
    prose = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), prose)
    prose = _undressed(prose)
    for silent in _SILENT:
        prose = silent.sub(_blank, prose)
    for found in _FOUND.finditer(prose):
        number = prose.count("\n", 0, found.start()) + 1
        last = number + found[0].count("\n")
        sentence = " ".join(line.strip() for line in lines[number - 1 : last])
        yield Typed(where, number, " ".join(found[0].split()), sentence)


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "\0", found[0])


def prose_sources(root: Path) -> dict[str, str]:
    """Gather the prose that a reader meets: pages, docstrings and help of the package, titles.

    Args:
        root: The project's folder.

    Returns:
        Markdown by path. Of a module only its docstrings and the help of its options are
        left, on the lines where they stand.
    """
    found = [*pages(root), root / "CONTRIBUTING.md", root / "CHANGELOG.md", root / "mkdocs.yml"]
    modules = sorted((root / "src" / "lab35").rglob("*.py"))
    told = {path: path.read_text(encoding="utf-8") for path in [*found, *modules] if path.is_file()}
    return {
        path.relative_to(root).as_posix(): _docstrings(text) if path.suffix == ".py" else text
        for path, text in told.items()
    }


def _docstrings(source: str) -> str:
    lines = [""] * (source.count("\n") + 1)
    for node in ast.walk(ast.parse(source)):
        # A string that stands alone documents a module, a class, a function or the name above it.
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                text = inspect.cleandoc(node.value.value).split("\n")
                lines[node.lineno - 1 : node.lineno - 1 + len(text)] = text
            case ast.keyword(arg="help", value=ast.Constant(value=str(told))):
                lines[node.value.lineno - 1] = " ".join(told.split("\n"))  # of an option
    return "\n".join(lines)


def read_allowed(path: Path = ALLOWED) -> dict[str, dict[str, str]]:
    """Read which numbers may be typed.

    Args:
        path: A TOML file: for each page a table of phrases, each with the reason why it is typed.

    Returns:
        The reasons by page and phrase.
    """
    return tomllib.loads(path.read_text(encoding="utf-8"))


def check_prose(
    sources: Mapping[str, str], allowed: Mapping[str, Mapping[str, str]]
) -> Iterator[Problem]:
    """Hold the prose of all pages against the list of numbers that may be typed.

    Args:
        sources: The Markdown of each page by its path.
        allowed: The reasons by page and phrase; a phrase is a piece of the line, number included.

    Yields:
        Each typed number that is not on the list, and each entry that no page needs or that gives
        no reason.
    """
    needed = set()
    for where, text in sources.items():
        for typed in typed_numbers(text, where):
            phrases = [
                phrase
                for phrase in allowed.get(where, {})
                if phrase in typed.sentence
                and typed.found.lower() in " ".join(phrase.split()).lower()
            ]
            needed |= {(where, phrase) for phrase in phrases}
            if not phrases:
                yield Problem(
                    f"{where}:{typed.line}",
                    f"{typed.found!r} is typed; quote a result through a marker, say it without a "
                    f"number, or list it in {ALLOWED.name} with the reason",
                )
    for where, phrases in allowed.items():
        for phrase, reason in phrases.items():
            if (where, phrase) not in needed:
                yield Problem(ALLOWED.name, f"{where}: no sentence needs {phrase!r}; delete it")
            if len(phrase.split()) < 3 or len(reason.split()) < 3:
                yield Problem(
                    ALLOWED.name,
                    f"{where}: {phrase!r} and its reason must have at least three words each, so "
                    "that it allows one sentence and says why",
                )
