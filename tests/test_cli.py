"""The command line, run as a user runs it."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lab35 import GPT, Tokenizer, generate, load_pretrained, trace_step, verify_cache
from lab35.checkpoint import ASSETS, save_checkpoint
from lab35.cli import app, cold, main
from lab35.cli.bench import BENCH_VARIANTS
from lab35.cli.models import encode, pad
from lab35.cli.options import Settings
from lab35.cli.streams import MAX_BYTES, print_json
from lab35.cli.texts import ROUNDS
from lab35.sampling import check_sampling
from lab35.speed import Lean, LeanRows
from lab35.timing import threads

LAB35 = Path(sys.executable).with_name("lab35")


KEYS = ["prompt", "completion", "stop_reason", "verify", "benchmark", "batch_consistent"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command line in this process; return exit code, stdout and stderr."""
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def written(model: GPT, tokenizer: Tokenizer, prompt: str, new: int, seed: int = 1337) -> str:
    """Return the completion that the library writes at the command line's defaults."""
    made = generate(
        model,
        torch.tensor([tokenizer.encode(prompt)]),
        new,
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        generator=torch.Generator().manual_seed(seed),
        eos_id=tokenizer.eos_id,
    )
    return tokenizer.decode(made.new_tokens[0].tolist())


@pytest.mark.slow
def test_the_console_script_writes_the_same_text_twice() -> None:
    """The installed command, as the README gives it: the text on stdout, the prompt on stderr."""
    command = [LAB35, "generate", "--prompt", "Sherlock Holmes", "--seed", "1337"]
    first, second = (subprocess.run(command, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert first.stdout.strip()
    assert first.stderr == "Sherlock Holmes"


def test_the_text_is_that_of_the_library(
    capsys: pytest.CaptureFixture[str], model: GPT, tokenizer: Tokenizer
) -> None:
    """The options reach `generate`, as text and as JSON."""
    expected = written(model, tokenizer, "Holmes", 20, seed=3)
    options = ("generate", "--prompt", "Holmes", "--max-new-tokens", "20", "--seed", "3")
    assert run(capsys, *options) == (0, expected + "\n", "Holmes")
    code, out, err = run(capsys, *options, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == dict.fromkeys(KEYS) | {
        "prompt": "Holmes",
        "completion": expected,
        "stop_reason": "max_new_tokens",
    }


def test_no_cache_changes_the_cost_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy, with and without the cache: the same text."""
    options = ("generate", "--temperature", "0", "--json")
    cached, uncached = (run(capsys, *options, flag) for flag in ("--cache", "--no-cache"))
    assert cached == uncached


def test_options_change_the_draw(capsys: pytest.CaptureFixture[str]) -> None:
    """No option is decoration: each one alone changes the text."""
    default = run(capsys, "generate")[1]
    for change in (
        ("--seed", "1"),
        ("--temperature", "2"),
        ("--top-k", "1"),
        ("--top-p", "0.1"),
        ("--prompt", "Holmes"),
        ("--max-new-tokens", "63"),
    ):
        assert run(capsys, "generate", *change)[1] != default, change


def test_the_last_position_ends_a_cached_text(
    capsys: pytest.CaptureFixture[str], tokenizer: Tokenizer
) -> None:
    """200 tokens do not fit into 128 positions; without the cache the window slides."""
    options = ("generate", "--max-new-tokens", "200", "--json")
    cached = json.loads(run(capsys, *options)[1])
    uncached = json.loads(run(capsys, *options, "--no-cache")[1])
    assert (cached["stop_reason"], uncached["stop_reason"]) == ("context_limit", "max_new_tokens")
    assert uncached["completion"].startswith(cached["completion"][:40])
    assert len(uncached["completion"]) > len(cached["completion"])


def test_nothing_asked_nothing_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Zero new tokens are a valid wish."""
    code, out, _ = run(capsys, "generate", "--max-new-tokens", "0", "--json")
    assert code == 0
    assert json.loads(out)["completion"] == ""


def test_stop_strings_end_the_text_before_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Repeated, escaped, and never shown; the earliest wins."""
    whole = json.loads(run(capsys, "generate", "--json")[1])["completion"]
    assert "\n" in whole
    stopped = json.loads(run(capsys, "generate", "--json", "--stop", r"\n")[1])
    assert stopped["completion"] == whole.split("\n")[0]
    assert stopped["stop_reason"] == "stop"
    letters = ("--stop", whole[9], "--stop", whole[5])
    cut = json.loads(run(capsys, "generate", "--json", *letters)[1])["completion"]
    assert cut == whole[: min(whole.index(whole[9]), whole.index(whole[5]))]
    assert run(capsys, "generate", "--stop", "never there")[1] == whole + "\n"


def test_prompts_from_files_and_standard_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompt by three ways writes the same text; the last line break is dropped."""
    expected = run(capsys, "generate", "--prompt", "“Good evening,” said\nHolmes")
    path = tmp_path / "prompt.txt"
    path.write_bytes("“Good evening,” said\nHolmes\n".encode())
    assert run(capsys, "generate", "--prompt-file", str(path)) == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert run(capsys, "generate", "--prompt-file", "-") == expected


def test_json_and_stream_keep_to_their_channels(capsys: pytest.CaptureFixture[str]) -> None:
    """With both, stdout is the object alone and stderr the text as it comes."""
    code, out, err = run(capsys, "generate", "--json", "--stream")
    assert code == 0
    assert err == "Sherlock Holmes" + json.loads(out)["completion"] + "\n"
    assert run(capsys, "generate", "--no-stream") == run(capsys, "generate")


def test_text_comes_while_it_is_written() -> None:
    """The first piece arrives long before the process has ended."""
    command = [LAB35, "generate", "--no-cache", "--max-new-tokens", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(3)
        assert process.poll() is None
        process.kill()


def test_a_verified_text(
    capsys: pytest.CaptureFixture[str], model: GPT, tokenizer: Tokenizer
) -> None:
    """--verify reports on as many steps, on stderr or in the object, and changes no text."""
    plain = run(capsys, "generate", "--max-new-tokens", "12")
    code, out, err = run(capsys, "generate", "--max-new-tokens", "12", "--verify")
    assert (code, out) == plain[:2]
    assert "verification passed" in err
    told = json.loads(run(capsys, "generate", "--max-new-tokens", "12", "--verify", "--json")[1])
    idx = torch.tensor([tokenizer.encode("Sherlock Holmes")])
    assert told["verify"].keys() == verify_cache(model, idx, 12).as_dict().keys()
    assert (told["verify"]["passed"], told["verify"]["steps"]) == (True, 12)
    assert told["benchmark"] is told["batch_consistent"] is None


def test_a_cache_that_fails_is_exit_code_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that stores values wrongly fails both commands that verify, and they say so."""
    store = Lean._store
    monkeypatch.setattr(Lean, "_store", lambda self, kv: store(self, 1.01 * kv))
    code, out, _ = run(capsys, "verify", "--steps", "8")
    assert code == 1
    assert "FAILED" in out
    code, _, err = run(capsys, "generate", "--max-new-tokens", "8", "--verify")
    assert code == 1
    assert "FAILED" in err


def test_the_verify_command(
    capsys: pytest.CaptureFixture[str], model: GPT, tokenizer: Tokenizer
) -> None:
    """The report alone, for people and as JSON."""
    idx = torch.tensor([tokenizer.encode("Holmes")])
    expected = verify_cache(model, idx, 5, engine="lean")
    code, out, err = run(capsys, "verify", "--prompt", "Holmes", "--steps", "5")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == expected.summary().splitlines()[0]
    told = json.loads(run(capsys, "verify", "--prompt", "Holmes", "--steps", "5", "--json")[1])
    assert told.keys() == expected.as_dict().keys()


def test_a_benchmark_counts_output_only(
    capsys: pytest.CaptureFixture[str], tokenizer: Tokenizer
) -> None:
    """Prompt tokens are told apart, and no rate is made of them."""
    options = ("generate", "--max-new-tokens", "4", "--benchmark")
    told = json.loads(run(capsys, *options, "--json")[1])["benchmark"]
    assert (told["rows"], told["prompt_tokens"], told["new_tokens"]) == (1, 5, 4)
    assert told["tokens_per_second"] == pytest.approx(4 / told["cached_seconds"])
    assert told["speedup"] > 0
    assert told["threads"] == 1
    code, out, err = run(capsys, *options)
    assert code == 0
    assert "tokens a second" in err
    assert "tokens a second" not in out


def test_a_batch_writes_what_each_row_writes_alone(
    capsys: pytest.CaptureFixture[str], model: GPT, tokenizer: Tokenizer
) -> None:
    """Three prompts of different lengths, each equal to its own run, in text and in JSON."""
    prompts = ["Holmes", "It was a dark night and", "My dear Watson, said he, I"]
    expected = [written(model, tokenizer, prompt, 20) for prompt in prompts]
    options = ("generate", "--batch-prompts", "|".join(prompts), "--max-new-tokens", "20")
    code, out, err = run(capsys, *options)
    assert (code, out) == (0, "".join(f"{text}\n" for text in expected))
    assert "each row IS its own run" in err
    told = json.loads(run(capsys, *options, "--json", "--verify")[1])
    assert list(told) == KEYS
    assert (told["prompt"], told["completion"]) == (prompts, expected)
    assert told["batch_consistent"] is True
    assert [report["passed"] for report in told["verify"]] == [True, True, True]


@pytest.mark.parametrize("engine", ["eager", "lean"])
def test_a_batch_runs_the_engine_that_was_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """The rows' steps are that engine's, and so are those of the benchmark, which names it."""
    steps = []
    original = LeanRows._step
    monkeypatch.setattr(LeanRows, "_step", lambda *args: steps.append(1) or original(*args))
    words = ("generate", "--batch-prompts", "Holmes|My dear Watson", "--engine", engine)
    code, told, _ = run(capsys, *words, "--max-new-tokens", "3", "--benchmark", "--json")
    assert (0, True) == (code, json.loads(told)["batch_consistent"])
    assert engine == json.loads(told)["benchmark"]["engine"]
    texts = 1 + 1 + ROUNDS  # the batch itself, a warm-up, the rounds
    assert len(steps) == (2 * texts if engine == "lean" else 0)


def test_a_batch_that_is_wrong_is_exit_code_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that count the padding spoil the short rows, and the command finds it."""
    columns = lambda mask: torch.arange(mask.shape[1])[None]  # noqa: E731
    monkeypatch.setattr("lab35.speed.prompt.position_ids", columns)
    prompts = "Holmes|My dear Watson, said he, I"
    code, out, _ = run(capsys, "generate", "--batch-prompts", prompts, "--json")
    assert code == 1
    assert json.loads(out)["batch_consistent"] is False


def test_a_trace_as_text_and_as_json(
    capsys: pytest.CaptureFixture[str], model: GPT, tokenizer: Tokenizer
) -> None:
    """The numbers of `trace_step`, with the draw of the first generated token."""
    idx = torch.tensor([tokenizer.encode("Sherlock Holmes")])
    generator = torch.Generator().manual_seed(1337)
    expected = trace_step(model, idx, temperature=0.8, top_k=40, top_p=0.95, generator=generator)
    assert json.loads(run(capsys, "trace", "--json")[1]) == expected.as_dict(tokenizer)
    code, out, err = run(capsys, "trace")
    assert (code, err) == (0, "")
    drawn = tokenizer.token_bytes(expected.drawn)
    assert f"drew     {expected.drawn} {drawn.decode()!r} ({drawn.hex(' ')})" in out
    assert "position 4, cache 4 -> 5" in out
    assert written(model, tokenizer, "Sherlock Holmes", 1) == drawn.decode()


def test_info_tells_what_the_checkpoint_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes, digests and record, for people and as JSON."""
    told = json.loads(run(capsys, "info", "--json")[1])
    assert told["parameters"] == 875_264
    assert told["weight_bytes"] == 3_501_056
    assert told["config"]["block_size"] == 128
    listed = (ASSETS / "SHA256SUMS").read_text()
    assert all(f"{digest}  {name}" in listed for name, digest in told["sha256"].items())
    assert told["record"]["held_out_bits_per_byte"] <= 1.87
    code, out, _ = run(capsys, "info")
    assert code == 0
    assert "875,264" in out
    assert told["sha256"]["model.safetensors"] in out


def test_a_checkpoint_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--checkpoint is heard by every command."""
    shutil.copytree(ASSETS, tmp_path / "mine")
    for command in ("generate", "trace", "info"):
        own = run(capsys, command, "--checkpoint", str(tmp_path / "mine"))
        assert own == run(capsys, command)
        assert run(capsys, command, "--checkpoint", str(tmp_path / "none"))[0] == 2


# --- the repl ---


def converse(*lines: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Pipe lines into a session."""
    return subprocess.run(
        [LAB35, "repl", "--max-new-tokens", "8", *options],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
    )


def test_a_session_goes_on_and_ends_with_its_input(model: GPT, tokenizer: Tokenizer) -> None:
    """Two prompts, two texts; the end of input is no error and no traceback."""
    told = converse("Holmes", r"The door\nopened", options=("--temperature", "0"))
    assert (told.returncode, "Traceback" in told.stderr) == (0, False)
    texts = []
    for prompt in ("Holmes", "The door\nopened"):
        idx = torch.tensor([tokenizer.encode(prompt)])
        made = generate(model, idx, 8, temperature=0).new_tokens[0].tolist()
        texts.append(tokenizer.decode(made))
    assert told.stdout == "".join(f"{text}\n" for text in texts)
    assert converse().returncode == 0


def test_an_empty_line_goes_on_beyond_the_block() -> None:
    """The text grows past 128 positions, a piece a line."""
    told = converse("Holmes", *[""] * 20, options=("--temperature", "0"))
    assert told.returncode == 0
    assert "error" not in told.stderr
    assert len(told.stdout.split()) > 25


def test_settings_change_and_mistakes_are_told() -> None:
    """A bad setting changes nothing and ends nothing."""
    told = converse(
        "/temperature 0",
        "/top-k none",
        "/top_p 0",
        "/top_k 2.5",
        "/seed -1",
        "/nonsense 3",
        "",
        "/settings",
        "Holmes",
    )
    assert told.returncode == 0
    for message in (
        "--top-p must lie in (0, 1], got 0.0",
        "top_k must be a number, got '2.5'",
        "--seed must lie in [0, 2**63), got -1",
        "setting must be one of",
        "prompt must hold at least one character",
        "temperature 0.0, top_k None, top_p 0.95, max_new_tokens 8, seed 1337",
    ):
        assert message in told.stderr
    assert told.stdout == converse("Holmes", options=("--temperature", "0")).stdout


def test_a_session_draws_on_and_a_seed_begins_anew() -> None:
    """The same prompt again is another text, and after /seed the first one."""
    told = converse("Holmes", "Holmes", "/seed 1337", "Holmes")
    single = converse("Holmes").stdout
    assert told.stdout.startswith(single)
    assert told.stdout.endswith(single)
    assert told.stdout != 3 * single


# --- interruptions ---


def interrupted(*arguments: str) -> tuple[int, str]:
    """Start a command on a terminal, press Ctrl-C once text has come, and then end the input."""
    main_end, child_end = pty.openpty()
    with subprocess.Popen(
        [LAB35, *arguments],
        stdin=child_end,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A test run that was started in the background ignores Ctrl-C, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        os.close(child_end)
        if arguments[0] == "repl":
            os.write(main_end, b"Holmes\n")
        seen = process.stdout.read(6)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        if arguments[0] == "repl":
            os.write(main_end, b"\x04")
        out, err = process.communicate(timeout=60)
        os.close(main_end)
    assert b"Traceback" not in err, err
    return process.returncode, (seen + out).decode()


def test_ctrl_c_ends_the_line() -> None:
    """The text so far stays, its line ends, and the exit code is the usual one."""
    code, out = interrupted("generate", "--no-cache", "--max-new-tokens", "100000")
    assert code == 130
    assert out.endswith("\n")


def test_ctrl_c_ends_a_text_of_the_session_only() -> None:
    """The session survives, and ends with its input."""
    code, _ = interrupted("repl", "--max-new-tokens", "100000")
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", ""), "prompt must hold at least one character, got ''"),
        (("--prompt", "\ud800"), r"--prompt must be UTF-8 text, got '\ud800'"),
        (("--prompt", "word " * 80), "prompt must hold at most 128 tokens, got 241"),
        (("--temperature", "-1"), "--temperature must be finite and at least 0, got -1.0"),
        (("--temperature", "nan"), "--temperature must be finite"),
        (("--top-k", "0"), "--top-k must be at least 1, got 0"),
        (("--top-p", "0"), "--top-p must lie in (0, 1], got 0.0"),
        (("--top-p", "1.5"), "--top-p must lie in (0, 1], got 1.5"),
        (("--max-new-tokens", "-3"), "--max-new-tokens must be at least 0, got -3"),
        (("--seed", "-1"), "--seed must lie in [0, 2**63), got -1"),
        (("--top-k", "many"), "'--top-k'"),
        (("--unknown",), "--unknown"),
        (("--stop", ""), "--stop must hold at least one character"),
        (
            ("--prompt-file", "none.txt"),
            "--prompt-file must be a file that can be read, got 'none.txt': No such file",
        ),
        (("--prompt-file", "x", "--prompt", "y"), "--prompt-file must stand without --prompt"),
        (("--batch-prompts", "a||b"), "prompt must hold at least one character"),
        (
            ("--batch-prompts", "a|b", "--prompt", "c"),
            "--batch-prompts must stand without --prompt",
        ),
        (("--batch-prompts", "a|b", "--stop", "."), "--batch-prompts must stand without --stop"),
        (("--batch-prompts", "a|b", "--stream"), "--batch-prompts must stand without --stream"),
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
    assert "model.safetensors: " in err
    assert {"missing": "missing; give a folder", "truncated": "expected sha256"}[damage] in err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command the help comes, and it is no error."""
    code, out, _ = run(capsys)
    assert code == 0
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


def test_every_command_is_on_the_page() -> None:
    """Guards the chapter: a command or an option without its help there is not documented."""
    page = (Path(__file__).parents[1] / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in app.registered_commands:
        assert f'main(["{command.callback.__name__}", "--help"])' in page


# --- bench ---


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    """Run `lab35 bench --json`; return exit code and object. Stderr tells what is not there."""
    code, out, err = run(capsys, "bench", "--json", *arguments)
    assert all(line.startswith("without ") for line in err.splitlines())
    assert out.count("\n") == 1
    return code, json.loads(out)


def test_a_bench_is_one_line_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """What was timed, under which circumstances, and each loop's latencies with their spread."""
    code, told = bench(capsys, "--max-new-tokens", "4", "--repeats", "2")
    assert code == 0
    assert (told["prompt_tokens"], told["new_tokens"], told["samples"]) == (16, 4, 2)
    assert (told["threads"], told["torch"]) == (1, torch.__version__)
    assert (told["baseline"], told["same_tokens"]) == ("uncached", True)
    assert told["variants"].keys() | told["missing"].keys() == BENCH_VARIANTS.keys()
    assert told["variants"].keys() >= {"uncached", "eager", "lean"}
    for variant in told["variants"].values():
        for name in ("time_to_first_token", "time_per_output_token", "speedup"):
            assert 0 < variant[name]["min"] <= variant[name]["median"] <= variant[name]["max"]


def test_a_bench_counts_output_only(capsys: pytest.CaptureFixture[str]) -> None:
    """A rate is new tokens over seconds, whatever the prompt; one token has no TPOT."""
    options = ("--repeats", "1", "--prompt", "My dear Watson, said he, I")
    for new in (1, 3):
        _, told = bench(capsys, *options, "--max-new-tokens", str(new))
        assert told["prompt_tokens"] == 13
        for variant in told["variants"].values():
            rate, seconds = variant["tokens_per_second"]["median"], variant["seconds"]["median"]
            assert rate == pytest.approx(new / seconds)
            assert (variant["time_per_output_token"] is None) == (new == 1)


def test_a_bench_is_a_table_for_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line a variant, also for one that is added later; what is missing is told once."""
    monkeypatch.setitem(BENCH_VARIANTS, "another", {})
    monkeypatch.setattr(
        "lab35.speed.why_not",
        lambda name, _: None if name in ("eager", "lean") else "not\nhere",
    )
    code, out, err = run(capsys, "bench", "--max-new-tokens", "1", "--repeats", "1")
    assert (code, err) == (0, "without compiled: not here\nwithout numba: not here\n")
    head, _, columns, *rows, _, verdict = out.splitlines()
    assert head.startswith("prompt tokens: 16, greedy tokens: 1, cpu, threads: 1, torch ")
    assert columns.split() == ["loop", "TTFT", "TPOT", "fastest", "tokens/s", "speed-up"]
    assert [row.split()[0] for row in rows] == ["uncached", "eager", "lean", "another"]
    assert all(row.count("none") == 2 for row in rows)
    assert verdict == "all wrote the same text"


def test_a_bench_sets_threads_and_gives_them_back(capsys: pytest.CaptureFixture[str]) -> None:
    """The number that was asked for is the one that is told."""
    before, most = torch.get_num_threads(), min(2, os.cpu_count() or 1)
    _, told = bench(capsys, "--max-new-tokens", "1", "--repeats", "1", "--threads", str(most))
    assert told["threads"] == most
    assert torch.get_num_threads() == before


def test_a_bench_of_different_texts_is_exit_code_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that sees only four tokens writes something else, and its time proves nothing."""
    monkeypatch.setitem(BENCH_VARIANTS, "wrong", {"use_cache": False, "block_size": 4})
    options = ("--max-new-tokens", "8", "--repeats", "1")
    code, told = bench(capsys, *options)
    assert (code, told["same_tokens"]) == (1, False)
    assert "DIFFERENT TEXTS" in run(capsys, "bench", *options)[1]


def test_a_bench_shows_progress_on_a_terminal_only() -> None:
    """The bar is on stderr, and stdout stays one object."""
    main_end, child_end = pty.openpty()
    command = [LAB35, "bench", "--json", "--max-new-tokens", "2", "--repeats", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=child_end) as process:
        os.close(child_end)
        out = process.stdout.read()
    seen = os.read(main_end, 100_000).decode()
    os.close(main_end)
    assert json.loads(out)["samples"] == 3
    assert "timing" in seen
    assert "100%" in seen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-new-tokens", "0"), "'--max-new-tokens'"),
        (("--repeats", "0"), "'--repeats'"),
        (("--threads", "0"), "'--threads'"),
        (
            ("--max-new-tokens", "114"),
            "--max-new-tokens must lie in [1, 113] after 16 prompt tokens",
        ),
        (("--prompt", "word " * 80), "prompt must hold at most 128 tokens, got 241"),
        (("--prompt", ""), "prompt must hold at least one character"),
    ],
)
def test_bad_input_to_a_bench(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    """Exit code 2, one line, and nothing was timed."""
    code, out, err = run(capsys, "bench", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_a_bench_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the object and on stderr; with nothing left to time it is an error."""
    monkeypatch.setattr("lab35.speed.why_not", lambda name, _: "gone" if name == "lean" else None)
    options = ("--max-new-tokens", "2", "--repeats", "1", "--only", "lean")
    _, told = bench(capsys, *options, "--only", "eager")
    assert (told["missing"], told["baseline"], told["device"]) == ({"lean": "gone"}, "eager", "cpu")
    code, out, err = run(capsys, "bench", *options)
    assert (code, out) == (2, "")
    assert err.endswith("lab35: error: --only must name something that runs here, got lean\n")


@pytest.mark.parametrize("engine", ["eager", "lean"])
def test_a_benchmark_runs_the_engine_that_the_text_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """The steps of the cached texts are the chosen engine's, and the line says which."""
    steps = []
    original = Lean._step
    monkeypatch.setattr(Lean, "_step", lambda *args: steps.append(1) or original(*args))
    words = ("generate", "--engine", engine, "--max-new-tokens", "3", "--benchmark")
    code, _, err = run(capsys, *words)
    assert code == 0
    assert f"with the cache and the {engine} engine" in err
    texts = 1 + 1 + ROUNDS  # the text itself, a warm-up, the rounds
    assert len(steps) == (2 * texts if engine == "lean" else 0)


def test_a_bench_of_some(capsys: pytest.CaptureFixture[str]) -> None:
    """The first one named is the baseline; a name that does not exist is refused."""
    options = ("--max-new-tokens", "2", "--repeats", "1")
    code, told = bench(capsys, *options, "--only", "lean", "--only", "eager")
    assert (code, told["baseline"], list(told["variants"])) == (0, "lean", ["lean", "eager"])
    code, out, err = run(capsys, "bench", *options, "--only", "fast")
    assert (code, out) == (2, "")
    assert "--only must be one of uncached, eager, lean, compiled, numba, got 'fast'" in err


def test_a_cold_bench_times_fresh_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins for the commands: each wait alone and beside a busy process, and the ratios."""
    text = "print('a', flush=True); import time; time.sleep(0.2)"
    stand_ins = {cold.BASELINE: ("-c", "pass"), "lab35 generate": ("-c", text)}
    monkeypatch.setattr(cold, "COMMANDS", stand_ins)
    code, told = bench(capsys, "--cold", "--repeats", "1")
    assert (code, told["samples"], told["torch"]) == (0, 1, torch.__version__)
    names = [cold.BASELINE, "lab35 generate, first word", "lab35 generate, 64 tokens"]
    assert names == [row["name"] for row in told["rows"]]
    for load in ("alone", "busy"):
        base, first, whole = (row[load]["seconds"]["median"] for row in told["rows"])
        assert 0 < first < whole
        assert [1, first / base, whole / base] == pytest.approx(
            [row[load]["ratio"]["median"] for row in told["rows"]]
        )
    code, out, err = run(capsys, "bench", "--cold", "--repeats", "1")
    assert (code, err) == (0, "")
    assert [*names] == [line.partition("  ")[0] for line in out.splitlines()[3:]]


def test_a_cold_bench_says_what_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that fails has no time, and the options of the other bench are refused."""
    monkeypatch.setattr(cold, "COMMANDS", {cold.BASELINE: ("-c", "raise SystemExit('no disk')")})
    code, out, err = run(capsys, "bench", "--cold", "--repeats", "1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "must run, got exit code 1: no disk" in err
    for words in (["--only", "lean"], ["--threads", "2"], ["--device", "cuda"]):
        code, out, err = run(capsys, "bench", "--cold", *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"--cold must stand without {words[0]}, got" in err


def test_a_busy_process_is_busy_and_ends() -> None:
    """It runs for as long as the block, also if that fails."""
    with suppress(KeyboardInterrupt), cold.busy_process() as process:
        assert process.poll() is None
        raise KeyboardInterrupt
    assert process.returncode == -signal.SIGKILL


# --- devices ---


COMMANDS = ("generate", "verify", "trace", "bench", "repl")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_device_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Every command that runs the model takes a device, and says which ones there are."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    code, out, err = run(capsys, command, "--device", "cuda")
    assert (code, out) == (2, "")
    assert err == "lab35: error: --device must be one of cpu, got 'cuda'\n"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (
        "one of cpu, cuda:0, cuda:1, got 'cuda:2'" in run(capsys, command, "--device", "cuda:2")[2]
    )


def test_everything_is_made_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt, batch and mask go to the model's device, seen on meta, which holds no numbers."""
    model, tokenizer = load_pretrained()
    model = model.to("meta")
    idx, mask = pad(model, tokenizer, [[1], [2, 3]])
    assert encode(model, tokenizer, "Holmes").is_meta
    assert idx.is_meta
    assert mask.is_meta


# --- streams that are not as expected ---


COMMAND_LINES = (
    ("--help",),
    ("--version",),
    ("generate", "--max-new-tokens", "2"),
    ("generate", "--max-new-tokens", "2", "--json"),
    ("generate", "--batch-prompts", "a|b", "--max-new-tokens", "2"),
    ("verify", "--steps", "2"),
    ("trace",),
    ("trace", "--json"),
    ("info",),
    ("bench", "--only", "lean", "--max-new-tokens", "2", "--repeats", "1"),
    ("repl",),
)


@pytest.mark.parametrize("words", COMMAND_LINES, ids=" ".join)
def test_a_full_disk_is_one_line_and_two(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Whatever prints: no traceback, and a reason."""
    monkeypatch.setattr("sys.stdin", io.StringIO("Holmes\n"))
    with Path("/dev/full").open("w", encoding="utf-8") as full, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        code = main(words)
    err = capsys.readouterr().err

    assert 2 == code
    assert "lab35: error: standard output: No space left on device" == err.splitlines()[-1]


@pytest.mark.parametrize("words", COMMAND_LINES, ids=" ".join)
def test_no_streams_at_all(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    """`<&- >&- 2>&-` leaves None in Python; each behaves like an empty stream, and comes back."""
    with monkeypatch.context() as patch:
        for name in ("stdin", "stdout", "stderr"):
            patch.setattr(sys, name, None)
        code = main(words)
        left = (sys.stdin, sys.stdout, sys.stderr)

    assert 0 == code
    assert (None, None, None) == left


def test_closed_streams_of_a_process() -> None:
    """The real thing, and a file that is opened later does not take a stream's place."""
    command = f"{LAB35} generate --max-new-tokens 2 --prompt-file - <&- >&- 2>&-"

    assert 2 == subprocess.run(command, shell=True).returncode  # an empty prompt


def test_errors_to_a_full_disk_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be told is still bad input."""
    with Path("/dev/full").open("w", encoding="utf-8") as full, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", full)
        code = main(["generate", "--temperature", "-1"])

    assert 2 == code


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "cp437"])
def test_any_encoding_will_do(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """Letters that an encoding has not are replaced; JSON escapes them, and says the same."""
    words = ("generate", "--prompt", "no—yes ★", "--max-new-tokens", "2")
    for more in ((), ("--json",)):
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", out)
            patch.setattr("sys.stderr", err)
            code = main((*words, *more))
            err.flush()
        assert (0, "strict") == (code, out.errors)
        if more:
            assert json.loads(out.buffer.getvalue().splitlines()[-1])["prompt"] == "no—yes ★"
        else:
            assert b"\\u2605" in err.buffer.getvalue()


def test_a_completion_that_the_encoding_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The curly quotes of the course's own text, under the encoding that has none."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", out)
        code = main(["generate", "--temperature", "0", "--max-new-tokens", "12"])
    assert (0, "? quietly.\n\n?It\n") == (code, out.buffer.getvalue().decode("latin-1"))


def test_an_argument_is_utf_8_whatever_the_locale(capsys: pytest.CaptureFixture[str]) -> None:
    """Under the C locale an argument arrives as surrogates; bytes that are no text are refused."""
    typed = "no—yes".encode().decode("ascii", errors="surrogateescape")
    told = json.loads(run(capsys, "generate", "--prompt", typed, "--json")[1])
    assert told["prompt"] == "no—yes"
    for option in ("--prompt", "--batch-prompts", "--stop"):
        code, out, err = run(capsys, "generate", option, os.fsdecode(b"a\xff"))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{option} must be UTF-8 text" in err


def test_json_is_json_whatever_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    """NaN and the infinities have no place in it, and a lone surrogate is escaped."""
    print_json({"a": math.nan, "b": [math.inf, 1.5, (-math.inf,)], "c": "\ud800", "d": {"e": 1}})
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    assert {"a": None, "b": [None, 1.5, [None]], "c": "\ud800", "d": {"e": 1}} == told


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"a\xff"), "must be UTF-8 text"),
        (lambda path: path.write_bytes(b""), "at least one character"),
        (lambda path: path.symlink_to("/dev/zero"), "at most 1,048,576 bytes"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.write_bytes(b"a" * 1_000_000), "at most 128 tokens, got at least"),
    ],
    ids=["directory", "bytes", "empty", "endless", "circle", "long"],
)
def test_what_is_no_prompt_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, make: Callable, reason: str
) -> None:
    """One line that gives the reason, soon, and with little memory."""
    make(tmp_path / "prompt")
    code, out, err = run(capsys, "generate", "--prompt-file", str(tmp_path / "prompt"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert reason in err


def test_a_file_that_may_not_be_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not missing, and the line says so."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("lab35.cli.streams.Path.open", refuse)
    err = run(capsys, "generate", "--prompt-file", "mine")[2]
    assert "got 'mine': Permission denied" in err


def test_a_prompt_through_a_pipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A FIFO is read to its end: that is how a shell hands over the output of a command."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("Holmes\n",))
    writer.start()
    told = run(capsys, "generate", "--prompt-file", str(pipe))
    writer.join()
    assert told == run(capsys, "generate", "--prompt", "Holmes")


# --- refusals come first ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--no-cache", "--benchmark", "--prompt", "word " * 80), "got 241; shorten it, or leave"),
        (("--no-cache", "--verify", "--prompt", "word " * 80), "leave out --verify"),
        (("--batch-prompts", "a|" + "word " * 80), "got 241; shorten it, or use --no-cache"),
        (("--no-cache", "--engine", "lean"), "--no-cache must stand without --engine lean"),
        (
            ("--batch-prompts", "a|b", "--engine", "compiled"),
            "--engine must be one of eager, lean, numba with --batch-prompts, got 'compiled'",
        ),
        (("--batch-prompts", "a|b", "--prompt", ""), "must stand without --prompt"),
        (("--engine", "compiled", "--prompt", ""), "prompt must hold at least one character"),
        (("--verify", "--stop", ""), "--stop must hold at least one character"),
        (("--checkpoint", "a\0b"), "null"),
        (("--prompt-file", "a\0b"), "--prompt-file must be a file that can be read"),
        (("--device", "x" * 100_000), "--device must be one of"),
    ],
)
def test_nothing_is_shown_before_a_refusal(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    """Exit code 2 and one line, in the words of the command line, and no text before it."""
    code, out, err = run(capsys, "generate", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("lab35: error: ")
    assert message in err
    assert len(err) < 1_200
    assert not re.search(r"use_cache|max_new_tokens|block_size|\bidx\b", err)


@pytest.mark.parametrize("steps", [0, -1, 125])
def test_steps_have_a_range(capsys: pytest.CaptureFixture[str], steps: int) -> None:
    """After 5 prompt tokens 124 can be decoded."""
    code, out, err = run(capsys, "verify", "--steps", str(steps))
    assert (code, out) == (2, "")
    assert err == f"lab35: error: --steps must lie in [1, 124] after 5 prompt tokens, got {steps}\n"


def test_the_options_accept_what_sampling_accepts() -> None:
    """The same ranges twice, since the command line checks before it loads: they agree."""
    values = {
        "temperature": (0.0, 1e30, -0.0, -1.0, math.inf, math.nan, 5e-324),
        "top_k": (None, 1, 0, -1, 10**30),
        "top_p": (None, 1.0, 0.0, 1.0000001, -1.0, math.nan, 5e-324),
    }
    for name, candidates in values.items():
        for value in candidates:
            choice = {"temperature": 1.0, "top_k": None, "top_p": None} | {name: value}
            assert refuses(lambda c=choice: check_sampling(**c)) == refuses(
                lambda n=name, v=value: Settings(**{n: v})
            ), (name, value)


def refuses(call: Callable[[], object]) -> bool:
    """Say whether a call raises `ValueError`."""
    try:
        call()
    except ValueError:
        return True
    return False


def test_more_threads_than_processors_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A million would end the process without a word."""
    code, out, err = run(capsys, "bench", "--threads", "1000000")
    assert (code, out) == (2, "")
    assert f"--threads must lie in [1, {os.cpu_count()}]" in err


@pytest.mark.parametrize("module", ["lab35", "lab35.cli"])
def test_modules_can_be_run(module: str) -> None:
    """`python -m` does what the console script does."""
    done = subprocess.run([sys.executable, "-m", module, "generrate"], capture_output=True)
    assert 2 == done.returncode
    assert b"No such command 'generrate'" in done.stderr


# --- what ran ---


def test_a_fallback_is_named_everywhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that cannot be had: the reports name the one that ran, beside the one asked for."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("lab35.speed.choice.Compiled", fail)
    code, out, _ = run(capsys, "verify", "--steps", "2", "--engine", "compiled")
    assert code == 0
    assert "engine lean in place of compiled" in out
    words = ("generate", "--max-new-tokens", "2", "--engine", "compiled", "--benchmark")
    told = json.loads(run(capsys, *words, "--json")[1])["benchmark"]
    assert ("lean", "compiled") == (told["engine"], told["engine_asked"])
    assert "the lean engine in place of compiled" in run(capsys, *words)[2]


# --- records and sessions ---


@pytest.mark.parametrize(
    "record",
    [[1, 2], 3, None, "text", {}, {"a": {}, "b": 1.5, "c": True}, {"a\x1b[31m": "\x1b[2J\n"}],
)
def test_info_shows_any_record(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model: GPT,
    tokenizer: Tokenizer,
    record: object,
) -> None:
    """A record is whatever JSON holds, and cannot move the cursor."""
    save_checkpoint(tmp_path, model, tokenizer, record)
    code, out, err = run(capsys, "info", "--checkpoint", str(tmp_path))
    assert (code, err) == (0, "")
    assert "record" in out
    assert "\x1b" not in out
    code, out, _ = run(capsys, "info", "--checkpoint", str(tmp_path), "--json")
    json.loads(out, parse_constant=pytest.fail)
    assert code == 0


def session(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, data: bytes, *words: str
) -> tuple[int, str, str]:
    """Hold a session in this process."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
    return run(capsys, "repl", *words)


GREEDY = ("--max-new-tokens", "5", "--temperature", "0")


def test_a_bad_line_is_named_and_costs_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not UTF-8, or too long: the session goes on with the last text as if it had not been."""
    good = session(capsys, monkeypatch, b"Holmes\n\n", *GREEDY)
    bad = b"Holmes\n\xff\n" + b"x" * (2 * MAX_BYTES) + b"\n/top-p 7\n\n"
    code, out, err = session(capsys, monkeypatch, bad, *GREEDY)
    assert (code, out) == good[:2]
    assert "line 2 must be UTF-8 text" in err
    assert "line 3 must hold at most 1,048,576 bytes" in err


def test_a_line_without_an_end_ends_the_session(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lab35 repl < /dev/zero` comes to an end, in one line."""
    with Path("/dev/zero").open(encoding="utf-8") as zero:
        monkeypatch.setattr("sys.stdin", zero)
        code, out, err = run(capsys, "repl")
    assert (code, out) == (2, "")
    assert err.endswith("got one that does not end\n")


def test_a_character_that_is_cut_between_turns(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: GPT,
    tokenizer: Tokenizer,
) -> None:
    """One token a turn: no U+FFFD, and together the text that one turn writes."""
    turns, (seed, heat) = 12, (5, 1.5)
    words = ("--temperature", str(heat), "--top-k", "512", "--top-p", "1", "--seed", str(seed))
    data = b"Holmes\n" + b"\n" * (turns - 1)
    _, out, err = session(capsys, monkeypatch, data, *words, "--max-new-tokens", "1")
    idx, generator = torch.tensor([tokenizer.encode("Holmes")]), torch.Generator().manual_seed(seed)
    made = generate(model, idx, turns, temperature=heat, generator=generator)
    ids = made.new_tokens[0].tolist()

    assert any("\ufffd" in tokenizer.decode(ids[:i]) for i in range(turns))  # it is an example
    assert "\ufffd" not in out + err
    assert tokenizer.decode(ids).replace("\n", "") == out.replace("\n", "")


# --- Ctrl-C at any moment ---


@pytest.mark.parametrize("seconds", [0.1, 0.4, 0.8, 1.2])
def test_ctrl_c_while_loading_is_quiet(seconds: float) -> None:
    """Whenever it comes, there is no traceback; a process that has ended has ended well."""
    code = (
        "import signal, threading, time, os, sys\n"
        "from lab35.cli import main\n"
        f"threading.Timer({seconds}, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.argv[1:] = ['generate', '--no-cache', '--max-new-tokens', '100000']\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 130 == done.returncode
    assert "Traceback" not in done.stderr
    assert "KeyboardInterrupt" not in done.stderr


def test_importing_the_command_line_imports_no_torch() -> None:
    """Until `main` is ready for Ctrl-C, nothing that takes long may be loaded."""
    code = "import sys, lab35.cli; print('torch' in sys.modules, 'typer' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "False False\n" == done.stdout


HEAVY = ("torch", "numpy", "tokenizers", "safetensors", "numba", "rich")
WORDS_ALONE = [
    [],
    ["--help"],
    ["--version"],
    *([command.callback.__name__, "--help"] for command in app.registered_commands),
    ["generrate"],
    ["--nonsense"],
    *([command.callback.__name__, "--nonsense"] for command in app.registered_commands),
    ["generate", "--prompt"],
    ["generate", "--prompt", ""],
    ["generate", "--prompt-file", "none.txt"],
    ["generate", "--batch-prompts", "a||b"],
    ["generate", "--batch-prompts", "a|b", "--prompt", "c"],
    ["generate", "--batch-prompts", "a|b", "--engine", "compiled"],
    ["generate", "--no-cache", "--engine", "lean"],
    ["generate", "--stop", ""],
    ["generate", "--top-k", "many"],
    ["generate", "--max-new-tokens", "-1"],
    ["generate", "--threads", "0"],
    ["repl", "--seed", "-1"],
    ["trace", "--top-p", "0"],
    ["trace", "--temperature", "nan"],
    ["verify", "--engine", "fast"],
    ["verify", "--threads", "1000000"],
    ["bench", "--only", "fast"],
    ["bench", "--repeats", "0"],
    ["bench", "--cold", "--only", "lean"],
]


def test_what_needs_no_model_loads_no_torch() -> None:
    """Help, the version and what is refused by its words alone: all of it, in one process."""
    code = (
        "import contextlib, gc, io, json, sys\n"
        "from lab35.cli import main\n"
        "def run(words):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out, "
        "contextlib.redirect_stderr(io.StringIO()) as err:\n"
        "        code = main(words) or gc.get_freeze_count()\n"
        f"    loaded = [name for name in {HEAVY} if name in sys.modules]\n"
        "    return words, code, bool(out.getvalue()), err.getvalue().count(chr(10)), loaded\n"
        "print(json.dumps([run(words) for words in json.loads(sys.argv[1])]))\n"
    )
    command = [sys.executable, "-c", code, json.dumps(WORDS_ALONE)]
    done = subprocess.run(command, capture_output=True, text=True)
    answers = [not {"--help", "--version"}.isdisjoint(words) or not words for words in WORDS_ALONE]

    assert [
        [words, 0, True, 0, []] if answer else [words, 2, False, 1, []]
        for words, answer in zip(WORDS_ALONE, answers, strict=True)
    ] == json.loads(done.stdout)


def test_info_and_a_module_that_is_run_load_no_torch() -> None:
    """`info` reads headers and digests; `python -m lab35` asks for nothing more than a command.

    A process of its own ends without a last search for cycles; a caller's collector is left alone.
    """
    code = (
        "import runpy, sys\n"
        "with __import__('contextlib').suppress(SystemExit):\n"
        "    runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)\n"
        "import gc\n"
        "found = {'torch', 'numpy'} & sys.modules.keys()\n"
        "print(found, gc.get_freeze_count() > 0, file=sys.stderr)\n"
    )
    for module, words in (("lab35", ["info"]), ("lab35.cli", ["--help"])):
        command = [sys.executable, "-c", code, module, *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert "set() True\n" == done.stderr
        assert done.stdout


# --- threads ---

TEXTS = (
    ("generate", "--max-new-tokens", "2"),
    ("generate", "--max-new-tokens", "2", "--batch-prompts", "a|b"),
    ("verify", "--steps", "2"),
    ("trace",),
    ("repl", "--max-new-tokens", "2"),
    ("bench", "--only", "eager", "--max-new-tokens", "2", "--repeats", "1"),
)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor has one thread")
@pytest.mark.parametrize("words", TEXTS, ids=" ".join)
def test_one_thread_unless_asked_and_the_caller_gets_its_own_back(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """The first forward already runs on one thread, and --threads is heard by every command."""
    seen, attend = [], F.scaled_dot_product_attention

    def watched(*args: object, **options: object) -> object:
        seen.append(torch.get_num_threads())
        return attend(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    for asked, callers, expected in ((), 2, 1), (("--threads", "2"), 1, 2):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Holmes\n")))
        seen.clear()
        with threads(callers):
            assert 0 == main([*words, *asked])
            assert callers == torch.get_num_threads()
        assert {expected} == set(seen)


@pytest.mark.parametrize("wish", ["FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"])
def test_a_wish_for_colour_draws_no_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    """With standard error in a file, a benchmark writes no frames into it."""
    monkeypatch.setenv(wish, "1")
    words = ("--only", "lean", "--max-new-tokens", "2", "--repeats", "2")
    code, out, err = run(capsys, "bench", *words)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
