"""The chapter on the loop: what runs through the model."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lab35_course.figure import BLUE, INK, ORANGE, canvas, figure
from lab35_course.results import Data


@figure("loop-cost", results=["loop.cost"])
def loop_cost(cost: Data) -> Figure:
    """Plot token-forwards against new tokens, for both loops."""
    curve = cost["curve"]
    drawing, axes = canvas()
    axes.plot(curve["new"], curve["uncached"], label="uncached: N·P + N(N − 1)/2")
    axes.plot(curve["new"], curve["cached"], label="cached: P + N − 1")
    lesson = cost["lesson"]
    for name, offset in (("uncached", (-8, 8)), ("cached", (-4, 10))):
        axes.plot(100, lesson[name], "o", color=INK, markersize=4)
        axes.annotate(
            f"{lesson[name]:,}",
            (100, lesson[name]),
            xytext=offset,
            textcoords="offset points",
            ha="right",
        )
    axes.set(
        xlabel=f"new tokens, N (P = {curve['prompt']})", ylabel="token-forwards", xlim=(0, 113)
    )
    axes.grid(visible=True)
    axes.legend(loc="upper left")
    return drawing


@figure("loop-steps", results=["loop.cost"])
def loop_steps(cost: Data) -> Figure:
    """Draw which columns each step feeds, for a prompt of five and five new tokens."""
    P, N = 5, 5
    drawing, both = canvas(1, 2, size=(6.4, 2.7), sharey=True)
    for axes, title, cached in zip(both, ("uncached", "cached"), (False, True), strict=True):
        fed_in_all = 0
        for step in range(N):
            width = P + step
            for column in range(width):
                fed = not cached or step == 0 or column == width - 1
                fed_in_all += fed
                colour = (BLUE if column < P else ORANGE) if fed else "none"
                axes.add_patch(
                    Rectangle(
                        (column + 0.06, step + 0.06),
                        0.88,
                        0.88,
                        facecolor=colour,
                        edgecolor=INK,
                        linewidth=0.8,
                        linestyle="-" if fed else ":",
                    )
                )
        axes.set(
            xlim=(0, P + N - 1),
            ylim=(N, 0),
            xlabel="position",
            title=f"{title}: {fed_in_all} token-forwards",
            xticks=[i + 0.5 for i in range(P + N - 1)],
            yticks=[i + 0.5 for i in range(N)],
        )
        axes.set_xticklabels(range(P + N - 1))
        axes.set_yticklabels(range(1, N + 1))
        axes.set_aspect("equal")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    both[0].set_ylabel("step")
    return drawing
