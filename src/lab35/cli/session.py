"""`lab35 repl`: one prompt after another."""

from __future__ import annotations

import codecs
import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import lab35
from lab35.cli.models import encode, loaded
from lab35.cli.options import (
    DEFAULTS,
    CheckpointOption,
    DeviceOption,
    SeedOption,
    Settings,
    TemperatureOption,
    ThreadsOption,
    TokensOption,
    TopKOption,
    TopPOption,
)
from lab35.cli.streams import MAX_BYTES, echoed, note, one_line, standard_input, unescape

if TYPE_CHECKING:
    import torch

    from lab35 import GPT, Tokenizer

MAX_PIECES = 64  # of a line that is too long, before it is taken for one without an end


def repl(
    max_new_tokens: TokensOption = DEFAULTS.max_new_tokens,
    temperature: TemperatureOption = DEFAULTS.temperature,
    top_k: TopKOption = DEFAULTS.top_k,
    top_p: TopPOption = DEFAULTS.top_p,
    seed: SeedOption = DEFAULTS.seed,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "cpu",
    thread_count: ThreadsOption = 1,
) -> None:
    r"""Continue one prompt after another.

    An empty line goes on with the last text. A line that begins with / changes a setting, as in
    /temperature 0.5 or /top-k none; /settings shows them all. \n in a prompt is a line break.
    Ctrl-C ends a text, and the end of input ends the session.
    """
    settings = Settings(temperature, top_k, top_p, max_new_tokens, seed)
    with loaded(checkpoint, device, thread_count) as (model, tokenizer):
        _converse(model, tokenizer, settings)
    print(file=sys.stderr)


def _converse(model: GPT, tokenizer: Tokenizer, settings: Settings) -> None:
    """Take one line after another, until there are no more."""
    generator, text = settings.generator(model), None
    lines, number = standard_input(), 0
    note("A prompt, or /help. Ctrl-D ends.")
    while data := _read_line(lines):
        number += 1
        try:
            line = _decoded(data, number)
            if line.startswith("/"):
                name, value = _setting(line)
                settings = _change(settings, name, value)
                if name == "seed":
                    generator = settings.generator(model)
                continue
            if line:  # what fails here leaves the last text as it was
                text = _Text.begin(model, tokenizer, unescape(line))
            elif text is None:
                raise ValueError("prompt must hold at least one character, got ''")
            with echoed(text.shown):
                _write(model, tokenizer, text, settings, generator)
        except ValueError as error:
            note(f"lab35: error: {one_line(error)}")


# --- a text --------------------------------------------------------------------------------------


@dataclass
class _Text:
    """A text that grows by turns: exact in its ids, and shown as far as its characters are whole.

    A turn may end inside a character. Its bytes wait in the decoder, and the character appears in
    the next turn; from the shown text the ids could not be had back.
    """

    ids: list[int]
    shown: str
    decoder: codecs.IncrementalDecoder

    @classmethod
    def begin(cls, model: GPT, tokenizer: Tokenizer, prompt: str) -> _Text:
        """Begin with a prompt."""
        ids = encode(model, tokenizer, prompt)[0].tolist()
        return cls(ids, prompt, codecs.getincrementaldecoder("utf-8")(errors="replace"))

    def add(self, tokenizer: Tokenizer, token_id: int) -> str:
        """Append a token, and return what can be shown now."""
        self.ids.append(token_id)
        piece = self.decoder.decode(tokenizer.token_bytes(token_id))
        self.shown += piece
        return piece


def _write(
    model: GPT, tokenizer: Tokenizer, text: _Text, settings: Settings, generator: torch.Generator
) -> None:
    """Go on with a text of any length; Ctrl-C ends it and keeps what is there."""
    import torch

    steps = lab35.decode_steps(
        model,
        torch.tensor([text.ids], device=model.wte.weight.device),
        settings.max_new_tokens,
        **settings.choice(),
        generator=generator,
        eos_id=tokenizer.eos_id,
        on_context_limit="refill",
    )
    try:
        for step in steps:
            if step.stop_reason != "eos":  # the end of a text is no part of what goes on
                print(text.add(tokenizer, int(step.token)), end="", flush=True)
    except KeyboardInterrupt:
        pass
    print(flush=True)


# --- a line --------------------------------------------------------------------------------------


def _read_line(lines: BinaryIO) -> bytes:
    """Read a line with its end; nothing at the end of input."""
    at_terminal = sys.stdin.isatty()
    while True:
        try:
            if at_terminal and sys.stdout.isatty():
                return _edited_line()
            if at_terminal:  # stdout is for completions alone
                print("> ", end="", file=sys.stderr, flush=True)
            return _whole_line(lines)
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"standard input must be readable: {reason}") from None
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            print(file=sys.stderr)


def _whole_line(lines: BinaryIO) -> bytes:
    """Read a line; of one that is too long, keep the beginning and skip the rest."""
    data = piece = lines.readline(MAX_BYTES + 1)
    pieces = 1
    while len(piece) > MAX_BYTES and not piece.endswith(b"\n"):
        if pieces == MAX_PIECES:
            raise ValueError(
                f"a line must hold at most {MAX_BYTES:,} bytes, got one that does not end"
            )
        piece = lines.readline(MAX_BYTES + 1)
        pieces += 1
    return data


def _edited_line() -> bytes:
    """Read a line that can be edited as it is typed."""
    try:
        line = input("> ")
    except EOFError:
        return b""
    except UnicodeDecodeError as error:
        return error.object
    return line.encode("utf-8", errors="surrogateescape") + b"\n"


def _decoded(data: bytes, number: int) -> str:
    """Turn a line into text, without its end."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"line {number} must hold at most {MAX_BYTES:,} bytes, got more")
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"line {number} must be UTF-8 text: {error}") from None


# --- a setting -----------------------------------------------------------------------------------


def _setting(line: str) -> tuple[str, str]:
    """Take a line such as `/top-k 5` apart, into the name of a setting and its value."""
    name, _, value = line[1:].strip().partition(" ")
    return name.replace("-", "_"), value.strip()


def _change(settings: Settings, name: str, value: str) -> Settings:
    """Apply a setting; /settings and /help show and change nothing."""
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
