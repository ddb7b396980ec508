"""A pytest plug-in: pytest-markdown-docs with this course's scanner and runner.

pytest-markdown-docs makes each fence a test item. Its own collection misses nested fences and the
docstrings of properties, and its own runner repeats a fence that raised TypeError, lets output
leak, and hides the fence's module from `dataclass` and `pickle`. Both are replaced here.

Load it with `-p lab35_course.fence_plugin --markdown-docs`; it looks at the course's sources only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_markdown_docs._runners import DefaultRunner, register_runner
from pytest_markdown_docs.definitions import FenceTestDefinition
from pytest_markdown_docs.plugin import (
    MarkdownDocstringCodeModule,
    MarkdownInlinePythonItem,
    MarkdownTextFile,
)

from lab35_course.fence_census import check_page
from lab35_course.fence_runner import FenceFailure, FenceRunner
from lab35_course.fences import FenceError, examples, sources

_sources = functools.cache(sources)  # asked once for every file that is collected


class FenceFile(MarkdownTextFile):
    """A source of fences: a page, or a module with docstrings."""

    def collect(self) -> Iterator[pytest.Item]:
        """Make an item of every Python fence that runs, named by its line, and one of the page."""
        try:
            found = examples(self.path)
        except FenceError as error:
            raise self.CollectError(str(error)) from None
        for example in found:
            if example.reason is None:
                line = example.fence.line
                test = FenceTestDefinition(example.fence.code, (), line, self.path, None)
                yield MarkdownInlinePythonItem.from_parent(
                    self, name=f"[line:{line}]", test_definition=test
                )
        if self.path.suffix == ".md":
            yield ShownItem.from_parent(self, name="[shown]")


class ShownItem(pytest.Item):
    """The check that the site shows a page's fences as code, and no other code."""

    def runtest(self) -> None:
        """Render the page, and compare."""
        check_page(self.path)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        """Show what differs; anything else is a fault of the machinery and shows as it is."""
        if isinstance(excinfo.value, FenceError):
            return str(excinfo.value)
        return str(excinfo.getrepr())


def pytest_configure() -> None:
    """Refuse to start where assertions are switched off, and run everything on one thread.

    At these sizes a second thread gains nothing, and can cost a lot.

    Raises:
        pytest.UsageError: If Python runs with `-O` or PYTHONOPTIMIZE.
    """
    if sys.flags.optimize:
        raise pytest.UsageError("-O and PYTHONOPTIMIZE switch every assertion off: unset them")
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Put our collector in the place of the stock ones, for the sources of the course alone."""
    collectors = yield
    stock = (MarkdownTextFile, MarkdownDocstringCodeModule)
    kept = [collector for collector in collectors if not isinstance(collector, stock)]
    if parent.config.option.markdowndocs and file_path in _sources(parent.config.rootpath):
        kept.append(FenceFile.from_parent(parent, path=file_path))
    return kept


@register_runner(default=True)
class CourseRunner(DefaultRunner):
    """Hand each item to the course's own runner."""

    def __init__(self) -> None:
        self._fences = FenceRunner()

    def runtest(
        self, test: FenceTestDefinition, args: dict[str, Any], *, asyncio_runner: Any = None
    ) -> None:
        """Run the fence that opens at `test.start_line`, and compare what it prints."""
        found = {example.fence.line: example for example in examples(test.source_path)}
        self._fences.check(found[test.start_line])

    def repr_failure(
        self,
        test: FenceTestDefinition,
        excinfo: pytest.ExceptionInfo[BaseException],
        style: Any = None,
    ) -> str:
        """Show our own message; anything else is a fault of the machinery and shows as it is."""
        if isinstance(excinfo.value, FenceFailure):
            return str(excinfo.value)
        return str(excinfo.getrepr())
