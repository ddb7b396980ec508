"""The end of the block: what is kept, what it costs, and that a refill changes nothing else."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab35 import (
    GPT,
    ContextLimitError,
    KVCache,
    decode_steps,
    generate,
    position_ids,
    sample_next,
    token_forwards,
)
from lab35.context import (
    refill_start,
    refill_token_forwards,
    rotate,
    slide_start,
    slide_token_forwards,
)

blocks = st.integers(1, 9)
prompts = st.integers(1, 14)
new_tokens = st.integers(0, 30)
seeds = st.integers(0, 2**16)


@pytest.fixture(scope="module")
def precise(tiny_model: GPT) -> GPT:
    """A small model in float64, where another shape of the same sum moves no choice."""
    return copy.deepcopy(tiny_model).double()


def random_prompt(model: GPT, B: int, P: int, seed: int) -> Tensor:
    """Draw token ids, shape (B, P)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (B, P), generator=generator)


@torch.inference_mode()
def by_brute_force(
    model: GPT,
    prompt: Tensor,
    N: int,
    block_size: int,
    *,
    mask: Tensor | None = None,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, float]:
    """Run the refilling loop without a cache: plain forwards over a window that is cut by hand.

    Returns:
        The text, greedy without a generator, and the smallest distance of its two best logits.
    """
    kept = max(1, block_size // 2)
    text, window, margin = prompt, prompt, float("inf")
    real = torch.ones_like(prompt, dtype=torch.bool) if mask is None else mask
    ended = torch.zeros(len(prompt), 1, dtype=torch.bool)
    for _ in range(N):
        if window.shape[1] > block_size:
            window, real = window[:, -kept:], real[:, -kept:]
        logits, _ = model(window, key_mask=real, position_ids=position_ids(real))
        best = logits[:, -1].topk(2).values
        margin = min(margin, (best[:, 0] - best[:, 1]).min().item())
        temperature = 0 if generator is None else 1.0
        token = sample_next(logits[:, -1], temperature, generator=generator)
        if eos_id is not None:
            token = token.masked_fill(ended, eos_id)
            ended = ended | (token == eos_id)
        text, window = (torch.cat((part, token), dim=1) for part in (text, window))
        real = torch.cat((real, torch.ones_like(ended)), dim=1)
        if eos_id is not None and ended.all():
            break
    return text, margin


# --- Columns and counts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "block_size", "slides_to", "refills_to"),
    [
        (1, 128, 0, 0),
        (128, 128, 0, 0),
        (129, 128, 1, 65),
        (300, 128, 172, 236),
        (8, 7, 1, 5),  # an odd block keeps the smaller half
        (3, 2, 1, 2),
        (2, 1, 1, 1),  # and any block keeps the newest token
    ],
)
def test_first_visible_column(
    length: int, block_size: int, slides_to: int, refills_to: int
) -> None:
    """The boundaries by hand: what fits is whole, and one more is cropped."""
    assert slide_start(length, block_size) == slides_to
    assert refill_start(length, block_size) == refills_to


@given(length=st.integers(1, 60), block_size=blocks)
def test_a_window_fits_and_ends_with_the_newest_token(length: int, block_size: int) -> None:
    """No policy feeds more than the block, or nothing; a refill leaves room unless one is all."""
    assert length - slide_start(length, block_size) == min(length, block_size)
    kept = length - refill_start(length, block_size)
    assert 1 <= kept <= block_size
    assert length <= block_size or kept < block_size or block_size == 1


@settings(max_examples=60)
@given(P=prompts, N=new_tokens, block_size=blocks)
def test_counts_are_what_runs(tiny_model: GPT, P: int, N: int, block_size: int) -> None:
    """A hook counts what the model is fed, for prompts on both sides of the block."""
    prompt = torch.zeros(1, P, dtype=torch.int64)
    for policy, formula in (
        ({"use_cache": False}, slide_token_forwards),
        ({"on_context_limit": "refill"}, refill_token_forwards),
    ):
        fed: list[int] = []
        hook = tiny_model.register_forward_pre_hook(
            lambda module, args, fed=fed: fed.append(args[0].shape[1])
        )
        made = generate(tiny_model, prompt, N, block_size=block_size, **policy)
        hook.remove()
        assert sum(fed) == made.token_forwards == formula(P, N, block_size)
        assert len(fed) == made.new_tokens.shape[1] == N
        assert max(fed, default=0) <= block_size


@given(P=st.integers(1, 20), N=st.integers(0, 20))
def test_counts_are_the_plain_ones_while_the_text_fits(P: int, N: int) -> None:
    """Far from the limit no policy costs anything."""
    assert slide_token_forwards(P, N, 40) == token_forwards(P, N, use_cache=False)
    assert refill_token_forwards(P, N, 40) == token_forwards(P, N, use_cache=True)


def test_a_long_refilled_text_costs_two_a_token() -> None:
    """The figure that the course quotes: 128 token-forwards make 65 tokens."""
    once, again = (refill_token_forwards(128, N, 128) for N in (1 + 65_000, 1 + 65_065))
    assert again - once == 128
    assert slide_token_forwards(128, 1000, 128) == 128_000


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (slide_start, (0, 8), "length must be at least 1, got 0"),
        (slide_start, (8, 0), "block_size must be at least 1, got 0"),
        (refill_start, (-1, 8), "length must be at least 1, got -1"),
        (refill_start, (8, -2), "block_size must be at least 1, got -2"),
        (slide_token_forwards, (0, 1, 8), "prompt_length must be at least 1, got 0"),
        (slide_token_forwards, (1, -1, 8), "new_tokens must be at least 0, got -1"),
        (refill_token_forwards, (0, 1, 8), "prompt_length must be at least 1, got 0"),
        (refill_token_forwards, (1, -1, 8), "new_tokens must be at least 0, got -1"),
        (refill_token_forwards, (1, 1, 0), "block_size must be at least 1, got 0"),
    ],
)
def test_sizes_that_cannot_be(function: object, arguments: tuple, message: str) -> None:
    """Each refusal names the argument, its value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        function(*arguments)


# --- Stop and raise ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["stop", "raise", "refill"])
@pytest.mark.parametrize("block_size", [1, 2, 7, 12])
def test_every_boundary_of_a_smaller_block(tiny_model: GPT, policy: str, block_size: int) -> None:
    """A block carries one token more than it has positions; only then do policies differ."""
    for P in range(1, block_size + 1):
        for N in (block_size - P, block_size - P + 1, block_size - P + 2):
            arguments = (tiny_model, torch.zeros(1, P, dtype=torch.int64), N)
            chosen = {"block_size": block_size, "on_context_limit": policy}
            if policy == "raise" and P + N > block_size + 1:
                message = f"all {block_size} positions are used after {N - 1} of {N} tokens"
                with pytest.raises(ContextLimitError, match=message):
                    generate(*arguments, **chosen)
                continue
            made = generate(*arguments, **chosen)
            if policy == "stop" and P + N > block_size + 1:
                assert (made.tokens.shape[1], made.stop_reason) == (block_size + 1, "context_limit")
            else:
                assert (made.tokens.shape[1], made.stop_reason) == (P + N, "max_new_tokens")


@pytest.mark.parametrize("policy", ["stop", "raise"])
def test_a_prompt_that_is_too_long_is_refused(tiny_model: GPT, policy: str) -> None:
    """What would have to be forgotten is not forgotten silently, even if nothing is asked for."""
    prompt = torch.zeros(1, 8, dtype=torch.int64)
    for N in (0, 1):
        with pytest.raises(ContextLimitError, match=r"block_size=7.*got 8; crop the prompt"):
            generate(tiny_model, prompt, N, block_size=7, on_context_limit=policy)
    generate(tiny_model, prompt[:, 1:], 1, block_size=7, on_context_limit=policy)


def test_a_prompt_that_is_too_long_is_cut(precise: GPT) -> None:
    """Sliding keeps the block, and refilling its last half; both return the prompt whole."""
    prompt = random_prompt(precise, 1, 20, seed=1)
    for policy, kept in (({"use_cache": False}, 7), ({"on_context_limit": "refill"}, 3)):
        whole = generate(precise, prompt, 5, temperature=0, block_size=7, **policy)
        cut = generate(precise, prompt[:, -kept:], 5, temperature=0, block_size=7, **policy)
        assert whole.new_tokens.tolist() == cut.new_tokens.tolist()
        assert whole.tokens[:, :20].tolist() == prompt.tolist()


# --- Refill --------------------------------------------------------------------------------------


def test_the_trained_model_refills(model: GPT, passage: list[int]) -> None:
    """Three refills of the real block: fed as promised, and the greedy text of plain forwards."""
    prompt = torch.tensor([passage[:120]])
    steps = list(decode_steps(model, prompt, 200, temperature=0, on_context_limit="refill"))
    fed = {n: step.fed for n, step in enumerate(steps, start=1) if step.fed != 1}
    assert fed == {1: 120, 10: 64, 75: 64, 140: 64}
    expected, margin = by_brute_force(model, prompt, 200, 128)
    assert margin > 1e-4, "pick a prompt whose choices are clear"
    written = torch.cat([step.token for step in steps], dim=1)
    assert written.tolist() == expected[:, 120:].tolist()


@settings(max_examples=60)
@given(B=st.integers(1, 3), P=prompts, N=new_tokens, block_size=blocks, seed=seeds)
def test_refilled_text_is_that_of_plain_forwards(
    precise: GPT, B: int, P: int, N: int, block_size: int, seed: int
) -> None:
    """For any prompt, length and block: the cache changes the cost and nothing else."""
    prompt = random_prompt(precise, B, P, seed)
    expected, margin = by_brute_force(precise, prompt, N, block_size)
    assume(margin > 1e-9)
    made = generate(
        precise, prompt, N, temperature=0, block_size=block_size, on_context_limit="refill"
    )
    assert made.tokens.tolist() == expected.tolist()
    assert made.stop_reason == "max_new_tokens"


@settings(max_examples=25)
@given(P=prompts, block_size=blocks, seed=seeds)
def test_refilled_draws_are_those_of_plain_forwards(
    precise: GPT, P: int, block_size: int, seed: int
) -> None:
    """Sampled too: a refill draws nothing and skips nothing."""
    prompt = random_prompt(precise, 2, P, seed)
    drawn = (torch.Generator().manual_seed(seed) for _ in range(2))
    expected, _ = by_brute_force(precise, prompt, 25, block_size, generator=next(drawn))
    made = generate(
        precise,
        prompt,
        25,
        generator=next(drawn),
        block_size=block_size,
        on_context_limit="refill",
    )
    assert made.tokens.tolist() == expected.tolist()


@settings(max_examples=40)
@given(data=st.data(), P=st.integers(1, 14), block_size=blocks, seed=seeds)
def test_refill_carries_the_padding_along(
    precise: GPT, data: st.DataObject, P: int, block_size: int, seed: int
) -> None:
    """A padded batch refills by columns, and each row is numbered from its own first token."""
    pads = data.draw(st.lists(st.integers(0, P - 1), min_size=2, max_size=3))
    mask = torch.tensor([[column >= pad for column in range(P)] for pad in pads])
    prompt = random_prompt(precise, len(pads), P, seed)
    expected, margin = by_brute_force(precise, prompt, 14, block_size, mask=mask)
    assume(margin > 1e-9)
    policy = {"temperature": 0, "block_size": block_size, "on_context_limit": "refill"}
    made = generate(precise, prompt, 14, key_mask=mask, **policy)
    assert made.tokens.tolist() == expected.tolist()
    other = torch.where(mask, prompt, (prompt + 1) % precise.config.vocab_size)
    again = generate(precise, other, 14, key_mask=mask, **policy)
    assert again.new_tokens.tolist() == made.new_tokens.tolist(), "padding was seen"


def test_a_short_row_loses_nothing_but_its_padding(precise: GPT) -> None:
    """While its real tokens are within the kept half, a row in a batch writes its own text."""
    block_size, P, N = 12, 12, 5
    prompt = random_prompt(precise, 2, P, seed=3)
    mask = torch.ones(2, P, dtype=torch.bool)
    mask[0, : P - 2] = False
    policy = {"temperature": 0, "block_size": block_size, "on_context_limit": "refill"}
    batch = generate(precise, prompt, N, key_mask=mask, **policy)
    assert batch.token_forwards == P + 6 + N - 2, "one refill, of six columns"
    alone = generate(precise, prompt[:1, -2:], N, **policy)
    assert batch.new_tokens[0].tolist() == alone.new_tokens[0].tolist()


@settings(max_examples=25)
@given(block_size=st.integers(1, 6), seed=seeds)
def test_rows_that_have_ended_stay_so_over_a_refill(
    precise: GPT, block_size: int, seed: int
) -> None:
    """Eos ends a row for good, and the loop when all have: refilling starts nothing anew."""
    prompt = random_prompt(precise, 3, 4, seed)
    drawn = [torch.Generator().manual_seed(seed) for _ in range(2)]
    settled = {"eos_id": 5, "generator": drawn[0]}
    expected, _ = by_brute_force(precise, prompt, 40, block_size, **settled)
    made = generate(
        precise,
        prompt,
        40,
        eos_id=5,
        generator=drawn[1],
        block_size=block_size,
        on_context_limit="refill",
    )
    assert made.tokens.tolist() == expected.tolist()
    ended = (made.new_tokens == 5).any(dim=1).all().item()
    assert made.stop_reason == ("eos" if ended else "max_new_tokens")


@pytest.mark.parametrize("policy", ["stop", "raise", "refill"])
def test_eos_on_the_last_position_is_no_limit(precise: GPT, policy: str) -> None:
    """The sample that cannot be fed need not be, when it ends the text."""
    prompt = random_prompt(precise, 1, 3, seed=0)
    chosen = {"temperature": 1.0, "block_size": 6}
    free = generate(precise, prompt, 4, generator=torch.Generator().manual_seed(0), **chosen)
    *before, eos_id = free.new_tokens[0].tolist()
    assert eos_id not in before, "pick a seed whose fourth token is new"
    made = generate(
        precise,
        prompt,
        20,
        generator=torch.Generator().manual_seed(0),
        eos_id=eos_id,
        on_context_limit=policy,
        **chosen,
    )
    assert made.new_tokens.tolist() == free.new_tokens.tolist()
    assert (made.stop_reason, made.token_forwards) == ("eos", 6)


def test_the_policy_is_the_caches_own(precise: GPT) -> None:
    """Without a cache there is nothing to refill: the loop slides, whatever it is told."""
    prompt = random_prompt(precise, 1, 9, seed=2)
    texts = {
        tuple(
            generate(
                precise,
                prompt,
                10,
                temperature=0,
                use_cache=False,
                block_size=6,
                on_context_limit=policy,
            )
            .tokens[0]
            .tolist()
        )
        for policy in ("stop", "raise", "refill")
    }
    assert len(texts) == 1


# --- Positions that cannot slide, and positions that can -----------------------------------------


@torch.inference_mode()
def test_a_crop_leaves_no_stored_vector_as_it_was(model: GPT, passage: list[int]) -> None:
    """Why a cache over learned positions cannot slide: every key and value has its own baked in."""
    text = torch.tensor([passage[:129]])
    before, after = (KVCache(model.config, batch_size=1) for _ in range(2))
    model(text[:, :128], cache=before)
    model(text[:, 1:], cache=after)
    for name in ("k", "v"):
        old, new = getattr(before, name)[:, 0, :, 1:], getattr(after, name)[:, 0, :, :-1]
        assert (old - new).abs().amax(dim=-1).min() > 1e-3


vectors = st.integers(1, 8).flatmap(
    lambda half: st.lists(
        st.floats(-4, 4, allow_nan=False), min_size=4 * half, max_size=4 * half
    ).map(lambda numbers: torch.tensor(numbers, dtype=torch.float64).view(2, 1, 2 * half))
)
places = st.integers(-(10**7), 10**7)


def at(x: Tensor, position: int) -> Tensor:
    """Turn one row (1, D)."""
    return rotate(x, torch.tensor([position]))


@given(pair=vectors, i=places, j=places, shift=places)
def test_scores_depend_on_the_distance_alone(pair: Tensor, i: int, j: int, shift: int) -> None:
    """R_i q · R_j k = R_{i+s} q · R_{j+s} k = q · R_{j−i} k: why a rotary window may slide."""
    q, k = pair
    score = at(q, i) @ at(k, j).T
    torch.testing.assert_close(score, at(q, i + shift) @ at(k, j + shift).T, atol=1e-6, rtol=0)
    torch.testing.assert_close(score, q @ at(k, j - i).T, atol=1e-6, rtol=0)


@given(pair=vectors, i=places, j=places)
def test_turns_add_up_and_keep_lengths(pair: Tensor, i: int, j: int) -> None:
    """A rotation keeps every norm, position 0 turns nothing, and two turns are their sum."""
    x, _ = pair
    assert torch.equal(at(x, 0), x)
    torch.testing.assert_close(at(x, i).norm(), x.norm())
    torch.testing.assert_close(at(at(x, i), j), at(x, i + j), atol=1e-6, rtol=0)


def test_the_distance_does_matter() -> None:
    """A rotation that turned nothing would pass the properties above."""
    q, k = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(0))
    scores = [(at(q, i) @ at(k, 0).T).item() for i in range(20)]
    assert len({round(score, 3) for score in scores}) == 20


@given(first=st.integers(0, 10**6), seed=seeds)
def test_a_window_of_attention_does_not_know_where_it_is(first: int, seed: int) -> None:
    """One rotary layer gives the same wherever its window is numbered from."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, 7, 6, generator=generator, dtype=torch.float64)  # (H, T, D)
    i = torch.arange(7)
    here, there = (
        torch.nn.functional.scaled_dot_product_attention(
            rotate(q, i + start), rotate(k, i + start), v, is_causal=True
        )
        for start in (0, first)
    )
    torch.testing.assert_close(here, there, atol=1e-7, rtol=0)


def test_rotation_equals_the_peers() -> None:
    """GPT-J in Hugging Face pairs neighbouring numbers too."""
    from transformers.models.gptj.modeling_gptj import (
        apply_rotary_pos_emb,
        create_sinusoidal_positions,
    )

    B, T, H, D = 2, 50, 3, 16
    x = torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(0))
    sin, cos = create_sinusoidal_positions(T, D)[None].expand(B, T, D).chunk(2, dim=-1)
    theirs = apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2)
    torch.testing.assert_close(rotate(x, torch.arange(T)), theirs, atol=1e-4, rtol=0)


def test_base_sets_the_slowest_plane() -> None:
    """With base 1 every plane turns one radian a position; with more, the last turns slowest."""
    x = torch.tensor([[1.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    positions = torch.arange(3)
    for base, slowest in ((1.0, 1.0), (100.0, 0.1)):
        turned = rotate(x.expand(3, 4), positions, base=base)
        angles = torch.stack((positions * 1.0, positions * slowest), dim=1).double()
        expected = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(-2)
        torch.testing.assert_close(turned, expected)


def test_far_positions_keep_their_angles() -> None:
    """A rotary cache may slide for ever: where float32 has no digits left, angles still have."""
    x = torch.tensor([[1.0, 0.0] * 4])
    far = 10**8 + 1
    expected = []
    for plane in range(4):
        angle = far * 10000.0 ** (-plane / 4)
        expected += [math.cos(angle), math.sin(angle)]
    torch.testing.assert_close(at(x, far)[0], torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotation_keeps_the_type(dtype: torch.dtype) -> None:
    """A cache in a narrow type stays in it."""
    turned = rotate(torch.ones(2, 3, 4, dtype=dtype), torch.arange(3))
    assert (turned.dtype, turned.shape) == (dtype, (2, 3, 4))


@pytest.mark.parametrize(
    ("x", "positions", "base", "message"),
    [
        (torch.ones(3, 5), torch.arange(3), 1e4, r"x must be floats.*D even.*\(3, 5\)"),
        (torch.ones(4), torch.arange(1), 1e4, r"x must be floats with shape.*\(4,\)"),
        (torch.ones(3, 4).long(), torch.arange(3), 1e4, "x must be floats.*int64"),
        (torch.ones(3, 4), torch.arange(2), 1e4, r"positions must be int64.*\(3,\).*\(2,\)"),
        (torch.ones(3, 4), torch.ones(3), 1e4, "positions must be int64.*float32"),
        (torch.ones(3, 4), torch.arange(3)[None], 1e4, r"positions must be int64.*\(1, 3\)"),
        (torch.ones(3, 4), torch.arange(3), 0.0, "base must be finite and above 0, got 0.0"),
        (torch.ones(3, 4), torch.arange(3), float("inf"), "base must be finite.*got inf"),
    ],
)
def test_rotation_refuses_what_it_cannot_turn(
    x: Tensor, positions: Tensor, base: float, message: str
) -> None:
    """An odd width has half a plane; positions that broadcast would turn the wrong axis."""
    with pytest.raises(ValueError, match=message):
        rotate(x, positions, base)
