"""From logits to the next token, in one fixed order: temperature, top-k, top-p, draw.

```{.python title="One token a row"}
import torch

from lab35 import sample_next

logits = torch.tensor([[1.0, 3.0, 2.0]])
token = sample_next(logits, temperature=0.8, top_k=2)
assert token.shape == (1, 1) and token.item() in (1, 2)
```

Nothing here knows a model: every function takes logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lab35._arguments import check_generator, integer, number

__all__ = [
    "Sampler",
    "check_sampling",
    "filtered_logits",
    "probabilities",
    "race",
    "sample_next",
]

NARROW = 8
"""Where one token of so many may be kept, the cut is found sooner than all of them are sorted."""


@dataclass(frozen=True)
class Sampler:
    """The settings of `sample_next`, for those who draw again and again.

    Attributes:
        temperature: What logits are divided by. 0 takes the argmax and draws nothing.
        top_k: Keep this many tokens; None keeps all.
        top_p: Keep the smallest set of top tokens whose mass reaches this; None keeps all.
        generator: Source of randomness. With one, the global generator stays as it was.

    Raises:
        ValueError: If a setting is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        checked = check_sampling(self.temperature, self.top_k, self.top_p)
        for name, value in zip(("temperature", "top_k", "top_p"), checked, strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose one token a row.

        Args:
            logits: Scores of the vocabulary, shape (B, V).

        Returns:
            Int64 token ids, shape (B, 1).

        Raises:
            ValueError: As `sample_next` does.
        """
        if self.temperature == 0:
            token = _best(logits)[1]
            check_generator("generator", self.generator, token.device)
            return token
        probs = probabilities(logits, self.temperature, self.top_k, self.top_p)
        check_generator("generator", self.generator, probs.device)
        return race(probs, torch.empty_like(probs).exponential_(generator=self.generator))

    def is_narrow(self, vocab_size: int) -> bool:
        """Say whether so few tokens are kept that they are found without sorting all of them.

        Args:
            vocab_size: Tokens, V.

        Returns:
            Whether top-k keeps at most one of `NARROW`.
        """
        return self.top_k is not None and NARROW * self.top_k <= vocab_size


def sample_next(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose one token a row.

    Args:
        logits: Scores of the vocabulary, shape (B, V).
        temperature: What logits are divided by. 0 takes the argmax and draws nothing.
        top_k: Keep this many tokens; None keeps all.
        top_p: Keep the smallest set of top tokens whose mass reaches this; None keeps all.
        generator: Source of randomness. With one, the global generator stays as it was.

    Returns:
        Int64 token ids, shape (B, 1).

    Raises:
        ValueError: If a setting is out of range, or the logits are not (B, V), hold NaN or +∞, or
            have a row that is all −∞.
    """
    return Sampler(temperature, top_k, top_p, generator)(logits)


def probabilities(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Show the distribution that `sample_next` draws from.

    Args:
        logits: Scores of the vocabulary, shape (B, V).
        temperature: What logits are divided by. At 0 the argmax has probability 1.
        top_k: Keep this many tokens; None keeps all.
        top_p: Keep the smallest set of top tokens whose mass reaches this; None keeps all.

    Returns:
        Probabilities, shape (B, V). Each row sums to 1; a token that was filtered out has 0.

    Raises:
        ValueError: As `sample_next` does.
    """
    return filtered_logits(logits, temperature, top_k, top_p).softmax(dim=-1)


def filtered_logits(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Apply temperature, then top-k, then top-p; what is filtered out becomes −∞.

    Top-k keeps exactly min(k, V) tokens, and of equal logits the lower ids (Fan et al. 2018). Top-p
    keeps the shortest run of tokens, from the most likely down, whose mass reaches p
    (Holtzman et al. 2019); it sees the distribution that temperature and top-k have left.

    Args:
        logits: Scores of the vocabulary, shape (B, V).
        temperature: What logits are divided by. At 0 only the argmax is kept.
        top_k: Keep this many tokens; None keeps all.
        top_p: Keep the smallest set of top tokens whose mass reaches this; None and 1 keep all.

    Returns:
        Shape (B, V), at least float32. Each row is shifted so that its highest logit is 0, which
        changes no probability.

    Raises:
        ValueError: As `sample_next` does.
    """
    temperature, top_k, top_p = check_sampling(temperature, top_k, top_p)
    best, _ = _best(logits)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        top_k, top_p, temperature = 1, None, 1.0
    top_p = None if top_p == 1 else top_p

    # Subtract first: the highest logit is then 0 / temperature, and no temperature overflows it.
    limits = torch.finfo(logits.dtype)
    divisor = min(max(temperature, limits.tiny), limits.max)
    scaled = (logits - best).div_(divisor)
    if top_k is None and top_p is None:
        return scaled
    lowest = _lowest_kept(logits, divisor, top_k, top_p)
    if lowest is not None:
        return scaled.masked_fill_(logits < lowest, -math.inf)

    # Rank the logits as they came: rounding may make two of the scaled ones equal. The sort is
    # stable, so that equal logits stay in the order of their ids, as in argmax.
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ordered = scaled.gather(-1, order)
    if top_k is not None:
        ordered[:, top_k:] = -math.inf
    if top_p is not None:
        probs = ordered.softmax(dim=-1)
        dropped = probs.cumsum(dim=-1) - probs >= top_p  # the mass before each token
        dropped[:, 0] = False  # whatever p rounds to
        ordered = ordered.masked_fill(dropped, -math.inf)
    return torch.empty_like(ordered).scatter_(-1, order, ordered)


def _lowest_kept(
    logits: Tensor, divisor: float, top_k: int | None, top_p: float | None
) -> Tensor | float | None:
    """Find the lowest logit that each row keeps, (B, 1), without a sort of the whole vocabulary.

    Returns None where a sort has to decide: many tokens may be kept, equal logits lie on both sides
    of the cut, so that their ids matter, or the cut of top-p is so close that rounding matters.
    """
    if top_k is None or NARROW * top_k > logits.shape[1]:
        return None
    lowest = []
    for *front, following in logits.topk(top_k + 1, dim=-1).values.tolist():
        if top_p is not None:
            weights = [math.exp((logit - front[0]) / divisor) for logit in front]
            total = sum(weights)
            rounding = (top_k + 32) * 2.0**-23 * total  # of float32, and more than there can be
            before, kept = 0.0, 0  # the mass before each token
            while kept < top_k and before < top_p * total - rounding:
                before += weights[kept]
                kept += 1
            if kept < top_k and before < top_p * total + rounding:
                return None
            front, following = front[:kept], [*front, following][kept]
        if front[-1] == following:
            return None
        lowest.append(front[-1])
    return lowest[0] if len(lowest) == 1 else logits.new_tensor(lowest)[:, None]


def race(probs: Tensor, times: Tensor) -> Tensor:
    """Draw one token a row by an exponential race, which is how `torch.multinomial` draws one.

    Token i would finish after a time of `times[i] / probs[i]`, an exponential distribution of rate
    `probs[i]`, and is the first with that probability. The same generator gives the same token as
    `torch.multinomial(probs, 1)`, which does more checks.

    Args:
        probs: Probabilities, shape (B, V).
        times: Draws of an exponential distribution of rate 1, shape (B, V).

    Returns:
        Int64 token ids, shape (B, 1).
    """
    return (probs / times).argmax(dim=-1, keepdim=True)


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's highest logit and its lowest id, each (B, 1); refuse impossible rows."""
    if not isinstance(logits, Tensor) or logits.is_complex():
        raise ValueError(f"logits must be a real tensor with shape (B, V), got {logits!r}")
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(f"logits must have shape (B, V), got {tuple(logits.shape)}")
    best, token = logits.max(dim=-1, keepdim=True)  # NaN in a row makes its maximum NaN
    if not all(math.isfinite(value) for (value,) in best.tolist()):  # cheaper than torch's
        raise ValueError("logits must hold no NaN and no +inf, and a finite value in each row")
    return best, token


def check_sampling(
    temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> tuple[float, int | None, float | None]:
    """Refuse settings that no distribution can follow.

    Args:
        temperature: Finite and at least 0.
        top_k: None, or an integer of at least 1.
        top_p: None, or in (0, 1].

    Returns:
        The three as Python's own numbers, whatever type they came in.

    Raises:
        ValueError: If one is out of range. `top_p=0` is a mistake, not another spelling of greedy.
    """
    temperature = number("temperature", temperature, "finite and at least 0")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
    if top_k is not None:
        top_k = integer("top_k", top_k, 1, allowed="None or an integer of at least 1")
    if top_p is not None:
        top_p = number("top_p", top_p, "in (0, 1], or None")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must be None or lie in (0, 1], got {top_p}")
    return temperature, top_k, top_p
