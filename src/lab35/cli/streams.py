"""Words in, words out: prompts, and what is said on standard error."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from lab35.cli.options import DEFAULT_PROMPT


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """Take the prompt from where it is; a file's last line break is not part of it."""
    if prompt_file is None:
        return DEFAULT_PROMPT if prompt is None else prompt
    if prompt is not None:
        raise ValueError(f"--prompt-file must stand without --prompt, got {prompt!r} too")
    try:
        data = sys.stdin.buffer.read() if prompt_file == "-" else Path(prompt_file).read_bytes()
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt-file must be UTF-8 text, got {prompt_file!r}: {error}") from None


def unescape(text: str) -> str:
    r"""Turn \n, \t and \\ into what they stand for; leave any other backslash alone."""
    meant = {"n": "\n", "t": "\t", "\\": "\\"}
    return re.sub(r"\\([nt\\])", lambda match: meant[match[1]], text)


def note(text: str) -> None:
    """Say something on standard error."""
    print(text, file=sys.stderr, flush=True)


def warn(message: object, *_: object) -> None:
    """Show a warning on one line, in the place of `warnings.showwarning`."""
    note(f"lab35: warning: {one_line(message)}")


def one_line(message: object) -> str:
    """Join the lines of a message."""
    return " ".join(str(message).split())
