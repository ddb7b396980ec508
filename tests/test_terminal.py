"""Progress is for a terminal that can draw a line anew; a wish for colour makes none."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator
from typing import TextIO

import pytest
from rich.progress import track

from lab35.terminal import can_redraw, error_console


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    """Open a terminal of our own."""
    main_end, child_end = pty.openpty()
    with os.fdopen(child_end, "w") as stream:
        yield stream
    os.close(main_end)


WISHES = [
    {},
    {"FORCE_COLOR": "1"},
    {"TTY_COMPATIBLE": "1"},
    {"TTY_INTERACTIVE": "1"},
    {"CLICOLOR_FORCE": "1"},
    {"FORCE_COLOR": "1", "TERM": "xterm-256color"},
]


@pytest.mark.parametrize("wishes", WISHES, ids=str)
def test_a_wish_for_colour_makes_no_terminal(
    monkeypatch: pytest.MonkeyPatch, wishes: dict[str, str]
) -> None:
    """A log file stays without frames and without escapes, whatever the environment asks for."""
    for name, value in wishes.items():
        monkeypatch.setenv(name, value)
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    console = error_console()
    list(track(range(3), console=console, disable=not console.is_terminal))
    with console.status("waiting"):
        console.print("[bold]a line[/bold]")

    assert "a line\n" == log.getvalue()


@pytest.mark.parametrize(
    ("term", "expected"), [("xterm", True), ("linux", True), ("dumb", False), ("unknown", False)]
)
def test_a_terminal_must_move_its_cursor(
    monkeypatch: pytest.MonkeyPatch, terminal: TextIO, term: str, expected: bool
) -> None:
    """`TERM=dumb` is a terminal that can only go on."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stderr", terminal)

    assert expected == can_redraw(terminal) == error_console().is_terminal


@pytest.mark.parametrize("refusal", [{"NO_COLOR": "1"}, {"TTY_COMPATIBLE": "0"}], ids=str)
def test_a_refusal_of_colour_leaves_a_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: TextIO, refusal: dict[str, str]
) -> None:
    """What the stream is decides, both ways."""
    monkeypatch.setenv("TERM", "xterm")
    for name, value in refusal.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stderr", terminal)

    assert error_console().is_terminal


def test_a_stream_that_is_closed_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`2>&-` leaves no stream at all; a console on it writes nowhere, and fails nowhere."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", None)
    console = error_console()
    console.print("nobody reads this")

    assert (False, False) == (can_redraw(closed), can_redraw(None))
    assert not console.is_terminal
