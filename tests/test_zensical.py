"""The course outlives its builder: Zensical makes the same site of the same sources.

MkDocs is at its end, and Zensical reads `mkdocs.yml`. It gets an environment and a copy of the
sources of its own, and the tests of the site look at what it builds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from built_site import ROOT

pytestmark = pytest.mark.slow

ZENSICAL = "zensical==0.0.73"
NEEDS = (ZENSICAL, "mkdocstrings[python]", "math-core")
LOOKED_AT = ("tests/test_site.py", "tests/test_fence_labels.py", "tests/test_notebooks.py")
LEFT_OUT = {
    "tests/test_site.py::test_a_map_of_the_site_names_addresses_or_is_not_there": (
        "without an address, Zensical writes an empty sitemap.xml"
    ),
}
"""What Zensical does otherwise; docs/about/decisions.md tells it."""


@pytest.fixture(scope="module")
def zensical(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, in an environment of its own; skipped where it cannot be had, but not in CI."""
    home = tmp_path_factory.mktemp("zensical") / "venv"
    venv.create(home, with_pip=True)
    pip = [str(home / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    install = ["install", "--constraint", f"{ROOT}/constraints.txt", *NEEDS]
    done = subprocess.run([*pip, *install], capture_output=True, text=True)
    if done.returncode:
        told = f"{ZENSICAL} cannot be installed here:\n{done.stderr}"
        (pytest.fail if os.environ.get("LAB35_REQUIRE_ALL") == "1" else pytest.skip)(told)
    return home / "bin" / "zensical"


@pytest.fixture(scope="module")
def built(zensical: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that Zensical builds, and the notebooks beside it."""
    home = tmp_path_factory.mktemp("sources")
    for name in ("docs", "src"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "notebooks")
        shutil.copytree(ROOT / name, home / name, ignore=ignored)
    shutil.copy(ROOT / "mkdocs.yml", home)
    environment = os.environ | {"PYTHONPATH": str(home / "src"), "SITE_URL": ""}
    for command in (
        [zensical, "build", "--strict"],
        [sys.executable, ROOT / "scripts/notebooks.py", "site/notebooks"],
    ):
        done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return home / "site"


def look(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run tests of the site on one that is built already."""
    environment = os.environ | {"LAB35_SITE": str(site), "LAB35_REQUIRE_ALL": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_zensical_builds_the_same_course(built: Path) -> None:
    """Guards the way on: pages, fences, formulas, figures, ids, links, labels and notebooks."""
    words = [word for name in LEFT_OUT for word in ("--deselect", name)]
    done = look(built, *words, "-m", "not slow", "-k", "not button", *LOOKED_AT)

    assert done.returncode == 0, done.stdout + done.stderr
    assert " skipped" not in done.stdout


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_still_differs(name: str, built: Path) -> None:
    """Guards the list: an entry that Zensical no longer needs has to go."""
    assert look(built, name).returncode == 1


def test_a_page_that_is_missing_is_found(built: Path, tmp_path: Path) -> None:
    """Guards the check above: it looks at the site that is given, and sees what it lacks."""
    shutil.copytree(built, tmp_path / "site")
    (tmp_path / "site" / "cache.html").unlink()
    name = "tests/test_site.py::test_every_page_is_built_by_a_strict_build"

    assert look(built, name).returncode == 0
    assert look(tmp_path / "site", name).returncode == 1
