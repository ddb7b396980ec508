"""The Typer application: what stands before every command, and the list of them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from lab35.cli.bench import bench
from lab35.cli.reports import info, trace, verify
from lab35.cli.session import repl
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
        print(f"lab35 {version('lab35')}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


for _command in (generate, repl, verify, trace, bench, info):
    app.command()(_command)
