"""Batching: each row of a padded batch is its own single run, whatever stands beside it."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab35 import GPT, Generation, KVCache, Tokenizer, generate
from lab35.batching import completions, left_pad, position_ids
from lab35_course.peers import to_hugging_face

VOCABULARY = 37
TEXTS = ("Holmes", "It was a dark night and", "My dear Watson, said he, I")

token_ids = st.integers(0, VOCABULARY - 1)
batches = st.lists(st.lists(token_ids, min_size=1, max_size=12), min_size=1, max_size=4)
seeds = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def sharp_model(tiny_model: GPT) -> GPT:
    """A float64 model whose weights are large: a fresh one hardly looks at its context."""
    model = copy.deepcopy(tiny_model).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.7, generator=generator)
    return model


def alone(model: GPT, row: list[int]) -> Tensor:
    """Score every position of one row by itself: (T, V)."""
    with torch.inference_mode():
        return model(torch.tensor([row]))[0][0]


def together(model: GPT, idx: Tensor, mask: Tensor, ends: list[int] | None = None) -> Tensor:
    """Score a padded batch, uncached, or with a cache in chunks that end at `ends`: (B, T, V)."""
    positions = position_ids(mask)
    with torch.inference_mode():
        if ends is None:
            return model(idx, key_mask=mask, position_ids=positions)[0]
        weights = next(model.parameters())
        cache = KVCache(model.config, len(idx), dtype=weights.dtype)
        chunks = [
            model(
                idx[:, start:end],
                cache=cache,
                key_mask=mask[:, :end],
                position_ids=positions[:, start:end],
            )[0]
            for start, end in pairwise([0, *ends])
        ]
    return torch.cat(chunks, dim=1)


def seeded(row_seeds: list[int]) -> list[torch.Generator]:
    """Make one fresh generator a seed."""
    return [torch.Generator().manual_seed(seed) for seed in row_seeds]


# left_pad


def test_padding_stands_in_front() -> None:
    """The layout by example: the shapes, the types, and the side."""
    idx, mask = left_pad([[7], [1, 2, 3], [9, 8]], pad_id=5)

    assert idx.tolist() == [[5, 5, 7], [1, 2, 3], [5, 9, 8]]
    assert mask.tolist() == [[False, False, True], [True] * 3, [False, True, True]]
    assert (idx.dtype, mask.dtype) == (torch.int64, torch.bool)


@given(rows=batches, pad_id=token_ids)
def test_the_mask_gives_the_rows_back(rows: list[list[int]], pad_id: int) -> None:
    """The mask alone says what is real: also a real token that has the padding's id."""
    idx, mask = left_pad(rows, pad_id)

    assert [ids[real].tolist() for ids, real in zip(idx, mask, strict=True)] == rows
    assert (idx[~mask] == pad_id).all()
    assert mask[:, -1].all()
    assert mask.all(dim=1).any(), "the longest row needs no padding"


@given(rows=batches)
def test_real_tokens_are_numbered_from_zero(rows: list[list[int]]) -> None:
    """A row's positions are those of its own run, and padding has one that exists."""
    _, mask = left_pad(rows, 0)
    positions = position_ids(mask)

    for row, real, where in zip(rows, mask, positions, strict=True):
        assert where[real].tolist() == list(range(len(row)))
        assert (where[~real] == 0).all()


@pytest.mark.parametrize(
    ("rows", "pad_id", "message"),
    [
        ([], 0, "rows must hold at least one row, got none"),
        ([[1], []], 0, r"rows\[1\] must hold at least one id, got none"),
        ([1, 2], 0, r"rows\[0\] must be a sequence of ids, got 1"),
        ([[1], [2, 3.0]], 0, r"rows\[1\]\[1\] must be an integer in \[0, 2\*\*63\), got 3.0"),
        ([[1, -2]], 0, r"rows\[0\]\[1\] must be an integer .*got -2"),
        ([[2**63]], 0, r"rows\[0\]\[0\] must be an integer .*got 9223372036854775808"),
        ([[True, False]], 0, r"rows\[0\]\[0\] must be an integer .*got True"),
        (["Holmes"], 0, r"rows\[0\]\[0\] must be an integer .*got 'H'"),
        ([[1]], -1, r"pad_id must be an integer in \[0, 2\*\*63\), got -1"),
        ([[1]], None, "pad_id must be an integer .*got None"),
    ],
)
def test_bad_rows_are_named(rows: list, pad_id: int, message: str) -> None:
    """Each refusal says which row or id it was, and what is allowed."""
    with pytest.raises(ValueError, match=message):
        left_pad(rows, pad_id)


# The forward


@settings(max_examples=60)
@given(rows=batches, pad_id=token_ids, data=st.data())
def test_each_row_scores_as_it_does_alone(
    sharp_model: GPT, rows: list[list[int]], pad_id: int, data: st.DataObject
) -> None:
    """The promise of the chapter, for every row, every pad id, and every way to cut the prefill."""
    idx, mask = left_pad(rows, pad_id)
    width = idx.shape[1]
    cuts = data.draw(st.sets(st.integers(1, width - 1)) if width > 1 else st.just(set()))

    for ends in (None, [*sorted(cuts), width]):
        logits = together(sharp_model, idx, mask, ends)
        assert logits.isfinite().all(), "an empty softmax leaked"
        for row, real, found in zip(rows, mask, logits, strict=True):
            torch.testing.assert_close(found[real], alone(sharp_model, row), atol=1e-9, rtol=0)


def test_mask_and_positions_matter_to_this_model(sharp_model: GPT) -> None:
    """Guards the test above: with either one left out, its model answers something else."""
    rows = [[3, 4], [5, 6, 7, 8, 9]]
    idx, mask = left_pad(rows, 0)
    expected = alone(sharp_model, rows[0])[-1]
    with torch.inference_mode():
        for inputs in ({"key_mask": mask}, {"position_ids": position_ids(mask)}, {}):
            found = sharp_model(idx, **inputs)[0][0, -1]
            assert (found - expected).abs().max() > 0.1, inputs.keys()


def test_float32_rows_agree_within_the_usual_bar(model: GPT, tokenizer: Tokenizer) -> None:
    """The trained model in float32, cached and uncached, at every real token."""
    rows = [tokenizer.encode(text) for text in TEXTS]
    assert [len(row) for row in rows] == [2, 10, 13]
    idx, mask = left_pad(rows, tokenizer.eos_id)

    for ends in (None, [13], [4, 5, 12, 13]):
        logits = together(model, idx, mask, ends)
        for row, real, found in zip(rows, mask, logits, strict=True):
            torch.testing.assert_close(found[real], alone(model, row), atol=1e-4, rtol=0)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """Attend as the formula says, where an empty softmax is NaN, which SDPA may hide."""
    mask = options["attn_mask"]
    if options["is_causal"]:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1) @ v


@pytest.mark.parametrize("ends", [None, [6], [1, 3, 6], [1, 2, 3, 4, 5, 6]])
def test_no_softmax_is_empty(
    sharp_model: GPT, monkeypatch: pytest.MonkeyPatch, ends: list[int] | None
) -> None:
    """Every query sees its own key, so that no kernel has to say what a softmax of nothing is.

    One NaN in a padded column would reach the real ones a layer later: its weight is
    zero, and zero times NaN is NaN.
    """
    rows = [[1], [2, 3, 4, 5, 6, 7], [8, 9]]
    monkeypatch.setattr(F, "scaled_dot_product_attention", softmax_attention)
    idx, mask = left_pad(rows, 0)
    logits = together(sharp_model, idx, mask, ends)

    assert logits.isfinite().all()
    for row, real, found in zip(rows, mask, logits, strict=True):
        torch.testing.assert_close(found[real], alone(sharp_model, row), atol=1e-9, rtol=0)


@settings(max_examples=40)
@given(rows=batches, pads=st.tuples(token_ids, token_ids), where=st.integers(0, 80))
def test_what_stands_in_the_padding_is_irrelevant_to_the_bit(
    sharp_model: GPT, rows: list[list[int]], pads: tuple[int, int], where: int
) -> None:
    """A masked weight is zero, not small: no id and no position of padding moves a real logit."""
    (idx, mask), (other, _) = (left_pad(rows, pad_id) for pad_id in pads)
    positions = position_ids(mask)
    moved = positions.masked_fill(~mask, where)
    with torch.inference_mode():
        expected, _ = sharp_model(idx, key_mask=mask, position_ids=positions)
        found, _ = sharp_model(other, key_mask=mask, position_ids=moved)

    assert torch.equal(expected[mask], found[mask])


@settings(max_examples=40)
@given(rows=batches, data=st.data())
def test_the_order_of_the_rows_is_irrelevant(
    sharp_model: GPT, rows: list[list[int]], data: st.DataObject
) -> None:
    """No row sees another one, wherever it stands in the batch."""
    order = data.draw(st.permutations(range(len(rows))))
    expected = together(sharp_model, *left_pad(rows, 0))
    found = together(sharp_model, *left_pad([rows[row] for row in order], 0))
    real = left_pad([rows[row] for row in order], 0)[1]

    torch.testing.assert_close(found[real], expected[list(order)][real], atol=1e-9, rtol=0)


# generate


@settings(max_examples=25)
@given(rows=batches, pad_id=token_ids, new_tokens=st.integers(1, 10))
def test_each_row_writes_what_it_writes_alone(
    sharp_model: GPT, rows: list[list[int]], pad_id: int, new_tokens: int
) -> None:
    """Greedy texts of random batches, cached and uncached."""
    idx, mask = left_pad(rows, pad_id)
    singles = [
        generate(sharp_model, torch.tensor([row]), new_tokens, temperature=0) for row in rows
    ]
    for row, single in zip(rows, singles, strict=True):
        best = alone(sharp_model, single.tokens[0, :-1].tolist())[len(row) - 1 :].topk(2).values
        assume((best[:, 0] - best[:, 1]).min() > 1e-8)

    for use_cache in (True, False):
        made = generate(
            sharp_model, idx, new_tokens, temperature=0, key_mask=mask, use_cache=use_cache
        )
        assert made.new_tokens.tolist() == [single.new_tokens[0].tolist() for single in singles]


@settings(max_examples=25)
@given(rows=batches, row_seeds=st.lists(seeds, min_size=4, max_size=4), eos_id=token_ids)
def test_with_a_generator_a_row_sampling_is_its_own_run_too(
    sharp_model: GPT, rows: list[list[int]], row_seeds: list[int], eos_id: int
) -> None:
    """Each row draws what it draws alone, also after another row has come to its end."""
    settings = {"temperature": 0.9, "top_k": 30, "top_p": 0.97, "eos_id": eos_id}
    idx, mask = left_pad(rows, 0)
    row_seeds = row_seeds[: len(rows)]
    singles = [
        generate(sharp_model, torch.tensor([row]), 12, generators=seeded([seed]), **settings)
        for row, seed in zip(rows, row_seeds, strict=True)
    ]
    same = generate(
        sharp_model, torch.tensor([rows[0]]), 12, generator=seeded(row_seeds)[0], **settings
    )
    assert same.tokens.tolist() == singles[0].tokens.tolist(), "one generator, or a list of one"

    for use_cache in (True, False):
        made = generate(
            sharp_model,
            idx,
            12,
            generators=seeded(row_seeds),
            key_mask=mask,
            use_cache=use_cache,
            **settings,
        )
        assert completions(made, eos_id) == [completions(one, eos_id)[0] for one in singles]
        assert made.forwards == max(one.forwards for one in singles)
        # What stands behind the end of a row is end of text, and nothing else.
        for written, one in zip(made.new_tokens.tolist(), singles, strict=True):
            rest = written[one.new_tokens.shape[1] :]
            assert rest == [eos_id] * len(rest)
        ended = all(one.stop_reason == "eos" for one in singles)
        assert made.stop_reason == ("eos" if ended else "max_new_tokens")


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_row_that_has_ended_leaves_the_others_alone(
    model: GPT, tokenizer: Tokenizer, use_cache: bool
) -> None:
    """Three rows that end at three different times, each where its own run ends."""
    rows, row_seeds = [tokenizer.encode(text) for text in TEXTS], [1, 2, 3]
    singles = [
        generate(model, torch.tensor([row]), 40, generators=seeded([seed])).new_tokens[0].tolist()
        for row, seed in zip(rows, row_seeds, strict=True)
    ]
    # Any token can play end of text: take the first that all three write, at different times.
    shared = sorted(set(singles[0]) & set(singles[1]) & set(singles[2]))
    eos_id = next(e for e in shared if len({one.index(e) for one in singles}) == 3)

    idx, mask = left_pad(rows, eos_id)
    made = generate(
        model,
        idx,
        40,
        generators=seeded(row_seeds),
        key_mask=mask,
        eos_id=eos_id,
        use_cache=use_cache,
    )
    assert completions(made, eos_id) == [one[: one.index(eos_id)] for one in singles]
    assert made.forwards == max(one.index(eos_id) for one in singles) + 1
    assert made.stop_reason == "eos"


def test_one_generator_for_all_rows_is_another_run(model: GPT, tokenizer: Tokenizer) -> None:
    """The rows share its draws, so that the second one cannot be its own run."""
    rows = [tokenizer.encode(text) for text in TEXTS]
    idx, mask = left_pad(rows, 0)
    made = generate(model, idx, 24, key_mask=mask, generator=seeded([7])[0])
    for row, written in zip(rows, made.new_tokens, strict=True):
        single = generate(model, torch.tensor([row]), 24, generator=seeded([7])[0])
        assert written.tolist() != single.new_tokens[0].tolist()


def test_generators_leave_the_global_one_alone(sharp_model: GPT) -> None:
    """A row's randomness comes from its generator and from nowhere else."""
    before = torch.get_rng_state()
    generate(sharp_model, torch.tensor([[1], [2]]), 5, generators=seeded([1, 2]))

    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"generators": seeded([1])}, r"generators must be one a row \(2\).*got 1$"),
        ({"generators": []}, r"generators must be one a row \(2\).*got 0$"),
        (
            {"generators": seeded([1, 2]), "generator": torch.Generator()},
            "no generator beside them, got 2 and a generator",
        ),
        ({"key_mask": torch.tensor([[True, False]] * 2)}, "pad on the left, not the right"),
    ],
)
def test_bad_batches_are_refused(sharp_model: GPT, arguments: dict, message: str) -> None:
    """What would silently draw or score the wrong thing is an error, and says so."""
    with pytest.raises(ValueError, match=message):
        generate(sharp_model, torch.tensor([[1, 2], [3, 4]]), 2, **arguments)


# completions


def test_completions_end_before_the_first_end_of_text() -> None:
    """Later repeats are cut with it; one in the prompt is not the row's end."""
    tokens = torch.tensor([[9, 1, 2, 9, 9], [5, 6, 9, 9, 9], [0, 9, 3, 4, 5]])
    made = Generation(tokens, prompt_length=2, stop_reason="eos", forwards=3, token_forwards=4)

    assert completions(made, eos_id=9) == [[2], [], [3, 4, 5]]


# The peer


def test_hugging_face_scores_the_same_padded_batch(model: GPT, tokenizer: Tokenizer) -> None:
    """Transformers' GPT-2 in a left-padded batch: the same logits at every real token."""
    idx, mask = left_pad([tokenizer.encode(text) for text in TEXTS], tokenizer.eos_id)
    positions = position_ids(mask)
    with torch.inference_mode():
        theirs = to_hugging_face(model)(idx, attention_mask=mask.long(), position_ids=positions)
        ours, _ = model(idx, key_mask=mask, position_ids=positions)

    torch.testing.assert_close(ours[mask], theirs.logits[mask], atol=1e-4, rtol=0)


def test_hugging_face_writes_the_same_padded_batch(model: GPT, tokenizer: Tokenizer) -> None:
    """Its own generation numbers the positions itself, and picks the same greedy tokens."""
    rows = [tokenizer.encode(text) for text in TEXTS]
    idx, mask = left_pad(rows, tokenizer.eos_id)
    made = generate(model, idx, 24, temperature=0, key_mask=mask)
    for row, written in zip(rows, made.new_tokens.tolist(), strict=True):
        best = alone(model, (row + written)[:-1])[len(row) - 1 :].topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-4, "pick prompts whose choices are clear"

    theirs = to_hugging_face(model).generate(
        idx,
        attention_mask=mask.long(),
        do_sample=False,
        max_new_tokens=24,
        pad_token_id=tokenizer.eos_id,
    )
    assert made.tokens.tolist() == theirs.tolist()
