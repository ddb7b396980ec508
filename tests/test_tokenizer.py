"""The tokenizer: nothing is lost, and every token's bytes are known."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lab35 import Tokenizer
from lab35.checkpoint import ASSETS, TOKENIZER_FILE

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Holmes", 2),
        ("Sherlock Holmes", 5),
        ("It was a dark night and", 10),
        ("My dear Watson, said he, I", 13),
    ],
)
def test_prompts_of_the_course(tokenizer: Tokenizer, text: str, count: int) -> None:
    """The chapters count on these lengths."""
    assert len(tokenizer.encode(text)) == count


def test_vocabulary(tokenizer: Tokenizer) -> None:
    """256 bytes, 255 merges, and end-of-text last."""
    assert tokenizer.vocab_size == 512
    assert tokenizer.eos_id == 511
    assert tokenizer.token_bytes(511) == b"<|endoftext|>"
    singles = sorted(tokenizer.token_bytes(i) for i in range(256))
    assert singles == [bytes([byte]) for byte in range(256)]


@given(text=TEXT)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """Decoding what was encoded gives every character back, and the bytes agree."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@given(ids=st.lists(st.integers(0, 510), max_size=20))
def test_decoding_is_the_library_s(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Any ids, valid UTF-8 or not, decode to what the `tokenizers` library makes of them."""
    assert tokenizer.decode(ids) == shipped().decode(ids)


def test_a_character_may_be_cut(tokenizer: Tokenizer) -> None:
    """The em dash is three bytes and here two tokens: neither alone is text."""
    ids = tokenizer.encode("—")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xe2\x80", b"\x94"]
    assert [tokenizer.decode([i]) for i in ids] == ["\ufffd", "\ufffd"]
    assert tokenizer.decode(ids) == "—"


def test_special_tokens_in_a_prompt_are_text(tokenizer: Tokenizer) -> None:
    """A user who types the end-of-text token must not end the text."""
    ids = tokenizer.encode("<|endoftext|>")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "<|endoftext|>"


def test_the_empty_string_has_no_tokens(tokenizer: Tokenizer) -> None:
    """Nothing in, nothing out, in both directions."""
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""


def test_training_learns_the_asked_merges_in_order(tmp_path: Path) -> None:
    """Ids are bytes, merges, end-of-text; a saved tokenizer comes back the same."""
    text = "the cat and the hat and the bat"
    trained = Tokenizer.train(text, merges=3)
    assert trained.vocab_size == 260
    assert trained.eos_id == 259
    assert all(len(trained.token_bytes(i)) > 1 for i in (256, 257, 258))
    trained.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert loaded.encode(text) == trained.encode(text)
    assert Tokenizer.train(text, merges=3).encode(text) == trained.encode(text)


@pytest.mark.parametrize("token_id", [-1, 512])
def test_ids_outside_the_vocabulary_are_named(tokenizer: Tokenizer, token_id: int) -> None:
    """Python's own negative indexing would quietly return another token."""
    with pytest.raises(ValueError, match=rf"token_id must lie in \[0, 512\), got {token_id}"):
        tokenizer.token_bytes(token_id)
    with pytest.raises(ValueError, match="token_id must lie"):
        tokenizer.decode([token_id])


@pytest.mark.parametrize("token_id", [1.7, 1.0, True, "1", None])
def test_an_id_is_an_integer(tokenizer: Tokenizer, token_id: object) -> None:
    """An id of 1.7 used to decode as 1."""
    with pytest.raises(ValueError, match="token_id must be an integer, got"):
        tokenizer.decode([token_id])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="token_id must be an integer, got"):
        tokenizer.token_bytes(token_id)  # type: ignore[arg-type]


@pytest.mark.parametrize("of", [torch.tensor, np.array])
def test_ids_may_be_a_tensor_or_an_array(tokenizer: Tokenizer, of: Callable[..., Any]) -> None:
    """What a model returns can be decoded as it is."""
    assert tokenizer.decode(of(tokenizer.encode("Holmes"))) == "Holmes"


def test_other_bad_input_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A lone surrogate, impossible merges, and files that are no tokenizer."""
    with pytest.raises(ValueError, match="text must be encodable as UTF-8"):
        tokenizer.encode("\ud800")
    with pytest.raises(ValueError, match="merges must be at least 0, got -1"):
        Tokenizer.train("abc", merges=-1)
    with pytest.raises(ValueError, match="merges must be at most 2 for this text, got 9"):
        Tokenizer.train("abc", merges=9)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"path must be a tokenizer file, got .*broken\.json"):
        Tokenizer.from_file(tmp_path / "broken.json")
    with pytest.raises(ValueError, match=r"path must be a tokenizer file, got .*missing\.json"):
        Tokenizer.from_file(tmp_path / "missing.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match=r"path must be a tokenizer file, got .*folder\.json"):
        Tokenizer.from_file(tmp_path / "folder.json")
    os.mkfifo(tmp_path / "pipe.json")  # reading it would wait for ever
    with pytest.raises(ValueError, match=r"path must be a tokenizer file, got .*: not a file"):
        Tokenizer.from_file(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match=r"text must be encodable as UTF-8, got .{,200}$"):
        tokenizer.encode("\ud800" * 1_000_000)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"né": 0}, unk_token="né"))
    with pytest.raises(ValueError, match="pre_tokenizer must be ByteLevel"):
        Tokenizer(words)
    words.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(object())
    with pytest.raises(ValueError, match="backend must be one that can be saved"):
        Tokenizer(words)


def test_a_file_beyond_the_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file can claim terabytes; that is no traceback."""

    def refuse(path: Path) -> bytes:
        raise MemoryError

    (tmp_path / "huge.json").touch()
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"path must be a tokenizer file, got .*: MemoryError"):
        Tokenizer.from_file(tmp_path / "huge.json")


def shipped() -> tokenizers.Tokenizer:
    """Load the course's tokenizer as the library does."""
    return tokenizers.Tokenizer.from_file(str(ASSETS / TOKENIZER_FILE))


@given(text=TEXT)
def test_truncation_and_padding_are_off(text: str) -> None:
    """A file that was saved with both, for batches, loses no text and adds none."""
    backend = shipped()
    backend.enable_truncation(4)
    backend.enable_padding(length=16, pad_id=0, pad_token="!")
    tokenizer = Tokenizer.from_bytes(backend.to_str().encode())
    assert text == tokenizer.decode(tokenizer.encode(text))
    assert Tokenizer(backend).encode(text) == tokenizer.encode(text)
    assert backend.truncation is not None, "the caller's own is left alone"


def edited(**parts: object) -> bytes:
    """Give the course's tokenizer file with parts replaced; `model` is merged into the model."""
    layout = json.loads(shipped().to_str())
    layout["model"] |= parts.pop("model", {})
    return json.dumps(layout | parts).encode()


BYTE_LEVEL = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
}  # fmt: skip
END = {
    "id": 511, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
    "normalized": False, "special": True,
}  # fmt: skip

SYMBOLS = {token: i for token, i in shipped().get_vocab().items() if i < 511}

# What is wrong, how the message begins, and the parts of the file that make it so.
CHANGES_TEXT = {
    "lower case": ("normalizer", {"normalizer": {"type": "Lowercase"}}),
    "composed": ("normalizer", {"normalizer": {"type": "NFC"}}),
    "a space before": (
        "pre_tokenizer", {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}},
    ),
    "no pre-tokenizer": ("pre_tokenizer", {"pre_tokenizer": None}),
    "words": ("pre_tokenizer", {"pre_tokenizer": {"type": "Whitespace"}}),
    "a sequence": (
        "pre_tokenizer",
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}]}},
    ),
    "tokens added around": (
        "post_processor",
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": END["content"], "type_id": 0}}],
                "pair": [],
                "special_tokens": {
                    END["content"]: {"id": END["content"], "ids": [511], "tokens": [END["content"]]}
                },
            }
        },
    ),
    "dropout": ("dropout", {"model": {"dropout": 0.5}}),
    "a prefix": ("continuing_subword_prefix", {"model": {"continuing_subword_prefix": "##"}}),
    "a suffix": ("end_of_word_suffix", {"model": {"end_of_word_suffix": "</w>"}}),
    "another model": ("model", {"model": {"type": "WordPiece"}}),
    "another added token": (
        "added token", {"added_tokens": [END, END | {"id": 512, "content": "<pad>"}]},
    ),
    "end-of-text as text": ("added token", {"added_tokens": [END | {"special": False}]}),
    "no end-of-text": ("vocab must be one with '<", {"added_tokens": []}),
    "a hole": ("ids", {"added_tokens": [END | {"id": 600}]}),
    "one id twice": ("ids", {"model": {"vocab": SYMBOLS | {'"': 0}}}),
    "a byte without a token": (
        "vocab must be one with all 256 bytes",
        {"model": {"vocab": {t: i for t, i in SYMBOLS.items() if t != "A"}, "merges": []}},
    ),
    "a token of no bytes": (
        "token 511",
        {
            "model": {"vocab": SYMBOLS | {"—": 511}},
            "added_tokens": [END | {"id": 512}],
        },
    ),
    "end-of-text built from text": (
        "merges",
        {
            "model": {"vocab": SYMBOLS | {END["content"]: 511}, "ignore_merges": True},
            "pre_tokenizer": BYTE_LEVEL | {"use_regex": False},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES_TEXT)
def test_a_file_that_would_change_text_is_refused(change: str) -> None:
    """What rewrites, drops or adds text is named in one line, and is not run."""
    part, changed = CHANGES_TEXT[change]
    with pytest.raises(ValueError, match=rf"^{re.escape(part)}[^\n]{{1,300}}$"):
        Tokenizer.from_bytes(edited(**changed))


HARMLESS = {
    "offsets": {"post_processor": BYTE_LEVEL | {"trim_offsets": False}},
    "no decoder": {"decoder": None},
    "an unknown token": {"model": {"unk_token": "!", "fuse_unk": True, "byte_fallback": True}},
    "spaces eaten around end-of-text": {
        "added_tokens": [END | {"lstrip": True, "rstrip": True, "single_word": True}]
    },
    "end-of-text in the middle": {
        "model": {
            "vocab": {t: i + (i >= 300) for t, i in SYMBOLS.items()} | {END["content"]: 300}
        },
        "added_tokens": [END | {"id": 300}],
    },
    "no words": {"pre_tokenizer": BYTE_LEVEL | {"use_regex": False}},
    "truncation that the library cannot run": {
        "truncation": {
            "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 9,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", HARMLESS)
@settings(max_examples=25)
@given(text=TEXT)
@example(text=" a <|endoftext|> b ")
def test_a_harmless_file_keeps_every_text(kind: str, text: str) -> None:
    """Parts that cannot change the text may stay, and end-of-text stays out of a prompt."""
    tokenizer = Tokenizer.from_bytes(edited(**HARMLESS[kind]))
    ids = tokenizer.encode(text)
    assert text == tokenizer.decode(ids)
    assert tokenizer.eos_id not in ids


@pytest.mark.parametrize("data", [b"", b"[]", b"3", b"null", b"\xff", b"[" * 100_000, b"{}"])
def test_contents_that_are_no_tokenizer(data: bytes) -> None:
    """Foreign contents are a ValueError, whatever they do to a parser."""
    with pytest.raises(ValueError):  # noqa: PT011
        Tokenizer.from_bytes(data)
