"""The site as a reader meets it: every page in Chromium, wide and narrow, light and dark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from built_site import PAGES
from chromium import SIZES, opened, serving
from playwright.sync_api import Browser, Page, expect

AXE = Axe().axe_script
COLOURS = ["color-contrast", "link-in-text-block"]
RUN_AXE = """async (options) => (
    await axe.run({resultTypes: ["violations"], ...options})
).violations"""
LEAVE_OUT_WHAT_LOOKS_ALIKE = """() => {
    // A drawing is one image to axe, which still looks at each of its thousands of strokes.
    document.querySelectorAll("svg[role=img]").forEach(drawing => drawing.replaceChildren());
    // Tokens of one kind look alike, and axe looks at each of thousands for milliseconds.
    const seen = new Set();
    for (const token of document.querySelectorAll("pre span[class]:not(:has(*))")) {
        const kind = token.className + " in " + token.closest("pre").parentElement.className;
        if (seen.has(kind)) token.replaceWith(token.textContent);
        seen.add(kind);
    }
}"""
ALLOWED: dict[str, str] = {}
"""Rules of axe that may be broken, each with the reason."""


@pytest.fixture(scope="module", params=SIZES)
def tab(browser: Browser, request: pytest.FixtureRequest) -> Iterator[tuple[Page, list[str]]]:
    """One tab of each size, in which the pages are opened one after the other."""
    with opened(browser, request.param) as page_and_problems:
        yield page_and_problems


def rules(page: Page, scheme: str) -> dict[str, object] | None:
    """Choose what axe looks at; most of its time goes into colours.

    A phone shows the colours of the desktop in another layout, so it looks at them on a page of
    each kind. The dark scheme shows the layout of the light one in other colours.
    """
    if page.viewport_size == SIZES["phone"]:
        if scheme == "dark":
            return None
        if not page.url.endswith(("/index.html", "/cache.html", "/404.html")):
            return {"rules": {name: {"enabled": False} for name in COLOURS}}
    return {} if scheme == "light" else {"runOnly": COLOURS}


def look(page: Page, url: str, problems: list[str]) -> list[str]:
    """Load a page and list what is wrong with it, in light and in dark.

    Args:
        page: A tab from `opened`.
        url: The address.
        problems: Where the tab records what it sees; more is added.

    Returns:
        The same list.
    """
    page.emulate_media(color_scheme="light")
    page.goto(url)
    page.evaluate("document.fonts.ready")
    page.evaluate(AXE)
    page.add_style_tag(content="* { transition: none !important }")  # no colour on its way
    page.evaluate(LEAVE_OUT_WHAT_LOOKS_ALIKE)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        width, room = page.evaluate("[document.scrollingElement.scrollWidth, innerWidth]")
        if width > room:
            problems.append(f"{scheme}: the page scrolls sideways, {width} px in {room} px")
        chosen = rules(page, scheme)
        if chosen is None:
            continue
        for violation in page.evaluate(RUN_AXE, chosen):
            targets = [" ".join(map(str, node["target"])) for node in violation["nodes"]]
            if violation["id"] not in ALLOWED:
                problems.append(f"{scheme}: axe {violation['id']}: {', '.join(targets)}")
    return problems


def by_haste(names: Sequence[str]) -> list[object]:
    """Leave the pages of the reference to the slow tests, but for two: one template made them."""
    late = {name for name in names if name.startswith("api/")} - {"api/index.md", "api/cache.md"}
    return [pytest.param(n, marks=pytest.mark.slow) if n in late else n for n in names]


@pytest.mark.parametrize("name", by_haste([*PAGES, "404.md"]))
def test_page_is_sound(name: str, tab: tuple[Page, list[str]], address: str) -> None:
    """Guards every page: errors, requests to others, sideways scrolling, accessibility."""
    page, problems = tab
    problems.clear()

    assert [] == look(page, f"{address}/{Path(name).with_suffix('.html')}", problems)


SOUND = """<!doctype html><html lang="en"><head><title>A page</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"></head>
<body><main><h1>A page</h1>{}</main></body></html>"""


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<img alt="" src="http://example.org/a.png">', "request off this machine"),
        ("<script>console.error('broken')</script>", "console error: broken"),
        ("<script>nosuch()</script>", "page error"),
        ('<img alt="a picture" src="missing.png">', "console error"),
        ('<p style="width: 2000px">Wide</p>', "scrolls sideways"),
        ('<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">', "axe image-alt"),
        (
            "<style>@media (prefers-color-scheme: dark) { p { color: #eee } }</style><p>Pale</p>",
            "dark: axe color-contrast",
        ),
    ],
)
def test_an_unsound_page_is_found(
    body: str, problem: str, browser: Browser, tmp_path: Path
) -> None:
    """Guards the check itself: each kind of fault, put into a sound page, is seen and named."""
    (tmp_path / "sound.html").write_text(SOUND.format("<p>Text</p>"), encoding="utf-8")
    (tmp_path / "unsound.html").write_text(SOUND.format(body), encoding="utf-8")
    with serving(tmp_path) as url:
        with opened(browser, "desktop") as (page, problems):
            assert [] == look(page, f"{url}/sound.html", problems)
        with opened(browser, "desktop") as (page, problems):
            assert any(problem in found for found in look(page, f"{url}/unsound.html", problems))


def test_keyboard_reaches_the_text_and_the_search(browser: Browser, address: str) -> None:
    """Guards readers without a mouse: the skip link comes first, and the search answers."""
    with opened(browser, "desktop") as (page, problems):
        page.goto(f"{address}/notation.html")
        page.keyboard.press("Tab")
        expect(page.locator(".md-skip")).to_be_focused()
        expect(page.locator(".md-skip")).to_have_css("opacity", "1")
        page.keyboard.press("Enter")
        expect(page).to_have_url(f"{address}/notation.html#notation")

        page.goto(f"{address}/index.html")
        stops = []
        while not stops or stops[-1] != "Search":
            page.keyboard.press("Tab")
            stops.append(page.evaluate("document.activeElement.ariaLabel"))
            assert len(stops) < 10, stops
        page.keyboard.type("causal_mask")
        expect(page.locator(".md-search-result__link").first).to_be_visible()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_url("**/api/*.html*")
        assert [] == problems


def test_boxes_that_scroll_are_reached_by_keyboard(browser: Browser, address: str) -> None:
    """Guards wide tables on a phone: a stop for the keyboard only where there is more to see."""
    boxes = ".md-typeset__scrollwrap"
    for size, stops in (("desktop", False), ("phone", True)):
        with opened(browser, size) as (page, _):
            page.goto(f"{address}/notation.html")
            expect(page.locator(boxes)).to_have_count(3)
            expect(page.locator(f"{boxes}[tabindex='0']")).to_have_count(3 if stops else 0)


def test_colours_follow_the_system_and_the_toggle(browser: Browser, address: str) -> None:
    """Guards the palette: the system's choice first, then the reader's, which is remembered."""
    with opened(browser, "desktop") as (page, problems):
        body = page.locator("body")
        light, dark = "rgb(253, 252, 249)", "rgb(23, 24, 26)"
        page.emulate_media(color_scheme="dark")
        page.goto(f"{address}/notation.html")
        expect(body).to_have_css("background-color", dark)
        page.emulate_media(color_scheme="light")
        expect(body).to_have_css("background-color", light)

        toggle = page.locator("label.md-header__button[for^=__palette]:not([hidden])")
        for _ in range(2):  # from the system's to light, from light to dark
            toggle.click()
        expect(body).to_have_css("background-color", dark)
        page.reload()
        expect(body).to_have_css("background-color", dark)
        assert [] == problems
