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
