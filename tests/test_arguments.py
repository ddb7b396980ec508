"""What counts as an integer or a number, in every public function that takes one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from lab35 import (
    GPT,
    GPTConfig,
    GrowingCache,
    KVCache,
    cache_bytes,
    causal_mask,
    decode_steps,
    filtered_logits,
    generate,
    left_pad,
    probabilities,
    sample_next,
    token_forwards,
    trace_step,
    verify_cache,
)
from lab35._arguments import check_generator
from lab35.context import refill_start, refill_token_forwards, rotate, slide_start
from lab35.timing import interleaved, mean_seconds, spread, threads

IDX = torch.tensor([[1, 2, 3]])
LOGITS = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
SIZES = {"n_layer": 4, "n_kv_head": 4, "head_dim": 32, "length": 128, "batch_size": 1}


def enter(context: object) -> None:
    """Enter a context, and leave it."""
    with context:
        pass


INTEGERS: dict[str, Callable[[GPT, object], object]] = {
    "generate max_new_tokens": lambda model, n: generate(model, IDX, n),
    "decode_steps max_new_tokens": lambda model, n: decode_steps(model, IDX, n),
    "decode_steps top_k": lambda model, n: decode_steps(model, IDX, 2, top_k=n),
    "decode_steps block_size": lambda model, n: decode_steps(model, IDX, 2, block_size=n),
    "decode_steps eos_id": lambda model, n: decode_steps(model, IDX, 2, eos_id=n),
    "sample_next top_k": lambda model, n: sample_next(LOGITS, top_k=n),
    "sample_next top_k of greedy": lambda model, n: sample_next(LOGITS, 0, top_k=n),
    "probabilities top_k": lambda model, n: probabilities(LOGITS, top_k=n),
    "filtered_logits top_k": lambda model, n: filtered_logits(LOGITS, top_k=n),
    "trace_step top_k": lambda model, n: trace_step(model, IDX, top_k=n),
    "trace_step candidates": lambda model, n: trace_step(model, IDX, candidates=n),
    "verify_cache steps": lambda model, n: verify_cache(model, IDX, n),
    "token_forwards prompt_length": lambda model, n: token_forwards(n, 1, use_cache=True),
    "token_forwards new_tokens": lambda model, n: token_forwards(1, n, use_cache=True),
    "refill_token_forwards new_tokens": lambda model, n: refill_token_forwards(1, n, 8),
    "slide_start length": lambda model, n: slide_start(n, 8),
    "refill_start block_size": lambda model, n: refill_start(8, n),
    "KVCache batch_size": lambda model, n: KVCache(model.config, n),
    "KVCache max_len": lambda model, n: KVCache(model.config, 1, n),
    "GrowingCache batch_size": lambda model, n: GrowingCache(model.config, n),
    "cache_bytes length": lambda model, n: cache_bytes(**SIZES | {"length": n}),
    "GPTConfig n_layer": lambda model, n: GPTConfig(n_layer=n),
    "GPTConfig vocab_size": lambda model, n: GPTConfig(vocab_size=n),
    "causal_mask t_new": lambda model, n: causal_mask(n, 8, 0),
    "left_pad pad_id": lambda model, n: left_pad([[1]], n),
    "left_pad id": lambda model, n: left_pad([[n]], 0),
    "mean_seconds calls": lambda model, n: mean_seconds(int, n),
    "interleaved repeats": lambda model, n: list(interleaved({"a": int}, repeats=n)),
    "interleaved warmup": lambda model, n: list(interleaved({"a": int}, repeats=1, warmup=n)),
    "threads count": lambda model, n: enter(threads(n)),
}
"""A call for each argument that is an integer, by the names of both."""


@pytest.mark.parametrize("call", INTEGERS.values(), ids=INTEGERS)
@pytest.mark.parametrize(
    "three", [3, np.int64(3), np.int32(3), np.uint8(3), torch.tensor(3)], ids=lambda n: str(type(n))
)
def test_an_integer_may_be_of_any_type(model: GPT, call: Callable, three: object) -> None:
    """Numbers that come out of an array are as good as typed ones."""
    call(model, three)


@pytest.mark.parametrize(("name", "call"), INTEGERS.items(), ids=INTEGERS)
@pytest.mark.parametrize(
    "bad", [3.0, "3", True, np.True_, np.float64(3), [3], torch.tensor(3.0), torch.tensor(True)],
    ids=repr,
)  # fmt: skip
def test_what_is_no_integer_is_refused_at_the_call(
    model: GPT, name: str, call: Callable, bad: object
) -> None:
    """Found out later, it would fail in another layer's words, or in the middle of a text."""
    with pytest.raises(ValueError, match=r"must be (an|None or an) integer") as error:
        call(model, bad)
    argument = {"id": "rows[0][0]"}.get(name.split()[1], name.split()[1])
    assert str(error.value).startswith(f"{argument} must be")
    assert f"got {bad!r}" in str(error.value)


NUMBERS: dict[str, Callable[[GPT, object], object]] = {
    "generate temperature": lambda model, x: generate(model, IDX, 1, temperature=x),
    "decode_steps temperature": lambda model, x: decode_steps(model, IDX, 1, temperature=x),
    "decode_steps top_p": lambda model, x: decode_steps(model, IDX, 1, top_p=x),
    "sample_next temperature": lambda model, x: sample_next(LOGITS, x),
    "sample_next top_p": lambda model, x: sample_next(LOGITS, top_p=x),
    "sample_next top_p of greedy": lambda model, x: sample_next(LOGITS, 0, top_p=x),
    "trace_step temperature": lambda model, x: trace_step(model, IDX, temperature=x),
    "verify_cache atol": lambda model, x: verify_cache(model, IDX, 1, atol=x),
    "rotate base": lambda model, x: rotate(torch.ones(1, 2), torch.tensor([1]), x),
    "GPTConfig dropout": lambda model, x: GPTConfig(dropout=x),
    "spread samples": lambda model, x: spread([x]),
}
"""A call for each argument that is a real number."""


@pytest.mark.parametrize("call", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize(
    "half",
    [0.5, np.float32(0.5), np.float64(0.5), torch.tensor(0.5), Fraction(1, 2), Decimal("0.5")],
    ids=lambda x: str(type(x)),
)
def test_a_number_may_be_of_any_type(model: GPT, call: Callable, half: object) -> None:
    """Settings come out of arrays and files as well."""
    call(model, half)


@pytest.mark.parametrize(("name", "call"), NUMBERS.items(), ids=NUMBERS)
@pytest.mark.parametrize("bad", ["0.5", True, np.True_, 0.5j, [0.5], b"1"], ids=repr)
def test_what_is_no_number_is_refused_at_the_call(
    model: GPT, name: str, call: Callable, bad: object
) -> None:
    """Guards against a TypeError of `math.isfinite`, and against True as a temperature."""
    with pytest.raises(ValueError, match=f"^{name.split()[1]} must be a number") as error:
        call(model, bad)
    assert f"got {bad!r}" in str(error.value)


@pytest.mark.parametrize("bad", [10**400, -(10**400)])
def test_an_integer_beyond_all_floats_is_out_of_range(bad: int) -> None:
    """Guards against an OverflowError from the conversion."""
    with pytest.raises(ValueError, match="temperature must be finite and at least 0"):
        sample_next(LOGITS, bad)


def test_settings_of_another_type_mean_the_same(model: GPT) -> None:
    """The refusal of a type that is fine was the fault; a changed meaning would be worse."""

    def write(**settings: object) -> list[int]:
        generator = torch.Generator().manual_seed(1)
        return generate(model, IDX, 20, generator=generator, **settings).tokens[0].tolist()

    assert write(temperature=0.5, top_k=3, top_p=0.75) == write(
        temperature=np.float32(0.5), top_k=np.int64(3), top_p=torch.tensor(0.75)
    )
    assert write(top_k=10**30) == write()


BAD_GENERATORS = [(5, "None or a torch.Generator, got 5"), ("cpu", "None or a torch.Generator")]


@pytest.mark.parametrize(("bad", "message"), BAD_GENERATORS)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_what_is_no_generator_is_refused_at_the_call(
    model: GPT, bad: object, message: str, temperature: float
) -> None:
    """Guards against torch's own words at the first draw, and against silence where none is."""
    for call in (
        lambda: decode_steps(model, IDX, 2, temperature=temperature, generator=bad),
        lambda: sample_next(LOGITS, temperature, generator=bad),
        lambda: trace_step(model, IDX, temperature=temperature, generator=bad),
    ):
        with pytest.raises(ValueError, match=f"^generator must be {re.escape(message)}"):
            call()


def test_a_generator_of_another_device_is_refused() -> None:
    """It would fail at the first draw, in torch's words."""
    with pytest.raises(ValueError, match="generator must draw on meta, where the logits are, got"):
        check_generator("generator", torch.Generator(), torch.device("meta"))


def own() -> torch.Generator:
    """Make a generator."""
    return torch.Generator().manual_seed(7)


ONE = own()


@pytest.mark.parametrize(
    ("generators", "message"),
    [
        (iter([own(), own()]), "generators must be a sequence"),
        (own(), "generators must be a sequence"),
        ([own(), None], r"generators\[1\] must be a torch.Generator, got None"),
        ([own(), 5], r"generators\[1\] must be None or a torch.Generator, got 5"),
        ([ONE, ONE], "generators must be different objects, got one for several rows"),
    ],
)
def test_generators_are_one_a_row(model: GPT, generators: object, message: str) -> None:
    """One object for two rows shares its draws out, which `generators` promises not to do."""
    with pytest.raises(ValueError, match=message):
        decode_steps(model, IDX.expand(2, -1), 2, generators=generators)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: generate(model, [[1, 2]], 2), "idx must be an int64 tensor .* got a list"),
        (lambda model: generate(model, np.ones((1, 2), int), 2), "idx must be .* got a ndarray"),
        (lambda model: trace_step(model, [[1, 2]]), "idx must be an int64 tensor, got a list"),
        (lambda model: generate(model, IDX, 2, key_mask=[[True] * 3]), "key_mask .* got a list"),
        (lambda model: sample_next([[1.0, 2.0]]), "logits must be a real tensor"),
        (lambda model: sample_next(LOGITS + 0j), "logits must be a real tensor"),
        (lambda model: model(IDX.int()), "idx must be int64, got torch.int32"),
        (lambda model: model(IDX.float()), "idx must be int64, got torch.float32"),
        (lambda model: model(IDX, position_ids=IDX.float()), "position_ids must be int64"),
        (lambda model: model(IDX, targets=IDX.float()), "targets must be int64"),
        (lambda model: left_pad(iter([[1]]), 0), "rows must be a sequence of rows"),
    ],
)
def test_what_is_no_tensor_is_named(model: GPT, call: Callable, message: str) -> None:
    """Guards against an AttributeError, or an error from inside torch."""
    with pytest.raises(ValueError, match=message):
        call(model)


def test_a_spread_refuses_what_has_no_order() -> None:
    """A median with NaN among the samples depends on where it stands."""
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="samples must be finite numbers"):
            spread([1.0, bad, 2.0])


def test_a_step_of_numpy_numbers_runs(model: GPT) -> None:
    """Guards what follows the check: the value that goes on is a Python integer."""
    rows: list[Tensor] = [step.token for step in decode_steps(model, IDX, np.int64(3))]
    assert len(rows) == 3
    assert left_pad([[np.int64(1)], [2, 3]], np.int64(0))[0].tolist() == [[0, 1], [2, 3]]
