"""The chapter on speed: the ladder, and the floor that it stands on."""

from __future__ import annotations

from matplotlib.figure import Figure

from lab35_course.figure import BLUE, GREEN, INK, canvas, figure
from lab35_course.results import Data


@figure("speed-ladder", results=["speed.ladder"])
def speed_ladder(ladder: Data) -> Figure:
    """Draw how far each rung lies above the floor: bars that begin there, on a log axis."""
    *rungs, floor = ladder["rows"]
    least = floor["microseconds"]
    drawing, axes = canvas(size=(5.0, 2.9))
    for place, row in enumerate(rungs):
        time, below = row["microseconds"], row["rung"] in ("compiled", "numba")
        axes.barh(
            place,
            time - least,
            left=least,
            height=0.62,
            color=GREEN if below else BLUE,
            hatch="//" if below else None,
            edgecolor=INK,
            linewidth=0.8,
        )
        axes.annotate(
            f"{time:,.0f} µs",
            (time, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.annotate(
        f"floor, {least:.0f} µs",
        (least, len(rungs) - 0.35),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
    )
    axes.set(
        xscale="log",
        xlim=(least, 2.3 * rungs[0]["microseconds"]),
        ylim=(len(rungs) + 0.05, -0.6),
        xlabel="microseconds a token",
        yticks=range(len(rungs)),
    )
    axes.set_yticklabels([row["rung"] for row in rungs])
    axes.tick_params(axis="y", length=0)
    ticks = [tick for tick in (50, 100, 200, 500, 1000, 2000) if tick >= least]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    return drawing
