"""`lab35 generate`: one text, or several as a batch; verified and timed if that is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

import lab35
from lab35._engines import BATCH_ENGINES
from lab35.cli.models import encode, loaded, pad, ready, what_runs
from lab35.cli.options import (
    DEFAULTS,
    CheckpointOption,
    DeviceOption,
    EngineOption,
    FileOption,
    JsonOption,
    PromptOption,
    SeedOption,
    Settings,
    TemperatureOption,
    ThreadsOption,
    TokensOption,
    TopKOption,
    TopPOption,
)
from lab35.cli.streams import (
    check_prompt,
    echoed,
    from_argument,
    note,
    print_json,
    read_prompt,
    unescape,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lab35 import GPT, Tokenizer, VerifyReport
    from lab35.speed import EngineName

ROUNDS = 5


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
    thread_count: ThreadsOption = 1,
    as_json: JsonOption = False,
) -> int:
    """Continue a prompt, or several as a batch.

    The text appears token by token. The end-of-text token ends it early, and so does the model's
    last position, unless --no-cache lets the window slide.
    """
    settings = Settings(temperature, top_k, top_p, max_new_tokens, seed)
    if batch_prompts is None:
        texts = [read_prompt(prompt, prompt_file)]
    else:
        for name, value in (("--prompt", prompt), ("--prompt-file", prompt_file), ("--stop", stop)):
            if value is not None:
                raise ValueError(f"--batch-prompts must stand without {name}, got {value!r} too")
        if stream:
            raise ValueError("--batch-prompts must stand without --stream, got both")
        if engine not in (None, *BATCH_ENGINES):
            able = "one of " + ", ".join(BATCH_ENGINES)
            raise ValueError(f"--engine must be {able} with --batch-prompts, got {engine!r}")
        texts = from_argument("--batch-prompts", batch_prompts).split("|")
        for text in texts:
            check_prompt(text)
    if not cache and engine not in (None, "eager"):
        raise ValueError(f"--no-cache must stand without --engine {engine}, got both")
    stops = [unescape(from_argument("--stop", string)) for string in stop or ()]
    if "" in stops:
        raise ValueError("--stop must hold at least one character, got ''")

    with loaded(checkpoint, device, thread_count) as (model, tokenizer):
        # Everything that can be refused is refused before any work is shown.
        limit, advice = _limit(model, cache, verify, benchmark)
        rows = [encode(model, tokenizer, text, limit, advice) for text in texts]
        engine = ready(engine, model, rows=len(texts), use_cache=cache)
        loop = {"use_cache": cache, "engine": engine}

        if batch_prompts is None:
            show = _no_show
            if stream or not as_json:
                show = _show_on(sys.stderr if as_json else sys.stdout)
            if stream is False:
                show = _at_the_end(show)
            text, idx = texts[0], rows[0]
            result = _continue_one(model, tokenizer, text, idx, settings, stops, loop, show)
        else:
            result = _continue_batch(model, tokenizer, texts, rows, settings, loop)
            if not as_json:
                _show_batch(texts, result)

        reports = [_verify(model, idx, max_new_tokens, engine) for idx in rows if verify]
        if verify:
            result["verify"] = [report.as_dict() for report in reports]
            if batch_prompts is None:
                result["verify"] = result["verify"][0]
        if benchmark:
            result["benchmark"] = _benchmark(model, tokenizer, rows, settings, engine)
    if as_json:
        print_json(result)
    else:
        for report in reports:
            note(report.summary())
        if benchmark:
            note(_benchmark_line(result["benchmark"]))
    return int(result["batch_consistent"] is False or not all(reports))


def _limit(model: GPT, cache: bool, verify: bool, benchmark: bool) -> tuple[int | None, str]:
    """Say how many tokens a prompt may have, and why: the window of --no-cache has no limit."""
    if cache:
        return model.config.block_size, "; shorten it, or use --no-cache"
    for option, asked in (("--verify", verify), ("--benchmark", benchmark)):
        if asked:
            return model.config.block_size, f"; shorten it, or leave out {option}"
    return None, ""


def _continue_one(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    idx: Tensor,
    settings: Settings,
    stop: Sequence[str],
    loop: dict[str, Any],
    show: Callable[[str | None], None],
) -> dict[str, Any]:
    """Write one text, showing each piece; `show(None)` ends the line."""
    steps = lab35.decode_steps(
        model,
        idx,
        settings.max_new_tokens,
        **settings.choice(),
        generator=settings.generator(model),
        eos_id=tokenizer.eos_id,
        **loop,
    )
    events = lab35.generate_stream(tokenizer, steps, stop=stop)
    pieces, reason = [], None
    with nullcontext() if show is _no_show else echoed(prompt):
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
    rows: Sequence[Tensor],
    settings: Settings,
    loop: dict[str, Any],
) -> dict[str, Any]:
    """Write several texts at once, and compare each row with its own run."""
    idx, key_mask = pad(model, tokenizer, [row[0].tolist() for row in rows])
    options = settings.choice() | {"eos_id": tokenizer.eos_id} | loop
    made = lab35.generate(
        model,
        idx,
        settings.max_new_tokens,
        key_mask=key_mask,
        generators=[settings.generator(model) for _ in rows],
        **options,
    )
    together = lab35.completions(made, tokenizer.eos_id)
    alone = []
    for row in rows:
        # A padded row runs out of positions sooner: compare as many tokens as the batch has.
        own = lab35.generate(
            model,
            row,
            made.new_tokens.shape[1],
            generator=settings.generator(model),
            **options,
        )
        alone += lab35.completions(own, tokenizer.eos_id)
    texts = [tokenizer.decode(ids) for ids in together]
    return _result(list(prompts), texts, made.stop_reason, batch_consistent=together == alone)


def _show_batch(prompts: Sequence[str], result: dict[str, Any]) -> None:
    """Show each text behind its prompt, and whether it is the one that its row writes alone."""
    for prompt, completion in zip(prompts, result["completion"], strict=True):
        with echoed(prompt):
            print(completion, flush=True)
    note(f"batch: each row {'IS' if result['batch_consistent'] else 'IS NOT'} its own run")


def _result(prompt: Any, completion: Any, stop_reason: str | None, **more: Any) -> dict[str, Any]:
    """Lay out the JSON object; what was not asked for is null."""
    empty = {"verify": None, "benchmark": None, "batch_consistent": None}
    return {"prompt": prompt, "completion": completion, "stop_reason": stop_reason} | empty | more


def _verify(model: GPT, idx: Tensor, steps: int, engine: EngineName) -> VerifyReport:
    room = model.config.block_size + 1 - idx.shape[1]
    return lab35.verify_cache(model, idx, max(1, min(steps, room)), engine=engine)


def _benchmark(
    model: GPT,
    tokenizer: Tokenizer,
    rows: Sequence[Tensor],
    settings: Settings,
    engine: EngineName,
) -> dict[str, Any]:
    """Time the same texts with and without the cache, in turns."""
    idx, key_mask = pad(model, tokenizer, [row[0].tolist() for row in rows])
    new = max(1, min(settings.max_new_tokens, model.config.block_size + 1 - idx.shape[1]))

    mask = key_mask if len(rows) > 1 else None
    write = partial(lab35.generate, model, idx, new, temperature=0, key_mask=mask)
    variants = {
        "uncached": partial(write, use_cache=False),
        "cached": partial(write, engine=engine),
    }
    clock = lab35.timing.clock_on(idx.device)
    timed = lab35.timing.time_paired(variants, repeats=ROUNDS, clock=clock)
    cached, uncached = (timed["variants"][name] for name in ("cached", "uncached"))
    return {
        "rows": len(rows),
        "prompt_tokens": idx.shape[1],
        "new_tokens": new,
        "engine": what_runs(engine, model),
        "engine_asked": engine,
        "threads": timed["threads"],
        "rounds": timed["samples"],
        "cached_seconds": cached["seconds"]["median"],
        "uncached_seconds": uncached["seconds"]["median"],
        "speedup": cached["speedup"]["median"],
        "tokens_per_second": len(rows) * new / cached["seconds"]["median"],
    }


def _benchmark_line(told: dict[str, Any]) -> str:
    engine, asked = told["engine"], told["engine_asked"]
    return (
        f"benchmark: {told['rows']} × {told['new_tokens']} greedy tokens, "
        f"{told['threads']} threads, median of {told['rounds']}: "
        f"{told['tokens_per_second']:,.0f} tokens a second with the cache and the {engine} engine"
        f"{'' if engine == asked else f' in place of {asked}'}, "
        f"{told['speedup']:.1f} times faster than without both"
    )


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
