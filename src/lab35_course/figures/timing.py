"""Timing in pictures: where the cache pays, and what a batch gains."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lab35_course.figure import DASHES, INK, canvas, figure
from lab35_course.results import Data

PLAIN = FuncFormatter(lambda value, _: f"{value:,g}")
"""Numbers as they are, on a logarithmic axis."""


@figure("timing-pays", results=["timing.pays"])
def pays(timed: Data) -> Figure:
    """Plot how many times faster one step is with the cache, against the length."""
    drawing, axes = canvas(size=(6.4, 3.8))
    axes.axhline(1, color=INK, linewidth=0.8)
    for model, marker in zip(timed["models"], "os^", strict=False):
        rows = model["rows"]
        lengths = [row["length"] for row in rows]
        speedups = [row["speedup"]["median"] for row in rows]
        axes.plot(lengths, speedups, marker=marker, markersize=5, label=model["name"])
    ticks = [row["length"] for row in max((m["rows"] for m in timed["models"]), key=len)]
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="T: tokens of the text, the one that is decoded among them",
        ylabel="times faster with the cache",
    )
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 50, 100]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(PLAIN)
    axes.grid(visible=True)
    axes.legend(loc="upper left")
    return drawing


@figure("timing-batch", results=["timing.batch", "timing.pieces"])
def batch(timed: Data, pieces: Data) -> Figure:
    """Plot tokens a second against the batch for both lengths, below what a prefill reaches."""
    drawing, axes = canvas(size=(6.4, 3.8))
    for length, marker in zip(timed["lengths"], "os", strict=False):
        sizes = [row["batch"] for row in length["rows"]]
        rates = [row["tokens_per_second"] for row in length["rows"]]
        name = f"decode, T = {length['positions']}"
        axes.plot(sizes, rates, marker=marker, markersize=5, label=name)
    one = timed["lengths"][0]["rows"][0]["tokens_per_second"]
    axes.plot(
        sizes,
        [one * B for B in sizes],
        color=INK,
        linewidth=1,
        linestyle=DASHES[2],
        label="if rows were free",
    )
    prefill = pieces["rows"][-1]["tokens_per_second"]
    axes.axhline(prefill, color=INK, linewidth=1, linestyle=DASHES[3])
    axes.annotate(
        f"prefill of {pieces['tokens']}",
        (sizes[0], prefill),
        xytext=(0, 4),
        textcoords="offset points",
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="batch: texts that run together",
        ylabel="tokens a second",
        ylim=(None, 3 * prefill),
    )
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.yaxis.set_major_locator(FixedLocator([1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(PLAIN)
    axes.grid(visible=True)
    axes.legend(loc="lower right")
    return drawing
