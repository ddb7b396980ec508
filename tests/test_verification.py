"""Verification: it finds every fault that is put in, excuses rounding alone, and says so."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DynamicCache

import lab35.model
from lab35 import GPT, GrowingCache, KVCache, Tokenizer, causal_mask, generate, position_ids
from lab35.verification import BARS, Divergence, VerifyReport, verify, verify_cache
from lab35_course.peers import to_hugging_face

Score = Callable[[Tensor], Tensor]
NAN, INF = math.nan, math.inf
IDX = torch.tensor([[1, 2, 3]])


def cached(model: GPT, cache: KVCache | GrowingCache) -> Score:
    """Decode with lab35's own cache."""
    return lambda new: model(new, cache=cache)[0][:, -1]


def uncached(model: GPT) -> Score:
    """Recompute everything."""
    return lambda tokens: model(tokens)[0][:, -1]


def script(*steps: list[list[float]]) -> Score:
    """Return one step's logits after another, each (B, V), whatever is fed."""
    rows = iter(steps)
    return lambda tokens: torch.tensor(next(rows), dtype=torch.float64)


def one_step(found: list[float], expected: list[float], **options: float) -> VerifyReport:
    """Verify a single row of logits against another."""
    return verify(script([found]), script([expected]), IDX, 1, **options)


# --- A cache that works --------------------------------------------------------------------------


@pytest.mark.parametrize(("P", "steps"), [(1, 1), (5, 33), (100, 29)])
def test_the_cache_of_this_course_passes(
    model: GPT, passage: list[int], P: int, steps: int
) -> None:
    """The trained model's cache is right up to the last position: 100 + 29 tokens fill 128."""
    report = verify_cache(model, torch.tensor([passage[:P]]), steps)
    assert report.passed, report
    assert report.tokens_equal
    assert report.steps == steps
    assert report.max_abs_logit_diff < 1e-4


def test_the_report_is_about_the_text_that_generate_writes(model: GPT, prompt: Tensor) -> None:
    """A verification of some other text would prove nothing about this one."""
    report = verify_cache(model, prompt, 30)
    assert [list(row) for row in report.tokens] == generate(
        model, prompt, 30, temperature=0
    ).tokens.tolist()
    assert report.prompt_length == prompt.shape[1]


def test_the_margins_are_those_of_one_forward_over_the_text(model: GPT, prompt: Tensor) -> None:
    """Margins taken again from a single pass, which knows nothing of steps."""
    steps, P = 40, prompt.shape[1]
    report = verify_cache(model, prompt, steps)
    with torch.inference_mode():
        logits = model(torch.tensor(report.tokens)[:, :-1])[0][0, P - 1 :]  # (steps, V)
    best = logits.topk(2).values
    expected = best[:, 0] - best[:, 1]
    torch.testing.assert_close(torch.tensor(report.margins), expected, atol=1e-4, rtol=0)
    assert report.min_margin == min(report.margins)
    assert report.max_abs_logit_diff == max(report.differences) > 0
    assert report.safety_factor == report.min_margin / report.max_abs_logit_diff


def test_maxima_come_by_sixteen_steps() -> None:
    """35 steps are three groups, the last one short, and no step is left out."""
    expected = [[[4.0, 0.0]]] * 35
    found = [[[4.0 + 0.125 * step, 0.0]] for step in range(35)]
    report = verify(script(*found), script(*expected), IDX, 35)
    assert report.maxima_per_16_steps == (0.125 * 15, 0.125 * 31, 0.125 * 34)
    assert report.max_abs_logit_diff == 0.125 * 34
    assert report.margins == (4.0,) * 35


def test_a_batch_is_as_good_as_its_worst_row() -> None:
    """Differences are maxima and margins minima over rows; a divergence names its row."""
    expected = [[3.0, 1.0, 0.0], [2.0, 1.5, 0.0], [5.0, 0.0, 0.0]]
    found = [[3.0, 1.0, 0.0], [1.0, 1.75, 0.0], [5.5, 0.0, 0.0]]
    report = verify(script(found), script(expected), IDX.expand(3, -1), 1)
    assert report.differences == (1.0,)
    assert report.margins == (0.5,)
    assert report.divergences == (Divergence(0, 1, 1, 0, 0.5, excused=False),)
    assert not report.passed


def test_each_row_of_a_batch_is_verified(model: GPT, passage: list[int]) -> None:
    """Rows of a batch decode what they decode alone."""
    idx = torch.tensor([passage[:12], passage[20:32], passage[40:52]])
    report = verify_cache(model, idx, 20)
    assert report.passed, report
    for row in range(3):
        assert report.tokens[row] == verify_cache(model, idx[row : row + 1], 20).tokens[0]


def test_the_model_is_left_as_it_was(tiny_model: GPT) -> None:
    """Dropout is off while verifying, and every mode, and the way to a gradient, is restored."""
    model = GPT(replace(tiny_model.config, dropout=0.5))
    model.train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    report = verify_cache(model, IDX, 8)
    assert report.passed, report
    assert [module.training for module in model.modules()] == modes
    model(IDX, targets=IDX)[1].backward()


# --- The bar -------------------------------------------------------------------------------------


def test_the_bar_is_about_rounding(model: GPT, prompt: Tensor) -> None:
    """Float32 passes at 1e-4 and fails at 1e-9; the same weights in float64 pass at 1e-9."""
    assert verify_cache(model, prompt, 24).passed
    assert not verify_cache(model, prompt, 24, atol=1e-9).passed
    assert verify_cache(copy.deepcopy(model).double(), prompt, 24, atol=1e-9).passed


def test_equal_tokens_do_not_pass_for_equal_logits() -> None:
    """A fault that changes no argmax is a fault."""
    report = one_step([5.0, 1.0], [5.0, 1.5])
    assert report.tokens_equal
    assert report.max_abs_logit_diff == 0.5
    assert not report.passed
    assert "FAILED" in str(report)
    assert "NOT within" in str(report)


def test_a_difference_at_the_bar_is_within_it() -> None:
    """`atol` is the largest difference allowed."""
    assert one_step([5.0, 1.0], [5.0, 1.25], atol=0.25).passed
    assert not one_step([5.0, 1.0], [5.0, 1.25], atol=0.249).passed


@pytest.mark.parametrize(
    ("margin", "excused"),
    [(0.0, True), (3e-7, True), (9e-5, True), (1.5e-4, True), (1.9e-4, True), (2.1e-4, False)],
)
def test_a_flip_is_excused_up_to_twice_the_bar_and_told(margin: float, excused: bool) -> None:
    """Two logits that each move by up to `atol` close twice that: half or double the rule fails."""
    report = one_step([-1e-6, 1e-6, -4.0], [margin / 2, -margin / 2, -4.0])
    assert (report.max_abs_logit_diff <= 1e-4) == excused
    assert not report.tokens_equal
    assert report.passed == excused
    first = report.first_divergence
    assert (first.step, first.row, first.decoded, first.expected) == (0, 0, 1, 0)
    assert first.margin == pytest.approx(margin, abs=1e-15)
    assert first.excused == excused
    assert "1 instead of 0" in str(report)
    assert "0 of 1 choices equal" in str(report)
    assert ("excused, within twice atol" in str(report)) == excused
    assert ("a fault, not rounding" in str(report)) == (not excused)


@pytest.mark.parametrize(("margin", "excused"), [(0.5, True), (0.5 + 2**-40, False)])
def test_a_margin_of_twice_the_bar_is_the_last_to_be_excused(margin: float, excused: bool) -> None:
    """The end of the range, in numbers that floats hold exactly."""
    report = one_step([-1.0, 1.0], [margin, 0.0], atol=0.25)
    assert report.first_divergence.excused == excused


def test_a_close_race_excuses_no_third_token() -> None:
    """The margin of a divergence is to the token that was decoded, not to the second best."""
    report = one_step([0.0, 0.0, 0.5], [1e-6, 0.0, -3.0], atol=1e-4)
    assert report.margins == (1e-6,)
    assert report.first_divergence.margin == pytest.approx(3.0)
    assert not report.first_divergence.excused


def test_an_excused_flip_does_not_excuse_a_difference() -> None:
    """Another logit that moved too far still fails the run."""
    report = one_step([0.0, 1e-6, -3.0], [1e-6, 0.0, -4.0])
    assert report.first_divergence.excused
    assert not report.passed


def test_every_excused_flip_is_printed_and_one_fault() -> None:
    """No number of excuses is folded away, and a broken cache does not flood the terminal."""
    near, swapped, wrong = [[1e-6, 0.0, -9.0]], [[0.0, 1e-6, -9.0]], [[0.0, -1.0, 9.0]]
    expected = [near] * 8
    report = verify(script(*[swapped] * 5, *[wrong] * 3), script(*expected), IDX, 8)
    assert [each.excused for each in report.divergences] == [True] * 5 + [False] * 3
    lines = str(report).splitlines()
    assert sum("excused" in line for line in lines) == 5
    assert sum("a fault" in line for line in lines) == 1
    assert lines[-1] == "  and 2 more like the last"
    passed = verify(script(*[swapped] * 5), script(*[near] * 5), IDX, 5)
    assert passed.passed
    assert "passed" in str(passed)
    assert str(passed).count("excused") == 5


LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=4, max_size=4)
NOISE = st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=4)


@given(expected=LOGITS, noise=NOISE, scale=st.sampled_from([1.0, 1e-2, 1e-4, 1e-6]))
def test_a_safety_factor_above_two_rules_a_flip_out(
    expected: list[float], noise: list[float], scale: float
) -> None:
    """Two logits that each move by d cross only if they were less than 2·d apart."""
    found = [a + scale * b for a, b in zip(expected, noise, strict=True)]
    report = one_step(found, expected, atol=10)
    assert report.tokens_equal or report.safety_factor <= 2 + 1e-9
    assert report.passed
    assert bool(report) == report.passed


@given(expected=LOGITS, noise=NOISE)
def test_differences_within_the_bar_are_never_called_a_fault(
    expected: list[float], noise: list[float]
) -> None:
    """Whatever the choices: a rule stricter than twice the bar would accuse a right cache."""
    found = [a + 0.99 * b for a, b in zip(expected, noise, strict=True)]
    report = one_step(found, expected, atol=1.0)
    assert all(divergence.excused for divergence in report.divergences)
    assert report.passed


# --- The bar of a type ---------------------------------------------------------------------------

HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_right_cache_in_few_digits_passes(
    model: GPT, passage: list[int], dtype: torch.dtype
) -> None:
    """At 1e-4 it would fail at its first decode step: the bar knows the type of the weights."""
    idx = torch.tensor([passage[:12], passage[20:32], passage[40:52]])
    half = copy.deepcopy(model).to(dtype)
    report = verify_cache(half, idx, 60)
    assert report.passed, report
    assert report.atol == BARS[dtype] > report.max_abs_logit_diff > 1e-4
    assert not verify_cache(half, idx, 60, atol=1e-4).passed
    assert verify(cached(half, KVCache.for_model(half, 3)), uncached(half), idx, 60).passed


def test_float64_has_a_bar_of_its_own(
    model: GPT, prompt: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that were rounded to float32 pass for a cache in float32, and not for one in float64."""
    write = KVCache.write
    monkeypatch.setattr(
        KVCache, "write", lambda self, n, k, v: write(self, n, k.float().to(k.dtype), v)
    )
    assert verify_cache(model, prompt, 24).passed
    report = verify_cache(copy.deepcopy(model).double(), prompt, 24)
    assert report.atol == 1e-9
    assert 1e-9 < report.max_abs_logit_diff < 1e-4
    assert not report.passed


@pytest.mark.parametrize(
    ("found", "expected", "bar"),
    [
        (torch.float32, torch.float32, 1e-4),
        (torch.float64, torch.float64, 1e-4),
        (torch.float16, torch.float32, 2**-5),
        (torch.float64, torch.bfloat16, 2**-2),
        (torch.float16, torch.bfloat16, 2**-2),
    ],
)
def test_a_pair_is_measured_by_its_coarser_side(
    found: torch.dtype, expected: torch.dtype, bar: float
) -> None:
    """Few digits on either side move the difference; many do not tell what was computed with."""
    ours, theirs = (torch.tensor([[4.0, 1.0]], dtype=dtype) for dtype in (found, expected))
    assert verify(lambda new: ours, lambda tokens: theirs, IDX, 2).atol == bar
    assert verify(lambda new: ours, lambda tokens: theirs, IDX, 2, atol=0.5).atol == 0.5


# --- Numbers that are none -----------------------------------------------------------------------

FINE = [1.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([NAN, 0.0, -1.0], FINE),
        (FINE, [1.0, NAN, -1.0]),
        ([1.0, 0.0, NAN], [1.0, 0.0, NAN]),
        ([NAN] * 3, [NAN] * 3),
        ([INF, 0.0, -1.0], [INF, 0.0, -1.0]),
        ([-INF] * 3, [-INF] * 3),
        ([1.0, 0.0, -INF], FINE),
        (FINE, [1.0, 0.0, -INF]),
    ],
)
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("row", [0, 1])
def test_what_is_not_a_number_fails(
    found: list[float], expected: list[float], bad: int, row: int
) -> None:
    """NaN compares false with everything, and must not slip through, wherever it stands."""
    ours, theirs = ([[FINE, FINE] for _ in range(3)] for _ in range(2))
    ours[bad][row], theirs[bad][row] = found, expected
    report = verify(script(*ours), script(*theirs), IDX.expand(2, -1), 3, atol=1e6)
    assert not report.passed
    assert not report
    assert "FAILED" in str(report)
    assert "NOT within" in str(report)
    assert f"at step {bad}" in str(report)
    assert not report.max_abs_logit_diff <= 1e6
    told = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert told["passed"] is False
    assert told["max_abs_logit_diff"] is None


def test_forbidden_tokens_agree() -> None:
    """−∞ for the same tokens on both sides is how a decoder forbids them: no difference."""
    report = one_step([1.0, 0.0, -INF], [1.0, 0.0, -INF])
    assert report.passed
    assert report.differences == (0.0,)
    assert report.safety_factor == INF
    assert report.as_dict()["safety_factor"] is None


# --- Faults, put in and found --------------------------------------------------------------------


def position_one_too_high(patch: pytest.MonkeyPatch) -> None:
    """A decoded token is embedded one position further on."""
    embed = GPT._embed
    patch.setattr(GPT, "_embed", lambda self, idx, p, at: embed(self, idx, p, at + (at > 0)))


def position_from_zero(patch: pytest.MonkeyPatch) -> None:
    """A decoded token is the first of its input, so it is embedded at position 0."""
    embed = GPT._embed
    patch.setattr(GPT, "_embed", lambda self, idx, p, at: embed(self, idx, p, 0))


def mask_from_the_top_left(patch: pytest.MonkeyPatch) -> None:
    """`is_causal=True` against a longer past: a decoded token sees the first key alone."""
    attend = F.scaled_dot_product_attention

    def wrong(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        if q.shape[2] < k.shape[2]:
            options |= {"attn_mask": None, "is_causal": True}
        return attend(q, k, v, **options)

    patch.setattr(lab35.model.F, "scaled_dot_product_attention", wrong)


def each_layer_advances(patch: pytest.MonkeyPatch) -> None:
    """A chunk is counted where it is written, so layer 1 starts where layer 0 ended."""
    write = KVCache.write

    def hasty(self: KVCache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        stored = write(self, layer, k, v)
        self.length += k.shape[2]
        return stored

    patch.setattr(KVCache, "write", hasty)
    patch.setattr(KVCache, "advance", lambda self, t_new: None)


def length_stands_still(patch: pytest.MonkeyPatch) -> None:
    """A decoded token's key is written over the last one's."""
    advance = KVCache.advance
    patch.setattr(KVCache, "advance", lambda self, n: advance(self, n) if n > 1 else None)


def values_of_another_layer(patch: pytest.MonkeyPatch) -> None:
    """A decoded token's value is stored in the layer's neighbour."""
    write = KVCache.write

    def astray(self: KVCache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        write(self, layer, k, v)
        end = self.length + k.shape[2]
        return self.k[layer, :, :, :end], self.v[max(0, layer - 1), :, :, :end]

    patch.setattr(KVCache, "write", astray)


def rows_swapped(patch: pytest.MonkeyPatch) -> None:
    """Two rows of a batch read each other's keys."""
    write = KVCache.write

    def crossed(self: KVCache, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = write(self, layer, k, v)
        return (keys.flip(0), values) if self.length else (keys, values)

    patch.setattr(KVCache, "write", crossed)


def too_few_digits(patch: pytest.MonkeyPatch) -> None:
    """Keys are kept in bfloat16, which changes no greedy token for a while."""
    write = KVCache.write
    patch.setattr(
        KVCache, "write", lambda self, n, k, v: write(self, n, k.bfloat16().to(k.dtype), v)
    )


FAULTS = [
    position_one_too_high,
    position_from_zero,
    mask_from_the_top_left,
    each_layer_advances,
    length_stands_still,
    values_of_another_layer,
    rows_swapped,
    too_few_digits,
]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("fault", FAULTS[:-1], ids=lambda fault: fault.__name__)
def test_a_fault_is_found_in_few_digits_too(
    model: GPT,
    passage: list[int],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable,
    dtype: torch.dtype,
) -> None:
    """A bar that is wide enough for rounding must not be wide enough for a mistake."""
    half = copy.deepcopy(model).to(dtype)
    fault(monkeypatch)
    # Where each layer advances, the block is used up after 16 of these steps.
    idx = torch.tensor([passage[:12], passage[20:32]])
    report = verify_cache(half, idx, 16)
    assert not report.passed, report
    assert report.max_abs_logit_diff > report.atol


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_within_two_decode_steps(
    model: GPT, passage: list[int], monkeypatch: pytest.MonkeyPatch, fault: Callable
) -> None:
    """Each classic mistake moves the logits far over the bar as soon as the cache is read."""
    idx = torch.tensor([passage[:12], passage[20:32]])
    assert verify_cache(model, idx, 3).passed
    fault(monkeypatch)
    report = verify_cache(model, idx, 3)
    assert not report.passed, report
    assert max(report.differences[1:]) > 10 * report.atol


def test_a_fault_can_keep_every_token(
    model: GPT, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chapter says that comparing texts is not enough: here they are equal, and wrong."""
    idx = torch.tensor([tokenizer.encode("The door opened")])
    position_one_too_high(monkeypatch)
    report = verify_cache(model, idx, 16)
    assert report.tokens_equal
    assert not report.passed


def test_one_step_reads_no_cache(
    model: GPT, prompt: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that the docstring names: the prefill alone cannot show a decode fault."""
    position_one_too_high(monkeypatch)
    report = verify_cache(model, prompt, 1)
    assert report.passed
    assert "1 prefill + 0 decode steps" in str(report)


def test_chunks_are_verified_by_a_decoder_that_feeds_them(
    model: GPT, prompt: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another limit: one token a step needs no mask, so only a pair that feeds chunks finds it."""
    monkeypatch.setattr(lab35.model, "causal_mask", lambda n, t, at, **on: causal_mask(n, t, 0))
    assert verify_cache(model, prompt, 8).passed

    cache = KVCache(model.config, 1)

    def in_pieces(new: Tensor) -> Tensor:
        return [model(piece, cache=cache)[0][:, -1] for piece in new.split(4, dim=1)][-1]

    report = verify(in_pieces, uncached(model), prompt, 8)
    assert not report.passed, report


# --- Any pair of callables -----------------------------------------------------------------------


def test_the_pair_is_fed_as_promised(model: GPT, prompt: Tensor) -> None:
    """The decoder gets what is new, the reference all, and the last sample goes to neither."""
    fed: list[Tensor] = []
    seen: list[Tensor] = []
    decode, reference = cached(model, KVCache(model.config, 1)), uncached(model)
    report = verify(
        lambda new: fed.append(new) or decode(new),
        lambda tokens: seen.append(tokens) or reference(tokens),
        prompt,
        6,
    )
    P = prompt.shape[1]
    assert [new.shape[1] for new in fed] == [P, 1, 1, 1, 1, 1]
    assert torch.cat(fed, dim=1).tolist() == seen[-1].tolist() == [list(report.tokens[0][:-1])]
    assert [tokens.shape[1] for tokens in seen] == [P, P + 1, P + 2, P + 3, P + 4, P + 5]
    report_of_model = verify_cache(model, prompt, 6)
    assert replace(report, engine="eager", engine_asked="eager") == report_of_model


def test_the_prefix_follows_the_decoder_after_a_flip() -> None:
    """One divergence stays one: the reference scores what the decoder wrote, not its own text."""
    seen = []

    def reference(tokens: Tensor) -> Tensor:
        seen.append(tokens.tolist())
        return torch.tensor([[1e-6, 0.0, -9.0]])

    report = verify(script([[0.0, 1e-6, -9.0]], [[1e-6, 0.0, -9.0]]), reference, IDX, 2)
    assert seen == [[[1, 2, 3]], [[1, 2, 3, 1]]]
    assert report.tokens == ((1, 2, 3, 1, 0),)
    assert len(report.divergences) == 1


def test_a_shared_buffer_is_not_compared_with_itself() -> None:
    """A pair may return one buffer that each overwrites, as graphs with static outputs do."""
    buffer = torch.zeros(1, 3, dtype=torch.float64)

    def decode(new: Tensor) -> Tensor:
        return buffer.copy_(torch.tensor([[5.0, 0.0, 0.0]]))

    def reference(tokens: Tensor) -> Tensor:
        return buffer.copy_(torch.tensor([[4.0, 0.0, 0.0]]))

    assert verify(decode, reference, IDX, 1).max_abs_logit_diff == 1.0


def test_a_decoder_that_remembers_another_text_is_found(model: GPT, prompt: Tensor) -> None:
    """A cache that was not reset between two texts."""
    cache = KVCache(model.config, 1)
    assert verify(cached(model, cache), uncached(model), prompt, 4).passed
    assert not verify(cached(model, cache), uncached(model), prompt, 4).passed
    cache.reset()
    assert verify(cached(model, cache), uncached(model), prompt, 4).passed


def test_a_growing_cache_passes(model: GPT, prompt: Tensor) -> None:
    """Other caches than the one `verify_cache` makes go through the pair."""
    assert verify(cached(model, GrowingCache(model.config, 1)), uncached(model), prompt, 8).passed


def test_a_padded_batch_passes_with_masks_and_fails_without(model: GPT, passage: list[int]) -> None:
    """Padding is the caller's business, and a pair of callables can carry it."""
    rows = [passage[:3], passage[10:21]]
    mask = torch.tensor([[False] * 8 + [True] * 3, [True] * 11])
    idx = torch.tensor([[0] * 8 + rows[0], rows[1]])

    def alone(tokens: Tensor) -> Tensor:
        """Score each row by itself, without its padding."""
        return torch.cat([model(tokens[:1, 8:])[0][:, -1], model(tokens[1:])[0][:, -1]])

    def padded(masked: bool) -> Score:
        cache, visible = KVCache(model.config, 2), mask[:, :0]

        def decode(new: Tensor) -> Tensor:
            nonlocal visible
            fresh = torch.ones(new.shape, dtype=torch.bool)
            visible = torch.cat((visible, mask if visible.shape[1] == 0 else fresh), dim=1)
            options = {}
            if masked:
                where = position_ids(visible)[:, -new.shape[1] :]
                options = {"key_mask": visible, "position_ids": where}
            return model(new, cache=cache, **options)[0][:, -1]

        return decode

    assert verify(padded(masked=True), alone, idx, 8).passed
    assert not verify(padded(masked=False), alone, idx, 8).passed


def hugging_face(peer: nn.Module, shift: int = 0) -> Score:
    """Decode with Hugging Face's GPT-2 and its own cache, positions told."""
    past = DynamicCache()

    def decode(new: Tensor) -> Tensor:
        seen = past.get_seq_length()
        where = torch.arange(seen, seen + new.shape[1]) + (shift if seen else 0)
        return peer(new, cache=past, position_ids=where[None]).logits[:, -1]

    return decode


def test_the_cache_of_hugging_face_passes(model: GPT, passage: list[int]) -> None:
    """Somebody else's model and cache, through the same door; with one position off, it fails."""
    peer = to_hugging_face(model)
    idx = torch.tensor([passage[:9], passage[30:39]])

    def reference(tokens: Tensor) -> Tensor:
        return peer(tokens, use_cache=False).logits[:, -1]

    report = verify(hugging_face(peer), reference, idx, 12)
    assert report.passed, report
    assert not verify(hugging_face(peer, shift=1), reference, idx, 12).passed


def test_the_reference_can_be_a_peer(model: GPT, prompt: Tensor) -> None:
    """A reference that shares no code with the cache: a fault in both would not cancel out."""
    peer = to_hugging_face(model)
    report = verify(
        cached(model, KVCache(model.config, 1)),
        lambda tokens: peer(tokens, use_cache=False).logits[:, -1],
        prompt,
        24,
    )
    assert report.passed, report


# --- What it tells -------------------------------------------------------------------------------


def test_the_dictionary_holds_everything_and_is_json(model: GPT, prompt: Tensor) -> None:
    """What goes into a file comes back the same."""
    report = verify_cache(model, prompt, 20)
    told = report.as_dict()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert set(told) == {
        "passed",
        "steps",
        "engine",
        "engine_asked",
        "prompt_length",
        "atol",
        "max_abs_logit_diff",
        "maxima_per_16_steps",
        "min_margin",
        "safety_factor",
        "tokens",
        "tokens_equal",
        "first_divergence",
        "divergences",
        "differences",
        "margins",
    }
    assert told["differences"] == list(report.differences)
    assert len(told["maxima_per_16_steps"]) == 2
    assert told["first_divergence"] is None
    flipped = one_step([0.0, 1.0], [1.0, 0.0]).as_dict()
    assert flipped["divergences"] == [flipped["first_divergence"]]
    assert flipped["first_divergence"] == {
        "step": 0,
        "row": 0,
        "decoded": 1,
        "expected": 0,
        "margin": 1.0,
        "excused": False,
    }


def test_the_summary_is_a_few_lines() -> None:
    """The lines that a terminal shows, word for word."""
    quarter = verify(
        script([[4.0, 1.0]], [[4.0, 1.25]]), script([[4.0, 1.0]], [[4.0, 1.0]]), IDX, 2, atol=0.5
    )
    assert str(quarter).splitlines() == [
        "verification passed: 1 prefill + 1 decode steps, batch of 1, atol 0.5",
        "  largest logit difference 2.5e-01 at step 1, within atol",
        "  smallest margin 3.0e+00, 12.0 times the difference",
        "  tokens: 2 of 2 choices equal",
    ]


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, r"steps must lie in \[1, 126\] .* got 0"),
        ({"steps": -3}, r"steps must lie in \[1, 126\] .* got -3"),
        ({"steps": 2.0}, "steps must be an integer, got 2.0"),
        ({"steps": True}, "steps must be an integer, got True"),
        ({"atol": "1e-4"}, "atol must be a number, positive and finite, got '1e-4'"),
        ({"idx": [[1, 2]]}, "idx must be an int64 tensor .* got a list"),
        ({"steps": 127}, r"steps must lie in \[1, 126\] for a prompt of 3 .* 128, got 127"),
        ({"atol": 0.0}, "atol must be positive and finite, got 0.0"),
        ({"atol": -1e-4}, "atol must be positive and finite, got -0.0001"),
        ({"atol": NAN}, "atol must be positive and finite, got nan"),
        ({"atol": INF}, "atol must be positive and finite, got inf"),
        ({"idx": torch.tensor([1, 2])}, r"idx must be int64 with shape \(B, P\).*\(2,\)"),
        ({"idx": torch.tensor([[1, 512]])}, r"idx must lie in \[0, 512\).*1 to 512"),
        (
            {"idx": torch.zeros(1, 129, dtype=torch.int64)},
            "idx must hold at most block_size=128 tokens, got 129",
        ),
    ],
)
def test_bad_arguments_are_named(model: GPT, arguments: dict, message: str) -> None:
    """Each refusal names the argument, what was given, and what is allowed."""
    with pytest.raises(ValueError, match=message):
        verify_cache(model, **{"idx": IDX, "steps": 2} | arguments)


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        (torch.zeros(1, 3, 5), torch.zeros(1, 5), r"decode must return.*\(B, V\) = \(1, V\).*1, 3"),
        (torch.zeros(5), torch.zeros(1, 5), r"decode must return .* got shape \(5,\)"),
        (torch.zeros(1, 5), torch.zeros(2, 5), r"reference must return .* got shape \(2, 5\)"),
        (torch.zeros(1, 1), torch.zeros(1, 1), "V at least 2"),
        (torch.zeros(1, 5), torch.zeros(1, 6), "one vocabulary, got 5 and 6 tokens"),
    ],
)
def test_logits_of_another_shape_are_refused(found: Tensor, expected: Tensor, message: str) -> None:
    """Broadcasting would compare a row with many, or a whole text with its end."""
    with pytest.raises(ValueError, match=message):
        verify(lambda new: found, lambda tokens: expected, IDX, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"steps": 0}, "steps"), ({"atol": NAN}, "atol"), ({"idx": torch.zeros(1, 2)}, "idx")],
)
def test_a_pair_is_not_called_with_bad_arguments(options: dict, message: str) -> None:
    """The checks of `verify` stand on their own, and come before any state changes."""

    def never(tokens: Tensor) -> Tensor:
        raise AssertionError("called")

    with pytest.raises(ValueError, match=f"{message} must be"):
        verify(never, never, **{"idx": IDX, "steps": 2} | options)
