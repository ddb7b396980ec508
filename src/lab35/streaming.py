"""Streaming: text that appears while it is written, and ends before a stop string.

A token is a run of bytes and may end inside a character. What is shown cannot be taken back. So
two things wait: the bytes of a character that is not whole yet, and text that may turn out to be
the beginning of a stop string.

```{.python title="A dash comes in two tokens and appears once"}
from lab35 import load_pretrained
from lab35.streaming import stream_decode

_, tokenizer = load_pretrained()
ids = tokenizer.encode("no—yes")
assert list(stream_decode(tokenizer, ids)) == ["n", "o", "—", "y", "es"]
```
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lab35.loop import Step, StopReason
    from lab35.tokenizer import Tokenizer

__all__ = ["Event", "generate_stream", "split_at_stop", "stream_decode"]


@dataclass(frozen=True)
class Event:
    """What one token adds to the text, or how the text ended.

    Attributes:
        text: What can be shown now. Empty when everything that the token brought has to wait.
        token_id: The token; None in the last event.
        stop_reason: None but for the last event, which says why the text ended: as `Generation`
            does, or `"stop"` for a stop string.
    """

    text: str
    token_id: int | None
    stop_reason: StopReason | Literal["stop"] | None


def stream_decode(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Decode ids one by one; a character appears with the token that completes it.

    The pieces join to `tokenizer.decode(ids)`, whatever the ids: bytes that are not UTF-8 become
    the same U+FFFD. Only the beginning of a character waits, at most three bytes. An id outside the
    vocabulary raises the tokenizer's `ValueError` when its turn comes.

    Args:
        tokenizer: What gives the bytes of an id.
        ids: Ids in [0, V), from a list or as they come.

    Yields:
        Pieces of at least one character.
    """
    decoder = _decoder()
    for token_id in ids:
        if piece := decoder.decode(tokenizer.token_bytes(token_id)):
            yield piece
    if rest := decoder.decode(b"", final=True):
        yield rest


def generate_stream(
    tokenizer: Tokenizer, steps: Iterable[Step], *, stop: Sequence[str] = ()
) -> Iterator[Event]:
    """Turn the steps of a decode loop into text that can be shown at once.

    Every step gives one event, and one more says how the text ended. The texts of the events join
    to the decoded tokens, up to where the first stop string begins. The end-of-text token is never
    spelled out, nor is any other token that the loop took for its end.

    A stop string ends the loop: the steps are closed, and no other token is asked for. The same
    happens when the caller closes the events.

    Args:
        tokenizer: What gives the bytes of an id.
        steps: What `decode_steps` yields, for one row: tokens of shape (1, 1).
        stop: Strings that end the text and are not shown. They are looked for in the new text only,
            and may be spread over any number of tokens.

    Returns:
        An iterator over the events: at least one, and only the last has a stop reason.

    Raises:
        ValueError: If `stop` is a lone string or holds an empty one; at the first step, if there
            is more than one row; at any step, if its token lies outside the vocabulary.
    """
    return _events(tokenizer, steps, _checked(stop))


def _events(tokenizer: Tokenizer, steps: Iterable[Step], stop: tuple[str, ...]) -> Iterator[Event]:
    decoder = _decoder()
    held, match, reason = "", None, None
    try:
        for step in steps:
            if step.token.shape != (1, 1):
                shape = tuple(step.token.shape)
                raise ValueError(f"steps must be those of one row, got a token of shape {shape}")
            token_id, reason = int(step.token), step.stop_reason
            silent = token_id == tokenizer.eos_id or reason == "eos"
            piece = "" if silent else decoder.decode(tokenizer.token_bytes(token_id))
            shown, held, match = split_at_stop(held + piece, stop)
            yield Event(shown, token_id, None)
            if match is not None:
                break
    finally:
        # A loop that is left half-way still holds its cache.
        if hasattr(steps, "close"):
            steps.close()
    tail = ""
    if match is None:
        rest = held + decoder.decode(b"", final=True)
        tail, _, match = split_at_stop(rest, stop, final=True)
    yield Event(tail, None, "stop" if match is not None else reason or "max_new_tokens")


def split_at_stop(
    text: str, stop: Sequence[str], *, final: bool = False
) -> tuple[str, str, str | None]:
    """Split text into what can be shown, and what waits because a stop string may come of it.

    The match that begins first wins, and of those that begin there the shortest: it ends the text
    soonest. A match that is complete has to wait for one that began earlier and is not.

    Args:
        text: What waited before, and what is new.
        stop: Strings of at least one character.
        final: Whether the text ends here, so that nothing can come of a beginning.

    Returns:
        What can be shown.
        What waits: a proper prefix of a stop string, and no longer than it has to be.
        The stop string that ends the text, or None. When there is one, nothing waits any more.

    Raises:
        ValueError: If `stop` is a lone string or holds an empty one.
    """
    end, strings = len(text), _checked(stop)
    matches = [(text.index(string), len(string), string) for string in strings if string in text]
    begin, _, match = min(matches, default=(end, 0, None))
    waits = end if final else _first_beginning(text, strings)
    if match is not None and begin <= waits:
        return text[:begin], "", match
    return text[:waits], text[waits:], None


def _first_beginning(text: str, stop: tuple[str, ...]) -> int:
    """Find the first index from which the rest of the text begins a longer stop string."""
    longest = max(map(len, stop), default=1)
    starts = range(max(0, len(text) - longest + 1), len(text))
    waiting = (i for i in starts if any(string.startswith(text[i:]) for string in stop))
    return next(waiting, len(text))


def _checked(stop: Sequence[str]) -> tuple[str, ...]:
    strings = tuple(stop) if isinstance(stop, Iterable) else (None,)
    if isinstance(stop, str) or not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"stop must be a sequence of non-empty strings, got {stop!r}")
    return strings


def _decoder() -> codecs.IncrementalDecoder:
    """Make a decoder that keeps the bytes of an incomplete character until it is whole."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace")
