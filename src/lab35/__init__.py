"""lab35: text generation with a small GPT, in code that a chapter explains line by line.

```{.python title="A model that is ready to run"}
from lab35 import load_pretrained

model, tokenizer = load_pretrained()
assert model.num_parameters == 875_264
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab35.batching import completions, left_pad
    from lab35.cache import GrowingCache, KVCache, cache_bytes
    from lab35.checkpoint import CheckpointError, load_pretrained
    from lab35.loop import (
        ContextLimitError,
        Generation,
        Step,
        decode_steps,
        generate,
        token_forwards,
    )
    from lab35.model import GPT, GPTConfig, causal_mask, position_ids
    from lab35.sampling import filtered_logits, probabilities, sample_next
    from lab35.streaming import Event, generate_stream, stream_decode
    from lab35.tokenizer import Tokenizer
    from lab35.trace import Trace, trace_step
    from lab35.verification import Divergence, VerifyReport, verify, verify_cache

__all__ = [
    "GPT",
    "CheckpointError",
    "ContextLimitError",
    "Divergence",
    "Event",
    "GPTConfig",
    "Generation",
    "GrowingCache",
    "KVCache",
    "Step",
    "Tokenizer",
    "Trace",
    "VerifyReport",
    "cache_bytes",
    "causal_mask",
    "completions",
    "decode_steps",
    "filtered_logits",
    "generate",
    "generate_stream",
    "left_pad",
    "load_pretrained",
    "position_ids",
    "probabilities",
    "sample_next",
    "stream_decode",
    "token_forwards",
    "trace_step",
    "verify",
    "verify_cache",
]

_HOMES = {
    "batching": ["completions", "left_pad"],
    "cache": ["GrowingCache", "KVCache", "cache_bytes"],
    "checkpoint": ["CheckpointError", "load_pretrained"],
    "loop": [
        "ContextLimitError",
        "Generation",
        "Step",
        "decode_steps",
        "generate",
        "token_forwards",
    ],
    "model": ["GPT", "GPTConfig", "causal_mask", "position_ids"],
    "sampling": ["filtered_logits", "probabilities", "sample_next"],
    "speed": [],
    "streaming": ["Event", "generate_stream", "stream_decode"],
    "timing": [],
    "tokenizer": ["Tokenizer"],
    "trace": ["Trace", "trace_step"],
    "verification": ["Divergence", "VerifyReport", "verify", "verify_cache"],
}
"""Where each name is defined. It is loaded when it is first asked for, and torch with it, so that
the command line can answer Ctrl-C, and a question that needs no model, from its first moment. Two
modules are here for their own sake: what they hold is asked for by `lab35.speed.NAME`."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name == module:
            return import_module(f"{__name__}.{module}")
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOMES})
