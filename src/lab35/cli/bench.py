"""`lab35 bench`: the uncached loop and every engine side by side, or whole commands (`cold.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer

import lab35
from lab35._engines import EngineName
from lab35.cli import cold
from lab35.cli.models import encode, loaded
from lab35.cli.options import CheckpointOption, DeviceOption, JsonOption, ThreadsOption
from lab35.cli.streams import check_prompt, from_argument, note, one_line, print_json
from lab35.terminal import error_console

if TYPE_CHECKING:
    from torch import Tensor

    from lab35 import GPT
    from lab35.timing import Latency

T = TypeVar("T")

BENCH_PROMPT = "It was a dark night and the wind blew"
BENCH_TOKENS = 100


BENCH_VARIANTS: dict[str, dict[str, Any]] = {"uncached": {"use_cache": False}} | {
    name: {"engine": name} for name in get_args(EngineName)
}
"""What `lab35 bench` compares: options of `decode_steps` by name, and the first is the baseline."""


def bench(
    prompt: Annotated[
        str, typer.Option(help="Text to continue; this one is 16 tokens.")
    ] = BENCH_PROMPT,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = BENCH_TOKENS,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 15,
    thread_count: ThreadsOption = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="Time this one only; can be repeated."),
    ] = None,
    in_fresh_processes: Annotated[
        bool, typer.Option("--cold", help="Time whole commands in fresh processes instead.")
    ] = False,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> int:
    """Time the uncached loop and every engine side by side.

    They write the same greedy text in turns. The first is what the others are compared with.
    TTFT is the time to the first token, TPOT the time per output token after it. Prompt tokens
    count in no rate. Exit code 1 if the texts differ.

    With --cold it is what a user waits for: help, the first word and a whole text, each alone and
    beside a busy process, compared with the import of torch.
    """
    if in_fresh_processes:
        for option, value, default in (
            ("--prompt", prompt, BENCH_PROMPT),
            ("--max-new-tokens", max_new_tokens, BENCH_TOKENS),
            ("--threads", thread_count, 1),
            ("--only", only, None),
            ("--checkpoint", checkpoint, None),
            ("--device", device, "cpu"),
        ):
            if value != default:
                raise ValueError(f"--cold must stand without {option}, got both")
        _tell(
            cold.summed_up(_rounds(cold.variants(cold.COMMANDS), repeats)), cold.laid_out, as_json
        )
        return 0
    chosen = list(dict.fromkeys(only or BENCH_VARIANTS))
    for name in chosen:
        if name not in BENCH_VARIANTS:
            raise ValueError(f"--only must be one of {', '.join(BENCH_VARIANTS)}, got {name!r}")
    prompt = check_prompt(from_argument("--prompt", prompt))
    with loaded(checkpoint, device, thread_count) as (model, tokenizer):
        idx = encode(model, tokenizer, prompt, model.config.block_size)
        room = model.config.block_size + 1 - idx.shape[1]
        if max_new_tokens > room:
            raise ValueError(
                f"--max-new-tokens must lie in [1, {room}] after {idx.shape[1]} prompt tokens, "
                f"so that all loops do the same work, got {max_new_tokens}"
            )
        variants, missing = _variants(chosen, model, idx, max_new_tokens)
        if not variants:
            raise ValueError(f"--only must name something that runs here, got {', '.join(chosen)}")
        told = lab35.timing.compare_texts(_rounds(variants, repeats))
    told |= {"prompt_tokens": idx.shape[1], "new_tokens": max_new_tokens}
    told |= {"device": device, "missing": missing}
    _tell(told, _bench_table, as_json)
    return int(not told["same_tokens"])


def _tell(told: dict[str, Any], laid_out: Callable[[dict[str, Any]], str], as_json: bool) -> None:
    """Print what was measured, with the version of torch, as an object or for people."""
    import torch

    told |= {"torch": torch.__version__}
    if as_json:
        print_json(told)
    else:
        print(laid_out(told))


def _variants(
    chosen: Sequence[str], model: GPT, idx: Tensor, new: int
) -> tuple[dict[str, Callable[[], Latency]], dict[str, str]]:
    """Find what can be timed here, and say why the rest cannot."""
    variants, missing = {}, {}
    for name in chosen:
        options = BENCH_VARIANTS[name]
        reason = lab35.speed.why_not(options["engine"], model) if "engine" in options else None
        if reason is None:
            variants[name] = partial(_time_text, model, idx, new, options)
        else:
            missing[name] = reason
            note(f"without {name}: {one_line(reason)}")
    return variants, missing


def _rounds(variants: Mapping[str, Callable[[], T]], repeats: int) -> list[dict[str, T]]:
    """Run variants in turns, with a bar on a terminal."""
    from rich.progress import track

    console = error_console()
    rounds = track(
        lab35.timing.interleaved(variants, repeats=repeats),
        "timing",
        total=repeats,
        console=console,
        auto_refresh=False,  # a bar that moves by itself would disturb what is timed
        disable=not console.is_terminal,
    )
    return list(rounds)


def _time_text(model: GPT, idx: Tensor, new: int, options: dict[str, Any]) -> Latency:
    steps = lab35.decode_steps(model, idx, new, temperature=0, **options)
    return lab35.timing.time_steps(steps, clock=lab35.timing.clock_on(idx.device))


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
