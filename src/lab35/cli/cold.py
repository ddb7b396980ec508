"""`lab35 bench --cold`: from the shell to the first word, in processes that have just begun.

Each process is timed from outside, alone and beside one that keeps a processor busy. What every
command that runs the model has to wait for is `import torch`, so all are compared with that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import lab35
from lab35.cli.options import DEFAULTS
from lab35.cli.streams import one_line

BASELINE = 'python -c "import torch"'

COMMANDS: dict[str, tuple[str, ...]] = {
    "python -c pass": ("-c", "pass"),
    BASELINE: ("-c", "import torch"),
    "lab35 --help": ("-m", "lab35", "--help"),
    "lab35 info": ("-m", "lab35", "info"),
    "lab35 generate": ("-m", "lab35", "generate"),
}
"""What is timed: the words behind `python`, where the console script need not be on the path."""

if (os.cpu_count() or 1) > 1:
    COMMANDS["lab35 generate --threads 2"] = (*COMMANDS["lab35 generate"], "--threads", "2")

LOADS = ("alone", "busy")

Variant = tuple[str, str]
"""A load, and the name of a command."""


@dataclass(frozen=True)
class Wait:
    """How long a process let its user wait.

    Attributes:
        first: Seconds from its start to the first byte on standard output; None without any.
        whole: Seconds from its start to its end.
    """

    first: float | None
    whole: float


def variants(commands: Mapping[str, Sequence[str]]) -> dict[Variant, Callable[[], Wait]]:
    """Prepare each command under each load, for `lab35.timing.interleaved`."""
    return {
        (load, name): partial(_timed, load, commands[name])
        for load, name in product(LOADS, commands)
    }


def summed_up(rounds: Sequence[Mapping[Variant, Wait]]) -> dict[str, Any]:
    """Sum up rounds: for each wait its seconds, and its ratio to `import torch` in each round."""
    rows = []
    for name in dict.fromkeys(name for _, name in rounds[0]):
        parts = {"whole": name}
        if name.startswith("lab35 generate"):
            parts = {
                "first": f"{name}, first word",
                "whole": f"{name}, {DEFAULTS.max_new_tokens} tokens",
            }
        for part, told in parts.items():
            rows.append({"name": told} | {load: _told(rounds, load, name, part) for load in LOADS})
    return {"samples": len(rounds), "baseline": BASELINE, "rows": rows}


def _told(
    rounds: Sequence[Mapping[Variant, Wait]], load: str, name: str, part: str
) -> dict[str, Any]:
    seconds = [getattr(waits[load, name], part) for waits in rounds]
    torch = [waits[load, BASELINE].whole for waits in rounds]
    ratios = [one / other for one, other in zip(seconds, torch, strict=True)]
    return {"seconds": lab35.timing.spread(seconds), "ratio": lab35.timing.spread(ratios)}


def laid_out(told: dict[str, Any]) -> str:
    """Lay a summary out for people."""
    lines = [
        f"fresh processes, torch {told['torch']}, median of {told['samples']}, "
        f"compared with {told['baseline']}",
        "",
        f"{'':<40} {'alone':>17} {'beside a busy process':>21}",
    ]
    for row in told["rows"]:
        alone, busy = (
            f"{row[load]['seconds']['median']:.2f} s {row[load]['ratio']['median']:>6.2f} ×"
            for load in LOADS
        )
        lines.append(f"{row['name']:<40} {alone:>17} {busy:>21}")
    return "\n".join(lines)


@contextmanager
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    """Keep one processor busy for a block; the process ends with its parent, however that ends."""
    code = "import os; print(flush=True); parent = os.getppid()\nwhile os.getppid() == parent: pass"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            process.stdout.read(1)  # it has begun
            yield process
        finally:
            process.kill()


def _timed(load: str, words: Sequence[str]) -> Wait:
    """Run a process under a load, and time it."""
    with busy_process() if load == "busy" else nullcontext():
        start = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, *words],
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            seen = process.stdout.read(1)
            first = time.perf_counter() - start
            _, error = process.communicate()
            whole = time.perf_counter() - start
    if process.returncode:
        told = one_line(error.decode(errors="replace")) or "nothing on standard error"
        raise ValueError(
            f"python {' '.join(words)} must run, got exit code {process.returncode}: {told}"
        )
    return Wait(first if seen else None, whole)
