"""Run the Python fences of the course, and compare what they print with what the page says.

A fence and those that continue it share a process of their own, with a module, a working directory
and the global state of torch that no other fence sees. Whatever a fence sets, replaces, opens or
ends, it cannot change another, nor a test, nor pass by ending the run.
"""

from __future__ import annotations

import difflib
import multiprocessing
import os
import re
import tempfile

from lab35_course.fence_child import Ran, serve
from lab35_course.fences import OUTPUT, Example, Fence, place

__all__ = ["FenceFailure", "FenceRunner"]

_PATIENCE = 600  # seconds for one fence; a compilation takes one minute, a deadlock for ever

# What Python writes to standard error about an error that went nowhere else: in a thread,
# a finalizer, a task or a child, or a warning. The command line writes there by design.
_TROUBLE = re.compile(
    r"^Traceback \(most recent call last\)|^Exception ignored|never awaited|\w+Warning: ",
    re.MULTILINE,
)


class FenceFailure(Exception):
    """A fence raised, or printed something other than the page says."""


class _Chain:
    """A process that runs a fence and those that continue it."""

    def __init__(self) -> None:
        # A fork server imports torch once and starts no threads; where there is none, spawn does.
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if hasattr(context, "set_forkserver_preload"):
            context.set_forkserver_preload(["pytest", "lab35_course.fence_child"])
        self.last: Fence | None = None
        self._folder = tempfile.TemporaryDirectory(
            prefix="lab35-fence-", ignore_cleanup_errors=True
        )
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, dict(os.environ), self._folder.name), daemon=True
        )
        self._process.start()
        theirs.close()

    def run(self, fence: Fence) -> Ran:
        """Run one more fence."""
        # The blank lines give every frame its line number on the page.
        self._connection.send(("\n" * fence.line + fence.code, str(fence.path.absolute())))
        try:
            if not self._connection.poll(_PATIENCE):
                return Ran("", "", "nothing", f"and did not end within {_PATIENCE} s\n")
            ran = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            return Ran("", "", "nothing", f"but ended its process (exit code {code})\n")
        self.last = fence
        return ran

    def close(self) -> None:
        """End the process, and remove what it left behind."""
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._folder.cleanup()


class FenceRunner:
    """Run fences in any order; in the page's own order no fence of a chain runs twice."""

    def __init__(self) -> None:
        self._chain: _Chain | None = None

    def run(self, example: Example) -> str:
        """Run a fence, after those that it continues.

        Args:
            example: The fence and what it continues.

        Returns:
            What the fence itself printed on standard output.

        Raises:
            FenceFailure: If it or one that it continues raises, ends its process, leaves a thread
                or an error behind, or holds an assertion that fails or is never reached.
        """
        chain, pending = self._chain, [example.fence]
        if chain is None or not example.before or example.before[-1] != chain.last:
            self.close()
            chain, pending = _Chain(), [*example.before, example.fence]
        self._chain = chain
        for fence in pending:
            ran = chain.run(fence)
            if ran.report or _TROUBLE.search(ran.complained):
                self.close()
                raise FenceFailure(_told(fence, ran))
        return ran.printed

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

    def close(self) -> None:
        """End the process of the chain that ran last."""
        if self._chain is not None:
            self._chain.close()
        self._chain = None


def _told(fence: Fence, ran: Ran) -> str:
    if ran.error:
        what = f"the fence raised {ran.error}"
    elif ran.report:
        what = "the fence does not do what it says"
    else:
        what = "the fence hides an error, a warning or a task"
    parts = [f"{place(fence.path, fence.line)}: {what}\n{ran.report}"]
    for name, text in (("stdout", ran.printed), ("stderr", ran.complained)):
        if text:
            parts.append(f"--- {name} before that ---\n{text}")
    return "".join(parts)


def _diff(expected: str, printed: str) -> str:
    before, after = (
        text.removesuffix("\n").split("\n") if text else [] for text in (expected, printed)
    )
    lines = difflib.unified_diff(before, after, "on the page", "printed", lineterm="")
    return "".join(f"{line}\n" for line in lines)
