"""Checkpoints: the files are the ones that were saved, or there is one clear error."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from lab35 import GPT, CheckpointError, GPTConfig, Tokenizer, load_pretrained
from lab35.checkpoint import (
    ASSETS,
    DIGESTS_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
    read_record,
    replacing,
    save_checkpoint,
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the shipped checkpoint that a test may damage."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in (MODEL_FILE, TOKENIZER_FILE, DIGESTS_FILE):
        shutil.copy(ASSETS / name, folder / name)
    return folder


def test_the_shipped_pair_loads() -> None:
    """The course's checkpoint is the reference model, ready to run."""
    model, tokenizer = load_pretrained()
    assert model.config == GPTConfig(dropout=model.config.dropout)
    assert not model.training
    assert tokenizer.vocab_size == model.config.vocab_size


def test_the_training_record_says_how() -> None:
    """The weights carry their origin, and meet the bar that was set for them."""
    record = read_record()
    assert record["corpus_sha256"] == (
        "e21895308fe6da6919abc53e2cf77d81f914887897546153cc5d49b2eadefe50"
    )
    assert record["held_out_bits_per_byte"] <= 1.87
    best = min(record["curve"], key=lambda point: point["held_out"])
    assert (best["step"], best["held_out"]) == (
        record["best_step"],
        record["held_out_nats_per_token"],
    )
    assert {"python", "torch", "tokenizers"} <= record["versions"].keys()
    assert record["recipe"]["seed"] == 1337


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    """A round trip keeps every weight, the sizes, the record and the tokenizer."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=258, n_layer=1, block_size=8, n_embd=8, n_head=2))
    tokenizer = Tokenizer.train("abab", merges=1)
    save_checkpoint(tmp_path / "new" / "folder", model, tokenizer, {"steps": 3})
    loaded, loaded_tokenizer = load_pretrained(tmp_path / "new" / "folder")
    assert loaded.config == model.config
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True)
    )
    assert loaded_tokenizer.encode("abab") == tokenizer.encode("abab")
    assert read_record(tmp_path / "new" / "folder") == {"steps": 3}
    names = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert names == {MODEL_FILE, TOKENIZER_FILE, DIGESTS_FILE}


def test_digests_are_in_the_format_of_sha256sum() -> None:
    """The reader can check the files without this package."""
    if not shutil.which("sha256sum"):
        pytest.skip("sha256sum is not installed; it comes with coreutils")
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", DIGESTS_FILE],
        cwd=ASSETS,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", [MODEL_FILE, TOKENIZER_FILE])
def test_one_changed_byte_is_found(copy: Path, name: str) -> None:
    """A flipped bit names the file, both digests and what to do."""
    data = bytearray((copy / name).read_bytes())
    expected = hashlib.sha256(data).hexdigest()
    data[-1] ^= 1
    (copy / name).write_bytes(data)
    found = hashlib.sha256(data).hexdigest()
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(copy)
    for part in (name, expected, found, "restore the file"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", [MODEL_FILE, TOKENIZER_FILE, DIGESTS_FILE])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "folder"])
def test_damage_is_one_clear_line(copy: Path, name: str, damage: str) -> None:
    """No traceback of a library, whatever happened to a file."""
    path = copy / name
    data = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "empty":
        path.touch()
    elif damage == "folder":
        path.mkdir()
    with pytest.raises(CheckpointError, match=r"^[^\n]+$") as caught:
        load_pretrained(copy)
    assert str(copy) in str(caught.value)


def test_a_wrong_digest_is_refused(copy: Path) -> None:
    """The digests are checked before anything is parsed."""
    digests = (copy / DIGESTS_FILE).read_text()
    (copy / DIGESTS_FILE).write_text("0" * 64 + digests[64:])
    with pytest.raises(CheckpointError, match="expected sha256 0000"):
        load_pretrained(copy)


def test_files_that_are_no_checkpoint(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Right digests do not make a model: foreign contents are refused as clearly."""
    model = GPT(GPTConfig(vocab_size=512, n_layer=1, block_size=8, n_embd=8, n_head=2))

    def redigest() -> None:
        names = (MODEL_FILE, TOKENIZER_FILE)
        lines = [f"{hashlib.sha256((tmp_path / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
        (tmp_path / DIGESTS_FILE).write_text("".join(lines))

    save_checkpoint(tmp_path, model, tokenizer, {})
    weights = (tmp_path / MODEL_FILE).read_bytes()
    for contents in (b"", b"not safetensors", weights[:-8]):
        (tmp_path / MODEL_FILE).write_bytes(contents)
        redigest()
        with pytest.raises(CheckpointError, match="not a lab35 checkpoint"):
            load_pretrained(tmp_path)
    (tmp_path / MODEL_FILE).write_bytes(weights)
    (tmp_path / TOKENIZER_FILE).write_text("{}")
    redigest()
    with pytest.raises(CheckpointError, match="not a lab35 checkpoint"):
        load_pretrained(tmp_path)


def test_a_pair_must_fit(tmp_path: Path) -> None:
    """A model and a tokenizer of different vocabularies are not a pair."""
    model = GPT(GPTConfig(vocab_size=300, n_layer=1, block_size=8, n_embd=8, n_head=2))
    save_checkpoint(tmp_path, model, Tokenizer.train("abab", merges=1), {})
    with pytest.raises(CheckpointError, match="the model knows 300 tokens and the tokenizer 258"):
        load_pretrained(tmp_path)


def test_a_record_that_is_not_there(tmp_path: Path) -> None:
    """Reading the record of nothing is the same kind of error."""
    with pytest.raises(CheckpointError, match="no training record"):
        read_record(tmp_path)


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    """The old file stays whole, and the temporary one goes."""
    target = tmp_path / "file"
    target.write_text("old")

    def fail() -> None:
        with replacing(target) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
