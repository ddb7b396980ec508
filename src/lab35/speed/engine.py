"""What every rung shares: a decoder of one text with a cache of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab35._arguments import integer
from lab35.cache import KVCache
from lab35.model import GPT, GPTConfig
from lab35.speed.prompt import run_prompt
from lab35.speed.weights import Weights

EPS = 1e-5  # of every LayerNorm

Step = Callable[[int, int, Tensor], tuple[Tensor, Tensor]]
"""One token, its position and the cache, to its logits and its own keys and values."""


class Engine:
    """A decoder that keeps its own cache; the base of every rung.

    The prompt runs in one piece, by `run_prompt`. A rung says how its keys and values are laid out,
    and how one token a row is run against them. It reads the model's own weights: the next step
    sees a change in place, and the next engine a weight that was replaced. `generate` makes one for
    each text. Everything runs under `torch.inference_mode()`.

    Args:
        model: The model to run.
        max_len: Positions to make room for. Defaults to the model's block size.
        batch_size: Texts that are written at once, B. Most rungs write one.

    Attributes:
        name: What it is called in a `Generation` or a report.
        takes_batches: Whether it writes several texts at once, and knows of padding.
        length: Positions stored so far; the next token's position.

    Raises:
        ValueError: If `max_len` lies outside [1, block_size], or `batch_size` is not what it takes.
    """

    name: ClassVar[str]
    takes_batches: ClassVar[bool] = False

    def __init__(self, model: GPT, max_len: int | None = None, batch_size: int = 1) -> None:
        self.model = model
        self.config = model.config
        most = self.config.block_size
        self.max_len = most if max_len is None else integer("max_len", max_len, 1, most)
        self.batch_size = integer("batch_size", batch_size, 1)
        self.length = 0
        if self.batch_size > 1 and not self.takes_batches:
            raise ValueError(f"batch_size must be 1 for {type(self).__name__}, got {batch_size}")

    @cached_property
    def weights(self) -> Weights:
        """The model's weights, as they were when the engine first asked for them."""
        return Weights.of(self.model)

    def __call__(self, idx: Tensor) -> Tensor:
        """Run the tokens that were not seen yet: the prompt at first, then one at a time."""
        return self.step(idx) if self.length else self.prefill(idx)

    def prefill(self, idx: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Run a prompt, and forget everything before it.

        Args:
            idx: Int64, shape (B, P).
            key_mask: Bool, shape (B, P). False marks padding, which must stand on the left; only
                engines for several rows know of it.

        Returns:
            The logits after its last token, shape (B, V).

        Raises:
            ValueError: If the prompt is empty, has other rows, does not fit into `max_len`, or
                holds what is no token, or the mask does not fit. The engine is left as it was.
            RuntimeError: Outside `torch.inference_mode()`.
        """
        self._check_prompt(idx, key_mask)
        if key_mask is not None and key_mask.all():
            key_mask = None
        logits = self._prefill(idx, key_mask)
        self.length = idx.shape[1]
        return logits

    def step(self, token: Tensor) -> Tensor:
        """Run one token a row against everything stored; the first one is a prompt of its own.

        Args:
            token: Int64, shape (B, 1).

        Returns:
            The logits after it, shape (B, V).

        Raises:
            ValueError: If `token` is not one token of the vocabulary a row, or no position is left.
                The engine is left as it was.
            RuntimeError: Outside `torch.inference_mode()`.
        """
        if not self.length:
            return self.prefill(token)
        self._check_token(token)
        logits = self._step(token, self.length)
        self.length += 1  # last: nothing can fail after it
        return logits.view(self.batch_size, -1)

    def next(self, token: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """Run one token a row, and choose the one after it.

        Args:
            token: Int64, shape (B, 1).
            choose: Takes logits of shape (B, V), and returns int64 ids of shape (B, 1).

        Returns:
            Int64, shape (B, 1).

        Raises:
            ValueError: As `step` and `choose` do.
            RuntimeError: As `step` does.
        """
        return choose(self.step(token))

    def reset(self) -> None:
        """Forget everything; the next tokens are a prompt."""
        self.length = 0

    def __reduce__(self) -> NoReturn:
        # Copies would not share memory where the original does, and compute something else.
        raise TypeError("an engine cannot be copied or pickled: make a new one for the model")

    def _prefill(self, idx: Tensor, key_mask: Tensor | None) -> Tensor:
        """Run a prompt that was checked, with a mask where it is padded; returns (B, V)."""
        logits, kv = run_prompt(self.weights, self.config, idx, key_mask)
        self._store(kv)
        return logits

    def _store(self, kv: Tensor) -> None:
        """Make room, and take over the prompt's keys and values, (L, 2, B, H, P, D)."""
        raise NotImplementedError  # each rung has its own

    def _step(self, token: Tensor, at: int) -> Tensor:
        """Run one token a row, (B, 1), at position `at`; returns B·V logits in any shape."""
        raise NotImplementedError  # each rung has its own

    def _check_prompt(self, idx: Tensor, key_mask: Tensor | None) -> None:
        """Refuse what is no prompt, before anything is forgotten."""
        self._check("idx", idx, f"1 to max_len={self.max_len}", self.max_len)
        if key_mask is None:
            return
        if not self.takes_batches:
            raise ValueError(f"key_mask must be None for {type(self).__name__}, got {key_mask}")
        if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
            raise ValueError(f"key_mask must be a bool tensor, got {key_mask}")
        if key_mask.shape != idx.shape or not key_mask[:, -1].all():
            raise ValueError(
                f"key_mask must have the shape of idx, {tuple(idx.shape)}, and be True in the last "
                f"column, got {key_mask.tolist()}"
            )

    def _check_token(self, token: Tensor) -> None:
        """Refuse what cannot be the next token a row."""
        self._check("token", token, "1", 1)
        if self.length >= self.max_len:
            raise ValueError(f"a token must fit into max_len={self.max_len}, got one more")

    def _check(self, name: str, ids: Tensor, width: str, most: int) -> None:
        """Refuse what cannot be run next, before anything is written."""
        if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
            raise ValueError(f"{name} must be an int64 tensor, got {ids!r}")
        V, shape = self.config.vocab_size, tuple(ids.shape)
        fits = len(shape) == 2 and shape[0] == self.batch_size and 0 < shape[1] <= most
        if fits and not ids.is_meta:
            rows = [[ids.item()]] if ids.numel() == 1 else ids.tolist()
            fits = all(0 <= token < V for row in rows for token in row)
        if not fits:
            few = ids.numel() < 9
            ids = ids.tolist() if few else f"values from {ids.min()} to {ids.max()}"
            raise ValueError(
                f"{name} must have shape ({self.batch_size}, {width}) and lie in [0, {V}), "
                f"got {ids} with shape {shape}"
            )
        if not torch.is_inference_mode_enabled():
            raise RuntimeError("a decode step must run under torch.inference_mode()")


def padded(stored: Tensor, length: int) -> Tensor:
    """Copy keys or values (…, P, D) into room for more positions, (…, length, D)."""
    return F.pad(stored, (0, 0, 0, length - stored.shape[-2]))


def check_step(config: GPTConfig, make: Callable[[GPT], Step]) -> None:
    """Hold a step of machine code once against a model with random weights.

    All weights are random, biases too: what a compiler has taken for a constant shows.

    Args:
        config: The sizes.
        make: Takes the model and returns its step. That takes a token, its position, and the keys
            and values before it, (L, 2, H, T, D), and returns the logits, V in any shape, and the
            token's own keys and values, (L, 2, H, 1, D).

    Raises:
        RuntimeError: If they differ by more than rounding.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode(False):
        model = GPT(replace(config, dropout=0.0)).to(torch.float32).eval()
        for weight in model.parameters():
            nn.init.normal_(weight, std=0.3)
        idx = torch.randint(config.vocab_size, (1, config.block_size))
    step = make(model)
    with torch.inference_mode():
        stored = KVCache.for_model(model, 1, config.block_size)
        logits = model(idx, cache=stored)[0][0]  # (T, V)
        kv = torch.cat((stored.k, stored.v), dim=1)  # (L, 2, H, T, D)
        for at in {0, config.block_size // 2, config.block_size - 1}:
            past = kv.clone()
            past.narrow(3, at, 1).zero_()  # what the step makes itself
            found, made = step(idx[0, at].item(), at, past)
            for name, one, other in (
                ("logits", found.view(-1), logits[at]),
                ("keys and values", made, kv.narrow(3, at, 1)),
            ):
                difference = ((one - other).abs().max() / other.abs().max().clamp(min=1)).item()
                if not difference < 1e-3:  # NaN is not
                    raise RuntimeError(f"its {name} differ from the model's by {difference:.1e}")
