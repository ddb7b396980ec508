"""The scanner finds every fence, the census finds the same ones, and nothing else passes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab35_course.fences import (
    OUTPUT,
    FenceError,
    count_python_fences,
    examples,
    place,
    python_openings,
    scan,
    sources,
    with_outputs,
)

ROOT = Path(__file__).parents[1]
PAGE = Path("page.md")

# Every fence that is not run, by its page and its reason. Adding one here is a decision.
NOTEST: list[tuple[str, str]] = []


# --- The course's own sources --------------------------------------------------------------------


def test_every_python_fence_is_run_or_declared() -> None:
    """The census: a fence that a reader sees is collected by pytest, or says why it is not run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    command += ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command += [str(path) for path in sources(ROOT)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    items = re.findall(r"^(.+?)::.*\[line:(\d+)\]$", run.stdout, re.MULTILINE)
    collected = sorted((name, int(line)) for name, line in items)
    declared = [
        (str(path.relative_to(ROOT)), example.fence.line)
        for path in sources(ROOT)
        for example in examples(path)
        if example.reason is not None
    ]
    counted = [
        (str(path.relative_to(ROOT)), line)
        for path in sources(ROOT)
        for line in python_openings(path)
    ]
    assert counted
    assert sorted(collected + declared) == sorted(counted), run.stdout + run.stderr


def test_a_plain_pytest_runs_the_sources(pytestconfig: pytest.Config) -> None:
    """`pytest` without arguments reaches every source, with the plug-in switched on."""
    reached = [ROOT / path for path in pytestconfig.getini("testpaths")]
    for path in sources(ROOT):
        assert any(path.is_relative_to(start) for start in reached), path
    assert pytestconfig.option.markdowndocs


def test_fences_that_are_not_run_are_listed() -> None:
    """No fence escapes being run without an entry in this file."""
    declared = [
        (str(path.relative_to(ROOT)), example.reason)
        for path in sources(ROOT)
        for example in examples(path)
        if example.reason is not None
    ]
    assert sorted(declared) == sorted(NOTEST)


# --- The scanner ---------------------------------------------------------------------------------


class Block(NamedTuple):
    """A fence and the containers that it stands in, outermost first."""

    containers: list[tuple[str, str]]
    marker: str
    code: str

    def write(self) -> str:
        """Write it as Markdown."""
        indent, lines = "", []
        for header, step in self.containers:
            lines += [indent + header, indent.rstrip()]
            indent += step
        code = self.code.split("\n")[:-1]
        fence = [self.marker + "{.python}", *code, self.marker]
        return "\n".join([*lines, *(indent + line if line else indent.rstrip() for line in fence)])


CONTAINERS = st.sampled_from(
    [
        ("!!! note", "    "),
        ('??? tip "Closed"', "    "),
        ('=== "Tab"', "    "),
        ("- An item", "  "),
        ("1. An item", "    "),
        ("Term", ""),
        (":   A definition", "    "),
        ("[^1]: A footnote", "    "),
        ('<div markdown="1">', ""),
        ("> A quote", "> "),
        ("!!! note", "\t"),
    ]
)
LINES = st.one_of(
    st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(["```python", "~~~", "````", "<!-- a", "--> b", "> c", "    d", "", " ", "\t"]),
)


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """Draw a nested fence whose marker is longer than any run of its characters in the code."""
    code = "".join(line + "\n" for line in draw(st.lists(LINES, max_size=6)))
    character = draw(st.sampled_from("`~"))
    runs = [len(run) for run in re.findall(re.escape(character) + "+", code)]
    marker = character * max([3, *(length + 1 for length in runs)])
    return Block(draw(st.lists(CONTAINERS, max_size=3)), marker, code)


@given(st.lists(blocks(), max_size=4))
def test_the_scanner_returns_the_code_that_was_written(written: list[Block]) -> None:
    """Whatever the nesting and the code, each fence comes back whole, and at its own line."""
    text = "\n\n".join(block.write() + "\n\nProse." for block in written)
    found = scan(text, PAGE)
    assert [fence.code for fence in found] == [block.code for block in written]
    lines = text.split("\n")
    for fence in found:
        assert lines[fence.line - 1] == f"{fence.indent}{fence.marker}{fence.info}"
        assert lines[fence.end - 1] == fence.indent + fence.marker


def test_a_fence_inside_a_fence_is_content() -> None:
    """A page may show how a fence is written: in a `markdown` fence of four backticks."""
    text = "````{.markdown}\n```{.python}\n1 / 0\n```\n````\n"
    assert [fence.language for fence in scan(text, PAGE)] == ["markdown"]


def test_comments_and_inline_code_hold_no_fences() -> None:
    """What the site does not show as a block is not run as one."""
    text = "<!--\n```{.python}\n1 / 0\n```\n-->\n```x``` is inline.\n<!-- table: a.b -->\n"
    assert scan(text, PAGE) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("```{.python}\nx\n", "never closed"),
        ("```{.python}\nx\n````\n", "never closed"),
        ("    ```{.python}\n  x\n    ```\n", "indented less"),
        ("<!--\n```{.python}\n", "never closed by -->"),
        ("```\nx\n```\n", "names no language"),
        ('```{title="a.py"}\nx\n```\n', "names no language"),
    ],
)
def test_a_malformed_fence_is_refused(text: str, reason: str) -> None:
    """A fence that would swallow the rest of the page, or lose its end, is an error."""
    with pytest.raises(FenceError, match=reason):
        scan(text, PAGE)


def test_a_fence_knows_its_title_and_options() -> None:
    """A word inside a title is no option, and a class is no option."""
    info = '{.python title="a notest b" continuation .annotate hl_lines="1 2"}'
    (fence,) = scan(f"```{info}\nx\n```\n", PAGE)
    assert fence.language == "python"
    assert fence.title == "a notest b"
    assert fence.options == {"continuation"}
    assert fence.attributes["hl_lines"] == "1 2"


MODULE = '''"""A module.

```{.python}
assert 1
```
"""

TEXT = """
not a docstring of TEXT, but shown as one: fine
"""

LITERAL = f("""
```{.text}
```
""")


class Thing:
    """A thing."""

    @property
    def size(self):
        r"""A size.

        Examples:
            ```{.python}
            print("a\\\\nb")
            ```
        """
        return 1
'''


def test_docstrings_are_read_at_their_true_lines(tmp_path: Path) -> None:
    """Fences in docstrings, those of properties included, keep the line numbers of the module."""
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    lines = MODULE.split("\n")
    found = examples(path)
    assert [lines[example.fence.line - 1].strip() for example in found] == ["```{.python}"] * 2
    assert [lines[example.fence.line] for example in found] == [
        "assert 1",
        " " * 12 + 'print("a\\\\nb")',
    ]
    assert python_openings(path) == [example.fence.line for example in found]


def test_an_escaped_newline_in_a_docstring_is_refused(tmp_path: Path) -> None:
    """It would move every line below it, and tracebacks would lie."""
    path = tmp_path / "module.py"
    path.write_text('"""A.\\n\n```{.python}\n1\n```\n"""\n')
    with pytest.raises(FenceError, match=r"module\.py:1: an escaped newline"):
        examples(path)


# --- Spelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", ["", "    ", "> ", "- ", "1. ", ":   ", "[^1]: "])
@pytest.mark.parametrize(
    ("info", "remedy"),
    [
        ("python continuation", "write {.python continuation}"),
        ('python title="a b.py"', 'write {.python title="a b.py"}'),
        ('python notest reason="r"', 'write {.python notest reason="r"}'),
        ("{.no-copy .python}", "the options are"),
        ("{.annotate .python}", "write {.python .annotate}"),
        ("{.python .notest}", 'write {.python notest reason="…"}'),
        ("{.python .continuation}", "write {.python continuation}"),
        ("{.python  continuation}", "write {.python continuation}"),
        ("{ .python }", "write {.python}"),
        ("{.python title='a'}", "the options are"),
        ("{.Python}", "write {.python}"),
        ("PYTHON", "write {.python}"),
        ("py", "write {.python}"),
        ("python3", "write {.python}"),
        (".python", "write {.python}"),
        ("{.pycon}", "write {.python}"),
        ("ipython", "write {.python}"),
        ("{.python fixture:model}", "the options are"),
        ("{.python continuaton}", "the options are"),
        ("{.python", "write {.python}"),
    ],
)
def test_other_spellings_are_refused(tmp_path: Path, nested: str, info: str, remedy: str) -> None:
    """A spelling that a runner or the theme skips or breaks is an error that says the right one."""
    path = tmp_path / "page.md"
    path.write_text(f"{nested}```{info}\n{nested}x\n{nested}```\n")
    for read in (examples, python_openings):
        with pytest.raises(FenceError, match=re.escape(remedy)) as error:
            read(path)
        assert "page.md:1:" in str(error.value)


@pytest.mark.parametrize(
    "info",
    [
        "python",
        "{.python}",
        '{.python title="py" continuation}',
        '{.python notest reason="needs a GPU"}',
        '{.python .annotate hl_lines="1-2" linenums="1"}',
    ],
)
def test_the_right_spellings_are_python_for_both_readers(tmp_path: Path, info: str) -> None:
    """Scanner and census agree on what is Python."""
    path = tmp_path / "page.md"
    path.write_text(f"```python\nx\n```\n\n!!! note\n\n    ~~~{info}\n    x\n    ~~~\n")
    assert [example.fence.line for example in examples(path)] == python_openings(path) == [1, 7]
    assert count_python_fences(path) == 2


@pytest.mark.parametrize(
    "info", ["text", "{.pytb}", '{.text title="model.py"}', '{.bash title="python -m x"}', "happy"]
)
def test_other_languages_are_not_python(tmp_path: Path, info: str) -> None:
    """A title or a traceback does not make a block Python."""
    path = tmp_path / "page.md"
    path.write_text(f"```{info}\nx\n```\n")
    assert examples(path) == []
    assert count_python_fences(path) == 0


@pytest.mark.parametrize(
    "hidden", ["- ```{.python}\n  x\n  ```\n", "```{.text}\n```{.python}\nx\n```\n"]
)
def test_the_census_counts_what_the_scanner_cannot_run(tmp_path: Path, hidden: str) -> None:
    """A fence on a list marker's line, and one swallowed by an open fence, are not run: seen."""
    path = tmp_path / "page.md"
    path.write_text(hidden)
    assert count_python_fences(path) == 1
    try:
        found = examples(path)
    except FenceError:
        return
    assert found == []


# --- Continuations and outputs -------------------------------------------------------------------


def python(options: str = "", code: str = "x") -> str:
    """Write a Python fence."""
    return f"```{{.python{options}}}\n{code}\n```\n\n"


def output(text: str = "1", info: str = OUTPUT) -> str:
    """Write an output fence."""
    return f"```{info}\n{text}\n```\n\n"


NOT_RUN = ' notest reason="needs a GPU"'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (python(" continuation"), "no fence before it to continue"),
        (python(NOT_RUN) + python(" continuation"), "no fence before it to continue"),
        (python(" notest"), "notest and reason"),
        (python(' reason="r"'), "notest and reason"),
        (output(), "does not follow a Python fence"),
        (python() + "Prose.\n\n" + output(), "does not follow a Python fence"),
        (python() + "<!-- comment -->\n\n" + output(), "does not follow a Python fence"),
        (python() + output() + output(), "does not follow a Python fence"),
        (python(NOT_RUN) + output(), "does not follow a Python fence"),
        (python() + '    ```{.text title="Output"}\n    1\n    ```\n', "does not follow a Python"),
        (python() + output(info='text title="Output"'), "an output fence begins with"),
        (python() + output(info='{.console title="output"}'), "an output fence begins with"),
        (python() + output(info="{.text title='Output'}"), "an output fence begins with"),
    ],
)
def test_a_lost_continuation_or_output_is_refused(text: str, reason: str) -> None:
    """What would never be compared, or never run as it reads, is an error."""
    with pytest.raises(FenceError, match=reason):
        examples(PAGE, text)


def test_a_chain_runs_from_its_first_fence(tmp_path: Path) -> None:
    """A continuation continues the fence before it, nested or not; the next fence starts anew."""
    nested = '=== "Tab"\n\n    ```{.python continuation}\n    b\n    ```\n\n'
    text = python(code="a") + nested + python(NOT_RUN) + python(" continuation", "c") + python()
    chains = [[fence.code for fence in example.before] for example in examples(PAGE, text)]
    assert chains == [[], ["a\n"], [], ["a\n", "b\n"], []]


PRINTED = st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"]), max_size=30)


@given(st.lists(st.tuples(blocks(), PRINTED, PRINTED), max_size=3))
def test_outputs_are_written_where_they_are_read(drawn: list[tuple[Block, str, str]]) -> None:
    """Whatever is printed, at any depth: the page then says it, and says it once."""
    text = "\n\n".join(block.write() + "\n\nProse." for block, _, _ in drawn)
    for printed in ([first for _, first, _ in drawn], [second for _, _, second in drawn]):
        text = with_outputs(PAGE, text, printed)
        found = [example.expected for example in examples(PAGE, text)]
        assert found == [p if not p or p.endswith("\n") else p + "\n" for p in printed]
        assert with_outputs(PAGE, text, printed) == text
    silent = with_outputs(PAGE, text, [""] * len(drawn))
    assert silent == "\n\n".join(block.write() + "\n\nProse." for block, _, _ in drawn)


def test_an_output_that_a_docstring_cannot_hold_is_refused() -> None:
    """A backslash in a plain docstring would be read back as something else."""
    text = '"""A.\n\n```{.python}\nprint(chr(92) + "t")\n```\n"""\n'
    with pytest.raises(FenceError, match="cannot be written"):
        with_outputs(Path("module.py"), text, ["\\t\n"])


def test_a_place_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages name files as the author would type them."""
    monkeypatch.chdir(tmp_path)
    assert place(tmp_path / "docs" / "loop.md", 3) == "docs/loop.md:3"
    assert place(Path("/elsewhere/loop.md")) == "/elsewhere/loop.md"
