"""No measured number is typed: what speaks of a time or a factor is a marker, or has its reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab35_course.prose import check_prose, prose_sources, read_allowed, typed_numbers
from lab35_course.results import ROOT


def test_prose_of_the_course() -> None:
    """Every typed number of this repository is on the list, and the list has nothing else."""
    problems = list(check_prose(prose_sources(ROOT), read_allowed()))
    assert not problems, "\n".join(map(str, problems))


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("A token takes 62 µs here.", "62 µs"),
        ("It took 0.4s.", "0.4s"),
        ("The build needs 3-5 minutes.", "3-5 minutes"),
        ("Half a minute later it was there.", "Half a minute"),
        ("It waits some two or three seconds.", "two or three seconds"),
        ("This is 4.4 times faster.", "4.4 times"),
        ("This is 4.4× faster.", "4.4×"),
        ("It is twenty-fold.", "twenty-fold"),
        ("It needs 12 % of the time.", "12 %"),
        ("It needs twelve per cent.", "twelve per cent"),
        ("It writes 12,000 tokens per second.", "12,000 tokens per second"),
        ("It reads 80 GB/s.", "80 GB/s"),
        ("It is about twice as fast.", "twice"),
        ("The time doubled.", "doubled"),
        ("It takes a third of the step.", "a third of"),
        ("It is a quarter slower.", "a quarter slower"),
        ("![Bars; the longest is 280 µs.](a.svg)", "280 µs"),
        ("<figcaption>All took 5 ms.</figcaption>", "5 ms"),
        ("| lean | 246 µs |", "246 µs"),
        ("> !!! note: it took 5 ms", "5 ms"),
        ("It takes a couple of seconds.", "couple of seconds"),
        ("It takes several seconds.", "several seconds"),
        ("It takes dozens of seconds.", "dozens of seconds"),
        ("It takes five ms.", "five ms"),
        ("It takes 62 msec.", "62 msec"),
        ("It takes 5e-3 s.", "5e-3 s"),
        *((f"It takes 62{blank}µs.", "62 µs") for blank in "\u2009\u202f\xa0"),
        ("It takes 62&nbsp;µs.", "62 µs"),
        ("It takes 62&#160;µs.", "62 µs"),
        ("It takes 62\nµs here.", "62 µs"),
        ("It takes less than a second.", "than a second"),
        ("It takes a quarter of a second.", "a quarter of"),
        ("It takes ⅓ of the step.", "⅓ of"),
        ("It takes four fifths of the time.", "four fifths of"),
        ("It takes half of the time.", "half of the time"),
        ("It is an order of magnitude faster.", "order of magnitude"),
        ("It is two orders of magnitude faster.", "orders of magnitude"),
        ("It is faster by a factor of 28.", "factor of 28"),
        ("This is a speed-up of about 4.4.", "speed-up of about 4.4"),
        ("The time tripled.", "tripled"),
        ("It is 30 percentage points less.", "30 percentage points"),
        ("It writes 12k tok/s.", "12k tok/s"),
        ("It is 4.4 **times** faster.", "4.4 times"),
        ("It is <b>57</b> times faster.", "57 times"),
        ("It is `4.4` times faster.", "4.4 times"),
        ("It takes $62$ µs.", "62 µs"),
        ("It is $4.4\\times$ faster.", "4.4 ×"),
        ("It is 4.4&times; faster.", "4.4×"),
        ("<abbr title='5 ms'>soon</abbr>", "5 ms"),
        ("It is <!-- vaule: a b -->57<!-- /vaule --> times faster.", "57 times"),
        ("It takes 62 <!-- quoted --> µs.", "62 µs"),
        ("A marker <!-- value: a b -->1<!-- /value --> and 7 ms typed.", "7 ms"),
    ],
)
def test_typed_number_is_found(sentence: str, found: str) -> None:
    """Each spelling of a time or a factor is seen, in prose, captions and alternative texts."""
    assert [found] == [typed.found for typed in typed_numbers(sentence, "page.md")]
    assert 1 == len(list(check_prose({"page.md": sentence}, {})))


@pytest.mark.parametrize(
    "sentence",
    [
        "It is <!-- value: a b .1f -->4.4<!-- /value --> times faster.",
        "<!-- table: a -->\n\n| x | 246 µs |\n\n<!-- /table -->",
        "```{.text}\nit took 5 ms\n```",
        "Write `sleep(5 s)` for it.",
        "The old ones, 128 positions, chapter 3 and a second thread.",
        "The factor is $\\tfrac{1}{2} \\times 5 s$.",
        "See [there](https://example.org/5ms-is-57-times).",
        "Version 2.13 of 2026, at seed 1337.",
    ],
)
def test_what_is_no_typed_measurement_is_left_alone(sentence: str) -> None:
    """Markers, fences, code, formulas and addresses, and numbers without a unit, pass."""
    assert [] == list(typed_numbers(sentence, "page.md"))


def test_an_entry_allows_its_own_sentence_alone() -> None:
    """The list cannot grow stale or wide: each entry is needed, specific, and has a reason."""
    text = "Reading takes 40 µs here.\nWriting takes 50 µs here."
    allowed = {"page.md": {"takes 40 µs here": "the question of an exercise"}}
    (problem,) = check_prose({"page.md": text}, allowed)
    assert "page.md:2: '50 µs' is typed" in str(problem)

    for phrase, reason, told in (
        ("takes 60 µs here", "the question of an exercise", "no sentence needs"),
        ("40 µs", "the question of an exercise", "at least three words"),
        ("takes 40 µs here", "because", "at least three words"),
    ):
        problems = check_prose({"page.md": text}, {"page.md": {phrase: reason}})
        assert any(told in str(problem) for problem in problems)


def test_docstrings_hold_no_html() -> None:
    """The reference shows docstrings as Markdown, where an element or an address could act."""
    acts = r"<[a-zA-Z/!?][^>\n]*>?|\]\((?!https?://|[\w./-]*(?:#[\w.-]+)?\))[^)\n]*"
    code = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
    found = [
        f"{where}: {tag}"
        for where, text in prose_sources(ROOT).items()
        if where.endswith(".py")
        for tag in re.findall(acts, code.sub("", text))
    ]
    assert [] == found


def test_docstrings_are_prose_too() -> None:
    """The pages of the reference are made of docstrings, on the lines where these stand."""
    sources = prose_sources(ROOT)
    assert {"README.md", "docs/loop.md", "src/lab35/loop.py", "CHANGELOG.md"} <= sources.keys()
    assert "The loop: score, choose, append" in sources["src/lab35/loop.py"].splitlines()[0]
    assert "import torch\nfrom torch import" not in sources["src/lab35/loop.py"]


def test_help_and_titles_are_prose_too(tmp_path: Path) -> None:
    """What an option says about itself, and the description of the site, are read as well."""
    module = tmp_path / "src" / "lab35" / "cli.py"
    module.parent.mkdir(parents=True)
    module.write_text('x = Option(5,\n    help="Takes 5 ms, "\n    "or 4.4 times less.")\n')
    (tmp_path / "mkdocs.yml").write_text("site_description: 57 times faster\n")
    problems = check_prose(prose_sources(tmp_path), {})
    assert ["mkdocs.yml:1", "src/lab35/cli.py:2", "src/lab35/cli.py:2"] == [
        problem.where for problem in problems
    ]
