"""The notebooks hold what the chapters hold: fences, outputs, figures, answers."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import nbformat
import pytest
from built_site import DOCS, PAGES, ROOT, Site

from lab35_course.fences import FenceError, examples, scan
from lab35_course.notebooks import chapters, notebook, written

CHAPTERS = chapters(DOCS)


def prose(book: nbformat.NotebookNode) -> str:
    """Join the Markdown cells, without what is drawn."""
    text = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    return re.sub(r"(?m)^\[[\w-]+\]: data:.*$", "", text)


def rows(text: str) -> list[str]:
    """List the rows of the tables, without links and markers."""
    plain = re.sub(r"(?<!!)\[([^\[\]]*)\]\([^)\s]+\)", r"\1", re.sub(r"<!--.*?-->", "", text))
    return re.findall(r"(?m)^[ >]*(\|.*\|)$", plain)


def code(book: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """List the code cells."""
    return [cell for cell in book.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_a_notebook_holds_every_fence_and_what_it_prints(page: Path) -> None:
    """Guards the fences: all of them, in order, each with the output that the page shows.

    A semicolon may end a cell, so that Jupyter does not show the value of its last line.
    """
    cells = code(notebook(page))
    expected = [example for example in examples(page) if example.reason is None]

    assert [example.fence.code.strip("\n") for example in expected] == [
        cell.source.removesuffix(";") for cell in cells
    ]
    assert [example.expected for example in expected] == [
        "".join(output.text for output in cell.outputs) for cell in cells
    ]


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_a_notebook_holds_the_rest_of_the_page(page: Path) -> None:
    """Guards the prose: headings, figures, tables, commands, answers, and no markup of the site."""
    text = page.read_text(encoding="utf-8")
    fences = scan(text, page)
    lines = text.split("\n")
    for fence in fences:
        lines[fence.line - 1 : fence.end] = [""] * (fence.end - fence.line + 1)
    without = "\n".join(lines)
    book = notebook(page)
    shown = prose(book)
    told = re.sub(r"(?ms)^(`{3,}).*?^\1$|`[^`]*`", "", shown)

    assert re.findall(r"(?m)^#+ .*$", without) == re.findall(r"(?m)^#+ .*$", told)
    assert rows(without) == rows(shown)
    assert re.findall(r"!\[([^\]]*)\]", without) == re.findall(r"!\[([^\]]*)\]", shown)
    for fence in fences:
        if fence.language in ("sh", "bash", "text") and fence.title != "Output":
            assert fence.code in shown
    folded = len(re.findall(r"(?m)^ *\?\?\?", without))
    assert folded == shown.count("<summary>") - shown.count(", continued</summary>")
    for leftover in (r"<!--", r"(?m)^ *(?:!!!|\?\?\?|===) ", r"</?(?:figure|figcaption|div|span)"):
        assert not re.search(leftover, told)
    assert [] == re.findall(r"(?<!!)\[[^\]]*\]\((?!https?://)[^)]*\)", told)


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_a_notebook_is_valid_and_the_same_each_time(page: Path) -> None:
    """Guards the file: Jupyter's own schema, and no random ids, so that a build can be repeated."""
    book = notebook(page)
    ids = [cell.id for cell in book.cells]

    nbformat.validate(nbformat.reads(written(book), as_version=4))
    assert len(ids) == len(set(ids))
    assert written(book) == written(notebook(page))
    assert not re.search(r"/(?:work|home|root|tmp|usr)/", written(book))


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_figures_are_part_of_a_notebook(page: Path) -> None:
    """Guards the drawings: each is an SVG file with an ink and a paper of its own, and is shown."""
    for cell in notebook(page).cells:
        drawn = re.findall(r"(?m)^\[([\w-]+)\]: data:image/svg\+xml;base64,(\S+)$", cell.source)
        assert [name for name, _ in drawn] == re.findall(r"!\[[^\]]*\]\[([\w-]+)\]", cell.source)
        for _, data in drawn:
            root = ET.fromstring(base64.b64decode(data))
            assert root.tag.endswith("svg")
            assert root.get("style").startswith("background:#fdfcf9;color:#25221e")


@pytest.mark.parametrize("page", PAGES)
def test_a_chapter_offers_its_notebook(page: str, site: Site) -> None:
    """Guards the way out: a chapter links to its notebook once, and no other page does."""
    links = [e.attributes for e in site.elements(page) if "notebook" in e.classes]
    if DOCS / page in CHAPTERS:
        (link,) = links
        assert "download" in link
        offered = (site.built(page).parent / link["href"]).read_text(encoding="utf-8")
        assert written(notebook(DOCS / page)) == offered
    else:
        assert [] == links


SAMPLE = """# A page

Prose with <!-- value: a.b c -->`x`<!-- /value -->, $a < b$, `<!-- code -->` and
[a chapter](loop.md#by-hand), [outside](https://example.org/), [here](#below), [an *API*](api/a.md).

```{.sh title="A command"}
# no heading
make test
```

<figure markdown="span">
![Two bars](bars.svg){ .wide }
<figcaption>A caption with `code`.</figcaption>
</figure>

!!! warning

    Beware:

    ```{.python title="In a note"}
    print("a")
    ```

    ```{.text title="Output"}
    a
    ```

    and more.

## Below

??? note "Answer"

    Text.

    ```{.python}
    x = 1
    len("ab")
    ```

    More <kbd-like>text</kbd-like>.

=== "A tab"

    ```{.python continuation}
    print(x)
    ```

    ```{.text title="Output"}
    1
    ```

After.
"""
DRAWING = '<svg xmlns="http://www.w3.org/2000/svg" style="fill: none"><path d="M0 0"/></svg>'


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A page with everything that a notebook has a form of its own for."""
    (tmp_path / "bars.svg").write_text(DRAWING, encoding="utf-8")
    page = tmp_path / "sample.md"
    page.write_text(SAMPLE, encoding="utf-8")
    return page


def test_what_jupyter_has_no_form_for_becomes_what_is_nearest(sample: Path) -> None:
    """Guards notes, answers, tabs, markers, links and formulas, cell by cell."""
    cells = [re.sub(r"<small>A chapter .*", "…", c.source) for c in notebook(sample).cells]
    data = base64.b64encode(
        DRAWING.replace('style="', 'style="background:#fdfcf9;color:#25221e;').encode()
    ).decode()

    assert [
        "# A page\n\n…\n\n"
        "Prose with `x`, $a < b$, `<!-- code -->` and\n"
        "a chapter, [outside](https://example.org/), here, an *API*.\n\n"
        "**A command**\n\n```sh\n# no heading\nmake test\n```\n\n"
        "![Two bars][bars]\n\n<small>A caption with `code`.</small>\n\n"
        f"[bars]: data:image/svg+xml;base64,{data}",
        "> **Warning**\n>\n> Beware:\n>\n> **In a note**",
        'print("a")',
        "> and more.",
        "## Below",
        "<details>\n<summary>Answer</summary>\n\nText.\n\n</details>",
        'x = 1\nlen("ab");',
        "<details>\n<summary>Answer, continued</summary>\n\nMore text.\n\n</details>",
        "**A tab**",
        "print(x)",
        "After.",
    ] == cells
    hidden = [cell.metadata.get("jupyter", {}) for cell in code(notebook(sample))]
    assert [{}, {"outputs_hidden": True, "source_hidden": True}, {}] == hidden


def test_links_lead_to_the_site_where_its_address_is_known(sample: Path) -> None:
    """Guards links between pages: absolute, with the fragment, and of this page too."""
    text = prose(notebook(sample, "https://example.org/lab35/"))

    assert "[a chapter](https://example.org/lab35/loop.html#by-hand)" in text
    assert "[here](https://example.org/lab35/sample.html#below)" in text
    assert "[an *API*](https://example.org/lab35/api/a.html)" in text
    assert "A chapter of [lab35](https://example.org/lab35/sample.html)" in text


def test_a_malformed_page_makes_no_notebook(sample: Path) -> None:
    """Guards the build: what the tests could not read is an error here too."""
    sample.write_text(SAMPLE.replace("{.python continuation}", "python continuation"), "utf-8")
    with pytest.raises(FenceError, match="sample"):
        notebook(sample)


def test_the_script_writes_what_has_changed_and_removes_what_is_left(tmp_path: Path) -> None:
    """Guards `make site`: a file that is right keeps its time, and one of no chapter goes."""
    command = [sys.executable, "scripts/notebooks.py", str(tmp_path / "made")]
    subprocess.run(command, cwd=ROOT, check=True)
    names = {path.name for path in (tmp_path / "made").iterdir()}
    assert {f"{page.stem}.ipynb" for page in CHAPTERS} == names

    old, damaged = (tmp_path / "made" / name for name in ("old.ipynb", "loop.ipynb"))
    kept = (tmp_path / "made" / "cache.ipynb").stat().st_mtime_ns
    old.write_text("{}", encoding="utf-8")
    damaged.write_text("{}", encoding="utf-8")
    subprocess.run(command, cwd=ROOT, check=True)
    assert names == {path.name for path in (tmp_path / "made").iterdir()}
    assert kept == (tmp_path / "made" / "cache.ipynb").stat().st_mtime_ns
    assert written(notebook(DOCS / "loop.md")) == damaged.read_text(encoding="utf-8")
