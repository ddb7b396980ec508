"""The site in states that its authors seldom open: on paper, lost, without scripts, enlarged."""

from __future__ import annotations

from pathlib import Path

import pytest
from built_site import Site
from chromium import QuietHandler, opened, serving
from playwright.sync_api import Browser, Page, expect

KINDS = ["index", "cache", "api/cache", "404"]
"""A page of each kind."""

PALE_ON_PAPER = """() => {
    const parsed = (color) => color.match(/[\\d.]+/g).map(Number);
    const luminance = ([r, g, b]) =>
        [r, g, b].map(c => c / 255)
            .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const opaque = (color) => (parsed(color)[3] ?? 1) > 0.5;
    const behind = (element) => {  // what is printed behind it: a background of its own, or paper
        for (; element; element = element.parentElement) {
            const color = getComputedStyle(element).backgroundColor;
            if (opaque(color)) return luminance(parsed(color));
        }
        return 1;
    };
    const found = new Set();
    for (const element of document.querySelectorAll("body, body *:not(svg *)")) {
        if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
        const style = getComputedStyle(element);
        const name = `${element.localName}.${element.className}`;
        const texts = [...element.childNodes].filter(n => n.nodeType === 3 && n.data.trim());
        const inked = texts.length || element.localName === "svg";
        const paper = behind(element);
        if (paper < 0.8) found.add(`dark behind ${name}`);
        if (style.backgroundImage !== "none") found.add(`band on ${name}`);
        if (inked && (paper + 0.05) / (luminance(parsed(style.color)) + 0.05) < 4.5)
            found.add(`pale ${name}`);
    }
    return [...found];
}"""


def printed(page: Page) -> list[str]:
    """Show a page as it is printed, and list what is dark behind text, banded, or pale."""
    page.emulate_media(media="print", color_scheme="dark")
    page.add_style_tag(content="* { transition: none !important }")  # no colour on its way
    return page.evaluate(PALE_ON_PAPER)


@pytest.mark.parametrize("name", KINDS)
def test_a_dark_page_is_printed_on_white_paper(name: str, browser: Browser, address: str) -> None:
    """Guards paper: the dark scheme is for screens, whether the system or the reader chose it."""
    with opened(browser, "desktop", color_scheme="dark") as (page, problems):
        page.goto(f"{address}/{name}.html")
        assert name == "404" or page.evaluate("document.body.dataset.mdColorScheme") == "slate"
        assert page.evaluate(PALE_ON_PAPER), "a dark screen must count as dark"
        assert [] == printed(page) + problems
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper in ("rgb(255, 255, 255)", "rgba(0, 0, 0, 0)")


def test_paper_shows_answers_and_cuts_nothing_off(browser: Browser, address: str) -> None:
    """Guards what a reader prints: folded answers are open, and nothing hides behind an edge."""
    cut = """() => [...document.querySelectorAll("article *:not(svg *)")].filter(element =>
        element.scrollWidth > element.clientWidth + 1
        && getComputedStyle(element).overflowX !== "visible"
        && element.checkVisibility()).map(element => element.className || element.localName)"""
    with opened(browser, "desktop", viewport={"width": 718, "height": 1000}) as (page, problems):
        for name in ("cache", "timing", "api/cache", "about/claims"):
            page.goto(f"{address}/{name}.html")
            page.emulate_media(media="print")
            folded = page.locator("article details:not(.mkdocstrings-source) > :not(summary)")
            expect(folded.filter(visible=False)).to_have_count(0)
            assert folded.count() or name.startswith("a")
            expect(page.locator(".mkdocstrings-source:visible, button:visible")).to_have_count(0)
            assert [] == page.evaluate(cut), name
            page.emulate_media(media="screen")
        assert [] == problems


class Host(QuietHandler):
    """A host as the course may have: what is missing is answered with the site's own page."""

    def send_error(self, code: int, *_: object) -> None:
        """Send 404.html, from wherever the site lies."""
        page = next(Path(self.directory).glob("[l4]*")) / "404.html"
        page = page if page.is_file() else Path(self.directory, "404.html")
        self.send_response(code)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page.read_bytes())


@pytest.mark.parametrize("folder", ["", "/lab35"])
@pytest.mark.parametrize("lost", ["nosuch.html", "a/b/c"])
def test_a_lost_reader_finds_home(
    folder: str, lost: str, browser: Browser, site: Site, tmp_path: Path
) -> None:
    """Guards 404.html: complete at any depth of any folder, with a link that leads home."""
    root = site.folder
    if folder:
        root = tmp_path
        (root / "lab35").symlink_to(site.folder)
    with serving(root, Host) as url, opened(browser, "phone") as (page, _):
        requests = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(f"{url}{folder}/{lost}", wait_until="networkidle")
        expect(page.locator("h1")).to_have_text("Page not found")
        expect(page.locator("body")).to_have_css("background-color", "rgb(253, 252, 249)")
        assert [f"{url}{folder}/{lost}"] == [r for r in requests if not r.startswith("data:")]

        page.locator("#home").click()
        page.wait_for_url(f"{url}{folder}/index.html")
        expect(page.locator("h1")).to_contain_text("Text generation")


def test_a_lost_reader_without_a_home_is_told(browser: Browser, tmp_path: Path, site: Site) -> None:
    """Guards the end of that search: the page of another site is not taken for the course."""
    (tmp_path / "404.html").write_bytes((site.folder / "404.html").read_bytes())
    (tmp_path / "index.html").write_text("another site", encoding="utf-8")
    with serving(tmp_path, Host) as url, opened(browser, "phone") as (page, _):
        page.goto(f"{url}/a/b")
        page.locator("#home").click()
        expect(page.get_by_role("status")).to_contain_text("not found at any address above")


@pytest.mark.parametrize("name", KINDS)
def test_four_times_the_size_needs_no_scrolling_sideways(
    name: str, browser: Browser, address: str
) -> None:
    """Guards zoom: a window of 1280 pixels at 400 % is one of 320."""
    with opened(browser, "phone", viewport={"width": 320, "height": 256}) as (page, problems):
        page.goto(f"{address}/{name}.html")
        assert 320 == page.evaluate("document.scrollingElement.scrollWidth")
        assert [] == problems


def test_the_text_needs_no_script(browser: Browser, address: str) -> None:
    """Guards readers without scripts, and those whose connection lost one of them."""
    with opened(browser, "desktop", java_script_enabled=False) as (page, _):
        page.goto(f"{address}/cache.html")
        expect(page.locator("article h1")).to_be_visible()
        expect(page.locator("article .drawing svg").first).to_be_visible()
        expect(page.locator("article math").first).to_be_visible()
        page.locator("article details summary").first.click()
        expect(page.locator("article details").first).to_have_attribute("open", "")
    with opened(browser, "phone") as (page, problems):
        page.route("**/bundle*.js", lambda route: route.abort())
        page.goto(f"{address}/cache.html")
        expect(page.locator(".drawing[tabindex='0']").first).to_be_visible()
        assert [] == [problem for problem in problems if "ERR_FAILED" not in problem]


SKETCHES = """() => [...document.querySelectorAll("svg.sketch")].map(svg => {
    const room = svg.getBoundingClientRect(), words = [...svg.querySelectorAll("text")];
    const outside = ({left, right, top, bottom}) =>
        left < room.left || right > room.right || top < room.top || bottom > room.bottom;
    return {
        shrunk: room.width < svg.width.baseVal.value,
        scrolls: svg.parentElement.scrollWidth > svg.parentElement.clientWidth,
        outside: words.filter(t => outside(t.getBoundingClientRect())).map(t => t.textContent),
        small: words.filter(text => parseFloat(getComputedStyle(text).fontSize) < 11).length,
        faces: [...new Set(words.map(text => getComputedStyle(text).fontFamily.split(",")[0]))],
    };
})"""


@pytest.mark.parametrize("size", ["phone", "desktop"])
def test_sketches_can_be_read_as_they_stand(size: str, browser: Browser, address: str) -> None:
    """Guards the diagrams: not shrunk, not cut, no words over the edge, in the page's typefaces."""
    with opened(browser, size) as (page, problems):
        page.goto(f"{address}/model.html")
        page.evaluate("document.fonts.ready")
        found = page.evaluate(SKETCHES)
        faces = {face for sketch in found for face in sketch.pop("faces")}
        assert len(found) == 5
        assert [{"shrunk": False, "scrolls": False, "outside": [], "small": 0}] * 5 == found
        assert {'"Source Sans 3"', '"Source Code Pro"'} == faces
        page.locator("svg.sketch text", has_text="LayerNorm").first.click(click_count=3)
        assert "LayerNorm" in page.evaluate("getSelection().toString()")
        assert [] == problems


def test_a_link_into_a_folded_answer_opens_it(browser: Browser, address: str) -> None:
    """Guards links to what is folded away, as results of a search are."""
    with opened(browser, "desktop") as (page, problems):
        page.goto(f"{address}/cache.html")
        folded = "document.querySelector('article details:not([open]) [id]').id"
        anchor = page.evaluate(folded)
        page.goto(f"{address}/index.html")
        page.goto(f"{address}/cache.html#{anchor}")
        expect(page.locator(f"details:has(#{anchor})")).to_have_attribute("open", "")
        for unknown in ("#nosuch", "#%", "#'\"><img>"):
            page.goto(f"{address}/index.html")
            page.goto(f"{address}/cache.html{unknown}")
            expect(page.locator("article h1")).to_be_visible()
        assert [] == problems


@pytest.mark.parametrize(
    "words", ["qqzzqq", "<img src=x onerror=nosuch()>", '"', "*", "a:b^~", "\\"]
)
def test_the_search_takes_any_words(words: str, browser: Browser, address: str) -> None:
    """Guards the search: what it does not find or understand is text, and no error."""
    with opened(browser, "desktop") as (page, problems):
        page.goto(f"{address}/notation.html")
        page.keyboard.press("/")
        expect(page.locator(".md-search__input")).to_be_focused()
        page.keyboard.type(words)
        expect(page.locator(".md-search-result__meta")).to_contain_text("matching document")
        expect(page.locator(".md-search img")).to_have_count(0)
        assert [] == problems


def test_the_copy_button_copies_the_fence(browser: Browser, address: str) -> None:
    """Guards pasting: the code of the fence with its blank lines, and nothing beside it."""
    granted = ["clipboard-read", "clipboard-write"]
    with opened(browser, "desktop", permissions=granted) as (page, problems):
        page.goto(f"{address}/cache.html")
        fence = page.locator(".language-python.highlight").first
        fence.hover()
        fence.get_by_role("button").click()
        expect(page.locator(".md-dialog")).to_contain_text("Copied")
        expected = fence.locator("code").text_content().rstrip("\n")
        assert expected == page.evaluate("navigator.clipboard.readText()")
        assert expected.startswith("import torch\n\n")
        assert [] == problems


def test_forced_colours_reach_the_drawings(browser: Browser, address: str) -> None:
    """Guards high contrast: ink of the light scheme on a black page would not be seen."""
    with opened(browser, "desktop", forced_colors="active", color_scheme="dark") as (page, _):
        page.goto(f"{address}/cache.html")
        page.evaluate("document.body.dataset.mdColorScheme = 'default'")
        ink = page.locator(".drawing svg").first.evaluate("svg => getComputedStyle(svg).color")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ("rgb(255, 255, 255)", "rgb(0, 0, 0)") == (ink, paper)
        page.goto(f"{address}/model.html")
        page.evaluate("document.body.dataset.mdColorScheme = 'default'")
        fills = (
            "[...document.querySelectorAll('svg.sketch text')].map(t => getComputedStyle(t).fill)"
        )
        assert {"rgb(255, 255, 255)", "rgb(0, 0, 0)"} >= set(page.evaluate(fills))
