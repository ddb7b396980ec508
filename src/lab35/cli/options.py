"""What can be said on the command line: the options that commands share, and their defaults.

What can be refused by its words alone is refused here, before anything that takes long is loaded.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from lab35._engines import EngineName

if TYPE_CHECKING:
    import torch

    from lab35.model import GPT

DEFAULT_PROMPT = "Sherlock Holmes"


PromptOption = Annotated[
    str | None, typer.Option("--prompt", help=f"Text to continue; {DEFAULT_PROMPT!r} if none.")
]


FileOption = Annotated[
    str | None,
    typer.Option(
        "--prompt-file", help="Read the prompt from a file, or from standard input if it is -."
    ),
]


TokensOption = Annotated[int, typer.Option("--max-new-tokens", help="Tokens to add at most.")]


TemperatureOption = Annotated[
    float, typer.Option("--temperature", help="0 is greedy, 1 the model's odds.")
]


TopKOption = Annotated[
    int | None, typer.Option("--top-k", help="Keep this many tokens; 512 keeps all.")
]


TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", help="Keep the top tokens that reach this mass; 1 keeps all."),
]


SeedOption = Annotated[int, typer.Option("--seed", help="Seed of the draws.")]


CheckpointOption = Annotated[
    Path | None, typer.Option("--checkpoint", help="Folder of a model of your own.")
]


DeviceOption = Annotated[
    str, typer.Option("--device", help="Where to run: cpu, or cuda where torch sees a GPU.")
]


def _known_engine(name: str | None) -> str | None:
    """Refuse an engine that does not exist."""
    if name is not None and name not in get_args(EngineName):
        known = ", ".join(get_args(EngineName))
        raise ValueError(f"--engine must be one of {known}, got {name!r}")
    return name


EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        callback=_known_engine,
        help="Run the cached steps with eager, lean, compiled or numba; lean if it can be.",
    ),
]


def _at_most_processors(count: int) -> int:
    """Refuse more threads than processors: they wait for one another, or end the process."""
    processors = os.cpu_count() or 1
    if count > processors:
        raise ValueError(
            f"--threads must lie in [1, {processors}], the processors here, got {count}"
        )
    return count


ThreadsOption = Annotated[
    int,
    typer.Option(
        "--threads", min=1, callback=_at_most_processors, help="Threads that torch may use."
    ),
]


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True)
class Settings:
    """How to choose, and how much."""

    temperature: float = 0.8
    top_k: int | None = 40
    top_p: float | None = 0.95
    max_new_tokens: int = 64
    seed: int = 1337

    def __post_init__(self) -> None:
        temperature, top_k, top_p = self.temperature, self.top_k, self.top_p
        # As the library checks them, but before anything is loaded, and by the options' names.
        for option, value, good, allowed in (
            ("temperature", temperature, 0 <= temperature < math.inf, "be finite and at least 0"),
            ("top-k", top_k, top_k is None or top_k >= 1, "be at least 1"),
            ("top-p", top_p, top_p is None or 0 < top_p <= 1, "lie in (0, 1]"),
            ("max-new-tokens", self.max_new_tokens, self.max_new_tokens >= 0, "be at least 0"),
            ("seed", self.seed, 0 <= self.seed < 2**63, "lie in [0, 2**63)"),
        ):
            if not good:
                raise ValueError(f"--{option} must {allowed}, got {value}")

    def choice(self) -> dict[str, Any]:
        """Return what sampling takes."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    def generator(self, model: GPT) -> torch.Generator:
        """Return a fresh source of draws, where a model's logits are."""
        import torch

        return torch.Generator(model.wte.weight.device).manual_seed(self.seed)


DEFAULTS = Settings()
