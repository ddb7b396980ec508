"""Checkpoints: the files are the ones that were saved, or there is one clear error."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors.torch
import torch

from lab35 import GPT, CheckpointError, GPTConfig, Tokenizer, load_pretrained
from lab35.checkpoint import (
    ASSETS,
    DIGESTS_FILE,
    MODEL_FILE,
    TOKENIZER_FILE,
    read_digests,
    read_record,
    read_summary,
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


def pair(seed: int) -> tuple[GPT, Tokenizer]:
    """A small model, and the tokenizer that fits it: both depend on the seed."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=258, n_layer=2, block_size=8, n_embd=8, n_head=2))
    return model, Tokenizer.train("ab" if seed else "xy", merges=1)


def saved(folder: Path) -> int:
    """Load a checkpoint of `pair`, and say by which seed it was made: all of it, or it fails."""
    model, tokenizer = load_pretrained(folder)
    seed = read_record(folder)["seed"]
    expected, expected_tokenizer = pair(seed)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    assert expected_tokenizer.encode("abxy") == tokenizer.encode("abxy")
    assert read_digests(folder).keys() == {MODEL_FILE, TOKENIZER_FILE}
    return seed


class Killed(BaseException):
    """Stands for a kill: nothing in the package may catch it and carry on."""


def calls_of_a_save(folder: Path, monkeypatch: pytest.MonkeyPatch, at: int | None) -> int:
    """Save over a checkpoint, and stop dead before the call `at` that changes a folder."""
    count = 0
    with monkeypatch.context() as patch:
        for name in ("replace", "rename", "mkdir", "rmdir", "unlink", "fsync"):
            real = getattr(os, name)

            def call(*arguments: object, real=real, **options: object) -> object:
                nonlocal count
                count += 1
                if at is not None and count >= at:  # from here on nothing is done any more
                    raise Killed
                return real(*arguments, **options)

            patch.setattr(os, name, call)
        with suppress(Killed):
            save_checkpoint(folder, *pair(1), {"seed": 1})
    return count


def test_a_save_that_is_killed_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at any of its steps, a save has replaced all three files or none of them."""

    def fresh(name: str) -> Path:
        save_checkpoint(tmp_path / name, *pair(0), {"seed": 0})
        (tmp_path / name / "training.safetensors").write_text("another file")
        return tmp_path / name

    steps = calls_of_a_save(fresh("whole"), monkeypatch, None)
    assert saved(tmp_path / "whole") == 1
    seen = []
    for at in range(1, steps + 1):
        folder = fresh(str(at))
        calls_of_a_save(folder, monkeypatch, at)
        seen.append(saved(folder))
        # The next save completes or sweeps what is left, and other files stay.
        save_checkpoint(folder, *pair(0), {"seed": 0})
        assert saved(folder) == 0
        expected = {MODEL_FILE, TOKENIZER_FILE, DIGESTS_FILE, "training.safetensors"}
        assert expected == {path.name for path in folder.iterdir()}
    assert seen == sorted(seen), "once the new one counts, it stays"
    assert set(seen) == {0, 1}


def test_a_full_disk_leaves_the_old_one(tmp_path: Path) -> None:
    """A file that cannot be written whole is one OSError, and the old checkpoint stays."""
    save_checkpoint(tmp_path / "old", *pair(0), {"seed": 0})
    code = (
        "import resource, signal, sys\n"
        "from lab35 import load_pretrained\n"
        "from lab35.checkpoint import save_checkpoint\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n    save_checkpoint(sys.argv[1], *load_pretrained(), {'seed': 1})\n"
        "except OSError as error:\n    print(type(error).__name__)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "old")], capture_output=True, text=True
    )
    assert (ran.stdout, ran.stderr) == ("OSError\n", "")
    assert saved(tmp_path / "old") == 0
    expected = {MODEL_FILE, TOKENIZER_FILE, DIGESTS_FILE}
    assert expected == {path.name for path in (tmp_path / "old").iterdir()}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path, bad: float) -> None:
    """A model that training has broken does not replace one that it has not."""
    save_checkpoint(tmp_path, *pair(0), {"seed": 0})
    model, tokenizer = pair(1)
    with torch.no_grad():
        model.blocks[1].fc.bias[3] = bad
    with pytest.raises(ValueError, match=r"finite weights, got others in blocks\.1\.fc\.bias"):
        save_checkpoint(tmp_path, model, tokenizer, {"seed": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_checkpoint(tmp_path, *pair(1), {"loss": bad})
    assert saved(tmp_path) == 0


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


SPELLINGS = {
    "text": "{digest}  {name}",
    "binary": "{digest} *{name}",
    "with a folder": "{digest}  ./{name}",
    "upper case": "{upper}  {name}",
    "tag": "SHA256 ({name}) = {digest}",
    "one space": "{digest} {name}",
    "tab": "\t{digest}\t{name}",
    "escaped": "\\{digest}  {name}",
    "narrow tag": "SHA256({name})={digest}",
    "wide tag": "SHA256 ({name}) \t=\t {digest}",
    "whole path": "{digest}  {folder}/{name}",
    "around": "{digest}  ../checkpoint/{name}",
    "other files too": "{digest}  {name}\n{digest}  {name}-\udce9 \u2028.txt",
    "carriage return": "{digest}  {name}\r",
    "comment": "# by hand\n{digest}  {name}\n",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_digests_in_any_spelling_of_sha256sum(copy: Path, spelling: str) -> None:
    """What `sha256sum` writes and checks is read, in binary mode, with --tag, in either case."""
    digests = read_digests(ASSETS)
    lines = [
        SPELLINGS[spelling].format(name=name, digest=digest, upper=digest.upper(), folder=copy)
        for name, digest in digests.items()
    ]
    (copy / DIGESTS_FILE).write_bytes(os.fsencode("\n".join(lines) + "\n"))
    if spelling == "other files too":
        assert digests.items() <= read_digests(copy).items()
        lines = lines[:1]
    else:
        assert digests == read_digests(copy)
    load_pretrained(copy)
    if shutil.which("sha256sum") and spelling not in ("carriage return", "other files too"):
        command = ["sha256sum", "--check", "--status", DIGESTS_FILE]
        assert subprocess.run(command, cwd=copy).returncode == 0


@pytest.mark.parametrize(
    ("contents", "told"),
    [
        (b"\xff\xfe", "not a sha256sum file, line 1"),
        (b"\f" + b"0" * 64 + b"  model.safetensors", "line 1 is"),
        (b"0123  model.safetensors\n", "line 1 is '0123  model.safetensors'"),
        (b"g" * 64 + b"  model.safetensors\n", "line 1 is"),
        (b"\n" + b"0" * 63 + b"  model.safetensors\n", "line 2 is"),
        (b"0" * 64 + b"  x\n" + b"1" * 64 + b" *./x\n", "line 2 gives x a second digest"),
        (b"", "no digest for model.safetensors"),
    ],
)
def test_digests_that_are_none(copy: Path, contents: bytes, told: str) -> None:
    """A list that cannot be read names its line."""
    (copy / DIGESTS_FILE).write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"^[^\n]+$") as caught:
        load_pretrained(copy)
    assert told in str(caught.value)


@pytest.mark.parametrize("name", [MODEL_FILE, TOKENIZER_FILE, DIGESTS_FILE])
def test_what_cannot_be_read_is_not_called_missing(
    copy: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without permission, a pipe, a folder, a circle of links: each by its own name."""
    path = copy / name
    with monkeypatch.context() as patch:
        read = Path.read_bytes

        def denied(self: Path) -> bytes:
            if self == path:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
            return read(self)

        patch.setattr(Path, "read_bytes", denied)
        with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied\)"):
            load_pretrained(copy)

    for make, told in (
        (lambda: os.mkfifo(path), "not a regular file"),
        (lambda: path.mkdir(), "not a regular file"),
        (lambda: path.touch() or os.truncate(path, 1 << 40), "at most"),  # nearly all a hole
        (lambda: path.symlink_to(path), "cannot be read"),
        (lambda: path.symlink_to(copy / "nowhere"), "nowhere, where nothing is"),
    ):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make()
        with pytest.raises(CheckpointError, match=r"^[^\n]+$") as caught:
            load_pretrained(copy)
        assert told in str(caught.value)
        assert str(path) in str(caught.value)


def redigest(folder: Path) -> None:
    """Write the digests that a folder's files have now."""
    digests = {n: hashlib.sha256((folder / n).read_bytes()) for n in (MODEL_FILE, TOKENIZER_FILE)}
    lines = [f"{digest.hexdigest()}  {name}\n" for name, digest in digests.items()]
    (folder / DIGESTS_FILE).write_text("".join(lines))


def with_metadata(folder: Path, **metadata: str) -> None:
    """Save the weights of `pair` under other metadata, with digests that fit."""
    save_checkpoint(folder, *pair(0), {"seed": 0})
    weights = safetensors.torch.load_file(folder / MODEL_FILE)
    safetensors.torch.save_file(weights, folder / MODEL_FILE, metadata=metadata or None)
    redigest(folder)


GOOD_CONFIG = {
    "vocab_size": 258, "n_layer": 2, "block_size": 8, "n_embd": 8, "n_head": 2, "dropout": 0.0
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        {"vocab_size": 10**12},
        {"n_embd": 10**9},
        {"n_layer": 10**9},
        {"block_size": 10**15},
        {"n_embd": 10**400},
        {"n_layer": 1},
        {"n_layer": 0},
        {"n_layer": -1},
        {"n_embd": 8.5},
        {"n_embd": "8"},
        {"n_embd": None},
        {"n_embd": [8]},
        {"n_head": True},
        {"n_head": 3},
        {"dropout": float("nan")},
        {"dropout": "0"},
        {"wings": 2},
    ],
)
def test_a_config_that_does_not_fit_the_weights(tmp_path: Path, config: dict[str, object]) -> None:
    """Absurd sizes are one clear line, told before anything of that size is made."""
    with_metadata(tmp_path, config=json.dumps(GOOD_CONFIG | config), record="{}")
    with pytest.raises(CheckpointError, match=r"^[^\n]{1,400}$") as caught:
        load_pretrained(tmp_path)
    assert "not a lab35 checkpoint" in str(caught.value)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"config": "{}"},
        {"config": "{"},
        {"config": "[]"},
        {"config": "3"},
        {"config": "[" * 100_000},
        {"record": "{}"},
    ],
)
def test_metadata_that_are_no_config(tmp_path: Path, metadata: dict[str, str]) -> None:
    """A missing, broken or foreign configuration is one clear line."""
    with_metadata(tmp_path, **metadata)
    with pytest.raises(CheckpointError, match=r"^[^\n]{1,400}$"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("record", ["{", "", "[" * 100_000])
def test_a_record_that_is_none(tmp_path: Path, record: str) -> None:
    """What cannot be parsed is one clear line, as is no record at all."""
    with_metadata(tmp_path, config=json.dumps(GOOD_CONFIG), record=record)
    with pytest.raises(CheckpointError, match=r"^[^\n]{1,400}$"):
        read_record(tmp_path)
    with_metadata(tmp_path, config=json.dumps(GOOD_CONFIG))
    with pytest.raises(CheckpointError, match="no training record"):
        read_record(tmp_path)


@pytest.mark.parametrize("name", GOOD_CONFIG)
def test_a_config_without_a_size_takes_no_default(tmp_path: Path, name: str) -> None:
    """A default for what is missing may fit the weights: another number of heads always does."""
    config = {key: value for key, value in GOOD_CONFIG.items() if key != name}
    with_metadata(tmp_path, config=json.dumps(config), record="{}")
    with pytest.raises(CheckpointError, match="its config must have vocab_size"):
        load_pretrained(tmp_path)


def test_weights_that_are_no_numbers_are_not_loaded(tmp_path: Path) -> None:
    """A file with NaN in it, wherever it was written, is refused before it writes NaN."""
    save_checkpoint(tmp_path, *pair(0), {"seed": 0})
    weights = safetensors.torch.load_file(tmp_path / MODEL_FILE)
    weights["ln_f.bias"][3] = float("nan")
    config = {"config": json.dumps(GOOD_CONFIG)}
    safetensors.torch.save_file(weights, tmp_path / MODEL_FILE, metadata=config)
    redigest(tmp_path)
    with pytest.raises(CheckpointError, match=r"ln_f\.bias must hold finite numbers"):
        load_pretrained(tmp_path)


def test_a_file_beyond_the_memory_is_one_line(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory while reading is about the file."""

    def too_much(self: Path) -> bytes:
        raise MemoryError

    monkeypatch.setattr(Path, "read_bytes", too_much)
    with pytest.raises(CheckpointError, match=r"cannot be read \(MemoryError\)"):
        load_pretrained(copy)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
def test_weights_of_another_type(tmp_path: Path, dtype: torch.dtype) -> None:
    """Numbers that float32 cannot hold as they are would change without a word."""
    save_checkpoint(tmp_path, *pair(0), {"seed": 0})
    weights = safetensors.torch.load_file(tmp_path / MODEL_FILE)
    weights["ln_f.bias"] = weights["ln_f.bias"].to(dtype)
    config = {"config": json.dumps(GOOD_CONFIG)}
    safetensors.torch.save_file(weights, tmp_path / MODEL_FILE, metadata=config)
    redigest(tmp_path)
    with pytest.raises(CheckpointError, match=r"ln_f\.bias must be float32"):
        load_pretrained(tmp_path)


def test_half_precision_comes_back_in_float32(tmp_path: Path) -> None:
    """A model saved in bfloat16 loses nothing more."""
    model, tokenizer = pair(0)
    model = model.to(torch.bfloat16)
    save_checkpoint(tmp_path, model, tokenizer, {})
    loaded, _ = load_pretrained(tmp_path)
    for one, other in zip(loaded.parameters(), model.parameters(), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other.float())


def test_files_that_are_no_checkpoint(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Right digests do not make a model: foreign contents are refused as clearly."""
    model = GPT(GPTConfig(vocab_size=512, n_layer=1, block_size=8, n_embd=8, n_head=2))

    save_checkpoint(tmp_path, model, tokenizer, {})
    weights = (tmp_path / MODEL_FILE).read_bytes()
    for contents in (b"", b"not safetensors", weights[:-8]):
        (tmp_path / MODEL_FILE).write_bytes(contents)
        redigest(tmp_path)
        with pytest.raises(CheckpointError, match="not a lab35 checkpoint"):
            load_pretrained(tmp_path)
    (tmp_path / MODEL_FILE).write_bytes(weights)
    (tmp_path / TOKENIZER_FILE).write_text("{}")
    redigest(tmp_path)
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
    with pytest.raises(CheckpointError, match=r"model\.safetensors: missing"):
        read_record(tmp_path)


def without_weights(copy: Path) -> None:
    """Replace the weights by a hole; the header and the length stay."""
    path = copy / MODEL_FILE
    data = path.read_bytes()
    path.write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    os.truncate(path, len(data))


def test_a_summary_reads_no_weights(copy: Path, pretrained: tuple[GPT, Tokenizer]) -> None:
    """It tells what loading would find, and what stands in the weights' place is no matter."""
    model, tokenizer = pretrained
    without_weights(copy)
    found = read_summary(copy)

    assert read_summary() == found
    assert (model.config, model.num_parameters) == (found.config, found.parameters)
    assert sum(weight.nbytes for weight in model.parameters()) == found.weight_bytes
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (found.vocab_size, found.eos_id)
    assert (read_digests(), read_record()) == (found.sha256, found.record)
    with pytest.raises(CheckpointError, match="expected sha256"):
        load_pretrained(copy)


@pytest.mark.parametrize("more", [-1, 1, -3_501_056])
def test_a_summary_knows_the_length_of_the_weights(copy: Path, more: int) -> None:
    """A download that was cut off is refused by its length, and so is one with something behind."""
    path = copy / MODEL_FILE
    os.truncate(path, path.stat().st_size + more)
    with pytest.raises(CheckpointError, match=rf"{MODEL_FILE}: not .*its header tells of 3\d+ by"):
        read_summary(copy)


def test_a_summary_refuses_what_does_not_fit(copy: Path) -> None:
    """Damage to the tokenizer, a digest that is not listed, and sizes that are not the weights'."""
    (copy / TOKENIZER_FILE).write_bytes((ASSETS / TOKENIZER_FILE).read_bytes() + b" ")
    with pytest.raises(CheckpointError, match=f"{TOKENIZER_FILE}: expected sha256"):
        read_summary(copy)
    lines = (ASSETS / DIGESTS_FILE).read_text().splitlines(keepends=True)
    (copy / DIGESTS_FILE).write_text("".join(line for line in lines if MODEL_FILE not in line))
    with pytest.raises(CheckpointError, match=f"no digest for {MODEL_FILE}"):
        read_summary(copy)
    data = (ASSETS / MODEL_FILE).read_bytes()
    for old, new in ((rb"n_layer\": 4", rb"n_layer\": 3"), (b'"F32"', b'"I32"')):
        assert old in data
        (copy / MODEL_FILE).write_bytes(data.replace(old, new, 1))
        for name in (DIGESTS_FILE, TOKENIZER_FILE):
            shutil.copy(ASSETS / name, copy / name)
        with pytest.raises(CheckpointError, match=r"must (have shape|be float32)"):
            read_summary(copy)


def test_a_summary_of_half_precision(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The bytes are those of the file; loaded, the same weights are float32."""
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8)).to(torch.bfloat16)
    save_checkpoint(tmp_path, model, tokenizer, {})
    assert 2 * model.num_parameters == read_summary(tmp_path).weight_bytes


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
