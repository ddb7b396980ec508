"""Fences that continue others: the page says so, and what is copied runs as it is."""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path

import pytest
from built_site import DOCS, PAGES, Site
from chromium import SIZES, opened, serving
from markdown import markdown
from playwright.sync_api import Browser, expect

from lab35_course.fence_labels import labelled
from lab35_course.fence_runner import FenceRunner
from lab35_course.fences import Example, FenceError, examples

CHAPTERS = [page for page in PAGES if not page.startswith("api/")]
CONTINUED = [
    pytest.param(example, id=f"{page}:{example.fence.line}")
    for page in PAGES
    for example in examples(DOCS / page)
    if example.before
]
BLOCK = re.compile(
    r'<div(?P<attributes> [^>]*\bclass="language-python highlight"[^>]*)>'
    r'(?P<title><span class="filename">.*?</span>)?<pre>(?P<code>.*?)</pre></div>',
    re.DOTALL,
)
CONTRAST = """button => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const luminance = (...colors) => {  // painted one over the other
        for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(c => c / 255)
            .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const around = [];
    for (let e = button; e; e = e.parentElement) around.unshift(getComputedStyle(e));
    const behind = around.map(style => style.backgroundColor);
    const [paper, ink] = [luminance(...behind), luminance(...behind, around.at(-1).color)];
    return (Math.max(paper, ink) + 0.05) / (Math.min(paper, ink) + 0.05);
}"""


def blocks(page: str) -> list[dict[str, str]]:
    """List the Python blocks of a built page: their attributes, title and code."""
    found = []
    for block in BLOCK.finditer(page):
        attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', block["attributes"]))
        code = html.unescape(re.sub(r"<[^>]+>", "", block["code"]))
        found.append({**attributes, "title": block["title"] or "", "code": code})
    return found


def program(block: dict[str, str], found: list[dict[str, str]]) -> str:
    """Put together what the copy button takes."""
    code = {one["id"]: one["code"] for one in found if "id" in one}
    needed = block.get("data-continues", "").split()
    return "\n".join([*map(code.__getitem__, needed), block["code"]])


@pytest.mark.parametrize("page", CHAPTERS)
def test_what_is_copied_is_the_whole_chain(page: str, site: Site) -> None:
    """Guards pasting on every page: the code of a fence comes after that of all it continues."""
    found = blocks(site.built(page).read_text(encoding="utf-8"))

    assert [example.program.strip("\n") for example in examples(DOCS / page)] == [
        program(block, found).strip("\n") for block in found
    ]


@pytest.mark.parametrize("page", CHAPTERS)
def test_a_fence_that_continues_another_says_which(page: str, site: Site) -> None:
    """Guards readers: such a fence links to the one before it, by its title, and no other does."""
    found = blocks(site.built(page).read_text(encoding="utf-8"))
    by_id = {block["id"]: block for block in found if "id" in block}
    for example, block in zip(examples(DOCS / page), found, strict=True):
        link = re.search(r"<a class='continues' href='#([^']+)'>(.*?)</a>", block["title"])
        assert bool(example.before) == bool(link)
        if link:
            before = example.before[-1]
            assert f"continues {before.title}" == html.unescape(link[2])
            assert before.code.strip("\n") == by_id[link[1]]["code"].strip("\n")


@pytest.mark.slow
@pytest.mark.parametrize("example", CONTINUED)
def test_what_is_copied_runs_alone(example: Example) -> None:
    """Guards the promise itself: the program runs as it is, and prints what its fences print."""
    alone = dataclasses.replace(example.fence, code=example.program)
    page = {one.fence: one for one in examples(example.fence.path)}
    expected = [page[fence].expected for fence in (*example.before, example.fence)]
    runner = FenceRunner()
    try:
        printed = runner.run(Example(alone, (), None))
    finally:
        runner.close()

    assert "".join(expected) == printed


@pytest.mark.parametrize("page", ["speed", "context", "sampling"])
def test_the_copy_button_takes_the_chain(page: str, browser: Browser, site: Site) -> None:
    """Guards the script in the page: each button puts the program of its fence on the clipboard."""
    expected = [example.program.strip("\n") for example in examples(DOCS / f"{page}.md")]
    granted = ["clipboard-read", "clipboard-write"]
    with (
        serving(site.folder) as address,
        opened(browser, "desktop", permissions=granted) as (tab, problems),
    ):
        tab.goto(f"{address}/{page}.html")
        tab.evaluate("document.querySelectorAll('details').forEach(folded => folded.open = true)")
        buttons = tab.locator(".language-python.highlight .md-code__button")
        expect(buttons).to_have_count(len(expected))
        copied = []
        for number in range(len(expected)):
            tab.evaluate("navigator.clipboard.writeText('')")
            buttons.nth(number).click()
            tab.wait_for_function("navigator.clipboard.readText().then(text => text !== '')")
            copied.append(tab.evaluate("navigator.clipboard.readText()").strip("\n"))
        assert expected == copied
        assert [] == problems


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_copy_button_can_be_seen_and_reached(
    size: str, scheme: str, browser: Browser, site: Site
) -> None:
    """Guards readers with a finger, with keys, or with weak eyes: nothing waits to be hovered."""
    with (
        serving(site.folder) as address,
        opened(browser, size, color_scheme=scheme) as (tab, problems),
    ):
        for page in ("context", "cli"):
            tab.goto(f"{address}/{page}.html")
            tab.add_style_tag(content="* { transition: none !important }")
            buttons = tab.locator("article > .highlight .md-code__button")
            expect(buttons.first).to_be_visible()
            for button in buttons.all():
                expect(button).to_be_visible()
                assert 3 <= button.evaluate(CONTRAST)
                box = button.bounding_box()
                assert 24 <= min(box["width"], box["height"])
            code = tab.locator("article > .highlight:has(.filename) code").first.bounding_box()
            box = buttons.first.bounding_box()
            assert box["y"] + box["height"] <= code["y"] + 1  # above the code, not over it
        buttons.first.focus()
        tab.keyboard.press("Shift+Tab")
        expect(buttons.first).not_to_be_focused()
        tab.keyboard.press("Tab")
        expect(buttons.first).to_be_focused()
        assert [] == problems


FENCES = """```{.python title="One & two"}
x = 1
```

- An item

    ```{.python continuation hl_lines="1" title="Three"}
    y = x
    ```

```{.python continuation}
z = y
```

```{.python title="Alone"}
w = 1
```
"""


def test_labels_at_any_depth() -> None:
    """Guards nested fences, titles with what HTML escapes, and fences without a title."""
    found = blocks(
        markdown(
            FENCES,
            extensions=[
                "attr_list",
                "pymdownx.highlight",
                "pymdownx.superfences",
                "lab35_course.fence_labels",
            ],
            extension_configs={"pymdownx.highlight": {"pygments_lang_class": True}},
        )
    )
    titles = [html.unescape(re.sub(r"<[^>]+>", "", block["title"])) for block in found]

    assert [
        "One & two",
        "Three continues One & two",
        "continues Three",
        "Alone",
    ] == titles
    one, two, three, alone = found
    assert f"{one['id']} {two['id']}" == three["data-continues"]
    assert "id" not in alone
    assert "x = 1\n\ny = x\n\nz = y\n" == program(three, found)


def test_a_continuation_of_nothing_fails_the_build() -> None:
    """Guards docstrings too, each of which is a page of its own to the site."""
    with pytest.raises(FenceError, match="no fence before it"):
        labelled("```{.python continuation}\nx\n```\n", Path("page"))
