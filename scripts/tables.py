"""Measure what the course claims, and write the results into its pages.

python scripts/tables.py                   measure everything, then render the pages
python scripts/tables.py --only 'loop.*'   measure some
python scripts/tables.py --render          render the pages from the stored results
python scripts/tables.py --check           write nothing; exit 1 if anything does not agree
python scripts/tables.py --compare FILE    write nothing; show somebody else's results beside yours

After a measurement the ratios that the pages build on are shown, stored against new, with the
sentences that no longer fit. FILE is another clone's folder `results`, or a zip file of it.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lab35.terminal import error_console
from lab35_course.figure import discover
from lab35_course.headlines import compared, read_others, unfit
from lab35_course.markers import Sources, check, write_pages
from lab35_course.results import (
    ROOT,
    Problem,
    Registry,
    Result,
    noise,
    read_results,
    track,
    write_result,
)

TAKES = 3
"""How often a result may be measured until it is quiet enough."""

console = error_console(highlight=False, soft_wrap=True)


def select(registry: Registry, patterns: list[str]) -> list[str]:
    """Choose measurements by name; every pattern must match one."""
    names = list(registry.measurements)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            known = ", ".join(names) or "none"
            raise ValueError(f"only must match a measurement, got {pattern!r}; known: {known}")
    return [n for n in names if any(fnmatch.fnmatch(n, p) for p in patterns or ["*"])]


def measure(registry: Registry, names: list[str]) -> list[Problem]:
    """Run measurements and store the results whose invariants hold, and that are not too noisy."""
    problems = []
    for name in track(names, "measuring"):
        for take in range(1, TAKES + 1):
            result = Result.measure(registry.measurements[name])
            noisy = noise(result.data)
            if noisy is None:
                break
            console.print(f"{name}: take {take} of {TAKES} is too noisy, {noisy}", markup=False)
        broken = registry.broken_invariants(name, result.data)
        if noisy is not None:
            broken.append(f"too noisy, {noisy}; measure again when the machine is quiet")
        problems += [Problem(name, f"{reason}; nothing was stored") for reason in broken]
        if not broken:
            written = write_result(ROOT / "results", result)
            console.print(f"{name}: {'stored' if written else 'as stored'}")
    return problems


def stored_before() -> dict[str, Result]:
    """Read what is stored before it is measured again; what cannot be read is no hindrance."""
    try:
        return read_results(ROOT / "results")
    except ValueError:
        return {}


def show(
    titles: tuple[str, str], before: Mapping[str, Result], after: Mapping[str, Result]
) -> None:
    """Print the headline ratios of two sets of results, and the sentences that do not fit."""
    rows = list(compared(before, after))
    if not rows:
        return
    view = Table("ratio", *titles, "change", box=None, pad_edge=False)
    for column in view.columns[1:]:
        column.justify = "right"
    for row in rows:
        view.add_row(*row)
    console.print(view)
    for sentence in unfit(after):
        console.print(sentence, markup=False)


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Measure only names like this; may be repeated.")
    ] = None,
    render: Annotated[bool, typer.Option("--render", help="Only render the pages.")] = False,
    check_only: Annotated[bool, typer.Option("--check", help="Write nothing.")] = False,
    compare: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show these results beside the stored ones.")
    ] = None,
) -> None:
    """Measure, store and render the numbers of the course, check them, or compare them."""
    try:
        if (only is not None) + render + check_only + (compare is not None) > 1:
            raise ValueError("only one of --only, --render, --check and --compare can be given")
        if compare is not None:
            show(("here", "there"), read_results(ROOT / "results"), read_others(compare))
            return
        registry = Registry.discover()
        if check_only:
            problems = check(ROOT, registry, discover())
        else:
            before = stored_before()
            names = [] if render else select(registry, only or [])
            problems = measure(registry, names)
            sources = Sources(registry, read_results(ROOT / "results"))
            changed, unfilled = write_pages(ROOT, sources)
            problems += unfilled
            for path in changed:
                console.print(f"{path.relative_to(ROOT)}: rendered")
            measured = {name: sources.stored[name] for name in names if name in sources.stored}
            show(("stored", "new"), before, measured)
    except ValueError as error:
        console.print(f"tables: error: {error}", markup=False)
        sys.exit(2)
    for problem in problems:
        console.print(str(problem), markup=False)
    if problems:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
