"""The trace of a step tells what really happened in it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from lab35 import GPT, Tokenizer, generate, probabilities, trace_step


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_draw_is_the_one_of_generate(model: GPT, prompt: Tensor, seed: int) -> None:
    """With the same settings and seed, the trace draws the next token of the text."""
    settings = {"temperature": 0.9, "top_k": 30, "top_p": 0.9}
    told = trace_step(model, prompt, **settings, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    made = generate(model, prompt, 1, **settings, generator=generator)
    assert made.new_tokens.item() == told.drawn


@pytest.mark.parametrize("length", [1, 2, 10])
def test_positions_and_cache(model: GPT, prompt: Tensor, length: int) -> None:
    """The last token is the step: it sits behind what was prefilled, and the cache grows by one."""
    told = trace_step(model, prompt[:, :length], temperature=0)
    assert told.token == prompt[0, length - 1].item()
    assert (told.position, told.cache_before, told.cache_after) == (length - 1, length - 1, length)


def test_numbers_are_those_of_the_uncached_model(model: GPT, prompt: Tensor) -> None:
    """Logits and probabilities of the candidates, computed again another way."""
    settings = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    told = trace_step(model, prompt, **settings, candidates=512)
    with torch.inference_mode():
        logits = model(prompt)[0][:, -1]
    assert sorted(each.token for each in told.candidates) == list(range(512))
    ranked = [each.logit for each in told.candidates]
    assert ranked == sorted(ranked, reverse=True)
    raw, tempered = logits.double().softmax(-1), (logits.double() / 0.7).softmax(-1)
    final = probabilities(logits, **settings)
    for each in told.candidates:
        assert each.logit == pytest.approx(logits[0, each.token].item(), abs=1e-4)
        assert each.probability == pytest.approx(raw[0, each.token].item(), abs=1e-5)
        assert each.tempered == pytest.approx(tempered[0, each.token].item(), abs=1e-5)
        assert each.final == pytest.approx(final[0, each.token].item(), abs=1e-5)
    assert told.kept_by_top_k == 20
    assert told.kept_by_top_p == sum(each.final > 0 for each in told.candidates) < 20
    assert told.drawn_final > 0


def test_greedy_is_one_candidate(model: GPT, prompt: Tensor) -> None:
    """At temperature 0 one token is left, and it is the best."""
    told = trace_step(model, prompt, temperature=0, top_k=40, top_p=0.9)
    assert (told.kept_by_top_k, told.kept_by_top_p, told.drawn_final) == (1, 1, 1.0)
    assert told.drawn == told.candidates[0].token


def test_as_dict_is_json_with_bytes(model: GPT, tokenizer: Tokenizer, prompt: Tensor) -> None:
    """Bytes are spelled out, because a token need not be text."""
    told = trace_step(model, prompt, temperature=0).as_dict(tokenizer)
    assert bytes.fromhex(told["token_bytes"]) == tokenizer.token_bytes(told["token"])
    assert bytes.fromhex(told["drawn_bytes"]) == tokenizer.token_bytes(told["drawn"])
    assert len(json.loads(json.dumps(told))["candidates"]) == 5


def test_the_mode_is_left_alone(model: GPT, prompt: Tensor) -> None:
    """A trace switches dropout off, and a model in training back on."""
    model.train()
    try:
        first, second = (trace_step(model, prompt, temperature=0) for _ in range(2))
        assert model.training
    finally:
        model.eval()
    assert first == second


@pytest.mark.parametrize(
    ("idx", "arguments", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), {}, r"idx must have shape \(1, T\).*\(2, 3\)"),
        (torch.zeros(1, 0, dtype=torch.int64), {}, r"idx must have shape \(1, T\).*\(1, 0\)"),
        (torch.zeros(1, 129, dtype=torch.int64), {}, "block_size=128"),
        (torch.tensor([[512]]), {}, r"idx must lie in \[0, 512\)"),
        (torch.tensor([[1]]), {"top_p": 0.0}, r"top_p must be .*\(0, 1\], got 0.0"),
        (torch.tensor([[1]]), {"candidates": 0}, "candidates must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(model: GPT, idx: Tensor, arguments: dict, message: str) -> None:
    """Each refusal names the argument, the value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        trace_step(model, idx, **arguments)
