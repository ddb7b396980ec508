"""The runner and `make outputs`, held against pages that are right, wrong, and awkward."""

from __future__ import annotations

import runpy
import subprocess
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
    """Run a page's fences with pytest, in this process; what the site shows is not looked at."""
    page = pytester.mkdir("docs") / "page.md"
    page.write_text(text)
    plugins = ("lab35_course.fence_plugin", "no:cacheprovider", "no:hypothesispytest")
    chosen = [option for plugin in plugins for option in ("-p", plugin)]
    return pytester.runpytest_inprocess(*chosen, "--markdown-docs", *(options or ("-k", "line")))


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
    result.assert_outcomes(passed=1, deselected=2)


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
    body = fence("assert [] == [1]", indent="        ")
    head = 'class Thing:\n    @property\n    def size(self):\n        """A size.\n\n'
    (package / "thing.py").write_text(f'{head}{body}        """\n')
    result = run_page(pytester, fence("pass"))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*thing.py:6: the fence raised*", "*thing.py*, line 7, in*"])


def test_other_files_are_left_alone(pytester: pytest.Pytester) -> None:
    """Only the sources of the course are run."""
    pytester.makepyfile(
        test_x=f'def test_x():\n    """A test.\n\n{fence("1 / 0", indent="    ")}    """\n'
    )
    (pytester.mkdir("elsewhere") / "notes.md").write_text(fence("1 / 0"))
    run_page(pytester, fence("pass"), "-k", "line or test_x").assert_outcomes(passed=2)


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
    log = pytester.path / "log"
    code = f"with open({str(log)!r}, 'a') as log:\n    log.write('x')\nraise TypeError('once')"
    result = run_page(pytester, fence(code))
    result.assert_outcomes(failed=1)
    assert log.read_text() == "x"
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


# --- Isolation -----------------------------------------------------------------------------------

# What a fence could leave behind, and how another would see it.
LEFT = {
    "an attribute": ("GPTConfig.head_dim = 7", "GPTConfig().head_dim == 32"),
    "a patch": ("torch.rand = len", "torch.rand(1).shape == (1,)"),
    "a default device": ("torch.set_default_device('meta')", "torch.ones(1).device.type == 'cpu'"),
    "a dtype": ("torch.set_default_dtype(torch.float64)", "torch.ones(1).dtype == torch.float32"),
    "grad mode": ("torch.set_grad_enabled(False)", "torch.is_grad_enabled()"),
    "inference": (
        "mode = torch.inference_mode()\nmode.__enter__()",
        "not torch.is_inference_mode_enabled()",
    ),
    "determinism": (
        "torch.use_deterministic_algorithms(True)",
        "not torch.are_deterministic_algorithms_enabled()",
    ),
    "threads": ("torch.set_num_threads(2)", "torch.get_num_threads() == 1"),
    "torch's seed": ("torch.manual_seed(5)", "torch.initial_seed() != 5"),
    "the environment": ("os.environ['LEFT'] = '1'", "'LEFT' not in os.environ"),
    "a folder": ("os.chdir('/')", "os.getcwd() != '/'"),
    "a file": ("open('left', 'w').close()", "not os.path.exists('left')"),
    "the path": ("sys.path.insert(0, '/left')", "'/left' not in sys.path"),
    "a filter": ("warnings.simplefilter('error')", "warnings.filters[0][0] != 'error'"),
    "a signal": (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "signal.getsignal(signal.SIGTERM) != signal.SIG_IGN",
    ),
    "a locale": ("decimal.getcontext().prec = 3", "decimal.getcontext().prec == 28"),
    "standard output": ("sys.stdout = None", "sys.stdout is not None"),
}
IMPORTS = "import decimal, os, signal, sys, warnings\nimport torch\nfrom lab35 import GPTConfig\n"


@pytest.mark.parametrize(("left", "clean"), LEFT.values(), ids=LEFT)
def test_what_a_fence_leaves_behind_reaches_no_other(tmp_path: Path, left: str, clean: str) -> None:
    """The next fence finds everything as it was, the tests too, and a continuation as it is."""
    page = tmp_path / "page.md"
    dirty = fence(f"{IMPORTS}{left}\nassert not ({clean})")
    if left.startswith("torch.rand"):
        dirty = fence(f"{IMPORTS}{left}\nassert torch.rand is len")
    page.write_text(dirty + fence(f"{IMPORTS}assert {clean}"))
    before = Path.cwd(), torch.get_default_dtype(), torch.get_rng_state().sum()
    runner = FenceRunner()
    for example in examples(page):
        runner.check(example)
    assert before == (Path.cwd(), torch.get_default_dtype(), torch.get_rng_state().sum())
    assert torch.is_grad_enabled()


def test_the_folder_of_a_fence_is_removed(tmp_path: Path) -> None:
    """A file that a fence writes where it stands is gone when its chain is over."""
    page = tmp_path / "page.md"
    page.write_text(fence("import os\nopen('left', 'w').close()\nprint(os.getcwd())"))
    runner = FenceRunner()
    folder = Path(runner.run(examples(page)[0]).strip())
    assert (folder / "left").exists()
    runner.close()
    assert not folder.exists()


def test_a_continuation_keeps_the_state_of_its_chain(tmp_path: Path) -> None:
    """A seed set in one fence counts in the next, whether or not the chain was just run."""
    page = tmp_path / "page.md"
    first = "import torch\ntorch.manual_seed(5)\ntorch.set_grad_enabled(False)"
    draw = "print(torch.rand(1).item(), torch.is_grad_enabled())"
    page.write_text(fence(first) + fence(draw, " continuation"))
    first, second = examples(page)
    runner = FenceRunner()
    runner.run(first)
    torch.rand(1)  # another test draws in between
    assert runner.run(second) == FenceRunner().run(second)


# --- Fences that would pass, and must not --------------------------------------------------------

HIDDEN = {
    "os._exit": ("import os\nos._exit(0)", "ended its process"),
    "abort": ("import os\nos.abort()", "ended its process"),
    "kill": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended its process"),
    "sys.exit": ("import sys\nsys.exit(0)", "raised SystemExit"),
    "SystemExit": ("raise SystemExit", "raised SystemExit"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    "SkipTest": ("import unittest\nraise unittest.SkipTest('no')", "raised SkipTest"),
    "fork": ("import os\nif os.fork():\n    os.wait()\n    raise ValueError", "raised ValueError"),
    "os.write": ("import os\nos.write(1, b'2')", r"but no \{\.text"),
    "sys.__stdout__": ("import sys\nsys.__stdout__.write('2')", r"but no \{\.text"),
    "subprocess": ("import subprocess\nsubprocess.run(['echo', '2'])", r"but no \{\.text"),
    "logging": (
        "import logging, sys\nlogging.basicConfig(stream=sys.stdout)\nlogging.error('2')",
        r"but no \{\.text",
    ),
    "a thread": (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()",
        "hides an error",
    ),
    "a thread left": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()",
        "still runs",
    ),
    "a finalizer": ("class A:\n    def __del__(self):\n        1 / 0\nA()", "hides an error"),
    "a task": (
        "import asyncio\nasync def fail():\n    1 / 0\n"
        "async def main():\n    asyncio.ensure_future(fail())\n    await asyncio.sleep(0)\n"
        "asyncio.run(main())",
        "hides an error",
    ),
    "a coroutine": ("async def f():\n    1 / 0\nf()", "hides an error"),
    "a warning": ("import warnings\nwarnings.warn('no')", "hides an error"),
    "a branch": ("x = 1\nif x == 2:\n    assert x == 3", "line 4: .* never reached"),
    "an empty loop": ("for x in []:\n    assert x == 3", "never reached"),
    "a function": ("def test():\n    assert [] == [1]", "never reached"),
    "caught": (
        "from unittest import TestCase\nwith TestCase().assertRaises(AssertionError):\n"
        "    assert [] == [1]",
        "failed, and went on",
    ),
    "finally": (
        "def f():\n    try:\n        assert [] == [1]\n    finally:\n        return\nf()",
        "failed, and went on",
    ),
    "a syntax warning": ("x = 1 is 1", "raised SyntaxError"),
}


@pytest.mark.parametrize(("code", "reason"), HIDDEN.values(), ids=HIDDEN)
def test_a_fence_that_hides_or_ends_the_run_fails(tmp_path: Path, code: str, reason: str) -> None:
    """Nothing passes because the process ended, the output went elsewhere, or nobody looked."""
    page = tmp_path / "page.md"
    page.write_text(fence(code))
    with pytest.raises(FenceFailure, match=reason):
        FenceRunner().check(examples(page)[0])


def test_what_any_means_writes_is_compared(tmp_path: Path) -> None:
    """Output by print, by a descriptor and by a child stands in the order in which it came."""
    page = tmp_path / "page.md"
    code = "import os, subprocess\nprint(1)\nos.write(1, b'2\\n')\nsubprocess.run(['echo', '3'])"
    page.write_text(fence(f"{code}\nprint(4)", printed="1\n2\n3\n4"))
    FenceRunner().check(examples(page)[0])


def test_a_page_that_shows_other_code_fails(pytester: pytest.Pytester) -> None:
    """Naming a page is enough to find code on it that is no fence."""
    result = run_page(pytester, fence("pass") + "    assert 1 == 2\n", "-k", "line or shown")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["docs/page.md: the site shows code that is no fence*"])


@pytest.mark.parametrize("switch", ["-O", "-OO"])
def test_a_run_without_assertions_is_refused(tmp_path: Path, switch: str) -> None:
    """With -O or PYTHONOPTIMIZE every assertion would vanish, those of the tests too."""
    command = [sys.executable, switch, "-m", "pytest", "-p", "lab35_course.fence_plugin"]
    run = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 4
    assert "switch every assertion off" in run.stderr


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
