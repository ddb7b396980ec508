"""`lab35 verify`, `trace` and `info`: looking inside."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

import lab35
from lab35.cli.models import encode, loaded, ready
from lab35.cli.options import (
    DEFAULTS,
    CheckpointOption,
    DeviceOption,
    EngineOption,
    FileOption,
    JsonOption,
    PromptOption,
    SeedOption,
    Settings,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
)
from lab35.cli.streams import print_json, read_prompt, visible

if TYPE_CHECKING:
    from lab35 import Tokenizer, Trace


def verify(
    prompt: PromptOption = None,
    prompt_file: FileOption = None,
    steps: Annotated[int, typer.Option(help="Tokens to decode.")] = 64,
    engine: EngineOption = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "cpu",
    thread_count: ThreadsOption = 1,
    as_json: JsonOption = False,
) -> int:
    """Hold the cache against the uncached model.

    Decodes greedily, and compares the logits of every step. Exit code 1 if they differ.
    """
    text = read_prompt(prompt, prompt_file)
    with loaded(checkpoint, device, thread_count) as (model, tokenizer):
        idx = encode(model, tokenizer, text, model.config.block_size)
        room = model.config.block_size + 1 - idx.shape[1]
        if not 1 <= steps <= room:
            raise ValueError(
                f"--steps must lie in [1, {room}] after {idx.shape[1]} prompt tokens, got {steps}"
            )
        report = lab35.verify_cache(model, idx, steps, engine=ready(engine, model))
    if as_json:
        print_json(report.as_dict())
    else:
        print(report.summary())
    return int(not report.passed)


def trace(
    prompt: PromptOption = None,
    prompt_file: FileOption = None,
    temperature: TemperatureOption = DEFAULTS.temperature,
    top_k: TopKOption = DEFAULTS.top_k,
    top_p: TopPOption = DEFAULTS.top_p,
    seed: SeedOption = DEFAULTS.seed,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "cpu",
    thread_count: ThreadsOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Tell one decode step.

    The token that was fed, its place, the best scores, what the filters left, and the draw.
    """
    settings = Settings(temperature, top_k, top_p, seed=seed)
    text = read_prompt(prompt, prompt_file)
    with loaded(checkpoint, device, thread_count) as (model, tokenizer):
        idx = encode(model, tokenizer, text, model.config.block_size)
        generator = settings.generator(model)
        told = lab35.trace_step(model, idx, **settings.choice(), generator=generator)
    if as_json:
        print_json(told.as_dict(tokenizer))
    else:
        print(_tell(told, tokenizer, settings))


def _tell(told: Trace, tokenizer: Tokenizer, settings: Settings) -> str:
    """Lay out a trace for people."""

    def name(token: int) -> str:
        data = tokenizer.token_bytes(token)
        return f"{token} {data.decode('utf-8', errors='replace')!r} ({data.hex(' ')})"

    lines = [
        f"fed      {name(told.token)}",
        f"position {told.position}, cache {told.cache_before} -> {told.cache_after}",
        f"kept     {told.vocab_size} -> top-k {settings.top_k}: {told.kept_by_top_k} "
        f"-> top-p {settings.top_p}: {told.kept_by_top_p}",
        "",
        f"{'token':<28} {'logit':>7} {'odds':>7} {f'at {settings.temperature}':>7} {'left':>7}",
    ]
    lines += [
        f"{name(each.token):<28} {each.logit:>7.2f} {each.probability:>7.3f} "
        f"{each.tempered:>7.3f} {each.final:>7.3f}"
        for each in told.candidates
    ]
    return "\n".join([*lines, "", f"drew     {name(told.drawn)}, at {told.drawn_final:.3f}"])


def info(checkpoint: CheckpointOption = None, as_json: JsonOption = False) -> None:
    """Show a checkpoint.

    Its sizes, parameters, bytes and recorded digests, and how it was trained. No weight is
    read: the file's header is held against the sizes. Loading a model checks the digests.
    """
    about = dataclasses.asdict(lab35.checkpoint.read_summary(checkpoint))
    if isinstance(about["record"], dict):  # it is whatever the training script wrote
        about["record"].pop("curve", None)
    if as_json:
        print_json(about)
        return
    for name, value in _flat(about):
        told = f"{value:,}" if type(value) is int else str(value)
        print(f"{visible(name):<34} {visible(told)}")


def _flat(told: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """List the leaves of nested dictionaries by their dotted names; an empty one is a leaf."""
    rows: list[tuple[str, Any]] = []
    for name, value in told.items():
        dotted, inner = f"{prefix}{name}", isinstance(value, dict) and value
        rows += _flat(value, f"{dotted}.") if inner else [(dotted, value)]
    return rows
