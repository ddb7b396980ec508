"""The key-value cache: what a decoder may keep, because the past never changes.

The key and value of layer ℓ at position j depend on the tokens 0 … j alone. Once computed, they can
be stored, and a decode step runs one token through the model instead of the whole text.

```{.python title="Prefill, then decode"}
import torch

from lab35 import KVCache, load_pretrained

model, tokenizer = load_pretrained()
prompt = torch.tensor([tokenizer.encode("Sherlock Holmes")])
cache = KVCache(model.config, batch_size=1)
with torch.inference_mode():
    logits, _ = model(prompt, cache=cache)          # all of the prompt at once
    token = logits[:, -1].argmax(-1, keepdim=True)
    logits, _ = model(token, cache=cache)           # one token against everything stored
assert cache.length == prompt.shape[1] + 1
```
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from lab35._arguments import integer
from lab35.model import GPT, GPTConfig, causal_mask

__all__ = ["Cache", "GrowingCache", "KVCache", "cache_bytes", "causal_mask"]


class Cache(Protocol):
    """What the model asks of a cache.

    Attributes:
        length: Positions stored so far; the next token's position.
    """

    length: int

    def reserve(self, config: GPTConfig, batch_size: int, t_new: int) -> None:
        """Make sure that a chunk fits, before anything is written.

        Args:
            config: Sizes of the model that asks.
            batch_size: Rows of the chunk, B.
            t_new: Tokens a row.

        Raises:
            ValueError: If the cache is of another model's sizes, or the chunk does not fit.
            RuntimeError: Outside `torch.inference_mode()`.
        """

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's chunk behind `length`, and return all of the layer up to its end.

        Args:
            layer: Index of the layer.
            k: Keys, shape (B, H, t_new, D).
            v: Values, shape (B, H, t_new, D).

        Returns:
            Keys and values, each of shape (B, H, length + t_new, D).
        """

    def advance(self, t_new: int) -> None:
        """Count a chunk as stored. The model calls it once, after the last layer.

        Args:
            t_new: Tokens a row.
        """

    def reset(self) -> None:
        """Forget everything, as if newly made."""


class KVCache:
    """A cache that owns all of its memory from the start and writes each chunk in place.

    Its shape never changes, which compilers and CUDA graphs need. Its price is the full length,
    used or not.

    Args:
        config: Sizes of the model.
        batch_size: Rows, B.
        max_len: Positions to make room for. Defaults to the model's block size.
        dtype: Element type of the buffers.
        device: Where the buffers live.

    Raises:
        ValueError: If `batch_size` is below 1, or `max_len` outside [1, block_size].
    """

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int,
        max_len: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        max_len = config.block_size if max_len is None else max_len
        batch_size = integer("batch_size", batch_size, 1)
        max_len = integer("max_len", max_len, 1, config.block_size)
        self._config = config
        shape = (config.n_layer, batch_size, config.n_head, max_len, config.head_dim)
        # Inference tensors: no gradient graph can ever hold on to a buffer that is overwritten.
        with torch.inference_mode():
            self._k = torch.zeros(shape, dtype=dtype, device=device)
            self._v = torch.zeros(shape, dtype=dtype, device=device)
        self._look_at_layers()
        self._length = 0

    @classmethod
    def for_model(cls, model: GPT, batch_size: int, max_len: int | None = None) -> KVCache:
        """Make a cache of a model's sizes, in the type and place of its weights.

        Args:
            model: The model that will use it.
            batch_size: Rows, B.
            max_len: Positions to make room for. Defaults to the model's block size.

        Returns:
            An empty cache.

        Raises:
            ValueError: As for the constructor.
        """
        weights = next(model.parameters())
        return cls(model.config, batch_size, max_len, dtype=weights.dtype, device=weights.device)

    @property
    def k(self) -> Tensor:
        """Keys, shape (L, B, H, max_len, D). Only the first `length` positions mean anything.

        What is assigned is copied. It may have other rows: those of a beam search, for one. The
        values then need the same ones before the next forward.

        Raises:
            ValueError: If what is assigned differs in more than its rows.
        """
        return self._k

    @k.setter
    def k(self, keys: Tensor) -> None:
        self._k = _replaced("k", self._k, keys)
        self._look_at_layers()

    @property
    def v(self) -> Tensor:
        """Values, shape (L, B, H, max_len, D), as for the keys.

        Raises:
            ValueError: If what is assigned differs in more than its rows.
        """
        return self._v

    @v.setter
    def v(self, values: Tensor) -> None:
        self._v = _replaced("v", self._v, values)
        self._look_at_layers()

    @property
    def length(self) -> int:
        """Positions stored so far. Set it lower to take tokens back: the next chunk begins there.

        Raises:
            ValueError: If what is assigned is no integer in [0, max_len].
        """
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        self._length = integer("length", length, 0, self.max_len)

    @property
    def max_len(self) -> int:
        """Positions that there is room for."""
        return self._k.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers, used or not."""
        return self.k.nbytes + self.v.nbytes

    def reserve(self, config: GPTConfig, batch_size: int, t_new: int) -> None:
        """Make sure that a chunk fits, before anything is written.

        Args:
            config: Sizes of the model that asks.
            batch_size: Rows of the chunk, B.
            t_new: Tokens a row.

        Raises:
            ValueError: If the sizes or rows differ from the cache's, or the chunk would overrun
                `max_len`.
            RuntimeError: Outside `torch.inference_mode()`.
        """
        _check_chunk(config, self._config, batch_size, self._k.shape[1], self._v.shape[1])
        if self._length + t_new > self._k.shape[3]:
            raise ValueError(
                f"a chunk must fit into the cache's max_len={self.max_len}, "
                f"got {t_new} tokens after {self.length} stored ones"
            )

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's chunk behind `length`, and return all of the layer up to its end.

        Args:
            layer: Index of the layer.
            k: Keys, shape (B, H, t_new, D).
            v: Values, shape (B, H, t_new, D).

        Returns:
            Views of the keys and values, each of shape (B, H, length + t_new, D).

        Raises:
            ValueError: If they are of another type than the buffers.
        """
        keys, values = self._layers[layer]  # each (B, H, max_len, D)
        if k.dtype != keys.dtype:
            _check_type(k, keys)
        start, t_new = self._length, k.shape[2]
        keys.narrow(2, start, t_new).copy_(k)
        values.narrow(2, start, t_new).copy_(v)
        return keys.narrow(2, 0, start + t_new), values.narrow(2, 0, start + t_new)

    def _look_at_layers(self) -> None:
        """Make each layer's views of the buffers once: a step of one token has no time for it."""
        self._layers = list(zip(self._k.unbind(), self._v.unbind(), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        # Unpickled by themselves, the views would no longer be views.
        return {name: value for name, value in vars(self).items() if name != "_layers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        with torch.inference_mode():  # a copy made outside of it is an ordinary tensor
            self._k, self._v = self._k.clone(), self._v.clone()
        self._look_at_layers()

    def advance(self, t_new: int) -> None:
        """Count a chunk as stored. The model calls it once, after the last layer.

        Args:
            t_new: Tokens a row.
        """
        self.length += t_new

    def reset(self) -> None:
        """Forget everything; the buffers stay where they are."""
        self._length = 0


class GrowingCache:
    """The `torch.cat` cache of most tutorials, for comparison.

    It takes no more memory than it uses. Each step copies everything stored so far into a new
    tensor, so that n steps copy O(n²) bytes, and no two steps have the same shape.

    Args:
        config: Sizes of the model.
        batch_size: Rows, B.
        dtype: Element type of the buffers.
        device: Where the buffers live.

    Raises:
        ValueError: If `batch_size` is below 1.
    """

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        batch_size = integer("batch_size", batch_size, 1)
        self._config = config
        shape = (batch_size, config.n_head, 0, config.head_dim)
        with torch.inference_mode():
            self._empty = torch.zeros(shape, dtype=dtype, device=device)
        self.reset()

    @property
    def k(self) -> Tensor:
        """Keys, shape (L, B, H, length, D). What is assigned is copied, and may have other rows.

        Raises:
            ValueError: If what is assigned differs in more than its rows.
        """
        return torch.stack([k[:, :, : self.length] for k in self._k])

    @k.setter
    def k(self, keys: Tensor) -> None:
        self._k = list(_replaced("k", self.k, keys).unbind())
        self._empty = self._k[0][:, :, :0].clone()  # of the new rows, for `reset`

    @property
    def v(self) -> Tensor:
        """Values, shape (L, B, H, length, D), as for the keys.

        Raises:
            ValueError: If what is assigned differs in more than its rows.
        """
        return torch.stack([v[:, :, : self.length] for v in self._v])

    @v.setter
    def v(self, values: Tensor) -> None:
        self._v = list(_replaced("v", self.v, values).unbind())

    @property
    def length(self) -> int:
        """Positions stored so far. Set it lower to take tokens back: the next chunk begins there.

        Raises:
            ValueError: If what is assigned is no integer between 0 and what is stored.
        """
        return self._length

    @length.setter
    def length(self, length: int) -> None:
        stored = min(layer.shape[2] for layer in self._k + self._v)
        self._length = integer("length", length, 0, stored)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(tensor.nbytes for tensor in self._k + self._v)

    def reserve(self, config: GPTConfig, batch_size: int, t_new: int) -> None:
        """Make sure that a chunk fits, before anything is written.

        Args:
            config: Sizes of the model that asks.
            batch_size: Rows of the chunk, B.
            t_new: Tokens a row; this cache grows to hold any number.

        Raises:
            ValueError: If the sizes or rows differ from the cache's.
            RuntimeError: Outside `torch.inference_mode()`.
        """
        _check_chunk(config, self._config, batch_size, self._k[0].shape[0], self._v[0].shape[0])

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Build one layer anew: what was stored, then the chunk.

        Args:
            layer: Index of the layer.
            k: Keys, shape (B, H, t_new, D).
            v: Values, shape (B, H, t_new, D).

        Returns:
            Keys and values, each of shape (B, H, length + t_new, D).

        Raises:
            ValueError: If they are of another type than what is stored.
        """
        _check_type(k, self._empty)
        # The slice drops what a forward that failed half-way may have left behind.
        self._k[layer] = torch.cat((self._k[layer][:, :, : self.length], k), dim=2)
        self._v[layer] = torch.cat((self._v[layer][:, :, : self.length], v), dim=2)
        return self._k[layer], self._v[layer]

    def advance(self, t_new: int) -> None:
        """Count a chunk as stored. The model calls it once, after the last layer.

        Args:
            t_new: Tokens a row.
        """
        self.length += t_new

    def reset(self) -> None:
        """Forget everything, and let go of the memory."""
        self._k = [self._empty] * self._config.n_layer
        self._v = [self._empty] * self._config.n_layer
        self._length = 0


def cache_bytes(
    *,
    n_layer: int,
    n_kv_head: int,
    head_dim: int,
    length: int,
    batch_size: int = 1,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Count the bytes of a cache: 2·L·B·H·T·D elements, for keys and values.

    With grouped-query attention (Ainslie et al. 2023) several query heads share one key-value head,
    and only the latter are stored.

    Args:
        n_layer: Layers, L.
        n_kv_head: Heads that have keys and values of their own, H.
        head_dim: Width of a head, D.
        length: Positions, T.
        batch_size: Rows, B.
        dtype: Element type.

    Returns:
        Bytes.

    Raises:
        ValueError: If a size is below 1.
    """
    sizes = {
        "n_layer": n_layer,
        "n_kv_head": n_kv_head,
        "head_dim": head_dim,
        "length": length,
        "batch_size": batch_size,
    }
    elements = math.prod(integer(name, size, 1) for name, size in sizes.items())
    return 2 * elements * dtype.itemsize


def _replaced(name: str, stored: Tensor, given: Tensor) -> Tensor:
    """Copy what was assigned to a buffer: into its place, or into a new one for other rows."""
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} must be a tensor, got a {type(given).__name__}")
    L, _, *sizes = stored.shape
    if given.ndim != 5 or 0 in given.shape[:2] or [given.shape[0], *given.shape[2:]] != [L, *sizes]:
        raise ValueError(
            f"{name} must have shape (L, B, H, T, D) = ({L}, B, {', '.join(map(str, sizes))}), "
            f"got {tuple(given.shape)}"
        )
    if given.dtype != stored.dtype or given.device != stored.device:
        raise ValueError(
            f"{name} must be {stored.dtype} on {stored.device}, got {given.dtype} on {given.device}"
        )
    with torch.inference_mode():
        return stored.copy_(given) if given.shape == stored.shape else given.clone()


def _check_type(new: Tensor, stored: Tensor) -> None:
    # Under autocast the model computes in another type than it is stored in, and attention casts.
    if new.dtype != stored.dtype and not torch.is_autocast_enabled(new.device.type):
        raise ValueError(
            f"cache must hold the model's {new.dtype}, got {stored.dtype}; KVCache.for_model does"
        )


def _check_chunk(
    config: GPTConfig, own: GPTConfig, batch_size: int, rows: int, rows_of_values: int
) -> None:
    if not torch.is_inference_mode_enabled():
        raise RuntimeError("a forward with a cache must run under torch.inference_mode()")
    if config is not own and _sizes(config) != _sizes(own):
        raise ValueError(
            f"cache must have the model's layers, heads and head width {_sizes(config)}, "
            f"got {_sizes(own)}"
        )
    if rows != rows_of_values:
        raise ValueError(
            f"cache.k and cache.v must have the same rows, got {rows} and {rows_of_values}"
        )
    if batch_size != rows:
        raise ValueError(f"idx must have the cache's {rows} rows, got {batch_size}")


def _sizes(config: GPTConfig) -> tuple[int, int, int]:
    return config.n_layer, config.n_head, config.head_dim
