"""Figures as part of the page: an image of `assets/figures/NAME.svg` becomes the drawing itself.

Inside the page a drawing inherits its colour, so one file with `currentColor` ink serves the light
and the dark theme. A screen reader still meets one image, named by the alternative text.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from markdown import Extension
from markdown.treeprocessors import Treeprocessor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from markdown import Markdown

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "assets" / "figures"

_SOURCE = re.compile(r"(?:^|/)assets/figures/(?P<name>[\w.-]+)\.svg$")
_URL = re.compile(r"url\(#(?P<id>[^)]+)\)")
_UNIVERSAL_RULE = re.compile(r"^\s*\*\s*\{(?P<declarations>[^{}]*)\}\s*$")


def inline_svg(path: Path, alt: str, prefix: str) -> ET.Element:
    """Read a drawing and make it fit to stand inside a page.

    Args:
        path: The SVG file.
        alt: What the drawing shows, for those who do not see it.
        prefix: Put before every id, so that two drawings in a page cannot share one.

    Returns:
        An `svg` element without namespaces, metadata or style sheet.

    Raises:
        ValueError: If the alternative text is empty, or the drawing brings what would reach out of
            it: style rules for the page, scripts and their handlers, foreign elements, or a
            reference to anything but a part of itself.
        FileNotFoundError: If there is no such file.
    """
    if not alt.strip():
        raise ValueError(f"{path.name} needs alternative text, got {alt!r}")
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is not drawn yet; run `make figures`")
    root = ET.parse(path).getroot()
    styles = [root.get("style", "")]
    for parent in list(root.iter()):
        for child in list(parent):
            tag = _local(child.tag)
            if tag == "style":
                styles.append(_inherited(child.text or "", path))
            if tag in ("style", "metadata"):
                parent.remove(child)

    for element in root.iter():
        _refuse_what_acts(element, path)
    used = {name for element in root.iter() for name in _references(element)}
    for element in root.iter():
        _rewrite(element, prefix, used)
    root.attrib |= {
        "role": "img",
        "aria-label": alt,
        "style": "; ".join(filter(None, styles)),
        "data-search-exclude": "",
    }
    return root


def _local(name: str) -> str:
    """Drop the namespace: HTML knows svg elements and `href` without one."""
    return name.rpartition("}")[2]


def _inherited(css: str, path: Path) -> str:
    """Take the declarations of matplotlib's one rule, `*{…}`: the root can hand them down."""
    rule = _UNIVERSAL_RULE.match(css)
    if rule is None:
        raise ValueError(f"{path.name} may hold one style rule, for `*`, got {css.strip()!r}")
    return rule["declarations"].strip().rstrip(";")


_SHAPES = {"path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "use"}
_WORDS = {"text", "tspan", "textPath", "title", "desc"}
_PAINT = {"clipPath", "mask", "pattern", "marker", "linearGradient", "radialGradient", "stop"}
_PASSIVE = {"svg", "g", "defs", "symbol", *_SHAPES, *_WORDS, *_PAINT}
"""What a drawing is made of. Scripts, links, foreign HTML and animations are not among it."""


def _refuse_what_acts(element: ET.Element, path: Path) -> None:
    """Refuse elements that do more than show, handlers, and references out of the drawing."""
    if not isinstance(element.tag, str) or _local(element.tag) not in _PASSIVE:
        raise ValueError(f"{path.name} may hold shapes and text alone, got {element.tag!r}")
    for name, value in element.attrib.items():
        local, told = _local(name).lower(), value.strip()
        outward = local in ("href", "src") and not told.startswith("#")
        if local.startswith("on") or outward or re.search(r"url\((?!\s*#)|javascript:", told, re.I):
            raise ValueError(f"{path.name} may refer to its own parts alone, got {name}={value!r}")


def _references(element: ET.Element) -> Iterator[str]:
    for name, value in element.attrib.items():
        if _local(name) == "href":
            yield value.removeprefix("#")
        yield from (match["id"] for match in _URL.finditer(value))


def _rewrite(element: ET.Element, prefix: str, used: set[str]) -> None:
    """Strip namespaces, drop ids nobody points to, and put the prefix before the others."""
    element.tag = _local(element.tag)
    attributes = {_local(name): value for name, value in element.attrib.items()}
    if attributes.get("id") not in used:
        attributes.pop("id", None)
    for name, value in attributes.items():
        if name == "id":
            attributes[name] = prefix + value
        elif name == "href":
            attributes[name] = f"#{prefix}{value.removeprefix('#')}"
        else:
            attributes[name] = _URL.sub(rf"url(#{prefix}\g<id>)", value)
    element.attrib = attributes


class _InlineSvg(Treeprocessor):
    def run(self, root: ET.Element) -> None:
        number = count(1)
        for parent in list(root.iter()):
            for index, child in enumerate(parent):
                source = _SOURCE.search(child.get("src", "")) if child.tag == "img" else None
                if source is None:
                    continue
                name = source["name"]
                prefix = f"{name}-{next(number)}-"
                box = ET.Element("span", {"class": "drawing"})  # scrolls where the page is narrow
                box.append(inline_svg(FIGURES / f"{name}.svg", child.get("alt", ""), prefix))
                box.tail = child.tail
                parent[index] = box


class InlineSvgExtension(Extension):
    """Put each drawing in its box, once the inline patterns have made the images."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the tree processor after the inline one (priority 20)."""
        md.treeprocessors.register(_InlineSvg(md), "inline_svg", 15)


def makeExtension(**options: object) -> InlineSvgExtension:
    """Build the extension for Python-Markdown."""
    return InlineSvgExtension(**options)
