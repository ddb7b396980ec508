"""Train the course's checkpoint: the tokenizer, the model, and a record of how it was done.

    python scripts/train.py --corpus sherlock.txt --out checkpoints/mine
    lab35 generate --checkpoint checkpoints/mine

The last tenth of the text is held out. The folder always holds the best weights so far by the loss
on it, and `training.safetensors`, from which `--resume` goes on as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import http.client
import json
import math
import os
import platform
import re
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import safetensors
import tokenizers
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save
from torch import Tensor
from typer.exceptions import TyperException

from lab35.checkpoint import (
    FILES,
    INCOMING,
    MODEL_FILE,
    CheckpointError,
    load_pretrained,
    read_record,
    replacing,
    save_checkpoint,
)
from lab35.model import GPT, GPTConfig
from lab35.terminal import error_console
from lab35.tokenizer import Tokenizer

if os.name == "posix":
    import fcntl

EBOOK = "https://www.gutenberg.org/cache/epub/1661/pg1661.txt"
CORPUS_SHA256 = "e21895308fe6da6919abc53e2cf77d81f914887897546153cc5d49b2eadefe50"
STATE_FILE = "training.safetensors"
HELD_OUT = 0.1


class DivergedError(ValueError):
    """The weights are lost: the loss is not finite any more."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the outcome, apart from the text and the machine."""

    steps: int = 4000
    batch_size: int = 32
    learning_rate: float = 3e-3
    final_fraction: float = 0.05
    warmup: int = 200
    weight_decay: float = 0.1
    beta2: float = 0.99
    dropout: float = 0.2
    average_decay: float = 0.995
    eval_every: int = 100
    seed: int = 1337

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        # Asked this way round, NaN is refused too.
        for name, low, high in (
            ("learning_rate", 0, math.inf),
            ("weight_decay", 0, math.inf),
            ("final_fraction", 0, 1),
            ("beta2", 0, 1),
            ("dropout", 0, 1),
            ("average_decay", 0, 1),
            ("warmup", 0, math.inf),
            ("seed", 0, 2**40),  # multiplied by a million, it must fit into 64 bits
        ):
            if not low <= getattr(self, name) < high:
                raise ValueError(f"{name} must lie in [{low}, {high}), got {getattr(self, name)}")
        if self.learning_rate == 0:
            raise ValueError("learning_rate must be above 0, got 0: nothing would be learned")

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then a cosine down to the final fraction."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * cosine)


@dataclass(frozen=True)
class Corpus:
    """The text as tokens, split in two."""

    sha256: str
    train: Tensor
    held_out: Tensor
    held_out_bytes: int

    @classmethod
    def split(cls, text: str, tokenizer: Tokenizer) -> Corpus:
        """Encode the first nine tenths and the last tenth of the characters."""
        cut = int(len(text) * (1 - HELD_OUT))
        return cls(
            sha256=hashlib.sha256(text.encode()).hexdigest(),
            train=torch.tensor(tokenizer.encode(text[:cut])),
            held_out=torch.tensor(tokenizer.encode(text[cut:])),
            held_out_bytes=len(text[cut:].encode()),
        )

    def check(self, block_size: int) -> None:
        """Refuse a text of which no window, or no held-out loss, can be taken.

        Raises:
            ValueError: If one of the two parts is too short.
        """
        if len(self.train) <= block_size or len(self.held_out) < 2:
            raise ValueError(
                f"corpus must give more than {block_size} tokens to train on and at least 2 held "
                f"out, got {len(self.train)} and {len(self.held_out)}"
            )

    def batch(self, recipe: Recipe, block_size: int, step: int) -> tuple[Tensor, Tensor]:
        """Draw the windows of one step; they depend on the seed and the step alone."""
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        starts = torch.randint(
            len(self.train) - block_size, (recipe.batch_size, 1), generator=generator
        )
        windows = self.train[starts + torch.arange(block_size + 1)]  # (B, T + 1)
        return windows[:, :-1], windows[:, 1:]


@torch.inference_mode()
def held_out_loss(model: GPT, tokens: Tensor) -> float:
    """Mean loss in nats a token over back-to-back windows that cover every token but the first."""
    model.eval()
    total, block_size = 0.0, model.config.block_size
    for start in range(0, len(tokens) - 1, block_size):
        window = tokens[start : start + block_size + 1][None]
        _, loss = model(window[:, :-1], targets=window[:, 1:])
        total += loss.item() * (window.shape[1] - 1)
    return total / (len(tokens) - 1)


@dataclass
class Run:
    """A training run between two steps: all that is needed to go on."""

    recipe: Recipe
    corpus: Corpus
    tokenizer: Tokenizer
    model: GPT
    average: GPT
    optimizer: torch.optim.AdamW
    step: int = 0
    best: float = math.inf
    best_step: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def start(cls, recipe: Recipe, corpus: Corpus, tokenizer: Tokenizer, config: GPTConfig) -> Run:
        """Set up step 0 from the seed.

        Raises:
            ValueError: If the corpus is too short for the sizes.
        """
        corpus.check(config.block_size)
        torch.manual_seed(recipe.seed)
        model = GPT(config)
        average = GPT(config)
        average.load_state_dict(model.state_dict())
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim != 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": recipe.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(0.9, recipe.beta2),
        )
        return cls(recipe, corpus, tokenizer, model, average, optimizer)

    def advance(self) -> float:
        """Take one optimizer step and return its training loss in nats a token.

        Raises:
            DivergedError: If the loss is not finite.
        """
        self.model.train()
        torch.manual_seed(self.recipe.seed * 1_000_003 + self.step)  # dropout, too, can be resumed
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.step)
        idx, targets = self.corpus.batch(self.recipe, self.model.config.block_size, self.step)
        _, loss = self.model(idx, targets=targets)
        self._check_finite("training", loss.item(), self.step + 1)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        # A young average forgets its random start faster: decay 2/11, 3/12, … up to its limit.
        decay = min(self.recipe.average_decay, (self.step + 2) / (self.step + 11))
        with torch.no_grad():
            for mean, new in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(new, 1 - decay)
        self.step += 1
        return loss.item()

    def evaluate(self, train_loss: float) -> bool:
        """Add a point to the curve; True when the averaged weights are the best so far.

        Raises:
            DivergedError: If the held-out loss is not finite.
        """
        nats = held_out_loss(self.average, self.corpus.held_out)
        self._check_finite("held-out", nats, self.step)
        self.curve.append({"step": self.step, "train": train_loss, "held_out": nats})
        if not nats < self.best:
            return False
        self.best, self.best_step = nats, self.step
        return True

    def _check_finite(self, name: str, nats: float, step: int) -> None:
        if not math.isfinite(nats):
            kept = f"; the weights of step {self.best_step} are kept" if self.curve else ""
            raise DivergedError(
                f"the {name} loss is {nats} at step {step}: lower the learning rate{kept}"
            )

    def bits_per_byte(self, nats: float) -> float:
        """Turn nats a token into bits a byte of the held-out text."""
        tokens = len(self.corpus.held_out) - 1
        return nats * tokens / math.log(2) / self.corpus.held_out_bytes

    def record(self) -> dict[str, object]:
        """Describe the run, for the checkpoint."""
        return {
            "corpus_sha256": self.corpus.sha256,
            "train_tokens": len(self.corpus.train),
            "held_out_tokens": len(self.corpus.held_out),
            "held_out_bytes": self.corpus.held_out_bytes,
            "recipe": dataclasses.asdict(self.recipe),
            "steps": self.step,
            "best_step": self.best_step,
            "held_out_nats_per_token": self.best,
            "held_out_bits_per_byte": self.bits_per_byte(self.best),
            "curve": self.curve,
            "date": datetime.date.today().isoformat(),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "tokenizers": tokenizers.__version__,
            },
            "threads": torch.get_num_threads(),
        }

    def save_state(self, folder: Path) -> None:
        """Write everything that `resume` needs, as tensors and JSON."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
        metadata = {
            "recipe": json.dumps(dataclasses.asdict(self.recipe)),
            "corpus": self.corpus.sha256,
            "progress": json.dumps([self.step, self.best, self.best_step, self.curve]),
        }
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / STATE_FILE) as temporary:
            temporary.write_bytes(save(tensors, metadata=metadata))

    def resume(self, folder: Path) -> None:
        """Continue where `save_state` stopped.

        Raises:
            ValueError: If there is no usable state, or it belongs to another recipe or text.
        """
        path = folder / STATE_FILE
        try:
            if path.exists() and not path.is_file():
                raise OSError("not a regular file")  # a pipe would be waited for
            tensors = load_file(path)
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata()
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(f"resume needs {path}: {error}") from None
        metadata = metadata or {}
        recipe = json.dumps(dataclasses.asdict(self.recipe))
        if (metadata.get("recipe"), metadata.get("corpus")) != (recipe, self.corpus.sha256):
            told = metadata.get("recipe", "no recipe")
            raise ValueError(f"resume needs the recipe and corpus of {path}: {told}")
        self._check_record(folder)

        def part(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        try:
            self._take_over(part, metadata["progress"])
        except (RuntimeError, LookupError, ValueError, TypeError) as error:
            told = " ".join(str(error).split())
            raise ValueError(
                f"resume needs a state of these sizes in {path}: {told:.200}"
            ) from None

    def _check_record(self, folder: Path) -> None:
        """Refuse to go on beside the checkpoint of another run, which would be lost or misnamed."""
        try:
            record = read_record(folder)
        except CheckpointError:  # there is none yet
            return
        own = {"recipe": dataclasses.asdict(self.recipe), "corpus_sha256": self.corpus.sha256}
        if not isinstance(record, dict) or not own.items() <= record.items():
            raise ValueError(f"resume needs the checkpoint of the same run in {folder}")

    def _take_over(self, part: Callable[[str], dict[str, Tensor]], progress: str) -> None:
        """Put stored tensors and counts into their places."""
        self.model.load_state_dict(part("model."))
        self.average.load_state_dict(part("average."))
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in part("optimizer.").items():
            index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})
        step, best, best_step, curve = json.loads(progress)
        sound = 0 < best_step <= step <= self.recipe.steps and math.isfinite(best)
        if not sound or [point["step"] for point in curve][-1] != step:
            raise ValueError(f"its progress cannot be, {progress:.80}")
        self.step, self.best, self.best_step, self.curve = step, best, best_step, curve


def read_corpus(path: Path | None) -> str:
    """Read the text, or fetch the book and take away Project Gutenberg's own words around it.

    A byte-order mark is no part of it, and every line ends in a line feed.

    Raises:
        ValueError: If there is no text to be had.
    """
    if path is not None:
        try:
            if not path.is_file() and path.exists():
                raise OSError("not a regular file")  # a pipe would be waited for
            text = path.read_bytes().decode("utf-8-sig")
        except (OSError, ValueError) as error:
            raise ValueError(f"corpus must be a UTF-8 text file, got {path}: {error}") from None
    else:
        try:
            with urllib.request.urlopen(EBOOK, timeout=60) as response:
                book = response.read().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError, http.client.HTTPException) as error:
            raise ValueError(f"corpus could not be fetched ({error}); give --corpus PATH") from None
        parts = re.split(r"\*\*\* ?(?:START|END)[^\n]*\*\*\*", book)
        if len(parts) < 3:
            raise ValueError(f"corpus must be the book at {EBOOK}; give --corpus PATH")
        text = parts[1].strip() + "\n"
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_out(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, or whose weights would be lost.

    Raises:
        ValueError: If it is no folder, cannot be written, or holds a checkpoint that the caller
            has not said what to do with.
    """
    try:
        present = [name for name in (*FILES, INCOMING, STATE_FILE) if (out / name).exists()]
        if present and not (resume or overwrite):
            raise ValueError(
                f"out must hold no checkpoint, got {out} with {', '.join(present)}; "
                "give --resume to go on with it, --overwrite to replace it, or another folder"
            )
        for name in (*FILES, STATE_FILE):
            if (out / name).exists() and not (out / name).is_file():
                raise ValueError(f"out must be a folder of files, got {out} with another {name}")
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        try:
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out):
                pass
        finally:
            for folder in made:  # from the innermost out: an error to come leaves nothing behind
                with contextlib.suppress(OSError):
                    folder.rmdir()
    except OSError as error:
        raise ValueError(f"out must be a folder that can be written, got {out}: {error}") from None


def _tell_what_goes(out: Path, console: Console) -> None:
    """Say which checkpoint a run is about to replace."""
    if not (out / MODEL_FILE).exists():
        return
    try:
        loss = read_record(out)["held_out_nats_per_token"]
    except (CheckpointError, LookupError, TypeError):
        loss = "unknown"
    console.print(f"note: replaces a checkpoint of {loss} nats a token in {out}", markup=False)


@contextlib.contextmanager
def only_run_in(out: Path) -> Iterator[None]:
    """Keep a folder for one run: of two that begin together, neither would find the other's files.

    The lock goes with the process, however that ends.

    Raises:
        ValueError: If another run is writing there.
    """
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY) if os.name == "posix" else None
    try:
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(f"out must be a folder that no other run writes to, got {out}") from None
    finally:
        if descriptor is not None:
            os.close(descriptor)
        if made:
            with contextlib.suppress(OSError):  # it holds something
                out.rmdir()


def train(run: Run, out: Path, console: Console) -> None:
    """Run to the last step, keeping the best checkpoint and the state in `out`."""
    columns = (
        TextColumn("step"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=run.recipe.steps, completed=run.step)
        losses: list[float] = []
        while run.step < run.recipe.steps:
            losses.append(run.advance())
            progress.update(task, completed=run.step)
            if run.step % run.recipe.eval_every and run.step != run.recipe.steps:
                continue
            is_best = run.evaluate(sum(losses) / len(losses))
            losses.clear()
            if is_best:
                save_checkpoint(out, run.average, run.tokenizer, run.record())
            run.save_state(out)
            point = run.curve[-1]
            line = (
                f"step {run.step}: train {point['train']:.3f}, held out {point['held_out']:.3f} "
                f"nats a token, {run.bits_per_byte(point['held_out']):.3f} bits a byte"
                f"{' (best)' if is_best else ''}"
            )
            progress.update(task, description=line)
            if not console.is_terminal:
                console.print(line, highlight=False)
    # The best weights are saved already; give them the whole curve.
    best, tokenizer = load_pretrained(out)
    save_checkpoint(out, best, tokenizer, run.record())


def main(
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint and the state.")],
    corpus: Annotated[
        Path | None, typer.Option(help="Text to train on; by default the book is fetched.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the state in the folder.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the checkpoint in the folder.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = min(2, os.cpu_count() or 1),
    steps: Annotated[int, typer.Option(min=1)] = Recipe.steps,
    dropout: Annotated[float, typer.Option()] = Recipe.dropout,
    learning_rate: Annotated[float, typer.Option()] = Recipe.learning_rate,
    weight_decay: Annotated[float, typer.Option()] = Recipe.weight_decay,
    seed: Annotated[int, typer.Option()] = Recipe.seed,
) -> None:
    """Train a tokenizer and the 875,264-parameter model on one book."""
    console = error_console()
    run = None
    try:
        if threads > (os.cpu_count() or 1):
            raise ValueError(f"threads must lie in [1, {os.cpu_count()}], got {threads}")
        torch.set_num_threads(threads)
        recipe = Recipe(
            steps=steps,
            dropout=dropout,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            seed=seed,
        )
        check_out(out, resume=resume, overwrite=overwrite)
        config = GPTConfig(dropout=recipe.dropout)
        text = read_corpus(corpus)
        if overwrite:
            _tell_what_goes(out, console)
        try:
            tokenizer = Tokenizer.train(text, config.vocab_size - 257)
        except ValueError as error:
            raise ValueError(f"corpus must be longer: {error}") from None
        run = Run.start(recipe, Corpus.split(text, tokenizer), tokenizer, config)
        with only_run_in(out):
            check_out(out, resume=resume, overwrite=overwrite)  # another may have ended meanwhile
            for left in out.glob(f".{STATE_FILE}.*"):  # of a run that was killed as it wrote
                left.unlink(missing_ok=True)
            if resume:
                run.resume(out)
            if run.corpus.sha256 != CORPUS_SHA256:
                console.print("note: this is not the text of the course's own checkpoint")
            train(run, out, console)
    except (ValueError, CheckpointError, OSError) as error:
        told = " ".join(str(error).split())
        console.print(f"train: error: {told}", highlight=False, soft_wrap=True, markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        if run is not None and run.curve:
            console.print(f"train: stopped after step {run.step}; --resume goes on")
        sys.exit(130)
    console.print(
        f"best: step {run.best_step}, {run.best:.3f} nats a token, "
        f"{run.bits_per_byte(run.best):.3f} bits a byte, saved in {out}",
        highlight=False,
    )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        app(standalone_mode=False)
    except TyperException as error:
        print(f"train: error: {' '.join(error.format_message().split())}", file=sys.stderr)
        sys.exit(2)
