"""Speed: a ladder of decode steps, from the textbook down to what memory allows.

A rung runs one token a row through the model, against everything stored before it. All rungs
compute the same logits, up to float rounding; each removes one thing that the rung above it pays
for.

`engine` is what rungs share, with `weights` and `prompt`. `eager`, `rungs`, `rows`, `compiled`,
`recorded` and `loops` hold them, `storage` keeps what was compiled, and `choice` says which one
runs.

```{.python title="The same text, by two engines"}
import torch

from lab35 import generate, load_pretrained

model, tokenizer = load_pretrained()
prompt = torch.tensor([tokenizer.encode("Sherlock Holmes")])
eager = generate(model, prompt, 20, temperature=0, engine="eager")
lean = generate(model, prompt, 20, temperature=0, engine="lean")
assert torch.equal(eager.tokens, lean.tokens)
```
"""

from __future__ import annotations

from lab35.speed.choice import EngineName, choose_engine, new_engine, why_not
from lab35.speed.compiled import Compiled
from lab35.speed.eager import Eager
from lab35.speed.engine import Engine
from lab35.speed.loops import Jitted
from lab35.speed.recorded import Recorded
from lab35.speed.rows import JittedRows, LeanRows
from lab35.speed.rungs import Lean, OneWrite, Textbook
from lab35.speed.storage import cache_folder

__all__ = [
    "Compiled",
    "Eager",
    "Engine",
    "EngineName",
    "Jitted",
    "JittedRows",
    "Lean",
    "LeanRows",
    "OneWrite",
    "Recorded",
    "Textbook",
    "cache_folder",
    "choose_engine",
    "new_engine",
    "why_not",
]
