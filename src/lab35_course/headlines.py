"""The ratios that the pages build on, beside those of another machine.

A marker keeps a number in a sentence true, and not the sentence: "3.1 times faster" becomes "0.8
times faster". So each ratio that a page builds on stands here with the range in which its sentence
can be read. That is a matter of prose. No result is refused for it, and no test fails.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lab35_course.markers import lookup, shown
from lab35_course.stored import Result, read_results

__all__ = ["HEADLINES", "Headline", "compared", "read_others", "unfit"]

_LARGEST = 64 * 2**20  # bytes of results that are read from a file of somebody else


@dataclass(frozen=True)
class Headline:
    """A ratio on a page, and where its sentence holds.

    Attributes:
        says: The sentence in short, with … for the number.
        page: The page below `docs/`.
        result: The result that the number comes from.
        path: Its place in the result's data, as in the page's marker.
        spec: The marker's format.
        least: The smallest number with which the sentence can be read.
        most: The largest.
    """

    says: str
    page: str
    result: str
    path: str
    spec: str
    least: float
    most: float

    def number(self, stored: Mapping[str, Result]) -> float | None:
        """Look the number up; None where there is no such result, or it has another shape."""
        try:
            return lookup(stored[self.result].data, self.path)
        except (KeyError, ValueError):
            return None

    def fits(self, number: float | None) -> bool:
        """Say whether the sentence can be read with this number; without one, nothing is wrong."""
        return number is None or self.least <= number <= self.most

    def told(self, number: float | None) -> str:
        """Write a number as the page does."""
        return "–" if number is None else shown(number, self.spec)


HEADLINES = (
    Headline(
        *("the loop with the cache is … times faster", "loop.md"),
        *("loop.speed", "variants.cached.speedup.median", ".1f", 1.2, 28),
    ),
    Headline(
        *("the static cache is … times as fast as no cache", "cache.md"),
        *("cache.growing", "variants.static.speedup.median", ".1f", 1.2, 57),
    ),
    Headline(
        *("the smallest margin is … times the largest difference", "verification.md"),
        *("verification.report", "safety_factor", ",.0f", 10, float("inf")),
    ),
    Headline(
        *("the first call takes … times as long as later ones", "timing.md"),
        *("timing.first", "first_over_median", ".1f", 1.1, 100),
    ),
    Headline(
        *("prefill is … times faster than decoding the same tokens", "timing.md"),
        *("timing.pieces", "gain", ".0f", 2, 128),
    ),
    Headline(
        *("GPT-2 small goes on to … times", "timing.md"),
        *("timing.pays", "models.2.longest", ".0f", 10, 512),
    ),
    Headline(
        *("a token of the textbook takes … times the floor", "speed.md"),
        *("speed.ladder", "rows.1.of_floor", ".0f", 2, 50),
    ),
    Headline(
        *("a step in plain loops takes … of the textbook's", "speed.md"),
        *("speed.ladder", "steps.4.of_textbook", ".2f", 0, 0.8),
    ),
    Headline(
        *("a step in plain loops takes … times the floor", "speed.md"),
        *("speed.ladder", "steps.4.of_floor", ".1f", 1, 3),
    ),
    Headline(
        *("with the cache, a second thread makes the loop … times as fast", "about/claims.md"),
        *("claims.threads", "cached.speedup.median", ".2f", 0, 1.5),
    ),
)


def compared(
    before: Mapping[str, Result], after: Mapping[str, Result]
) -> Iterator[tuple[str, str, str, str]]:
    """Put the headlines of two sets of results side by side.

    Args:
        before: What was stored.
        after: What was measured now, or elsewhere.

    Yields:
        The sentence, both numbers as the page writes them, and how the second differs; a headline
        that neither or only the first set has is left out.
    """
    for headline in HEADLINES:
        old, new = headline.number(before), headline.number(after)
        if new is not None:
            change = f"{new / old - 1:+.0%}" if old else ""
            yield headline.says, headline.told(old), headline.told(new), change


def unfit(stored: Mapping[str, Result]) -> Iterator[str]:
    """Name the sentences that cannot be read with these results.

    Args:
        stored: The results.

    Yields:
        A line for each: where it stands, what it says, and where it holds.
    """
    for headline in HEADLINES:
        number = headline.number(stored)
        if not headline.fits(number):
            yield (
                f"docs/{headline.page}: “{headline.says}” does not fit {headline.told(number)}: "
                f"it can be read from {headline.least:g} to {headline.most:g}"
            )


def read_others(path: Path) -> dict[str, Result]:
    """Read the results of somebody else.

    Args:
        path: Their folder `results`, or a zip file of it.

    Returns:
        The results by name.

    Raises:
        ValueError: If there is no such folder or zip file, it holds no result, or one of them is
            not as it was written.
    """
    if path.is_dir():
        found = read_results(path)
    elif zipfile.is_zipfile(path):
        try:
            found = _read_zip(path)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
    else:
        raise ValueError(f"compare must be a folder of results or a zip file of one, got {path}")
    if not found:
        raise ValueError(f"{path} must hold results, NAME.json, and holds none")
    return found


def _read_zip(path: Path) -> dict[str, Result]:
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        files = [one for one in archive.infolist() if one.filename.endswith(".json")]
        if sum(one.file_size for one in files) > _LARGEST:
            raise ValueError(f"{path} must hold results of at most {_LARGEST:,} bytes")
        for one in files:
            Path(folder, Path(one.filename).name).write_bytes(archive.read(one))
        return read_results(Path(folder))
