"""What runs: the checkpoint, the device, the engine, and prompts as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from lab35.batching import left_pad
from lab35.checkpoint import load_pretrained
from lab35.model import GPT
from lab35.speed import EngineName, choose_engine, new_engine
from lab35.tokenizer import Tokenizer


def load(checkpoint: Path | None, device: str) -> tuple[GPT, Tokenizer]:
    """Load a checkpoint onto a device that is there."""
    seen = ["cpu"] + [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if device not in seen and not (device == "cuda" and len(seen) > 1):
        raise ValueError(f"--device must be one of {', '.join(seen)}, got {device!r}")
    model, tokenizer = load_pretrained(checkpoint)
    return model.to(device), tokenizer


def ready(
    engine: EngineName | None, model: GPT, *, batch: bool = False, use_cache: bool = True
) -> EngineName:
    """Choose the engine, and have compiled what must be before a text begins.

    A batch is padded, if only by nothing, and padding is left to the model itself.
    """
    if engine is not None and engine not in get_args(EngineName):
        known = ", ".join(get_args(EngineName))
        raise ValueError(f"--engine must be one of {known}, got {engine!r}")
    if batch and engine not in (None, "eager"):
        raise ValueError(f"--batch-prompts must stand without --engine {engine}, got both")
    if not use_cache and engine not in (None, "eager"):
        raise ValueError(f"--no-cache must stand without --engine {engine}, got both")
    name = "eager" if batch else choose_engine(engine, model, 1, use_cache=use_cache)
    what_runs(name, model)
    return name


def what_runs(engine: EngineName, model: GPT) -> str:
    """Name the engine that runs when this one is asked for: lean, where it cannot be had."""
    return engine if engine == "eager" else new_engine(engine, model).name


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
        ValueError: If the prompt is empty or too long.
    """
    if not prompt:
        raise ValueError("prompt must hold at least one character, got ''")
    refusal = f"prompt must hold at most {at_most} tokens, got {{}}{advice}"
    if at_most is not None:
        # To count the tokens of a long text takes long; this many they are at least.
        longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        least = -(-len(prompt.encode()) // longest)
        if least > at_most:
            raise ValueError(refusal.format(f"at least {least:,}"))
    ids = tokenizer.encode(prompt)
    if at_most is not None and len(ids) > at_most:
        raise ValueError(refusal.format(len(ids)))
    return torch.tensor([ids], device=model.wte.weight.device)


def pad(model: GPT, tokenizer: Tokenizer, rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Join rows of ids into a batch and its mask, where the model is."""
    idx, key_mask = left_pad(rows, tokenizer.eos_id)
    return idx.to(model.wte.weight.device), key_mask.to(model.wte.weight.device)
