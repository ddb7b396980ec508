"""The command line: `lab35 generate`, `repl`, `verify`, `trace`, `bench` and `info`.

Completions go to stdout, and everything else to stderr. With `--json` one object goes to stdout,
and nothing else does. Bad input is one line on stderr and exit code 2; a check that fails is 1.

```{.python title="The command line is a function"}
from lab35.cli import main

status = main(["generate", "--temperature", "-1"])  # told on stderr
assert status == 2
```
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from rich.progress import track
from torch import Tensor
from typer.exceptions import TyperException

from lab35.batching import completions, left_pad
from lab35.checkpoint import CheckpointError, load_pretrained, read_digests, read_record
from lab35.loop import decode_steps
from lab35.loop import generate as run_generate
from lab35.model import GPT
from lab35.sampling import check_sampling
from lab35.speed import EngineName, choose_engine, new_engine, why_not
from lab35.streaming import generate_stream
from lab35.terminal import error_console
from lab35.timing import (
    Latency,
    clock_on,
    compare_texts,
    interleaved,
    threads,
    time_paired,
    time_steps,
)
from lab35.tokenizer import Tokenizer
from lab35.trace import Trace, trace_step
from lab35.verification import VerifyReport, verify_cache

__all__ = ["app", "main"]

DEFAULT_PROMPT = "Sherlock Holmes"
ROUNDS = 5
BENCH_PROMPT = "It was a dark night and the wind blew"
BENCH_VARIANTS: dict[str, dict[str, Any]] = {"uncached": {"use_cache": False}} | {
    name: {"engine": name} for name in get_args(EngineName)
}
"""What `lab35 bench` compares: options of `decode_steps` by name, and the first is the baseline."""

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"terminal_width": 88, "max_content_width": 88},
)
"""The Typer application behind the console script."""

PromptOption = Annotated[
    str | None, typer.Option("--prompt", help=f"Text to continue; {DEFAULT_PROMPT!r} if none.")
]
FileOption = Annotated[
    str | None,
    typer.Option(
        "--prompt-file", help="Read the prompt from a file, or from standard input if it is -."
    ),
]
TokensOption = Annotated[int, typer.Option("--max-new-tokens", help="Tokens to add at most.")]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", help="0 is greedy, 1 the model's odds.")
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", help="Keep this many tokens; 512 keeps all.")
]
TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", help="Keep the top tokens that reach this mass; 1 keeps all."),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of the draws.")]
CheckpointOption = Annotated[
    Path | None, typer.Option("--checkpoint", help="Folder of a model of your own.")
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="Where to run: cpu, or cuda where torch sees a GPU.")
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="Run the cached steps with eager, lean, compiled or numba; lean if it can be.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True)
class _Settings:
    """How to choose, and how much."""

    temperature: float = 0.8
    top_k: int | None = 40
    top_p: float | None = 0.95
    max_new_tokens: int = 64
    seed: int = 1337

    def __post_init__(self) -> None:
        check_sampling(**self.choice())
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2**63), got {self.seed}")

    def choice(self) -> dict[str, Any]:
        """Return what sampling takes."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    def generator(self, model: GPT) -> torch.Generator:
        """Return a fresh source of draws, where a model's logits are."""
        return torch.Generator(model.wte.weight.device).manual_seed(self.seed)


DEFAULTS = _Settings()


@app.callback(invoke_without_command=True)
def _lab35(
    ctx: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.")
    ] = False,
) -> None:
    """Write text with a small GPT, and look at how it is done.

    Completions go to stdout, and everything else to stderr. Bad input ends with exit code 2, and a
    check that fails with 1.
    """
    if show_version:
        print(f"lab35 {version('lab35')}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command()
def generate(
    prompt: PromptOption = None,
    prompt_file: FileOption = None,
    batch_prompts: Annotated[
        str | None,
        typer.Option(help='Continue several prompts as one padded batch: "A|B|C".'),
    ] = None,
    max_new_tokens: TokensOption = DEFAULTS.max_new_tokens,
    temperature: TemperatureOption = DEFAULTS.temperature,
    top_k: TopKOption = DEFAULTS.top_k,
    top_p: TopPOption = DEFAULTS.top_p,
    seed: SeedOption = DEFAULTS.seed,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<str>", help=r"End before this string; can be repeated, \n is a line break."
        ),
    ] = None,
    cache: Annotated[bool, typer.Option(help="Keep keys and values, or recompute them.")] = True,
    engine: EngineOption = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hold the cache against the uncached model too.")
    ] = False,
    benchmark: Annotated[
        bool, typer.Option("--benchmark", help="Time the text with and without the cache too.")
    ] = False,
    stream: Annotated[
        bool | None,
        typer.Option(help="Show text as it comes; with --json it goes to stderr, if asked for."),
    ] = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> int:
    """Continue a prompt, or several as a batch.

    The text appears token by token. The end-of-text token ends it early, and so does the model's
    last position, unless --no-cache lets the window slide.
    """
    settings = _Settings(temperature, top_k, top_p, max_new_tokens, seed)
    model, tokenizer = _load(checkpoint, device)
    engine = _ready(engine, model, batch=batch_prompts is not None, use_cache=cache)
    loop = {"use_cache": cache, "engine": engine}
    if batch_prompts is None:
        show = (
            _no_show if as_json and not stream else _show_on(sys.stderr if as_json else sys.stdout)
        )
        result = _continue_one(
            model,
            tokenizer,
            _read_prompt(prompt, prompt_file),
            settings,
            [_unescape(string) for string in stop or ()],
            loop,
            show if stream is not False else _at_the_end(show),
        )
        texts = [result["prompt"]]
    else:
        for name, value in (("--prompt", prompt), ("--prompt-file", prompt_file), ("--stop", stop)):
            if value:
                raise ValueError(f"--batch-prompts must stand without {name}, got {value!r} too")
        if stream:
            raise ValueError("--batch-prompts must stand without --stream, got both")
        texts = batch_prompts.split("|")
        result = _continue_batch(model, tokenizer, texts, settings, loop)
        if not as_json:
            for text, completion in zip(texts, result["completion"], strict=True):
                print(text, end="", file=sys.stderr, flush=True)
                print(completion, flush=True)
            _note(f"batch: each row {'IS' if result['batch_consistent'] else 'IS NOT'} its own run")

    reports = [_verify(model, tokenizer, text, max_new_tokens, engine) for text in texts if verify]
    if verify:
        result["verify"] = [report.as_dict() for report in reports]
        if batch_prompts is None:
            result["verify"] = result["verify"][0]
    if benchmark:
        result["benchmark"] = _benchmark(model, tokenizer, texts, settings, engine)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        for report in reports:
            _note(report.summary())
        if benchmark:
            _note(_benchmark_line(result["benchmark"]))
    return int(result["batch_consistent"] is False or not all(reports))


@app.command()
def repl(
    max_new_tokens: TokensOption = DEFAULTS.max_new_tokens,
    temperature: TemperatureOption = DEFAULTS.temperature,
    top_k: TopKOption = DEFAULTS.top_k,
    top_p: TopPOption = DEFAULTS.top_p,
    seed: SeedOption = DEFAULTS.seed,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "cpu",
) -> None:
    r"""Continue one prompt after another.

    An empty line goes on with the last text. A line that begins with / changes a setting, as in
    /temperature 0.5 or /top-k none; /settings shows them all. \n in a prompt is a line break.
    Ctrl-C ends a text, and the end of input ends the session.
    """
    settings = _Settings(temperature, top_k, top_p, max_new_tokens, seed)
    model, tokenizer = _load(checkpoint, device)
    generator, text = settings.generator(model), ""
    _note("A prompt, or /help. Ctrl-D ends.")
    while (line := _read_line()) is not None:
        try:
            if line.startswith("/"):
                changed = _change(settings, line)
                if changed.seed != settings.seed or line.split()[0] == "/seed":
                    generator = changed.generator(model)
                settings = changed
                continue
            text = _unescape(line) if line else text
            if not text:
                raise ValueError("prompt must hold at least one character, got ''")
            print(text, end="", file=sys.stderr, flush=True)
            text += _write(model, tokenizer, text, settings, generator)
        except ValueError as error:
            _note(f"lab35: error: {_one_line(error)}")
    print(file=sys.stderr)


@app.command()
def verify(
    prompt: PromptOption = None,
    prompt_file: FileOption = None,
    steps: Annotated[int, typer.Option(help="Tokens to decode.")] = 64,
    engine: EngineOption = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> int:
    """Hold the cache against the uncached model.

    Decodes greedily, and compares the logits of every step. Exit code 1 if they differ.
    """
    model, tokenizer = _load(checkpoint, device)
    idx = _encode(model, tokenizer, _read_prompt(prompt, prompt_file))
    report = verify_cache(model, idx, steps, engine=_ready(engine, model))
    print(json.dumps(report.as_dict()) if as_json else report.summary())
    return int(not report.passed)


@app.command()
def trace(
    prompt: PromptOption = None,
    prompt_file: FileOption = None,
    temperature: TemperatureOption = DEFAULTS.temperature,
    top_k: TopKOption = DEFAULTS.top_k,
    top_p: TopPOption = DEFAULTS.top_p,
    seed: SeedOption = DEFAULTS.seed,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Tell one decode step.

    The token that was fed, its place, the best scores, what the filters left, and the draw.
    """
    settings = _Settings(temperature, top_k, top_p, seed=seed)
    model, tokenizer = _load(checkpoint, device)
    idx = _encode(model, tokenizer, _read_prompt(prompt, prompt_file))
    told = trace_step(model, idx, **settings.choice(), generator=settings.generator(model))
    if as_json:
        print(json.dumps(told.as_dict(tokenizer)))
    else:
        print(_tell(told, tokenizer, settings))


@app.command()
def bench(
    prompt: Annotated[
        str, typer.Option(help="Text to continue; this one is 16 tokens.")
    ] = BENCH_PROMPT,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 15,
    thread_count: Annotated[
        int, typer.Option("--threads", min=1, help="Threads that torch may use.")
    ] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="<str>", help="Time this one only; can be repeated."),
    ] = None,
    checkpoint: CheckpointOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> int:
    """Time the uncached loop and every engine side by side.

    They write the same greedy text in turns. The first is what the others are compared with.
    TTFT is the time to the first token, TPOT the time per output token after it. Prompt tokens
    count in no rate. Exit code 1 if the texts differ.
    """
    model, tokenizer = _load(checkpoint, device)
    idx = _encode(model, tokenizer, prompt)
    room = model.config.block_size + 1 - idx.shape[1]
    if max_new_tokens > room >= 1:  # a prompt that is too long has an error of its own
        raise ValueError(
            f"max_new_tokens must be at most {room} after {idx.shape[1]} prompt tokens, "
            f"so that all loops do the same work, got {max_new_tokens}"
        )
    chosen = only if only else list(BENCH_VARIANTS)
    for name in chosen:
        if name not in BENCH_VARIANTS:
            raise ValueError(f"only must be one of {', '.join(BENCH_VARIANTS)}, got {name!r}")
    variants, missing = {}, {}
    for name in chosen:
        options = BENCH_VARIANTS[name]
        reason = why_not(options["engine"], model) if "engine" in options else None
        if reason is None:
            variants[name] = partial(_time_text, model, idx, max_new_tokens, options)
        else:
            missing[name] = reason
            _note(f"without {name}: {_one_line(reason)}")
    if not variants:
        raise ValueError(f"only must name something that runs here, got {', '.join(chosen)}")
    console = error_console()
    with threads(thread_count):
        rounds = track(
            interleaved(variants, repeats=repeats),
            "timing",
            total=repeats,
            console=console,
            auto_refresh=False,  # a bar that moves by itself would disturb what is timed
            disable=not console.is_terminal,
        )
        told = compare_texts(list(rounds))
    told |= {"prompt_tokens": idx.shape[1], "new_tokens": max_new_tokens}
    told |= {"device": device, "torch": torch.__version__, "missing": missing}
    print(json.dumps(told) if as_json else _bench_table(told))
    return int(not told["same_tokens"])


@app.command()
def info(checkpoint: CheckpointOption = None, as_json: JsonOption = False) -> None:
    """Show a checkpoint.

    Its sizes, parameters, bytes and digests, and how it was trained.
    """
    model, tokenizer = load_pretrained(checkpoint)
    record = read_record(checkpoint)
    record.pop("curve", None)
    about = {
        "config": dataclasses.asdict(model.config),
        "parameters": model.num_parameters,
        "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "sha256": read_digests(checkpoint),
        "record": record,
    }
    if as_json:
        print(json.dumps(about))
        return
    for name, value in _flat(about):
        print(f"{name:<34} {value:,}" if isinstance(value, int) else f"{name:<34} {value}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows `lab35`; by default what the shell gave.

    Returns:
        The exit code: 0, 1 when a check failed, 2 after bad input, 130 after Ctrl-C.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            status = app(arguments, prog_name="lab35", standalone_mode=False)
        sys.stdout.flush()
        return status or 0
    except TyperException as error:
        message = error.format_message()
    except (ValueError, CheckpointError) as error:
        message = str(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has left. Point stdout elsewhere, so that Python's own flush stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    _note(f"lab35: error: {_one_line(message)}")
    return 2


def _load(checkpoint: Path | None, device: str) -> tuple[GPT, Tokenizer]:
    """Load a checkpoint onto a device that is there."""
    seen = ["cpu"] + [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if device not in seen and not (device == "cuda" and len(seen) > 1):
        raise ValueError(f"device must be one of {', '.join(seen)}, got {device!r}")
    model, tokenizer = load_pretrained(checkpoint)
    return model.to(device), tokenizer


def _ready(
    engine: EngineName | None, model: GPT, *, batch: bool = False, use_cache: bool = True
) -> EngineName:
    """Choose the engine, and have compiled what must be before a text begins.

    A batch is padded, if only by nothing, and padding is left to the model itself.
    """
    if batch and engine not in (None, "eager"):
        raise ValueError(f"--batch-prompts must stand without --engine {engine}, got both")
    name = "eager" if batch else choose_engine(engine, model, 1, use_cache=use_cache)
    if name != "eager":
        new_engine(name, model)
    return name


# --- texts ---------------------------------------------------------------------------------------


def _continue_one(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    settings: _Settings,
    stop: Sequence[str],
    loop: dict[str, Any],
    show: Callable[[str | None], None],
) -> dict[str, Any]:
    """Write one text, showing each piece; `show(None)` ends the line."""
    steps = decode_steps(
        model,
        _encode(model, tokenizer, prompt),
        settings.max_new_tokens,
        **settings.choice(),
        generator=settings.generator(model),
        eos_id=tokenizer.eos_id,
        **loop,
    )
    events = generate_stream(tokenizer, steps, stop=stop)
    if show is not _no_show:
        print(prompt, end="", file=sys.stderr, flush=True)
    pieces, reason = [], None
    try:
        for event in events:
            pieces.append(event.text)
            show(event.text)
            reason = event.stop_reason
    finally:
        show(None)
    return _result(prompt, "".join(pieces), reason)


def _continue_batch(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    settings: _Settings,
    loop: dict[str, Any],
) -> dict[str, Any]:
    """Write several texts at once, and compare each row with its own run."""
    rows = [_encode(model, tokenizer, prompt)[0].tolist() for prompt in prompts]
    idx, key_mask = _pad(model, tokenizer, rows)
    options = settings.choice() | {"eos_id": tokenizer.eos_id} | loop
    made = run_generate(
        model,
        idx,
        settings.max_new_tokens,
        key_mask=key_mask,
        generators=[settings.generator(model) for _ in rows],
        **options,
    )
    together = completions(made, tokenizer.eos_id)
    alone = []
    for row in rows:
        # A padded row runs out of positions sooner: compare as many tokens as the batch has.
        own = run_generate(
            model,
            torch.tensor([row], device=idx.device),
            made.new_tokens.shape[1],
            generator=settings.generator(model),
            **options,
        )
        alone += completions(own, tokenizer.eos_id)
    texts = [tokenizer.decode(ids) for ids in together]
    return _result(list(prompts), texts, made.stop_reason, batch_consistent=together == alone)


def _pad(model: GPT, tokenizer: Tokenizer, rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    idx, key_mask = left_pad(rows, tokenizer.eos_id)
    return idx.to(model.wte.weight.device), key_mask.to(model.wte.weight.device)


def _write(
    model: GPT, tokenizer: Tokenizer, text: str, settings: _Settings, generator: torch.Generator
) -> str:
    """Go on with a text of any length, for the repl; Ctrl-C ends it and keeps what is there."""
    steps = decode_steps(
        model,
        _encode(model, tokenizer, text),
        settings.max_new_tokens,
        **settings.choice(),
        generator=generator,
        eos_id=tokenizer.eos_id,
        on_context_limit="refill",
    )
    pieces = []
    try:
        for event in generate_stream(tokenizer, steps):
            pieces.append(event.text)
            print(event.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print(flush=True)
    return "".join(pieces)


def _result(prompt: Any, completion: Any, stop_reason: str | None, **more: Any) -> dict[str, Any]:
    """Lay out the JSON object; what was not asked for is null."""
    empty = {"verify": None, "benchmark": None, "batch_consistent": None}
    return {"prompt": prompt, "completion": completion, "stop_reason": stop_reason} | empty | more


def _verify(
    model: GPT, tokenizer: Tokenizer, prompt: str, steps: int, engine: EngineName
) -> VerifyReport:
    idx = _encode(model, tokenizer, prompt)
    room = model.config.block_size + 1 - idx.shape[1]
    return verify_cache(model, idx, max(1, min(steps, room)), engine=engine)


def _benchmark(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    settings: _Settings,
    engine: EngineName,
) -> dict[str, Any]:
    """Time the same texts with and without the cache, in turns."""
    rows = [_encode(model, tokenizer, prompt)[0].tolist() for prompt in prompts]
    idx, key_mask = _pad(model, tokenizer, rows)
    new = max(1, min(settings.max_new_tokens, model.config.block_size + 1 - idx.shape[1]))

    mask = key_mask if len(rows) > 1 else None
    write = partial(run_generate, model, idx, new, temperature=0, key_mask=mask)
    variants = {
        "uncached": partial(write, use_cache=False),
        "cached": partial(write, engine=engine),
    }
    timed = time_paired(variants, repeats=ROUNDS, clock=clock_on(idx.device))
    cached, uncached = (timed["variants"][name] for name in ("cached", "uncached"))
    return {
        "rows": len(rows),
        "prompt_tokens": idx.shape[1],
        "new_tokens": new,
        "engine": engine,
        "threads": timed["threads"],
        "rounds": timed["samples"],
        "cached_seconds": cached["seconds"]["median"],
        "uncached_seconds": uncached["seconds"]["median"],
        "speedup": cached["speedup"]["median"],
        "tokens_per_second": len(rows) * new / cached["seconds"]["median"],
    }


def _benchmark_line(told: dict[str, Any]) -> str:
    return (
        f"benchmark: {told['rows']} × {told['new_tokens']} greedy tokens, "
        f"{told['threads']} threads, median of {told['rounds']}: "
        f"{told['tokens_per_second']:,.0f} tokens a second with the cache and the "
        f"{told['engine']} engine, {told['speedup']:.1f} times faster than without both"
    )


def _time_text(model: GPT, idx: Tensor, new: int, options: dict[str, Any]) -> Latency:
    steps = decode_steps(model, idx, new, temperature=0, **options)
    return time_steps(steps, clock=clock_on(idx.device))


def _bench_table(told: dict[str, Any]) -> str:
    """Lay out a benchmark for people: medians, and the fastest time per output token."""
    lines = [
        f"prompt tokens: {told['prompt_tokens']}, greedy tokens: {told['new_tokens']}, "
        f"{told['device']}, threads: {told['threads']}, torch {told['torch']}, "
        f"median of {told['samples']}, compared with {told['baseline']}",
        "",
        f"{'loop':<12} {'TTFT':>10} {'TPOT':>10} {'fastest':>10} {'tokens/s':>10} {'speed-up':>10}",
    ]
    for name, variant in told["variants"].items():
        later = variant["time_per_output_token"]
        cells = [
            _milliseconds(variant["time_to_first_token"]["median"]),
            _microseconds(later["median"]) if later else "none",
            _microseconds(later["min"]) if later else "none",
            f"{variant['tokens_per_second']['median']:,.0f}",
            f"{variant['speedup']['median']:.2f} ×",
        ]
        lines.append(" ".join([f"{name:<12}", *(f"{cell:>10}" for cell in cells)]))
    if not told["same_tokens"]:
        lines += ["", "DIFFERENT TEXTS: not the same work"]
    elif len(told["variants"]) > 1:
        lines += ["", "all wrote the same text"]
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} µs"


# --- words in, words out -------------------------------------------------------------------------


def _read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """Take the prompt from where it is; a file's last line break is not part of it."""
    if prompt_file is None:
        return DEFAULT_PROMPT if prompt is None else prompt
    if prompt is not None:
        raise ValueError(f"--prompt-file must stand without --prompt, got {prompt!r} too")
    try:
        data = sys.stdin.buffer.read() if prompt_file == "-" else Path(prompt_file).read_bytes()
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt-file must be UTF-8 text, got {prompt_file!r}: {error}") from None


def _encode(model: GPT, tokenizer: Tokenizer, prompt: str) -> Tensor:
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("prompt must hold at least one character, got ''")
    return torch.tensor([ids], device=model.wte.weight.device)


def _unescape(text: str) -> str:
    r"""Turn \n, \t and \\ into what they stand for; leave any other backslash alone."""
    meant = {"n": "\n", "t": "\t", "\\": "\\"}
    return re.sub(r"\\([nt\\])", lambda match: meant[match[1]], text)


def _show_on(file: Any) -> Callable[[str | None], None]:
    return lambda text: print("\n" if text is None else text, end="", file=file, flush=True)


def _no_show(text: str | None) -> None:
    """Show nothing."""


def _at_the_end(show: Callable[[str | None], None]) -> Callable[[str | None], None]:
    """Hold every piece back until the text has ended."""
    pieces: list[str] = []

    def collect(text: str | None) -> None:
        if text is not None:
            pieces.append(text)
            return
        show("".join(pieces))
        show(None)

    return collect


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _warn(message: object, *_: object) -> None:
    _note(f"lab35: warning: {_one_line(message)}")


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _flat(told: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """List the leaves of nested dictionaries by their dotted names."""
    rows: list[tuple[str, Any]] = []
    for name, value in told.items():
        dotted = f"{prefix}{name}"
        rows += _flat(value, f"{dotted}.") if isinstance(value, dict) else [(dotted, value)]
    return rows


def _tell(told: Trace, tokenizer: Tokenizer, settings: _Settings) -> str:
    """Lay out a trace for people."""

    def name(token: int) -> str:
        data = tokenizer.token_bytes(token)
        return f"{token} {data.decode('utf-8', errors='replace')!r} ({data.hex(' ')})"

    lines = [
        f"fed      {name(told.token)}",
        f"position {told.position}, cache {told.cache_before} -> {told.cache_after}",
        f"kept     {told.vocab_size} -> top-k {settings.top_k}: {told.kept_by_top_k} "
        f"-> top-p {settings.top_p}: {told.kept_by_top_p}",
        "",
        f"{'token':<28} {'logit':>7} {'odds':>7} {f'at {settings.temperature}':>7} {'left':>7}",
    ]
    lines += [
        f"{name(each.token):<28} {each.logit:>7.2f} {each.probability:>7.3f} "
        f"{each.tempered:>7.3f} {each.final:>7.3f}"
        for each in told.candidates
    ]
    return "\n".join([*lines, "", f"drew     {name(told.drawn)}, at {told.drawn_final:.3f}"])


# --- the repl ------------------------------------------------------------------------------------


def _read_line() -> str | None:
    """Read a line; None at the end of input."""
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            return input("> ")
        if sys.stdin.isatty():  # stdout is for completions alone
            print("> ", end="", file=sys.stderr, flush=True)
        return input()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _read_line()


def _change(settings: _Settings, line: str) -> _Settings:
    """Apply a line such as `/temperature 0.5`; /settings and /help show and change nothing."""
    name, _, value = line[1:].strip().partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    types = {field.name: field.type for field in dataclasses.fields(_Settings)}
    if name in ("settings", "help") and not value:
        if name == "help":
            _note(f"/{', /'.join(types)} VALUE; /settings; \\n in a prompt is a line break")
        _note(", ".join(f"{key} {getattr(settings, key)}" for key in types))
        return settings
    if name not in types:
        raise ValueError(f"setting must be one of {', '.join(types)}, got {name!r}")
    try:
        optional = "None" in types[name]
        number = float if "float" in types[name] else int
        parsed = None if optional and value.lower() == "none" else number(value)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    return dataclasses.replace(settings, **{name: parsed})
