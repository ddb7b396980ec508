"""A pytest plug-in: pytest-markdown-docs with this course's scanner and runner.

pytest-markdown-docs makes each fence a test item. Its own collection misses nested fences and the
docstrings of properties, and its own runner repeats a fence that raised TypeError, lets output
leak, and hides the fence's module from `dataclass` and `pickle`. Both are replaced here.

Load it with `-p lab35_course.fence_plugin --markdown-docs`; it looks at the course's sources only.
"""

from __future__ import annotations

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

from lab35_course.fence_runner import FenceFailure, FenceRunner
from lab35_course.fences import FenceError, examples, sources


class FenceFile(MarkdownTextFile):
    """A source of fences: a page, or a module with docstrings."""

    def collect(self) -> Iterator[MarkdownInlinePythonItem]:
        """Make an item of every Python fence that runs, named by its line."""
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


def pytest_configure() -> None:
    """Run everything on one thread: at these sizes a second gains nothing, and can cost a lot."""
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Put our collector in the place of the stock ones, for the sources of the course alone."""
    collectors = yield
    stock = (MarkdownTextFile, MarkdownDocstringCodeModule)
    kept = [collector for collector in collectors if not isinstance(collector, stock)]
    if parent.config.option.markdowndocs and file_path in sources(parent.config.rootpath):
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
