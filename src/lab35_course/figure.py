"""Figures as pure functions of stored results, drawn as SVG that fits a light and a dark page.

A module in `lab35_course.figures` declares its figures, and is found by itself:

    @figure("loop-cost", results=["loop.cost"])
    def loop_cost(cost: Data) -> Figure:
        drawing, axes = canvas()
        axes.plot(cost["new_tokens"], cost["uncached"], label="uncached")
        axes.plot(cost["new_tokens"], cost["cached"], label="cached")
        axes.set(xlabel="new tokens", ylabel="token-forwards")
        axes.legend()
        return drawing

`scripts/figures.py` draws it into `docs/assets/figures/loop-cost.svg`. Nothing but the results goes
into a figure, and no date or version comes out, so that a check can compare bytes.

A function may return a `lab35_course.sketch.Sketch` instead, for what has boxes and no axes.

Lines cycle through `PALETTE` and the dash patterns of `DASHES` together: a reader who sees no
difference in colour sees one in the dashes. `INK` is the page's own text colour.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

from lab35.checkpoint import replacing
from lab35_course.results import Problem, Result, collect, fitted
from lab35_course.sketch import Sketch

__all__ = [
    "BLUE",
    "DASHES",
    "FIGURES",
    "GREEN",
    "INK",
    "ORANGE",
    "PALETTE",
    "PURPLE",
    "Drawing",
    "canvas",
    "check_figures",
    "discover",
    "figure",
    "write_figure",
]

FIGURES = Path("docs/assets/figures")
"""Where the drawn figures are, below the project's folder."""

INK = "#010203"
"""Stands for `currentColor`, which matplotlib does not know: text, axes, ticks, neutral marks."""

BLUE, ORANGE, GREEN, PURPLE = "#1a7fd4", "#d55e00", "#009e73", "#cc79a7"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE)
"""Okabe and Ito (2008), the blue lightened: 3:1 contrast with both the light and the dark page."""

DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))

STYLE: dict[str, Any] = {
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=PALETTE) + cycler(linestyle=DASHES),
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "hatch.color": INK,
    "lines.linewidth": 1.8,
    "patch.edgecolor": INK,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Drawing:
    """A registered figure."""

    name: str
    results: Sequence[str]
    function: Callable[..., Figure | Sketch]

    def svg(self, stored: Mapping[str, Result]) -> str:
        """Draw the figure.

        Args:
            stored: The stored results by name.

        Returns:
            The SVG file, the same bytes on every machine.

        Raises:
            ValueError: If a result that the figure needs is not stored.
        """
        missing = [name for name in self.results if name not in stored]
        if missing:
            raise ValueError(
                f"figure {self.name}: no stored result {missing[0]!r}; "
                f"run `python scripts/tables.py --only {missing[0]}`"
            )
        # Start from matplotlib's defaults: the reader's own settings must not change a byte.
        with matplotlib.rc_context(
            {**matplotlib.rcParamsDefault, **STYLE, "svg.hashsalt": self.name}
        ):
            drawn = fitted(self.function, *(stored[name].data for name in self.results))
            if isinstance(drawn, Sketch):
                return drawn.svg()
            written = io.StringIO()
            nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            drawn.savefig(written, format="svg", metadata=nothing)
        return _portable(written.getvalue())


def figure(
    name: str, *, results: Sequence[str]
) -> Callable[[Callable[..., Figure | Sketch]], Drawing]:
    """Register a function of stored results as a figure.

    Args:
        name: The figure is `docs/assets/figures/NAME.svg`.
        results: The results whose data the function takes, one positional argument each.

    Returns:
        A decorator. The function returns a matplotlib figure made by `canvas`, or a sketch, and
        depends on nothing but its arguments.
    """
    return lambda function: Drawing(name, tuple(results), function)


def canvas(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (6.4, 3.4), **layout: Any
) -> tuple[Figure, Any]:
    """Make an empty figure in the style of the course.

    Args:
        rows: Rows of axes.
        columns: Columns of axes.
        size: Width and height in inches; 6.4 wide keeps text at a readable size on a page.
        layout: More for `matplotlib.figure.Figure.subplots`, as `sharey` or `width_ratios`.

    Returns:
        The figure, and its axes: one, or an array when there are several.
    """
    drawn = Figure(figsize=size)
    return drawn, drawn.subplots(rows, columns, **layout)


def discover() -> list[Drawing]:
    """Gather the figures that the modules of `lab35_course.figures` declare.

    Returns:
        The figures.

    Raises:
        ValueError: If two share a name.
    """
    from lab35_course import figures

    drawings = collect(figures, Drawing)
    names = [drawing.name for drawing in drawings]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"name must be registered once, got {name!r} twice")
    return drawings


def write_figure(root: Path, drawing: Drawing, stored: Mapping[str, Result]) -> bool:
    """Draw a figure into `docs/assets/figures/NAME.svg`.

    Args:
        root: The project's folder.
        drawing: What to draw.
        stored: The stored results by name.

    Returns:
        True when the file has changed.
    """
    path, svg = root / FIGURES / f"{drawing.name}.svg", drawing.svg(stored)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_text(encoding="utf-8") == svg:
        return False
    with replacing(path) as temporary:
        temporary.write_text(svg, encoding="utf-8")
    return True


def check_figures(
    root: Path, drawings: Sequence[Drawing], stored: Mapping[str, Result]
) -> Iterator[Problem]:
    """Draw every figure again and compare it with its file, byte by byte.

    Args:
        root: The project's folder.
        drawings: The registered figures.
        stored: The stored results by name.

    Yields:
        Each figure that is missing or differs, and each SVG file that no figure draws.
    """
    names = {f"{drawing.name}.svg" for drawing in drawings}
    for path in sorted((root / FIGURES).glob("*.svg")):
        if path.name not in names:
            yield Problem(f"{FIGURES}/{path.name}", "no registered figure draws it; delete it")
    for drawing in drawings:
        where = f"{FIGURES}/{drawing.name}.svg"
        try:
            svg = drawing.svg(stored)
        except ValueError as error:
            yield Problem(where, str(error))
            continue
        if not (root / where).exists():
            yield Problem(where, "not drawn yet; run `python scripts/figures.py`")
        elif (root / where).read_text(encoding="utf-8") != svg:
            yield Problem(where, "not what its results draw; run `python scripts/figures.py`")


def _portable(svg: str) -> str:
    """Give the drawing the page's ink, and hide the last bits of another machine's arithmetic."""
    # A hundredth of a point is plenty for a coordinate. The glyphs' scale needs its six decimals.
    svg = re.sub(r"(?<!scale\()-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", svg)
    return svg.replace(INK, "currentColor")
