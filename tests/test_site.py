"""The site as files: what is built, what it refers to, and what the extensions make of Markdown."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from urllib.parse import unquote, urlsplit

import markdown
import pytest
from built_site import DOCS, PAGES, ROOT, Element, Site, build, elements

from lab35_course import inline_svg
from lab35_course.fences import count_python_fences
from lab35_course.mathml import to_mathml

FETCHED = {"src", "srcset", "poster", "data", "action", "formaction"}
NAMED_ONLY = {"alternate", "author", "canonical", "license", "next", "prev"}
MARKUP = re.compile(r"```|~~~|\]\(|\*\*|\{\s*[.#:]|\$|\\\(|\\\[|^\s*(?:!!!|\?\?\?|===) ")
REMOTE = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)
REMOTE_IN_CSS = re.compile(r"(?:url\(\s*|@import\s+)[\"']?(?:https?:)?//", re.IGNORECASE)
REMOTE_IN_SCRIPT = re.compile(r"[\"'`](?:https?:)?//[\w-]+\.", re.IGNORECASE)


def requests_away(html: str) -> list[str]:
    """List what a browser would fetch from another host to show a page. Links are not fetched."""
    found = []
    for element in elements(html):
        attributes = element.attributes
        fetched = [value for name, value in attributes.items() if name in FETCHED]
        is_link = element.tag == "link" and not NAMED_ONLY & set(attributes.get("rel", "").split())
        if is_link or element.tag in ("use", "image"):
            fetched += [attributes.get("href", ""), attributes.get("xlink:href", "")]
        found += [value for value in fetched if REMOTE.search(value)]
        styles = [attributes.get("style", ""), element.text if element.tag == "style" else ""]
        found += [style for style in styles if REMOTE_IN_CSS.search(style)]
        if element.tag == "script" and REMOTE_IN_SCRIPT.search(element.text):
            found.append(element.text)
    return found


def test_every_page_is_built_by_a_strict_build(site: Site) -> None:
    """Guards the gate itself: no page is left out, and none is built without a source."""
    expected = {Path(page).with_suffix(".html").as_posix() for page in PAGES} | {"404.html"}

    assert expected == {path.relative_to(site.folder).as_posix() for path, _ in site.pages()}


def test_no_page_fetches_from_another_host(site: Site) -> None:
    """Guards "offline to the last byte" for pages and style sheets.

    The theme's own scripts hold addresses for features that are switched off, so only this
    project's scripts are read; the browser test sees what all of them ask for.
    """
    away = {str(path): requests_away(path.read_text(encoding="utf-8")) for path, _ in site.pages()}
    for path in site.folder.rglob("*.css"):
        away[str(path)] = REMOTE_IN_CSS.findall(path.read_text(encoding="utf-8"))
    for path in (DOCS / "assets").rglob("*.js"):
        away[str(path)] = REMOTE_IN_SCRIPT.findall(path.read_text(encoding="utf-8"))

    assert {} == {path: found for path, found in away.items() if found}


@pytest.mark.parametrize(
    "html",
    [
        '<img src="https://example.org/a.png">',
        '<script src="//example.org/a.js"></script>',
        '<link rel="stylesheet" href="https://example.org/a.css">',
        '<style>@import "https://example.org/a.css";</style>',
        '<p style="background: url(https://example.org/a.png)">',
        '<script type="module">import "https://example.org/a.js"</script>',
        '<svg><use xlink:href="https://example.org/a.svg#b"/></svg>',
        '<iframe src="https://example.org"></iframe>',
    ],
)
def test_a_request_to_another_host_is_found(html: str) -> None:
    """Guards the check above against passing because it sees nothing."""
    assert requests_away(html)
    assert not requests_away('<a href="https://example.org">a link is not fetched</a>')


def target(page: Path, reference: str) -> tuple[Path, str]:
    """Resolve a reference in a built page to a file of the site and a fragment."""
    parts = urlsplit(reference)
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page.resolve()
    return (path / "index.html" if path.is_dir() else path), unquote(parts.fragment)


def test_every_reference_within_the_site_leads_somewhere(site: Site) -> None:
    """Guards links, images, scripts and anchors in the HTML, whoever wrote them."""
    read = dict(site.pages())
    ids = {path.resolve(): {e.attributes.get("id") for e in found} for path, found in read.items()}
    broken = []
    for page, found in read.items():
        for element in found:
            if element.attributes.get("id") == "home":  # of 404.html, which a script leads there
                continue
            for name in ("href", "src"):
                reference = element.attributes.get(name, "")
                if not reference or urlsplit(reference).scheme or REMOTE.search(reference):
                    continue
                path, fragment = target(page, reference)
                known = ids.get(path, set()) | {""}
                if not path.is_file() or (path in ids and fragment not in known):
                    broken.append(f"{page.relative_to(site.folder)}: {reference}")

    assert [] == broken


def test_a_map_of_the_site_names_addresses_or_is_not_there(site: Site, tmp_path: Path) -> None:
    """Guards robots: addresses need a host, and a map without one would be empty."""
    assert [] == sorted(site.folder.glob("sitemap.xml*"))

    assert "" == build(tmp_path / "hosted", SITE_URL="https://example.org/lab35/")
    found = ET.parse(tmp_path / "hosted" / "sitemap.xml").findall(".//{*}loc")
    expected = {f"https://example.org/lab35/{Path(page).with_suffix('.html')}" for page in PAGES}
    assert expected == {location.text for location in found}
    assert 'href="/lab35/index.html"' in (tmp_path / "hosted" / "404.html").read_text("utf-8")


def test_every_page_has_a_title_of_its_own(site: Site) -> None:
    """Guards tabs, bookmarks and lists of results: no title is missing or used twice."""
    titles = [e.text.strip() for _, found in site.pages() for e in found if e.tag == "title"]

    assert len(list(site.pages())) == len(set(titles)) == len(titles)
    assert all(titles)


def test_a_port_that_cannot_be_served_is_one_line() -> None:
    """Guards `make site`: a port in use or misspelt is told before anything is built."""
    command = ["make", "--assume-old=.venv/.ready", f"PYTHON={sys.executable}", "site"]
    outside = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (str(taken.getsockname()[1]), "abc", "99999", ""):
            done = subprocess.run(
                [*command, f"PORT={port}"], cwd=ROOT, env=outside, capture_output=True, text=True
            )
            said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
            assert len(said) == 1
            assert said[0].startswith(f"PORT={port} is in use, or is no port")
            assert done.stdout == ""
            assert done.returncode != 0


def python_blocks(found: list[Element]) -> int:
    """Count the Python fences in a built page: no signatures, no listed sources."""
    return sum(
        {"language-python", "highlight"} <= element.classes
        and "doc-signature" not in element.classes
        and not element.inside("mkdocstrings-source")
        for element in found
    )


@pytest.mark.parametrize("page", PAGES)
def test_page_shows_as_many_python_fences_as_its_source_has(page: str, site: Site) -> None:
    """Guards the census: a fence that the site renders otherwise than the tests read it.

    An API page shows the fences of its module's docstrings as well as its own; a module may be a
    folder.
    """
    expected = count_python_fences(DOCS / page)
    if page.startswith("api/"):
        module = ROOT / "src" / "lab35" / Path(page).stem
        files = [module.with_suffix(".py"), *module.rglob("*.py")]
        expected += sum(count_python_fences(file) for file in files if file.is_file())

    assert expected == python_blocks(site.elements(page))


@pytest.mark.parametrize("page", PAGES)
def test_every_picture_has_alternative_text(page: str, site: Site) -> None:
    """Guards readers who do not see the pictures, and figures that were not inlined."""
    found = site.elements(page)
    for element in found:
        if element.tag == "img":
            assert element.attributes.get("alt", "").strip(), element
            assert "assets/figures" not in element.attributes["src"], f"not inlined: {element}"
        if element.attributes.get("role") == "img":
            assert element.attributes.get("aria-label", "").strip(), element


@pytest.mark.parametrize("page", PAGES)
def test_no_markup_shows_in_the_text(page: str, site: Site) -> None:
    """Guards against Markdown that was not understood: fences, options, TeX, attributes."""
    for element in site.elements(page):
        if element.tag in ("code", "script", "style") or element.inside("code", "pre"):
            continue
        for text in (element.text, *map(element.attributes.get, ("alt", "aria-label", "title"))):
            shown = MARKUP.search(text or "")
            assert shown is None, f"{element.tag}: {(text or '').strip()!r}"


@pytest.mark.parametrize("page", PAGES)
def test_ids_are_unique_within_a_page(page: str, site: Site) -> None:
    """Guards anchors and the drawings' references: two inlined drawings must not share an id."""
    found = site.elements(page)
    ids = [element.attributes["id"] for element in found if "id" in element.attributes]

    assert sorted(set(ids)) == sorted(ids)


# --- The Markdown extensions ---------------------------------------------------------------------


def render(text: str) -> str:
    """Render Markdown with the extensions under test, set up as in `mkdocs.yml`."""
    return markdown.markdown(
        text,
        extensions=[
            "attr_list",
            "md_in_html",
            "tables",
            "pymdownx.arithmatex",
            "pymdownx.highlight",
            "pymdownx.superfences",
            "lab35_course.inline_svg",
            "lab35_course.mathml",
        ],
        extension_configs={
            "pymdownx.arithmatex": {"generic": True},
            "pymdownx.highlight": {"pygments_lang_class": True},
        },
    )


def test_formulas_become_mathml() -> None:
    """Guards the formulas: inline and display, with the characters that HTML escapes."""
    html = render("For $i < j$ and $a \\& b$:\n\n$$\n\\frac{a}{b} > 0\n$$\n")
    formulas = [element for element in elements(html) if element.tag == "math"]

    assert [{}, {}, {"display": "block"}] == [formula.attributes for formula in formulas]
    assert "&lt;" in html
    assert "&amp;amp;" not in html
    assert not re.search(r"\$|\\\(|\\\[", html)


@pytest.mark.parametrize("tex", [r"\nosuchcommand", r"\frac{1}", r"\begin{nosuch}x\end{nosuch}"])
def test_unknown_tex_is_refused(tex: str) -> None:
    """Guards the build: a formula that cannot be shown must fail it, and say which one."""
    with pytest.raises(ValueError, match=re.escape(repr(tex))):
        to_mathml(tex, display=False)
    with pytest.raises(ValueError, match="formula"):
        render(f"Text with ${tex}$ in it.")


TABLE = "| a | b |\n|--|--|\n| {} | y |\n"


@pytest.mark.parametrize(
    "text",
    [
        TABLE.format("$|x|$"),
        TABLE.format(r"$\|x\|$"),
        "From $5 on",
        "**$x** $y$",
        "# Of $ 5$",
        "$a",
    ],
)
def test_a_dollar_without_a_formula_is_refused(text: str) -> None:
    """Guards what passes as text: a pipe cuts a formula in two, a blank makes it none."""
    with pytest.raises(ValueError, match=r"\\lvert x \\rvert"):
        render(text)


@pytest.mark.parametrize("text", [r"From \$5 on", "`$x`", "```{.sh}\necho $x\n```", r"$5 \$$"])
def test_a_dollar_that_is_meant_stays(text: str) -> None:
    """Guards prose, code and formulas that show the sign."""
    assert re.search(r">[^<]*\$", render(text))


def test_a_table_shows_formulas_with_pipes() -> None:
    """Guards the remedy that the refusal names, and formulas outside tables, which need none."""
    shown = [render(text) for text in (TABLE.format(r"$\lvert x \rvert$"), "So $|x|$")]

    assert [[2, "x"]] * 2 == [
        [html.count(">|</mo>"), "x" * ("<mi>x</mi>" in html)] for html in shown
    ]


def test_options_for_the_test_runner_do_not_reach_the_page() -> None:
    """Guards the fence's spelling: superfences must take the block and drop those options."""
    html = render(
        '```{.python title="A title" continuation}\nx = 1\n```\n\n'
        '```{.python notest reason="needs a network"}\ny = 2\n```\n'
    )
    blocks = [element for element in elements(html) if "language-python" in element.classes]

    assert 2 == len(blocks)
    assert all(block.attributes.keys() == {"class"} for block in blocks)
    assert "A title" in html
    assert not re.search("continuation|notest|reason|network", html)


SVG = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"
    width="10pt" viewBox="0 0 10 10">
  <metadata>made by a program</metadata>
  <defs><style type="text/css">*{stroke-linejoin: round; stroke-linecap: butt}</style>
    <path id="tick" d="M 0 0"/><clipPath id="clip"><rect/></clipPath></defs>
  <g id="nobody-points-here" clip-path="url(#clip)" style="fill: #123456">
    <use xlink:href="#tick"/></g>
</svg>"""


@pytest.fixture
def figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A drawing in a folder of its own."""
    monkeypatch.setattr(inline_svg, "FIGURES", tmp_path)
    path = tmp_path / "bars.svg"
    path.write_text(SVG, encoding="utf-8")
    return path


def test_a_figure_becomes_part_of_the_page(figure: Path) -> None:
    """Guards `currentColor`, screen readers and ids: the drawing itself stands in the page."""
    image = "![Three bars]({}assets/figures/bars.svg)"
    html = render(
        f'<figure markdown="span">\n{image.format("")}\n<figcaption>A caption</figcaption>\n'
        f"</figure>\n\nAnd again: {image.format('../')}\n"
    )
    found = elements(html)
    drawings = [element for element in found if element.tag == "svg"]
    ids = [element.attributes["id"] for element in found if "id" in element.attributes]

    assert ["Three bars"] * 2 == [svg.attributes["aria-label"] for svg in drawings]
    assert {"img"} == {svg.attributes["role"] for svg in drawings}
    assert {"stroke-linejoin: round; stroke-linecap: butt"} == {
        svg.attributes["style"] for svg in drawings
    }
    assert drawings[0].inside("figure")
    assert drawings[0].inside("drawing")
    assert "A caption" in html
    assert "<img" not in html
    assert "made by a program" not in html
    assert "nobody-points-here" not in html
    assert len(ids) == len(set(ids)) == 4
    for svg in drawings:
        inside = [element for element in found if svg in element.parents]
        own = {e.attributes["id"] for e in inside if "id" in e.attributes}
        pointed = {e.attributes["href"][1:] for e in inside if "href" in e.attributes}
        pointed |= {e.attributes["clip-path"][5:-1] for e in inside if "clip-path" in e.attributes}
        assert own == pointed
        assert any(e.attributes.get("style") == "fill: #123456" for e in inside)


def test_other_images_stay_images(figure: Path) -> None:
    """Guards screenshots and drawings that are not figures of the course."""
    assert 2 == render("![a](assets/shot.png) ![b](assets/other/bars.svg)").count("<img")


def test_a_figure_that_cannot_be_shown_fails_the_build(figure: Path) -> None:
    """Guards against a silent gap: no text, no file, or rules that would restyle the page."""
    with pytest.raises(ValueError, match="alternative text"):
        render("![](assets/figures/bars.svg)")
    with pytest.raises(FileNotFoundError, match="nosuch"):
        render("![A picture](assets/figures/nosuch.svg)")
    figure.write_text(SVG.replace("*{", "path{"), encoding="utf-8")
    with pytest.raises(ValueError, match="style rule"):
        render("![Three bars](assets/figures/bars.svg)")


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_linked_by_a_path_that_the_raw_page_can_follow(page: str) -> None:
    """Guards readers of the Markdown itself: the site finds a figure by name, they by its path."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for path in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text):
        if not urlsplit(path).scheme:
            assert (DOCS / page).parent.joinpath(path).is_file(), path


@pytest.mark.parametrize(
    "path", sorted((DOCS / "assets" / "figures").glob("*.svg")), ids=lambda path: path.stem
)
def test_figures_keep_their_shape_when_inlined(path: Path) -> None:
    """Guards the real drawings: every shape is still there, and every reference is answered."""
    drawn = {"path", "use", "rect", "line", "circle", "polygon", "polyline", "text", "image"}
    before = [e.tag.rpartition("}")[2] for e in ET.parse(path).iter() if isinstance(e.tag, str)]
    svg = inline_svg.inline_svg(path, "A figure", "prefix-")
    after = [element.tag for element in svg.iter()]
    ids = {element.get("id") for element in svg.iter()}

    assert [tag for tag in before if tag in drawn] == [tag for tag in after if tag in drawn]
    assert {e.get("href", "#")[1:] for e in svg.iter("use")} <= ids


def test_the_course_is_followed_by_the_claims_and_not_by_the_api(site: Site) -> None:
    """Guards what a reader meets after the last chapter, and that the API is folded elsewhere."""
    home = (site.folder / "index.html").read_text(encoding="utf-8")
    links = [
        element
        for element in elements(home)
        if element.tag == "a"
        and "md-nav__link" in element.classes
        and element.inside("md-nav--primary")
    ]
    order = [link.attributes["href"].removeprefix("./") for link in links]
    last = elements((site.folder / "cli.html").read_text(encoding="utf-8"))
    next_pages = [
        element.attributes["href"].removeprefix("./")
        for element in last
        if "md-footer__link--next" in element.classes
    ]
    folds = [
        element for element in elements(home) if element.attributes.get("data-md-level") == "2"
    ]

    assert ["about/claims.html"] == next_pages
    assert order.index("notation.html") < order.index("api/index.html")
    assert folds, "the list of API pages is not a folded section"


def test_titles_say_what_a_page_is(site: Site) -> None:
    """Guards the home page's title, and that a heading opens with its name in the sidebar."""
    titles, apart = {}, {}
    for path, _ in site.pages():
        parts = elements(path.read_text(encoding="utf-8"))
        address = path.relative_to(site.folder)
        title = next(part.text.strip() for part in parts if part.tag == "title")
        titles[address.as_posix()] = title
        if address.with_suffix(".md").as_posix() in PAGES and address.parent == Path():
            heading = next(part.text.strip() for part in parts if part.tag == "h1")
            if address.stem != "index" and not heading.startswith(title.removesuffix(" - lab35")):
                apart[address.as_posix()] = (title, heading)

    assert {} == apart
    assert (
        "lab35: A course on text generation that cannot drift from its code" == titles["index.html"]
    )
