"""The invariants of timed results: each refuses what would make its page wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from lab35_course.measurements.index import minutes
from lab35_course.results import ROOT, Data, Registry, Size, read_results

REGISTRY = Registry.discover()
STORED = read_results(ROOT / "results")


def _set(*path: str | int, to: object) -> Callable[[Data], None]:
    """Prepare to replace the value at a path; a function is given what stood there."""

    def change(data: Data) -> None:
        *way, last = path
        for step in way:
            data = data[step]
        data[last] = to(data[last]) if callable(to) else to

    return change


def _swap(path: tuple[str | int, ...], one: str | int, other: str | int) -> Callable[[Data], None]:
    """Prepare to exchange two values beside each other."""

    def change(data: Data) -> None:
        for step in path:
            data = data[step]
        data[one], data[other] = data[other], data[one]

    return change


FAULTS = {
    "loop.speed": (
        _set("same_tokens", to=False),
        _set("forwards_ratio", to=56.0),
        _set("variants", "cached", "time_per_output_token", "samples", to=1),
    ),
    "timing.first": (
        _set("first_over_median", to=1.0),
        _set("slowest_over_fastest", to=1.0),
        _set("least_first_over_median", to=99.0),
    ),
    "timing.work": (_set("models", 0, "head_share", to=0.0),),
    "timing.pieces": (
        _set("difference", to=0),
        _set("gain", to=1.0),
        _set("rows", 1, "forwards", to=1),
    ),
    "timing.threads": (_set("rows", 0, "speedup", "samples", to=1),),
    "timing.cold": (
        _set("rows", 0, "busy", "ratio", "samples", to=99),
        _set("rows", 1, "alone", "ratio", "median", to=1.5),
        _set("rows", 4, "alone", "seconds", "median", to=99.0),
    ),
    "timing.pays": (
        _set("models", 0, "longest", to=1.0),
        _set("models", 0, "rows", 0, "speedup", "samples", to=1),
        _set("models", 0, "rows", 0, "difference", to=1.0),
        _set("models", 2, "calls_share", "median", to=0.9),
        _set("models", 0, "products_share", "median", to=0.9),
        _set("models", 0, "over_reading", "median", to=1.0),
    ),
    "batching.throughput": (
        _set("same_tokens", to=False),
        _set("batches", 1, "loops", 0, "seconds", "samples", to=1),
        _set("batches", 3, "loops", 0, "gain", to=0.9),
        _swap(("batches", 1, "loops"), 0, 1),
    ),
    "timing.batch": (
        _set("lengths", 0, "rows", 1, "caches", to=1),
        _set("lengths", 0, "one_more_of_prefill", to=99.0),
    ),
    "claims.small_model": (
        _set("difference", to=0),
        _set("rows", 0, "cached", "token_forwards", to=1),
        _set("rows", 0, "speedup", "samples", to=1),
    ),
    "claims.threads": (_set("cached", "speedup", "samples", to=1),),
    "speed.ladder": (
        _set("same_tokens", to=False),
        _swap(("rows",), 1, 2),
        _set("rows", 3, "of_floor", to=99.0),
        _set("rows", 5, "of_floor", to=0.9),
    ),
    "speed.calls": (_set("rows", 0, "share", "median", to=0.1),),
    "speed.peers": (
        _set("same_tokens", to=False),
        _set("rows", 5, "loop_adds", to=lambda adds: adds - 13),
        _set("rows", 5, "than_uncached", to=999.0),
        _set("ctranslate2_of_best", to=9.0),
        lambda data: data["rows"].pop(8),
    ),
    "speed.ratios": (
        _set("same_tokens", 2, to=False),
        _set("rows", 0, "one", to="lean, greedy"),
        _set("rows", 1, "ratio", "samples", to=1),
        _swap(("rows",), 1, 2),
        lambda data: data["rows"].pop(),
    ),
    "speed.sampled": (
        _set("same_tokens", to=False),
        _set("different_choices", to=1),
        _set("rows", 0, "share", to=9.0),
    ),
    "speed.compiled": (_set("rows", 1, "ratio", "median", to=0.5),),
    "speed.loops": (_set("rows", 1, "ratio", "median", to=0.5),),
    "speed.budget": (
        _set("rows", 1, "less", to=lambda less: less + 1),
        _swap(("rows",), 0, 1),
    ),
    "speed.matvec": (
        _set("error", to=0),
        _set("rows", 0, "ratio", "min", to=1.01),
        _set("rows", 4, "of_addmv", to=0.1),
    ),
}
"""For each result, changes of its data that no sentence of its page would survive."""


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_an_invariant_refuses_what_the_page_denies(name: str) -> None:
    """Guards the tables against invariants that hold for any data."""
    sound = STORED[name].data
    assert [] == REGISTRY.broken_invariants(name, sound)
    for number, fault in enumerate(FAULTS[name]):
        data = copy.deepcopy(sound)
        fault(data)
        assert REGISTRY.broken_invariants(name, data), f"fault {number} passes"


def test_every_timed_result_of_these_pages_has_a_fault() -> None:
    """Guards the list above against a new measurement of the pages on timing and speed."""
    timed = {
        name
        for name, item in REGISTRY.measurements.items()
        if item.engine and name.partition(".")[0] in ("timing", "speed", "claims")
    }
    assert set() == timed - set(FAULTS)


def test_reading_time_counts_words_and_lines_of_code() -> None:
    """Guards the minutes of the front page: 200 words, or 15 lines of code, are a minute."""
    assert minutes("word " * 200) == pytest.approx(1)
    code = '```{.python title="One"}\n' + "x = 1\n" * 15 + "```\n"
    output = '```{.text title="Output"}\n' + "word " * 400 + "\n```\n"
    table = "| word | word |\n" * 100
    comment = "<!-- value: a b --><!-- /value -->"
    assert minutes(code + output + table + comment) == pytest.approx(1)


def test_reading_times_are_rounded_outwards() -> None:
    """Guards the range of the front page: no chapter lies outside it."""
    found = REGISTRY.measurements["index.reading"](Size.FULL)
    for name in ("loop", "speed"):
        told = minutes((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
        assert found["least"] <= told <= found["most"]
