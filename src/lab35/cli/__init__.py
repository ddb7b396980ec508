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

import os
import sys
import warnings
from collections.abc import Sequence

from typer.exceptions import TyperException

from lab35.checkpoint import CheckpointError
from lab35.cli.commands import app
from lab35.cli.streams import note, one_line, warn

__all__ = ["app", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows `lab35`; by default what the shell gave.

    Returns:
        The exit code: 0, 1 when a check failed, 2 after bad input, 130 after Ctrl-C.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = warn
            status = app(arguments, prog_name="lab35", standalone_mode=False)
        sys.stdout.flush()
        return status or 0
    except TyperException as error:
        message = error.format_message()
    except (ValueError, CheckpointError) as error:
        message = str(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has left. Point stdout elsewhere, so that Python's own flush stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    note(f"lab35: error: {one_line(message)}")
    return 2
