"""The chapter on sampling: what each setting leaves, and what each filter keeps."""

from __future__ import annotations

from matplotlib.figure import Figure

from lab35_course.figure import BLUE, INK, ORANGE, canvas, figure
from lab35_course.results import Data


@figure("sampling-filters", results=["sampling.example"])
def sampling_filters(example: Data) -> Figure:
    """Draw the five probabilities under each setting; what is removed is an empty outline."""
    drawing, grid = canvas(2, 3, size=(6.4, 4.0), sharex=True, sharey=True)
    before = example["five"]
    for axes, row in zip(grid.flat, example["rows"], strict=True):
        after = row["probabilities"]
        outline = {"facecolor": "none", "edgecolor": INK, "linestyle": ":", "linewidth": 1}
        axes.bar(range(5), before, width=0.8, **outline)
        axes.bar(range(5), after, width=0.6, color=BLUE, edgecolor="none")
        for token, probability in enumerate(after):
            axes.annotate(
                f"{round(probability, 3):g}" if probability else "×",
                (token, max(probability, before[token])),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axes.set(title=row["name"], xticks=range(5), ylim=(0, 1.12), yticks=(0, 0.5, 1))
        axes.tick_params(axis="x", length=0)
    for axes in grid[1]:
        axes.set_xlabel("token")
    for axes in grid[:, 0]:
        axes.set_ylabel("probability")
    return drawing


@figure("sampling-kept", results=["sampling.contexts"])
def sampling_kept(contexts: Data) -> Figure:
    """Plot mass against tokens kept, where the model is surest and where it is least sure."""
    drawing, axes = canvas(size=(6.4, 3.6))
    for name, label, colour, filled in (
        ("sure", "surest place", BLUE, "full"),
        ("unsure", "least sure place", ORANGE, "none"),
    ):
        place = contexts[name]
        kept = range(1, len(place["mass"]) + 1)
        axes.plot(kept, place["mass"], label=label, color=colour)
        for count in (place["top_k"], place["top_p"]):
            where = (count, place["mass"][count - 1])
            axes.plot(*where, "o", color=colour, fillstyle=filled, markersize=6, clip_on=False)
    unsure = contexts["unsure"]
    for count, text in (
        (unsure["top_k"], f"mass {unsure['top_k_mass']:.2f}"),
        (unsure["top_p"], f"{unsure['top_p']} tokens"),
    ):
        where = (count, unsure["mass"][count - 1])
        axes.annotate(text, where, xytext=(9, -9), textcoords="offset points", va="center")
    axes.axvline(40, color=INK, linewidth=0.9, linestyle="--")
    axes.axhline(0.95, color=INK, linewidth=0.9, linestyle="--")
    axes.annotate("k = 40", (40, 0.03), xytext=(4, 0), textcoords="offset points")
    axes.annotate("p = 0.95", (1, 0.95), xytext=(8, -12), textcoords="offset points")
    axes.set_xscale("log", base=2)
    ticks = [2**n for n in range(10)]
    axes.set(
        xlabel="tokens kept, from the likeliest down",
        ylabel="their mass",
        xlim=(1, 512),
        ylim=(0, 1.02),
        xticks=ticks,
    )
    axes.set_xticklabels(ticks)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.12))
    return drawing


@figure("sampling-trace", results=["sampling.trace"])
def sampling_trace(trace: Data) -> Figure:
    """Draw the forty best tokens of one real step: the model's odds, and what is left of them."""
    drawing, axes = canvas(size=(6.4, 3.4))
    candidates, drawn = trace["candidates"], trace["drawn"]
    places = range(len(candidates))
    odds = [each["probability"] for each in candidates]
    left = [each["final"] for each in candidates]
    outline = {"facecolor": "none", "edgecolor": INK, "linestyle": ":", "linewidth": 1}
    axes.bar(places, left, width=0.6, color=BLUE, edgecolor="none", label="after the filters")
    axes.bar(places, odds, width=0.8, label="the model's odds", **outline)
    for place in places:
        if not left[place]:
            axes.plot(place, odds[place] + 0.006, "x", color=INK, markersize=3.5)
    axes.annotate(
        f"drawn: {candidates[drawn]['text']}",
        (drawn, left[drawn]),
        xytext=(0, 36),
        textcoords="offset points",
        ha="center",
        arrowprops={"arrowstyle": "->", "color": INK},
    )
    axes.set_xticks(places, [each["text"] for each in candidates], rotation=90, fontsize=7.5)
    axes.tick_params(axis="x", length=0)
    axes.set(ylabel="probability", xlim=(-0.7, len(candidates) - 0.3))
    axes.legend(loc="upper right")
    return drawing
