"""The cache in pictures: which keys a chunk may see, how the buffer fills, what is copied."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lab35 import causal_mask
from lab35_course.figure import BLUE, INK, ORANGE, canvas, figure
from lab35_course.results import Data


def _cell(axes: Axes, column: int, row: int, *, face: str = "none", mark: str = "") -> None:
    """Draw one square of a grid, with a mark for those who see no colours; row 0 is at the top."""
    axes.add_patch(Rectangle((column, row), 1, 1, facecolor=face, edgecolor=INK, linewidth=0.6))
    axes.plot(column + 0.5, row + 0.5, marker=mark, color=INK, markersize=4, linestyle="none")


def _grid(axes: Axes, columns: int, rows: int) -> None:
    """Make room for a grid of squares, without ticks or frame."""
    axes.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 0.1, -0.1), aspect="equal")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


@figure("cache-mask", results=[])
def mask() -> Figure:
    """Three queries against eight keys: the bottom of the square, and what `is_causal` sees."""
    keys, queries = 8, 3
    offset = keys - queries
    drawn, (square, right, wrong) = canvas(columns=3, size=(6.4, 2.7), sharey=True)
    panels = (
        (square, "the whole text", causal_mask(keys, keys, 0), 0),
        (right, f"a chunk, offset {offset}", causal_mask(queries, keys, offset), offset),
        (wrong, "the same, is_causal=True", causal_mask(queries, keys, 0), offset),
    )
    truth = causal_mask(keys, keys, 0).tolist()
    for axes, title, visible, first in panels:
        _grid(axes, keys, keys)
        for row, sees in enumerate(visible.tolist(), start=first):
            for key, seen in enumerate(sees):
                lost = truth[row][key] and not seen
                _cell(axes, key, row, face=BLUE if seen else "none", mark="x" if lost else "")
        axes.set(title=title, xlabel="key", xticks=[k + 0.5 for k in range(keys)])
        axes.set_xticklabels(range(keys))
    square.set(ylabel="query", yticks=[q + 0.5 for q in range(keys)])
    square.set_yticklabels(range(keys))
    return drawn


@figure("cache-filling", results=[])
def filling() -> Figure:
    """A buffer of eight positions over a prefill in two pieces, and decode steps until full."""
    room = 8
    steps = (
        ("prefill, 3 tokens", 3),
        ("prefill, 2 more", 2),
        ("decode", 1),
        ("decode", 1),
        ("decode", 1),
        ("decode: refused", 1),
    )
    drawn, axes = canvas(size=(6.4, 2.8))
    _grid(axes, room, len(steps))
    length, labels, lengths = 0, [], []
    for row, (label, t_new) in enumerate(steps):
        end = length + t_new if length + t_new <= room else length
        for position in range(room):
            if position < length:
                _cell(axes, position, row, face=BLUE)
            elif position < end:
                _cell(axes, position, row, face=ORANGE, mark="o")
            else:
                _cell(axes, position, row)
        length = end
        labels.append(label)
        lengths.append(f"length = {length}")
    centres = [row + 0.5 for row in range(len(steps))]
    axes.set_yticks(centres, labels)
    axes.set_xticks([position + 0.5 for position in range(room)], range(room))
    axes.set(xlabel="position")
    for centre, text in zip(centres, lengths, strict=True):
        axes.text(room + 0.4, centre, text, verticalalignment="center")
    return drawn


@figure("cache-copied", results=["cache.copied"])
def copied(data: Data) -> Figure:
    """Bytes copied by each forward, and by all of them so far."""
    drawn, (each, total) = canvas(columns=2, size=(6.4, 3.0))
    stored = range(data["prompt"], data["prompt"] + data["new"])
    for name in ("growing", "static"):
        forwards = data[name]["forwards"]
        sums = [sum(forwards[: index + 1]) for index in range(len(forwards))]
        each.plot(stored[1:], [count / 2**10 for count in forwards[1:]], label=name)
        total.plot(stored, [count / 2**20 for count in sums], label=name)
    each.set(title="one decode step", ylabel="KiB copied")
    total.set(title="all forwards so far", ylabel="MiB copied")
    for axes in (each, total):
        axes.set(xlabel="positions stored", xlim=(0, None), ylim=(0, None))
        axes.grid(visible=True)
    each.legend()
    return drawn
