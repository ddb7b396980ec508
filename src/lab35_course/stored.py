"""Stored results: JSON files that say where their numbers come from, and that nobody edited them.

A file holds the data, their provenance, and a digest of both, all written by the tool. The digest
finds what carelessness does: a number mended by hand, a merge of two runs, a processor renamed. It
is no seal against someone who means to deceive, since they can compute it too.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lab35.checkpoint import replacing
from lab35_course.plain import plain

if TYPE_CHECKING:
    from lab35_course.results import Measurement

__all__ = [
    "Data",
    "Kind",
    "Result",
    "broken_spreads",
    "is_timed",
    "noise",
    "read_results",
    "write_result",
]

Data = dict[str, Any]
Kind = Literal["exact", "measured"]

RATIO_LIMIT, TIME_LIMIT = 0.25, 0.5
"""How wide the middle half of a paired ratio, and of any other sample, may be beside its median."""


@dataclass(frozen=True)
class Result:
    """A stored result: the data, and where they come from."""

    name: str
    kind: Kind
    data: Data
    provenance: Data

    @classmethod
    def measure(cls, measurement: Measurement) -> Result:
        """Run a measurement at full size and note the circumstances.

        Args:
            measurement: What to run.

        Returns:
            The result, not yet stored.
        """
        from lab35_course.results import Size

        data = measurement(Size.FULL)
        provenance = {
            "date": datetime.date.today().isoformat(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": measurement.threads,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            "command": _command(measurement.name),
            "seed": measurement.seed,
            "samples": _samples(data),
            "engine": measurement.engine,
        }
        return cls(measurement.name, measurement.kind, data, provenance)

    @property
    def digest(self) -> str:
        """The sha256 of everything else, in a spelling that indents and key order do not change."""
        told = json.dumps(asdict(self), sort_keys=True, ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(told.encode()).hexdigest()

    def line(self) -> str:
        """Tell the circumstances in one line of Markdown, to stand below a table."""
        if self.kind == "exact":
            return "Exact: recomputed by the tests."
        told = self.provenance
        count = f"{told['threads']} thread{'s' if told['threads'] != 1 else ''}"
        engine = f", {told['engine']}" if told["engine"] else ""
        samples = "" if told["samples"] == 1 else f", median of {told['samples']} rounds"
        place = f"Measured on {told['processor']}, {count}, torch {told['torch']}"
        told_plainly = plain(f"{place}{engine}{samples}; {told['date']}.")
        return f"{told_plainly} `make tables` measures again."


def read_results(folder: Path) -> dict[str, Result]:
    """Read every stored result.

    Args:
        folder: The folder of JSON files; a missing one holds none.

    Returns:
        The results by name.

    Raises:
        ValueError: If a file is not a result, is stored under another name than its own, or is not
            what the tool wrote.
    """
    stored = {}
    for path in sorted(folder.glob("*.json")):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            digest = told.pop("digest")
            result = Result(**told)
            fault = _implausible(result)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path.name} must be a stored result ({error!r}); measure it again"
            ) from None
        if path.stem != result.name:
            raise ValueError(f"{path.name} must be named after its result, got {result.name!r}")
        if fault is not None:
            raise ValueError(f"{path.name} must tell where it comes from: {fault}; measure again")
        if digest != result.digest:
            raise ValueError(
                f"{path.name} must be as it was written, but its digest says that it was edited; "
                f"run `{_command(result.name)}`"
            )
        stored[result.name] = result
    return stored


def write_result(folder: Path, result: Result) -> bool:
    """Store a result with its digest; an exact one whose data are stored already keeps its file.

    Args:
        folder: The folder, made if it does not exist.
        result: What to store.

    Returns:
        True when the file was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    if result.kind == "exact" and _is_stored(path, result):
        return False
    told = asdict(result) | {"digest": result.digest}
    text = json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return True


def _is_stored(path: Path, result: Result) -> bool:
    """Whether a sound file holds these data already."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        before = Result(**{key: told[key] for key in asdict(result)})
        return (told["digest"], before.kind, before.data) == (
            before.digest, result.kind, result.data
        )  # fmt: skip
    except (OSError, ValueError, TypeError, LookupError):
        return False


def _command(name: str) -> str:
    return f"python scripts/tables.py --only {name}"


def _implausible(result: Result) -> str | None:
    """Say what in a provenance cannot be, or None."""
    told = result.provenance
    expected = {"date", "processor", "cores", "threads", "torch", "python", "platform", "command"}
    expected |= {"seed", "samples", "engine"}
    if told.keys() != expected:
        return f"its keys must be {sorted(expected)}, got {sorted(told)}"
    if result.kind not in ("exact", "measured"):
        return f"kind must be 'exact' or 'measured', got {result.kind!r}"
    try:
        datetime.date.fromisoformat(told["date"])
    except (ValueError, TypeError):
        return f"date must be a day such as 2026-01-31, got {told['date']!r}"
    for name in ("processor", "torch", "python", "platform"):
        if not isinstance(told[name], str) or not told[name].strip():
            return f"{name} must be a text, got {told[name]!r}"
    for name, least in (("cores", 1), ("threads", 1), ("seed", 0)):
        if type(told[name]) is not int or told[name] < least:
            return f"{name} must be a whole number of at least {least}, got {told[name]!r}"
    if told["command"] != _command(result.name):
        return f"command must be {_command(result.name)!r}, got {told['command']!r}"
    if told["samples"] != _samples(result.data):
        return f"samples must be {_samples(result.data)!r} as in the data, got {told['samples']!r}"
    return None


# --- Spreads -------------------------------------------------------------------------------------


def _spreads(value: Any, path: str = "") -> Iterator[tuple[str, Data]]:
    """List every summary of samples in JSON data with its dotted path."""
    if isinstance(value, dict):
        if {"median", "min", "max", "samples"} <= value.keys():
            yield path.lstrip("."), value
        for key, item in value.items():
            yield from _spreads(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _spreads(item, f"{path}.{index}")


def is_timed(data: Data) -> bool:
    """Say whether data come from samples, and so hold times or ratios of times.

    Args:
        data: A result's data.

    Returns:
        Whether they count samples anywhere.
    """
    return next(_counts(data), None) is not None


def broken_spreads(data: Data) -> Iterator[str]:
    """Find summaries whose parts cannot belong together.

    Args:
        data: A result's data.

    Yields:
        One sentence for each spread whose minimum, median and maximum are not finite and in order,
        or whose middle half does not lie between the two.
    """
    for path, told in _spreads(data):
        low, median, high = (float(told[part]) for part in ("min", "median", "max"))
        width = float(told.get("iqr", 0.0))
        slack = 1e-5 * max(abs(low), abs(high))  # six digits are kept
        if not all(map(math.isfinite, (low, median, high, width))):
            yield f"{path} must be finite, got {told}"
        elif not low <= median <= high or not 0 <= width <= high - low + slack:
            yield f"{path} must have min ≤ median ≤ max and an iqr between them, got {told}"
        elif type(told["samples"]) is not int or told["samples"] < 1:
            yield f"{path} must have at least one sample, got {told['samples']!r}"


def noise(data: Data) -> str | None:
    """Name the spread that is too wide to publish, if there is one.

    Args:
        data: A result's data.

    Returns:
        The widest spread beyond its limit, in words. The limit is on the middle half beside the
        median: a quarter for a ratio that was taken within each round, a half for anything else.
    """
    worst, told_worst = 1.0, None
    for path, told in _spreads(data):
        if not told["median"]:
            continue
        limit = RATIO_LIMIT if path.endswith("speedup") else TIME_LIMIT
        width = told.get("iqr", 0.0) / abs(told["median"])
        if width / limit > worst:
            worst = width / limit
            told_worst = f"the middle half of {path} is {width:.0%} of its median wide"
    return told_worst


def _samples(data: Data) -> int | str:
    """Count the samples behind each median: one number, or the range where they differ."""
    counts = sorted(set(_counts(data))) or [1]
    return counts[0] if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _counts(value: Any) -> Iterator[int]:
    """List every number that is called `samples` in JSON data."""
    if isinstance(value, dict):
        if "samples" in value:
            yield value["samples"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _counts(item)


def processor() -> str:
    """Read the processor's model name from the machine."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return platform.processor() or platform.machine()
