"""The loop: score, choose, append, and again, with a cache or without.

```{.python title="A text"}
import torch

from lab35 import generate, load_pretrained

model, tokenizer = load_pretrained()
prompt = torch.tensor([tokenizer.encode("Sherlock Holmes")])
generation = generate(model, prompt, 64, temperature=0.8, top_k=40, top_p=0.95)
assert tokenizer.decode(generation.tokens[0].tolist()).startswith("Sherlock Holmes")
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab35._arguments import check_generator, integer
from lab35.context import refill_start, slide_start
from lab35.model import GPT, evaluating, position_ids
from lab35.sampling import Sampler
from lab35.speed import Engine, EngineName, choose_engine, new_engine

__all__ = [
    "ContextLimitError",
    "Generation",
    "Step",
    "check_prompt",
    "decode_steps",
    "generate",
    "token_forwards",
]

Model = GPT | Callable[[Tensor], tuple[Tensor, object]]
StopReason = Literal["max_new_tokens", "eos", "context_limit"]
OnContextLimit = Literal["stop", "raise", "refill"]


class ContextLimitError(ValueError):
    """The text has outgrown the positions that the model was trained on."""


@dataclass(frozen=True)
class Step:
    """One new token a row, and what it took.

    Attributes:
        token: Int64, shape (B, 1).
        fed: Tokens a row that this step ran through the model.
        stop_reason: Why this is the last step, or None.
        engine: What scored it, such as `"lean"`; None without a cache. Where the engine that was
            asked for cannot be had on this machine, it is not that one.
    """

    token: Tensor
    fed: int
    stop_reason: StopReason | None
    engine: str | None = None


@dataclass(frozen=True)
class Generation:
    """What a generation wrote, why it ended, and what it cost.

    Attributes:
        tokens: Int64, shape (B, P + n): the prompt, then the new tokens.
        prompt_length: P, with padding.
        stop_reason: `"max_new_tokens"`, `"eos"` when every row has ended, or `"context_limit"`.
        forwards: Calls of the model.
        token_forwards: Tokens a row that ran through the model, over all calls.
        engine: What ran the steps, such as `"lean"`; None without a cache, and where no step ran.
    """

    tokens: Tensor
    prompt_length: int
    stop_reason: StopReason
    forwards: int
    token_forwards: int
    engine: str | None = None

    @property
    def new_tokens(self) -> Tensor:
        """The new tokens alone, shape (B, n)."""
        return self.tokens[:, self.prompt_length :]


def generate(
    model: Model,
    idx: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    generators: Sequence[torch.Generator] | None = None,
    eos_id: int | None = None,
    key_mask: Tensor | None = None,
    use_cache: bool = True,
    on_context_limit: OnContextLimit = "stop",
    block_size: int | None = None,
    engine: EngineName | None = None,
) -> Generation:
    """Continue a prompt.

    The cached loop runs the prompt once and then one token a step. When the model's positions are
    used up, its last sample cannot be fed: it is returned, and the loop ends. Or it refills: it
    keeps the last half of the block, runs that as a new prompt, and goes on. The uncached loop
    (nanoGPT's) runs the last `block_size` tokens anew for each one, and slides on.

    Args:
        model: A GPT; without a cache, any `f(idx) -> (logits (B, T, V), anything)`.
        idx: Int64 prompt, shape (B, P).
        max_new_tokens: Tokens to add, N. 0 returns the prompt.
        temperature: See `sample_next`; 0 is greedy.
        top_k: See `sample_next`.
        top_p: See `sample_next`.
        generator: See `sample_next`. Its draws are shared out over the rows.
        generators: One generator a row instead: each row then draws what it would draw alone.
        eos_id: A row that samples it has ended and repeats it; the loop ends when all rows have.
        key_mask: Bool, shape (B, P). False marks padding, which must stand on the left.
        use_cache: Whether to keep keys and values.
        on_context_limit: What the cached loop does when no position is left: stop, raise, or
            refill. A prompt longer than the block is an error, unless it may refill: then its last
            half block is kept.
        block_size: Positions to use. Defaults to the model's; a plain callable needs it.
        engine: What runs the cached steps: `"eager"` is the model itself, and `"lean"`,
            `"compiled"` and `"numba"` are the faster ones of `lab35.speed`, the last two for one
            text without padding. By default the lean one where it can do the work; see
            `choose_engine`.

    Returns:
        The prompt with its continuation, and the counts.

    Raises:
        ValueError: If an argument is out of range.
        ContextLimitError: If the cached loop meets the limit and `on_context_limit="raise"`, or the
            prompt alone is longer than the block and may not be cut.
    """
    run = _prepared(
        model,
        idx,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=generator,
        generators=generators,
        eos_id=eos_id,
        key_mask=key_mask,
        use_cache=use_cache,
        on_context_limit=on_context_limit,
        block_size=block_size,
        engine=engine,
    )
    tokens, fed, reason, ran = [idx], [], None, None
    with torch.inference_mode():  # once: to enter it anew costs a tenth of a fast step
        for step in run():
            tokens.append(step.token)
            fed.append(step.fed)
            reason, ran = step.stop_reason, step.engine
    return Generation(
        tokens=torch.cat(tokens, dim=1),
        prompt_length=idx.shape[1],
        stop_reason=reason or "max_new_tokens",
        forwards=len(fed),
        token_forwards=sum(fed),
        engine=ran,
    )


def decode_steps(
    model: Model,
    idx: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    generators: Sequence[torch.Generator] | None = None,
    eos_id: int | None = None,
    key_mask: Tensor | None = None,
    use_cache: bool = True,
    on_context_limit: OnContextLimit = "stop",
    block_size: int | None = None,
    engine: EngineName | None = None,
) -> Iterator[Step]:
    """Continue a prompt token by token, for those who want each one as it comes.

    Takes the arguments of `generate`, which does nothing but collect these steps. They are checked
    at the call, not at the first step. Between two steps nothing is held: the model's mode and
    torch's are the caller's own, and an iterator may be left where it is.

    Args:
        model: See `generate`.
        idx: Int64 prompt, shape (B, P).
        max_new_tokens: See `generate`.
        temperature: See `generate`.
        top_k: See `generate`.
        top_p: See `generate`.
        generator: See `generate`.
        generators: See `generate`.
        eos_id: See `generate`.
        key_mask: Bool, shape (B, P). See `generate`.
        use_cache: See `generate`.
        on_context_limit: See `generate`.
        block_size: See `generate`.
        engine: See `generate`.

    Returns:
        An iterator over the steps. The last one has a stop reason.

    Raises:
        ValueError: If an argument is out of range.
        ContextLimitError: As `generate` does.
    """
    run = _prepared(
        model,
        idx,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=generator,
        generators=generators,
        eos_id=eos_id,
        key_mask=key_mask,
        use_cache=use_cache,
        on_context_limit=on_context_limit,
        block_size=block_size,
        engine=engine,
    )
    # Around a generator, torch leaves the mode at each yield, and enters it again.
    return torch.inference_mode()(run)()


def _prepared(
    model: Model,
    idx: Tensor,
    max_new_tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
    generators: Sequence[torch.Generator] | None,
    eos_id: int | None,
    key_mask: Tensor | None,
    use_cache: bool,
    on_context_limit: OnContextLimit,
    block_size: int | None,
    engine: EngineName | None,
) -> Callable[[], Iterator[Step]]:
    """Check all arguments, and return what takes the steps, in `torch.inference_mode()`."""
    sampler = Sampler(temperature, top_k, top_p, generator)
    block_size = _check_block_size(model, block_size, use_cache)
    eos_id = None if eos_id is None else integer("eos_id", eos_id)
    check_prompt(model, idx, key_mask, eos_id)
    max_new_tokens = integer("max_new_tokens", max_new_tokens, 0)
    if on_context_limit not in ("stop", "raise", "refill"):
        raise ValueError(
            f"on_context_limit must be 'stop', 'raise' or 'refill', got {on_context_limit!r}"
        )
    if use_cache and on_context_limit != "refill" and idx.shape[1] > block_size:
        raise ContextLimitError(
            f"idx must hold at most block_size={block_size} tokens for the cached loop, "
            f"got {idx.shape[1]}; crop the prompt, let it refill, or use use_cache=False"
        )
    check_generator("generator", generator, idx.device)
    _check_generators(generators, generator, idx)
    name = choose_engine(engine, model, len(idx), key_mask=key_mask, use_cache=use_cache)

    # What was checked is what runs, whatever its owner does with it before the steps are taken.
    idx, key_mask = idx.clone(), None if key_mask is None else key_mask.clone()
    choose: Callable[[Tensor], Tensor] = sampler
    if generators is not None:
        samplers = [replace(sampler, generator=own) for own in generators]
        choose = samplers[0] if len(samplers) == 1 else partial(_choose_apart, samplers)
    return partial(
        _steps,
        model,
        idx,
        max_new_tokens,
        choose,
        eos_id,
        key_mask,
        name if use_cache else None,
        on_context_limit,
        block_size,
    )


def _steps(
    model: Model,
    idx: Tensor,
    max_new_tokens: int,
    choose: Callable[[Tensor], Tensor],
    eos_id: int | None,
    key_mask: Tensor | None,
    engine: EngineName | None,
    on_context_limit: OnContextLimit,
    block_size: int,
) -> Iterator[Step]:
    """Score, choose, append; the two loops differ only in what they feed."""
    B, P = idx.shape
    decoder: Engine | _Window
    if engine is None:
        decoder = _Window(model, block_size)
    else:
        # The final sample is never fed, so that P + N - 1 positions are enough.
        size = max(1, min(block_size, P + max_new_tokens - 1))
        decoder = new_engine(engine, model, size, batch_size=B, padded=key_mask is not None)
        idx, key_mask = _newest(idx, key_mask, refill_start(P, block_size))
    refills = engine is not None and on_context_limit == "refill"
    # What is visible, in pieces: to join them at each step would copy a text as often as it grows.
    pieces = [idx]
    ended = [False] * B

    for n in range(1, max_new_tokens + 1):
        # 1) score what the decoder has not seen, and choose
        if decoder.length == 0:
            token, fed = choose(decoder.prefill(idx, key_mask)), idx.shape[1]
        else:
            token, fed = decoder.next(token, choose), 1
        if engine is None:  # all of the window anew
            fed = decoder.length

        # 2) append
        if eos_id is not None:
            if any(ended):
                token = token.masked_fill(torch.tensor(ended, device=token.device)[:, None], eos_id)
            ended = [row == [eos_id] for row in token.tolist()]
        if refills:
            pieces.append(token)

        # 3) stop?
        full = engine is not None and decoder.length == block_size
        reason: StopReason | None = None
        if all(ended):
            reason = "eos"
        elif n == max_new_tokens:
            reason = "max_new_tokens"
        elif full and on_context_limit == "stop":
            reason = "context_limit"
        yield Step(token, fed, reason, decoder.name)
        if reason is not None:
            return

        # 4) make room
        if full and on_context_limit == "raise":
            raise ContextLimitError(
                f"all {block_size} positions are used after {n} of {max_new_tokens} tokens"
            )
        if full:
            if key_mask is not None:
                key_mask = F.pad(key_mask, (0, len(pieces) - 1), value=True)
            idx = torch.cat(pieces, dim=1)
            idx, key_mask = _newest(idx, key_mask, refill_start(idx.shape[1], block_size))
            pieces = [idx]
            decoder.reset()


class _Window:
    """The loop without a cache (nanoGPT's): the last `block_size` tokens run anew for each one.

    It takes the place of an engine, and runs any model.
    """

    name = None

    def __init__(self, model: Model, block_size: int) -> None:
        self.model, self.block_size = model, block_size
        self.length = 0

    def prefill(self, idx: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Run a text, and remember it."""
        start = slide_start(idx.shape[1], self.block_size)
        self.idx, self.key_mask = _newest(idx, key_mask, start)
        self.length = self.idx.shape[1]
        masks = {}
        if self.key_mask is not None:
            masks = {"key_mask": self.key_mask, "position_ids": position_ids(self.key_mask)}
        # Dropout is off for this forward alone: between two steps the mode is the model's owner's.
        with evaluating(self.model):
            return self.model(self.idx, **masks)[0][:, -1]  # (B, V)

    def next(self, token: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """Append a token a row, and choose the one after it."""
        mask = None if self.key_mask is None else F.pad(self.key_mask, (0, 1), value=True)
        return choose(self.prefill(torch.cat((self.idx, token), dim=1), mask))


def _newest(idx: Tensor, key_mask: Tensor | None, start: int) -> tuple[Tensor, Tensor | None]:
    """Leave out the columns before `start`."""
    return idx[:, start:], None if key_mask is None else key_mask[:, start:]


def _choose_apart(samplers: Sequence[Sampler], logits: Tensor) -> Tensor:
    """Let each row draw from a generator of its own, as if it were alone."""
    rows = zip(samplers, logits.split(1), strict=True)
    return torch.cat([sampler(row) for sampler, row in rows])


def token_forwards(prompt_length: int, new_tokens: int, *, use_cache: bool) -> int:
    """Count the tokens a row that must run through the model, while the text fits the block.

    Args:
        prompt_length: P, at least 1.
        new_tokens: N, at least 0.
        use_cache: Cached, P + N − 1: the last sample is never fed. Uncached, N·P + N(N − 1)/2.

    Returns:
        Token-forwards.

    Raises:
        ValueError: If `prompt_length` is below 1 or `new_tokens` below 0.
    """
    P, N = integer("prompt_length", prompt_length, 1), integer("new_tokens", new_tokens, 0)
    if N == 0:
        return 0
    return P + N - 1 if use_cache else N * P + N * (N - 1) // 2


def _check_generators(
    generators: Sequence[torch.Generator] | None, generator: torch.Generator | None, idx: Tensor
) -> None:
    """Refuse what does not give each row draws of its own."""
    if generators is None:
        return
    if not isinstance(generators, Sequence):
        raise ValueError(f"generators must be a sequence, one a row, got {generators!r}")
    if generator is not None or len(generators) != len(idx):
        raise ValueError(
            f"generators must be one a row ({len(idx)}), and no generator beside them, "
            f"got {len(generators)}{'' if generator is None else ' and a generator'}"
        )
    for row, own in enumerate(generators):
        if own is None:
            raise ValueError(f"generators[{row}] must be a torch.Generator, got None")
        check_generator(f"generators[{row}]", own, idx.device)
    if len(set(map(id, generators))) < len(generators):
        raise ValueError("generators must be different objects, got one for several rows")


def _check_block_size(model: Model, block_size: int | None, use_cache: bool) -> int:
    config = getattr(model, "config", None)
    if config is None and use_cache:
        raise ValueError(f"model must be a GPT for use_cache=True, got {type(model).__name__}")
    trained = getattr(config, "block_size", None)
    if block_size is None:
        if trained is None:
            raise ValueError("block_size must be given for a model without a config, got None")
        return trained
    return integer("block_size", block_size, 1, trained)


def check_prompt(
    model: Model, idx: Tensor, key_mask: Tensor | None = None, eos_id: int | None = None
) -> None:
    """Refuse what is no prompt for a model.

    Args:
        model: The model. Without a config, ids can be of any size.
        idx: Int64 token ids, shape (B, P).
        key_mask: Bool, shape (B, P), or None.
        eos_id: A token id, or None.

    Raises:
        ValueError: If a shape, a type, a device or an id is wrong, or padding stands on the right.
    """
    if not isinstance(idx, Tensor):
        raise ValueError(
            f"idx must be an int64 tensor with shape (B, P), got a {type(idx).__name__}"
        )
    if idx.ndim != 2 or idx.dtype != torch.int64 or 0 in idx.shape:
        raise ValueError(
            f"idx must be int64 with shape (B, P), both at least 1, "
            f"got {idx.dtype} with shape {tuple(idx.shape)}"
        )
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocab_size is not None:
        low, high = idx.min().item(), idx.max().item()
        if low < 0 or high >= vocab_size:
            raise ValueError(f"idx must lie in [0, {vocab_size}), got values from {low} to {high}")
        if eos_id is not None and not 0 <= eos_id < vocab_size:
            raise ValueError(f"eos_id must lie in [0, {vocab_size}), got {eos_id}")
    if key_mask is not None and not isinstance(key_mask, Tensor):
        raise ValueError(
            f"key_mask must be a bool tensor with the shape of idx, got a {type(key_mask).__name__}"
        )
    weights = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    for name, tensor in (("idx", idx), ("key_mask", key_mask)):
        if weights is not None and tensor is not None and tensor.device != weights.device:
            raise ValueError(
                f"{name} must be on the model's device {weights.device}, got {tensor.device}"
            )
    if key_mask is None:
        return
    if key_mask.dtype != torch.bool or key_mask.shape != idx.shape:
        raise ValueError(
            f"key_mask must be bool with the shape of idx, {tuple(idx.shape)}, "
            f"got {key_mask.dtype} with shape {tuple(key_mask.shape)}"
        )
    if not key_mask[:, -1].all():
        raise ValueError("key_mask must be True in the last column: pad on the left, not the right")
