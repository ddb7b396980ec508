"""The training run's loss curves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab35_course.figure import BLUE, INK, ORANGE, canvas, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lab35_course.results import Data


@figure("training-loss", results=["training.record"])
def training_loss(record: Data) -> Figure:
    """Training and held-out loss over the steps, with the shipped weights marked."""
    drawing, axes = canvas()
    steps = [point["step"] for point in record["curve"]]
    training = [point["train"] for point in record["curve"]]
    held_out = [point["held_out"] for point in record["curve"]]
    axes.plot(steps, training, color=ORANGE, linestyle=(0, (5, 1.5)), label="training batches")
    axes.plot(steps, held_out, color=BLUE, linestyle="-", label="held-out tenth")

    best = (record["best_step"], record["held_out_nats_per_token"])
    axes.plot(*best, marker="o", markersize=7, fillstyle="none", color=INK, clip_on=False)
    axes.annotate(
        f"shipped: step {best[0]:,}, {best[1]:.3f}",
        best,
        xytext=(0, 28),
        textcoords="offset points",
        ha="right",
        arrowprops={"arrowstyle": "-", "color": INK, "shrinkB": 5, "relpos": (1, 0)},
    )
    axes.set(xlabel="step", ylabel="loss, nats a token", xlim=(0, record["recipe"]["steps"]))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y")
    axes.legend()
    return drawing
