"""The chapter on speed: the ladder, and the floor that it stands on."""

from __future__ import annotations

from matplotlib.figure import Figure

from lab35_course.figure import BLUE, GREEN, INK, ORANGE, canvas, figure
from lab35_course.results import Data


@figure("speed-ladder", results=["speed.ladder"])
def speed_ladder(ladder: Data) -> Figure:
    """Draw microseconds a token on a log axis, and the floor as a line."""
    *rungs, floor = ladder["rows"]
    drawing, axes = canvas(size=(6.4, 2.9))
    for place, row in enumerate(rungs):
        time = row["microseconds"]
        library = row["rung"] in ("compiled", "numba")
        axes.barh(
            place,
            time,
            height=0.62,
            color=GREEN if library else BLUE,
            hatch="//" if library else None,
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
    axes.axvline(floor["microseconds"], color=ORANGE, linestyle="--")
    axes.annotate(
        f"floor, {floor['microseconds']:.0f} µs",
        (floor["microseconds"], len(rungs) - 0.35),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
    )
    axes.set(
        xscale="log",
        xlim=(floor["microseconds"] / 2, 2.2 * rungs[0]["microseconds"]),
        ylim=(len(rungs) + 0.05, -0.6),
        xlabel="microseconds a token",
        yticks=range(len(rungs)),
    )
    axes.set_yticklabels([row["rung"] for row in rungs])
    axes.tick_params(axis="y", length=0)
    ticks = [tick for tick in (20, 50, 100, 200, 500, 1000) if axes.get_xlim()[0] <= tick]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    return drawing
