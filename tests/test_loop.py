"""The loops: equal texts, right counts, right reasons to stop, and clear refusals."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lab35 import (
    GPT,
    ContextLimitError,
    GPTConfig,
    KVCache,
    Tokenizer,
    decode_steps,
    generate,
    token_forwards,
)

MARGIN = 1e-4


def left_padded(rows: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad by hand, so that the package's own padding is not its own witness."""
    width = max(map(len, rows))
    idx = [[pad_id] * (width - len(row)) + row for row in rows]
    mask = [[False] * (width - len(row)) + [True] * len(row) for row in rows]
    return torch.tensor(idx), torch.tensor(mask)


def margin(model: GPT, tokens: Tensor, prompt_length: int) -> float:
    """Return the smallest distance between the two best logits along a greedy text."""
    with torch.inference_mode():
        best = model(tokens[:, :-1])[0][:, prompt_length - 1 :].topk(2).values
    return (best[..., 0] - best[..., 1]).min().item()


class Scripted(nn.Module):
    """A model that is sure of one token after another, whatever it is fed."""

    def __init__(self, script: list[list[int]], vocab_size: int = 16) -> None:
        super().__init__()
        self.script, self.vocab_size, self.calls = script, vocab_size, []

    def forward(self, idx: Tensor) -> tuple[Tensor, None]:
        """Point at the script's next token, in every row."""
        self.calls.append(idx.clone())
        logits = torch.zeros(*idx.shape, self.vocab_size)
        for row, tokens in enumerate(self.script):
            logits[row, -1, tokens[len(self.calls) - 1]] = 50.0
        return logits, None


@pytest.mark.parametrize(("P", "N"), [(1, 1), (1, 127), (5, 60), (16, 100), (128, 1)])
def test_both_loops_write_the_same_greedy_text(
    model: GPT, passage: list[int], P: int, N: int
) -> None:
    """The cache must change the cost and nothing else, up to the last position of the block."""
    prompt = torch.tensor([passage[:P]])
    cached = generate(model, prompt, N, temperature=0)
    uncached = generate(model, prompt, N, temperature=0, use_cache=False)
    assert margin(model, uncached.tokens, P) > MARGIN, "pick a prompt whose choices are clear"
    assert uncached.tokens.tolist() == cached.tokens.tolist()
    assert cached.stop_reason == uncached.stop_reason == "max_new_tokens"


def test_both_loops_draw_the_same_sampled_text(model: GPT, prompt: Tensor) -> None:
    """The same generator draws the same numbers in both loops."""
    texts = [
        generate(
            model,
            prompt,
            40,
            temperature=0.8,
            top_k=40,
            top_p=0.95,
            generator=torch.Generator().manual_seed(1337),
            use_cache=use_cache,
        ).tokens.tolist()
        for use_cache in (True, False)
    ]
    assert texts[0] == texts[1]


@given(P=st.integers(1, 40), N=st.integers(0, 40))
def test_counts_are_the_formulas(tiny_model: GPT, P: int, N: int) -> None:
    """What runs through the model is counted where it happens, and by formula: both agree."""
    prompt = torch.zeros(1, P, dtype=torch.int64)
    for use_cache in (True, False):
        made = generate(tiny_model, prompt, N, use_cache=use_cache)
        assert made.token_forwards == token_forwards(P, N, use_cache=use_cache)
        assert made.forwards == N
        assert made.new_tokens.shape == (1, N)
        assert made.tokens[:, :P].tolist() == prompt.tolist()


def test_the_model_sees_what_the_counts_say(tiny_model: GPT) -> None:
    """A hook counts independently of the loop: prefill once, then one token a call."""
    shapes: list[int] = []
    hook = tiny_model.register_forward_pre_hook(
        lambda module, args: shapes.append(args[0].shape[1])
    )
    generate(tiny_model, torch.zeros(1, 5, dtype=torch.int64), 4)
    hook.remove()
    assert shapes == [5, 1, 1, 1]


def test_sixteen_and_a_hundred() -> None:
    """The figures that the course quotes."""
    assert token_forwards(16, 100, use_cache=False) == 6550
    assert token_forwards(16, 100, use_cache=True) == 115


@pytest.mark.parametrize(
    ("P", "N", "length", "reason"),
    [
        (120, 8, 128, "max_new_tokens"),
        (120, 9, 129, "max_new_tokens"),
        (120, 20, 129, "context_limit"),
        (128, 20, 129, "context_limit"),
    ],
)
def test_cached_loop_returns_the_sample_that_cannot_be_fed(
    model: GPT, passage: list[int], P: int, N: int, length: int, reason: str
) -> None:
    """128 positions carry 129 tokens: the last one is never run."""
    made = generate(model, torch.tensor([passage[:P]]), N, temperature=0)
    assert (made.tokens.shape[1], made.stop_reason) == (length, reason)


def test_uncached_loop_slides(model: GPT, passage: list[int]) -> None:
    """Beyond the block every token is the argmax after the last 128, renumbered from 0."""
    prompt = torch.tensor([passage[:120]])
    made = generate(model, prompt, 20, temperature=0, use_cache=False)
    assert made.tokens.shape[1] == 140
    assert made.stop_reason == "max_new_tokens"
    with torch.inference_mode():
        for end in range(120, 140):
            logits, _ = model(made.tokens[:, max(0, end - 128) : end])
            assert logits[0, -1].argmax() == made.tokens[0, end]


def test_context_limit_can_raise(model: GPT, passage: list[int]) -> None:
    """The strict policy tells how far it came; it does not trip when the text just fits."""
    prompt = torch.tensor([passage[:120]])
    fits = generate(model, prompt, 9, temperature=0, on_context_limit="raise")
    assert fits.stop_reason == "max_new_tokens"
    with pytest.raises(ContextLimitError, match="128 positions are used after 9 of 20 tokens"):
        generate(model, prompt, 20, temperature=0, on_context_limit="raise")


def test_a_step_is_handed_out_before_the_limit_is_raised(model: GPT, passage: list[int]) -> None:
    """Who reads token by token gets all nine that the error counts."""
    steps = decode_steps(
        model, torch.tensor([passage[:120]]), 20, temperature=0, on_context_limit="raise"
    )
    taken = []
    with pytest.raises(ContextLimitError, match="after 9 of 20"):
        taken.extend(step.token.item() for step in steps)
    fits = generate(model, torch.tensor([passage[:120]]), 9, temperature=0)
    assert taken == fits.new_tokens[0].tolist()


def test_prompt_longer_than_the_block(model: GPT, passage: list[int]) -> None:
    """The cached loop says what to do; the uncached one crops."""
    prompt = torch.tensor([passage[:130]])
    with pytest.raises(ContextLimitError, match=r"block_size=128.*got 130; crop the prompt"):
        generate(model, prompt, 1)
    made = generate(model, prompt, 1, temperature=0, use_cache=False)
    cropped = generate(model, prompt[:, 2:], 1, temperature=0)
    assert made.new_tokens.tolist() == cropped.new_tokens.tolist()


def test_a_smaller_block(model: GPT, passage: list[int]) -> None:
    """`block_size` limits both loops, not only the plain callable."""
    prompt = torch.tensor([passage[:10]])
    cached = generate(model, prompt, 10, temperature=0, block_size=12)
    assert (cached.tokens.shape[1], cached.stop_reason) == (13, "context_limit")
    uncached = generate(model, prompt, 10, temperature=0, block_size=12, use_cache=False)
    assert uncached.token_forwards == 10 + 11 + 8 * 12


def test_any_callable_will_do() -> None:
    """The uncached loop needs logits and a block size, no GPT."""
    script = Scripted([[3, 1, 2]])
    made = generate(
        lambda idx: script(idx),
        torch.tensor([[5, 6]]),
        3,
        temperature=0,
        use_cache=False,
        block_size=3,
    )
    assert made.tokens.tolist() == [[5, 6, 3, 1, 2]]
    assert [call.tolist() for call in script.calls] == [[[5, 6]], [[5, 6, 3]], [[6, 3, 1]]]


def test_end_of_text_ends_a_row_and_then_the_loop() -> None:
    """A row that has ended repeats eos, whatever the model says; the loop waits for the others."""
    script = Scripted([[4, 9, 7, 7], [9, 1, 1, 1], [2, 2, 9, 5]])
    prompt = torch.zeros(3, 1, dtype=torch.int64)
    made = generate(script, prompt, 10, temperature=0, eos_id=9, use_cache=False, block_size=8)
    assert made.new_tokens.tolist() == [[4, 9, 9], [9, 9, 9], [2, 2, 9]]
    assert made.stop_reason == "eos"
    assert made.forwards == 3


def test_end_of_text_in_the_prompt_ends_nothing() -> None:
    """Only a sampled eos counts: prompts may begin with one."""
    script = Scripted([[4, 5]])
    made = generate(
        script, torch.tensor([[9]]), 2, temperature=0, eos_id=9, use_cache=False, block_size=8
    )
    assert made.new_tokens.tolist() == [[4, 5]]
    assert made.stop_reason == "max_new_tokens"


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("pad_id", [0, 257])
def test_each_row_of_a_padded_batch_is_its_own_run(
    model: GPT, tokenizer: Tokenizer, use_cache: bool, pad_id: int
) -> None:
    """Prompts of 2, 10 and 13 tokens side by side write what each writes alone."""
    texts = ["Holmes", "It was a dark night and", "My dear Watson, said he, I"]
    rows = [tokenizer.encode(text) for text in texts]
    idx, mask = left_padded(rows, pad_id)
    made = generate(model, idx, 24, temperature=0, key_mask=mask, use_cache=use_cache)
    for row, ids in enumerate(rows):
        alone = generate(model, torch.tensor([ids]), 24, temperature=0)
        assert margin(model, alone.tokens, len(ids)) > MARGIN
        assert made.new_tokens[row].tolist() == alone.new_tokens[0].tolist()


def test_padding_slides_out_of_the_window(model: GPT, passage: list[int]) -> None:
    """The uncached loop crops the mask with the text, and numbers what is left from 0."""
    rows = [passage[:100], passage[:120]]
    idx, mask = left_padded(rows, 0)
    made = generate(model, idx, 12, temperature=0, key_mask=mask, use_cache=False)
    alone = generate(model, torch.tensor([rows[0]]), 12, temperature=0, use_cache=False)
    assert made.new_tokens[0].tolist() == alone.new_tokens[0].tolist()


def test_steps_come_one_by_one(model: GPT, prompt: Tensor) -> None:
    """`generate` is the sum of `decode_steps`; only the last step has a reason."""
    steps = list(decode_steps(model, prompt, 5, temperature=0))
    made = generate(model, prompt, 5, temperature=0)
    assert torch.cat([step.token for step in steps], 1).tolist() == made.new_tokens.tolist()
    assert [step.fed for step in steps] == [prompt.shape[1], 1, 1, 1, 1]
    assert [step.stop_reason for step in steps] == [None] * 4 + ["max_new_tokens"]


def test_arguments_are_checked_before_the_first_step(model: GPT, prompt: Tensor) -> None:
    """An iterator that fails at its first step would fail far from the mistake."""
    with pytest.raises(ValueError, match="temperature"):
        decode_steps(model, prompt, 5, temperature=-1)


def test_mode_and_gradients_are_left_alone(tiny_model: GPT) -> None:
    """A model in training, with one part frozen in eval mode, comes back as it was."""
    tiny_model = copy.deepcopy(tiny_model).train()
    tiny_model.blocks[0].eval()
    modes = [module.training for module in tiny_model.modules()]
    idx = torch.zeros(1, 4, dtype=torch.int64)
    first = generate(tiny_model, idx, 6, temperature=0)
    second = generate(tiny_model, idx, 6, temperature=0)
    assert first.tokens.tolist() == second.tokens.tolist(), "dropout was on"
    assert [module.training for module in tiny_model.modules()] == modes
    _, loss = tiny_model(idx, targets=idx)
    loss.backward()
    with pytest.raises(ContextLimitError):
        generate(tiny_model, idx, 999, on_context_limit="raise")
    assert [module.training for module in tiny_model.modules()] == modes
    steps = decode_steps(tiny_model, idx, 6)
    next(steps)
    steps.close()
    assert [module.training for module in tiny_model.modules()] == modes


def test_nothing_leaks_from_one_generation_into_the_next(model: GPT, prompt: Tensor) -> None:
    """Two interleaved iterators over one model do not see each other's cache."""
    alone = [step.token.item() for step in decode_steps(model, prompt, 6, temperature=0)]
    other = decode_steps(model, prompt[:, 1:], 6, temperature=0)
    mixed = []
    for step in decode_steps(model, prompt, 6, temperature=0):
        mixed.append(step.token.item())
        next(other)
    assert alone == mixed


# --- Nothing is held between two steps -----------------------------------------------------------


@pytest.fixture
def dropping(tiny_model: GPT) -> GPT:
    """A model in training mode whose dropout is strong, and one part of which is frozen."""
    torch.manual_seed(1)
    model = GPT(replace(tiny_model.config, dropout=0.5)).train()
    model.blocks[1].eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8)  # small weights repeat one token, with dropout or without
        choices = {model(PROMPT)[0][0, -1].argmax().item() for _ in range(20)}
    assert len(choices) > 2, "dropout must be seen in the tokens"
    return model


PROMPT = torch.tensor([[3, 1, 4]])
ENGINES = pytest.mark.parametrize(
    "how", [{"engine": "eager"}, {"engine": "lean"}, {"use_cache": False}], ids=str
)


@ENGINES
def test_the_end_of_one_text_leaves_another_without_dropout(dropping: GPT, how: dict) -> None:
    """Two texts in turns over a model in training: the end of one must not switch it back."""
    expected = generate(dropping, PROMPT, 12, temperature=0, **how).new_tokens[0].tolist()
    short = decode_steps(dropping, PROMPT, 2, temperature=0, **how)
    long = decode_steps(dropping, PROMPT, 12, temperature=0, **how)
    found = []
    for _ in range(12):
        next(short, None)  # begins first, and ends while the other goes on
        found.append(next(long).token.item())
    assert expected == found


@ENGINES
@pytest.mark.parametrize("taken", [1, 3])
def test_between_two_steps_the_mode_is_the_callers(dropping: GPT, how: dict, taken: int) -> None:
    """A validation text in the middle of training, read slowly or never to its end."""
    modes = [module.training for module in dropping.modules()]
    steps = decode_steps(dropping, PROMPT, 6, **how)
    for _ in range(taken):
        next(steps)
        assert [module.training for module in dropping.modules()] == modes
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
    dropping(PROMPT, targets=PROMPT)[1].backward()
    with pytest.raises(KeyError):
        steps.throw(KeyError)
    assert [module.training for module in dropping.modules()] == modes


@ENGINES
def test_a_mode_that_the_caller_changes_stays_changed(dropping: GPT, how: dict) -> None:
    """`model.eval()` between two steps is a wish, and the end of the text must not undo it."""
    steps = decode_steps(dropping, PROMPT, 4, temperature=0, **how)
    expected = generate(dropping, PROMPT, 4, temperature=0, **how).new_tokens[0].tolist()
    found = [next(steps).token.item()]
    dropping.eval()
    found.append(next(steps).token.item())
    dropping.train()
    found += [step.token.item() for step in steps]
    assert expected == found
    assert all(module.training for module in dropping.modules())


def test_texts_in_threads_do_not_switch_dropout_on(dropping: GPT) -> None:
    """One thread's forward ends in the middle of another's."""
    modes = [module.training for module in dropping.modules()]
    expected = generate(dropping, PROMPT, 30, temperature=0, engine="eager").tokens.tolist()
    # Each forward waits inside the model until another is there too, or some time has passed.
    both = threading.Barrier(2)

    def meet(*_: object) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.2)

    hook = dropping.blocks[0].register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        lengths = (17, 30)
        jobs = [
            pool.submit(generate, dropping, PROMPT, n, temperature=0, engine="eager")
            for n in lengths
        ]
        found = [job.result().tokens.tolist() for job in jobs]
    hook.remove()
    assert [[expected[0][: 3 + n]] for n in lengths] == found
    assert [module.training for module in dropping.modules()] == modes


def test_a_forward_that_fails_puts_the_mode_back(dropping: GPT) -> None:
    """Also when the failure is in the middle of the model."""
    modes = [module.training for module in dropping.modules()]

    def fail(*_: object) -> None:
        raise KeyError

    hook = dropping.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        generate(dropping, PROMPT, 3)
    hook.remove()
    assert [module.training for module in dropping.modules()] == modes


def test_decode_positions_come_from_the_cache(model: GPT, prompt: Tensor) -> None:
    """Each cached step is numbered by what is stored: told explicitly, the same logits."""
    with torch.inference_mode():
        told, silent = (KVCache(model.config, 1) for _ in range(2))
        for i in range(prompt.shape[1]):
            token = prompt[:, i : i + 1]
            a, _ = model(token, cache=told, position_ids=torch.tensor([[i]]))
            b, _ = model(token, cache=silent)
            assert torch.equal(a, b)


IDX = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"idx": torch.zeros(1, 0, dtype=torch.int64)}, r"idx must be int64.*shape \(1, 0\)"),
        ({"idx": torch.zeros(0, 3, dtype=torch.int64)}, r"idx must be int64.*shape \(0, 3\)"),
        ({"idx": torch.tensor([1, 2])}, r"idx must be int64 with shape \(B, P\).*\(2,\)"),
        ({"idx": torch.tensor([[1.0]])}, r"idx must be int64.*float32"),
        ({"idx": torch.tensor([[1, 512]])}, r"idx must lie in \[0, 512\).*1 to 512"),
        ({"idx": torch.tensor([[-1, 2]])}, r"idx must lie in \[0, 512\).*-1 to 2"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"temperature": -0.5}, "temperature must be finite and at least 0, got -0.5"),
        ({"temperature": float("nan")}, "temperature must be finite and at least 0, got nan"),
        ({"top_k": 0}, "top_k must be .* at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be .*\(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must be .*\(0, 1\], got 1.1"),
        ({"eos_id": 512}, r"eos_id must lie in \[0, 512\), got 512"),
        (
            {"on_context_limit": "slide"},
            "on_context_limit must be 'stop', 'raise' or 'refill', got 'slide'",
        ),
        ({"block_size": 0}, r"block_size must lie in \[1, 128\], got 0"),
        ({"block_size": 129}, r"block_size must lie in \[1, 128\], got 129"),
        ({"key_mask": torch.ones(1, 3)}, r"key_mask must be bool.*float32"),
        ({"key_mask": torch.ones(1, 4, dtype=torch.bool)}, r"key_mask must be bool.*\(1, 4\)"),
        ({"key_mask": torch.tensor([[True, True, False]])}, "pad on the left, not the right"),
    ],
)
def test_bad_arguments_are_named(model: GPT, arguments: dict, message: str) -> None:
    """Each refusal names the argument, what was given, and what is allowed."""
    with pytest.raises(ValueError, match=message):
        generate(model, **{"idx": IDX, "max_new_tokens": 2} | arguments)


def test_a_plain_callable_needs_a_block_size_and_no_cache() -> None:
    """A function has no positions to look up and no cache to fill."""
    script = Scripted([[1]])
    with pytest.raises(ValueError, match="block_size must be given"):
        generate(script, IDX, 1, use_cache=False)
    with pytest.raises(ValueError, match="model must be a GPT for use_cache=True, got Scripted"):
        generate(script, IDX, 1, block_size=8)


@pytest.mark.parametrize(("P", "N"), [(0, 1), (1, -1)])
def test_token_forwards_refuses_what_cannot_be(P: int, N: int) -> None:
    """There is no text without a prompt, and no negative number of tokens."""
    with pytest.raises(ValueError, match="must be at least"):
        token_forwards(P, N, use_cache=True)


def test_a_tiny_model_generates(tiny_model: GPT) -> None:
    """No size of the reference model is baked into the loop."""
    assert tiny_model.config != GPTConfig()
    made = generate(tiny_model, torch.zeros(2, 3, dtype=torch.int64), 4)
    assert made.new_tokens.shape == (2, 4)


# --- what a step costs ---------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Notes each operation, and the largest tensor of ids or truth values that it made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Note it, and do it."""
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, Tensor) and not made.is_floating_point():
                self.largest = max(self.largest, made.numel())
        return out


def calls_of_steps(model: GPT, idx: Tensor, steps: int, **arguments: object) -> list[Calls]:
    """Record the operations of each step by itself."""
    settings = {"temperature": 0.8, "top_k": 5, "generator": torch.Generator().manual_seed(1)}
    found, running = [], decode_steps(model, idx, steps, **settings | arguments)
    for _ in range(steps):
        with Calls() as calls:
            next(running)
        found.append(calls)
    return found


@pytest.mark.parametrize("engine", ["eager", "lean"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_late_step_does_what_an_early_one_does(tiny_model: GPT, engine: str, rows: int) -> None:
    """Nothing that grows is copied, and without padding or an end of text none is computed."""
    found = calls_of_steps(tiny_model, torch.ones(rows, 3, dtype=torch.int64), 70, engine=engine)
    early, late = found[3], found[60]
    assert early.names == late.names
    assert early.largest == late.largest
    for calls in found[1:]:
        assert not [name for name in calls.names if "aten.cat" in name or "cumsum" in name]
        assert not [name for name in calls.names if "bool" in name or "logical" in name]
    # One masked fill is the sampler's.
    assert sum("masked_fill" in name for name in late.names) <= 1


def test_the_count_of_operations_sees_what_it_looks_for(tiny_model: GPT) -> None:
    """Guards the test above: the uncached loop joins at each step, and an end of text is work."""
    idx = torch.ones(2, 3, dtype=torch.int64)
    window = calls_of_steps(tiny_model, idx, 9, use_cache=False)
    assert all(any("aten.cat" in name for name in calls.names) for calls in window[1:])
    mask = torch.tensor([[False, True, True], [True, True, True]])
    ending = calls_of_steps(tiny_model, idx, 9, eos_id=36, key_mask=mask, engine="eager")
    plain = calls_of_steps(tiny_model, idx, 9, engine="eager")
    assert len(ending[5].names) > len(plain[5].names)
    assert any("cumsum" in name for name in ending[5].names)


@pytest.mark.parametrize("how", [{"engine": "eager"}, {"engine": "lean"}, {"use_cache": False}])
def test_a_text_without_an_end_takes_no_memory_ahead(tiny_model: GPT, how: dict) -> None:
    """A trillion tokens may be asked for by who means to stop reading."""
    steps = decode_steps(
        tiny_model, torch.ones(1, 3, dtype=torch.int64), 10**12, on_context_limit="refill", **how
    )
    taken = [next(steps) for _ in range(200)]
    assert [step.stop_reason for step in taken] == [None] * 200
    held = [x for x in gc.get_referrers(taken[100].token) if isinstance(x, list)]
    assert held == [], "the loop holds on to tokens that are out of sight"


@pytest.mark.parametrize("how", [{"engine": "eager"}, {"engine": "lean"}, {"use_cache": False}])
def test_a_prompt_is_what_it_was_at_the_call(model: GPT, passage: list[int], how: dict) -> None:
    """A buffer that its owner fills anew between two steps changes no text, nor does its mask."""
    idx = torch.tensor([passage[:20], passage[20:40]])
    mask = torch.ones_like(idx, dtype=torch.bool)
    mask[0, :4] = False
    settings = {"temperature": 0, "block_size": 24, "on_context_limit": "refill"} | how
    expected = generate(model, idx, 30, key_mask=mask, **settings).new_tokens
    steps = decode_steps(model, idx, 30, key_mask=mask, **settings)
    idx.zero_()
    mask.fill_(True)
    found = [step.token for step in steps]
    assert torch.equal(expected, torch.cat(found, dim=1))


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", [{"engine": "eager"}, {"engine": "lean"}, {"use_cache": False}])
def test_a_text_can_be_used_afterwards(tiny_model: GPT, mode: Callable, how: dict) -> None:
    """Made in any mode, the tokens are those of the mode: outside, training can go on from them."""
    idx = torch.ones(1, 3, dtype=torch.int64)
    with mode():
        inside = torch.is_inference_mode_enabled()
        made = generate(tiny_model, idx, 5, temperature=0, **how)
        assert torch.is_inference_mode_enabled() == inside
    assert made.tokens.is_inference() == inside
    if not inside:
        _, loss = copy.deepcopy(tiny_model)(made.tokens, targets=made.tokens)
        loss.backward()
        made.tokens[0, 0] = 2
    assert idx.tolist() == [[1, 1, 1]]
