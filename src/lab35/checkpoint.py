"""Save and load a model with its tokenizer, and refuse files that are not the ones that were saved.

A checkpoint is a folder of three files: `model.safetensors` with the weights, the configuration
and the training record, `tokenizer.json`, and `SHA256SUMS` with the digest of both. Nothing is ever
unpickled, so a checkpoint can hold no code. `sha256sum --check SHA256SUMS` works there too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import safetensors

from lab35._config import GPTConfig, weight_shapes
from lab35.tokenizer import Tokenizer

if TYPE_CHECKING:  # what reads no weights loads no torch
    from lab35.model import GPT

__all__ = [
    "CheckpointError",
    "Summary",
    "load_pretrained",
    "read_digests",
    "read_record",
    "read_summary",
    "replacing",
    "save_checkpoint",
]

T = TypeVar("T")

ASSETS = Path(__file__).parent / "assets"
MODEL_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"
DIGESTS_FILE = "SHA256SUMS"
FILES = (MODEL_FILE, TOKENIZER_FILE, DIGESTS_FILE)

MAX_BYTES = 1 << 31
"""The largest file that is read; one with a hole in it may be said to be larger than memory."""

INCOMING = ".incoming"
"""Folder of a checkpoint that is whole, and on its way into its place; see `save_checkpoint`."""


class CheckpointError(Exception):
    """A checkpoint's file is missing, damaged, or not the one that was saved."""


# --- Reading -------------------------------------------------------------------------------------


def load_pretrained(path: str | Path | None = None) -> tuple[GPT, Tokenizer]:
    """Load a model and its tokenizer, after checking the digest of both files.

    Each file is read once: what is parsed are the very bytes whose digest was right.

    Args:
        path: A folder that `save_checkpoint` wrote. Defaults to the checkpoint of the course.

    Returns:
        The model in eval mode, in float32, and the tokenizer.

    Raises:
        CheckpointError: If a file is missing or cannot be read, its sha256 differs from the
            recorded one, or the files do not fit each other.
    """
    folder = ASSETS if path is None else Path(path)
    digests = read_digests(folder)
    model_data, tokenizer_data = (
        _checked(folder, name, digests) for name in (MODEL_FILE, TOKENIZER_FILE)
    )
    with _refusing(folder / MODEL_FILE):
        model = _model(model_data)
    return model.eval(), _tokenizer(folder, tokenizer_data, model.config)


@dataclass(frozen=True)
class Summary:
    """What a checkpoint says of itself.

    Attributes:
        config: The sizes of the model.
        parameters: Trainable numbers.
        weight_bytes: Bytes of the weights in their file; loaded, they are float32.
        vocab_size: Tokens that the tokenizer knows.
        eos_id: Which of them ends a text.
        sha256: The recorded digest of each file, by its name.
        record: How it was trained; see `read_record`.
    """

    config: GPTConfig
    parameters: int
    weight_bytes: int
    vocab_size: int
    eos_id: int
    sha256: dict[str, str]
    record: Any


def read_summary(path: str | Path | None = None) -> Summary:
    """Read what a checkpoint is, without its weights: neither their bytes nor torch are loaded.

    Everything else is checked as `load_pretrained` does it: the list of digests, the digest and the
    contents of the tokenizer, the configuration against the names, shapes and types of the weights,
    and their file's length against its header. The digest of the weights is told, not computed.

    Args:
        path: A checkpoint folder. Defaults to the checkpoint of the course.

    Returns:
        The summary.

    Raises:
        CheckpointError: As `load_pretrained` does, except for what only the weights could tell; and
            if there is no training record.
    """
    folder = ASSETS if path is None else Path(path)
    digests = read_digests(folder)
    for name in (MODEL_FILE, TOKENIZER_FILE):
        _recorded(folder, name, digests)
    record = read_record(folder)
    head, size = _read(folder, MODEL_FILE, _head)
    with _refusing(folder / MODEL_FILE):
        tensors = _tensors(head)
        config = _fitting_config(head)
        weight_bytes = sum(stored.nbytes for stored in tensors.values())
        if size != len(head) + weight_bytes:
            raise ValueError(f"its header tells of {len(head) + weight_bytes} bytes, got {size}")
    tokenizer = _tokenizer(folder, _checked(folder, TOKENIZER_FILE, digests), config)
    return Summary(
        config=config,
        parameters=sum(math.prod(stored.shape) for stored in tensors.values()),
        weight_bytes=weight_bytes,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        sha256=digests,
        record=record,
    )


def read_record(path: str | Path | None = None) -> Any:
    """Read how a checkpoint was trained: corpus digest, steps, losses, seed, versions.

    Args:
        path: A checkpoint folder. Defaults to the checkpoint of the course.

    Returns:
        The record that the training script wrote, an object; of another's checkpoint anything that
        JSON can hold.

    Raises:
        CheckpointError: If the file is missing, or holds no record.
    """
    folder = ASSETS if path is None else Path(path)
    head, _ = _read(folder, MODEL_FILE, _head)
    with _refusing(folder / MODEL_FILE):
        metadata = _metadata(head)
    if "record" not in metadata:
        raise CheckpointError(
            f"{folder / MODEL_FILE}: no training record; save the checkpoint again"
        )
    return metadata["record"]


def read_digests(path: str | Path | None = None) -> dict[str, str]:
    """Read the recorded digests of a checkpoint's files.

    Takes what `sha256sum --check` takes: text and binary mode, `--tag`, either case, comments.

    Args:
        path: A checkpoint folder. Defaults to the checkpoint of the course.

    Returns:
        The sha256 of each file by its name, in lower-case hexadecimal.

    Raises:
        CheckpointError: If the list is missing or cannot be read, a line is not one of these, or
            two lines disagree.
    """
    folder = ASSETS if path is None else Path(path)
    listed = folder / DIGESTS_FILE
    lines = os.fsdecode(_read(folder, DIGESTS_FILE)).split("\n")
    digests: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line.strip() or line.startswith("#"):
            continue
        found = _PLAIN_LINE.fullmatch(line) or _TAGGED_LINE.fullmatch(line)
        if found is None:
            raise CheckpointError(
                f"{listed}: not a sha256sum file, line {number} is {line!r:.60}; "
                "save the checkpoint again"
            )
        name = os.path.relpath(folder / found["name"], folder)
        digest = found["digest"].lower()
        if digests.setdefault(name, digest) != digest:
            raise CheckpointError(f"{listed}: line {number} gives {name} a second digest")
    return digests


# `DIGEST  NAME`, with ` *` in binary mode; and `SHA256 (NAME) = DIGEST`, which --tag writes. Names
# with odd characters are escaped, behind a backslash; none of ours is.
_DIGEST = r"(?P<digest>[0-9a-fA-F]{64})"
_PLAIN_LINE = re.compile(rf"[ \t]*\\?{_DIGEST}[ \t][ *]?(?P<name>.+)")
_TAGGED_LINE = re.compile(rf"[ \t]*\\?SHA256 ?\((?P<name>.+)\)[ \t]*=[ \t]*{_DIGEST}")


def _read(folder: Path, name: str, how: Callable[[Path], T] = methodcaller("read_bytes")) -> T:
    """Read one file of a checkpoint; what a save has not yet moved into its place comes first."""
    path = folder / name
    for place in (folder / INCOMING / name, path):
        try:
            about = place.stat()
            if stat.S_ISREG(about.st_mode) and about.st_size <= MAX_BYTES:
                return how(place)
            reason = f"must hold at most {MAX_BYTES:,} bytes, got {about.st_size:,}"
            if not stat.S_ISREG(about.st_mode):  # a pipe would be waited for
                reason = "not a regular file"
        except FileNotFoundError:
            reason = f"missing; give a folder with {', '.join(FILES)}"
            if place.is_symlink():
                reason = f"a link to {place.readlink()}, where nothing is"
        except (OSError, ValueError, MemoryError) as error:  # ValueError: a NUL in the path
            told = getattr(error, "strerror", None) or str(error) or type(error).__name__
            reason = f"cannot be read ({told})"
    raise CheckpointError(f"{path}: {reason}")


def _head(path: Path) -> tuple[bytes, int]:
    """Read a safetensors file up to where its weights begin; returns that and the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(8)
        rest = min(int.from_bytes(length, "little"), size)
        return length + file.read(rest), size


REMEDY = "restore the file, or save the checkpoint again"


def _recorded(folder: Path, name: str, digests: dict[str, str]) -> str:
    """Look up the recorded digest of a file."""
    if name not in digests:
        raise CheckpointError(f"{folder / DIGESTS_FILE}: no digest for {name}; {REMEDY}")
    return digests[name]


def _checked(folder: Path, name: str, digests: dict[str, str]) -> bytes:
    """Read a file whose digest must be the recorded one."""
    expected = _recorded(folder, name, digests)
    data = _read(folder, name)
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise CheckpointError(
            f"{folder / name}: expected sha256 {expected}, found {found}; {REMEDY}"
        )
    return data


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turn whatever foreign contents do to a parser into one clear line."""
    wrong = (ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError)
    try:
        yield
    except (*wrong, RuntimeError, safetensors.SafetensorError) as error:  # RecursionError too
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{path}: not a lab35 checkpoint ({reason:.200}); save it again"
        ) from None


def _tokenizer(folder: Path, data: bytes, config: GPTConfig) -> Tokenizer:
    """Make a tokenizer that knows the tokens of the model beside it."""
    with _refusing(folder / TOKENIZER_FILE):
        tokenizer = Tokenizer.from_bytes(data)
    if config.vocab_size != tokenizer.vocab_size:
        raise CheckpointError(
            f"{folder}: the model knows {config.vocab_size} tokens and the tokenizer "
            f"{tokenizer.vocab_size}; save both from the same training run"
        )
    return tokenizer


def _header(data: bytes) -> dict[str, Any]:
    """Parse the header of a safetensors file: its length, and then JSON."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + min(size, len(data))])


def _metadata(data: bytes) -> dict[str, Any]:
    """Parse the JSON texts that stand in a safetensors header."""
    told = _header(data).get("__metadata__") or {}
    return {name: json.loads(value) for name, value in told.items()}


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file, by its entry in the header."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def _tensors(data: bytes) -> dict[str, _Stored]:
    """List the tensors that a safetensors header tells of."""
    found = {}
    for name, told in _header(data).items():
        if name != "__metadata__":
            begin, end = told["data_offsets"]
            found[name] = _Stored(told["dtype"], tuple(told["shape"]), end - begin)
    return found


def _fitting_config(data: bytes) -> GPTConfig:
    """Read the configuration of a model whose weights, as the header tells them, fit it."""
    config, weights = _metadata(data).get("config"), _tensors(data)
    names = [field.name for field in fields(GPTConfig)]
    if not isinstance(config, dict) or config.keys() != set(names):
        # A default in place of what is not there could fit the weights, and be wrong.
        raise ValueError(f"its config must have {', '.join(names)}, got {config!r:.80}")
    sizes = GPTConfig(**config)
    # A layer has several tensors: this bounds the sizes by the file's before they are multiplied.
    if sizes.n_layer > len(weights):
        raise ValueError(f"n_layer={sizes.n_layer} does not fit {len(weights)} tensors")
    found = {name: stored.shape for name, stored in weights.items()}
    expected = weight_shapes(sizes)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(f"{name} must have shape {expected.get(name)}, got {found.get(name)}")
        if weights[name].dtype not in ("F32", "BF16", "F16"):
            raise ValueError(f"{name} must be float32, bfloat16 or float16")
    return sizes


def _model(data: bytes) -> GPT:
    """Build a model around weights that fit it; nothing is made before they are known to."""
    import safetensors.torch

    from lab35.model import GPT

    weights = safetensors.torch.load(data)
    sizes = _fitting_config(data)
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name} must hold finite numbers")
    model = GPT(sizes)
    model.load_state_dict(weights)
    return model


# --- Writing -------------------------------------------------------------------------------------


def save_checkpoint(
    path: str | Path, model: GPT, tokenizer: Tokenizer, record: dict[str, Any]
) -> None:
    """Write a checkpoint folder; whatever interrupts it, the old one or the new one is there whole.

    The three files are written into a folder of their own, which then gets the name `.incoming` in
    one step: from here on the new checkpoint counts, and loading looks there first. What is left is
    to move each file into its place. A save that was killed on the way is completed by the next.

    Args:
        path: The folder, made if it does not exist. Other files in it are left alone.
        model: The model to save.
        tokenizer: Its tokenizer.
        record: How it was trained; anything that JSON can hold.

    Raises:
        ValueError: If a weight is NaN or infinite: it would replace a good one.
        OSError: If the folder cannot be written, or is full; nothing new is left in it.
    """
    import safetensors.torch

    folder = Path(path)
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise ValueError(f"model must hold finite weights, got others in {name}")
    metadata = {"config": _json(asdict(model.config)), "record": _json(record)}
    contents = {
        MODEL_FILE: safetensors.torch.save(weights, metadata=metadata),
        TOKENIZER_FILE: tokenizer.to_bytes(),
    }
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in contents.items()]
    contents[DIGESTS_FILE] = "".join(lines).encode()

    folder.mkdir(parents=True, exist_ok=True)
    _complete(folder)
    written = Path(tempfile.mkdtemp(dir=folder, prefix=".writing-"))
    try:
        for name, data in contents.items():
            with (written / name).open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # on the disk before anything points at it
        written.chmod(0o755)  # whoever may read the files may read them here too
        written.replace(folder / INCOMING)  # the new checkpoint counts
    finally:
        shutil.rmtree(written, ignore_errors=True)
    _complete(folder)


def _json(told: dict[str, Any]) -> str:
    return json.dumps(told, allow_nan=False)


def _complete(folder: Path) -> None:
    """Move the files of a checkpoint that counts into their places, and sweep what a kill left."""
    for name in FILES:
        if (folder / INCOMING / name).exists():
            (folder / INCOMING / name).replace(folder / name)
    for leftover in (folder / INCOMING, *folder.glob(".writing-*")):
        shutil.rmtree(leftover, ignore_errors=True)


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
