"""The GPT that every chapter runs: GPT-2's architecture, small enough to read and to run anywhere.

The forward pass is written once and serves every loop. Without a cache it runs a whole sequence.
With one it runs only the new tokens and reads the keys and values of the earlier ones.

```{.python title="Scores for what follows each of five tokens"}
import torch

from lab35 import load_pretrained

model, tokenizer = load_pretrained()
logits, _ = model(torch.tensor([tokenizer.encode("Sherlock Holmes")]))
assert logits.shape == (1, 5, 512)
```
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab35._arguments import integer
from lab35._config import GPTConfig, weight_shapes

if TYPE_CHECKING:
    from lab35.cache import Cache

__all__ = [
    "GPT",
    "GPTConfig",
    "attention_mask",
    "causal_mask",
    "evaluating",
    "position_ids",
    "weight_shapes",
]


def causal_mask(
    t_new: int, t_total: int, offset: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Say which of `t_total` keys each of `t_new` queries may attend to.

    Query row i sits at absolute position `offset + i` and sees the keys 0 … `offset + i`.
    With `offset = t_total - t_new` the diagonal ends in the bottom right corner, which is what a
    chunk against a longer cache needs. SDPA's own `is_causal=True` starts it in the top left.

    Args:
        t_new: Queries, the rows.
        t_total: Keys, the columns.
        offset: Absolute position of the first query.
        device: Where to build the mask.

    Returns:
        Bool, shape (t_new, t_total). True means "may attend".

    Raises:
        ValueError: If a size is below 1, or the last query lies outside the keys.
    """
    t_new, t_total, offset = (
        integer(name, size)
        for name, size in (("t_new", t_new), ("t_total", t_total), ("offset", offset))
    )
    if t_new < 1 or t_total < 1:
        raise ValueError(f"t_new and t_total must be at least 1, got {t_new} and {t_total}")
    if not 0 <= offset <= t_total - t_new:
        raise ValueError(
            f"offset must lie in [0, t_total - t_new] = [0, {t_total - t_new}], got {offset}"
        )
    queries = torch.arange(offset, offset + t_new, device=device)
    keys = torch.arange(t_total, device=device)
    return keys <= queries[:, None]


def position_ids(mask: Tensor) -> Tensor:
    """Number the real tokens of each row from 0, whatever stands before them.

    Padding gets the position of the last real token before it, or 0. Its value does not matter:
    no real query attends to it.

    Args:
        mask: Bool, shape (B, T). True marks a real token.

    Returns:
        Int64, shape (B, T).

    Raises:
        ValueError: If `mask` is not a two-dimensional bool tensor.
    """
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"mask must be a bool tensor with shape (B, T), got a {type(mask).__name__}"
        )
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be bool with shape (B, T), got {mask.dtype} with shape {tuple(mask.shape)}"
        )
    return (mask.cumsum(-1) - 1).clamp(min=0)


_EVALUATING: WeakKeyDictionary[nn.Module, tuple[int, list[nn.Module]]] = WeakKeyDictionary()
"""How many blocks evaluate a model now, and the modules that were in training mode before."""
_MODES = threading.Lock()


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Switch dropout off for a block, and leave the mode of every module as it was.

    Blocks over one model may overlap, in threads or otherwise: the last to end restores the modes.
    A generator must not yield inside such a block, or the mode would leak into its caller's code.

    Args:
        model: A model. What is no `nn.Module` has no mode, and is left alone.

    Yields:
        Nothing.
    """
    if not isinstance(model, nn.Module):
        yield
        return
    with _MODES:
        training = _in_training(model)
        blocks, before = _EVALUATING.get(model, (0, []))
        for module in training:
            module.training = False
        counts = bool(training or blocks)  # else there is nothing to restore
        if counts:
            _EVALUATING[model] = blocks + 1, before + training
    try:
        yield
    finally:
        if counts:
            with _MODES:
                blocks, before = _EVALUATING.pop(model)
                if blocks > 1:
                    _EVALUATING[model] = blocks - 1, before
                else:
                    for module in before:
                        module.training = True


def _in_training(model: nn.Module) -> list[nn.Module]:
    """List the modules in training mode; `modules()` takes longer, at each step."""
    found, ahead = [], [model]
    while ahead:
        module = ahead.pop()
        if module is not None:  # a part that was taken out
            ahead.extend(module._modules.values())
            if module.training:
                found.append(module)
    return found


def attention_mask(t_new: int, offset: int, key_mask: Tensor | None, like: Tensor) -> Tensor:
    """Combine causality with padding.

    Args:
        t_new: Queries.
        offset: Absolute position of the first query.
        key_mask: Bool, shape (B, offset + t_new). False marks padding.
        like: Any tensor of shape (B, …), on the device where the mask is to be built.

    Returns:
        Bool, shape (t_new, offset + t_new), or (B, 1, t_new, offset + t_new) with a key mask.
        True means "may attend".

    Raises:
        ValueError: If `key_mask` is of another type or shape.
    """
    t_total = offset + t_new
    causal = causal_mask(t_new, t_total, offset, device=like.device)
    if key_mask is None:
        return causal
    if key_mask.dtype != torch.bool or key_mask.shape != (like.shape[0], t_total):
        raise ValueError(
            f"key_mask must be bool with shape (B, T) = ({like.shape[0]}, {t_total}), "
            f"got {key_mask.dtype} with shape {tuple(key_mask.shape)}"
        )
    # A padding query has no real key to look at. It always sees itself, so that no softmax is
    # empty and no NaN can leak out of a row that nobody reads.
    own = torch.eye(t_total, dtype=torch.bool, device=like.device)[offset:]  # (t_new, t_total)
    return (causal & key_mask[:, None, None, :]) | own


class Attention(nn.Module):
    """Multi-head causal self-attention over the new tokens and, with a cache, the earlier ones."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(
        self, x: Tensor, layer: int, cache: Cache | None, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Attend from x (B, T, H·D) to every visible key; returns (B, T, H·D)."""
        B, T, C = x.shape
        heads = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, D)
        if cache is not None:
            k, v = cache.write(layer, k, v)  # each (B, H, offset + T, D)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal
        )
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """A pre-LayerNorm transformer block: attention, then a tanh-GELU MLP, each with a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = config.dropout

    def forward(
        self, x: Tensor, layer: int, cache: Cache | None, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Map the residual stream (B, T, H·D) to itself."""
        y = self.attn(self.ln_1(x), layer, cache, mask, is_causal)
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))
        return x + F.dropout(y, self.dropout, self.training)


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and a tied output head.

    The architecture is GPT-2's (Radford et al. 2019): biases everywhere, LayerNorm before each
    sub-block and after the last one, tanh-GELU.

    Args:
        config: The sizes.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self._config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.apply(self._init_weights)
        # Each residual projection adds to the stream 2·L times: scale it so the sum keeps its size.
        for block in self.blocks:
            for proj in (block.attn.proj, block.proj):
                nn.init.normal_(proj.weight, std=0.02 / math.sqrt(2 * config.n_layer))

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    @property
    def config(self) -> GPTConfig:
        """The sizes that the weights were made with; a model of other sizes is another model."""
        return self._config

    @property
    def num_parameters(self) -> int:
        """Trainable numbers; the tied head counts once."""
        return sum(p.numel() for p in self.parameters())

    def forward(
        self,
        idx: Tensor,
        *,
        cache: Cache | None = None,
        key_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the new tokens and score every vocabulary entry as the next one.

        With a cache, `idx` holds only the tokens that the cache has not seen. Their keys and
        values are written behind the stored ones, and `cache.length` moves on once, at the end.

        Args:
            idx: Int64 token ids, shape (B, T).
            cache: Keys and values of the earlier tokens. Needs `torch.inference_mode()`.
            key_mask: Bool, shape (B, cache.length + T). False marks padding, which nobody sees.
            position_ids: Int64, shape (B, T) or (1, T). Defaults to `cache.length`, `+ 1`, ….
            targets: Int64, shape (B, T): the token that should follow each one.

        Returns:
            Logits of shape (B, T, V), and the mean cross-entropy in nats a token, or None
            without targets.

        Raises:
            ValueError: If a shape, an id or a position is out of range, or the sequence would
                outgrow the block or the cache. The cache is left as it was.
        """
        offset = 0 if cache is None else cache.length
        if idx.ndim != 2 or 0 in idx.shape:
            raise ValueError(f"idx must have shape (B, T), both at least 1, got {tuple(idx.shape)}")
        B, T = idx.shape
        named = (("idx", idx), ("position_ids", position_ids), ("targets", targets))
        for name, ids in named:
            if ids is not None and ids.dtype != torch.int64:
                raise ValueError(f"{name} must be int64, got {ids.dtype}")
        if position_ids is not None and position_ids.shape not in ((B, T), (1, T)):
            raise ValueError(
                f"position_ids must have shape ({B}, {T}) or (1, {T}), "
                f"got {tuple(position_ids.shape)}"
            )
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(
                f"targets must have the shape of idx, ({B}, {T}), got {tuple(targets.shape)}"
            )
        if offset + T > self.config.block_size:
            raise ValueError(
                f"idx must end within block_size={self.config.block_size} positions, "
                f"got {T} tokens after {offset} cached ones"
            )
        if cache is not None:
            cache.reserve(self.config, B, T)

        # One query sees every key, and a first chunk is a square: neither needs a mask tensor.
        is_causal = key_mask is None and offset == 0 and T > 1
        needs_mask = key_mask is not None or (offset > 0 and T > 1)
        mask = attention_mask(T, offset, key_mask, idx) if needs_mask else None

        x = self._embed(idx, position_ids, offset)  # (B, T, H·D)
        x = F.dropout(x, self.config.dropout, self.training)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, cache, mask, is_causal)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # (B, T, V)
        loss = None if targets is None else _cross_entropy(logits, targets)
        if cache is not None:
            cache.advance(T)  # once, and last: nothing can fail after it
        return logits, loss

    def _embed(self, idx: Tensor, positions: Tensor | None, offset: int) -> Tensor:
        """Add token and position embeddings: (B, T, H·D)."""
        if positions is None:
            where = self.wpe.weight[offset : offset + idx.shape[1]]
        else:
            where = _look_up(self.wpe, positions, "position_ids")
        return _look_up(self.wte, idx, "idx") + where


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Average the loss over all tokens, in nats; a target outside the vocabulary is named."""
    try:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    except IndexError:
        raise ValueError(
            f"targets must lie in [0, {logits.shape[-1]}), "
            f"got values from {targets.min().item()} to {targets.max().item()}"
        ) from None


def _look_up(table: nn.Embedding, ids: Tensor, name: str) -> Tensor:
    """Look ids up; an id outside the table is the caller's error, named as such."""
    try:
        return table(ids)
    except IndexError:
        raise ValueError(
            f"{name} must lie in [0, {table.num_embeddings}), "
            f"got values from {ids.min().item()} to {ids.max().item()}"
        ) from None
