"""`lab35 verify`, `trace` and `info`: looking inside."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from lab35.checkpoint import load_pretrained, read_digests, read_record
from lab35.cli.models import encode, load, ready
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
    TopKOption,
    TopPOption,
)
from lab35.cli.streams import print_json, read_prompt, visible
from lab35.tokenizer import Tokenizer
from lab35.trace import Trace, trace_step
from lab35.verification import verify_cache


def verify(
    prompt: PromptOption = None,
    prompt_file: FileOption = None,
    steps: Annotated[int, typer.Option(help="Tokens to decode.")] = 64,
    engine: EngineOption = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> int:
    """Hold the cache against the uncached model.

    Decodes greedily, and compares the logits of every step. Exit code 1 if they differ.
    """
    text = read_prompt(prompt, prompt_file)
    model, tokenizer = load(checkpoint, device)
    idx = encode(model, tokenizer, text, model.config.block_size)
    room = model.config.block_size + 1 - idx.shape[1]
    if not 1 <= steps <= room:
        raise ValueError(
            f"--steps must lie in [1, {room}] after {idx.shape[1]} prompt tokens, got {steps}"
        )
    report = verify_cache(model, idx, steps, engine=ready(engine, model))
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
    as_json: JsonOption = False,
) -> None:
    """Tell one decode step.

    The token that was fed, its place, the best scores, what the filters left, and the draw.
    """
    settings = Settings(temperature, top_k, top_p, seed=seed)
    text = read_prompt(prompt, prompt_file)
    model, tokenizer = load(checkpoint, device)
    idx = encode(model, tokenizer, text, model.config.block_size)
    told = trace_step(model, idx, **settings.choice(), generator=settings.generator(model))
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

    Its sizes, parameters, bytes and digests, and how it was trained.
    """
    model, tokenizer = load_pretrained(checkpoint)
    record = read_record(checkpoint)
    if isinstance(record, dict):  # it is whatever the training script wrote
        record.pop("curve", None)
    about = {
        "config": dataclasses.asdict(model.config),
        "parameters": model.num_parameters,
        "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "sha256": read_digests(checkpoint),
        "record": record,
    }
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
