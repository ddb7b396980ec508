"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab35 import load_pretrained
from lab35.checkpoint import ASSETS
from lab35.cli import main

LAB35 = Path(sys.executable).with_name("lab35")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | None, str, str]:
    """Run the command line in this process; return exit code, stdout and stderr."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lab35", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_the_console_script_streams_the_same_text_twice() -> None:
    """The installed command, as the README gives it: the text on stdout, the prompt on stderr."""
    command = [LAB35, "generate", "--prompt", "Sherlock Holmes", "--seed", "1337"]
    first, second = (subprocess.run(command, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert first.stdout.strip()
    assert first.stderr == "Sherlock Holmes"


def test_the_text_is_that_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    """The options reach `generate`, and the completion is its new tokens, decoded."""
    code, out, _ = run(capsys, "generate", "--json", "--max-new-tokens", "20", "--seed", "3")
    made = json.loads(out)
    _, tokenizer = load_pretrained()
    assert not code
    assert made["prompt"] == "Sherlock Holmes"
    assert made["completion"] == tokenizer.decode(made["tokens"])
    assert made["stop_reason"] == "max_new_tokens"
    assert (len(made["tokens"]), made["token_forwards"]) == (20, 24)
    _, text, _ = run(capsys, "generate", "--max-new-tokens", "20", "--seed", "3")
    assert text == made["completion"] + "\n"


def test_no_cache_changes_the_cost_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy, with and without the cache: the same tokens for more token-forwards."""
    options = ("generate", "--temperature", "0", "--json")
    cached, uncached = (
        json.loads(run(capsys, *options, flag)[1]) for flag in ("--cache", "--no-cache")
    )
    assert cached["tokens"] == uncached["tokens"]
    assert (cached["token_forwards"], uncached["token_forwards"]) == (68, 2336)


def test_options_change_the_draw(capsys: pytest.CaptureFixture[str]) -> None:
    """No option is decoration: each one alone changes the text."""
    texts = {run(capsys, "generate")[1]}
    changes = (
        ("--seed", "1"),
        ("--temperature", "2"),
        ("--top-k", "1"),
        ("--top-p", "0.1"),
        ("--prompt", "Holmes"),
    )
    for change in changes:
        texts.add(run(capsys, "generate", *change)[1])
    assert len(texts) >= len(changes)  # top-k 1 and a small top-p are both almost greedy


def test_the_last_position_ends_a_cached_text(capsys: pytest.CaptureFixture[str]) -> None:
    """200 tokens do not fit into 128 positions; without the cache the window slides."""
    options = ("generate", "--max-new-tokens", "200", "--json")
    cached = json.loads(run(capsys, *options)[1])
    assert (cached["stop_reason"], len(cached["tokens"])) == ("context_limit", 124)
    uncached = json.loads(run(capsys, *options, "--no-cache")[1])
    assert (uncached["stop_reason"], len(uncached["tokens"])) == ("max_new_tokens", 200)


def test_nothing_asked_nothing_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Zero new tokens are a valid wish."""
    code, out, _ = run(capsys, "generate", "--max-new-tokens", "0", "--json")
    assert not code
    assert json.loads(out)["completion"] == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", ""), "prompt must hold at least one character, got ''"),
        (("--prompt", "\ud800"), "text must be encodable as UTF-8"),
        (("--prompt", "word " * 80), "idx must hold at most block_size=128 tokens"),
        (("--temperature", "-1"), "temperature must be finite and at least 0, got -1.0"),
        (("--temperature", "nan"), "temperature must be finite"),
        (("--top-k", "0"), "top_k must be None or an integer of at least 1, got 0"),
        (("--top-p", "0"), "top_p must be None or lie in (0, 1], got 0.0"),
        (("--top-p", "1.5"), "top_p must be None or lie in (0, 1], got 1.5"),
        (("--max-new-tokens", "-3"), "max_new_tokens must be at least 0, got -3"),
        (("--seed", "-1"), "'--seed'"),
        (("--top-k", "many"), "'--top-k'"),
        (("--unknown",), "--unknown"),
    ],
)
def test_bad_input_is_one_line_and_two(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    """Exit code 2, one line on stderr that names the trouble, nothing on stdout."""
    code, out, err = run(capsys, "generate", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("lab35: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_an_unknown_command_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    """Typing mistakes get the same treatment as bad values."""
    code, _, err = run(capsys, "generrate")
    assert code == 2
    assert "generrate" in err


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_checkpoint_is_one_line_and_two(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    """A broken installation says which file, and what was expected."""
    folder = tmp_path / "assets"
    shutil.copytree(ASSETS, folder)
    weights = folder / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:1000])
    monkeypatch.setattr("lab35.checkpoint.ASSETS", folder)
    code, out, err = run(capsys, "generate")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "model.safetensors" in err
    assert "expected sha256" in err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command the help comes, and it is no error."""
    code, out, _ = run(capsys)
    assert not code
    assert "generate" in out
    assert run(capsys, "--help")[1] == out
    assert run(capsys, "--version")[1].startswith("lab35 ")


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    """`lab35 generate | head -c 5` is a normal thing to type."""
    piped = subprocess.run(
        f"{LAB35} generate --max-new-tokens 120 | head -c 5",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in piped.stderr
    assert len(piped.stdout.encode()) == 5
