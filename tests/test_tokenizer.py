"""The tokenizer: nothing is lost, and every token's bytes are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
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
    library = tokenizers.Tokenizer.from_file(str(ASSETS / TOKENIZER_FILE))
    assert tokenizer.decode(ids) == library.decode(ids)


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
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"né": 0}, unk_token="né"))
    with pytest.raises(ValueError, match="backend must hold the token"):
        Tokenizer(words)
    words.add_special_tokens(["<|endoftext|>", "a b"])
    with pytest.raises(ValueError, match="backend must be byte-level, got token 2 = 'a b'"):
        Tokenizer(words)
