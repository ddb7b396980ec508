"""Drawings of boxes, lines and words, written as SVG without a plotting library.

What has axes and data is a plot, and matplotlib draws it. A diagram is a `Sketch`: its words are
text in the page's own typeface, which can be selected, and its paints are the page's own, in light
and in dark. It is narrow enough for a phone and is never shrunk there, so that what is set in
13 pixels is read in 13 pixels.

    @figure("model-odds", results=["model.odds"])
    def odds(data: Data) -> Sketch:
        sketch = Sketch(340, 120)
        sketch.box(8, 8, 100, 26, fill=PANEL)
        sketch.text(16, 25, "a token", mono=True)
        return sketch

Coordinates are pixels, with the origin in the top left corner.
"""

from __future__ import annotations

from typing import Literal
from xml.sax.saxutils import escape

__all__ = ["INK", "PANEL", "PAPER", "RUST", "SMALLEST", "SOFT", "TEAL", "WIDEST", "Sketch"]

WIDEST = 358
"""Pixels that a phone of 390 leaves to the text of a page."""
SMALLEST = 11
"""Pixels of the smallest words."""

INK = "currentColor"
PAPER = "var(--lab-paper, #fdfcf9)"
SOFT = "var(--lab-ink-soft, #635c53)"
PANEL = "var(--lab-panel, #f5f2eb)"
RUST = "var(--lab-accent-strong, #8a3a22)"
TEAL = "var(--lab-accent, #1d5c63)"
"""Paints: names of `lab35.css`, each with its light colour for where there is no page around.

Rust is what is computed now, teal what is kept.
"""

_SANS = "var(--lab-sans, 'Source Sans 3', sans-serif)"
_MONO = "var(--md-code-font-family, 'Source Code Pro', monospace)"


class Sketch:
    """A drawing of `width` by `height` pixels; shapes lie in the order in which they are added.

    Raises:
        ValueError: If it is wider than what a phone shows.
    """

    def __init__(self, width: int, height: int) -> None:
        if not 1 <= width <= WIDEST:
            raise ValueError(f"width must lie in [1, {WIDEST}] pixels, got {width}")
        self.width, self.height = width, height
        self._shapes: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        opacity: float = 1,
        dotted: bool = False,
    ) -> None:
        """Add a rectangle with slightly rounded corners.

        Args:
            x: Its left edge.
            y: Its upper edge.
            width: Its width.
            height: Its height.
            fill: Its paint.
            opacity: Of the paint, from 0 to 1.
            dotted: Whether a dotted hairline runs along its edge.
        """
        style = f"fill: {fill}" + (f"; fill-opacity: {_number(opacity)}" if opacity != 1 else "")
        if dotted:
            style += f"; stroke: {SOFT}; stroke-width: 0.8; stroke-dasharray: 1 2.5"
        where = " ".join(
            f'{name}="{_number(size)}"'
            for name, size in (("x", x), ("y", y), ("width", width), ("height", height))
        )
        self._shapes.append(f'<rect {where} rx="3" style="{style}"/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: Literal["start", "middle", "end"] = "start",
        size: int = 13,
        bold: bool = False,
        mono: bool = False,
        fill: str = INK,
    ) -> None:
        """Add a line of text.

        Args:
            x: Where it is anchored.
            y: Its baseline.
            words: What it says.
            anchor: Which end of the line lies at `x`.
            size: Height of the type, in pixels.
            bold: Whether it is set in semibold.
            mono: Whether it is set in the typeface of code, as tokens are.
            fill: Its paint.

        Raises:
            ValueError: If the type is too small to be read on a phone.
        """
        if size < SMALLEST:
            raise ValueError(f"size must be at least {SMALLEST} pixels, got {size}")
        style = f"fill: {fill}; font: {600 if bold else 400} {size}px {_MONO if mono else _SANS}"
        self._shapes.append(
            f'<text x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}" style="{style}">'
            f"{escape(words)}</text>"
        )

    def line(
        self,
        *points: tuple[float, float],
        stroke: str = INK,
        width: float = 1.2,
        arrow: bool = False,
    ) -> None:
        """Add a line through some points.

        Args:
            points: At least two.
            stroke: Its paint.
            width: Its thickness.
            arrow: Whether its last point carries a head.
        """
        path = "M" + " L".join(f"{_number(x)} {_number(y)}" for x, y in points)
        if arrow:
            (x0, y0), (x1, y1) = points[-2:]
            length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
            dx, dy = 5 * (x1 - x0) / length, 5 * (y1 - y0) / length
            barbs = [(x1 - dx + side * dy * 0.7, y1 - dy - side * dx * 0.7) for side in (1, -1)]
            tip = f" L{_number(x1)} {_number(y1)} L"
            path += " M" + tip.join(f"{_number(x)} {_number(y)}" for x, y in barbs)
        style = f"fill: none; stroke: {stroke}; stroke-width: {_number(width)}"
        self._shapes.append(f'<path d="{path}" style="{style}"/>')

    def svg(self) -> str:
        """Write the drawing as an SVG file.

        Returns:
            The same bytes on every machine.
        """
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="sketch" width="{self.width}" '
            f'height="{self.height}" viewBox="0 0 {self.width} {self.height}">'
        )
        return "\n".join([head, *self._shapes, "</svg>", ""])


def _number(value: float) -> str:
    """Write a coordinate with a hundredth of a pixel, and no more digits than it needs."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
