"""Measure what the course claims, and write the results into its pages.

python scripts/tables.py                   measure everything, then render the pages
python scripts/tables.py --only 'loop.*'   measure some
python scripts/tables.py --render          render the pages from the stored results
python scripts/tables.py --check           write nothing; exit 1 if anything does not agree
"""

from __future__ import annotations

import fnmatch
import sys
from typing import Annotated

import typer

from lab35.terminal import error_console
from lab35_course.figure import discover
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


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="Measure only names like this; may be repeated.")
    ] = None,
    render: Annotated[bool, typer.Option("--render", help="Only render the pages.")] = False,
    check_only: Annotated[bool, typer.Option("--check", help="Write nothing.")] = False,
) -> None:
    """Measure, store and render the numbers of the course, or check them."""
    try:
        if (only is not None) + render + check_only > 1:
            raise ValueError("only one of --only, --render and --check can be given")
        registry = Registry.discover()
        if check_only:
            problems = check(ROOT, registry, discover())
        else:
            problems = [] if render else measure(registry, select(registry, only or []))
            sources = Sources(registry, read_results(ROOT / "results"))
            changed, unfilled = write_pages(ROOT, sources)
            problems += unfilled
            for path in changed:
                console.print(f"{path.relative_to(ROOT)}: rendered")
    except ValueError as error:
        console.print(f"tables: error: {error}", markup=False)
        sys.exit(2)
    for problem in problems:
        console.print(str(problem), markup=False)
    if problems:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
