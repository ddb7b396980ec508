"""Run the Python fences of the course, and compare what they print with what the page says.

A fence runs in a module of its own. A continuation goes on in the module of the fence before it,
with torch's global state as that fence left it. Whatever runs, torch's global state is afterwards
as it was, so that no fence changes another, and no test.
"""

from __future__ import annotations

import difflib
import io
import itertools
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from types import ModuleType

import torch

from lab35_course.fences import OUTPUT, Example, Fence, place

__all__ = ["FenceFailure", "FenceRunner"]

# Pickling and dataclasses look a class up by its module's name, so the module must have one.
_MODULE = "fence"


class FenceFailure(Exception):
    """A fence raised, or printed something other than the page says."""


@dataclass(frozen=True)
class _TorchState:
    rng: torch.Tensor
    dtype: torch.dtype
    grad: bool
    threads: int

    @classmethod
    def now(cls) -> _TorchState:
        return cls(
            torch.get_rng_state(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
        )

    def restore(self) -> None:
        torch.set_rng_state(self.rng)
        torch.set_default_dtype(self.dtype)
        torch.set_grad_enabled(self.grad)
        torch.set_num_threads(self.threads)


@dataclass(frozen=True)
class _Position:
    """Where a chain of fences stands: its last fence, its module, torch's state after it."""

    fence: Fence
    module: ModuleType
    torch: _TorchState


class FenceRunner:
    """Run fences in any order; in the page's own order no fence of a chain runs twice."""

    def __init__(self) -> None:
        self._last: _Position | None = None

    def run(self, example: Example) -> str:
        """Run a fence, after those that it continues.

        Args:
            example: The fence and what it continues.

        Returns:
            What the fence itself printed on standard output.

        Raises:
            FenceFailure: If it raises, or one that it continues does.
        """
        outside, last = _TorchState.now(), self._last
        self._last = None
        try:
            if last and example.before and example.before[-1] == last.fence:
                module, pending = last.module, [example.fence]
                last.torch.restore()
            else:
                module, pending = ModuleType(_MODULE), [*example.before, example.fence]
            for fence in pending:
                printed = _execute(fence, module)
            self._last = _Position(example.fence, module, _TorchState.now())
        finally:
            outside.restore()
        return printed

    def check(self, example: Example) -> None:
        """Run a fence and compare what it prints with the output fence that follows, to the byte.

        Args:
            example: The fence, what it continues, and its output.

        Raises:
            FenceFailure: If it raises, or prints something else; without an output fence, if it
                prints at all.
        """
        printed, expected = self.run(example), example.expected
        if printed in (expected, expected.removesuffix("\n")):
            return
        if example.output is None:
            what, remedy = f"prints, but no {OUTPUT} fence follows", "adds it"
        elif not printed:
            what, remedy = "prints nothing, but an output fence follows", "removes it"
        else:
            what, remedy = "prints something else than the page says", "rewrites it"
        raise FenceFailure(
            f"{place(example.fence.path, example.fence.line)}: the fence {what}\n"
            f"{_diff(expected, printed)}`make outputs` {remedy}."
        )


def _execute(fence: Fence, module: ModuleType) -> str:
    # The blank lines give every frame its line number on the page.
    source = "\n" * fence.line + fence.code
    sys.modules[_MODULE] = module
    printed, complained = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(complained):
            exec(compile(source, str(fence.path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        parts = [
            f"{place(fence.path, fence.line)}: the fence raised {type(error).__name__}\n",
            _traceback(error, fence),
            *(
                f"--- {name} before that ---\n{stream.getvalue()}"
                for name, stream in (("stdout", printed), ("stderr", complained))
                if stream.getvalue()
            ),
        ]
        raise FenceFailure("".join(parts)) from error
    finally:
        del sys.modules[_MODULE]
    return printed.getvalue()


def _traceback(error: BaseException, fence: Fence) -> str:
    report = traceback.TracebackException.from_exception(error)
    frames = itertools.dropwhile(lambda frame: frame.filename != str(fence.path), report.stack)
    report.stack[:] = frames
    for frame in report.stack:
        frame.colno = None  # a nested fence is indented on the page, which would shift the carets
    return "".join(report.format())


def _diff(expected: str, printed: str) -> str:
    before, after = (
        text.removesuffix("\n").split("\n") if text else [] for text in (expected, printed)
    )
    lines = difflib.unified_diff(before, after, "on the page", "printed", lineterm="")
    return "".join(f"{line}\n" for line in lines)
