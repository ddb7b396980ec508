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

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

__all__ = ["END_OF_TEXT", "Tokenizer"]

END_OF_TEXT = "<|endoftext|>"
"""How the token that ends a text is spelled; it has the last id."""


def _symbol_to_byte() -> dict[str, int]:
    """Invert byte-level BPE's alphabet, in which every byte is one printable character.

    Printable Latin-1 stands for itself. The rest, in order, takes the characters from U+0100 on
    (Radford et al. 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


class Tokenizer:
    """Encode and decode with a trained byte-level BPE.

    Args:
        backend: A `tokenizers.Tokenizer` with a byte-level pre-tokenizer and decoder.

    Raises:
        ValueError: If the backend has no end-of-text token, or a token is not made of byte symbols.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # A prompt is text: "<|endoftext|>" typed by a user is thirteen characters, not a command.
        backend.encode_special_tokens = True
        self._backend = backend
        eos_id = backend.token_to_id(END_OF_TEXT)
        if eos_id is None:
            raise ValueError(f"backend must hold the token {END_OF_TEXT!r}, got none")
        self.eos_id: int = eos_id
        symbols = _symbol_to_byte()
        self._bytes: list[bytes] = []
        for token_id in range(backend.get_vocab_size()):
            token = backend.id_to_token(token_id)
            if token_id == eos_id:
                self._bytes.append(END_OF_TEXT.encode())
            elif token is None or not set(token) <= symbols.keys():
                raise ValueError(f"backend must be byte-level, got token {token_id} = {token!r}")
            else:
                self._bytes.append(bytes(symbols[symbol] for symbol in token))

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
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"path must be a tokenizer file, got {str(path)!r}: {error}") from None
        return cls(backend)

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
            ValueError: If `merges` is negative, or the text is too short to learn that many.
        """
        if merges < 0:
            raise ValueError(f"merges must be at least 0, got {merges}")
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
        self._backend.save(str(path))

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
            raise ValueError(f"text must be encodable as UTF-8, got {text!r}: {error}") from None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for; they may end inside a character.

        Args:
            token_id: An id in [0, V).

        Returns:
            At least one byte.

        Raises:
            ValueError: If the id lies outside the vocabulary.
        """
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
            ValueError: If an id lies outside the vocabulary.
        """
        return b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", errors="replace")
