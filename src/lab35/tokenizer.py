"""Byte-level BPE: text to token ids and back, without losing a byte.

The merges are learned and applied by the `tokenizers` library. This module adds what the chapters
need to say about a token: the exact bytes that it stands for.

```{.python title="An em dash is three bytes, and here two tokens"}
from lab35 import load_pretrained

_, tokenizer = load_pretrained()
ids = tokenizer.encode("—")
assert [tokenizer.token_bytes(i) for i in ids] == [bytes([0xE2, 0x80]), bytes([0x94])]
```
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lab35._arguments import integer

__all__ = ["END_OF_TEXT", "Tokenizer"]

END_OF_TEXT = "<|endoftext|>"
"""How the token that ends a text is spelled; `Tokenizer.train` gives it the last id."""


def _symbol_to_byte() -> dict[str, int]:
    """Invert byte-level BPE's alphabet, in which every byte is one printable character.

    Printable Latin-1 stands for itself. The rest, in order, takes the characters from U+0100 on
    (Radford et al. 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


SYMBOL_TO_BYTE = _symbol_to_byte()


def _check_layout(layout: dict[str, Any]) -> dict[str, int]:
    """Refuse a tokenizer that could lose or change text, and return its ids by token.

    `tokenizers` files can hold much more than a vocabulary, and nearly all of it can change the
    text: a normalizer rewrites it, other pre-tokenizers drop spaces, a post-processor adds tokens,
    BPE dropout splits at random. So the few parts that keep every byte are listed here, and the
    rest is refused. The layout is checked before the library reads it, because there a
    `continuing_subword_prefix` can end the process.

    Args:
        layout: The contents of a `tokenizer.json`.

    Raises:
        ValueError: If a part is not one of those.
    """

    def require(fits: bool, part: str, rule: str, got: object) -> None:
        if not fits:
            raise ValueError(f"{part} must be {rule}, got {reprlib.repr(got)}")

    def is_byte_level(part: Any) -> bool:
        return isinstance(part, dict) and part.get("type") == "ByteLevel"

    # The parts around the model.
    before, after, model = (layout.get(n) for n in ("pre_tokenizer", "post_processor", "model"))
    require(layout.get("normalizer") is None, "normalizer", "null", layout.get("normalizer"))
    byte_level = is_byte_level(before) and before.get("add_prefix_space") is False
    require(byte_level, "pre_tokenizer", "ByteLevel with add_prefix_space false", before)
    # A byte-level post-processor only shifts offsets, which nobody reads here.
    require(after is None or is_byte_level(after), "post_processor", "null or ByteLevel", after)

    # The model. Its `unk_token` and `byte_fallback` may stay: with all 256 bytes in the vocabulary,
    # nothing is unknown.
    is_bpe = isinstance(model, dict) and model.get("type", "BPE") == "BPE"
    require(is_bpe, "model", "BPE", model)
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        require(not model.get(name), name, "null", model.get(name))
    vocab = model.get("vocab")
    require(isinstance(vocab, dict), "vocab", "an object", vocab)
    lacking = SYMBOL_TO_BYTE.keys() - vocab.keys()
    require(not lacking, "vocab", "one with all 256 bytes", sorted(lacking))

    # Added tokens are looked for in the text before it is split into bytes. Only end-of-text may be
    # one, and as a special token, which `encode` can be told to leave alone.
    ids = dict(vocab)
    for token in layout.get("added_tokens") or []:
        is_end = token["content"] == END_OF_TEXT and token["special"] is True
        require(is_end, "added token", f"{END_OF_TEXT!r} and special", token["content"])
        ids[END_OF_TEXT] = token["id"]
    require(END_OF_TEXT in ids, "vocab", f"one with {END_OF_TEXT!r}", sorted(ids))
    # Two tokens of one id would encode as one and decode as the other.
    found = {i for i in ids.values() if type(i) is int}
    unused = [i for i in range(len(ids)) if i not in found]
    if unused:
        told = f"ids must be 0 to {len(ids) - 1}, each once, got no token for"
        raise ValueError(f"{told} {reprlib.repr(unused)}")
    for token in ids.keys() - {END_OF_TEXT}:
        symbols = bool(token) and {*token} <= SYMBOL_TO_BYTE.keys()
        require(symbols, f"token {ids[token]}", "made of byte symbols", token)
    return ids


class Tokenizer:
    """Encode and decode with a trained byte-level BPE.

    `decode(encode(text)) == text` holds for every text. What would break that is refused, except
    for truncation and padding: they shape batches and say nothing about the text, so they are off.

    Args:
        backend: A `tokenizers.Tokenizer` with a byte-level pre-tokenizer. It is copied.

    Raises:
        ValueError: If the backend has no end-of-text token, or could lose or change text.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        try:
            layout = json.loads(backend.to_str())
        except Exception as error:  # the library raises bare Exception for parts in Python
            raise ValueError(f"backend must be one that can be saved, got {error}") from None
        ids = _check_layout(layout)
        # A copy, so that nobody switches truncation on behind our back.
        backend = tokenizers.Tokenizer.from_str(json.dumps(layout))
        backend.no_truncation()
        backend.no_padding()
        # A prompt is text: "<|endoftext|>" typed by a user is thirteen characters, not a command.
        backend.encode_special_tokens = True
        self._backend = backend
        self.eos_id: int = ids[END_OF_TEXT]
        self._bytes = [b""] * len(ids)
        for token, token_id in ids.items():
            self._bytes[token_id] = bytes(SYMBOL_TO_BYTE.get(symbol, 0) for symbol in token)
        self._bytes[self.eos_id] = END_OF_TEXT.encode()
        if self.eos_id in self.encode(END_OF_TEXT):
            raise ValueError(f"merges must not build {END_OF_TEXT!r}, got some that do")

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Load a `tokenizer.json`.

        Args:
            path: The file that `save` wrote.

        Returns:
            The tokenizer.

        Raises:
            ValueError: If the file cannot be read as a byte-level tokenizer.
        """
        path = Path(path)
        try:
            if path.exists() and not path.is_file():
                raise ValueError("not a file")  # reading a pipe would wait for ever
            return cls.from_bytes(path.read_bytes())
        except (OSError, ValueError, MemoryError) as error:
            told = str(error) or type(error).__name__
            raise ValueError(f"path must be a tokenizer file, got {str(path)!r}: {told}") from None

    @classmethod
    def from_bytes(cls, data: bytes) -> Tokenizer:
        """Load the contents of a `tokenizer.json`.

        Args:
            data: What the file holds.

        Returns:
            The tokenizer.

        Raises:
            ValueError: If the contents are no byte-level tokenizer.
        """
        try:
            layout = json.loads(data)
            _check_layout(layout)
            return cls(tokenizers.Tokenizer.from_str(json.dumps(layout)))
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a tokenizer file ({error!r})") from None
        except ValueError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ValueError(str(error)) from None

    @classmethod
    def train(cls, text: str, merges: int = 255) -> Tokenizer:
        """Learn `merges` merges from a text (Sennrich et al. 2016, on bytes).

        The ids are the 256 bytes, the merges in the order they were learned, and end-of-text last.

        Args:
            text: The training text.
            merges: How many pairs to merge.

        Returns:
            A tokenizer with 256 + merges + 1 entries.

        Raises:
            ValueError: If `merges` is no integer of at least 0, or the text is too short to learn
                that many.
        """
        merges = integer("merges", merges, 0)
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=256 + merges, initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator([text], trainer)
        learned = backend.get_vocab_size() - 256
        if learned != merges:
            raise ValueError(f"merges must be at most {learned} for this text, got {merges}")
        backend.add_special_tokens([END_OF_TEXT])
        return cls(backend)

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as one JSON file.

        Args:
            path: Where to write it.
        """
        Path(path).write_bytes(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Give what `save` writes.

        Returns:
            The contents of a `tokenizer.json`.
        """
        return self._backend.to_str(pretty=True).encode()

    @property
    def vocab_size(self) -> int:
        """Entries in the vocabulary, V."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Turn text into token ids; special tokens in the text are plain text.

        Args:
            text: Any string that UTF-8 can carry.

        Returns:
            The ids; none for the empty string.

        Raises:
            ValueError: If the text holds a lone surrogate, which no UTF-8 text can.
        """
        try:
            return self._backend.encode(text).ids
        except (UnicodeEncodeError, TypeError) as error:
            got = reprlib.repr(text)
            raise ValueError(f"text must be encodable as UTF-8, got {got}: {error}") from None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for; they may end inside a character.

        Args:
            token_id: An id in [0, V).

        Returns:
            At least one byte.

        Raises:
            ValueError: If the id is no integer, or lies outside the vocabulary.
        """
        token_id = integer("token_id", token_id)
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token_id must lie in [0, {self.vocab_size}), got {token_id}")
        return self._bytes[token_id]

    def decode(self, ids: Iterable[int]) -> str:
        """Turn token ids back into text.

        Bytes that are not valid UTF-8 become U+FFFD, as the Unicode standard recommends.
        End-of-text is spelled out: leave it away where it should not show.

        Args:
            ids: Ids in [0, V).

        Returns:
            The text.

        Raises:
            ValueError: If an id is no integer, or lies outside the vocabulary.
        """
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", errors="replace")
