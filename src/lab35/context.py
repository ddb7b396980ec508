"""What is left of a text that has outgrown the model's positions, and what each answer costs.

A model with `block_size` learned positions can be fed no more tokens than that at once. The
uncached loop slides: it runs the last `block_size` tokens anew for each one. The cached loop stops,
or it refills: it runs the last half of the block as a new prompt, and goes on. Nothing here knows a
model: these functions count columns and tokens, and `rotate` turns vectors.

```{.python title="The price of 1,000 tokens after 16"}
from lab35.context import refill_start, refill_token_forwards, slide_token_forwards

assert refill_start(129, block_size=128) == 129 - 64
assert slide_token_forwards(16, 1000, block_size=128) == 121_672
assert refill_token_forwards(16, 1000, block_size=128) == 1_897
```
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lab35._arguments import integer, number

__all__ = [
    "refill_start",
    "refill_token_forwards",
    "rotate",
    "slide_start",
    "slide_token_forwards",
]


def slide_start(length: int, block_size: int) -> int:
    """Find the first column that the sliding loop feeds: the block reaches back from the end.

    Args:
        length: Columns of the text so far, at least 1.
        block_size: Positions, at least 1.

    Returns:
        A column; 0 while the text fits.

    Raises:
        ValueError: If an argument is below 1.
    """
    length, block_size = integer("length", length, 1), integer("block_size", block_size, 1)
    return max(0, length - block_size)


def refill_start(length: int, block_size: int) -> int:
    """Find the first column that a refill keeps of a text.

    A text that fits is kept whole. Of a longer one the last `block_size // 2` columns are kept, and
    at least one: the newest token has to be fed.

    Args:
        length: Columns of the text so far, at least 1.
        block_size: Positions, at least 1.

    Returns:
        A column; 0 while the text fits.

    Raises:
        ValueError: If an argument is below 1.
    """
    length, block_size = integer("length", length, 1), integer("block_size", block_size, 1)
    return 0 if length <= block_size else length - _kept(block_size)


def slide_token_forwards(prompt_length: int, new_tokens: int, block_size: int) -> int:
    """Count the tokens a row that the sliding loop runs: min(P + n − 1, block_size) for the n-th.

    Args:
        prompt_length: P, at least 1.
        new_tokens: N, at least 0.
        block_size: Positions, at least 1.

    Returns:
        Token-forwards.

    Raises:
        ValueError: If an argument is out of range.
    """
    prompt_length = integer("prompt_length", prompt_length, 1)
    new_tokens = integer("new_tokens", new_tokens, 0)
    block_size = integer("block_size", block_size, 1)
    P, N = prompt_length, new_tokens
    growing = min(N, max(0, block_size - P))  # steps that leave room in the block
    return growing * P + growing * (growing - 1) // 2 + (N - growing) * block_size


def refill_token_forwards(prompt_length: int, new_tokens: int, block_size: int) -> int:
    """Count the tokens a row that the cached loop runs when it refills.

    Each step feeds one token, except that the first feeds the prompt and a refill feeds what it
    keeps. A refill makes room for `block_size - block_size // 2 + 1` more tokens, so that a long
    text costs about two token-forwards a token.

    Args:
        prompt_length: P, at least 1. Of a prompt longer than the block, what a refill keeps counts.
        new_tokens: N, at least 0.
        block_size: Positions, at least 1.

    Returns:
        Token-forwards.

    Raises:
        ValueError: If an argument is out of range.
    """
    prompt_length = integer("prompt_length", prompt_length, 1)
    new_tokens = integer("new_tokens", new_tokens, 0)
    block_size = integer("block_size", block_size, 1)
    if new_tokens == 0:
        return 0
    kept = _kept(block_size)
    fed_first = prompt_length - refill_start(prompt_length, block_size)
    beyond = max(0, new_tokens - (block_size - fed_first + 1))
    refills = math.ceil(beyond / (block_size - kept + 1))
    return fed_first + new_tokens - 1 + refills * (kept - 1)


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Turn queries or keys by their positions: rotary embedding, RoPE (Su et al. 2021).

    Numbers 2m and 2m + 1 of a vector are a point in a plane, turned by position · base^(−2m/D).
    Both sides of a dot product turned, what is left is the difference of their positions: a score
    depends on i − j alone.

    Args:
        x: Queries or keys, shape (…, T, D), D even.
        positions: Int64, shape (T,).
        base: The slowest plane turns about 1/base radians a position; above 0.

    Returns:
        Shape (…, T, D), with the dtype of `x`.

    Raises:
        ValueError: If D is odd, `positions` are not int64 with shape (T,), or `base` is not
            finite and above 0.
    """
    for name, given in (("x", x), ("positions", positions)):
        if not isinstance(given, Tensor):
            raise ValueError(f"{name} must be a tensor, got a {type(given).__name__}")
    if x.ndim < 2 or not x.is_floating_point() or x.shape[-1] % 2:
        raise ValueError(
            f"x must be floats with shape (…, T, D), D even, got {x.dtype} with {tuple(x.shape)}"
        )
    T, D = x.shape[-2:]
    if positions.dtype != torch.int64 or positions.shape != (T,):
        raise ValueError(
            f"positions must be int64 with shape (T,) = ({T},), "
            f"got {positions.dtype} with shape {tuple(positions.shape)}"
        )
    base = number("base", base, "finite and above 0")
    if not (math.isfinite(base) and base > 0):
        raise ValueError(f"base must be finite and above 0, got {base}")
    # In float64, because an angle of a million radians has lost its digits in float32.
    planes = torch.arange(0, D, 2, dtype=torch.float64, device=x.device)
    angles = positions.double()[:, None] * base ** (-planes / D)  # (T, D/2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _kept(block_size: int) -> int:
    return max(1, block_size // 2)
