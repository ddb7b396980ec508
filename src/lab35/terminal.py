"""Where progress may be drawn: only on a terminal that can draw a line anew.

A wish for colour, such as `FORCE_COLOR=1`, says nothing about that. In a log file the frames of a
bar are noise, and what is told only by a bar is lost.

```{.python title="A file is no terminal, whatever the environment says"}
import io

from lab35.terminal import can_redraw

assert not can_redraw(io.StringIO())
assert not can_redraw(None)  # a closed stream
```
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["can_redraw", "error_console"]


def can_redraw(stream: TextIO | None) -> bool:
    """Say whether a stream is a terminal that can move its cursor.

    Args:
        stream: An open stream, a closed one, or None, which is what Python makes of a stream that
            was closed before it began.

    Returns:
        Whether a line that was written can be drawn anew.
    """
    if stream is None or stream.closed or os.environ.get("TERM", "") in ("dumb", "unknown"):
        return False
    return stream.isatty()


def error_console(**options: Any) -> Console:
    """Make a console on standard error that draws progress only where that can be redrawn.

    Bars and spinners ask the console's `is_terminal`; so do those who print lines instead.

    Args:
        options: Further options of `rich.console.Console`.

    Returns:
        The console. `FORCE_COLOR` and `TTY_COMPATIBLE` make it no terminal, and no file one.
    """
    from rich.console import Console  # loaded where something is drawn, which is seldom

    live = can_redraw(sys.stderr)
    return Console(stderr=True, force_terminal=live, force_interactive=live, **options)
