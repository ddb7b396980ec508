"""The training script: it learns, it can stop anywhere, and it says what is wrong."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train as script
from rich.console import Console
from train import Corpus, Recipe, Run, held_out_loss, read_corpus

from lab35 import GPT, GPTConfig, Tokenizer, load_pretrained
from lab35.checkpoint import read_record

TEXT = "".join(f"{n} bottles of ink, {n} sheets of paper, {n} letters sealed.\n" for n in range(99))
SIZES = GPTConfig(vocab_size=267, block_size=16, n_layer=2, n_head=2, n_embd=16, dropout=0.1)
RECIPE = Recipe(steps=12, batch_size=4, warmup=2, eval_every=4)
QUIET = Console(file=None, quiet=True)


def start(recipe: Recipe = RECIPE, text: str = TEXT) -> Run:
    """Begin a run on the small text."""
    tokenizer = Tokenizer.train(text, merges=10)
    return Run.start(recipe, Corpus.split(text, tokenizer), tokenizer, SIZES)


def weights(model: GPT) -> list[list[float]]:
    """Return all weights as plain numbers."""
    return [p.flatten().tolist() for p in model.parameters()]


def test_a_resumed_run_is_the_run(tmp_path: Path) -> None:
    """Stopped after 8 of 12 steps and resumed: the same weights, average and curve, bit for bit."""
    whole = start()
    script.train(whole, tmp_path / "whole", QUIET)

    (tmp_path / "parts").mkdir()
    part = start()
    losses = [part.advance() for _ in range(4)]
    part.evaluate(sum(losses) / 4)
    losses = [part.advance() for _ in range(4)]
    part.evaluate(sum(losses) / 4)
    part.save_state(tmp_path / "parts")
    torch.manual_seed(99)
    resumed = start()
    resumed.resume(tmp_path / "parts")
    assert resumed.step == 8
    script.train(resumed, tmp_path / "parts", QUIET)

    assert weights(whole.model) == weights(resumed.model)
    assert weights(whole.average) == weights(resumed.average)
    assert whole.curve == resumed.curve


def test_the_checkpoint_is_the_best_average(tmp_path: Path) -> None:
    """What is saved has the loss that the record claims, and the record knows the run."""
    run = start()
    script.train(run, tmp_path, QUIET)
    model, _ = load_pretrained(tmp_path)
    record = read_record(tmp_path)
    assert held_out_loss(model, run.corpus.held_out) == pytest.approx(run.best)
    assert record["held_out_nats_per_token"] == min(p["held_out"] for p in record["curve"])
    assert record["steps"] == 12
    assert [point["step"] for point in record["curve"]] == [4, 8, 12]


@pytest.mark.slow
def test_training_learns(tmp_path: Path) -> None:
    """A text this regular is soon predicted far better than by chance."""
    run = start(Recipe(steps=150, batch_size=8, warmup=10, learning_rate=1e-2, eval_every=150))
    before = held_out_loss(run.average, run.corpus.held_out)
    script.train(run, tmp_path, QUIET)
    assert before == pytest.approx(math.log(SIZES.vocab_size), abs=0.2)
    assert run.best < 0.6 * before


def test_the_held_out_tenth_is_never_trained_on() -> None:
    """The two parts make up the text, and the second is a tenth of it."""
    tokenizer = Tokenizer.train(TEXT, merges=10)
    corpus = Corpus.split(TEXT, tokenizer)
    train, held_out = (tokenizer.decode(part.tolist()) for part in (corpus.train, corpus.held_out))
    assert train + held_out == TEXT
    assert len(held_out) == pytest.approx(len(TEXT) / 10, abs=1)
    assert corpus.held_out_bytes == len(held_out.encode())


def test_held_out_loss_counts_every_token_once() -> None:
    """Windows of any length: the mean over tokens, not over windows."""
    model = start().model.eval()
    tokens = torch.arange(40) % SIZES.vocab_size
    with torch.inference_mode():
        total = 0.0
        for first in (0, 16, 32):
            window = tokens[first : first + 17][None]
            logp = model(window[:, :-1])[0].double().log_softmax(-1)
            total -= logp.gather(-1, window[:, 1:, None]).sum().item()
    assert held_out_loss(model, tokens) == pytest.approx(total / 39, rel=1e-5)


def test_bits_per_byte() -> None:
    """A uniform guess over bytes costs eight bits each: nats a token, tokens a byte, ln 2."""
    run = start()
    tokens, size = len(run.corpus.held_out) - 1, run.corpus.held_out_bytes
    assert run.bits_per_byte(8 * math.log(2) * size / tokens) == pytest.approx(8)


def test_learning_rate_rises_then_falls_to_its_share() -> None:
    """Linear warm-up to the peak, a cosine down to the final fraction."""
    recipe = Recipe(steps=1000, warmup=100, learning_rate=1.0, final_fraction=0.05)
    rates = [recipe.rate(step) for step in range(1000)]
    assert max(rates) == rates[99] == pytest.approx(1.0)
    assert rates[:100] == sorted(rates[:100])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=1e-4)


def test_resume_refuses_another_recipe_or_text(tmp_path: Path) -> None:
    """Going on with other settings would be neither run."""
    run = start()
    with pytest.raises(ValueError, match=r"resume needs .*training\.safetensors"):
        run.resume(tmp_path)
    run.evaluate(sum(run.advance() for _ in range(4)) / 4)
    run.save_state(tmp_path)
    with pytest.raises(ValueError, match="resume needs the recipe and corpus"):
        start(Recipe(steps=13, batch_size=4, warmup=2, eval_every=4)).resume(tmp_path)
    with pytest.raises(ValueError, match="resume needs the recipe and corpus"):
        start(text=TEXT + "One more line.\n").resume(tmp_path)
    run.resume(tmp_path)


def test_the_corpus_must_be_text(tmp_path: Path) -> None:
    """A missing file and a file of other bytes are the user's to mend."""
    with pytest.raises(ValueError, match=r"corpus must be a UTF-8 text file, got .*none\.txt"):
        read_corpus(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"corpus must be a UTF-8 text file, got .*latin\.txt"):
        read_corpus(tmp_path / "latin.txt")


def test_the_script_says_it_in_one_line(tmp_path: Path) -> None:
    """As everywhere: one line, exit code 2, and nothing left in the folder."""
    ran = subprocess.run(
        [sys.executable, script.__file__, "--corpus", "none.txt", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("train: error: corpus must be a UTF-8 text file")
    assert ran.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_log_holds_every_line_whatever_colour_is_wished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`FORCE_COLOR` makes no terminal of a file: a line an evaluation, and no frames of a bar."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    script.train(start(), tmp_path / "run", script.error_console())

    assert ["step 4", "step 8", "step 12"] == [
        line.split(":")[0] for line in log.getvalue().splitlines()
    ]
    assert "\x1b" not in log.getvalue()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("learning_rate", [math.nan, math.inf, -1.0, 0.0]),
        ("weight_decay", [math.nan, math.inf, -0.1]),
        ("dropout", [math.nan, -0.1, 1.0]),
        ("beta2", [math.nan, 1.0]),
        ("average_decay", [math.nan, 1.0]),
        ("final_fraction", [math.nan, -1.0]),
        ("steps", [0, -1]),
        ("batch_size", [0]),
        ("seed", [-1, 2**60]),
    ],
)
def test_a_recipe_that_cannot_train_is_refused(name: str, values: list[float]) -> None:
    """Each setting has its range, told before anything starts; NaN lies in none."""
    for value in values:
        with pytest.raises(ValueError, match=f"{name} must"):
            Recipe(**{name: value})


def test_a_run_that_diverges_keeps_the_good_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN compares false with everything, and must not pass for the best so far."""
    run = start()
    rate = Recipe.rate
    monkeypatch.setattr(
        Recipe, "rate", lambda self, step: math.nan if step == 9 else rate(self, step)
    )
    with pytest.raises(
        script.DivergedError,
        match=r"at step 11: lower the learning rate; the weights of step 8",
    ):
        script.train(run, tmp_path, QUIET)
    model, _ = load_pretrained(tmp_path)
    assert read_record(tmp_path)["steps"] == 8
    assert held_out_loss(model, run.corpus.held_out) == pytest.approx(run.best)

    with pytest.raises(script.DivergedError, match="held-out loss is nan"):
        run.evaluate(1.0)
    assert math.isfinite(run.best)


def test_a_second_run_does_not_replace_the_first(tmp_path: Path) -> None:
    """Weights that took half an hour go only if the caller says so."""
    script.check_out(tmp_path, resume=False, overwrite=False)
    script.train(start(), tmp_path, QUIET)
    with pytest.raises(ValueError, match=r"out must hold no checkpoint, got .*--overwrite"):
        script.check_out(tmp_path, resume=False, overwrite=False)
    script.check_out(tmp_path, resume=True, overwrite=False)
    script.check_out(tmp_path, resume=False, overwrite=True)
    (tmp_path / "state").mkdir()
    start().save_state(tmp_path / "state")
    with pytest.raises(ValueError, match=r"with training\.safetensors"):
        script.check_out(tmp_path / "state", resume=False, overwrite=False)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    """Begun together, both find it empty, and one would replace the other's weights unseen."""
    out = tmp_path / "new"
    with script.only_run_in(out):
        words = [sys.executable, script.__file__, "--out", str(out), "--steps", "1"]
        corpus = tmp_path / "text"
        corpus.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(2000)))
        done = subprocess.run(
            [*words, "--corpus", str(corpus)], check=False, capture_output=True, text=True
        )
        assert (2, []) == (done.returncode, list(out.iterdir()))
        assert "no other run writes" in done.stderr.splitlines()[-1]
    assert not out.exists()  # nothing was written, so nothing is left
    with script.only_run_in(out):  # the lock went with its run
        pass


def test_a_folder_that_cannot_be_written_is_told_first(tmp_path: Path) -> None:
    """A file in the way is found before the training, and nothing is left behind."""
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "deeper", Path("/proc/lab35/x")):
        with pytest.raises(ValueError, match="out must be a folder that can be written"):
            script.check_out(out, resume=False, overwrite=False)
    script.check_out(tmp_path / "a" / "b", resume=False, overwrite=False)
    assert ["file"] == [path.name for path in tmp_path.iterdir()]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--learning-rate", "nan"], "learning_rate must lie in"),
        (["--dropout", "1"], "dropout must lie in"),
        (["--weight-decay=-1"], "weight_decay must lie in"),
        (["--seed=-1"], "seed must lie in"),
        (["--threads", "1000000"], "threads must lie in"),
        (["--out", __file__], "out must be a folder"),
        (["--corpus", "/"], "corpus must be a UTF-8 text file"),
        (["--corpus", "/dev/null"], "corpus must be"),
        (["--steps", "0"], "Invalid value for '--steps'"),
        (["--steps", "abc"], "Invalid value for '--steps'"),
        (["--wings", "2"], "No such option"),
    ],
)
def test_bad_settings_are_one_line(tmp_path: Path, arguments: list[str], told: str) -> None:
    """Exit code 2, one line, and the training has not begun."""
    (tmp_path / "text").write_text(TEXT)
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    corpus = [] if "--corpus" in arguments else ["--corpus", str(tmp_path / "text")]
    ran = subprocess.run(
        [sys.executable, script.__file__, *out, *corpus, *arguments], capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(f"train: error: {told}")
    assert ran.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "a", "ab " * 30])
def test_a_corpus_too_small_is_one_line(text: str) -> None:
    """Too little text to learn the merges, or to take a window, is told as such."""

    def begin() -> None:
        tokenizer = Tokenizer.train(text, merges=1)
        config = GPTConfig(vocab_size=258, block_size=128, n_layer=1, n_head=1, n_embd=8)
        Run.start(RECIPE, Corpus.split(text, tokenizer), tokenizer, config)

    with pytest.raises(ValueError, match=r"(merges|corpus) must"):
        begin()


def test_a_text_of_another_system_is_the_same_text(tmp_path: Path) -> None:
    """A byte-order mark and other line ends change no token."""
    for contents in (b"one\ntwo\n", b"\xef\xbb\xbfone\ntwo\n", b"one\r\ntwo\r\n", b"one\rtwo\r"):
        (tmp_path / "text").write_bytes(contents)
        assert "one\ntwo\n" == read_corpus(tmp_path / "text")


def test_a_foreign_state_is_refused(tmp_path: Path) -> None:
    """A state of other sizes, or with parts missing, is one clear error."""
    run = start()
    run.save_state(tmp_path)
    other = Run.start(
        RECIPE, run.corpus, run.tokenizer, GPTConfig(267, block_size=16, n_layer=1, n_embd=32)
    )
    with pytest.raises(ValueError, match=r"^resume needs a state of these sizes in [^\n]+$"):
        other.resume(tmp_path)
    (tmp_path / script.STATE_FILE).write_bytes(b"12345678")
    with pytest.raises(ValueError, match="resume needs"):
        run.resume(tmp_path)
    (tmp_path / script.STATE_FILE).unlink()
    os.mkfifo(tmp_path / script.STATE_FILE)
    with pytest.raises(ValueError, match="not a regular file"):
        run.resume(tmp_path)


@pytest.mark.parametrize(
    ("step", "best", "best_step", "curve"),
    [
        (4, math.nan, 4, [4]),
        (-3, 1.0, -3, [-3]),
        (10_000, 1.0, 4, [10_000]),
        (4, 1.0, 8, [4]),
        (4, 1.0, 4, []),
        ("4", 1.0, 4, [4]),
    ],
)
def test_progress_that_cannot_be_is_refused(
    tmp_path: Path, step: object, best: float, best_step: int, curve: list[int]
) -> None:
    """A state with a NaN for its best would call anything better."""
    run = start()
    run.step, run.best, run.best_step = step, best, best_step
    run.curve = [{"step": n, "train": 1.0, "held_out": 1.0} for n in curve]
    run.save_state(tmp_path)
    with pytest.raises(ValueError, match="resume needs a state"):
        start().resume(tmp_path)


def test_resume_leaves_the_checkpoint_of_another_run(tmp_path: Path) -> None:
    """A state beside the weights of another recipe would give them its own record."""
    script.train(start(), tmp_path / "a", QUIET)
    script.train(
        start(Recipe(steps=8, batch_size=4, warmup=2, eval_every=4)), tmp_path / "b", QUIET
    )
    (tmp_path / "a" / script.STATE_FILE).replace(tmp_path / "b" / script.STATE_FILE)
    with pytest.raises(ValueError, match="resume needs the checkpoint of the same run"):
        start().resume(tmp_path / "b")


def test_what_is_replaced_is_told(tmp_path: Path) -> None:
    """`--overwrite` names the loss of the checkpoint that goes."""
    script.train(start(), tmp_path / "run", QUIET)
    told = io.StringIO()
    console = Console(file=told, width=200)
    script._tell_what_goes(tmp_path / "run", console)
    script._tell_what_goes(tmp_path / "nothing", console)
    loss = read_record(tmp_path / "run")["held_out_nats_per_token"]
    assert told.getvalue().startswith(f"note: replaces a checkpoint of {loss} nats a token")
    assert told.getvalue().count("note") == 1


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors"])
def test_a_folder_in_the_place_of_a_file_is_told_first(tmp_path: Path, name: str) -> None:
    """What could not be written in the end is found in the beginning."""
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="out must be a folder of files"):
        script.check_out(tmp_path, resume=False, overwrite=True)
    with pytest.raises(ValueError, match="out must hold no checkpoint"):
        script.check_out(tmp_path, resume=False, overwrite=False)
    (tmp_path / name).rename(tmp_path / ".incoming")
    with pytest.raises(ValueError, match="out must hold no checkpoint"):
        script.check_out(tmp_path, resume=False, overwrite=False)


@pytest.mark.slow
def test_an_interruption_is_quiet(tmp_path: Path) -> None:
    """Ctrl-C ends with 130 and says how to go on; the folder holds what was best."""
    code = (
        "import functools, train, typer\n"
        "real = train.Run.advance\n"
        "def advance(run):\n"
        "    if run.step == 2:\n        raise KeyboardInterrupt\n"
        "    return real(run)\n"
        "train.Run.advance = advance\n"
        "train.Recipe = functools.partial(train.Recipe, eval_every=1)\n"
        "typer.run(train.main)\n"
    )
    (tmp_path / "text").write_text(" ".join(str(n * n * n) for n in range(3000)))
    command = [sys.executable, "-c", code, "--out", str(tmp_path / "out")]
    ran = subprocess.run(
        [*command, "--corpus", str(tmp_path / "text"), "--steps", "9"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(script.__file__).parent)},
    )
    assert ran.returncode == 130, ran.stderr
    assert ran.stderr.endswith("train: stopped after step 2; --resume goes on\n")
    load_pretrained(tmp_path / "out")
