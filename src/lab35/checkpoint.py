"""Save and load a model with its tokenizer, and refuse files that are not the ones that were saved.

A checkpoint is a folder of three files: `model.safetensors` with the weights, the configuration
and the training record, `tokenizer.json`, and `SHA256SUMS` with the digest of both. Nothing is ever
unpickled, so a checkpoint can hold no code. `sha256sum --check SHA256SUMS` works there too.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file

from lab35.model import GPT, GPTConfig
from lab35.tokenizer import Tokenizer

__all__ = [
    "CheckpointError",
    "load_pretrained",
    "read_digests",
    "read_record",
    "replacing",
    "save_checkpoint",
]

ASSETS = Path(__file__).parent / "assets"
MODEL_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
DIGESTS_FILE = "SHA256SUMS"


class CheckpointError(Exception):
    """A checkpoint's file is missing, damaged, or not the one that was saved."""


def load_pretrained(path: str | Path | None = None) -> tuple[GPT, Tokenizer]:
    """Load a model and its tokenizer, after checking the digest of both files.

    Args:
        path: A folder that `save_checkpoint` wrote. Defaults to the checkpoint of the course.

    Returns:
        The model in eval mode, and the tokenizer.

    Raises:
        CheckpointError: If a file is missing, its sha256 differs from the recorded one, or the
            files do not fit each other.
    """
    folder = ASSETS if path is None else Path(path)
    digests = read_digests(folder)
    for name in (MODEL_FILE, TOKENIZER_FILE):
        _check_digest(folder / name, digests.get(name))
    try:
        model = GPT(GPTConfig(**_read_metadata(folder)["config"]))
        model.load_state_dict(load_file(folder / MODEL_FILE))
        tokenizer = Tokenizer.from_file(folder / TOKENIZER_FILE)
    except (RuntimeError, TypeError, KeyError, ValueError, safetensors.SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder}: not a lab35 checkpoint ({reason}); save it again"
        ) from None
    if model.config.vocab_size != tokenizer.vocab_size:
        raise CheckpointError(
            f"{folder}: the model knows {model.config.vocab_size} tokens and the tokenizer "
            f"{tokenizer.vocab_size}; save both from the same training run"
        )
    return model.eval(), tokenizer


def read_record(path: str | Path | None = None) -> dict[str, Any]:
    """Read how a checkpoint was trained: corpus digest, steps, losses, seed, versions.

    Args:
        path: A checkpoint folder. Defaults to the checkpoint of the course.

    Returns:
        The record that the training script wrote.

    Raises:
        CheckpointError: If the file is missing or holds no record.
    """
    folder = ASSETS if path is None else Path(path)
    try:
        return _read_metadata(folder)["record"]
    except (KeyError, ValueError, OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{folder / MODEL_FILE}: no training record ({error}); save the checkpoint again"
        ) from None


def read_digests(path: str | Path | None = None) -> dict[str, str]:
    """Read the recorded digests of a checkpoint's files.

    Args:
        path: A checkpoint folder. Defaults to the checkpoint of the course.

    Returns:
        The sha256 of each file by its name, in hexadecimal.

    Raises:
        CheckpointError: If the list is missing or is none.
    """
    listed = (ASSETS if path is None else Path(path)) / DIGESTS_FILE
    try:
        pairs = [line.split(maxsplit=1) for line in listed.read_text().splitlines()]
        return {name: digest for digest, name in pairs}
    except OSError:
        raise CheckpointError(
            f"{listed}: missing; give a folder with {MODEL_FILE}, {TOKENIZER_FILE} "
            f"and {DIGESTS_FILE}"
        ) from None
    except ValueError:
        raise CheckpointError(
            f"{listed}: not a sha256sum file; save the checkpoint again"
        ) from None


def save_checkpoint(
    path: str | Path, model: GPT, tokenizer: Tokenizer, record: dict[str, Any]
) -> None:
    """Write a checkpoint folder; each file appears whole or not at all.

    Args:
        path: The folder, made if it does not exist.
        model: The model to save.
        tokenizer: Its tokenizer.
        record: How it was trained; anything that JSON can hold.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    metadata = {"config": json.dumps(asdict(model.config)), "record": json.dumps(record)}
    with replacing(folder / MODEL_FILE) as temporary:
        save_file(weights, temporary, metadata=metadata)
    with replacing(folder / TOKENIZER_FILE) as temporary:
        tokenizer.save(temporary)
    lines = [f"{_sha256(folder / name)}  {name}\n" for name in (MODEL_FILE, TOKENIZER_FILE)]
    with replacing(folder / DIGESTS_FILE) as temporary:
        temporary.write_text("".join(lines))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and move it there once the block succeeded.

    Args:
        path: The file to write or replace, in a folder that exists.

    Yields:
        Where to write. If the block fails, nothing is left of it.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_digest(path: Path, expected: str | None) -> None:
    remedy = "restore the file, or save the checkpoint again"
    if expected is None:
        raise CheckpointError(f"{path.parent / DIGESTS_FILE}: no digest for {path.name}; {remedy}")
    try:
        found = _sha256(path)
    except OSError:
        raise CheckpointError(f"{path}: missing; expected sha256 {expected}; {remedy}") from None
    if found != expected:
        raise CheckpointError(f"{path}: expected sha256 {expected}, found {found}; {remedy}")


def _read_metadata(folder: Path) -> dict[str, Any]:
    with safetensors.safe_open(folder / MODEL_FILE, framework="pt") as file:
        return {name: json.loads(value) for name, value in (file.metadata() or {}).items()}
