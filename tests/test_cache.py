"""The cache's promises: the same numbers as recomputation, and no trace of what went wrong."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, GPT2LMHeadModel

from lab35 import (
    GPT,
    GPTConfig,
    GrowingCache,
    KVCache,
    Tokenizer,
    cache_bytes,
    causal_mask,
    generate,
    position_ids,
)
from lab35_course.peers import to_hugging_face

ATOL = 1e-4  # float32: another shape takes another kernel, and another order of addition
ATOL_64 = 1e-9  # float64: what is left of that, and far below any mistake

Cache = KVCache | GrowingCache
KINDS = (KVCache, GrowingCache)
Kind = type[KVCache] | type[GrowingCache]
both_kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def model_64(model: GPT) -> GPT:
    """The trained model in float64."""
    return copy.deepcopy(model).double()


@pytest.fixture(scope="module")
def peer(model: GPT) -> GPT2LMHeadModel:
    """The trained weights in Hugging Face's GPT-2."""
    return to_hugging_face(model)


@st.composite
def prompts(draw: st.DrawFn, max_tokens: int = 128, min_tokens: int = 1) -> Tensor:
    """Random ids, shape (B, T)."""
    B, T = draw(st.integers(1, 3)), draw(st.integers(min_tokens, max_tokens))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return torch.randint(512, (B, T), generator=generator)


@st.composite
def chunks(draw: st.DrawFn, total: int) -> list[int]:
    """Sizes that add up to `total`: cut anywhere, or a short one token by token."""
    if total <= 32 and draw(st.booleans()):
        return [1] * total
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=8))) if total > 1 else []
    return [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]


def cached(
    model: GPT,
    cache: Cache,
    idx: Tensor,
    sizes: list[int] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Run idx through the cache, in pieces or in one, and return the logits of all of it."""
    logits = []
    with torch.inference_mode():
        for piece in idx.split(sizes or [idx.shape[1]], dim=1):
            inputs = {}
            if mask is not None:
                visible = mask[:, : cache.length + piece.shape[1]]
                inputs["key_mask"] = visible
                inputs["position_ids"] = position_ids(visible)[:, cache.length :]
            logits.append(model(piece, cache=cache, **inputs)[0])
    return torch.cat(logits, dim=1)


def uncached(model: GPT, idx: Tensor, mask: Tensor | None = None) -> Tensor:
    """Run the whole of idx at once."""
    with torch.inference_mode():
        if mask is None:
            return model(idx)[0]
        return model(idx, key_mask=mask, position_ids=position_ids(mask))[0]


def close(expected: Tensor, actual: Tensor, atol: float = ATOL) -> None:
    """Compare to an absolute tolerance alone."""
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0, check_dtype=False)


# The same numbers


@settings(max_examples=20)
@given(data=st.data(), idx=prompts(), kind=st.sampled_from(KINDS))
def test_any_chunking_gives_the_logits_and_the_cache_of_one_piece(
    model: GPT, model_64: GPT, data: st.DataObject, idx: Tensor, kind: Kind
) -> None:
    """A position, a mask or an offset that is wrong for some length of chunk."""
    T = idx.shape[1]
    whole, pieces = KVCache(model.config, len(idx)), kind(model.config, len(idx))
    expected = cached(model, whole, idx)
    actual = cached(model, pieces, idx, data.draw(chunks(T)))
    close(expected, actual)
    close(uncached(model, idx), actual)
    close(uncached(model_64, idx), actual)
    assert T == whole.length == pieces.length
    close(whole.k[..., :T, :], pieces.k[..., :T, :])
    close(whole.v[..., :T, :], pieces.v[..., :T, :])


@settings(max_examples=20)
@given(data=st.data(), idx=prompts(64), kind=st.sampled_from(KINDS))
def test_in_float64_cached_and_uncached_agree_to_nine_digits(
    model_64: GPT, data: st.DataObject, idx: Tensor, kind: Kind
) -> None:
    """A small mistake that hides below the tolerance of float32."""
    cache = kind(model_64.config, len(idx), dtype=torch.float64)
    actual = cached(model_64, cache, idx, data.draw(chunks(idx.shape[1])))
    close(uncached(model_64, idx), actual, ATOL_64)


@settings(max_examples=20)
@given(data=st.data(), idx=prompts(48), kind=st.sampled_from(KINDS))
def test_a_left_padded_row_gives_what_it_gives_alone(
    model_64: GPT, data: st.DataObject, idx: Tensor, kind: Kind
) -> None:
    """Padding that a real token can see, or that shifts its position; padding without any key."""
    B, T = idx.shape
    pads = data.draw(st.lists(st.integers(0, T - 1), min_size=B, max_size=B))
    mask = torch.arange(T) >= torch.tensor(pads)[:, None]
    cache = kind(model_64.config, B, dtype=torch.float64)
    actual = cached(model_64, cache, idx, data.draw(chunks(T)), mask)
    close(uncached(model_64, idx, mask), actual, ATOL_64)
    for row, pad in enumerate(pads):
        alone = uncached(model_64, idx[row : row + 1, pad:])
        close(alone, actual[row : row + 1, pad:], ATOL_64)
        if pad:  # each pad sees itself and nothing else
            close(uncached(model_64, idx[row, :pad, None])[:, 0], actual[row, :pad], ATOL_64)


@settings(max_examples=10)
@given(data=st.data(), idx=prompts(48), kind=st.sampled_from(KINDS))
def test_logits_and_cache_are_those_of_hugging_face(
    model: GPT, peer: GPT2LMHeadModel, data: st.DataObject, idx: Tensor, kind: Kind
) -> None:
    """A model that agrees with itself, cached and uncached, and is not GPT-2."""
    sizes = data.draw(chunks(idx.shape[1]))
    theirs, ours = DynamicCache(config=peer.config), kind(model.config, len(idx))
    with torch.inference_mode():
        expected = torch.cat([peer(x, cache=theirs).logits for x in idx.split(sizes, 1)], dim=1)
    close(expected, uncached(model, idx))
    close(expected, cached(model, ours, idx, sizes))
    for layer, stored in enumerate(theirs.layers):
        close(stored.keys, ours.k[layer, :, :, : ours.length])
        close(stored.values, ours.v[layer, :, :, : ours.length])


# Why it works


@settings(max_examples=20)
@given(data=st.data(), idx=prompts(48, min_tokens=2))
def test_a_token_changes_its_own_logits_and_no_earlier_ones(
    model_64: GPT, data: st.DataObject, idx: Tensor
) -> None:
    """Attention that looks ahead, without which no past key could be kept."""
    at = data.draw(st.integers(1, idx.shape[1] - 1))
    other = idx.clone()
    other[:, at] = (idx[:, at] + data.draw(st.integers(1, 511))) % 512
    before, after = uncached(model_64, idx), uncached(model_64, other)
    close(before[:, :at], after[:, :at], ATOL_64)
    assert (before[:, at] - after[:, at]).abs().amax(-1).min() > ATOL


@pytest.mark.parametrize("sizes", [[1] * 10, [4, 1, 5]])
def test_stored_keys_and_values_stay_bit_for_bit(
    model: GPT, prompt: Tensor, sizes: list[int]
) -> None:
    """A later chunk that writes over an earlier one, by however little."""
    cache = KVCache(model.config, 1)
    for piece in prompt.split(sizes, dim=1):
        seen, k, v = cache.length, cache.k.clone(), cache.v.clone()
        cached(model, cache, piece)
        assert torch.equal(k[..., :seen, :], cache.k[..., :seen, :])
        assert torch.equal(v[..., :seen, :], cache.v[..., :seen, :])


@both_kinds
def test_length_advances_once_after_the_last_layer(model: GPT, prompt: Tensor, kind: Kind) -> None:
    """Layers that count the chunk one by one, so that each writes at another place."""
    told = []

    class Spy(kind):
        def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            told.append(("write", layer, self.length))
            return super().write(layer, k, v)

        def advance(self, t_new: int) -> None:
            told.append(("advance", t_new, self.length))
            super().advance(t_new)

    cache = Spy(model.config, 1)
    for start, end in ((0, 5), (5, 6), (6, 10)):
        told.clear()
        cached(model, cache, prompt[:, start:end])
        writes = [("write", layer, start) for layer in range(model.config.n_layer)]
        assert [*writes, ("advance", end - start, start)] == told
        assert end == cache.length


def test_what_lies_behind_length_is_never_read(model: GPT, prompt: Tensor) -> None:
    """A mask or a slice that reaches into the unused part of the buffer."""
    clean, dirty = KVCache(model.config, 1), KVCache(model.config, 1)
    with torch.inference_mode():
        dirty.k.fill_(torch.nan)
        dirty.v.fill_(torch.nan)
    sizes = [5, 1, 4]
    assert torch.equal(cached(model, clean, prompt, sizes), cached(model, dirty, prompt, sizes))


def test_a_cache_that_was_reset_is_as_good_as_new(model: GPT, prompt: Tensor) -> None:
    """An old text that shows through, or buffers that move under a compiled graph."""
    cache, other = KVCache(model.config, 1), prompt.flip(1)
    cached(model, cache, prompt)
    address = cache.k.data_ptr(), cache.v.data_ptr()
    cache.reset()
    assert 0 == cache.length
    assert torch.equal(
        cached(model, KVCache(model.config, 1), other, [3, 7]), cached(model, cache, other, [3, 7])
    )
    assert address == (cache.k.data_ptr(), cache.v.data_ptr())


def test_one_generation_leaves_nothing_behind_for_the_next(
    model: GPT, tokenizer: Tokenizer, prompt: Tensor
) -> None:
    """State kept in the model or the module, which a second prompt would then see."""
    first = generate(model, prompt, 24, temperature=0).tokens
    generate(model, torch.tensor([tokenizer.encode("Sherlock Holmes")]), 24, temperature=0)
    assert torch.equal(first, generate(model, prompt, 24, temperature=0).tokens)


# The mask


def test_causal_mask_is_the_sentence_that_describes_it() -> None:
    """An off-by-one in the mask, at any small size and offset."""
    for t_total in range(1, 7):
        for t_new in range(1, t_total + 1):
            for offset in range(t_total - t_new + 1):
                expected = [[key <= offset + row for key in range(t_total)] for row in range(t_new)]
                assert expected == causal_mask(t_new, t_total, offset).tolist()


@pytest.mark.parametrize("t_new", range(1, 9))
def test_causal_mask_of_a_last_chunk_is_the_bottom_of_the_square(t_new: int) -> None:
    """A mask aligned to the top left, which hides from a chunk what was stored before it."""
    square = torch.ones(8, 8).tril().bool()
    assert torch.equal(square[8 - t_new :], causal_mask(t_new, 8, 8 - t_new))


def test_sdpa_still_aligns_is_causal_to_the_top_left() -> None:
    """A torch that changed sides: the chapter would then warn of a trap that is gone."""
    generator = torch.Generator().manual_seed(1337)
    q, k, v = (torch.randn(1, 1, n, 4, generator=generator) for n in (3, 8, 8))
    top_left = scaled_dot_product_attention(q, k, v, is_causal=True)
    close(scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(3, 8, 0)), top_left)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 3, 0), "t_new and t_total must be at least 1, got 0 and 3"),
        ((1, 0, 0), "t_new and t_total must be at least 1, got 1 and 0"),
        ((2, 5, 4), "offset must lie in [0, t_total - t_new] = [0, 3], got 4"),
        ((2, 5, -1), "offset must lie in [0, t_total - t_new] = [0, 3], got -1"),
    ],
)
def test_causal_mask_refuses_queries_outside_the_keys(
    sizes: tuple[int, int, int], message: str
) -> None:
    """A query whose own key is missing, and with it a softmax over nothing."""
    with pytest.raises(ValueError, match=re.escape(message)):
        causal_mask(*sizes)


# Bytes


@given(
    batch_size=st.integers(1, 3),
    n_layer=st.integers(1, 4),
    n_head=st.integers(1, 4),
    head_dim=st.integers(1, 16),
    length=st.integers(1, 32),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int8]),
)
def test_cache_bytes_counts_what_a_cache_takes(
    batch_size: int, n_layer: int, n_head: int, head_dim: int, length: int, dtype: torch.dtype
) -> None:
    """A formula that forgets an axis, keys or values, or the width of an element."""
    config = GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_head * head_dim, block_size=32)
    expected = cache_bytes(
        n_layer=n_layer,
        n_kv_head=n_head,
        head_dim=head_dim,
        length=length,
        batch_size=batch_size,
        dtype=dtype,
    )
    assert expected == KVCache(config, batch_size, length, dtype=dtype).nbytes


def test_a_growing_cache_takes_what_it_stores(model: GPT, prompt: Tensor) -> None:
    """A comparison of sizes in which one side counts room that it does not take."""
    cache = GrowingCache(model.config, 2)
    assert 0 == cache.nbytes
    cached(model, cache, prompt.repeat(2, 1), [4, 6])
    expected = cache_bytes(n_layer=4, n_kv_head=4, head_dim=32, length=10, batch_size=2)
    assert expected == cache.nbytes


def test_the_sizes_that_the_chapter_names() -> None:
    """Numbers that anybody can look up, against the formula."""
    gpt2 = {"n_layer": 12, "n_kv_head": 12, "head_dim": 64, "length": 1024, "dtype": torch.bfloat16}
    weights = 2 * 124_439_808
    assert 524_288 == KVCache(GPTConfig(), 1).nbytes
    assert 37_748_736 == cache_bytes(**gpt2)
    assert cache_bytes(**gpt2, batch_size=6) < weights < cache_bytes(**gpt2, batch_size=7)


@pytest.mark.parametrize("name", ["n_layer", "n_kv_head", "head_dim", "length", "batch_size"])
def test_cache_bytes_names_a_size_below_one(name: str) -> None:
    """A caller's mistake that comes out as zero bytes."""
    sizes = {"n_layer": 4, "n_kv_head": 4, "head_dim": 32, "length": 128, "batch_size": 1}
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0$"):
        cache_bytes(**sizes | {name: 0})


# What it refuses, and how it is afterwards


@pytest.mark.parametrize(
    ("batch_size", "max_len", "message"),
    [
        (0, None, "batch_size must be at least 1, got 0"),
        (1, 0, "max_len must lie in [1, 128], got 0"),
        (1, 129, "max_len must lie in [1, 128], got 129"),
    ],
)
def test_a_cache_of_an_impossible_size_is_refused(
    batch_size: int, max_len: int | None, message: str
) -> None:
    """Room for positions that the model does not have."""
    with pytest.raises(ValueError, match=re.escape(message)):
        KVCache(GPTConfig(), batch_size, max_len)


def test_a_growing_cache_without_rows_is_refused() -> None:
    """A cache that no batch fits."""
    with pytest.raises(ValueError, match="batch_size must be at least 1, got -1"):
        GrowingCache(GPTConfig(), -1)


@pytest.mark.parametrize("used", [0, 4, 8])
def test_overrun_raises_before_anything_is_written(
    model: GPT, prompt: Tensor, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound tested on the chunk alone, or found by the first layer that does not fit."""
    cache = KVCache(model.config, 1, max_len=8)
    if used:
        cached(model, cache, prompt[:, :used])
    k, v = cache.k.clone(), cache.v.clone()
    asked = []
    monkeypatch.setattr(cache, "write", lambda *chunk: asked.append(chunk))
    message = f"max_len=8, got {9 - used} tokens after {used} stored ones"
    with pytest.raises(ValueError, match=message):
        cached(model, cache, prompt[:, used:9])  # one too many
    monkeypatch.undo()
    assert [] == asked, "a layer was asked to write"
    assert used == cache.length
    assert torch.equal(k, cache.k)
    assert torch.equal(v, cache.v)
    if used < 8:  # what does fit still goes in
        expected = uncached(model, prompt[:, :8])[:, used:]
        close(expected, cached(model, cache, prompt[:, used:8]))


REFUSED = {
    "id too high": ({"idx": torch.full((1, 6), 512)}, "idx must lie in [0, 512)"),
    "id too low": ({"idx": torch.full((1, 6), -1)}, "idx must lie in [0, 512)"),
    "no token": ({"idx": torch.zeros(1, 0, dtype=torch.int64)}, "idx must have shape (B, T)"),
    "too many tokens": ({"idx": torch.zeros(1, 125, dtype=torch.int64)}, "block_size=128"),
    "too many rows": ({"idx": torch.zeros(2, 6, dtype=torch.int64)}, "cache's 1 rows, got 2"),
    "short key mask": ({"key_mask": torch.ones(1, 9, dtype=torch.bool)}, "key_mask must be bool"),
    "float key mask": ({"key_mask": torch.ones(1, 10)}, "key_mask must be bool"),
    "position": ({"position_ids": torch.full((1, 6), 128)}, "position_ids must lie in [0, 128)"),
    "targets": ({"targets": torch.zeros(1, 3, dtype=torch.int64)}, "target"),
}


@pytest.mark.parametrize(("inputs", "message"), REFUSED.values(), ids=REFUSED)
@both_kinds
def test_a_refused_chunk_leaves_the_cache_usable(
    model: GPT, prompt: Tensor, kind: Kind, inputs: dict[str, Tensor], message: str
) -> None:
    """A forward that fails after it has counted its chunk, or written over an older one."""
    cache = kind(model.config, 1)
    cached(model, cache, prompt[:, :4])
    k, v = cache.k[..., :4, :].clone(), cache.v[..., :4, :].clone()
    with torch.inference_mode(), pytest.raises(ValueError, match=re.escape(message)):
        model(**{"idx": prompt[:, 4:], "cache": cache} | inputs)
    assert 4 == cache.length
    assert torch.equal(k, cache.k[..., :4, :])
    assert torch.equal(v, cache.v[..., :4, :])
    close(uncached(model, prompt)[:, 4:], cached(model, cache, prompt[:, 4:]))


@both_kinds
def test_a_forward_that_breaks_half_way_can_be_run_again(
    model: GPT, prompt: Tensor, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that the first layers had stored already, found there by the second try."""

    def interrupt(_: Tensor) -> Tensor:
        raise KeyboardInterrupt

    cache = kind(model.config, 1)
    cached(model, cache, prompt[:, :4])
    monkeypatch.setattr(model.blocks[2].ln_2, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cached(model, cache, prompt[:, 4:])
    monkeypatch.undo()
    assert 4 == cache.length
    close(uncached(model, prompt)[:, 4:], cached(model, cache, prompt[:, 4:], [1, 5]))


@both_kinds
def test_a_cached_forward_needs_inference_mode(model: GPT, prompt: Tensor, kind: Kind) -> None:
    """A gradient graph that holds on to a buffer which the next step overwrites."""
    cache = kind(model.config, 1)
    with pytest.raises(RuntimeError, match=r"under torch\.inference_mode"):
        model(prompt, cache=cache)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"under torch\.inference_mode"):
        model(prompt, cache=cache)
    assert 0 == cache.length
    assert not cache.k.any()
    assert not cache.v.any()


def test_buffers_are_inference_tensors() -> None:
    """Buffers that a gradient graph could save, once they met a weight."""
    cache = KVCache(GPTConfig(), 1)
    assert cache.k.is_inference()
    assert cache.v.is_inference()
    weight = torch.ones(1, requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        _ = cache.k * weight


@pytest.mark.parametrize(
    "other",
    [
        GPTConfig(n_layer=2),
        GPTConfig(n_layer=6),
        GPTConfig(n_head=8),
        GPTConfig(n_head=1),
        GPTConfig(n_embd=256),
        GPTConfig(n_head=8, n_embd=256),
    ],
    ids=lambda config: f"{config.n_layer}x{config.n_head}x{config.head_dim}",
)
@both_kinds
def test_a_cache_of_another_models_shape_gives_no_logits(
    model: GPT, prompt: Tensor, kind: Kind, other: GPTConfig
) -> None:
    """Heads that are broadcast, or layers that are left out, without a word."""
    cache = kind(other, 1)
    with pytest.raises(ValueError, match=r"cache must have the model's .* \(4, 4, 32\), got"):
        cached(model, cache, prompt)
    assert 0 == cache.length


# One truth: what is assigned is what the next forward reads


def assigned(cache: Cache, order: list[int]) -> None:
    """Put the rows of a cache into another order, as a beam search does."""
    cache.k = cache.k[:, order]
    cache.v = cache.v[:, order]


@both_kinds
@pytest.mark.parametrize("order", [[1, 0], [1, 1], [1, 0, 1], [1]], ids=str)
@pytest.mark.parametrize("inference", [True, False])
def test_assigned_rows_are_the_ones_that_are_read(
    model: GPT, passage: list[int], kind: Kind, order: list[int], inference: bool
) -> None:
    """Rows in another order, copied or left out: views of the old buffers would still be read."""
    idx = torch.tensor([passage[:6], passage[30:36]])
    cache = kind(model.config, 2)
    cached(model, cache, idx[:, :5])
    with torch.inference_mode(inference):
        assigned(cache, order)
    assert kind is GrowingCache or cache.k.is_inference()
    close(uncached(model, idx[order])[:, 5:], cached(model, cache, idx[order][:, 5:]))
    cache.reset()
    close(uncached(model, idx[order]), cached(model, cache, idx[order]))


def test_rows_that_are_reordered_stay_in_their_buffer(model: GPT, prompt: Tensor) -> None:
    """The address is what compilers and CUDA graphs were promised."""
    cache = KVCache(model.config, 2)
    before = cache.k.data_ptr(), cache.v.data_ptr()
    assigned(cache, [1, 0])
    cache.k = cache.k
    assert before == (cache.k.data_ptr(), cache.v.data_ptr())


@both_kinds
def test_what_was_assigned_is_a_copy(model: GPT, prompt: Tensor, kind: Kind) -> None:
    """Two caches must not write into one buffer."""
    first, second = kind(model.config, 1), kind(model.config, 1)
    cached(model, first, prompt[:, :5])
    cached(model, second, prompt[:, 2:7])
    second.k, second.v = first.k, first.v
    cached(model, second, prompt[:, 6:7])
    close(uncached(model, prompt[:, :6])[:, 5:], cached(model, first, prompt[:, 5:6]))


@both_kinds
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k: k[:2], r"k must have shape \(L, B, H, T, D\) = \(4, B, 4, "),
        (lambda k: k[:, :0], "k must have shape"),
        (lambda k: k[:, 0], "k must have shape"),
        (lambda k: k[..., :-1, :], "k must have shape"),
        (lambda k: k.double(), "k must be torch.float32 on cpu, got torch.float64 on cpu"),
        (lambda k: k.tolist(), "k must be a tensor, got a list"),
    ],
)
def test_another_buffer_is_refused(
    model: GPT, prompt: Tensor, kind: Kind, change: Callable, message: str
) -> None:
    """Broadcast or cast in silence, the next forward would read something else."""
    cache = kind(model.config, 1)
    cached(model, cache, prompt[:, :5])
    with pytest.raises(ValueError, match=message):
        cache.k = change(cache.k)
    close(uncached(model, prompt)[:, 5:], cached(model, cache, prompt[:, 5:]))


@both_kinds
def test_keys_and_values_of_other_rows_are_refused(model: GPT, prompt: Tensor, kind: Kind) -> None:
    """The keys reordered, and the values forgotten."""
    cache = kind(model.config, 1)
    cached(model, cache, prompt[:, :5])
    cache.k = cache.k.expand(-1, 2, -1, -1, -1)
    with pytest.raises(
        ValueError, match=r"cache.k and cache.v must have the same rows, got 2 and 1"
    ):
        cached(model, cache, prompt[:, 5:].expand(2, -1))


def test_writing_into_the_buffers_is_seen(model: GPT, prompt: Tensor) -> None:
    """Another way to set the same numbers."""
    cache = KVCache(model.config, 2)
    idx = torch.cat((prompt, prompt.flip(1)))
    cached(model, cache, idx[:, :5])
    with torch.inference_mode():
        cache.k[:], cache.v[:] = cache.k[:, [1, 0]], cache.v[:, [1, 0]]
    close(uncached(model, idx[[1, 0]])[:, 5:], cached(model, cache, idx[[1, 0]][:, 5:]))


@both_kinds
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_is_a_cache_of_its_own(
    model: GPT, prompt: Tensor, kind: Kind, copied: Callable
) -> None:
    """Views that are copied one by one are no views of the copied buffers."""
    cache = kind(model.config, 1)
    cached(model, cache, prompt[:, :5])
    other = copied(cache)
    found = cached(model, other, prompt[:, 5:])
    assert (5, 10) == (cache.length, other.length)
    assert kind is GrowingCache or other.v.is_inference()
    assert not torch.equal(other.k[..., 5:10, :], torch.zeros_like(other.k[..., 5:10, :]))
    close(uncached(model, prompt)[:, 5:], found)
    close(found, cached(model, cache, prompt[:, 5:]))


@both_kinds
@pytest.mark.parametrize("bad", [-1, 6, 129, 2.0, "3", None, True])
def test_a_length_that_nothing_is_stored_for_is_refused(
    model: GPT, prompt: Tensor, kind: Kind, bad: object
) -> None:
    """Set by hand, it must lie within what there is: a token may be taken back."""
    if kind is KVCache and bad == 6:
        return  # the buffer has room there, and someone may have filled it by hand
    cache = kind(model.config, 1)
    cached(model, cache, prompt[:, :5])
    with pytest.raises(ValueError, match="length must"):
        cache.length = bad
    cache.length = torch.tensor(4)
    assert cache.length == 4
    close(uncached(model, prompt)[:, 4:], cached(model, cache, prompt[:, 4:]))


@both_kinds
def test_a_cache_of_another_type_is_refused(model: GPT, prompt: Tensor, kind: Kind) -> None:
    """It would round in silence, or fail in attention's words after the first layer has written."""
    cache = kind(model.config, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"cache must hold the model's torch\.float32, got .*64"):
        cached(model, cache, prompt)
    assert 0 == cache.length


def test_the_config_of_a_model_cannot_be_replaced() -> None:
    """Its weights have the old sizes, and every check would look at the new ones."""
    model = GPT(GPTConfig(n_layer=1))
    with pytest.raises(AttributeError, match="config"):
        model.config = GPTConfig(n_layer=2)
