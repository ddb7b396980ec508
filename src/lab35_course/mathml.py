"""Formulas as MathML, made while the site is built: the page needs no script to show them.

`pymdownx.arithmatex` (with `generic: true`) finds the TeX; this extension replaces each formula
with what a browser and a screen reader understand. TeX that it does not know fails the build, and
so does a dollar that is left over: it began a formula that arithmatex did not find.
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

_PIPE = (
    r"in a table, where a | ends the cell, \lvert x \rvert for |x| and \lVert x \rVert for a norm"
)
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
        _refuse_stray_dollars(root)
        _refuse_escaped_pipes(root)
        for element in root.iter():
            if element.get("class") == "arithmatex":
                display = element.tag == "div"
                delimited = html.unescape((element.text or "").strip())
                mathml = to_mathml(delimited[2:-2].strip(), display=display)
                element.text = AtomicString(self.md.htmlStash.store(mathml))


def _refuse_stray_dollars(element: Element) -> None:
    """Raise ValueError for a dollar in running text; one that is escaped is a placeholder here."""
    own = "" if element.tag == "code" or element.get("class") == "arithmatex" else element.text
    for text in (own, *(child.tail for child in element)):
        if text and "$" in text and not isinstance(text, AtomicString):
            raise ValueError(
                f"a dollar that begins or ends no formula in {text.strip()!r}: write \\$ for the "
                rf"sign itself, and {_PIPE}"
            )
    for child in element:
        _refuse_stray_dollars(child)


def _refuse_escaped_pipes(root: Element) -> None:
    r"""Raise ValueError for `\|` in a table: elsewhere it spells a pipe there, in TeX a norm."""
    for cell in (element for element in root.iter() if element.tag in ("td", "th")):
        for formula in cell.iter():
            if formula.get("class") == "arithmatex" and r"\|" in (formula.text or ""):
                raise ValueError(f"formula {formula.text!r}: {_PIPE}")


class MathMLExtension(Extension):
    """Convert what arithmatex found, once the inline patterns have run."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the tree processor after the inline one (priority 20)."""
        md.treeprocessors.register(_MathProcessor(md), "mathml", 15)


def makeExtension(**options: object) -> MathMLExtension:
    """Build the extension for Python-Markdown."""
    return MathMLExtension(**options)
