"""`lab35 repl`: one prompt after another."""

from __future__ import annotations

import dataclasses
import sys

import torch

from lab35.cli.models import encode, load
from lab35.cli.options import (
    DEFAULTS,
    CheckpointOption,
    DeviceOption,
    SeedOption,
    Settings,
    TemperatureOption,
    TokensOption,
    TopKOption,
    TopPOption,
)
from lab35.cli.streams import note, one_line, unescape
from lab35.loop import decode_steps
from lab35.model import GPT
from lab35.streaming import generate_stream
from lab35.tokenizer import Tokenizer


def repl(
    max_new_tokens: TokensOption = DEFAULTS.max_new_tokens,
    temperature: TemperatureOption = DEFAULTS.temperature,
    top_k: TopKOption = DEFAULTS.top_k,
    top_p: TopPOption = DEFAULTS.top_p,
    seed: SeedOption = DEFAULTS.seed,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "cpu",
) -> None:
    r"""Continue one prompt after another.

    An empty line goes on with the last text. A line that begins with / changes a setting, as in
    /temperature 0.5 or /top-k none; /settings shows them all. \n in a prompt is a line break.
    Ctrl-C ends a text, and the end of input ends the session.
    """
    settings = Settings(temperature, top_k, top_p, max_new_tokens, seed)
    model, tokenizer = load(checkpoint, device)
    generator, text = settings.generator(model), ""
    note("A prompt, or /help. Ctrl-D ends.")
    while (line := _read_line()) is not None:
        try:
            if line.startswith("/"):
                changed = _change(settings, line)
                if changed.seed != settings.seed or line.split()[0] == "/seed":
                    generator = changed.generator(model)
                settings = changed
                continue
            text = unescape(line) if line else text
            if not text:
                raise ValueError("prompt must hold at least one character, got ''")
            print(text, end="", file=sys.stderr, flush=True)
            text += _write(model, tokenizer, text, settings, generator)
        except ValueError as error:
            note(f"lab35: error: {one_line(error)}")
    print(file=sys.stderr)


def _write(
    model: GPT, tokenizer: Tokenizer, text: str, settings: Settings, generator: torch.Generator
) -> str:
    """Go on with a text of any length, for the repl; Ctrl-C ends it and keeps what is there."""
    steps = decode_steps(
        model,
        encode(model, tokenizer, text),
        settings.max_new_tokens,
        **settings.choice(),
        generator=generator,
        eos_id=tokenizer.eos_id,
        on_context_limit="refill",
    )
    pieces = []
    try:
        for event in generate_stream(tokenizer, steps):
            pieces.append(event.text)
            print(event.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print(flush=True)
    return "".join(pieces)


def _read_line() -> str | None:
    """Read a line; None at the end of input."""
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            return input("> ")
        if sys.stdin.isatty():  # stdout is for completions alone
            print("> ", end="", file=sys.stderr, flush=True)
        return input()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _read_line()


def _change(settings: Settings, line: str) -> Settings:
    """Apply a line such as `/temperature 0.5`; /settings and /help show and change nothing."""
    name, _, value = line[1:].strip().partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    types = {field.name: field.type for field in dataclasses.fields(Settings)}
    if name in ("settings", "help") and not value:
        if name == "help":
            note(f"/{', /'.join(types)} VALUE; /settings; \\n in a prompt is a line break")
        note(", ".join(f"{key} {getattr(settings, key)}" for key in types))
        return settings
    if name not in types:
        raise ValueError(f"setting must be one of {', '.join(types)}, got {name!r}")
    try:
        optional = "None" in types[name]
        number = float if "float" in types[name] else int
        parsed = None if optional and value.lower() == "none" else number(value)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    return dataclasses.replace(settings, **{name: parsed})
