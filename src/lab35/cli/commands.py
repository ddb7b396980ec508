"""The Typer application: what stands before every command, and the list of them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer
from typer.exceptions import TyperException

import lab35
from lab35.cli.bench import bench
from lab35.cli.reports import info, trace, verify
from lab35.cli.session import repl
from lab35.cli.streams import note, one_line, quiet_outputs, usable_streams, warn
from lab35.cli.texts import generate

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"terminal_width": 88, "max_content_width": 88},
)
"""The Typer application behind the console script."""


@app.callback(invoke_without_command=True)
def _lab35(
    ctx: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.")
    ] = False,
) -> None:
    """Write text with a small GPT, and look at how it is done.

    Completions go to stdout, and everything else to stderr. Bad input ends with exit code 2, and a
    check that fails with 1.
    """
    if show_version:
        from importlib.metadata import version

        print(f"lab35 {version('lab35')}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


for _command in (generate, repl, verify, trace, bench, info):
    app.command()(_command)


def run(arguments: Sequence[str] | None) -> int:
    """Run a command; whatever ends it becomes an exit code and at most one line."""
    with usable_streams(), warnings.catch_warnings():
        warnings.showwarning = warn
        status, message = _outcome(arguments)
        if message is not None:
            with suppress(OSError):  # nobody can be told that nobody can be told
                note(f"lab35: error: {one_line(message)}")
        quiet_outputs()
    return status


def _outcome(arguments: Sequence[str] | None) -> tuple[int, str | None]:
    """Run a command, and say how it ended."""
    try:
        status = app(arguments, prog_name="lab35", standalone_mode=False)
        sys.stdout.flush()  # what was printed last may still be waiting, and may not arrive
        sys.stderr.flush()
        return status or 0, None
    except TyperException as error:
        return 2, error.format_message()
    except OSError as error:
        quiet_outputs()
        if isinstance(error, BrokenPipeError):  # the reader has left, and knows it
            return 1, None
        return 2, f"{error.filename or 'standard output'}: {error.strerror or error}"
    except ValueError as error:
        return 2, str(error)
    except MemoryError:
        return 2, "there is not enough memory for this"
    except RecursionError:
        return 2, "the record of the checkpoint is nested too deeply"
    except KeyboardInterrupt:
        return 130, None
    except SystemExit as leaving:  # Typer's own, when a reader has left
        return int(leaving.code or 0), None
    except lab35.CheckpointError as error:  # the last one: to be asked for, it has to be loaded
        return 2, str(error)
