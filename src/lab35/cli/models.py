"""What runs: the checkpoint, the device, the threads, the engine, and prompts as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import lab35

if TYPE_CHECKING:
    from torch import Tensor

    from lab35 import GPT, Tokenizer
    from lab35.speed import EngineName


@contextmanager
def loaded(
    checkpoint: Path | None, device: str, thread_count: int
) -> Iterator[tuple[GPT, Tokenizer]]:
    """Load a checkpoint onto a device that is there, and set torch's threads for the block.

    Threads belong to the process: whoever calls `main` as a function gets its own back.
    """
    with lab35.timing.threads(thread_count):
        if device != "cpu":
            _check_device(device)
        model, tokenizer = lab35.load_pretrained(checkpoint)
        yield model.to(device), tokenizer


def _check_device(device: str) -> None:
    """Refuse a device that torch does not see."""
    import torch

    seen = ["cpu"] + [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if device not in seen and not (device == "cuda" and len(seen) > 1):
        raise ValueError(f"--device must be one of {', '.join(seen)}, got {device!r}")


def ready(
    engine: EngineName | None, model: GPT, *, rows: int = 1, use_cache: bool = True
) -> EngineName:
    """Choose the engine, and have compiled what must be before a text begins."""
    name = lab35.speed.choose_engine(engine, model, rows, use_cache=use_cache)
    what_runs(name, model)
    return name


def what_runs(engine: EngineName, model: GPT) -> str:
    """Name the engine that runs when this one is asked for: lean, where it cannot be had."""
    return engine if engine == "eager" else lab35.speed.new_engine(engine, model).name


def encode(
    model: GPT, tokenizer: Tokenizer, prompt: str, at_most: int | None = None, advice: str = ""
) -> Tensor:
    """Turn a prompt into ids, shape (1, P), where the model is.

    Args:
        model: What is to read them.
        tokenizer: Its tokenizer.
        prompt: The text.
        at_most: The most tokens that can be used, if there is a limit.
        advice: What to say after the limit.

    Returns:
        Int64, shape (1, P).

    Raises:
        ValueError: If the prompt is too long.
    """
    import torch

    refusal = f"prompt must hold at most {at_most} tokens, got {{}}{advice}"
    size = len(prompt.encode())
    if at_most is not None and size > at_most:  # a token is a byte at least
        # To count the tokens of a long text takes long; this many they are at least.
        longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        least = -(-size // longest)
        if least > at_most:
            raise ValueError(refusal.format(f"at least {least:,}"))
    ids = tokenizer.encode(prompt)
    if at_most is not None and len(ids) > at_most:
        raise ValueError(refusal.format(len(ids)))
    return torch.tensor([ids], device=model.wte.weight.device)


def pad(model: GPT, tokenizer: Tokenizer, rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Join rows of ids into a batch and its mask, where the model is."""
    idx, key_mask = lab35.left_pad(rows, tokenizer.eos_id)
    return idx.to(model.wte.weight.device), key_mask.to(model.wte.weight.device)
