"""The runner and `make outputs`, held against pages that are right, wrong, and awkward."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lab35_course.fence_runner import FenceFailure, FenceRunner
from lab35_course.fences import OUTPUT, examples

SCRIPT = Path(__file__).parents[1] / "scripts" / "outputs.py"


def fence(code: str, options: str = "", printed: str | None = None, indent: str = "") -> str:
    """Write a Python fence, and the output fence that follows it."""
    blocks = [f"```{{.python{options}}}\n{code}\n```\n"]
    if printed is not None:
        blocks.append(f"```{OUTPUT}\n{printed}\n```\n")
    lines = "\n".join(blocks).split("\n")
    return "\n".join(indent + line if line else "" for line in lines) + "\n"


def run_page(pytester: pytest.Pytester, text: str, *options: str) -> pytest.RunResult:
    """Run a page's fences with pytest, in this process."""
    page = pytester.mkdir("docs") / "page.md"
    page.write_text(text)
    plugins = ("lab35_course.fence_plugin", "no:cacheprovider", "no:hypothesispytest")
    chosen = [option for plugin in plugins for option in ("-p", plugin)]
    return pytester.runpytest_inprocess(*chosen, "--markdown-docs", *options)


# --- What passes ---------------------------------------------------------------------------------


def test_a_page_in_order_passes(pytester: pytest.Pytester) -> None:
    """Fences stand alone or continue, at any depth, and print what the page says."""
    text = (
        fence("x = 1\nprint(x)", printed="1")
        + '=== "Tab"\n\n'
        + fence("x += 1\nprint(x)", " continuation", "2", indent="    ")
        + fence("x += 1\nprint(x)", " continuation", "3")
        + fence("assert 'x' not in globals()")
        + fence("1 / 0", ' notest reason="shown, not run"')
    )
    result = run_page(pytester, text)
    result.assert_outcomes(passed=4)


def test_a_continuation_runs_alone_with_what_it_continues(pytester: pytest.Pytester) -> None:
    """Selecting one fence of a chain runs the ones before it first."""
    text = fence("x = 1\nprint(x)", printed="1") + fence("print(x)", " continuation", "1")
    result = run_page(pytester, text, "-k", "line:10")
    result.assert_outcomes(passed=1, deselected=1)


def test_each_fence_of_a_chain_runs_once(tmp_path: Path) -> None:
    """In the page's order a chain costs each fence once, not once per continuation."""
    log = tmp_path / "log"
    once = f"open({str(log)!r}, 'a').write('x')"
    page = tmp_path / "page.md"
    page.write_text(fence(once) + fence(once, " continuation") + fence(once, " continuation"))
    runner = FenceRunner()
    for example in examples(page):
        runner.run(example)
    assert log.read_text() == "xxx"
    runner.run(examples(page)[-1])  # again, out of order: the whole chain
    assert log.read_text() == "xxxxxx"


def test_a_class_of_a_fence_can_be_pickled(pytester: pytest.Pytester) -> None:
    """Dataclasses with postponed annotations and pickle find the fence's module, also later on."""
    code = (
        "from __future__ import annotations\n"
        "import pickle\n"
        "from dataclasses import KW_ONLY, dataclass\n"
        "@dataclass\n"
        "class Point:\n"
        "    x: int\n"
        "    _: KW_ONLY\n"
        "    y: int = 2\n"
        "saved = pickle.dumps(Point(1))"
    )
    again = "assert pickle.loads(saved) == Point(1, y=2)"
    result = run_page(pytester, fence(code) + fence(again, " continuation"))
    result.assert_outcomes(passed=2)
    assert "fence" not in sys.modules


def test_docstrings_are_run(pytester: pytest.Pytester) -> None:
    """Fences in docstrings run, those of properties too, and failures name the module's line."""
    package = pytester.mkdir("src") / "lab35"
    package.mkdir()
    body = fence("assert False", indent="        ")
    head = 'class Thing:\n    @property\n    def size(self):\n        """A size.\n\n'
    (package / "thing.py").write_text(f'{head}{body}        """\n')
    result = run_page(pytester, fence("pass"))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*thing.py:6: the fence raised*", "*thing.py*, line 7, in*"])


def test_other_files_are_left_alone(pytester: pytest.Pytester) -> None:
    """Only the sources of the course are run; a test's own docstrings are not."""
    pytester.makepyfile(
        test_x=f'def test_x():\n    """A test.\n\n{fence("1 / 0", indent="    ")}    """\n'
    )
    (pytester.path / "CHANGELOG.md").write_text(fence("1 / 0"))
    run_page(pytester, fence("pass")).assert_outcomes(passed=2)


# --- What fails ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    ["", "!!! note", "??? note", '=== "Tab"', "- item", "1. item", ":   text", "[^1]: text"],
)
def test_a_nested_fence_that_raises_fails(pytester: pytest.Pytester, header: str) -> None:
    """No container hides a fence from the run."""
    body = fence("y = 1\nassert y == 2, 'not two'", indent="    " if header else "")
    result = run_page(pytester, f"{header}\n\n{body}")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "docs/page.md:3: the fence raised AssertionError",
            "*page.md*, line 5, in <module>",
            "    assert y == 2, 'not two'",
            "AssertionError: not two",
        ]
    )


@pytest.mark.parametrize(
    ("printed", "code", "messages"),
    [
        ("1", "print(2)", ["*prints something else*", "-1", "+2", "`make outputs` rewrites it."]),
        ("1", "print('1 ')", ["*prints something else*", "-1", "+1 "]),
        ("1", "print('1\\n')", ["*prints something else*"]),
        ("1", "pass", ["*prints nothing*", "-1", "`make outputs` removes it."]),
        (None, "print(1)", ['*but no {.text title="Output"} fence follows', "+1", "*adds it."]),
    ],
)
def test_another_output_fails(
    pytester: pytest.Pytester, printed: str | None, code: str, messages: list[str]
) -> None:
    """A page that does not say what its fence prints fails, with both in the message."""
    result = run_page(pytester, fence(code, printed=printed))
    result.assert_outcomes(failed=1)
    lines = [message.replace("[", "[[]") for message in messages]
    result.stdout.fnmatch_lines(lines)


def test_a_type_error_is_run_once(pytester: pytest.Pytester) -> None:
    """The stock runner tries a fence again after a TypeError, and the second try may pass."""
    code = "import builtins\nbuiltins.tries = getattr(builtins, 'tries', 0) + 1\n"
    code += "if builtins.tries == 1:\n    raise TypeError('once')"
    result = run_page(pytester, fence(code) + fence("del __import__('builtins').tries"))
    result.assert_outcomes(failed=1, passed=1)
    assert result.stdout.str().count("the fence raised TypeError") == 1 + 1  # report and summary


def test_output_does_not_leak(pytester: pytest.Pytester) -> None:
    """What a fence prints goes to the comparison; what it complains about goes to the report."""
    text = fence("import sys\nprint('out')\nprint('err', file=sys.stderr)", printed="out")
    result = run_page(pytester, text + fence("print('seen')\nraise SystemExit(3)"))
    result.assert_outcomes(passed=1, failed=1)
    assert "err" not in result.stderr.str()
    assert "out" not in result.stdout.str().splitlines()
    result.stdout.fnmatch_lines(["*raised SystemExit*", "--- stdout before that ---", "seen"])


def test_a_syntax_error_is_told_with_its_line(pytester: pytest.Pytester) -> None:
    """A fence that does not compile names the page and the line."""
    result = run_page(pytester, fence("x = 1\ny = = 2"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*page.md*, line 3", "SyntaxError: *"])


def test_what_continues_a_broken_fence_fails_with_it(pytester: pytest.Pytester) -> None:
    """A continuation never passes on half of what it continues."""
    text = fence("x = 1\n1 / 0") + fence("assert x", " continuation")
    run_page(pytester, text).assert_outcomes(failed=2)


def test_a_second_try_starts_the_chain_anew(tmp_path: Path) -> None:
    """What a failed continuation left behind does not help it when it is run again."""
    page = tmp_path / "page.md"
    page.write_text(fence("n = 0") + fence("n += 1\nassert n == 2", " continuation"))
    first, second = examples(page)
    runner = FenceRunner()
    runner.run(first)
    for _ in range(2):
        with pytest.raises(FenceFailure):
            runner.run(second)


@pytest.mark.parametrize(
    "opening", ["python continuation", "{.no-copy .python}", "{.Python}", "py"]
)
def test_a_fence_that_would_be_skipped_stops_the_run(
    pytester: pytest.Pytester, opening: str
) -> None:
    """A spelling that the stock collection skips is an error of collection here."""
    result = run_page(pytester, f"```{opening}\n1 / 0\n```\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["docs/page.md:1: *is not how a Python fence begins*"])


# --- Global state --------------------------------------------------------------------------------

STATE = """import torch
torch.manual_seed(5)
torch.rand(3)
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
torch.set_num_threads(torch.get_num_threads() + 1)"""


@pytest.mark.parametrize("ending", ["", "\n1 / 0"])
def test_torchs_global_state_survives_a_fence(tmp_path: Path, ending: str) -> None:
    """Generator, default dtype, grad mode and threads are the same before and after."""
    page = tmp_path / "page.md"
    page.write_text(fence(STATE + ending))
    rng, threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        FenceRunner().run(examples(page)[0])
    except FenceFailure:
        assert ending
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == threads


def test_a_continuation_keeps_the_state_of_its_chain(tmp_path: Path) -> None:
    """A seed set in one fence counts in the next, whether or not the chain was just run."""
    page = tmp_path / "page.md"
    draw = "print(torch.rand(1).item(), torch.is_grad_enabled())"
    page.write_text(fence(STATE) + fence(draw, " continuation"))
    first, second = examples(page)
    runner = FenceRunner()
    runner.run(first)
    torch.rand(1)  # another test draws in between
    assert runner.run(second) == FenceRunner().run(second)


# --- make outputs --------------------------------------------------------------------------------


Outputs = Callable[..., tuple[int, str]]


@pytest.fixture
def outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Outputs:
    """Run the script on files in an empty folder; give its exit code and what it says."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


def test_outputs_are_rewritten_in_place(outputs: Outputs, tmp_path: Path) -> None:
    """The script changes, adds and removes outputs, keeps the rest, and then has nothing to do."""
    page = tmp_path / "page.md"
    right = fence("print('a\\n\\n  b')", printed="a\n\n  b") + "!!! note\n\n"
    right += fence("print(2)", printed="2", indent="    ") + fence("x = 1") + "The end.\n"
    wrong = fence("print('a\\n\\n  b')", printed="old") + "!!! note\n\n"
    wrong += fence("print(2)", indent="    ") + fence("x = 1", printed="stale") + "The end.\n"
    page.write_text(wrong)

    code, told = outputs("--check", page)
    assert code == 1
    assert "\n-stale\n" in told
    assert page.read_text() == wrong

    assert outputs(page) == (0, "page.md: rewritten\n")
    assert page.read_text() == right
    assert outputs("--check", page) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


def test_a_page_with_a_broken_fence_is_left_as_it_is(outputs: Outputs, tmp_path: Path) -> None:
    """One page's error is told and changes nothing there; the other pages are still written."""
    broken, misspelled, good = (tmp_path / name for name in ("broken.md", "odd.md", "good.md"))
    broken.write_text(fence("print(1)") + fence("1 / 0"))
    misspelled.write_text("```py\n1\n```\n")
    good.write_text(fence("print(1)"))
    code, told = outputs(broken, misspelled, good)
    assert code == 1
    assert "broken.md:5: the fence raised ZeroDivisionError" in told
    assert "odd.md:1: 'py' is not how a Python fence begins" in told
    assert broken.read_text() == fence("print(1)") + fence("1 / 0")
    assert good.read_text() == fence("print(1)", printed="1")


def test_a_missing_page_is_bad_usage(outputs: Outputs, tmp_path: Path) -> None:
    """A mistyped name is one clear line and exit code 2."""
    code, told = outputs("none.md")
    assert code == 2
    assert "none.md" in told
