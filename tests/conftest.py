"""What pytest loads before the tests: fixtures, the site, a browser, and a plug-in's test bench."""

from __future__ import annotations

import pytest

pytest_plugins = ["shared", "built_site", "chromium", "pytester"]

LONGEST_FIRST = [
    "test_wheel.py",
    "test_zensical.py",
    "test_browser.py",
    "test_cli.py",
    "test_speed.py",
    "test_site_states.py",
]
"""Files that would end last if they began last, where workers run files side by side."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files; all others, and the tests within a file, keep their order."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
