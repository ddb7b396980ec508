"""Find the fences of the course, at any depth, and count them a second time in another way.

Two readers look at each source, each in its own way. The scanner follows the lines, knows where
each fence ends, and yields what the tests run. The census looks at single lines, knows no state,
and counts what a reader of the page would take for Python. A fault in one shows as a difference
between the two.

Sources are the pages under `docs/`, the Markdown files beside the README, and the docstrings of
the packages and scripts. What else a page shows as code, `fence_census` holds against its fences.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab35_course.fence_rules import refusals

__all__ = [
    "LANGUAGES",
    "OUTPUT",
    "Example",
    "Fence",
    "FenceError",
    "chained",
    "count_python_fences",
    "examples",
    "place",
    "python_openings",
    "scan",
    "sources",
    "with_outputs",
]

OUTPUT = '{.text title="Output"}'
"""The info string of a fence that holds what the fence before it prints."""

LANGUAGES = (
    "bash",
    "css",
    "diff",
    "html",
    "json",
    "markdown",
    "python",
    "sh",
    "text",
    "toml",
    "yaml",
)
"""The languages that a fence may name. All but Python are typed, and listed by the tests."""

_OTHER = re.compile(
    rf"(?:{'|'.join(LANGUAGES)})"
    rf"|\{{\.(?:{'|'.join(LANGUAGES)})(?: (?:title|hl_lines|linenums)=\"[^\"]+\")*\}}"
)
# A prompt, or a statement, at the beginning of a line.
_CODE = re.compile(
    r"^\s*(?:>>> |In \[\d+\]|(?:async )?(?:def|class|for|with|while) .*:\s*(?:#.*|\.\.\.)?$"
    r"|import \w+|from [\w.]+ import |assert .|print\(.*\)|\w[\w., ]* = \S)",
    re.MULTILINE,
)
_IN_A_SHELL = re.compile(r"\bi?python[\d.]*\b[^\n|;&]*(?:\s-c\b|\s-\s*<<|<<)|>>> ")
_COMMAND = re.compile(
    r"\s*(?:#.*|(?:[A-Z_]+=\S* )*(?:\S*/)?(?:cat|cd|curl|echo|export"
    r"|git|lab35|make|pip|printf|pytest|python3?|sed|tail|tee)(?: .*)?)?"
)
_STEPS = re.compile(r"(?:    |\t|> ?)*")

_OPTIONS = 'continuation, notest with reason="…", title="…", hl_lines="…", linenums="…", .annotate'
_PYTHON = re.compile(
    r"python|\{\.python"
    r'(?: (?:continuation|notest|\.annotate|(?:title|hl_lines|linenums|reason)="[^"]+"))*\}'
)
_ATTRIBUTE = re.compile(r"""([\w-]+)=(["'])(.*?)\2""")

_WHERE = {"docs": ["*.md"], "src": ["*.md", "*.py"], "scripts": ["*.py"]}


class FenceError(ValueError):
    """A fence is written in a way that the tests or the site would misread."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{place(path, line)}: {reason}")


@dataclass(frozen=True)
class Fence:
    """One fenced code block.

    Attributes:
        path: The file that holds it.
        line: Line of the opening fence, from 1.
        end: Line of the closing fence, from 1.
        indent: What stands before the fence on its line: spaces, tabs, quote marks.
        marker: The backticks or tildes.
        info: What follows them on the opening line.
        code: The content without `indent`; each line ends in a newline.
        adjacent: Whether only blank lines separate it from the fence before.
    """

    path: Path
    line: int
    end: int
    indent: str
    marker: str
    info: str
    code: str
    adjacent: bool

    @property
    def language(self) -> str:
        """The first class in braces, or the first word without them; empty where none is given."""
        pattern = r"\{[^}]*?\.([\w+-]+)" if self.info.startswith("{") else r"([\w+-]+)"
        found = re.match(pattern, _unquoted(self.info))
        return found[1] if found else ""

    @property
    def attributes(self) -> dict[str, str]:
        """The options that have a value, such as `title`."""
        return {name: value for name, _, value in _ATTRIBUTE.findall(self.info)}

    @property
    def options(self) -> frozenset[str]:
        """The options that are bare words, such as `continuation`."""
        words = _unquoted(self.info).strip("{}").split()
        return frozenset(word for word in words if word[0] != "." and "=" not in word)

    @property
    def title(self) -> str | None:
        """The title that the site shows above the block."""
        return self.attributes.get("title")

    @property
    def is_python(self) -> bool:
        """Whether this is Python, in one of the spellings that the course allows."""
        return _PYTHON.fullmatch(self.info) is not None


def chained(fences: Iterable[Fence]) -> dict[Fence, tuple[Fence, ...]]:
    """Say what each Python fence continues.

    Args:
        fences: All fences of a source, in order.

    Returns:
        For each Python fence those that it needs, first to last; none if it stands alone.

    Raises:
        FenceError: If a continuation has nothing to continue.
    """
    found: dict[Fence, tuple[Fence, ...]] = {}
    chain: tuple[Fence, ...] = ()
    for fence in fences:
        if not fence.is_python:
            continue
        continues = "continuation" in fence.options
        if continues and not chain:
            raise FenceError(fence.path, fence.line, "there is no fence before it to continue")
        found[fence] = chain if continues else ()
        if "notest" not in fence.options:
            chain = (*found[fence], fence)
    return found


@dataclass(frozen=True)
class Example:
    """A Python fence with what it continues and what it should print.

    Attributes:
        fence: The fence.
        before: The fences that it continues, first to last; empty if it stands alone.
        output: The output fence that follows, if any.
    """

    fence: Fence
    before: tuple[Fence, ...]
    output: Fence | None

    @property
    def program(self) -> str:
        """The code of the fence after that of all it continues: a program that runs as it is."""
        return "\n".join(fence.code for fence in (*self.before, self.fence))

    @property
    def expected(self) -> str:
        """What the page says the fence prints."""
        return self.output.code if self.output else ""

    @property
    def reason(self) -> str | None:
        """Why the fence is not run; None for a fence that is."""
        return self.fence.attributes.get("reason")


def sources(root: Path) -> list[Path]:
    """List the files whose Python fences are run.

    Args:
        root: The project's folder.

    Returns:
        The Markdown files beside the README, those under `docs/` and `src/`, and every Python
        file under `src/` and `scripts/`.
    """
    found = [*root.glob("*.md")]
    for folder, kinds in _WHERE.items():
        found += [path for kind in kinds for path in (root / folder).rglob(kind)]
    return sorted(path for path in found if path.is_file())


def place(path: Path, line: int | None = None) -> str:
    """Write a place as `path:line`, relative to the working directory where it lies below it."""
    absolute = path.absolute()
    inside = absolute.is_relative_to(Path.cwd())
    name = str(absolute.relative_to(Path.cwd()) if inside else path)
    return name if line is None else f"{name}:{line}"


# --- The scanner ---------------------------------------------------------------------------------


def scan(text: str, path: Path) -> list[Fence]:
    """Find every fence in Markdown, whatever it is nested in.

    A fence is found by its line alone, so that admonitions, tabs, lists and the rest need no rules
    of their own. What stands inside a fence or an HTML comment is not looked at. A fence
    ends as on the site (pymdownx.superfences): at its own indentation, with the same marker.

    Args:
        text: The Markdown.
        path: Where it comes from.

    Returns:
        The fences, in order.

    Raises:
        FenceError: If a fence or a comment is never closed, a line inside a fence is indented less
            than the fence, or a fence names no language.
    """
    lines = text.split("\n")
    fences: list[Fence] = []
    row, adjacent = 0, False
    while row < len(lines):
        opening = _opening(lines[row])
        if opening:
            fences.append(_fence(lines, row, opening, adjacent, path))
            row, adjacent = fences[-1].end, True
            continue
        adjacent = adjacent and not lines[row].strip(" \t>")
        if lines[row].lstrip(" \t>").startswith("<!--"):
            row = _comment_end(lines, row, path)
        row += 1
    return fences


def _opening(line: str) -> re.Match[str] | None:
    found = re.fullmatch(r"(?P<indent>[ \t>]*)(?P<marker>`{3,}|~{3,})(?P<info>.*)", line)
    if found is None:
        return None
    # "```x``` and more" is inline code. A title in braces may hold a backtick.
    braced = re.fullmatch(r"[ \t]*\{.*\}[ \t]*", found["info"])
    is_inline = found["marker"][0] == "`" and "`" in found["info"] and not braced
    return None if is_inline else found


def _fence(lines: list[str], row: int, opening: re.Match[str], adjacent: bool, path: Path) -> Fence:
    indent, marker, info = opening["indent"], opening["marker"], opening["info"].strip()
    code: list[str] = []
    for line in lines[row + 1 :]:
        if line.startswith(indent) and line[len(indent) :].rstrip(" \t") == marker:
            break
        if not line.startswith(indent) and line.strip() and line.rstrip() != indent.rstrip():
            below = row + 2 + len(code)
            raise FenceError(path, below, f"indented less than its fence at line {row + 1}")
        code.append(line[len(indent) :] + "\n")
    else:
        raise FenceError(path, row + 1, f"this fence is never closed by {indent + marker!r}")
    end = row + 2 + len(code)
    fence = Fence(path, row + 1, end, indent, marker, info, "".join(code), adjacent)
    if not fence.language:
        raise FenceError(
            path, fence.line, f"{marker}{info} names no language; plain text is `text`"
        )
    return fence


def _comment_end(lines: list[str], row: int, path: Path) -> int:
    for end in range(row, len(lines)):
        if "-->" in lines[end]:
            return end
    raise FenceError(path, row + 1, "this comment is never closed by -->")


def _markdown(text: str, path: Path) -> str:
    """Return a page as it is, and a module with everything but its docstrings blanked out.

    Every line keeps its number. A string that stands alone after an assignment counts as
    a docstring, since the API pages show it too.
    """
    if path.suffix != ".py":
        return text
    rows = [""] * (text.count("\n") + 1)
    for node in ast.walk(ast.parse(text, str(path))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(docstring)) as string):
                content = docstring.split("\n")
                prompt = next(
                    (i for i, row in enumerate(content) if row.lstrip().startswith(">>>")), None
                )
                if prompt is not None:
                    reason = "a prompt is not run; put the code into a Python fence"
                    raise FenceError(path, string.lineno + prompt, reason)
                if len(content) == string.end_lineno - string.lineno + 1:
                    rows[string.lineno - 1 : string.end_lineno] = content
                elif "```" in docstring or "~~~" in docstring:
                    reason = (
                        'an escaped newline moves the lines of this docstring; begin it with r"""'
                    )
                    raise FenceError(path, string.lineno, reason)
    return "\n".join(rows)


def _unquoted(info: str) -> str:
    return re.sub(r""""[^"]*"|'[^']*'""", '""', info)


# --- Examples ------------------------------------------------------------------------------------


def examples(path: Path, text: str | None = None) -> list[Example]:
    """Read the Python fences of a page or of a module's docstrings, with their outputs.

    Args:
        path: The file; a `.py` file is read for its docstrings.
        text: Its content, where it is not the one on disk.

    Returns:
        All Python fences in order, those that are not run included.

    Raises:
        FenceError: If a fence is misspelled or malformed, a continuation has nothing to continue,
            `notest` and `reason` do not come together, or an output follows no fence that runs.
    """
    text = path.read_text(encoding="utf-8") if text is None else text
    _refuse_misspellings(text, path)
    fences = scan(_markdown(text, path), path)
    before = chained(fences)
    found: list[Example] = []
    for fence, following in itertools.zip_longest(fences, fences[1:]):
        _check_indent(fence)
        if not fence.is_python:
            _check_typed(fence)
            continue
        _refuse_typed_output(fence, following)
        if "notest" not in fence.options:
            for line, reason in refusals(fence.code, path):
                raise FenceError(path, fence.line + line, reason)
        _check_options(fence)
        runs = "notest" not in fence.options
        output = _output_of(fence, following) if runs else None
        found.append(Example(fence, before[fence], output))
    _refuse_strays(fences, found)
    return found


def _check_indent(fence: Fence) -> None:
    if fence.path.suffix == ".md" and not _STEPS.fullmatch(fence.indent):
        raise FenceError(fence.path, fence.line, "indent a fence by a multiple of four spaces")


def _check_typed(fence: Fence) -> None:
    if _is_output(fence):
        return  # compared, or told below what is wrong about it
    if not _OTHER.fullmatch(fence.info):
        reason = (
            f"{fence.info!r} is not how a fence begins here; write {{.LANGUAGE}} with one of "
            f"{', '.join(LANGUAGES)}, and no options but title, hl_lines and linenums"
        )
        raise FenceError(fence.path, fence.line, reason)
    if fence.language in ("sh", "bash"):
        hidden = _IN_A_SHELL.search(fence.code)
        whole = re.sub(r"\\\n", " ", fence.code).split("\n")
        strange = next((line for line in whole if not _COMMAND.fullmatch(line)), None)
        if strange:
            reason = f"{strange!r} is no command; what a command prints is not typed"
            raise FenceError(fence.path, fence.line, reason)
    else:
        hidden = _CODE.search(fence.code)
    if hidden and fence.language not in ("css", "markdown", "toml"):
        reason = f"{hidden[0].strip()!r} is Python; put it into a Python fence, which is run"
        raise FenceError(fence.path, fence.line, reason)


def _is_output(fence: Fence) -> bool:
    return (fence.title or "").strip().casefold() == "output"


def _refuse_typed_output(fence: Fence, following: Fence | None) -> None:
    if following and following.adjacent and not (following.is_python or _is_output(following)):
        reason = (
            f"what follows a Python fence is read as what it prints: write {OUTPUT}, "
            "or put a sentence between"
        )
        raise FenceError(following.path, following.line, reason)


def _check_options(fence: Fence) -> None:
    if ("notest" in fence.options) != ("reason" in fence.attributes):
        raise FenceError(fence.path, fence.line, 'write notest and reason="…" together, or neither')


def _output_of(fence: Fence, following: Fence | None) -> Fence | None:
    if following is None or following.info != OUTPUT:
        return None
    return following if following.adjacent and following.indent == fence.indent else None


def _refuse_strays(fences: Sequence[Fence], found: Sequence[Example]) -> None:
    owned = [example.output for example in found]
    for fence in fences:
        if not _is_output(fence):
            continue
        if fence.info != OUTPUT:
            raise FenceError(fence.path, fence.line, f"an output fence begins with {OUTPUT}")
        if fence not in owned:
            reason = (
                "this output does not follow a Python fence that runs, with the same indentation; "
                "delete it, or give it another title"
            )
            raise FenceError(fence.path, fence.line, reason)


def with_outputs(path: Path, text: str, printed: Sequence[str]) -> str:
    """Rewrite a source so that each output fence holds what its Python fence prints.

    Args:
        path: The file; it is not written.
        text: Its content.
        printed: What each fence of `examples(path, text)` prints. Those of fences that are not
            run are ignored.

    Returns:
        The new content: outputs replaced, added where they are missing, removed where nothing
        is printed.

    Raises:
        FenceError: If an output cannot be written there, such as a backslash in a docstring.
    """
    lines = text.split("\n")
    found = examples(path, text)
    for example, output in reversed(list(zip(found, printed, strict=True))):
        if example.reason is None:
            end = example.output.end if example.output else example.fence.end
            lines[example.fence.end : end] = _output_lines(example, output)
    rewritten = "\n".join(lines)
    for example, output in zip(examples(path, rewritten), printed, strict=True):
        if example.reason is None and example.expected != _whole_lines(output):
            reason = f"what it prints cannot be written below it: {output!r}"
            raise FenceError(path, example.fence.line, reason)
    return rewritten


def _output_lines(example: Example, printed: str) -> Iterator[str]:
    if not printed:
        return
    indent = example.fence.indent
    longest = max((len(run) for run in re.findall(r"`+", printed)), default=0)
    marker = "`" * max(3, longest + 1)
    yield indent.rstrip()
    yield f"{indent}{marker}{OUTPUT}"
    for line in _whole_lines(printed)[:-1].split("\n"):
        yield indent + line if line else indent.rstrip()
    yield indent + marker


def _whole_lines(printed: str) -> str:
    return printed if printed.endswith("\n") or not printed else printed + "\n"


# --- The census ----------------------------------------------------------------------------------


def python_openings(path: Path) -> list[int]:
    """List the lines that open a Python fence, without following where fences begin and end.

    Only what is shown, not run, is left out: HTML comments, and whole `markdown` fences of four or
    more backticks, in which a page explains how to write a fence.

    Args:
        path: A page, or a module; in a module, comments are code and hold no fences.

    Returns:
        Line numbers, from 1.

    Raises:
        FenceError: If Python is spelled in a way that a runner or the theme would not take.
    """
    text = path.read_text(encoding="utf-8")
    _refuse_misspellings(text, path)
    return [line for line, _ in _python_lines(text)]


def count_python_fences(path: Path) -> int:
    """Count the Python fences of a page or of a module's docstrings, run or not.

    The built page holds as many `div.language-python.highlight`, signatures and listed sources of
    API pages aside.

    Args:
        path: A page or a module.

    Returns:
        The count by the census, not by the scanner.

    Raises:
        FenceError: If a Python fence is misspelled.
    """
    return len(python_openings(path))


_SHOWN = re.compile(
    r"(?ms)^[ \t>]*(?:<!--.*?-->|(`{4,})[ \t]*\{?\.?markdown\b.*?^[ \t>]*\1[ \t]*$)"
)
_FENCE_LINE = re.compile(
    r"^[ \t>]*(?:(?:[-*+:]|\d+[.)]|\[\^[^\]\n]+\]:)[ \t]+)*"  # list, definition, footnote
    r"(?:~{3,}|`{3,}(?=[^`\n]*$|[ \t]*\{))(?P<info>.*)$",
    re.MULTILINE,
)
_PYTHON_LIKE = re.compile(r"(?<![\w-])i?py(?!tb)", re.IGNORECASE)


def _python_lines(text: str) -> Iterator[tuple[int, str]]:
    text = _SHOWN.sub(lambda shown: "\n" * shown[0].count("\n"), text)
    for opening in _FENCE_LINE.finditer(text):
        if _PYTHON_LIKE.search(_unquoted(opening["info"])):
            yield text.count("\n", 0, opening.start()) + 1, opening["info"].strip()


def _refuse_misspellings(text: str, path: Path) -> None:
    for line, info in _python_lines(text):
        if not _PYTHON.fullmatch(info):
            right = _right_spelling(info)
            remedy = f"write {right}" if _PYTHON.fullmatch(right) else f"the options are {_OPTIONS}"
            raise FenceError(path, line, f"{info!r} is not how a Python fence begins; {remedy}")


def _right_spelling(info: str) -> str:
    words = re.findall(r"""[^\s"'{}=]+(?:=(?:"[^"]*"|'[^']*'))?""", info)
    kept = [word for word in words if not _PYTHON_LIKE.search(_unquoted(word))]
    plain = [re.sub(r"^\.(?=(?:continuation|notest)$)", "", word) for word in kept]
    reason = ['reason="…"'] if "notest" in plain and "reason=" not in info else []
    return f"{{{' '.join(['.python', *plain, *reason])}}}"
