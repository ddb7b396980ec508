"""The end of the block in pictures: what each policy sees, costs and loses."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lab35_course.figure import BLUE, DASHES, INK, ORANGE, canvas, figure
from lab35_course.results import Data


@figure("context-windows", results=["context.windows"])
def windows(watched: Data) -> Figure:
    """Draw the columns that each step reads from the cache, runs, or no longer sees."""
    P, N, block = watched["prompt"], watched["new"], watched["block"]
    drawing, panels = canvas(1, 3, size=(6.4, 2.5), sharey=True)
    for axes, name in zip(panels, ("stop", "slide", "refill"), strict=True):
        dots = []
        for row, step in enumerate(watched[name]):
            first, fed_from, end = step["first"], step["fed_from"], step["end"]
            style = {"edgecolor": INK, "linewidth": 0.5}
            read, run = (first, row), (fed_from, row)
            axes.add_patch(Rectangle(read, fed_from - first, 1, facecolor=BLUE, **style))
            axes.add_patch(Rectangle(run, end - fed_from, 1, facecolor=ORANGE, **style))
            dots += [(column + 0.5, row + 0.5) for column in range(fed_from, end)]
        axes.plot(*zip(*dots, strict=True), ".", color=INK, markersize=3)
        axes.axvline(block, color=INK, linewidth=0.8, linestyle=DASHES[1])
        axes.set(
            xlim=(0, P + N - 1),
            ylim=(N, 0),
            aspect="equal",
            xlabel="token of the text",
            title=f"{name}: {len(dots)} run",
            xticks=[0.5, block - 0.5],
            yticks=[0.5, N - 0.5],
        )
        axes.set_xticklabels([0, block - 1])
        axes.set_yticklabels([1, N])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("step")
    return drawing


@figure("context-cost", results=["context.cost"])
def cost(counted: Data) -> Figure:
    """Plot token-forwards, and the tokens that each step sees, against new tokens."""
    curve, P, block = counted["curve"], counted["prompt"], counted["block"]
    new, limit = curve["new"], block - P + 1  # the last new token before the limit
    drawing, (total, sight) = canvas(1, 2, size=(6.4, 3.1))
    for name, dashes in zip(("slide", "refill"), DASHES, strict=False):
        total.plot(new, curve[name], label=name, linestyle=dashes)
        sight.plot(new, curve[f"{name}_visible"], label=name, linestyle=dashes)
    for axes, height in ((total, block), (sight, block)):
        axes.plot(limit, height, "X", color=INK, markersize=7, label="stop", linestyle="none")
        axes.set(xlabel=f"new tokens (P = {P})", xlim=(0, new[-1]))
        axes.grid(visible=True)
        axes.legend(loc="lower right")
    total.set(yscale="log", title="token-forwards, in all")
    sight.set(ylim=(0, 1.1 * block), title="tokens that a step sees", yticks=[0, 32, 64, 96, 128])
    return drawing


@figure("context-lost", results=["context.lost"])
def lost(data: Data) -> Figure:
    """Plot the distance from the full window against the tokens that are visible."""
    drawing, axes = canvas(size=(6.4, 3.2))
    rows = data["windows"]
    tokens = [row["tokens"] for row in rows]
    axes.plot(
        tokens, [row["kl"] for row in rows], "o-", color=INK, label="the last tokens, run anew"
    )
    for name, label, colour, dashes in (
        ("drop", f"{data['block']} entries, the oldest dropped", ORANGE, DASHES[1]),
        ("refill", f"refill, {data['block'] // 2} to {data['block']} tokens", BLUE, DASHES[3]),
    ):
        axes.axhline(data["policies"][name]["kl"], color=colour, linestyle=dashes, label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens visible",
        ylabel="KL from the full window, nats",
        xticks=tokens,
    )
    axes.set_xticklabels(tokens)
    axes.minorticks_off()
    axes.grid(visible=True)
    axes.legend(loc="upper right", bbox_to_anchor=(1, 0.92))
    return drawing
