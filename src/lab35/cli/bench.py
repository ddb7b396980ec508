"""`lab35 bench`: the uncached loop and every engine side by side."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated, Any, get_args

import torch
import typer
from rich.progress import track
from torch import Tensor

from lab35.cli.models import encode, load
from lab35.cli.options import CheckpointOption, DeviceOption, JsonOption
from lab35.cli.streams import from_argument, note, one_line, print_json
from lab35.loop import decode_steps
from lab35.model import GPT
from lab35.speed import EngineName, why_not
from lab35.terminal import error_console
from lab35.timing import (
    Latency,
    clock_on,
    compare_texts,
    interleaved,
    threads,
    time_steps,
)

BENCH_PROMPT = "It was a dark night and the wind blew"


BENCH_VARIANTS: dict[str, dict[str, Any]] = {"uncached": {"use_cache": False}} | {
    name: {"engine": name} for name in get_args(EngineName)
}
"""What `lab35 bench` compares: options of `decode_steps` by name, and the first is the baseline."""


def bench(
    prompt: Annotated[
        str, typer.Option(help="Text to continue; this one is 16 tokens.")
    ] = BENCH_PROMPT,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 15,
    thread_count: Annotated[
        int, typer.Option("--threads", min=1, help="Threads that torch may use.")
    ] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="Time this one only; can be repeated."),
    ] = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> int:
    """Time the uncached loop and every engine side by side.

    They write the same greedy text in turns. The first is what the others are compared with.
    TTFT is the time to the first token, TPOT the time per output token after it. Prompt tokens
    count in no rate. Exit code 1 if the texts differ.
    """
    processors = os.cpu_count() or 1
    if thread_count > processors:  # more only wait for one another, and too many end the process
        raise ValueError(
            f"--threads must lie in [1, {processors}], the processors here, got {thread_count}"
        )
    chosen = list(dict.fromkeys(only or BENCH_VARIANTS))
    for name in chosen:
        if name not in BENCH_VARIANTS:
            raise ValueError(f"--only must be one of {', '.join(BENCH_VARIANTS)}, got {name!r}")
    prompt = from_argument("--prompt", prompt)
    model, tokenizer = load(checkpoint, device)
    idx = encode(model, tokenizer, prompt, model.config.block_size)
    room = model.config.block_size + 1 - idx.shape[1]
    if max_new_tokens > room:
        raise ValueError(
            f"--max-new-tokens must lie in [1, {room}] after {idx.shape[1]} prompt tokens, "
            f"so that all loops do the same work, got {max_new_tokens}"
        )
    variants, missing = {}, {}
    for name in chosen:
        options = BENCH_VARIANTS[name]
        reason = why_not(options["engine"], model) if "engine" in options else None
        if reason is None:
            variants[name] = partial(_time_text, model, idx, max_new_tokens, options)
        else:
            missing[name] = reason
            note(f"without {name}: {one_line(reason)}")
    if not variants:
        raise ValueError(f"--only must name something that runs here, got {', '.join(chosen)}")
    console = error_console()
    with threads(thread_count):
        rounds = track(
            interleaved(variants, repeats=repeats),
            "timing",
            total=repeats,
            console=console,
            auto_refresh=False,  # a bar that moves by itself would disturb what is timed
            disable=not console.is_terminal,
        )
        told = compare_texts(list(rounds))
    told |= {"prompt_tokens": idx.shape[1], "new_tokens": max_new_tokens}
    told |= {"device": device, "torch": torch.__version__, "missing": missing}
    if as_json:
        print_json(told)
    else:
        print(_bench_table(told))
    return int(not told["same_tokens"])


def _time_text(model: GPT, idx: Tensor, new: int, options: dict[str, Any]) -> Latency:
    steps = decode_steps(model, idx, new, temperature=0, **options)
    return time_steps(steps, clock=clock_on(idx.device))


def _bench_table(told: dict[str, Any]) -> str:
    """Lay out a benchmark for people: medians, and the fastest time per output token."""
    lines = [
        f"prompt tokens: {told['prompt_tokens']}, greedy tokens: {told['new_tokens']}, "
        f"{told['device']}, threads: {told['threads']}, torch {told['torch']}, "
        f"median of {told['samples']}, compared with {told['baseline']}",
        "",
        f"{'loop':<12} {'TTFT':>10} {'TPOT':>10} {'fastest':>10} {'tokens/s':>10} {'speed-up':>10}",
    ]
    for name, variant in told["variants"].items():
        later = variant["time_per_output_token"]
        cells = [
            _milliseconds(variant["time_to_first_token"]["median"]),
            _microseconds(later["median"]) if later else "none",
            _microseconds(later["min"]) if later else "none",
            f"{variant['tokens_per_second']['median']:,.0f}",
            f"{variant['speedup']['median']:.2f} ×",
        ]
        lines.append(" ".join([f"{name:<12}", *(f"{cell:>10}" for cell in cells)]))
    if not told["same_tokens"]:
        lines += ["", "DIFFERENT TEXTS: not the same work"]
    elif len(told["variants"]) > 1:
        lines += ["", "all wrote the same text"]
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} µs"
