"""The scanner finds every fence, the census finds the same ones, and nothing else passes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lab35_course.fence_census import problems
from lab35_course.fence_rules import refusals
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
NOTEST: list[tuple[str, str]] = [
    ("CONTRIBUTING.md", "a sketch: the names are those of a measurement module"),
]

# Every fence that is typed, neither run nor compared, commands aside: its page, its language and
# the beginning of its code. Adding one is a decision too: is it true, and will it stay true?
TYPED = [
    ("CONTRIBUTING.md", "markdown", '```{.python title="What it shows"}'),
    ("CONTRIBUTING.md", "text", "<!-- table: cache.example -->"),
    ("CONTRIBUTING.md", "text", "It is <!-- value: cache.example ratio.median .1f -->"),
    ("docs/about/numbers.md", "html", "<!-- table: loop.cost -->"),
    (
        "docs/about/numbers.md",
        "html",
        "The model has <!-- value: training.record parameters , -->",
    ),
    ("docs/cli.md", "text", "> Sherlock Holmes"),
]


# --- The course's own sources --------------------------------------------------------------------


def test_every_python_fence_is_run_or_declared(pytestconfig: pytest.Config) -> None:
    """The census: a fence that a reader sees is collected by pytest, or says why it is not run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    command += ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command += [path for path in pytestconfig.getini("testpaths") if path != "tests"]
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


def test_fences_that_are_typed_are_listed() -> None:
    """No output, log or table is typed in all but name: whatever is not run is on the list."""
    typed = [
        (
            path.relative_to(ROOT).as_posix(),
            fence.language,
            re.match(r".*?(?:-->|$)", fence.code, re.MULTILINE)[0],
        )
        for path in sources(ROOT)
        if path.suffix == ".md"
        for fence in scan(path.read_text(encoding="utf-8"), path)
        if not (fence.is_python or fence.info == OUTPUT or fence.language in ("bash", "sh"))
    ]
    assert sorted(TYPED) == sorted(typed)


def test_no_other_file_holds_fences() -> None:
    """Every tracked file with a fence is a source, so that none is left out by its place."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone: no list of files")
    known = {path.relative_to(ROOT).as_posix() for path in sources(ROOT)}
    others = [
        name
        for name in set(listed.stdout.split()) - known
        if (ROOT / name).is_file()
        and re.search(rb"(?m)^[ \t>]*(?:```|~~~)", (ROOT / name).read_bytes())
    ]
    # A test writes fences in its strings; in a docstring, nothing would run them.
    tests = [name for name in others if re.fullmatch(r"tests/\w+\.py", name)]
    assert [] == sorted(set(others) - set(tests))
    assert [] == [name for name in tests if examples(ROOT / name)]


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
        ("- An item", "    "),
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
x = 1
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
        "x = 1",
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
    "info", ["text", "{.json}", '{.text title="model.py"}', '{.bash title="python -m x"}', "sh"]
)
def test_other_languages_are_not_python(tmp_path: Path, info: str) -> None:
    """A title or a traceback does not make a block Python."""
    path = tmp_path / "page.md"
    path.write_text(f"```{info}\nmake\n```\n")
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


@pytest.mark.parametrize("indent", ["", "    ", "> "])
@pytest.mark.parametrize(
    ("info", "code"),
    [
        *((info, "x") for info in ("{.sage}", "{.starlark}", "{.numpy}", "{.pytb}", "{.console}")),
        *((info, "x") for info in ("sage", "bazel", "happy", "{.cython}", "{.mermaid}")),
        *((info, "x") for info in ("text x", "{.text .python}", "{.text lang='python'}")),
        ("{.text #id}", "x"),
        ("{.text}", ">>> 1 + 1\n2"),
        ("{.text}", "In [1]: 1 + 1"),
        ("{.text}", "import torch"),
        ("{.text}", "from lab35 import generate"),
        ("{.text}", "def f(x):\n    return x"),
        ("{.text}", "x = 1"),
        ("text", "assert f(1) == 2"),
        ("{.html}", "  print('a')"),
        ("{.json}", ">>> 1"),
        ("{.sh}", "lab35 info\n875264 parameters"),
        ("{.sh}", "python - <<EOF\nmake\nEOF"),
        ("{.bash}", ".venv/bin/python -c 'print(1)'"),
        ("{.sh}", "python3 <<EOF"),
    ],
)
def test_other_languages_and_code_in_disguise_are_refused(
    indent: str, info: str, code: str
) -> None:
    """A language outside the list, or Python under another name, would be shown and never run."""
    lines = [f"```{info}", *code.split("\n"), "```", ""]
    with pytest.raises(FenceError, match=r"page\.md:\d+: .*(begins|is Python|is no command)"):
        examples(PAGE, "\n".join(indent + line for line in lines))


def test_a_prompt_in_a_docstring_is_refused(tmp_path: Path) -> None:
    """A doctest that nothing runs."""
    path = tmp_path / "module.py"
    path.write_text('"""A.\n\n    >>> 1 + 1\n    3\n"""\n')
    with pytest.raises(FenceError, match=r"module\.py:3: a prompt"):
        examples(path)


@pytest.mark.parametrize("indent", [" ", "   ", "      "])
def test_an_indentation_that_markdown_does_not_take_is_refused(indent: str) -> None:
    """Three spaces continue an item for other readers, and end the list on the site."""
    lines = ["1. One", "", "```{.python}", "x", "```", "", "2. Two"]
    text = "\n".join(indent + line if 1 < row < 5 else line for row, line in enumerate(lines))
    with pytest.raises(FenceError, match="multiple of four"):
        examples(PAGE, text)


# --- What the code may not do --------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import numpy",
        "import torch, pytest",
        "def f():\n    from lab35_course.results import ROOT",
        "from . import x",
        "__import__('numpy')",
        "import importlib\nimportlib.import_module('numpy')",
        "exec('import numpy')",
        "import sys\nsys.modules['numpy']",
        "if __name__ == '__main__':\n    assert 1 == 2",
        "from typing import TYPE_CHECKING",
        "import typing\nif typing.TYPE_CHECKING:\n    x = 1",
        "if __debug__:\n    x = 1",
        "if False:\n    x = 1",
        "while 0:\n    x = 1",
        "assert (1 == 2, 'a tuple')",
        "assert 'a string'",
        "assert 1 == 2 or True",
        "assert x == x",
        "assert x == x == y",
        "assert (x == x).all()",
        "assert not (x != x)",
        "assert x or not x",
        "assert all([])",
        "assert not None",
        "assert len([1]) == 1",
        "assert 1 + 1 == 2",
        "assert y and True",
        "assert len(x) >= 0",
        "import torch\nassert torch.equal(x, x)",
        "assert x.allclose(x)",
        "import torch\ntorch.testing.assert_close(x, x)",
        "exit()",
        "quit(0)",
        "try:\n    assert 1 == 2\nexcept:\n    pass",
        "try:\n    assert 1 == 2\nexcept (ValueError, Exception):\n    pass",
        "import contextlib\nwith contextlib.suppress(AssertionError):\n    assert 1 == 2",
    ],
)
def test_code_that_breaks_the_rules_or_hides_is_refused(code: str) -> None:
    """The rule for imports, and the ways to write a check that cannot fail, at any depth."""
    with pytest.raises(FenceError):
        examples(PAGE, python(code=code))


@pytest.mark.parametrize(
    "code",
    [
        "assert write(0) == write(0)",
        "import torch\nassert torch.equal(write(0), write(0))",
        "assert x == y or y == z",
        "assert not x",
        "assert 1 == 2",
        "assert len(x) >= 1",
        "assert all(f(y) for y in x)",
    ],
)
def test_an_assertion_that_can_fail_is_let_through(code: str) -> None:
    """A function that is called twice may answer differently: that is what is asserted."""
    assert examples(PAGE, python(code=code))


def test_some_pages_may_import_more() -> None:
    """The page about the numbers shows the course's own tools; another page may not."""
    text = python(code="import lab35_course.results")
    assert examples(ROOT / "docs" / "about" / "numbers.md", text)
    with pytest.raises(FenceError, match="lab35_course"):
        examples(ROOT / "docs" / "loop.md", text)


# --- What the site shows -------------------------------------------------------------------------

NUMBERED = "1. One\n\n{0}```{{.text}}\n{0}a\n{0}```\n\n2. Two\n"


def test_what_the_site_shows_as_written_is_no_problem() -> None:
    """Fences in containers, titles, lists and inline code are what they seem."""
    text = (
        python()
        + NUMBERED.format("    ")
        + '!!! note\n\n    ```{.text title="a"}\n    b\n    ```\n'
    )
    assert [] == list(problems(text + "\nSome `code`.\n", PAGE))


@pytest.mark.parametrize(
    "text",
    [
        '<pre><code class="language-python">assert 1 == 2</code></pre>',
        "<pre>x</pre>",
        "<div><pre>\nx\n</pre></div>",
        "Prose.\n\n    assert 1 == 2\n",
        "Prose.\n\n\tassert 1 == 2\n",
        "- item\n\n        assert 1 == 2\n",
        "!!! note\n\n        assert 1 == 2\n",
        "> quote\n>\n>     assert 1 == 2\n",
        "`#!python assert 1 == 2`",
        "`:::sage assert 1 == 2`",
        "`x = 1\nassert x == 2`",
        "<samp>2</samp>",
        "<textarea>x</textarea>",
        '<p style="white-space: pre">x</p>',
        '<div class="language-python highlight"><pre>x</pre></div>',
        "<table><tr><td>`x`</td></tr></table>\n\n    y = 1\n",
        NUMBERED.format("   "),
        NUMBERED.format(""),
        "1. One\n\n   More.\n\n2. Two\n",
        "<code>x = 1<br>assert x == 2</code>",
    ],
)
def test_code_in_other_clothes_and_broken_lists_are_found(text: str) -> None:
    """Code that the site shows and no fence holds, or numbers that begin again, are problems."""
    assert list(problems(text, PAGE))


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=alert(1)>",
        "| a |\n|--|\n| <img src=x onerror=alert(1)> |",
        '!!! note "<img src=x onerror=alert(1)>"\n\n    Text.',
        "# <img src=x onerror=alert(1)>",
        "[a](javascript:alert(1))",
        "[a](JavaScript:alert(1))",
        "[a]\n\n[a]: javascript:alert(1)",
        "<a href=' java&#115;cript:alert(1)'>a</a>",
        "[a](data:text/html,x)",
        "![a](//example.org/a.png)",
        "<p onclick='x()'>a</p>",
        "# A title {: onclick='x()' }",
        "<details open ontoggle='x()'>a</details>",
        "<svg onload='x()'></svg>",
        "<svg><script>x()</script></svg>",
        *(f"<{tag}>x</{tag}>" for tag in ("button", "form", "iframe", "object", "style", "video")),
        *(f"<{tag}>" for tag in ("base href='/'", "embed src=x", "link href=x", "meta content=x")),
        "<p style='display: none'>a</p>",
        "<p hidden>a</p>",
        "<input type='text' value='57'>",
    ],
)
def test_what_acts_fetches_or_hides_is_found(text: str) -> None:
    """A page shows text, pictures and links: no other element, attribute or kind of address."""
    assert list(problems(text + "\n", PAGE))


@pytest.mark.parametrize(
    "text",
    [
        "A [link](https://example.org), <https://example.org>, [one](loop.md#a) and `code`.",
        "| a | b |\n|:-:|--:|\n| 1 | 2 |",
        '=== "A tab"\n\n    Text.\n\n=== "Another"\n\n    More.',
        '??? note "Closed"\n\n    Text.[^1]\n\n[^1]: A note.',
        "Two\n:   terms, and $x^2$\n\n$$\nx\n$$",
        "- [x] done",
        '![A shot](assets/shot.png "A title"){ width=300 }',
        "<figure markdown='span'>\nText.\n<figcaption>A <b>caption</b></figcaption>\n</figure>",
    ],
)
def test_what_markdown_is_made_of_is_let_through(text: str) -> None:
    """Whatever the site's extensions make of plain Markdown is on the list of elements."""
    assert [] == list(problems(text + "\n", PAGE))


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
        (python() + output(info='{.text title="It prints"}'), "read as what it prints"),
        (python() + output(info="{.json}"), "read as what it prints"),
        (python(NOT_RUN) + output(info="text"), "read as what it prints"),
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
    # Words of the sources are drawn too, such as `compile`, which no fence may use.
    assume(not any(list(refusals(block.code, PAGE)) for block, _, _ in drawn))
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
