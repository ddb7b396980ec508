"""Batching: prompts of different lengths in one tensor, each row as if it ran alone.

Rows are padded on the left, so that the last column holds every row's last real token. The mask
says which tokens are real; it goes into `generate` as `key_mask`.

```{.python title="Two prompts, one batch"}
from lab35 import generate, load_pretrained
from lab35.batching import completions, left_pad

model, tokenizer = load_pretrained()
rows = [tokenizer.encode(text) for text in ("Holmes", "It was a dark night and")]
idx, mask = left_pad(rows, pad_id=tokenizer.eos_id)
made = generate(
    model, idx, 8, temperature=0, key_mask=mask, eos_id=tokenizer.eos_id
)
for row in completions(made, tokenizer.eos_id):
    assert 1 <= len(row) <= 8
```
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lab35._arguments import integer
from lab35.loop import Generation
from lab35.model import position_ids

__all__ = ["completions", "left_pad", "position_ids"]


def left_pad(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Stack rows of token ids, with padding in front of the shorter ones.

    Args:
        rows: Token ids, one sequence a row, each with at least one token.
        pad_id: What to fill up with: any id of the vocabulary, since a masked token changes
            nothing. A real token may have the same id.

    Returns:
        The ids, int64, and the mask, bool, both of shape (B, T). T is the longest row's length;
        True marks a real token.

    Raises:
        ValueError: If there is no row, a row is empty or not a sequence, or an id is not an
            integer in [0, 2⁶³).
    """
    if not isinstance(rows, Sequence):
        raise ValueError(f"rows must be a sequence of rows, got {rows!r}")
    if len(rows) == 0:
        raise ValueError("rows must hold at least one row, got none")
    pad_id = _token("pad_id", pad_id)
    ids = []
    for number, row in enumerate(rows):
        if not isinstance(row, Sequence):
            raise ValueError(f"rows[{number}] must be a sequence of ids, got {row!r}")
        if len(row) == 0:
            raise ValueError(f"rows[{number}] must hold at least one id, got none")
        ids.append([_token(f"rows[{number}][{column}]", each) for column, each in enumerate(row)])

    width = max(map(len, ids))
    idx = torch.full((len(ids), width), pad_id)
    mask = torch.zeros(len(ids), width, dtype=torch.bool)
    for number, row in enumerate(ids):
        idx[number, width - len(row) :] = torch.tensor(row)
        mask[number, width - len(row) :] = True
    return idx, mask


def completions(generation: Generation, eos_id: int) -> list[list[int]]:
    """Take each row's new tokens, up to its end of text.

    A row that ends early repeats `eos_id` until the last row is done; none of that is text.

    Args:
        generation: What `generate` returned.
        eos_id: The end-of-text token that `generate` was given.

    Returns:
        One list of ids a row, cut before its first `eos_id`. A row that sampled it at once is
        empty.

    Raises:
        ValueError: If `eos_id` is no integer.
    """
    eos_id = integer("eos_id", eos_id)
    rows = generation.new_tokens.tolist()
    return [row[: row.index(eos_id)] if eos_id in row else row for row in rows]


def _token(name: str, token: object) -> int:
    # A mask passed by mistake would pass as ids, if True were an integer.
    return integer(name, token, 0, 2**63 - 1, allowed="an integer in [0, 2**63)")
