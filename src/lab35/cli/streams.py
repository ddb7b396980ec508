"""Words in, words out: the process's streams, prompts, JSON, and what is said on standard error."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from lab35.cli.options import DEFAULT_PROMPT

MAX_BYTES = 1 << 20
"""The longest prompt, and the longest line of a session; the book of the course is half of it."""

MAX_MESSAGE = 1000  # characters; a prompt quoted in an error may be a hundred times as long


@contextmanager
def usable_streams() -> Iterator[None]:
    """Give a command three streams that are there, and that take every character.

    A stream that was closed before the program began is None in Python: it becomes an empty one.
    What the encoding of an output cannot hold is replaced. Afterwards all is as it was.
    """
    names = ("stdin", "stdout", "stderr")
    before = {name: getattr(sys, name) for name in names}
    with ExitStack() as stack:
        for name, stream in before.items():
            if stream is None or stream.closed:
                # In this order each takes the lowest free descriptor, which is its own: a file
                # that is opened later is not mistaken for the stream.
                mode = "r" if name == "stdin" else "w"
                empty = stack.enter_context(Path(os.devnull).open(mode, encoding="utf-8"))
                setattr(sys, name, empty)
            elif name != "stdin" and isinstance(stream, io.TextIOWrapper):
                stack.callback(_reconfigure, stream, stream.errors)
                _reconfigure(stream, "replace" if name == "stdout" else "backslashreplace")
        try:
            yield
        finally:
            for name, stream in before.items():
                setattr(sys, name, stream)


def _reconfigure(stream: io.TextIOWrapper, errors: str) -> None:
    with suppress(OSError, ValueError):  # it flushes first, and may be full or closed by now
        stream.reconfigure(errors=errors)


def quiet_outputs() -> None:
    """Lead nowhere what an output still holds and cannot write.

    Without that, Python would try again at its end, and complain.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
                stream.flush()


# --- what goes in --------------------------------------------------------------------------------


def standard_input() -> BinaryIO:
    """Return standard input as bytes, whatever its encoding is said to be."""
    buffer = getattr(sys.stdin, "buffer", None)
    return buffer or io.BytesIO(sys.stdin.read().encode("utf-8", errors="surrogateescape"))


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """Take the prompt from where it is; a file's last line break is not part of it."""
    if prompt_file is None:
        text = DEFAULT_PROMPT if prompt is None else from_argument("--prompt", prompt)
        return check_prompt(text)
    if prompt is not None:
        raise ValueError(f"--prompt-file must stand without --prompt, got {prompt!r} too")
    try:
        if prompt_file == "-":
            data = standard_input().read(MAX_BYTES + 1)
        else:
            with Path(prompt_file).open("rb") as file:  # it may be a pipe, or have no end
                data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a ValueError is a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"--prompt-file must be a file that can be read, got {prompt_file!r}: {reason}"
        ) from None
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"--prompt-file must hold at most {MAX_BYTES:,} bytes, got more from {prompt_file!r}"
        )
    try:
        return check_prompt(data.decode("utf-8").removesuffix("\n").removesuffix("\r"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--prompt-file must be UTF-8 text, got {prompt_file!r}: {error}"
        ) from None


def check_prompt(text: str) -> str:
    """Refuse a prompt without a character: there is nothing to continue."""
    if not text:
        raise ValueError("prompt must hold at least one character, got ''")
    return text


def from_argument(option: str, text: str) -> str:
    """Return what was typed: under some locales Python cannot read an argument that is UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # surrogates stand for bytes that the locale has no letters for
        try:
            return os.fsencode(text).decode("utf-8")
        except UnicodeError:
            raise ValueError(f"{option} must be UTF-8 text, got {text!r}") from None
    return text


def unescape(text: str) -> str:
    r"""Turn \n, \t and \\ into what they stand for; leave any other backslash alone."""
    meant = {"n": "\n", "t": "\t", "\\": "\\"}
    return re.sub(r"\\([nt\\])", lambda match: meant[match[1]], text)


# --- what comes out ------------------------------------------------------------------------------


def print_json(told: dict[str, Any]) -> None:
    """Print one JSON object: no NaN, which JSON has not, and no letter that the output has not."""
    text = json.dumps(_finite(told), ensure_ascii=False, allow_nan=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(_finite(told), allow_nan=False)
    print(text)


def _finite(value: Any) -> Any:
    """Replace the numbers that JSON does not know by null."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def note(text: str) -> None:
    """Say something on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def echoed(prompt: str) -> Iterator[None]:
    """Show a prompt before its text; if that cannot be written, end the line before the error."""
    print(prompt, end="", file=sys.stderr, flush=True)
    try:
        yield
    except OSError:
        note("")
        raise


def warn(message: object, *_: object) -> None:
    """Show a warning on one line, in the place of `warnings.showwarning`."""
    with suppress(OSError):  # raised here, it would end whatever warned
        note(f"lab35: warning: {one_line(message)}")


def one_line(message: object) -> str:
    """Join the lines of a message, spell out what cannot be seen, and cut what is too long."""
    joined = " ".join(str(message).split())
    if len(joined) > MAX_MESSAGE:
        joined = f"{joined[:MAX_MESSAGE]} …"
    return visible(joined)


def visible(text: str) -> str:
    """Spell out control characters, which could move a terminal's cursor or change its colours."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
