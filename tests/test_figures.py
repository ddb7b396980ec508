"""The figures of the course are what their results draw, on every machine and on every page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from lab35_course.figure import (
    FIGURES,
    INK,
    PALETTE,
    Drawing,
    canvas,
    check_figures,
    discover,
    figure,
    write_figure,
)
from lab35_course.inline_svg import inline_svg
from lab35_course.results import ROOT, Data, Result, read_results
from lab35_course.sketch import PANEL, PAPER, RUST, SOFT, TEAL, WIDEST, Sketch

LIGHT, DARK = "#ffffff", "#1e2129"


def test_figures_of_the_course() -> None:
    """Every SVG of this repository is, to the byte, what its stored results draw."""
    problems = list(check_figures(ROOT, discover(), read_results(ROOT / "results")))
    assert not problems, "\n".join(map(str, problems))


@figure("toy", results=["toy.line"])
def toy(line: Data) -> Figure:
    """Draw a line with a label."""
    drawing, axes = canvas()
    axes.plot(line["x"], line["y"], label="a line")
    axes.set(xlabel="x", title="toys")
    axes.legend()
    return drawing


def stored(*y: float) -> dict[str, Result]:
    """Make the stored result that the toy figure draws."""
    data = {"x": list(range(len(y))), "y": list(y)}
    return {"toy.line": Result("toy.line", "exact", data, {})}


def test_settings_of_the_reader_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure depends on its results alone, whatever a matplotlibrc or another figure has set."""
    before = toy.svg(stored(1, 2, 4))
    for name, value in {"font.size": 30.0, "lines.linewidth": 9.0, "axes.grid": True}.items():
        monkeypatch.setitem(matplotlib.rcParams, name, value)
    assert toy.svg(stored(1, 2, 4)) == before
    assert matplotlib.rcParams["font.size"] == 30.0
    assert toy.svg(stored(1, 2, 5)) != before


def test_ink_is_the_page_s_and_the_background_open() -> None:
    """Text and axes take the page's colour, and nothing is painted behind them."""
    svg = toy.svg(stored(1, 2))
    assert INK not in svg
    assert "currentColor" in svg
    colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", svg))
    assert colours <= {"currentColor", "none", *PALETTE}


def test_file_tells_no_date_and_no_version() -> None:
    """A date or a version would change the bytes without changing the figure."""
    svg = toy.svg(stored(1, 2))
    assert "metadata" not in svg
    assert matplotlib.__version__ not in svg


def test_last_bits_of_arithmetic_do_not_show() -> None:
    """Coordinates are rounded, so that another machine's sums draw the same bytes."""
    assert toy.svg(stored(1 / 3, 2 / 3)) == toy.svg(stored(1 / 3 + 1e-9, 2 / 3 - 1e-9))
    ET.fromstring(toy.svg(stored(1, 2)))


def test_two_figures_share_no_generated_id() -> None:
    """Clip paths and markers are named by a salt; two figures must not share it."""
    other = Drawing("other", toy.results, toy.function)
    pattern = r'id="([mp][0-9a-f]{10})"'
    ids = [set(re.findall(pattern, item.svg(stored(1, 2)))) for item in (toy, other)]
    assert ids[0]
    assert ids[1]
    assert not ids[0] & ids[1]


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", PALETTE)
@pytest.mark.parametrize("background", [LIGHT, DARK])
def test_colours_stand_out_from_both_pages(colour: str, background: str) -> None:
    """Graphics need a contrast of 3:1 (WCAG 2.2, 1.4.11), in light and in dark."""
    low, high = sorted([luminance(colour), luminance(background)])
    assert (high + 0.05) / (low + 0.05) >= 3


def test_faults_are_found(tmp_path: Path) -> None:
    """A figure that is missing, edited, out of date, or drawn by nothing is found."""

    def found(line: dict[str, Result], *drawings: Drawing) -> str:
        return "\n".join(map(str, check_figures(tmp_path, drawings, line)))

    path = tmp_path / FIGURES / "toy.svg"
    assert f"{FIGURES}/toy.svg: not drawn yet" in found(stored(1, 2), toy)
    assert write_figure(tmp_path, toy, stored(1, 2))
    assert not write_figure(tmp_path, toy, stored(1, 2))
    assert found(stored(1, 2), toy) == ""

    assert "not what its results draw" in found(stored(1, 3), toy)
    assert "no stored result 'toy.line'" in found({}, toy)
    assert "no registered figure draws it" in found(stored(1, 2))
    path.write_text(path.read_text().replace(PALETTE[0], PALETTE[1]))
    assert "not what its results draw" in found(stored(1, 2), toy)


@pytest.mark.parametrize(
    "content",
    [
        "<script>alert(1)</script>",
        '<rect onclick="alert(1)"/>',
        '<rect onLoad="alert(1)"/>',
        '<a href="https://example.org"><rect/></a>',
        '<use href="https://example.org/x.svg#a"/>',
        '<use xmlns:xlink="http://www.w3.org/1999/xlink" xlink:href="x.svg#a"/>',
        '<rect fill="url(https://example.org/x.svg#a)"/>',
        '<rect style="fill: url( //example.org/x )"/>',
        '<image href="data:image/png;base64,AAAA"/>',
        "<foreignObject><p>text</p></foreignObject>",
        '<animate attributeName="href" to="javascript:alert(1)"/>',
        '<set attributeName="onclick" to="alert(1)"/>',
        "<style>body {display: none}</style>",
    ],
)
def test_drawing_that_does_more_than_show_is_refused(tmp_path: Path, content: str) -> None:
    """An inlined drawing is part of the page: nothing in it may act, or fetch anything."""
    path = tmp_path / "toy.svg"
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg">{content}</svg>')
    with pytest.raises(ValueError, match=r"toy\.svg may"):
        inline_svg(path, "a toy", "toy-")
    path.write_text('<svg xmlns="http://www.w3.org/2000/svg"><rect fill="url(#a)" id="b"/></svg>')
    assert "rect" in [element.tag for element in inline_svg(path, "a toy", "toy-").iter()]


# --- Sketches -------------------------------------------------------------------------------------

CSS = (ROOT / "docs" / "assets" / "css" / "lab35.css").read_text(encoding="utf-8")
FALLBACK = re.compile(r"var\((--lab-[\w-]+), (#[0-9a-f]{6})\)")


def colours_of_the_page(scheme: str) -> dict[str, str]:
    """The page's colours in light or in dark, by name."""
    light, dark = (
        dict(re.findall(r"(--lab-[\w-]+): (#[0-9a-f]{6});", CSS.split(start, 1)[1].split("}")[0]))
        for start in ("\n[data-md-color-scheme] {", '[data-md-color-scheme="slate"] {')
    )
    return light if scheme == "light" else dark


def test_a_sketch_is_drawn_to_the_hundredth_of_a_pixel() -> None:
    """Shapes lie in their order, words are text, and no float shows its last bits."""
    sketch = Sketch(100, 40)
    sketch.box(1 / 3, 2, 30, 20.0, fill=RUST, opacity=0.5)
    sketch.line((0, 0), (6, 8), arrow=True)
    sketch.text(5, 20, "a < b & c", mono=True)
    root = ET.fromstring(sketch.svg())
    box, line, text = root

    assert {"width": "100", "height": "40"}.items() <= root.attrib.items()
    assert ["rect", "path", "text"] == [element.tag.rpartition("}")[2] for element in root]
    assert {"x": "0.33", "y": "2", "width": "30", "height": "20"}.items() <= box.attrib.items()
    assert f"fill: {RUST}; fill-opacity: 0.5" == box.attrib["style"]
    assert "M0 0 L6 8 M5.8 1.9 L6 8 L0.2 6.1" == line.attrib["d"]
    assert "a < b & c" == text.text


def test_a_sketch_is_drawn_through_the_registry() -> None:
    """A registered function may return a sketch where another returns a plot."""
    sketch = Sketch(10, 10)
    assert sketch.svg() == Drawing("toy", (), lambda: sketch).svg({})


@pytest.mark.parametrize("width", [0, WIDEST + 1])
def test_a_sketch_that_a_phone_would_shrink_is_refused(width: int) -> None:
    """A drawing wider than the column of a phone would be shrunk there, and its words with it."""
    assert WIDEST == Sketch(WIDEST, 10).width
    with pytest.raises(ValueError, match=f"width must lie in .1, {WIDEST}. pixels, got {width}"):
        Sketch(width, 10)
    with pytest.raises(ValueError, match="size must be at least 11 pixels, got 10"):
        Sketch(100, 10).text(0, 0, "small", size=10)


def test_paints_of_a_sketch_are_those_of_the_page() -> None:
    """A drawing shown without a page has the page's light colours, and not older ones."""
    light = colours_of_the_page("light")
    for paint in (PAPER, SOFT, PANEL, RUST, TEAL):
        name, colour = FALLBACK.fullmatch(paint).groups()
        assert light[name] == colour, name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_of_a_sketch_can_be_read(scheme: str) -> None:
    """Text needs a contrast of 4.5:1 (WCAG 2.2, 1.4.3) on whatever it is set on."""
    page = colours_of_the_page(scheme)
    ink, paper, panel, soft, rust, teal = (
        page[f"--lab-{name}"]
        for name in ("ink", "paper", "panel", "ink-soft", "accent-strong", "accent")
    )

    def tint(colour: str, opacity: float) -> str:
        mixed = (
            round(opacity * int(colour[i : i + 2], 16) + (1 - opacity) * int(paper[i : i + 2], 16))
            for i in (1, 3, 5)
        )
        return "#" + "".join(f"{channel:02x}" for channel in mixed)

    pairs = [(word, ground) for word in (ink, soft, rust) for ground in (paper, panel)]
    pairs += [(paper, rust), (ink, tint(rust, 0.45)), (ink, tint(teal, 0.18))]
    for pair in pairs:
        low, high = sorted(map(luminance, pair))
        assert (high + 0.05) / (low + 0.05) >= 4.5, pair
