"""What can be said on the command line: the options that commands share, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lab35.model import GPT
from lab35.sampling import check_sampling

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


EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="Run the cached steps with eager, lean, compiled or numba; lean if it can be.",
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
        check_sampling(**self.choice())
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2**63), got {self.seed}")

    def choice(self) -> dict[str, Any]:
        """Return what sampling takes."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    def generator(self, model: GPT) -> torch.Generator:
        """Return a fresh source of draws, where a model's logits are."""
        return torch.Generator(model.wte.weight.device).manual_seed(self.seed)


DEFAULTS = Settings()
