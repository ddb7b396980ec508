"""Other people's engines that the course measures: each continues a text as lab35 does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from lab35 import GPT, Tokenizer, generate
from lab35_course.peers import to_ctranslate2

Write = Callable[[Sequence[Sequence[int]], int], list[list[int]]]


@pytest.fixture(scope="module")
def write(model: GPT) -> Write:
    """The trained model in CTranslate2."""
    return to_ctranslate2(model)


def alone(model: GPT, row: list[int], new_tokens: int) -> list[int]:
    """Continue one row greedily, and run all of it again for each token."""
    made = generate(model, torch.tensor([row]), new_tokens, temperature=0, use_cache=False)
    return made.new_tokens[0].tolist()


def test_ctranslate2_writes_the_same_text(model: GPT, passage: list[int], write: Write) -> None:
    """Its row in the tables would prove nothing, had it done other work."""
    assert [alone(model, passage[:16], 100)] == write([passage[:16]], 100)
    assert [alone(model, passage[:128], 1)] == write([passage[:128]], 1)


def test_ctranslate2_writes_the_same_rows_of_different_lengths(
    model: GPT, passage: list[int], write: Write
) -> None:
    """It pads by its own rules: a row gets as many new tokens as asked for, and its own ones."""
    rows = [passage[:16], passage[40:43], passage[60:61], passage[70:90]]
    assert [alone(model, row, 50) for row in rows] == write(rows, 50)


def test_ctranslate2_goes_on_after_end_of_text(
    model: GPT, tokenizer: Tokenizer, passage: list[int], write: Write
) -> None:
    """No token ends a row early, nor is one kept from being chosen."""
    end = tokenizer.eos_id
    rows = [[end], [end, *passage[:5], end], passage[:4]]
    assert [alone(model, row, 30) for row in rows] == write(rows, 30)


def test_ctranslate2_may_choose_end_of_text(tiny_model: GPT) -> None:
    """The last id is the greedy token here, and is written as often as it is chosen."""
    likes_the_last = GPT(tiny_model.config).eval()
    likes_the_last.load_state_dict(tiny_model.state_dict())
    with torch.no_grad():  # ln_f then returns the last token's row, whatever the text
        likes_the_last.ln_f.weight.zero_()
        likes_the_last.ln_f.bias.copy_(1000 * likes_the_last.wte.weight[-1])
    last = tiny_model.config.vocab_size - 1
    assert [last] * 9 == alone(likes_the_last, [1, 2, 3], 9)
    assert [[last] * 9] == to_ctranslate2(likes_the_last)([[1, 2, 3]], 9)


def test_ctranslate2_has_no_position_beyond_the_block(passage: list[int], write: Write) -> None:
    """A text that is too long is refused, and not continued from a position that is not there."""
    assert 113 == len(write([passage[:16]], 113)[0])
    with pytest.raises(RuntimeError, match="position 128"):
        write([passage[:16]], 114)


def test_converting_for_ctranslate2_leaves_nothing(
    tiny_model: GPT,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Both folders are gone, no bar was drawn, and torch and transformers are set as before."""
    from transformers.utils.logging import enable_progress_bar, is_progress_bar_enabled

    enable_progress_bar()
    before = torch.get_num_threads(), is_progress_bar_enabled()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    to_ctranslate2(tiny_model)([[1]], 2)
    assert [] == list(tmp_path.iterdir())
    assert ("", "") == capfd.readouterr()
    assert before == (torch.get_num_threads(), is_progress_bar_enabled())
