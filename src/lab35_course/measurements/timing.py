"""How long a step takes, what it has to do, and where the cache pays."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab35 import GPT, GPTConfig, KVCache, decode_steps, load_pretrained
from lab35.timing import (
    bytes_read,
    compare,
    compare_texts,
    count_calls,
    count_flops,
    interleaved,
    mean_seconds,
    spread,
    threads,
    time_steps,
)
from lab35_course.plain import Markdown, code
from lab35_course.results import Data, Size, Table, invariant, measurement, table

PROMPT = "It was a dark night and the wind blew"
"""16 tokens, and what `lab35 bench` takes."""
BLOCK_SECONDS = 0.01
"""A step is shorter than a clock deserves; so many seconds of steps make one sample."""

COURSE = "4 × 128, this course"
MODELS = {
    COURSE: GPTConfig(),
    "4 × 256": GPTConfig(n_head=8, n_embd=256),
    "12 × 768, GPT-2 small": GPTConfig(
        vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768
    ),
}


def _ids(model: GPT, length: int, batch_size: int = 1) -> Tensor:
    """Draw tokens, shape (batch_size, length); what a step costs does not depend on them."""
    return torch.randint(model.config.vocab_size, (batch_size, length))


def _step(model: GPT, idx: Tensor) -> Callable[[], Tensor]:
    """Prepare to decode the last token of idx (B, T) again and again.

    Call what comes back under `torch.inference_mode()`; it returns logits of shape (B, 1, V).
    """
    B, T = idx.shape
    cache = KVCache(model.config, B, T)
    if T > 1:
        with torch.inference_mode():
            model(idx[:, :-1], cache=cache)

    def step() -> Tensor:
        cache.length = T - 1
        return model(idx[:, -1:], cache=cache)[0]

    return step


def _calls(function: Callable[[], object]) -> int:
    """Double the calls until they fill a sample; the smaller blocks warm up."""
    calls = 1
    while calls * mean_seconds(function, calls) < BLOCK_SECONDS:
        calls *= 2
    return calls


def _timed(variants: dict[Any, Callable[[], object]], repeats: int) -> list[dict[Any, float]]:
    """Time blocks of calls side by side, under inference mode; seconds a call for each round."""
    with torch.inference_mode():
        blocks = {
            name: partial(mean_seconds, function, _calls(function))
            for name, function in variants.items()
        }
        return list(interleaved(blocks, repeats=repeats))


def _milliseconds(seconds: float) -> str:
    """Write a time with three digits."""
    milliseconds = 1e3 * seconds
    digits = max(0, 2 - math.floor(math.log10(milliseconds)))
    return f"{milliseconds:,.{digits}f} ms"


def _range(sample: Data) -> str:
    return f"{sample['min']:.1f} to {sample['max']:.1f}"


# --- A text: first token, other tokens ---


@measurement("timing.latency", kind="measured", engine="the eager engine")
def latency(size: Size) -> Data:
    """Time both loops step by step: 16 prompt tokens, 100 greedy ones."""
    model, tokenizer = load_pretrained()
    prompt, new_tokens = torch.tensor([tokenizer.encode(PROMPT)]), size.pick(100, 3)
    write = partial(decode_steps, model, prompt, new_tokens, temperature=0)
    variants = {
        "uncached": lambda: time_steps(write(use_cache=False)),
        "cached": lambda: time_steps(write(engine="eager")),
    }
    rounds = list(interleaved(variants, repeats=size.pick(21, 2), warmup=size.pick(2, 1)))
    return compare_texts(rounds) | {"prompt": prompt.shape[1], "new": new_tokens}


@invariant("timing.latency")
def loops_write_the_same_text(data: Data) -> None:
    """Both wrote the same tokens, and every time is one."""
    assert data["same_tokens"], data
    for variant in data["variants"].values():
        first, later = variant["time_to_first_token"]["min"], variant["time_per_output_token"]
        assert 0 < first < variant["seconds"]["max"], variant
        assert later["min"] > 0, variant


@table("timing.latency", result="timing.latency")
def latency_table(data: Data) -> Table:
    """Lay out TTFT, TPOT, the rate and the paired ratio."""
    rows = [
        [
            name,
            _milliseconds(variant["time_to_first_token"]["median"]),
            _milliseconds(variant["time_per_output_token"]["median"]),
            _milliseconds(variant["time_per_output_token"]["min"]),
            f"{variant['tokens_per_second']['median']:,.0f}",
            f"{variant['speedup']['median']:.1f} ×",
        ]
        for name, variant in data["variants"].items()
    ]
    headers = ["loop", "TTFT", "TPOT", "TPOT, fastest", "tokens a second", "text, speed-up"]
    return Table(headers, rows, align="lrrrrr")


# --- A process that has just begun ---


def first_steps(count: int) -> list[float]:
    """Time single decode steps from the very first one; run this in a process of its own."""
    torch.set_num_threads(1)
    model, _ = load_pretrained()
    step = _step(model, _ids(model, 64))
    with torch.inference_mode():
        return [mean_seconds(step) for _ in range(count)]


@measurement("timing.first", kind="measured", engine="the eager engine")
def first(size: Size) -> Data:
    """Look at the first steps of a fresh process, and at the spread of the later ones."""
    count = size.pick(500, 8)
    code = f"from {__name__} import first_steps; print(first_steps({count}))"
    told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    times = json.loads(told.stdout)
    later = times[3:]
    return {
        "steps": count,
        "first": times[0],
        "second": times[1],
        "third": times[2],
        "later": spread(later) | {"mean": sum(later) / len(later)},
        "first_over_median": times[0] / spread(later)["median"],
        "slowest_over_fastest": max(later) / min(later),
    }


@invariant("timing.first")
def later_steps_have_a_spread(data: Data) -> None:
    """The minimum is no more than the median and the mean, and they no more than the maximum."""
    later = data["later"]
    assert 0 < later["min"] <= min(later["median"], later["mean"]), later
    assert max(later["median"], later["mean"]) <= later["max"], later


@table("timing.first", result="timing.first")
def first_table(data: Data) -> Table:
    """Lay out the first three, and four summaries of the others."""
    later = data["later"]
    headers = ["first", "second", "third", "fastest", "median", "mean", "slowest"]
    times = [data[name] for name in headers[:3]]
    times += [later["min"], later["median"], later["mean"], later["max"]]
    headers[3] = f"fastest of {data['steps'] - 3} later ones"
    return Table(headers, [[f"{1e6 * seconds:,.0f} µs" for seconds in times]], align="rrrrrrr")


# --- Calls ---

MULTIPLY, LOOK = "multiply", "look at a tensor in another way"
GROUPS = {
    MULTIPLY: ("linear", "scaled_dot_product_attention"),
    "add, normalise, bend, look up": ("add", "layer_norm", "gelu", "embedding"),
    "store in the cache": ("copy_",),
    LOOK: (
        "narrow",
        "view",
        "permute",
        "unbind",
        "transpose",
        "reshape",
        "slice",
    ),
    "dropout, which does nothing here": ("dropout",),
    "check, choose and append a token": (
        "select",
        "max",
        "resolve_conj",
        "resolve_neg",
        "cat",
    ),
}


@measurement("timing.calls", kind="exact")
def calls(size: Size) -> Data:
    """Count the ATen calls of one decode step, and of one forward in each gradient mode."""
    model, tokenizer = load_pretrained()
    prompt = torch.tensor([tokenizer.encode(PROMPT)])
    steps = decode_steps(model, prompt, 3, temperature=0, engine="eager")
    next(steps)  # prefill
    counts = count_calls(lambda: next(steps))
    groups = {
        group: {name: counts.pop(f"aten.{name}") for name in names if f"aten.{name}" in counts}
        for group, names in GROUPS.items()
    }
    assert not counts, f"in no group: {counts}"
    sums = {group: sum(found.values()) for group, found in groups.items()}
    modes = {}
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            found = count_calls(lambda: model(torch.zeros(1, 1, dtype=torch.int64)))
        modes[mode.__name__] = {"calls": found.total(), "views": found["aten.view"]}
    return {
        "groups": [
            {"name": group, "calls": sums[group], "operations": list(found.items())}
            for group, found in groups.items()
        ],
        "calls": sum(sums.values()),
        "multiply": sums[MULTIPLY],
        "look": sums[LOOK],
        "modes": modes,
    }


@invariant("timing.calls")
def modes_differ(data: Data) -> None:
    """The mode changes the count, and the step is more than a bare forward."""
    modes = {mode: found["calls"] for mode, found in data["modes"].items()}
    assert modes["inference_mode"] < modes["no_grad"] <= modes["enable_grad"], modes
    assert data["calls"] > modes["inference_mode"], data["calls"]


@table("timing.calls", result="timing.calls")
def calls_table(data: Data) -> Table:
    """Lay out the calls by what they are for."""
    rows = [
        [
            group["name"],
            str(group["calls"]),
            Markdown(", ".join(f"{n} {code(name)}" for name, n in group["operations"])),
        ]
        for group in data["groups"]
    ]
    rows.append([Markdown("**in all**"), Markdown(f"**{data['calls']}**"), ""])
    return Table(["to", "calls", "which"], rows, align="lrl")


@table("timing.modes", result="timing.calls")
def modes_table(data: Data) -> Table:
    """Lay out the calls of one forward in each gradient mode."""
    rows = [
        [code(f"torch.{mode}()"), str(found["calls"]), str(found["views"])]
        for mode, found in data["modes"].items()
    ]
    return Table(["mode", "calls", "of them `view`"], rows, align="lrr")


# --- Work: operations and bytes ---


@measurement("timing.work", kind="exact")
def work(size: Size) -> Data:
    """Count operations and bytes of a full prefill, and of decode steps at the end of the block."""
    models = []
    for name, config in MODELS.items():
        with torch.device("meta"), torch.inference_mode():
            model, T = GPT(config).eval(), config.block_size
            phases = []
            for phase, batch_size, t_new in (
                ("prefill", 1, T),
                ("decode", 1, 1),
                ("decode, 64 rows", 64, 1),
            ):
                cache = KVCache(config, batch_size, device="meta")
                cache.length = T - t_new
                idx = torch.zeros(batch_size, t_new, dtype=torch.int64)
                flops = count_flops(partial(model, idx, cache=cache))
                moved = bytes_read(model, T, batch_size=batch_size)
                phases.append(
                    {
                        "phase": phase,
                        "tokens": batch_size * t_new,
                        "flops": flops,
                        "bytes": moved,
                        "flops_a_token": flops // (batch_size * t_new),
                        "bytes_a_token": moved // (batch_size * t_new),
                        "intensity": flops / moved,
                    }
                )
        head = 2 * config.n_embd * config.vocab_size
        models.append(
            {
                "name": name,
                "positions": T,
                "phases": phases,
                "head_share": head / phases[1]["flops"],
            }
        )
    return {"models": models}


@invariant("timing.work")
def prefill_is_denser(data: Data) -> None:
    """A prefill does much for each byte, a decode step less than one operation for each."""
    for model in data["models"]:
        prefill, decode, batch = (phase["intensity"] for phase in model["phases"])
        assert prefill > batch > decode, model
        assert decode < 1, model


@table("timing.work", result="timing.work")
def work_table(data: Data) -> Table:
    """Lay out operations and bytes a token, and their ratio."""
    rows = []
    for model in data["models"]:
        rows += [
            [
                model["name"] if phase is model["phases"][0] else "",
                phase["phase"],
                f"{phase['tokens']:,}",
                f"{phase['flops_a_token'] / 1e6:,.1f} M",
                f"{phase['bytes_a_token'] / 1e6:,.3f} MB",
                f"{phase['intensity']:,.1f}",
            ]
            for phase in model["phases"]
        ]
    headers = ["model", "phase", "tokens", "FLOPs a token", "read a token", "FLOPs a byte"]
    return Table(headers, rows, align="llrrrr")


# --- Prefill and decode ---


@measurement("timing.pieces", kind="measured", engine="the eager engine")
def pieces(size: Size) -> Data:
    """Feed the same 128 tokens to an empty cache in pieces, from one at a time to all at once."""
    model, _ = load_pretrained()
    T = size.pick(128, 4)
    idx = _ids(model, T)
    last: dict[int, Tensor] = {}
    flops: dict[int, int] = {}

    def feed(piece: int) -> None:
        cache = KVCache(model.config, 1)
        for chunk in idx.split(piece, dim=1):
            logits, _ = model(chunk, cache=cache)
        last[piece] = logits[0, -1]

    widths = size.pick((1, 4, 16, 64, 128), (1, 4))
    with torch.inference_mode():
        for piece in widths:
            flops[piece] = count_flops(partial(feed, piece))
    variants = {str(piece): partial(feed, piece) for piece in widths}
    timed = compare(_timed(variants, size.pick(15, 1)))
    rows = []
    for piece in widths:
        variant = timed["variants"][str(piece)]
        rows.append(
            {
                "piece": piece,
                "forwards": T // piece,
                "seconds": variant["seconds"],
                "speedup": variant["speedup"],
                "tokens_per_second": T / variant["seconds"]["median"],
                "flops_per_second": flops[piece] / variant["seconds"]["median"],
            }
        )
    return {
        "samples": timed["samples"],
        "tokens": T,
        "difference": max((last[piece] - last[1]).abs().max().item() for piece in widths),
        "rows": rows,
        "gain": rows[-1]["speedup"]["median"],
        "prefill_token_microseconds": 1e6 * rows[-1]["seconds"]["median"] / T,
    }


@invariant("timing.pieces")
def pieces_agree(data: Data) -> None:
    """However it is cut, the text scores the same next token alike."""
    assert data["difference"] < 1e-4, data["difference"]
    assert all(row["piece"] * row["forwards"] == data["tokens"] for row in data["rows"])
    assert all(row["speedup"]["min"] > 0 for row in data["rows"])


@table("timing.pieces", result="timing.pieces")
def pieces_table(data: Data) -> Table:
    """Lay out the rate for each width."""
    rows = [
        [
            str(row["piece"]),
            str(row["forwards"]),
            _milliseconds(row["seconds"]["median"]),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['flops_per_second'] / 1e9:,.1f}",
            f"{row['speedup']['median']:.1f} ×",
        ]
        for row in data["rows"]
    ]
    headers = ["tokens a forward", "forwards", "time", "tokens a second", "GFLOP/s", "speed-up"]
    return Table(headers, rows, align="rrrrrr")


# --- Threads ---


@measurement("timing.threads", kind="measured", threads=2, engine="the eager engine")
def two_threads(size: Size) -> Data:
    """Time a decode step, a prefill and a step of a batch, on one thread and on two in turns."""
    model, _ = load_pretrained()
    T, B = size.pick(128, 4), size.pick(64, 2)
    idx = _ids(model, T)
    work = {
        f"decode step at {T}": _step(model, idx),
        f"decode step at {T}, {B} rows": _step(model, _ids(model, T, B)),
        f"prefill of {T}": lambda: model(idx, cache=KVCache(model.config, 1)),
    }

    def on(count: int, function: Callable[[], object], many: int) -> float:
        with threads(count):
            function()  # the second thread has to wake up
            return mean_seconds(function, many)

    rows = []
    with torch.inference_mode():
        for name, function in work.items():
            many = _calls(function)
            variants = {
                str(count): partial(on, count, function, many if size is Size.FULL else 1)
                for count in (1, 2)
            }
            timed = compare(list(interleaved(variants, repeats=size.pick(21, 1))))["variants"]
            rows.append(
                {
                    "name": name,
                    "one": timed["1"]["seconds"]["median"],
                    "two": timed["2"]["seconds"]["median"],
                    "speedup": timed["2"]["speedup"],
                }
            )
    return {"samples": size.pick(21, 1), "rows": rows}


@invariant("timing.threads")
def every_time_is_above_zero(data: Data) -> None:
    """Times and ratios are positive."""
    for row in data["rows"]:
        assert min(row["one"], row["two"], row["speedup"]["min"]) > 0, row


@table("timing.threads", result="timing.threads")
def threads_table(data: Data) -> Table:
    """Lay out both times and the paired ratio."""
    rows = [
        [
            row["name"],
            _milliseconds(row["one"]),
            _milliseconds(row["two"]),
            f"{row['speedup']['median']:.2f} ×",
            f"{row['speedup']['min']:.2f} to {row['speedup']['max']:.2f}",
        ]
        for row in data["rows"]
    ]
    headers = ["work", "one thread", "two threads", "speed-up", "over the rounds"]
    return Table(headers, rows, align="lrrrr")


# --- Where the cache pays ---


@measurement("timing.pays", kind="measured", engine="the eager engine")
def pays(size: Size) -> Data:
    """Time the step that scores the token after T, with the cache and without, over T and size."""
    lengths = size.pick((1, 4, 16, 32, 64, 127, 256, 512, 1023), (1, 4))
    models = []
    for name, config in list(MODELS.items())[: size.pick(3, 1)]:
        model = GPT(config).eval()  # random weights take as long as trained ones
        repeats = size.pick(15 if config.block_size < 1024 else 5, 1)
        rows = []
        for T in lengths:
            if T > config.block_size:
                break
            idx = _ids(model, T)
            steps = {"uncached": partial(model, idx), "cached": _step(model, idx)}
            timed = compare(_timed(steps, repeats))
            with torch.inference_mode():
                difference = steps["uncached"]()[0][0, -1] - steps["cached"]()[0, -1]
            rows.append(
                {
                    "length": T,
                    "uncached": timed["variants"]["uncached"]["seconds"]["median"],
                    "cached": timed["variants"]["cached"]["seconds"]["median"],
                    "speedup": timed["variants"]["cached"]["speedup"],
                    "difference": difference.abs().max().item(),
                }
            )
        shortest, longest = rows[0], rows[-1]
        moved = bytes_read(model, longest["length"])
        reading = compare(_timed({"sum": torch.ones(moved // 4).sum}, repeats))["variants"]["sum"]
        models.append(
            {
                "name": name,
                "parameters": model.num_parameters,
                "rows": rows,
                "longest": longest["speedup"]["median"],
                "bytes": moved,
                "gigabytes_per_second": moved / longest["cached"] / 1e9,
                "reading_gigabytes_per_second": moved / reading["seconds"]["median"] / 1e9,
                "over_reading": longest["cached"] / reading["seconds"]["median"],
                "uncached_growth": longest["uncached"] / shortest["uncached"],
                "cached_growth": longest["cached"] / shortest["cached"],
            }
        )
    return {"models": models}


@invariant("timing.pays")
def both_steps_score_alike(data: Data) -> None:
    """The two steps compute the same logits, and every ratio is positive."""
    for model in data["models"]:
        for row in model["rows"]:
            assert row["difference"] < 1e-4, row
            assert row["speedup"]["min"] > 0, row


@table("timing.pays", result="timing.pays")
def pays_table(data: Data) -> Table:
    """Lay out both steps for each model and length."""
    rows = []
    for model in data["models"]:
        rows += [
            [
                model["name"] if row is model["rows"][0] else "",
                f"{row['length']:,}",
                _milliseconds(row["uncached"]),
                _milliseconds(row["cached"]),
                f"{row['speedup']['median']:.1f} ×",
                _range(row["speedup"]),
            ]
            for row in model["rows"]
        ]
    headers = ["model", "T", "uncached step", "cached step", "speed-up", "over the rounds"]
    return Table(headers, rows, align="lrrrrr")


@table("timing.bandwidth", result="timing.pays")
def bandwidth_table(data: Data) -> Table:
    """Lay out how fast a cached step reads, and how fast the same bytes can be added up."""
    rows = [
        [
            model["name"],
            f"{model['rows'][-1]['length']:,}",
            f"{model['bytes'] / 1e6:,.1f} MB",
            f"{model['gigabytes_per_second']:.1f} GB/s",
            f"{model['reading_gigabytes_per_second']:.1f} GB/s",
            f"{model['over_reading']:.1f} ×",
        ]
        for model in data["models"]
    ]
    headers = ["model", "T", "weights + cache", "cached step", "adding them up", "step / adding"]
    return Table(headers, rows, align="lrrrrr")


# --- Batches ---


@measurement("timing.batch", kind="measured", engine="the eager engine")
def batch(size: Size) -> Data:
    """Time a decode step for batches of 1 to 64 rows, with little in the cache and with much."""
    model, _ = load_pretrained()
    positions, sizes = size.pick((16, 128), (2, 4)), size.pick((1, 2, 4, 8, 16, 32, 64), (1, 2))
    repeats = size.pick(15, 1)
    weights = sum(weight.nbytes for weight in model.parameters())
    steps = {(T, B): _step(model, _ids(model, T, B)) for T in positions for B in sizes}
    rounds = _timed(steps, repeats)
    lengths = []
    for T in positions:
        timed = compare([{str(B): times[T, B] for B in sizes} for times in rounds])
        rows = []
        for B in sizes:
            variant = timed["variants"][str(B)]
            rows.append(
                {
                    "batch": B,
                    "seconds": variant["seconds"],
                    "tokens_per_second": B / variant["seconds"]["median"],
                    "gain": B * variant["speedup"]["median"],
                    "weights": weights,
                    "caches": bytes_read(model, T, batch_size=B) - weights,
                }
            )
        *_, half, whole = (row["seconds"]["median"] for row in rows)
        lengths.append(
            {
                "positions": T,
                "rows": rows,
                "gain": rows[-1]["gain"],
                "one_more_microseconds": 1e6 * (whole - half) / (sizes[-1] - sizes[-2]),
            }
        )
    return {"samples": repeats, "lengths": lengths}


@invariant("timing.batch")
def every_batch_was_timed(data: Data) -> None:
    """Each row adds the same cache, all share the weights, and every rate is positive."""
    for length in data["lengths"]:
        first, *others = length["rows"]
        for row in others:
            assert row["weights"] == first["weights"], row
            assert row["caches"] == row["batch"] * first["caches"], row
            assert row["gain"] > 0, row


@table("timing.batch", result="timing.batch")
def batch_table(data: Data) -> Table:
    """Lay out step, rate and gain for both lengths, one line a batch."""
    headers, columns = ["batch"], [[str(row["batch"]) for row in data["lengths"][0]["rows"]]]
    for length in data["lengths"]:
        headers += [f"T = {length['positions']}: step", "tokens a second", "gain", "caches"]
        columns += [
            [_milliseconds(row["seconds"]["median"]) for row in length["rows"]],
            [f"{row['tokens_per_second']:,.0f}" for row in length["rows"]],
            [f"{row['gain']:.1f} ×" for row in length["rows"]],
            [f"{row['caches'] / 1e6:.1f} MB" for row in length["rows"]],
        ]
    return Table(headers, [list(row) for row in zip(*columns, strict=True)], align="r" * 9)
