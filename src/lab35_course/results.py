"""Results as data: measurements register themselves, and their results are JSON with provenance.

A module in `lab35_course.measurements` declares what it measures, and is found by itself:

    @measurement("loop.cost", kind="exact")
    def cost(size: Size) -> Data:
        return {"uncached": 6550, "cached": 115}

    @table("loop.cost", result="loop.cost")
    def cost_table(data: Data) -> Table:
        return Table(headers=["Loop", "Token-forwards"], rows=[...], align="lr")

    @invariant("loop.cost")
    def cached_is_cheaper(data: Data) -> None:
        assert data["cached"] < data["uncached"]

`scripts/tables.py` runs the measurements, stores each result as `results/NAME.json`, and renders
the pages. An exact result is recomputed by every check and must be equal. A measured one depends on
the machine: a check runs it again at `Size.TINY`, for its shape and its invariants alone.
"""

from __future__ import annotations

import enum
import importlib
import json
import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lab35.terminal import error_console
from lab35.timing import threads, time_paired
from lab35_course.plain import Markdown, plain
from lab35_course.stored import (
    Data,
    Kind,
    Result,
    broken_spreads,
    is_timed,
    noise,
    read_results,
    write_result,
)

__all__ = [
    "Data",
    "Invariant",
    "Measurement",
    "Problem",
    "Registry",
    "Result",
    "Size",
    "Table",
    "TableView",
    "check_results",
    "collect",
    "difference",
    "fitted",
    "invariant",
    "measurement",
    "noise",
    "read_results",
    "shape",
    "table",
    "threads",
    "time_paired",
    "track",
    "write_result",
]

ROOT = Path(__file__).parents[2]

T = TypeVar("T")


class Size(enum.Enum):
    """How much a measurement does: all of it, or just enough to show its shape."""

    FULL = "full"
    TINY = "tiny"

    def pick(self, full: T, tiny: T) -> T:
        """Choose a value by size, as in `size.pick(15, 2)` rounds.

        Args:
            full: The value for the stored result.
            tiny: The value for a check.

        Returns:
            One of the two.
        """
        return full if self is Size.FULL else tiny


@dataclass(frozen=True)
class Problem:
    """Something that a check found: where, and what to do about it."""

    where: str
    message: str

    def __str__(self) -> str:
        """Format as `file:line: message`."""
        return f"{self.where}: {self.message}"


@dataclass(frozen=True)
class Table:
    """A table before it is Markdown.

    Args:
        headers: One heading a column, in Markdown.
        rows: One list of cells a row; a cell is shown as it is, unless it is `Markdown`.
        align: One letter a column: `l`, `r` or `c`.

    Raises:
        ValueError: If the columns do not agree, or Markdown in a cell holds a line break.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str

    def __post_init__(self) -> None:
        if set(self.align) - set("lrc") or len(self.align) != len(self.headers):
            raise ValueError(
                f"align must be one of l, r, c for each of {len(self.headers)} columns, "
                f"got {self.align!r}"
            )
        for row in self.rows:
            broken = any(isinstance(cell, Markdown) and "\n" in cell for cell in row)
            if len(row) != len(self.headers) or broken:
                raise ValueError(
                    f"rows must hold {len(self.headers)} cells without line breaks, got {row!r}"
                )

    def markdown(self) -> str:
        """Write the table with pipes, its columns padded so that the source reads well too."""
        cells = [[Markdown(head) for head in self.headers]]
        cells += [[plain(cell) for cell in row] for row in self.rows]
        widths = [max(3, *(len(cell) for cell in column)) for column in zip(*cells, strict=True)]
        rules = {"l": (":", "-"), "r": ("-", ":"), "c": (":", ":")}

        def line(row: Sequence[str]) -> str:
            padded = (
                cell.rjust(width) if side == "r" else cell.ljust(width)
                for cell, width, side in zip(row, widths, self.align, strict=True)
            )
            return f"| {' | '.join(padded)} |"

        rule = (
            f"{rules[side][0]}{'-' * (width - 2)}{rules[side][1]}"
            for side, width in zip(self.align, widths, strict=True)
        )
        return "\n".join([line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])])


@dataclass(frozen=True)
class Measurement:
    """A registered measurement; call it with a `Size` for its bare data."""

    name: str
    kind: Kind
    seed: int
    threads: int
    engine: str | None
    function: Callable[[Size], Data]

    def __call__(self, size: Size) -> Data:
        """Run under the declared seed and threads, and restore both.

        Returns:
            The data as JSON holds them: lists for tuples, text for keys. The floats of a measured
            result keep 6 significant digits; an exact result is kept exactly.

        Raises:
            ValueError: If JSON cannot hold the data, or a key cannot stand in a dotted path.
        """
        with threads(self.threads), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            data = self.function(size)
        return _jsonable(self.name, data, exact=self.kind == "exact")


@dataclass(frozen=True)
class TableView:
    """A registered table: how a result is laid out on a page."""

    name: str
    result: str
    function: Callable[[Data], Table]


@dataclass(frozen=True)
class Invariant:
    """A registered statement that holds for a result on every machine and at every size."""

    result: str
    function: Callable[[Data], None]


def measurement(
    name: str, *, kind: Kind, seed: int = 1337, threads: int = 1, engine: str | None = None
) -> Callable[[Callable[[Size], Data]], Measurement]:
    """Register a function of a `Size` as a measurement.

    Args:
        name: `chapter.subject`; the result is stored as `results/chapter.subject.json`.
        kind: `"exact"` when every machine must find the same (counts, bytes, kept sets), so that
            checks can recompute it at full size: keep it fast. `"measured"` for times, and for
            floats that depend on the machine's kernels.
        seed: Given to `torch.manual_seed` before each run.
        threads: Torch's threads during the run.
        engine: What ran the model's steps, as the small print under a table says it: `"the eager
            engine"`, `"each engine by its name"`, `"no model"`. What holds times must say it.

    Returns:
        A decorator. The function returns a dictionary that JSON can hold, with keys free of dots
        and spaces. Its keys are the same at every size; only lists may change their length. A
        summary of samples is what `lab35.timing.spread` returns.

    Raises:
        ValueError: If `kind` is unknown.
    """
    if kind not in ("exact", "measured"):
        raise ValueError(f"kind must be 'exact' or 'measured', got {kind!r}")
    return lambda function: Measurement(name, kind, seed, threads, engine, function)


def table(name: str, *, result: str) -> Callable[[Callable[[Data], Table]], TableView]:
    """Register a function from a stored result's data to a `Table`.

    Args:
        name: What the marker on the page says.
        result: The name of the measurement.

    Returns:
        A decorator.
    """
    return lambda function: TableView(name, result, function)


def invariant(result: str) -> Callable[[Callable[[Data], None]], Invariant]:
    """Register a function that asserts what must hold for a result's data at every size.

    An invariant asserts no time: say that a ratio is positive, not that it is above 4.

    Args:
        result: The name of the measurement; it may have several invariants.

    Returns:
        A decorator.
    """
    return lambda function: Invariant(result, function)


def collect(package: ModuleType, *kinds: type[T]) -> list[T]:
    """Import every module of a package and gather the objects of some types that they define.

    Args:
        package: A package; modules in it need no registration.
        kinds: The types to look for.

    Returns:
        The objects in order of module name, then of definition.
    """
    found: dict[int, T] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for value in vars(module).values():
            if isinstance(value, kinds):
                found[id(value)] = value
    return list(found.values())


@dataclass(frozen=True)
class Registry:
    """Everything that the measurement modules declare, by name."""

    measurements: Mapping[str, Measurement]
    tables: Mapping[str, TableView]
    invariants: Sequence[Invariant]

    @classmethod
    def of(cls, items: Sequence[Measurement | TableView | Invariant]) -> Registry:
        """Sort registered objects by their type and name.

        Args:
            items: Measurements, tables and invariants.

        Returns:
            The registry.

        Raises:
            ValueError: If two of a type share a name, or a table or an invariant belongs to no
                measurement.
        """
        measurements = _by_name([item for item in items if isinstance(item, Measurement)])
        tables = _by_name([item for item in items if isinstance(item, TableView)])
        invariants = [item for item in items if isinstance(item, Invariant)]
        for item in (*tables.values(), *invariants):
            if item.result not in measurements:
                raise ValueError(f"result must be a registered measurement, got {item.result!r}")
        return cls(measurements, tables, invariants)

    @classmethod
    def discover(cls) -> Registry:
        """Gather what the modules of `lab35_course.measurements` declare."""
        from lab35_course import measurements

        return cls.of(collect(measurements, Measurement, TableView, Invariant))

    def broken_invariants(self, name: str, data: Data) -> list[str]:
        """Run every invariant of a result, and the one of all: a spread is in order.

        Args:
            name: The measurement.
            data: Its data, stored or fresh.

        Returns:
            One sentence for each invariant that does not hold.
        """
        broken = list(broken_spreads(data))
        for item in self.invariants:
            if item.result == name:
                try:
                    fitted(item.function, data)
                except (AssertionError, ValueError) as error:
                    reason = " ".join(str(error).split())
                    broken.append(f"{item.function.__name__} does not hold ({reason})")
        return broken


def fitted(function: Callable[..., T], *data: Data) -> T:
    """Call a function of stored data that may be older than the function.

    Args:
        function: A table, an invariant or a figure.
        data: The data of each result that it takes.

    Returns:
        What the function returns.

    Raises:
        ValueError: If the function finds the data otherwise than it expects.
    """
    try:
        return function(*data)
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"{function.__name__} does not fit the stored result ({error!r}); measure it again"
        ) from error


def _by_name(items: Sequence[T]) -> dict[str, T]:
    named: dict[str, T] = {}
    for item in items:
        if item.name in named:
            raise ValueError(f"name must be registered once, got {item.name!r} twice")
        named[item.name] = item
    return named


def check_results(registry: Registry, stored: Mapping[str, Result]) -> Iterator[Problem]:
    """Hold stored results against their measurements.

    An exact result is recomputed and must be equal. A measured one is run at `Size.TINY` and must
    have the same shape. Invariants must hold for what is stored and for what was run.

    Args:
        registry: The measurements.
        stored: The stored results by name.

    Yields:
        Each problem, as it is found.
    """
    for name in sorted(stored.keys() - registry.measurements.keys()):
        yield Problem(
            f"results/{name}.json", "no measurement has this name; delete the file or register it"
        )
    for name in track(registry.measurements, "checking"):
        item = registry.measurements[name]
        where = f"results/{name}.json"
        remedy = f"run `python scripts/tables.py --only {name}`"
        if name not in stored:
            yield Problem(where, f"no stored result; {remedy}")
            continue
        before = stored[name]
        if before.kind != item.kind:
            yield Problem(where, f"stored as {before.kind}, registered as {item.kind}; {remedy}")
            continue
        size = Size.FULL if item.kind == "exact" else Size.TINY
        fresh = item(size)
        if item.kind == "exact" and fresh != before.data:
            change = difference(before.data, fresh)
            yield Problem(where, f"recomputing gives another result: {change}; {remedy}")
        elif item.kind == "measured" and shape(fresh) != shape(before.data):
            change = difference(shape(before.data), shape(fresh))
            yield Problem(where, f"the shape has changed: {change}; {remedy}")
        if is_timed(before.data) and item.engine is None:
            yield Problem(name, "holds times and names no engine; give `measurement` its `engine`")
        if noisy := noise(before.data):
            yield Problem(where, f"too noisy to publish, {noisy}; {remedy}")
        for broken in registry.broken_invariants(name, before.data):
            yield Problem(where, f"stored result: {broken}; {remedy}, or mend the measurement")
        for broken in registry.broken_invariants(name, fresh):
            yield Problem(where, f"fresh {size.value} result: {broken}; mend the measurement")


def track(names: Iterable[str], verb: str) -> Iterator[str]:
    """Go through names under a progress bar on standard error, if that is a terminal.

    Args:
        names: Names of measurements.
        verb: What happens to each.

    Yields:
        The names in order.
    """
    names, console = list(names), error_console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(verb, total=len(names))
        for name in names:
            progress.update(task, description=f"{verb} {name}")
            yield name
            progress.advance(task)


def shape(value: Any) -> Any:
    """Describe JSON data by what they are made of.

    Args:
        value: Anything that JSON can hold.

    Returns:
        A dictionary of the same keys; for a list, the distinct shapes of its elements, so that its
        length does not count; for the rest, the name of its type, where all numbers are alike.
    """
    match value:
        case dict():
            return {key: shape(item) for key, item in value.items()}
        case list():
            distinct = {json.dumps(shape(item), sort_keys=True) for item in value}
            return [json.loads(item) for item in sorted(distinct)]
        case bool() | None | str():
            return type(value).__name__
        case _:
            return "number"


def difference(before: Any, after: Any, path: str = "") -> str:
    """Name the first place where two JSON values differ.

    Args:
        before: The stored value.
        after: The fresh value; not equal to `before`.
        path: Where both were found.

    Returns:
        The dotted path and what stands there.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() ^ after.keys())
        if keys:
            has = "is stored only" if keys[0] in before else "is not stored"
            return f"`{f'{path}.{keys[0]}'.lstrip('.')}` {has}"
        pairs = {key: (before[key], after[key]) for key in before}
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = dict(enumerate(zip(before, after, strict=True)))
    else:
        return f"`{path.lstrip('.')}` was {_short(before)}, is {_short(after)}"
    key = next(key for key, (old, new) in pairs.items() if old != new)
    return difference(*pairs[key], f"{path}.{key}")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _jsonable(name: str, value: Any, *, exact: bool) -> Any:
    """Bring data to what reading them back from JSON gives."""
    match value:
        case dict():
            for key in map(str, value):
                if not key or "." in key or any(char.isspace() for char in key):
                    raise ValueError(f"{name}: keys must be free of dots and spaces, got {key!r}")
            return {str(k): _jsonable(name, v, exact=exact) for k, v in value.items()}
        case list() | tuple():
            return [_jsonable(name, item, exact=exact) for item in value]
        case float() if not math.isfinite(value):
            raise ValueError(f"{name}: numbers must be finite, got {value}")
        case float():
            return value if exact else float(f"{value:.6g}")
        case bool() | int() | str() | None:
            return value
        case _:
            raise ValueError(f"{name}: data must be JSON's own types, got {type(value).__name__}")
