"""Fences that continue another one say so on the page, and can be copied with what they need.

The title of such a fence names the one before it in its chain, as a link. Each fence of a chain has
an id, and `data-continues` lists the ids of those that a fence needs: the copy button takes them
all, so that what is copied runs as it is.
"""

from __future__ import annotations

import hashlib
import html
import re
from pathlib import Path

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

from lab35_course.fences import Fence, chained, scan

__all__ = ["FenceLabelsExtension", "labelled", "makeExtension"]


def labelled(text: str, path: Path) -> str:
    """Write into the opening line of each fence of a chain what the site shows of the chain.

    Args:
        text: The Markdown of a page.
        path: Where it comes from, for messages.

    Returns:
        The same lines, with ids, titles and `data-continues` for `pymdownx.superfences`.

    Raises:
        FenceError: If a fence is malformed, or a continuation has nothing to continue.
    """
    lines = text.split("\n")
    chains = chained(scan(text, path))
    names: dict[Fence, str] = {}
    for fence, before in chains.items():
        if before or any(fence in others for others in chains.values()):
            code = "".join(needed.code for needed in (*before, fence))
            names[fence] = f"code-{hashlib.sha256(code.encode()).hexdigest()[:8]}"
    for fence, name in names.items():
        kept = re.sub(r' title="[^"]*"', "", fence.info.strip("{}").removeprefix("."))
        options = [f".{kept}", f"#{name}", *_title(fence, chains[fence], names)]
        lines[fence.line - 1] = f"{fence.indent}{fence.marker}{{{' '.join(options)}}}"
    return "\n".join(lines)


def _title(fence: Fence, before: tuple[Fence, ...], names: dict[Fence, str]) -> list[str]:
    own = html.escape(fence.title or "")
    if not before:
        return [f'title="{own}"', 'title_mode="html"'] if own else []
    last = before[-1]
    told = f"continues {html.escape(last.title)}" if last.title else "continues the code above"
    link = f"<a class='continues' href='#{names[last]}'>{told}</a>"
    needed = " ".join(names[one] for one in before)
    return [f'title="{f"{own} {link}".strip()}"', 'title_mode="html"', f'data-continues="{needed}"']


class _LabelProcessor(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return labelled("\n".join(lines), Path("page")).split("\n")


class FenceLabelsExtension(Extension):
    """Label the fences before `pymdownx.superfences` takes them."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the preprocessor before that of the fences (priority 25)."""
        md.preprocessors.register(_LabelProcessor(md), "fence_labels", 28)


def makeExtension(**options: object) -> FenceLabelsExtension:
    """Build the extension for Python-Markdown."""
    return FenceLabelsExtension(**options)
