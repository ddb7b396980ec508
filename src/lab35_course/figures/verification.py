"""Verification in pictures: differences below margins, and the bar between rounding and faults."""

from __future__ import annotations

from matplotlib.figure import Figure

from lab35_course.figure import BLUE, GREEN, INK, ORANGE, canvas, figure
from lab35_course.results import Data


@figure("verification-steps", results=["verification.report"])
def steps(report: Data) -> Figure:
    """Plot each step's difference and margin over a logarithmic axis, with the bar."""
    drawing, axes = canvas(size=(6.4, 3.6))
    at = range(report["steps"])
    # A logarithmic axis has no place for 0: where the bits agree there is no mark.
    differences = [value or float("nan") for value in report["differences"]]
    axes.plot(at, report["margins"], "o-", markersize=3, linewidth=1.0, label="margin")
    axes.plot(at, differences, "s-", color=ORANGE, markersize=3, linewidth=1.0, label="difference")
    axes.axhline(report["atol"], color=INK, linewidth=1.0, linestyle="--")
    axes.annotate(
        "atol",
        (report["steps"] - 1, report["atol"]),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
    )
    axes.set(yscale="log", xlabel="step", ylabel="logits", xlim=(-1, report["steps"]))
    axes.grid(visible=True)
    axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.42))
    return drawing


@figure("verification-bar", results=["verification.precision", "verification.faults"])
def bar(precision: Data, faults: Data) -> Figure:
    """Line up what rounding moves and what faults move, on both sides of the bar."""
    rows = [
        (f"no fault, {row['dtype']}", row["apart"], BLUE, "o")
        for row in precision["rows"]
        if row["dtype"] in ("float64", "float32")
    ]
    for row in faults["rows"][1:]:
        rounded = row["change"].startswith("keys and values")
        rows.append(
            (row["change"], row["difference"], *((GREEN, "D") if rounded else (ORANGE, "s")))
        )
    drawing, axes = canvas(size=(6.4, 2.9))
    for line, (_, difference, colour, mark) in enumerate(rows):
        axes.plot(difference, line, mark, color=colour, markersize=7)
    axes.axvline(1e-4, color=INK, linewidth=1.0, linestyle="--")
    axes.annotate("atol", (1e-4, -0.4), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.set(
        xscale="log",
        xlabel="largest logit difference",
        ylim=(len(rows) - 0.5, -0.7),
        xlim=(1e-15, 1e2),
    )
    axes.grid(visible=True, axis="x")
    return drawing
