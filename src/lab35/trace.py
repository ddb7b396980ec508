"""One decode step, told: what went in, what came out, what the filters left, what was drawn.

```{.python title="Where did that token come from?"}
import torch

from lab35 import load_pretrained, trace_step

model, tokenizer = load_pretrained()
idx = torch.tensor([tokenizer.encode("Sherlock Holmes")])
trace = trace_step(model, idx, temperature=0)
assert trace.position == 4
assert trace.drawn == trace.candidates[0].token
```
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lab35._arguments import check_generator, integer
from lab35.cache import KVCache
from lab35.model import GPT, evaluating
from lab35.sampling import check_sampling, probabilities, sample_next
from lab35.tokenizer import Tokenizer

__all__ = ["Candidate", "Trace", "trace_step"]


@dataclass(frozen=True)
class Candidate:
    """One entry of the vocabulary on its way through the filters.

    Attributes:
        token: Its id.
        logit: The model's score.
        probability: The model's odds, at temperature 1 and unfiltered.
        tempered: After the temperature.
        final: After top-k and top-p; 0 if it was filtered out.
    """

    token: int
    logit: float
    probability: float
    tempered: float
    final: float


@dataclass(frozen=True)
class Trace:
    """What one decode step saw, and what it did.

    Attributes:
        token: The id that was fed.
        position: Its absolute position.
        cache_before: Positions stored before the step.
        cache_after: Positions stored after it.
        candidates: The likeliest tokens by the model's own odds, best first.
        vocab_size: V.
        kept_by_top_k: Tokens that top-k left.
        kept_by_top_p: Tokens that top-p left of those.
        drawn: The id that was chosen.
        drawn_final: Its probability in the final distribution.
    """

    token: int
    position: int
    cache_before: int
    cache_after: int
    candidates: tuple[Candidate, ...]
    vocab_size: int
    kept_by_top_k: int
    kept_by_top_p: int
    drawn: int
    drawn_final: float

    def as_dict(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the trace for JSON, with the bytes of every token spelled in hexadecimal.

        Args:
            tokenizer: What the ids belong to.

        Returns:
            Plain numbers, strings, lists and dictionaries.
        """
        told = asdict(self) | {"candidates": [asdict(each) for each in self.candidates]}
        told["token_bytes"] = tokenizer.token_bytes(self.token).hex(" ")
        told["drawn_bytes"] = tokenizer.token_bytes(self.drawn).hex(" ")
        for candidate in told["candidates"]:
            candidate["bytes"] = tokenizer.token_bytes(candidate["token"]).hex(" ")
        return told


@torch.inference_mode()
def trace_step(
    model: GPT,
    idx: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    candidates: int = 5,
) -> Trace:
    """Run the decode step that follows a text, and tell what happened in it.

    All tokens but the last are prefilled. The last one is the step.

    Args:
        model: The GPT.
        idx: Int64 token ids, shape (1, T).
        temperature: See `sample_next`.
        top_k: See `sample_next`.
        top_p: See `sample_next`.
        generator: See `sample_next`; the draw is the one that `generate` would make.
        candidates: How many of the likeliest tokens to tell.

    Returns:
        The trace.

    Raises:
        ValueError: If `idx` is not (1, T) or does not fit the model, a setting is out of range, or
            `candidates` is below 1.
    """
    if not isinstance(idx, Tensor):
        raise ValueError(f"idx must be an int64 tensor, got a {type(idx).__name__}")
    if idx.ndim != 2 or idx.shape[0] != 1 or idx.shape[1] < 1:
        raise ValueError(f"idx must have shape (1, T), T at least 1, got {tuple(idx.shape)}")
    candidates = integer("candidates", candidates, 1)
    temperature, top_k, top_p = check_sampling(temperature, top_k, top_p)
    check_generator("generator", generator, idx.device)
    cache = KVCache.for_model(model, 1)
    with evaluating(model):
        if idx.shape[1] > 1:
            model(idx[:, :-1], cache=cache)
        before = cache.length
        logits = model(idx[:, -1:], cache=cache)[0][:, -1]

    raw, tempered = probabilities(logits), probabilities(logits, temperature)
    after_k = probabilities(logits, temperature, top_k)
    final = probabilities(logits, temperature, top_k, top_p)
    drawn = sample_next(logits, temperature, top_k, top_p, generator).item()
    best = logits[0].sort(descending=True, stable=True).indices[:candidates].tolist()
    return Trace(
        token=idx[0, -1].item(),
        position=before,
        cache_before=before,
        cache_after=cache.length,
        candidates=tuple(
            Candidate(
                token=token,
                logit=logits[0, token].item(),
                probability=raw[0, token].item(),
                tempered=tempered[0, token].item(),
                final=final[0, token].item(),
            )
            for token in best
        ),
        vocab_size=logits.shape[1],
        kept_by_top_k=int((after_k > 0).sum()),
        kept_by_top_p=int((final > 0).sum()),
        drawn=drawn,
        drawn_final=final[0, drawn].item(),
    )
