"""The command line: `lab35 generate`, `repl`, `verify`, `trace`, `bench` and `info`.

Completions go to stdout, and everything else to stderr. With `--json` one object goes to stdout,
and nothing else does. Bad input is one line on stderr and exit code 2; a check that fails is 1.

```{.python title="The command line is a function"}
from lab35.cli import main

status = main(["generate", "--temperature", "-1"])  # told on stderr
assert status == 2
```
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab35.cli.commands import app

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    """Load the application where it is asked for; `main` has to be ready for Ctrl-C before that."""
    if name == "app":
        from lab35.cli.commands import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows `lab35`. By default what the shell gave; then the process is taken
            for the command's own, and Ctrl-C is quiet from its beginning to its end.

    Returns:
        The exit code: 0, 1 when a check failed, 2 after bad input, 130 after Ctrl-C.
    """
    owns_process = (
        arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if owns_process:  # an import that is interrupted would tell of it at length
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from lab35.cli.commands import run

    if owns_process:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run(arguments)
    except KeyboardInterrupt:  # it came while an end was being told
        return 130
    finally:
        if owns_process:  # what is left is Python's own end
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            gc.freeze()  # it would look for cycles in all of torch, which takes longer than a text
