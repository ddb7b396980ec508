"""Draw the figures of the course from the stored results.

python scripts/figures.py            draw them into docs/assets/figures
python scripts/figures.py --check    write nothing; exit 1 if a file is not what would be drawn
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import typer

from lab35.terminal import error_console
from lab35_course.figure import FIGURES, Drawing, check_figures, discover, write_figure
from lab35_course.results import ROOT, Problem, Result, read_results

console = error_console(highlight=False, soft_wrap=True)


def draw(drawings: Sequence[Drawing], stored: Mapping[str, Result]) -> Iterator[Problem]:
    """Draw every figure whose results are stored, and report the others."""
    for drawing in drawings:
        try:
            if write_figure(ROOT, drawing, stored):
                console.print(f"{FIGURES}/{drawing.name}.svg: drawn")
        except ValueError as error:
            yield Problem(drawing.function.__module__, str(error))


def main(
    check_only: Annotated[bool, typer.Option("--check", help="Write nothing.")] = False,
) -> None:
    """Draw the figures, or check that they are what the stored results draw."""
    try:
        stored, drawings = read_results(ROOT / "results"), discover()
    except ValueError as error:
        console.print(f"figures: error: {error}", markup=False)
        sys.exit(2)
    problems = check_figures(ROOT, drawings, stored) if check_only else draw(drawings, stored)
    found = False
    for problem in problems:
        console.print(str(problem), markup=False)
        found = True
    if found:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
