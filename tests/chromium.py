"""Chromium, a server of files, and tabs that record what must not happen in them."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from built_site import Site
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SIZES = {"desktop": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    # Whatever a page may ask for, nothing leaves this machine.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests; without one they are skipped, or fail where nothing may be."""
    if CHROMIUM is None:
        missing = "Chromium is not installed; on Debian: apt-get install chromium"
        (pytest.fail if os.environ.get("LAB35_REQUIRE_ALL") == "1" else pytest.skip)(missing)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


class QuietHandler(SimpleHTTPRequestHandler):
    """A server of files that says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serving(folder: Path, handler: type[SimpleHTTPRequestHandler] = QuietHandler) -> Iterator[str]:
    """Serve a folder on a free port of 127.0.0.1 and yield its address."""
    make = functools.partial(handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), make) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()  # seconds
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def address(site: Site) -> Iterator[str]:
    """Where the built site is served."""
    with serving(site.folder) as url:
        yield url


@contextmanager
def opened(browser: Browser, size: str, **settings: object) -> Iterator[tuple[Page, list[str]]]:
    """Open a tab and record what must not happen in it; the settings are Playwright's."""
    context = browser.new_context(**{"viewport": SIZES[size], **settings})
    context.set_default_timeout(30_000)
    page, problems = context.new_page(), []
    page.on("pageerror", lambda error: problems.append(f"page error: {error}"))
    page.on(
        "console",
        lambda said: said.type == "error" and problems.append(f"console error: {said.text}"),
    )
    page.on(
        "request",
        lambda request: (
            request.url.startswith(("http://127.0.0.1:", "data:", "blob:"))
            or problems.append(f"request off this machine: {request.url}")
        ),
    )
    try:
        yield page, problems
    finally:
        context.close()
