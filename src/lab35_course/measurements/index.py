"""How long a chapter takes to read, counted in its words and its lines of code."""

from __future__ import annotations

import re

from lab35_course.fences import scan
from lab35_course.results import ROOT, Data, Size, invariant, measurement

WORDS_A_MINUTE, SECONDS_A_LINE = 200, 4
STEP = 5
"""Minutes that a reading time is rounded to, outwards: a reworded sentence rarely moves it."""
CHAPTERS = (
    "model",
    "loop",
    "sampling",
    "cache",
    "verification",
    "context",
    "streaming",
    "batching",
    "timing",
    "speed",
)
"""The chapters that are read from the first line to the last; the command line is looked up."""


def minutes(text: str) -> float:
    """Estimate how long a page takes to read.

    Args:
        text: Its Markdown. Outputs, tables and comments are looked at and not read: they count as
            nothing.

    Returns:
        Minutes.
    """
    lines, code = text.split("\n"), 0
    for fence in scan(text, ROOT / "docs"):
        if fence.language == "python":
            code += sum(bool(line.strip()) for line in fence.code.split("\n"))
        lines[fence.line - 1 : fence.end] = [""] * (fence.end - fence.line + 1)
    prose = "\n".join(line for line in lines if not line.lstrip().startswith("|"))
    words = re.findall(r"[^\W\d_][\w’'-]*", re.sub(r"<!--.*?-->|\]\([^)]*\)", "", prose))
    return len(words) / WORDS_A_MINUTE + code * SECONDS_A_LINE / 60


@measurement("index.reading", kind="exact")
def reading(size: Size) -> Data:
    """Take the shortest and the longest chapter, rounded outwards."""
    times = [
        minutes((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")) for name in CHAPTERS
    ]
    return {
        "chapters": len(times),
        "words_a_minute": WORDS_A_MINUTE,
        "seconds_a_line": SECONDS_A_LINE,
        "least": STEP * int(min(times) // STEP),
        "most": STEP * -int(-max(times) // STEP),
    }


@invariant("index.reading")
def chapters_are_not_books(data: Data) -> None:
    """A chapter of less than five minutes, or of more than an hour, would be a mistake."""
    assert 5 <= data["least"] < data["most"] <= 60, data
