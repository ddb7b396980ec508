"""What every rung shares: a decoder of one text with a cache of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab35.cache import KVCache
from lab35.model import GPT, Block, GPTConfig

EPS = 1e-5  # of every LayerNorm

Step = Callable[[int, int, Tensor], tuple[Tensor, Tensor]]
"""One token, its position and the cache, to its logits and its own keys and values."""


class Engine:
    """A decoder of one text that keeps its own cache; the base of every rung.

    The prompt runs through the model itself. A rung says how its keys and values are laid out, and
    how one token is run against them. It reads the model's own weights: the next step sees a change
    in place, and the next text a weight that was replaced. Everything runs under
    `torch.inference_mode()`.

    Args:
        model: The model to run, in eval mode, in float32 and on the CPU.
        max_len: Positions to make room for. Defaults to the model's block size.

    Attributes:
        name: What it is called in a `Generation` or a report.
        length: Positions stored so far; the next token's position.

    Raises:
        ValueError: If `max_len` lies outside [1, block_size].
    """

    name: ClassVar[str]

    def __init__(self, model: GPT, max_len: int | None = None) -> None:
        self.model = model
        self.config = model.config
        self.max_len = self.config.block_size if max_len is None else max_len
        self.length = 0
        if not 1 <= self.max_len <= self.config.block_size:
            raise ValueError(f"max_len must lie in [1, {self.config.block_size}], got {max_len}")

    def __call__(self, idx: Tensor) -> Tensor:
        """Run the tokens that were not seen yet: the prompt at first, then one at a time."""
        return self.step(idx) if self.length else self.prefill(idx)

    def prefill(self, idx: Tensor) -> Tensor:
        """Run a prompt, and forget everything before it.

        Args:
            idx: Int64, shape (1, P).

        Returns:
            The logits after its last token, shape (1, V).

        Raises:
            ValueError: If the prompt is empty, or does not fit into `max_len`.
            RuntimeError: Outside `torch.inference_mode()`.
        """
        stored = KVCache.for_model(self.model, 1, max(1, min(idx.shape[-1], self.max_len)))
        logits, _ = self.model(idx, cache=stored)
        self._store(stored.k, stored.v)
        self.length = stored.length
        return logits[:, -1]

    def step(self, token: Tensor) -> Tensor:
        """Run one token against everything stored; the first one is a prompt of its own.

        Args:
            token: Int64, shape (1, 1).

        Returns:
            The logits after it, shape (1, V).

        Raises:
            ValueError: If `token` is not one token of the vocabulary, or no position is left. The
                engine is left as it was.
            RuntimeError: Outside `torch.inference_mode()`.
        """
        if token.shape != (1, 1) or not 0 <= token.item() < self.config.vocab_size:
            raise ValueError(
                f"token must have shape (1, 1) and lie in [0, {self.config.vocab_size}), "
                f"got {token.tolist()} with shape {tuple(token.shape)}"
            )
        if self.length >= self.max_len:
            raise ValueError(f"a token must fit into max_len={self.max_len}, got one more")
        if not torch.is_inference_mode_enabled():
            raise RuntimeError("a decode step must run under torch.inference_mode()")
        if not self.length:
            return self.prefill(token)
        logits = self._step(token, self.length)
        self.length += 1  # last: nothing can fail after it
        return logits.view(1, -1)

    def reset(self) -> None:
        """Forget everything; the next tokens are a prompt."""
        self.length = 0

    def _store(self, k: Tensor, v: Tensor) -> None:
        """Make room, and take over the prompt's keys and values, each (L, 1, H, P, D)."""
        raise NotImplementedError  # each rung has its own

    def _step(self, token: Tensor, at: int) -> Tensor:
        """Run one token (1, 1) at position `at`; returns V logits in any shape."""
        raise NotImplementedError  # each rung has its own


def padded(stored: Tensor, length: int) -> Tensor:
    """Copy keys or values (…, P, D) into room for more positions, (…, length, D)."""
    return F.pad(stored, (0, 0, 0, length - stored.shape[-2]))


def parts_of(block: Block) -> tuple[nn.Module, ...]:
    """List a block's parts in the order of their use."""
    return block.ln_1, block.attn.qkv, block.attn.proj, block.ln_2, block.fc, block.proj


def pair(part: nn.Linear | nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return a part's weight and bias as plain tensors, on the same memory."""
    return part.weight.detach(), part.bias.detach()


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
