"""Formulas as MathML, made while the site is built: the page needs no script to show them.

`pymdownx.arithmatex` (with `generic: true`) finds the TeX; this extension replaces each formula
with what a browser and a screen reader understand. TeX that it does not know fails the build.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from markdown import Extension
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString
from math_core import LatexError, LatexToMathML

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from markdown import Markdown

_CONVERTER = LatexToMathML(fancy_error=False)


def to_mathml(tex: str, *, display: bool) -> str:
    """Turn TeX into a `<math>` element.

    Args:
        tex: The formula, without delimiters.
        display: Whether it stands on a line of its own.

    Returns:
        MathML Core as HTML.

    Raises:
        ValueError: If the TeX has a command or an environment that is not known.
    """
    try:
        return _CONVERTER.convert_with_local_state(tex, displaystyle=display)
    except LatexError as error:
        raise ValueError(f"formula {tex!r}: {error}") from error


class _MathProcessor(Treeprocessor):
    def run(self, root: Element) -> None:
        for element in root.iter():
            if element.get("class") == "arithmatex":
                display = element.tag == "div"
                delimited = html.unescape((element.text or "").strip())
                mathml = to_mathml(delimited[2:-2].strip(), display=display)
                element.text = AtomicString(self.md.htmlStash.store(mathml))


class MathMLExtension(Extension):
    """Convert what arithmatex found, once the inline patterns have run."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the tree processor after the inline one (priority 20)."""
        md.treeprocessors.register(_MathProcessor(md), "mathml", 15)


def makeExtension(**options: object) -> MathMLExtension:
    """Build the extension for Python-Markdown."""
    return MathMLExtension(**options)
