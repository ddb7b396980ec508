"""The numbers of the course agree with their results, and a fault in any of them is found."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import markdown_it
import pytest
import torch
from typer.testing import CliRunner

from lab35.timing import spread
from lab35_course import headlines
from lab35_course.figure import Drawing, discover
from lab35_course.markers import Sources, check, lookup, parse, render, shown, write_pages
from lab35_course.plain import Markdown
from lab35_course.results import (
    ROOT,
    Data,
    Measurement,
    Registry,
    Result,
    Size,
    Table,
    collect,
    invariant,
    measurement,
    noise,
    read_results,
    shape,
    table,
    write_result,
)


def test_numbers_of_the_course() -> None:
    """Every marker, result, table and figure of this repository agrees with its measurement."""
    problems = check(ROOT, Registry.discover(), discover())
    assert not problems, "\n".join(map(str, problems))


# A course of one page, with an exact and a measured result, in which each fault can be planted.

PAGE = """# Toys

There are <!-- value: toy.count boxes.0.toys , --><!-- /value --> toys.

<!-- table: toy.count -->
<!-- /table -->

It took <!-- value: toy.time rounds.median .1f --><!-- /value --> seconds, as the next line says.

    not a marker, and no fence either

`<!-- value: no.such result -->` is text, and so is a fence:

```{.html}
<!-- table: no.such -->
```
"""


@measurement("toy.count", kind="exact")
def count(size: Size) -> Data:
    """Count toys in boxes."""
    return {"boxes": [{"colour": "red", "toys": 1234}, {"colour": "blue", "toys": 5}]}


@measurement("toy.time", kind="measured", seed=3, threads=1, engine="the toy engine")
def timing(size: Size) -> Data:
    """Stand in for a timing: a random number, and a list whose length depends on the size."""
    samples = [1 + torch.rand(()).item() for _ in range(size.pick(5, 2))]
    return {"rounds": spread(samples), "all": samples}


@table("toy.count", result="toy.count")
def count_table(data: Data) -> Table:
    """One row a box."""
    rows = [[box["colour"], str(box["toys"])] for box in data["boxes"]]
    return Table(headers=["Box", "Toys"], rows=rows, align="lr")


@invariant("toy.time")
def above_one(data: Data) -> None:
    """No round is below one second."""
    assert min(data["all"]) > 1, "a round is too short"


TOYS = Registry.of([count, timing, count_table, above_one])


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """Make the toy course, measured and rendered."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "toys.md").write_text(PAGE)
    for item in TOYS.measurements.values():
        write_result(tmp_path / "results", Result.measure(item))
    _, problems = write_pages(tmp_path, Sources(TOYS, read_results(tmp_path / "results")))
    assert problems == []
    return tmp_path


def edit(path: Path, before: str, after: str) -> None:
    """Replace one piece of a file that must be there once."""
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def problems_of(root: Path, registry: Registry = TOYS) -> list[str]:
    """List what the check says about a course without figures."""
    return [str(problem) for problem in check(root, registry, [])]


def test_rendered_course_has_no_problem(course: Path) -> None:
    """The check is silent where nothing is wrong, so that the faults below speak for themselves."""
    assert problems_of(course) == []
    page = (course / "docs" / "toys.md").read_text()
    assert "| red  | 1234 |" in page
    assert "-->1,234<!--" in page


def test_rendering_again_changes_nothing(course: Path) -> None:
    """Rendering is idempotent: what is written is what the next run expects to find."""
    changed, problems = write_pages(course, Sources(TOYS, read_results(course / "results")))
    assert (changed, problems) == ([], [])


PAGE_FAULTS = {
    "table cell": ("| red  | 1234 |", "| red  | 1235 |", "toys.md:5: table toy.count says"),
    "table row": ("| blue |    5 |\n", "", "toys.md:5: table toy.count says"),
    "provenance": ("Exact: recomputed by the tests.", "Trust me.", "toys.md:5: table toy.count"),
    "value": ("-->1,234<!--", "-->1,235<!--", "toys.md:3: value toy.count boxes.0.toys , says"),
    "rounding": (" .1f -->", " .2f -->", "value toy.time rounds.median .2f says"),
    "empty": ("-->1,234<!--", "--><!--", "toys.md:3: value toy.count boxes.0.toys , is empty"),
    "unknown table": ("table: toy.count", "table: toy.counts", "no registered table is called"),
    "unknown result": (
        "value: toy.time",
        "value: toy.tine",
        "no stored result is called 'toy.tine'",
    ),
    "bad key": ("boxes.0.toys", "boxes.0.toy", "stops at 'toy'; there are colour, toys"),
    "bad position": ("boxes.0.toys", "boxes.2.toys", "stops at '2'; there are positions 0 to 1"),
    "short path": ("boxes.0.toys", "boxes.0", "ends too early"),
    "bad format": (" .1f -->", " .1q -->", "has no format '.1q'"),
    "no path": ("toy.time rounds.median .1f", "toy.time", "must read `<!-- value: NAME PATH"),
    "no colon": ("value: toy.time", "value toy.time", "must read `<!-- value: NAME PATH"),
    "not closed": ("<!-- /table -->", "", "toys.md:5: `<!-- table: toy.count -->` is not closed"),
    "closed twice": ("<!-- /table -->", "<!-- /table -->\n<!-- /table -->", "closes nothing"),
    "nested": ("-->1,234", "-->1,234 <!-- value: toy.time samples -->", "is not closed before"),
    "format that fills": (" , -->", " 9>3d -->", "has no format '9>3d'"),
    "format that pads": (" , -->", " 07d -->", "has no format '07d'"),
    "format with a sign": (" .1f -->", " +.1f -->", "has no format '+.1f'"),
    "format that cuts": (" .1f -->", " 3.3 -->", "has no format '3.3'"),
    "format in another base": (" , -->", " x -->", "has no format 'x'"),
    "format that leaves nothing": (
        "toys , -->",
        "toys .0e -->",
        "value toy.count boxes.0.toys .0e",
    ),
    "two lines": ("-->1,234<!--", "-->1,234\n<!--", "must be closed in its own line"),
    "first in line": ("There are <!--", "<!--", "must not begin a line"),
    "table in a line": (
        "<!-- table: toy.count",
        "See <!-- table: toy.count",
        "must stand on lines of their own",
    ),
}


@pytest.mark.parametrize("fault", PAGE_FAULTS)
def test_fault_in_a_page_is_found(course: Path, fault: str) -> None:
    """Each way to get a page wrong is found, and the message tells the place and the fault."""
    before, after, expected = PAGE_FAULTS[fault]
    edit(course / "docs" / "toys.md", before, after)
    assert any(expected in problem for problem in problems_of(course)), problems_of(course)


def reseal(root: Path, name: str, before: str, after: str) -> None:
    """Edit a stored result as a tool would that computes the digest anew."""
    path = root / "results" / f"{name}.json"
    edit(path, before, after)
    told = json.loads(path.read_text())
    del told["digest"]
    path.unlink()
    write_result(root / "results", Result(**told))


RESULT_FAULTS = {
    "exact number": ("toy.count", '"toys": 5', '"toys": 6', "`boxes.1.toys` was 6, is 5"),
    "exact key": (
        "toy.count",
        '"colour": "red"',
        '"color": "red"',
        "`boxes.0.color` is stored only",
    ),
    "kind": ("toy.time", '"kind": "measured"', '"kind": "exact"', "stored as exact, registered as"),
    "shape": ("toy.time", '"rounds":', '"round":', "the shape has changed"),
}


@pytest.mark.parametrize("fault", RESULT_FAULTS)
def test_fault_in_a_result_is_found(course: Path, fault: str) -> None:
    """A stored result that its measurement would not give is found, with the place in the data."""
    name, before, after, expected = RESULT_FAULTS[fault]
    reseal(course, name, before, after)
    found = [problem for problem in problems_of(course) if expected in problem]
    assert found
    assert found[0].startswith(f"results/{name}.json: ")


EDITS_BY_HAND = {
    "a number": ('"min":', '"min": 1.0, "was":'),
    "another processor": ('"processor": "', '"processor": "Faster '),
    "another day": ('"date": "20', '"date": "19'),
    "more threads": ('"threads": 1,', '"threads": 2,'),
    "another engine": ("the toy engine", "a toy engine"),
    "another seed": ('"seed": 3', '"seed": 4'),
    "another torch": ('"torch": "', '"torch": "9.'),
    "no digest": ('"digest"', '"digested"'),
    "another digest": ('"digest": "', '"digest": "0'),
}


@pytest.mark.parametrize("edited", EDITS_BY_HAND)
def test_result_edited_by_hand_is_refused(course: Path, edited: str) -> None:
    """Any edit of a stored result is seen, and the message says which file and what to run."""
    edit(course / "results" / "toy.time.json", *EDITS_BY_HAND[edited])
    with pytest.raises(ValueError, match=r"toy\.time\.json must .*(measure it again|--only)"):
        problems_of(course)


def test_a_file_laid_out_anew_is_no_edit(course: Path) -> None:
    """The digest is of what a result says: indents and the order of keys do not change it."""
    path = course / "results" / "toy.time.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(told.items()))))
    assert problems_of(course) == []


IMPOSSIBLE = {
    "the 31st of February": ('"date": "2', '"date": "2026-02-31", "day": "2'),
    "no day": ('"date": "2', '"date": "soon", "day": "2'),
    "other samples": ('"samples": 5,\n    "engine"', '"samples": 7,\n    "engine"'),
    "no thread": ('"threads": 1', '"threads": 0'),
    "half a thread": ('"threads": 1', '"threads": 1.5'),
    "no processor": ('"processor": "', '"processor": "", "maker": "'),
    "another command": ("--only toy.time", "--only toy.count"),
}


@pytest.mark.parametrize("fault", IMPOSSIBLE)
def test_impossible_provenance_is_refused(course: Path, fault: str) -> None:
    """A digest that fits does not make a day or a number of samples possible."""
    reseal(course, "toy.time", *IMPOSSIBLE[fault])
    with pytest.raises(ValueError, match=r"toy\.time\.json must tell where it comes from"):
        problems_of(course)


@pytest.mark.parametrize(
    ("spread", "told"),
    [
        ({"min": 2, "median": 1, "max": 3, "iqr": 0.1, "samples": 5}, "min ≤ median ≤ max"),
        ({"min": 1, "median": 4, "max": 3, "iqr": 0.1, "samples": 5}, "min ≤ median ≤ max"),
        ({"min": 1, "median": 2, "max": 3, "iqr": 5, "samples": 5}, "iqr between them"),
        ({"min": 1, "median": 2, "max": 3, "iqr": -1, "samples": 5}, "iqr between them"),
        ({"min": 1, "median": 2, "max": 3, "iqr": 1, "samples": 0}, "at least one sample"),
        ({"min": 1, "median": float("nan"), "max": 3, "iqr": 1, "samples": 5}, "finite"),
    ],
)
def test_parts_of_a_spread_are_in_order(spread: Data, told: str) -> None:
    """Wherever a spread stands in the data, its parts belong together."""
    registry = Registry.of([count, timing, count_table])
    (problem,) = registry.broken_invariants("toy.time", {"rows": [{"deep": {"seconds": spread}}]})
    assert "rows.0.deep.seconds" in problem
    assert told in problem
    sound = {"min": 1, "median": 2, "max": 3, "iqr": 1.5, "samples": 5}
    assert [] == registry.broken_invariants("toy.time", {"rows": [sound, {"x": sound}]})


def test_wide_spread_is_too_noisy_to_publish(course: Path) -> None:
    """A paired ratio whose middle half is wide is refused, stored or fresh."""
    wide = {"min": 1.0, "median": 2.0, "max": 3.0, "iqr": 0.6, "samples": 5}
    assert "30% of its median" in noise({"rows": [{"speedup": wide}]})
    assert noise({"rows": [{"seconds": wide}]}) is None
    assert noise({"speedup": wide | {"iqr": 0.4}}) is None

    noisy = replace(timing, function=lambda size: timing.function(size) | {"speedup": wide})
    write_result(course / "results", Result.measure(noisy))
    registry = Registry.of([count, noisy, count_table, above_one])
    found = problems_of(course, registry)
    assert any("too noisy to publish, the middle half of speedup" in problem for problem in found)


def test_times_name_their_engine(course: Path) -> None:
    """A time without the engine that took it says nothing: the measurement must declare it."""
    nameless = replace(timing, engine=None)
    write_result(course / "results", Result.measure(nameless))
    found = problems_of(course, Registry.of([count, nameless, count_table, above_one]))
    assert any("names no engine" in problem for problem in found)


def test_stored_result_breaks_an_invariant(course: Path) -> None:
    """A measured number may differ from run to run, but not leave what must hold anywhere."""
    stored = read_results(course / "results")["toy.time"]
    stored.data["all"][0] = 0.5
    write_result(course / "results", stored)
    (problem,) = problems_of(course)
    assert "stored result: above_one does not hold (a round is too short" in problem


def test_fresh_result_breaks_an_invariant(course: Path) -> None:
    """The invariants are checked on what the measurement gives today, not on the file alone."""
    slower = replace(timing, function=lambda size: {**timing.function(size), "all": [0.5]})
    registry = Registry.of([count, slower, count_table, above_one])
    (problem,) = problems_of(course, registry)
    assert "fresh tiny result: above_one does not hold" in problem


def test_exact_code_has_changed(course: Path) -> None:
    """An exact result is recomputed from the code: other code, another result, a problem."""
    changed = replace(count, function=lambda size: {"boxes": [{"colour": "red", "toys": 1234}]})
    registry = Registry.of([changed, timing, count_table, above_one])
    assert any("recomputing gives another result" in p for p in problems_of(course, registry))


def test_measurement_without_result(course: Path) -> None:
    """A registered measurement that was never stored is found."""
    (course / "results" / "toy.time.json").unlink()
    assert "results/toy.time.json: no stored result" in problems_of(course)[0]


def test_result_without_measurement(course: Path) -> None:
    """A stored result that no code can measure again is found."""
    registry = Registry.of([count, count_table])
    assert "results/toy.time.json: no measurement has this name" in problems_of(course, registry)[0]


def test_unused_result_and_table(course: Path) -> None:
    """A result or a table that no page shows is dead weight, and is found; a figure is a use."""
    page = course / "docs" / "toys.md"
    page.write_text("# Nothing\n\n![assets/figures/toys.svg](other.svg)\n")
    found = "\n".join(problems_of(course))
    assert "results/toy.count.json: no table, value or figure uses it" in found
    assert "results/toy.time.json: no table, value or figure uses it" in found
    assert "table toy.count is on no page" in found

    drawing = Drawing("toys", ("toy.time",), count_table.function)
    found = "\n".join(map(str, check(course, TOYS, [drawing])))
    assert "results/toy.count.json: no table" in found
    assert "results/toy.time.json: no table" not in found


@pytest.mark.parametrize(
    "mention",
    [
        "",
        "see assets/figures/toys.svg",
        "![assets/figures/toys.svg](assets/figures/other.svg)",
        "`![a drawing](assets/figures/toys.svg)`",
        "```{.text}\n![a drawing](assets/figures/toys.svg)\n```",
        "[a drawing](assets/figures/toys.svg)",
    ],
)
def test_figure_on_no_page(course: Path, mention: str) -> None:
    """A figure that no page shows is found; to be named on one is not to be shown."""
    drawing, page = Drawing("toys", ("toy.time",), count_table.function), course / "docs/toys.md"
    before = page.read_text()
    page.write_text(f"{before}\n{mention}\n")
    (problem,) = check(course, TOYS, [drawing])
    assert "figure toys is on no page" in str(problem)
    page.write_text(f"{before}\n![a drawing](assets/figures/toys.svg)\n")
    assert [] == list(check(course, TOYS, [drawing]))


def test_broken_file_is_one_clear_error(course: Path) -> None:
    """A result that is no JSON, or lies under another name, is named with what to do."""
    path = course / "results" / "toy.time.json"
    path.rename(path.with_stem("toy.tine"))
    with pytest.raises(ValueError, match=r"toy\.tine\.json must be named after its result"):
        read_results(course / "results")
    path.write_text("{")
    with pytest.raises(ValueError, match=r"toy\.time\.json must be a stored result"):
        read_results(course / "results")


def test_markers_in_code_are_text() -> None:
    """A page can show a marker in a fence or a code span without having one."""
    text = "````{.html}\n```\n<!-- table: a -->\n````\n`<!-- value: a b -->` ``<!-- table ` -->``\n"
    assert parse(text, "page") == ([], [])
    text = "> ~~~{.html}\n> <!-- table: a -->\n> ~~~\n\n<!-- table: a -->\n<!-- /table -->\n"
    (marker,), problems = parse(text, "page")
    assert (marker.line, problems) == (5, [])


def test_table_in_an_admonition_keeps_its_indent() -> None:
    """A table inside a tab or an admonition is written at that depth, or it would fall out."""
    stored = {"toy.count": Result.measure(count)}
    page = "!!! note\n    <!-- table: toy.count -->\n    <!-- /table -->\n"
    text, problems = render(page, "page", Sources(TOYS, stored))
    assert not problems
    assert all(line.startswith("    ") for line in text.splitlines()[1:] if line)
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_table_reads_back_from_markdown() -> None:
    """An independent parser reads the cells and the alignment that went in, pipes included."""
    rows = [["a|b", "1", "x"], ["", "22,000", "`y`"]]
    tokens = (
        markdown_it.MarkdownIt()
        .enable("table")
        .parse(Table(headers=["One", "Two", "Three"], rows=rows, align="lrc").markdown())
    )
    cells = [token.content for token in tokens if token.type == "inline"]
    assert cells == ["One", "Two", "Three", "a&#124;b", "1", "x", "", "22,000", "&#96;y&#96;"]
    styles = [token.attrs.get("style") for token in tokens if token.type == "th_open"]
    assert styles == ["text-align:left", "text-align:right", "text-align:center"]


@pytest.mark.parametrize(
    ("rows", "align"), [([["a"]], "ll"), ([[Markdown("a\nb")]], "l"), ([], "lx")]
)
def test_impossible_table(rows: list[list[str]], align: str) -> None:
    """A row of another length, a line break in a cell and an unknown alignment are refused."""
    with pytest.raises(ValueError, match="must"):
        Table(headers=["one", "two"], rows=rows, align=align)


def test_exact_result_keeps_its_file(course: Path) -> None:
    """Measuring an exact result again leaves its file alone: a diff shows only what changed."""
    result = Result.measure(count)
    later = replace(result, provenance={**result.provenance, "date": "2999-01-01"})
    assert not write_result(course / "results", later)
    assert write_result(course / "results", replace(later, data={"boxes": []}))
    assert read_results(course / "results")["toy.count"].data == {"boxes": []}


def test_provenance_names_machine_and_run() -> None:
    """A measured result tells what is needed to judge it, and the page's line tells the core."""
    result = Result.measure(timing)
    assert result.provenance.keys() >= {
        "date", "processor", "cores", "threads", "torch", "python", "platform", "command", "seed",
        "samples", "engine",
    }  # fmt: skip
    assert result.provenance["samples"] == 5
    assert "the toy engine" in result.line()
    assert "1 thread, torch" in result.line()
    assert "median of 5 rounds" in result.line()
    assert result.provenance["processor"] in result.line()


def test_measuring_leaves_no_trace_in_torch() -> None:
    """A measurement runs under its own seed and threads, and gives back what it found."""
    before = torch.get_rng_state(), torch.get_num_threads()
    seen: list[int] = []

    @measurement("toy.threads", kind="exact", threads=before[1] + 1)
    def peek(size: Size) -> Data:
        seen.append(torch.get_num_threads())
        return {}

    peek(Size.TINY)
    assert seen == [before[1] + 1]
    assert torch.get_num_threads() == before[1]

    first = timing(Size.FULL)
    assert torch.equal(torch.get_rng_state(), before[0])
    torch.rand(7)
    assert timing(Size.FULL) == first


@pytest.mark.parametrize(
    "data", [{"a.b": 1}, {"a b": 1}, {"": 1}, {"a": float("nan")}, {"a": torch.ones(1)}]
)
def test_data_that_json_or_a_path_cannot_hold(data: Data) -> None:
    """Data that could not be stored, compared or quoted are refused before they are stored."""
    bad = measurement("toy.bad", kind="exact")(lambda size: data)
    with pytest.raises(ValueError, match=r"toy\.bad: "):
        bad(Size.FULL)


def test_exact_data_are_kept_exactly_and_measured_ones_rounded() -> None:
    """A third survives the file as it is when exact, and with six digits when measured."""
    third = {"x": 1 / 3}
    assert measurement("a", kind="exact")(lambda size: third)(Size.FULL) == third
    assert measurement("a", kind="measured")(lambda size: third)(Size.FULL) == {"x": 0.333333}


def test_shape_ignores_length_and_value_only() -> None:
    """Lists may grow and numbers may change; a key, a type or another kind of element may not."""
    base = {"a": [{"x": 1}, {"x": 2.5}], "b": "text"}
    assert shape(base) == shape({"a": [{"x": 7}], "b": "other"})
    for other in ({"a": [{"y": 1}], "b": ""}, {"a": [{"x": "1"}], "b": ""}, {"a": []}):
        assert shape(base) != shape(other)


def test_a_format_shows_the_number_it_was_given() -> None:
    """A small number that would show as zero needs more digits, and zero itself does not."""
    fitting = ((957, ""), (1234, ","), (0.5, ".2f"), (0.5, ".0%"), (1.2e-5, ".1e"), (0.0, ".2f"))
    assert ["957", "1,234", "0.50", "50%", "1.2e-05", "0.00"] == [shown(*each) for each in fitting]
    for value, spec in ((0.004, ".2f"), (0.4, ".0f"), (1e-5, ".0%")):
        with pytest.raises(ValueError, match="give it more digits"):
            shown(value, spec)
    for value, spec in ((57, "9>3d"), (1.5, "d"), (57, "c"), ("text", ".1f"), (5, "n"), (5, "_")):
        with pytest.raises(ValueError, match="has no format"):
            shown(value, spec)
    assert "a&#42;b&#42; &lt;b&gt;" == shown("a*b* <b>", "")


def test_lookup_ends_at_numbers_and_text() -> None:
    """A path reaches through keys and positions."""
    assert lookup({"a": [{"b": 2.5}]}, "a.0.b") == 2.5
    with pytest.raises(ValueError, match="stops at '-1'"):
        lookup({"a": [1]}, "a.-1")


def test_modules_are_found_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new module in the package is all that a new chapter's measurements need."""
    package = tmp_path / "toy_measurements"
    package.mkdir()
    (package / "__init__.py").touch()
    source = "from lab35_course.results import measurement\n"
    source += "@measurement('toy.{0}', kind='exact')\ndef f(size): return {{}}\n"
    (package / "one.py").write_text(source.format("one"))
    (package / "two.py").write_text(
        source.format("two") + "from toy_measurements.one import f as g\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import toy_measurements

    found = collect(toy_measurements, Measurement)
    assert [item.name for item in found] == ["toy.one", "toy.two"]


def test_registry_refuses_what_does_not_fit() -> None:
    """Two measurements of one name, or a table of no measurement, are mistakes in the code."""
    with pytest.raises(ValueError, match=r"registered once, got 'toy\.count' twice"):
        Registry.of([count, replace(count, seed=1)])
    with pytest.raises(ValueError, match=r"registered measurement, got 'toy\.count'"):
        Registry.of([count_table])
    with pytest.raises(ValueError, match="kind must be"):
        measurement("toy.count", kind="about")


@pytest.fixture
def script() -> ModuleType:
    """Load the command line."""
    spec = importlib.util.spec_from_file_location("tables_script", ROOT / "scripts" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, *arguments: str) -> tuple[int, str]:
    """Run the command line in this process: exit code and standard error."""
    app = script.typer.Typer()
    app.command()(script.main)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stderr


def test_command_line(course: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check, render and measure do what they say; exit codes tell faults from bad arguments."""
    monkeypatch.setattr(script, "ROOT", course)
    monkeypatch.setattr(script, "discover", list)
    monkeypatch.setattr(script.Registry, "discover", classmethod(lambda cls: TOYS))
    page = course / "docs" / "toys.md"
    good = page.read_text()
    assert run(script, "--check") == (0, "")

    edit(page, "-->1,234<!--", "-->1,235<!--")
    bad = page.read_text()
    code, output = run(script, "--check")
    assert code == 1
    assert output.startswith("docs/toys.md:3: value toy.count")
    assert page.read_text() == bad, "a check must write nothing"

    assert run(script, "--render") == (0, "docs/toys.md: rendered\n")
    assert page.read_text() == good

    (course / "results" / "toy.time.json").unlink()
    code, output = run(script, "--only", "toy.t*")
    assert (code, output) == (0, "toy.time: stored\n")
    assert run(script, "--check") == (0, "")

    code, output = run(script, "--only", "toy.x")
    assert code == 2
    assert (
        output
        == "tables: error: only must match a measurement, got 'toy.x'; known: toy.count, toy.time\n"
    )
    assert run(script, "--only", "toy.*", "--check")[0] == 2


def test_a_measurement_shows_how_this_machine_differs(
    course: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a measurement the headline ratios are shown, and the sentences that no longer fit."""
    toy = headlines.Headline("a toy takes … s", "toys.md", "toy.time", "rounds.max", ".0f", 50, 99)
    monkeypatch.setattr(headlines, "HEADLINES", (toy,))
    monkeypatch.setattr(script, "ROOT", course)
    monkeypatch.setattr(script.Registry, "discover", classmethod(lambda cls: TOYS))

    assert "a toy" not in run(script, "--only", "toy.count")[1]
    code, output = run(script, "--only", "toy.time")
    assert code == 0
    assert re.search(r"ratio +stored +new +change\na toy takes … s +[12] +[12] +\S+%\n", output)
    assert "docs/toys.md: “a toy takes … s” does not fit" in output

    (course / "results" / "toy.count.json").write_text("{}", encoding="utf-8")
    assert "toy.count.json must be a stored result" in run(script, "--only", "toy.time")[1]


def test_results_of_a_friend_stand_beside_the_stored_ones(
    course: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--compare` writes nothing, refuses what is no result, and stands alone."""
    monkeypatch.setattr(
        headlines,
        "HEADLINES",
        (headlines.Headline("a toy takes … s", "toys.md", "toy.time", "rounds.max", ".1f", 0, 99),),
    )
    monkeypatch.setattr(script, "ROOT", course)
    theirs = Result.measure(timing)
    theirs.data["rounds"] |= {"max": 4.5, "min": 1.0}
    write_result(course / "theirs", theirs)
    before = (course / "results" / "toy.time.json").read_bytes()

    code, output = run(script, "--compare", str(course / "theirs"))
    assert code == 0
    assert re.search(r"ratio +here +there +change\na toy takes … s +\d\.\d +4\.5 +\+\d+%\n", output)
    assert (course / "results" / "toy.time.json").read_bytes() == before
    code, output = run(script, "--compare", "nosuch")
    assert code == 2
    assert output == (
        "tables: error: compare must be a folder of results or a zip file of one, got nosuch\n"
    )
    assert run(script, "--compare", "nosuch", "--check")[0] == 2


def test_noisy_measurement_is_taken_again(
    course: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A take that is too noisy is followed by another; three of them store nothing."""
    quiet, takes = timing.function(Size.TINY), []
    path = course / "results" / "toy.time.json"

    def noisy_until(last: int) -> Registry:
        def function(size: Size) -> Data:
            takes.append(size)
            width = 0.0 if len(takes) > last else 1.0
            speedup = {"min": 1.0, "median": 2.0, "max": 3.0, "iqr": width, "samples": 2}
            return quiet | {"speedup": speedup}

        takes.clear()
        return Registry.of([count, replace(timing, function=function), count_table, above_one])

    monkeypatch.setattr(script, "ROOT", course)
    for last, expected in ((0, (1, True)), (2, (3, True)), (3, (3, False))):
        path.unlink(missing_ok=True)
        problems = script.measure(noisy_until(last), ["toy.time"])
        assert expected == (len(takes), path.exists())
        assert path.exists() == (not problems)


def test_result_that_breaks_an_invariant_is_not_stored(
    course: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring stores nothing that the next check would refuse."""
    broken = replace(timing, function=lambda size: {**timing.function(size), "all": [0.5]})
    registry = Registry.of([count, broken, count_table, above_one])
    monkeypatch.setattr(script, "ROOT", course)
    monkeypatch.setattr(script.Registry, "discover", classmethod(lambda cls: registry))
    before = (course / "results" / "toy.time.json").read_bytes()
    code, output = run(script, "--only", "toy.time")
    assert code == 1
    assert "above_one does not hold" in output
    assert "nothing was stored" in output
    assert (course / "results" / "toy.time.json").read_bytes() == before
