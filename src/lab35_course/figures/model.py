"""The model in pictures: what it expects, how it is built, and where two heads look."""

from __future__ import annotations

from lab35_course.figure import figure
from lab35_course.results import Data
from lab35_course.sketch import PANEL, PAPER, RUST, SOFT, TEAL, Sketch

WIDTH, EDGE = 340, 1
"""Pixels of each drawing, and what a dotted edge needs at its sides."""


@figure("model-odds", results=["model.odds"])
def odds(data: Data) -> Sketch:
    """A text that grows by a token per row, with the likeliest next one and its probability."""
    top, pitch, guess, bar, full = 34, 30, 130, 200, 98
    sketch = Sketch(WIDTH, top + pitch * len(data["tokens"]) + 4)
    for x, head in ((0, "the text so far"), (guess, "expects"), (bar, "how likely")):
        sketch.text(x, 16, head, size=12, fill=SOFT)
    read = ""
    letter = 7.8  # the width of one in code at 13 pixels
    for row, token in enumerate(data["tokens"]):
        y, share = top + pitch * row, data["odds"][-1][row]
        sketch.text(0, y + 16, read, mono=True, fill=SOFT)
        sketch.text(letter * len(read), y + 16, token, mono=True, bold=True, fill=RUST)
        sketch.text(guess, y + 16, data["next"][-1][row], mono=True, bold=True)
        sketch.box(bar, y + 3, full, 18, fill=PANEL)
        sketch.box(bar, y + 3, full * share, 18, fill=RUST)
        sketch.text(bar + full + 4, y + 16, f"{share:.1%}".replace("%", " %"), size=12)
        read += token
    return sketch


def _part(sketch: Sketch, y: float, name: str, shape: str = "", *, x: float = 64) -> None:
    """Draw a part of the model: its name on the left, a shape on the right."""
    sketch.box(x, y, WIDTH - EDGE - x, 28, fill=PANEL)
    sketch.text(x + 10, y + 19, name)
    sketch.text(WIDTH - 11, y + 19, shape, anchor="end", size=12, fill=SOFT)


STREAM = 20
"""Where the residual stream runs down, in pixels from the left."""


def _plus(sketch: Sketch, y: float) -> None:
    """Draw where something is added to the stream."""
    sketch.box(STREAM - 9, y - 9, 18, 18, fill=RUST)
    sketch.text(STREAM, y + 5, "+", anchor="middle", size=15, bold=True, fill=PAPER)


def _down(sketch: Sketch, *gaps: tuple[float, float]) -> None:
    """Draw the way from each part to the one below it."""
    for top, bottom in gaps:
        sketch.line((80, top), (80, bottom), stroke=SOFT)


def _tokens(sketch: Sketch, y: float, tokens: list[str]) -> None:
    """Draw tokens side by side, over the whole width."""
    width = (WIDTH - 2 * EDGE + 6) / len(tokens)
    for column, token in enumerate(tokens):
        x = EDGE + width * column
        sketch.box(x, y, width - 6, 26, fill="none", dotted=True)
        sketch.text(x + width / 2 - 3, y + 18, token, anchor="middle", mono=True)


@figure("model-whole", results=["model.odds"])
def whole(data: Data) -> Sketch:
    """The forward pass from tokens to logits, with the shapes of the weights and the stream."""
    sketch = Sketch(WIDTH, 482)
    sketch.text(0, 16, "The whole model", bold=True)
    sketch.text(WIDTH - EDGE, 16, "T tokens", anchor="end", size=12, fill=SOFT)
    _tokens(sketch, 26, data["tokens"])
    sketch.line((STREAM, 56), (STREAM, 68), arrow=True)
    _part(sketch, 72, "token embedding", "512 × 128", x=EDGE)
    sketch.line((STREAM, 100), (STREAM, 134), width=3)
    _part(sketch, 111, "position embedding", "128 × 128")
    sketch.line((64, 125), (STREAM + 12, 125), arrow=True)
    sketch.line((STREAM, 125), (STREAM, 360), width=3)
    _plus(sketch, 125)
    sketch.text(64, 163, "the residual stream, T × 128", size=12, fill=SOFT)
    for layer in range(4):
        y = 176 + 44 * layer
        _part(sketch, y, f"block {layer}: attention, then MLP", "T × 128", x=EDGE)
    _part(sketch, 356, "LayerNorm", "T × 128", x=EDGE)
    sketch.line((STREAM, 384), (STREAM, 394), arrow=True)
    _part(sketch, 398, "head: the token embedding", "128 × 512", x=EDGE)
    sketch.line((STREAM, 426), (STREAM, 436), arrow=True)
    sketch.text(38, 440, "logits, T × 512; the likeliest of each row:", size=12, fill=SOFT)
    _tokens(sketch, 450, data["next"][-1])
    return sketch


@figure("model-block", results=[])
def block() -> Sketch:
    """One block: what attention and the MLP read from the stream, and add to it."""
    sketch = Sketch(WIDTH, 482)
    sketch.line((STREAM, 26), (STREAM, 478), width=3)
    sketch.text(0, 16, "One of the four blocks", bold=True)
    sketch.text(WIDTH - EDGE, 16, "T × 128, in and out", anchor="end", size=12, fill=SOFT)

    sketch.line((STREAM, 46), (60, 46), arrow=True)
    _part(sketch, 32, "LayerNorm", "T × 128")
    sketch.text(94, 77, "one matrix, 128 × 384, makes three:", size=12, fill=SOFT)
    third = (WIDTH - EDGE - 64 + 6) / 3
    for column, (name, fill) in enumerate((("queries", PANEL), ("keys", TEAL), ("values", TEAL))):
        x = 64 + third * column
        sketch.box(x, 84, third - 6, 28, fill=fill, opacity=1 if fill == PANEL else 0.18)
        sketch.text(x + third / 2 - 3, 103, name, anchor="middle")
    sketch.text(94, 129, "each cut into 4 heads, T × 32", size=12, fill=SOFT)
    _part(sketch, 136, "queries · keys / √32", "4 × T × T")
    _part(sketch, 172, "hide the future, softmax", "4 × T × T")
    _part(sketch, 208, "weights · values", "4 × T × 32")
    _part(sketch, 244, "output matrix", "128 × 128")
    _down(sketch, (60, 84), (112, 136), (164, 172), (200, 208), (236, 244))
    sketch.line((64, 258), (STREAM + 12, 258), arrow=True)
    _plus(sketch, 258)

    sketch.line((STREAM, 312), (60, 312), arrow=True)
    _part(sketch, 298, "LayerNorm", "T × 128")
    _part(sketch, 334, "MLP, up", "128 × 512")
    _part(sketch, 370, "GELU", "T × 512")
    _part(sketch, 406, "MLP, down", "512 × 128")
    _down(sketch, (326, 334), (362, 370), (398, 406))
    sketch.line((64, 420), (STREAM + 12, 420), arrow=True)
    _plus(sketch, 420)
    sketch.box(64, 454, 14, 14, fill=TEAL, opacity=0.18)
    sketch.text(84, 466, "what a cache keeps of a token", size=12, fill=SOFT)
    return sketch


def _head(data: Data, name: str, title: str) -> Sketch:
    """Draw the weights of one head as a square: a row is a token that looks, a column one seen."""
    left, top, width, height = 58, 66, 56, 30
    tokens = data["tokens"]
    sketch = Sketch(WIDTH, top + height * len(tokens) + 4)
    sketch.text(0, 16, title, bold=True)
    sketch.text(left, 38, "looks at", size=12, fill=SOFT)
    for i, token in enumerate(tokens):
        sketch.text(left + width * i + width / 2, 58, token, anchor="middle", mono=True, size=12)
        sketch.text(left - 8, top + height * i + 20, token, anchor="end", mono=True, size=12)
        for j, weight in enumerate(data["heads"][name][i]):
            x, y = left + width * j + 1, top + height * i + 1
            if j > i:
                sketch.box(x, y, width - 2, height - 2, dotted=True)
                continue
            # A tint, so that ink can be read on it in light and in dark.
            sketch.box(x, y, width - 2, height - 2, fill=RUST, opacity=0.45 * weight)
            sketch.text(
                x + width / 2 - 1,
                y + 18,
                f"{100 * weight:.0f} %",
                anchor="middle",
                size=12,
                bold=weight > 0.5,
            )
    return sketch


@figure("model-before", results=["model.attention"])
def before(data: Data) -> Sketch:
    """The head that looks at the token before."""
    return _head(data, "before", "Layer 0, head 0")


@figure("model-begins", results=["model.attention"])
def begins(data: Data) -> Sketch:
    """The head that looks at the beginning of the word."""
    return _head(data, "begins", "Layer 0, head 3")
