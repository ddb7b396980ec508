"""The chapter on streaming: what has arrived, what is shown, and what waits."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lab35_course.figure import BLUE, GREEN, INK, ORANGE, canvas, figure
from lab35_course.results import Data


@figure("streaming-timeline", results=["streaming.timeline"])
def timeline(data: Data) -> Figure:
    """Draw a row for each token, and in it the bytes that have arrived so far."""
    rows = data["rows"]
    names = [byte for row in rows for byte in row["bytes"]]
    drawn, axes = canvas(size=(6.4, 4.8))
    arrived = 0
    for step, row in enumerate(rows):
        arrived += len(row["bytes"])
        matched = step == len(rows) - 1 and data["stop_reason"] == "stop"
        for byte in range(arrived):
            if byte < row["shown"]:
                face, mark = BLUE, ""
            elif byte < row["whole"]:
                face, mark = ("none", "x") if matched else (GREEN, "d")
            else:
                face, mark = ORANGE, "o"
            axes.add_patch(
                Rectangle((byte, step), 1, 1, facecolor=face, edgecolor=INK, linewidth=0.6)
            )
            axes.plot(
                byte + 0.5, step + 0.5, marker=mark, color=INK, markersize=4, linestyle="none"
            )
        shown = row["text"].replace("\n", "⏎").replace(" ", "␣")
        axes.text(len(names) + 0.4, step + 0.5, shown, verticalalignment="center")
    axes.set(
        xlim=(-0.1, len(names) + 2.6),
        ylim=(len(rows) + 0.1, -0.1),
        xlabel="bytes of the text",
        ylabel="token",
    )
    axes.set_xticks([byte + 0.5 for byte in range(len(names))], names)
    axes.set_yticks([step + 0.5 for step in range(len(rows))], range(1, len(rows) + 1))
    axes.text(len(names) + 0.4, -0.4, "new on screen", horizontalalignment="left")
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[:].set_visible(False)
    return drawn
