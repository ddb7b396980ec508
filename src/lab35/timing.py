"""Timing: how long a text takes, told so that nobody is fooled, and what a step has to do.

Times are noisy, so variants are timed side by side and compared within each round. Counts are not:
calls, floating-point operations and bytes are the same on every machine.

```{.python title="Two loops, side by side"}
from functools import partial

import torch

from lab35 import generate, load_pretrained
from lab35.timing import time_paired

model, tokenizer = load_pretrained()
prompt = torch.tensor([tokenizer.encode("Sherlock Holmes")])
write = partial(generate, model, prompt, 20, temperature=0)
timed = time_paired({"uncached": partial(write, use_cache=False), "cached": write}, repeats=3)
assert timed["variants"]["cached"]["speedup"]["median"] > 0
```
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from lab35._arguments import integer, number
from lab35.cache import cache_bytes
from lab35.loop import Step
from lab35.model import GPT

__all__ = [
    "Latency",
    "bytes_read",
    "clock_on",
    "compare",
    "compare_texts",
    "count_calls",
    "count_flops",
    "interleaved",
    "mean_seconds",
    "spread",
    "threads",
    "time_paired",
    "time_steps",
]

T = TypeVar("T")
Clock = Callable[[], float]


# --- One text ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Latency:
    """When each new token of a text came.

    The prompt's tokens are input: its cost shows in the time to the first token, and in no rate.

    Attributes:
        tokens: Int64, shape (B, n): the new tokens alone.
        arrivals: Seconds from the start to each of the n steps, in order.
    """

    tokens: Tensor
    arrivals: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last token."""
        return self.arrivals[-1]

    @property
    def time_to_first_token(self) -> float:
        """Seconds from the start to the first token (TTFT): prefill, and one choice."""
        return self.arrivals[0]

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds of the steps after the first (TPOT); None where there is only one."""
        later = len(self.arrivals) - 1
        return (self.seconds - self.time_to_first_token) / later if later else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens of all rows over all seconds, prefill included; None if no time was seen."""
        return self.tokens.numel() / self.seconds if self.seconds > 0 else None


def time_steps(steps: Iterable[Step], *, clock: Clock = time.perf_counter) -> Latency:
    """Run a generation to its end, and note when each token comes.

    Args:
        steps: What `decode_steps` returns. It starts to work when its first step is asked for, and
            so does the clock.
        clock: Seconds since any moment. See `clock_on`.

    Returns:
        The tokens with their arrivals.

    Raises:
        ValueError: If there is no step.
    """
    tokens, arrivals = [], []
    with _collector_off():
        start = clock()
        for step in steps:
            arrivals.append(clock() - start)
            tokens.append(step.token)
    if not tokens:
        raise ValueError("steps must yield at least one token, got none")
    return Latency(torch.cat(tokens, dim=1), tuple(arrivals))


# --- Several ways to do one thing ----------------------------------------------------------------


def time_paired(
    variants: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warmup: int = 1,
    baseline: str | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Time several ways to do one thing side by side, round by round.

    Torch's threads are as the caller set them; `threads` changes them for a block.

    Args:
        variants: Functions without arguments by name.
        repeats: Rounds that count.
        warmup: Rounds before them that do not.
        baseline: The variant to compare with. Defaults to the first.
        clock: Seconds since any moment. See `clock_on`.

    Returns:
        What `compare` returns.

    Raises:
        ValueError: If there is no variant, the baseline is unknown, `repeats` is below 1,
            `warmup` below 0, or the clock too coarse to see a variant run.
    """
    timed = {name: partial(mean_seconds, variants[name], clock=clock) for name in variants}
    rounds = interleaved(timed, repeats=repeats, warmup=warmup)
    baseline = _known(baseline, list(variants))  # before anything takes time
    return compare(list(rounds), baseline)


def clock_on(device: torch.device | str) -> Clock:
    """Find the clock for work on a device.

    A GPU works on while Python goes ahead, so its clock waits for it before it reads the time.

    Args:
        device: Where the work is done.

    Returns:
        A function that returns seconds since some moment.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return time.perf_counter

    def after_the_device() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return after_the_device


def mean_seconds(
    function: Callable[[], object], calls: int = 1, *, clock: Clock = time.perf_counter
) -> float:
    """Time a block of calls, with Python's garbage collector out of the way.

    Args:
        function: What to time, without arguments.
        calls: Calls in the block. Take many where one is short.
        clock: Seconds since any moment. See `clock_on`.

    Returns:
        Seconds a call.

    Raises:
        ValueError: If `calls` is below 1.
    """
    calls = integer("calls", calls, 1)
    with _collector_off():
        start = clock()
        for _ in range(calls):
            function()
        return (clock() - start) / calls


def interleaved(
    variants: Mapping[str, Callable[[], T]], *, repeats: int, warmup: int = 1
) -> Iterator[dict[str, T]]:
    """Run variants in turns.

    A round runs every variant once, and the next round starts with another one, so that a slow
    spell of the machine and the order fall on all alike.

    Args:
        variants: Functions without arguments by name.
        repeats: Rounds that count.
        warmup: Rounds before them that do not.

    Returns:
        An iterator over the rounds that count: what each variant returned, by name, in the order
        of `variants`.

    Raises:
        ValueError: If there is no variant, `repeats` is below 1 or `warmup` below 0.
    """
    if not variants:
        raise ValueError("variants must hold at least one function, got none")
    return _rounds(variants, integer("repeats", repeats, 1), integer("warmup", warmup, 0))


def _rounds(
    variants: Mapping[str, Callable[[], T]], repeats: int, warmup: int
) -> Iterator[dict[str, T]]:
    names = list(variants)
    for index in range(warmup + repeats):
        first = index % len(names)
        found = {name: variants[name]() for name in names[first:] + names[:first]}
        if index >= warmup:
            yield {name: found[name] for name in names}


def compare(rounds: Sequence[Mapping[str, float]], baseline: str | None = None) -> dict[str, Any]:
    """Compare times that were taken side by side.

    A speed-up is taken within each round. The claim to quote is the median of these ratios, not a
    ratio of medians.

    Args:
        rounds: For each round, the seconds of every variant by name.
        baseline: The variant to compare with. Defaults to the first of the first round.

    Returns:
        `samples` (the rounds), `threads`, `baseline`, and `variants`: for each name `seconds`, the
        spread of its times, and `speedup`, the spread of baseline time / its own time.

    Raises:
        ValueError: If there is no round, the baseline is unknown, or a time is not finite and above
            zero: a clock that saw none pass cannot tell how many times faster that was.
    """
    if not rounds:
        raise ValueError("rounds must hold at least one round, got none")
    baseline = _known(baseline, list(rounds[0]))
    for index, times in enumerate(rounds):
        for name, seconds in times.items():
            if not 0 < seconds < math.inf:
                raise ValueError(
                    f"rounds must hold seconds above 0, got {seconds} for {name!r} in round "
                    f"{index}; where the clock is too coarse, time more work at once"
                )
    return {
        "samples": len(rounds),
        "threads": torch.get_num_threads(),
        "baseline": baseline,
        "variants": {
            name: {
                "seconds": spread([times[name] for times in rounds]),
                "speedup": spread([times[baseline] / times[name] for times in rounds]),
            }
            for name in rounds[0]
        },
    }


def compare_texts(
    rounds: Sequence[Mapping[str, Latency]], baseline: str | None = None
) -> dict[str, Any]:
    """Compare texts that were written side by side.

    Args:
        rounds: For each round, the latency of every variant by name.
        baseline: The variant to compare with. Defaults to the first of the first round.

    Returns:
        What `compare` returns for the seconds of whole texts, with more for each variant: the
        spreads of `time_to_first_token`, of `time_per_output_token` (None for one token) and of
        `tokens_per_second`. `same_tokens` says whether all texts are the same: if not, the
        variants did not do the same work.

    Raises:
        ValueError: As `compare` does.
    """
    told = compare(
        [{name: text.seconds for name, text in texts.items()} for texts in rounds], baseline
    )
    for name, variant in told["variants"].items():
        texts = [round_[name] for round_ in rounds]
        later = [text.time_per_output_token for text in texts]
        variant["time_to_first_token"] = spread([text.time_to_first_token for text in texts])
        variant["time_per_output_token"] = None if None in later else spread(later)
        variant["tokens_per_second"] = spread([text.tokens_per_second for text in texts])
    first = rounds[0][told["baseline"]].tokens
    told["same_tokens"] = all(
        torch.equal(text.tokens, first) for texts in rounds for text in texts.values()
    )
    return told


def _known(baseline: str | None, names: Sequence[str]) -> str:
    """Take the first name where no baseline is given."""
    if baseline is not None and baseline not in names:
        raise ValueError(f"baseline must be one of {names}, got {baseline!r}")
    return names[0] if baseline is None else baseline


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Summarise samples of one quantity.

    Args:
        samples: At least one number, in any unit.

    Returns:
        `median`, `min`, `max` and `iqr` (the distance between the quartiles) in that unit, and
        `samples`, their count.

    Raises:
        ValueError: If there is no sample, or one is NaN or infinite: it has no place in an order.
    """
    samples = [number("samples", sample, "all of them finite") for sample in samples]
    if not samples:
        raise ValueError("samples must hold at least one number, got none")
    if not all(map(math.isfinite, samples)):
        raise ValueError(f"samples must be finite numbers, got {samples}")
    several = samples if len(samples) > 1 else [*samples, *samples]
    quartiles = statistics.quantiles(several, method="inclusive")
    return {
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
        "iqr": quartiles[2] - quartiles[0],
        "samples": len(samples),
    }


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's threads for a block, and restore them.

    Args:
        count: Threads that one operation may use.

    Yields:
        Nothing.

    Raises:
        ValueError: If `count` is below 1.
    """
    count = integer("count", count, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Keep Python's garbage collector from running in the middle of what is timed."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


# --- What does not depend on the machine ---------------------------------------------------------


class _Calls(TorchDispatchMode):
    """See every operation that reaches PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def count_calls(function: Callable[[], object]) -> Counter[str]:
    """Count the ATen operations that a function calls.

    A count belongs to a gradient mode. Under `torch.inference_mode()`, where this course counts and
    every step of `decode_steps` runs, a linear layer is one call; under `torch.no_grad()` it comes
    apart into several. The mode is the one that the function runs in.

    Args:
        function: What to count, without arguments.

    Returns:
        Calls by name, such as `aten.linear`. Views count like any other call.
    """
    with _Calls() as calls:
        function()
    return calls.counts


def count_flops(function: Callable[[], object]) -> int:
    """Count the floating-point operations of a function's matrix products and its attention.

    This is PyTorch's own counter with one gap closed: it knows no formula for attention on the CPU,
    and counts it as nothing. A product of (m, k) and (k, n) is 2·m·k·n operations. Attention is
    counted whole, also where a causal mask lets a kernel skip half. Everything else is a small rest
    and not counted.

    Args:
        function: What to count, without arguments. Tensors on the `meta` device will do.

    Returns:
        Floating-point operations.
    """
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attention = {on_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)}
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        function()
    return counter.get_total_flops()


def bytes_read(model: GPT, positions: int, *, batch_size: int = 1) -> int:
    """Count the bytes that one forward must read at least: all weights, and all keys and values.

    Activations are left out, because they are small and stay close to the processor. The tables of
    embeddings are counted whole; the head reads the one, and the other is small.

    Args:
        model: A GPT.
        positions: Keys that attention sees in each row, the new ones included.
        batch_size: Rows. They share the weights, and each reads its own cache.

    Returns:
        Bytes.

    Raises:
        ValueError: If a size is below 1.
    """
    config, weights = model.config, list(model.parameters())
    return sum(weight.nbytes for weight in weights) + cache_bytes(
        n_layer=config.n_layer,
        n_kv_head=config.n_head,
        head_dim=config.head_dim,
        length=positions,
        batch_size=batch_size,
        dtype=weights[0].dtype,
    )
