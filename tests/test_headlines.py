"""The ratios that the pages build on: where they stand, and how they compare elsewhere."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from lab35_course.headlines import HEADLINES, Headline, compared, read_others, unfit
from lab35_course.results import ROOT, Result, read_results, write_result


@pytest.fixture(scope="module")
def stored() -> dict[str, Result]:
    """The results of the repository."""
    return read_results(ROOT / "results")


def with_number(stored: dict[str, Result], headline: Headline, number: float) -> Result:
    """Copy a headline's result with another number in its place."""
    data = json.loads(json.dumps(stored[headline.result].data))
    *path, last = headline.path.split(".")
    place = data
    for part in path:
        place = place[int(part) if isinstance(place, list) else part]
    place[last] = number
    return dataclasses.replace(stored[headline.result], data=data)


@pytest.mark.parametrize("headline", HEADLINES, ids=lambda h: f"{h.result} {h.path}")
def test_a_headline_stands_on_its_page(headline: Headline, stored: dict[str, Result]) -> None:
    """Guards the list: the page quotes this very number in this format, and the stored one fits."""
    page = (ROOT / "docs" / headline.page).read_text(encoding="utf-8")
    assert f"<!-- value: {headline.result} {headline.path} {headline.spec} -->" in page
    assert 1 == headline.says.count("…")
    assert headline.number(stored) is not None
    assert headline.fits(headline.number(stored))
    assert [] == list(unfit({headline.result: stored[headline.result]}))


@pytest.mark.parametrize("headline", HEADLINES, ids=lambda h: f"{h.result} {h.path}")
def test_a_sentence_that_does_not_fit_is_named(
    headline: Headline, stored: dict[str, Result]
) -> None:
    """Guards the reader of another machine's pages: each range has an end that is looked at."""
    number = headline.least / 2 if headline.least else headline.most * 2
    elsewhere = {headline.result: with_number(stored, headline, number)}

    (found,) = [told for told in unfit(elsewhere) if headline.says in told]
    assert found.startswith(f"docs/{headline.page}: ")
    assert f"does not fit {headline.told(number)}: " in found


def test_two_machines_side_by_side(stored: dict[str, Result]) -> None:
    """Guards the table: both numbers as the page writes them, and the change between them."""
    headline = HEADLINES[0]
    number = headline.number(stored)
    new = {headline.result: with_number(stored, headline, number * 2)}

    expected = [headline.says, headline.told(number), headline.told(number * 2), "+100%"]
    assert [expected] == [list(row) for row in compared(stored, new)]
    assert [[headline.says, "–", headline.told(number * 2), ""]] == [
        list(row) for row in compared({}, new)
    ]
    assert [] == list(compared(stored, {}))
    odd = dataclasses.replace(stored[headline.result], data={"other": 1})
    assert [] == list(compared(stored, {headline.result: odd}))


def test_results_of_somebody_else_are_read(tmp_path: Path, stored: dict[str, Result]) -> None:
    """Guards `--compare`: a folder, a zip file of one, and nothing that was edited."""
    theirs = tmp_path / "results"
    one = with_number(stored, HEADLINES[0], 7.5)
    write_result(theirs, one)
    archive = Path(shutil.make_archive(str(tmp_path / "theirs"), "zip", tmp_path, "results"))
    for path in (theirs, archive):
        assert {one.name: one} == read_others(path)

    file = theirs / f"{one.name}.json"
    file.write_text(file.read_text("utf-8").replace("7.5", "8.5"), encoding="utf-8")
    with pytest.raises(ValueError, match="edited"):
        read_others(theirs)
    file.unlink()
    with pytest.raises(ValueError, match="holds none"):
        read_others(theirs)
    with pytest.raises(ValueError, match=re.escape(f"got {tmp_path / 'nosuch'}")):
        read_others(tmp_path / "nosuch")
    with zipfile.ZipFile(tmp_path / "large.zip", "w", zipfile.ZIP_DEFLATED) as large:
        large.writestr("results/a.json", b" " * (2**26 + 1))
    with pytest.raises(ValueError, match="at most 67,108,864 bytes"):
        read_others(tmp_path / "large.zip")
    damaged = archive.read_bytes().replace(b"results/loop", b"results/l00p", 1)
    archive.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"theirs\.zip cannot be read"):
        read_others(archive)
