"""The numbers of the course agree with their results, and a fault in any of them is found."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import markdown_it
import pytest
import torch
from typer.testing import CliRunner

from lab35_course.figure import Drawing, discover
from lab35_course.markers import Sources, check, lookup, parse, render, write_pages
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


@measurement("toy.time", kind="measured", seed=3, threads=1)
def timing(size: Size) -> Data:
    """Stand in for a timing: a random number, and a list whose length depends on the size."""
    samples = [1 + torch.rand(()).item() for _ in range(size.pick(5, 2))]
    return {
        "samples": len(samples),
        "rounds": {"median": statistics.median(samples)},
        "all": samples,
    }


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


RESULT_FAULTS = {
    "exact number": ("toy.count", '"toys": 5', '"toys": 6', "`boxes.1.toys` was 6, is 5"),
    "exact key": (
        "toy.count",
        '"colour": "red"',
        '"color": "red"',
        "`boxes.0.color` is stored only",
    ),
    "kind": ("toy.time", '"kind": "measured"', '"kind": "exact"', "stored as exact, registered as"),
    "shape": ("toy.time", '"samples": 5,\n    "rounds"', '"rounds"', "the shape has changed"),
}


@pytest.mark.parametrize("fault", RESULT_FAULTS)
def test_fault_in_a_result_is_found(course: Path, fault: str) -> None:
    """A stored result that its measurement would not give is found, with the place in the data."""
    name, before, after, expected = RESULT_FAULTS[fault]
    edit(course / "results" / f"{name}.json", before, after)
    found = [problem for problem in problems_of(course) if expected in problem]
    assert found
    assert found[0].startswith(f"results/{name}.json: ")


def test_stored_result_breaks_an_invariant(course: Path) -> None:
    """A measured number may differ from run to run, but not leave what must hold anywhere."""
    path = course / "results" / "toy.time.json"
    stored = json.loads(path.read_text())
    stored["data"]["all"][0] = 0.5
    path.write_text(json.dumps(stored))
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
    page.write_text("# Nothing\n\n![a drawing](assets/figures/toys.svg)\n")
    found = "\n".join(problems_of(course))
    assert "results/toy.count.json: no table, value or figure uses it" in found
    assert "results/toy.time.json: no table, value or figure uses it" in found
    assert "table toy.count is on no page" in found

    drawing = Drawing("toys", ("toy.time",), count_table.function)
    found = "\n".join(map(str, check(course, TOYS, [drawing])))
    assert "results/toy.count.json: no table" in found
    assert "results/toy.time.json: no table" not in found


def test_figure_on_no_page(course: Path) -> None:
    """A figure that no page shows is found."""
    drawing = Drawing("toys", ("toy.time",), count_table.function)
    (problem,) = check(course, TOYS, [drawing])
    assert "figure toys is on no page" in str(problem)


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
    assert cells == ["One", "Two", "Three", *rows[0], *rows[1]]
    styles = [token.attrs.get("style") for token in tokens if token.type == "th_open"]
    assert styles == ["text-align:left", "text-align:right", "text-align:center"]


@pytest.mark.parametrize(("rows", "align"), [([["a"]], "ll"), ([["a\nb", "c"]], "ll"), ([], "lx")])
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
        "samples",
    }  # fmt: skip
    assert result.provenance["samples"] == 5
    assert "1 thread, torch" in result.line()
    assert "median of 5" in result.line()
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
