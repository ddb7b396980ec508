"""The process in which a chain of fences runs: whatever it does there, it does to itself alone.

The standard library's fork server imports PyTorch once; each chain is a fork of it, in a folder of
its own. Standard output and standard error are taken at the file descriptors, so that what
a subprocess, a C library or `os.write` writes is seen too.
"""

from __future__ import annotations

import ctypes
import gc
import io
import itertools
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType

# Imported once, in the fork server, for all fences; torch itself loads the second on first use.
import torch

import lab35.cli  # noqa: F401
from lab35_course.fence_rules import REPORT, assertions, compiled

__all__ = ["Ran", "serve"]


@dataclass(frozen=True)
class Ran:
    """How a fence went.

    Attributes:
        printed: What arrived on standard output.
        complained: What arrived on standard error.
        error: The type of what it raised; empty if it raised nothing.
        report: The traceback, or what else is wrong; empty if nothing is.
    """

    printed: str
    complained: str
    error: str
    report: str


class _Stream:
    """A file in the place of a file descriptor, read piece by piece."""

    def __init__(self, descriptor: int) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        self._seen = 0
        os.dup2(self._file.fileno(), descriptor)
        raw = io.FileIO(descriptor, "wb", closefd=False)
        self.text = io.TextIOWrapper(raw, encoding="utf-8", newline="\n", write_through=True)

    def new(self) -> str:
        """Return what was written since the last call."""
        start, self._seen = self._seen, os.fstat(self._file.fileno()).st_size
        written = os.pread(self._file.fileno(), self._seen - start, start)
        return written.decode("utf-8", errors="replace")


def serve(connection: Connection, environment: Mapping[str, str], folder: str) -> None:
    """Run the pieces of code that come, in one module, and answer each with how it went.

    Args:
        connection: Brings the source and the file name of each fence, and takes each `Ran`.
        environment: The environment variables of the fences.
        folder: Their working directory.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)
    out, err = _Stream(1), _Stream(2)
    sys.stdout = sys.__stdout__ = out.text
    sys.stderr = sys.__stderr__ = err.text
    # The name of a program that is run: pickle and dataclasses find its classes by it.
    module = sys.modules["__main__"] = ModuleType("__main__")
    gc.freeze()
    me = os.getpid()
    while True:
        try:
            source, filename = connection.recv()
        except EOFError:
            return
        error, report = _execute(source, filename, module)
        if os.getpid() != me:
            os._exit(1)  # a fork of the fence's own
        gc.collect()  # an error in a finalizer, or a coroutine never awaited, is told on stderr
        ctypes.CDLL(None).fflush(None)
        connection.send(Ran(out.new(), err.new(), error, report))


def _execute(source: str, filename: str, module: ModuleType) -> tuple[str, str]:
    reached: dict[int, bool] = {}

    def asserted(line: int, value: object) -> object:
        reached[line] = bool(value) and reached.get(line, True)
        return value

    before = set(threading.enumerate())
    vars(module)[REPORT] = asserted
    try:
        exec(compiled(source, filename), vars(module))
    except BaseException as error:
        return type(error).__name__, _traceback(error, filename)
    left = [thread for thread in threading.enumerate() if thread not in before]
    problems = [
        f"line {line}: this assertion failed, and went on\n"
        for line in reached
        if not reached[line]
    ]
    problems += [
        f"line {line}: this assertion is never reached\n"
        for line in assertions(source)
        if line not in reached
    ]
    problems += [f"thread {thread.name!r} still runs at its end\n" for thread in left]
    return "", "".join(problems)


def _traceback(error: BaseException, filename: str) -> str:
    report = traceback.TracebackException.from_exception(error)
    frames = itertools.dropwhile(lambda frame: frame.filename != filename, report.stack)
    report.stack[:] = frames
    for frame in report.stack:
        frame.colno = None  # a nested fence is indented on the page, which would shift the carets
    return "".join(report.format())
