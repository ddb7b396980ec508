"""Batching in pictures: the rectangle with its padding, and what a query of a padded row sees."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lab35_course.figure import BLUE, INK, ORANGE, canvas, figure
from lab35_course.results import Data


def _cell(axes: Axes, column: int, row: int, face: str, text: str = "") -> None:
    """Draw one square; without a face it is padding, and dotted."""
    empty = face == "none"
    axes.add_patch(
        Rectangle(
            (column + 0.06, row + 0.06),
            0.88,
            0.88,
            facecolor=face if empty else (face, 0.45),
            edgecolor=INK,
            linewidth=0.8,
            linestyle=":" if empty else "-",
        )
    )
    axes.text(column + 0.5, row + 0.54, text, ha="center", va="center", fontsize=8)


def _grid(axes: Axes, columns: int, rows: int) -> None:
    """Make room for a grid of squares, without ticks or frame."""
    axes.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 0.1, -0.1), aspect="equal")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


@figure("batching-rows", results=["batching.padding"])
def rows(padding: Data) -> Figure:
    """Draw three prompts in one tensor and two decode steps; the numbers are positions."""
    lengths, new = padding["cases"]["three"]["batches"][0], 2
    width = max(lengths)
    drawing, axes = canvas(size=(6.4, 1.6))
    _grid(axes, width + new, len(lengths))
    for row, length in enumerate(lengths):
        first = width - length
        for column in range(width + new):
            face = "none" if column < first else BLUE if column < width else ORANGE
            _cell(axes, column, row, face, str(max(0, column - first)))
    axes.set_xticks([column + 0.5 for column in range(width + new)], range(width + new))
    labels = [f"row {row}: {length} tokens" for row, length in enumerate(lengths)]
    axes.set_yticks([row + 0.5 for row in range(len(lengths))], labels)
    axes.set_xlabel("column")
    return drawing


@figure("batching-mask", results=[])
def mask() -> Figure:
    """Draw what five queries see, of which the first three are padding."""
    size, padding = 5, 3
    drawing, panels = canvas(columns=3, size=(6.4, 2.6), sharey=True)
    titles = ("causal", "and a real key", "or the own key")
    for number, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        _grid(axes, size, size)
        for query in range(size):
            for key in range(size):
                seen = key <= query and (number == 0 or key >= padding)
                own = number == 2 and key == query and not seen
                _cell(axes, key, query, BLUE if seen else ORANGE if own else "none", "•" * own)
        axes.set_xticks([k + 0.5 for k in range(size)], ["pad"] * padding + ["0", "1"])
        axes.set(title=title, xlabel="key")
    panels[0].set_yticks([q + 0.5 for q in range(size)], ["pad"] * padding + ["0", "1"])
    panels[0].set_ylabel("query")
    return drawing
