"""Run the Python fences of the course, and write what they print into the pages.

python scripts/outputs.py                  every page, the README and its like, the docstrings
python scripts/outputs.py docs/loop.md     some
python scripts/outputs.py --check          write nothing; exit 1 if anything would change
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Annotated

import typer

from lab35.checkpoint import replacing
from lab35.terminal import error_console
from lab35_course.fence_runner import FenceFailure, FenceRunner
from lab35_course.fences import FenceError, examples, place, sources, with_outputs
from lab35_course.results import ROOT, track

console = error_console(highlight=False, markup=False, soft_wrap=True)


def rerun(path: Path, runner: FenceRunner) -> tuple[str, str]:
    """Run the fences of one source; give its text as it is and as it should be."""
    text = path.read_text(encoding="utf-8")
    found = examples(path, text)
    printed = [runner.run(example) if example.reason is None else "" for example in found]
    return text, with_outputs(path, text, printed)


def diff(name: str, before: str, after: str) -> str:
    """Show what would change in a source."""
    lines = difflib.unified_diff(
        before.split("\n"), after.split("\n"), name, f"{name} after `make outputs`", lineterm=""
    )
    return "\n".join(lines)


def main(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(exists=True, dir_okay=False, help="Pages or modules; all by default."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing.")] = False,
) -> None:
    """Rewrite the printed outputs of the course, or check them."""
    chosen = {place(path): path for path in paths or sources(ROOT)}
    runner, failed = FenceRunner(), False
    for name in track(chosen, "running"):
        try:
            before, after = rerun(chosen[name], runner)
        except (FenceError, FenceFailure) as error:
            console.print(str(error))
            failed = True
            continue
        if before == after:
            continue
        if check:
            console.print(diff(name, before, after))
            failed = True
        else:
            with replacing(chosen[name]) as temporary:
                temporary.write_text(after, encoding="utf-8")
            console.print(f"{name}: rewritten")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
