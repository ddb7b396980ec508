"""Make a notebook of each chapter.

python scripts/notebooks.py           into docs/notebooks, from where the site takes them
python scripts/notebooks.py FOLDER    into another folder, which is made if need be

With SITE_URL in the environment, links to other pages lead to that address; without it, they are
text.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lab35.checkpoint import replacing
from lab35.terminal import error_console
from lab35_course.fences import FenceError
from lab35_course.notebooks import chapters, notebook, written
from lab35_course.results import ROOT

console = error_console(highlight=False, markup=False, soft_wrap=True)


def main(
    folder: Annotated[
        Path, typer.Argument(file_okay=False, help="Where the notebooks are written.")
    ] = ROOT / "docs" / "notebooks",
) -> None:
    """Write the notebooks that are not there as they should be, and remove those of no chapter."""
    try:
        made = {
            f"{page.stem}.ipynb": written(notebook(page, os.environ.get("SITE_URL", "")))
            for page in chapters(ROOT / "docs")
        }
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.ipynb"):
            if old.name not in made:
                old.unlink()
        for name, text in made.items():
            path = folder / name
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                with replacing(path) as temporary:
                    temporary.write_text(text, encoding="utf-8")
    except (FenceError, OSError) as error:
        console.print(f"notebooks: error: {error}")
        sys.exit(2)


if __name__ == "__main__":
    typer.run(main)
