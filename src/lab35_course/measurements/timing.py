"""How long a step takes, what it has to do, and where the cache pays."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab35 import GPT, GPTConfig, KVCache, decode_steps, load_pretrained
from lab35.cli import cold
from lab35.timing import (
    bytes_read,
    compare,
    count_calls,
    count_flops,
    interleaved,
    mean_seconds,
    spread,
    threads,
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


@table("timing.latency", result="loop.speed")
def latency_table(data: Data) -> Table:
    """Lay out TTFT, TPOT, the rate and the paired ratio of the two loops that run the model."""
    told = {name: data["variants"][name] for name in ("uncached", "cached")}
    rows = [
        [
            name,
            _milliseconds(variant["time_to_first_token"]["median"]),
            _milliseconds(variant["time_per_output_token"]["median"]),
            _milliseconds(variant["time_per_output_token"]["min"]),
            f"{variant['tokens_per_second']['median']:,.0f}",
            f"{variant['speedup']['median']:.1f} ×",
        ]
        for name, variant in told.items()
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


def _summed_up(times: list[float]) -> Data:
    """Sum up one process: its first three steps, and the spread of the later ones."""
    later = times[3:]
    return {
        "first": times[0],
        "second": times[1],
        "third": times[2],
        # No `spread`: these are the steps of one process, and their width is the point.
        "later": {
            "steps": len(later),
            "min": min(later),
            "median": median(later),
            "mean": sum(later) / len(later),
            "max": max(later),
        },
        "first_over_median": times[0] / median(later),
        "slowest_over_fastest": max(later) / min(later),
    }


@measurement("timing.first", kind="measured", engine="the eager engine")
def first(size: Size) -> Data:
    """Look at the first steps of fresh processes; keep the one in the middle, and say how far."""
    count = size.pick(500, 8)
    code = f"from {__name__} import first_steps; print(first_steps({count}))"
    processes = []
    for _ in range(size.pick(5, 1)):
        told = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
        processes.append(_summed_up(json.loads(told.stdout)))
    # The odd number makes the median one of the processes: the table's row gives the ratios.
    processes.sort(key=lambda process: process["first_over_median"])
    shown = processes[len(processes) // 2]
    return shown | {
        "steps": count,
        "samples": len(processes),
        "least_first_over_median": processes[0]["first_over_median"],
        "most_first_over_median": processes[-1]["first_over_median"],
    }


@invariant("timing.first")
def later_steps_have_a_spread(data: Data) -> None:
    """The quoted ratios are those of the row that is shown, and it is the middle process."""
    later = data["later"]
    assert 0 < later["min"] <= later["mean"] <= later["max"], later
    assert math.isclose(data["first_over_median"], data["first"] / later["median"], rel_tol=1e-4)
    assert math.isclose(data["slowest_over_fastest"], later["max"] / later["min"], rel_tol=1e-4)
    around = [data[f"{which}first_over_median"] for which in ("least_", "", "most_")]
    assert around == sorted(around), around
    assert later["steps"] == data["steps"] - 3, data


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
    "check and choose a token": ("item", "select", "max", "resolve_conj", "resolve_neg"),
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


def _head_share(config: GPTConfig, length: int) -> float:
    """Tell which share of an uncached forward scores positions that the loop does not need."""
    L, C, V = config.n_layer, config.n_embd, config.vocab_size
    whole = length * 2 * (L * 12 * C * C + C * V) + 4 * L * C * length**2
    return (length - 1) * 2 * C * V / whole


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
        share, at = max((_head_share(config, length), length) for length in range(1, T + 1))
        models.append(
            {
                "name": name,
                "positions": T,
                "phases": phases,
                "head_share": share,
                "head_share_at": at,
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
        (name,) = (name for name in MODELS if name == model["name"])
        T = MODELS[name].block_size
        # The formula of the share counts what the counter counts.
        whole = T * model["phases"][0]["flops_a_token"]
        unneeded = 2 * (T - 1) * MODELS[name].n_embd * MODELS[name].vocab_size
        assert math.isclose(unneeded / whole, _head_share(MODELS[name], T), rel_tol=1e-6), model
        assert model["head_share"] >= _head_share(MODELS[name], T), model


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
    rounds = _timed(variants, size.pick(15, 2))
    timed = compare(rounds)
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
                "forward_over_step": median(
                    [piece * times[str(piece)] / times["1"] for times in rounds]
                ),
            }
        )
    return {
        "samples": timed["samples"],
        "tokens": T,
        "difference": max((last[piece] - last[1]).abs().max().item() for piece in widths),
        "rows": rows,
        "gain": rows[-1]["speedup"]["median"],
    }


@invariant("timing.pieces")
def pieces_agree(data: Data) -> None:
    """However it is cut, the text scores the same next token alike."""
    assert 0 < data["difference"] < 1e-4, data[
        "difference"
    ]  # 0: one piece was compared with itself
    assert all(row["piece"] * row["forwards"] == data["tokens"] for row in data["rows"])
    assert data["gain"] == data["rows"][-1]["speedup"]["median"], data["gain"]
    assert data["rows"][0]["forward_over_step"] == 1, data["rows"][0]


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
            timed = compare(list(interleaved(variants, repeats=size.pick(21, 2))))
            rows.append({"name": name, "speedup": timed["variants"]["2"]["speedup"]})
    return {"samples": size.pick(21, 2), "rows": rows}


@invariant("timing.threads")
def every_ratio_was_sampled(data: Data) -> None:
    """Each ratio comes of as many rounds as the small print says."""
    for row in data["rows"]:
        assert row["speedup"]["samples"] == data["samples"], row


@table("timing.threads", result="timing.threads")
def threads_table(data: Data) -> Table:
    """Lay out the paired ratio and its range."""
    rows = [
        [
            row["name"],
            f"{row['speedup']['median']:.2f} ×",
            f"{row['speedup']['min']:.2f} to {row['speedup']['max']:.2f}",
        ]
        for row in data["rows"]
    ]
    return Table(["work", "two threads, speed-up", "over the rounds"], rows, align="lrr")


# --- From the shell to the first word ---


@measurement("timing.cold", kind="measured", engine="the lean engine")
def whole_commands(size: Size) -> Data:
    """Time whole commands in fresh processes, as `lab35 bench --cold` does."""
    stand_ins = {cold.BASELINE: ("-c", "pass"), "lab35 generate": ("-c", "print()")}
    variants = cold.variants(size.pick(cold.COMMANDS, stand_ins))
    return cold.summed_up(list(interleaved(variants, repeats=size.pick(11, 1))))


@invariant("timing.cold")
def a_word_comes_before_the_end(data: Data) -> None:
    """Each wait was sampled in every round, and the baseline is compared with itself."""
    rows = {row["name"]: row for row in data["rows"]}
    for load in cold.LOADS:
        for row in rows.values():
            assert row[load]["ratio"]["samples"] == data["samples"], row
        assert rows[data["baseline"]][load]["ratio"]["median"] == 1, rows
        first, whole = (
            rows[f"lab35 generate, {part}"][load]["seconds"]["median"]
            for part in ("first word", "64 tokens")
        )
        assert first < whole, (first, whole)


@table("timing.cold", result="timing.cold")
def cold_table(data: Data) -> Table:
    """Lay out seconds and ratio of each wait, alone and beside a busy process."""
    rows = []
    for row in data["rows"]:
        command, comma, part = row["name"].partition(", ")
        cells = [Markdown(f"{code(command)}{comma}{part}")]
        for load in cold.LOADS:
            cells += [
                f"{row[load]['seconds']['median']:.2f} s",
                f"{row[load]['ratio']['median']:.2f} ×",
            ]
        rows.append(cells)
    headers = ["process", "alone", "of the import", "beside a busy process", "of the import"]
    return Table(headers, rows, align="lrrrr")


# --- Where the cache pays ---


def _tiny(config: GPTConfig) -> GPT:
    """Build a model of as many layers, of width 4: the same calls, and next to no arithmetic."""
    return GPT(replace(config, vocab_size=8, n_head=4, n_embd=4)).eval()


def _products(model: GPT) -> Callable[[], None]:
    """Prepare all products of a decode step with their own weights, and nothing between them."""
    linears = [part for b in model.blocks for part in (b.attn.qkv, b.attn.proj, b.fc, b.proj)]
    inputs = [torch.randn(1, 1, linear.in_features) for linear in linears]
    last = torch.randn(1, 1, model.config.n_embd)

    def multiply() -> None:
        for linear, x in zip(linears, inputs, strict=True):
            F.linear(x, linear.weight, linear.bias)
        F.linear(last, model.wte.weight)

    return multiply


@measurement("timing.pays", kind="measured", engine="the eager engine")
def pays(size: Size) -> Data:
    """Time the step that scores the token after T, with the cache and without, over T and size.

    All steps of a model, and the parts of its longest one, take turns in one run.
    """
    lengths = size.pick((1, 4, 16, 32, 64, 127, 256, 512, 1023), (1, 4))
    models = []
    for name, config in list(MODELS.items())[: size.pick(3, 1)]:
        model, tiny = GPT(config).eval(), _tiny(config)  # random weights take as long as trained
        repeats = size.pick(15 if config.block_size < 1024 else 5, 2)
        variants: dict[Any, Callable[[], object]] = {}
        differences = {}
        for T in [T for T in lengths if T <= config.block_size]:
            idx = _ids(model, T)
            uncached, cached = partial(model, idx), _step(model, idx)
            with torch.inference_mode():
                differences[T] = (uncached()[0][0, -1] - cached()[0, -1]).abs().max().item()
            variants |= {("uncached", T): uncached, ("cached", T): cached}
        shortest, *_, longest = differences
        moved = bytes_read(model, longest)
        variants["calls"] = _step(tiny, _ids(tiny, longest))
        variants["products"] = _products(model)
        variants["reading"] = torch.ones(moved // 4).sum
        rounds = _timed(variants, repeats)

        def ratio(of: Any, to: Any, rounds: list[dict[Any, float]] = rounds) -> Data:
            return spread([times[of] / times[to] for times in rounds])

        seconds = compare(rounds)["variants"]
        step = ("cached", longest)
        models.append(
            {
                "name": name,
                "parameters": model.num_parameters,
                "samples": repeats,
                "rows": [
                    {
                        "length": T,
                        "uncached": seconds["uncached", T]["seconds"],
                        "cached": seconds["cached", T]["seconds"],
                        "speedup": ratio(("uncached", T), ("cached", T)),
                        "difference": difference,
                    }
                    for T, difference in differences.items()
                ],
                "longest": ratio(("uncached", longest), step)["median"],
                "uncached_growth": ratio(("uncached", longest), ("uncached", shortest)),
                "cached_growth": ratio(step, ("cached", shortest)),
                "bytes": moved,
                "step_microseconds": 1e6 * seconds[step]["seconds"]["median"],
                "reading_share": ratio("reading", step),
                "products_share": ratio("products", step),
                "calls_share": ratio("calls", step),
                "over_reading": ratio(step, "reading"),
                "products_over_reading": ratio("products", "reading"),
            }
        )
    return {"models": models}


@invariant("timing.pays")
def both_steps_score_alike(data: Data) -> None:
    """The two steps compute the same logits, by two ways, in as many rounds as are told."""
    for model in data["models"]:
        for row in model["rows"]:
            assert row["difference"] < 1e-4, row
            assert row["speedup"]["samples"] == model["samples"], row
        assert any(row["difference"] > 0 for row in model["rows"]), model["rows"]
        assert model["longest"] == model["rows"][-1]["speedup"]["median"], model
        # A ratio and its inverse, each the median over an odd number of rounds, are inverse.
        product = model["over_reading"]["median"] * model["reading_share"]["median"]
        assert len(data["models"]) == 1 or math.isclose(product, 1, rel_tol=1e-4), model


@invariant("timing.pays")
def small_models_wait_for_calls(data: Data) -> None:
    """The account of the page: calls weigh less, and products more, the larger the model is."""
    calls = [model["calls_share"]["median"] for model in data["models"]]
    products = [model["products_share"]["median"] for model in data["models"]]
    assert calls == sorted(calls, reverse=True), calls
    assert products == sorted(products), products
    if len(calls) > 1:
        assert calls[0] > products[0], (calls, products)
        assert calls[-1] < products[-1], (calls, products)


@table("timing.pays", result="timing.pays")
def pays_table(data: Data) -> Table:
    """Lay out both steps for each model and length."""
    rows = []
    for model in data["models"]:
        rows += [
            [
                model["name"] if row is model["rows"][0] else "",
                f"{row['length']:,}",
                _milliseconds(row["uncached"]["median"]),
                _milliseconds(row["cached"]["median"]),
                f"{row['speedup']['median']:.1f} ×",
                _range(row["speedup"]),
                str(row["speedup"]["samples"]),
            ]
            for row in model["rows"]
        ]
    headers = [
        "model",
        "T",
        "uncached step",
        "cached step",
        "speed-up",
        "over the rounds",
        "rounds",
    ]
    return Table(headers, rows, align="lrrrrrr")


@table("timing.waits", result="timing.pays")
def waits_table(data: Data) -> Table:
    """Lay out which share of a cached step its calls, its products and the bare reading take."""
    rows = [
        [
            model["name"],
            f"{model['rows'][-1]['length']:,}",
            f"{model['bytes'] / 1e6:,.1f} MB",
            _milliseconds(1e-6 * model["step_microseconds"]),
            *(
                f"{model[share]['median']:.0%}"
                for share in ("reading_share", "products_share", "calls_share")
            ),
        ]
        for model in data["models"]
    ]
    headers = ["model", "T", "must read", "cached step", "reading", "products", "calls"]
    return Table(headers, rows, align="lrrrrrr")


# --- Batches ---


@measurement("timing.batch", kind="measured", engine="the eager engine")
def batch(size: Size) -> Data:
    """Time a decode step for batches of 1 to 64 rows, with little in the cache and with much."""
    model, _ = load_pretrained()
    positions, sizes = size.pick((16, 128), (2, 4)), size.pick((1, 2, 4, 8, 16, 32, 64), (1, 2))
    repeats = size.pick(15, 2)
    weights = sum(weight.nbytes for weight in model.parameters())
    steps: dict[Any, Callable[[], object]] = {
        (T, B): _step(model, _ids(model, T, B)) for T in positions for B in sizes
    }
    prompt = _ids(model, positions[-1])
    steps["prefill"] = lambda: model(prompt, cache=KVCache(model.config, 1))
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
        *_, half, whole = sizes
        one_more = [(times[T, whole] - times[T, half]) / (whole - half) for times in rounds]
        token = [times["prefill"] / prompt.numel() for times in rounds]
        lengths.append(
            {
                "positions": T,
                "rows": rows,
                "gain": rows[-1]["gain"],
                "one_more_microseconds": 1e6 * median(one_more),
                "one_more_of_prefill": median(
                    [row / each for row, each in zip(one_more, token, strict=True)]
                ),
            }
        )
    return {
        "samples": repeats,
        "prefill_token_microseconds": 1e6
        * median([times["prefill"] for times in rounds])
        / prompt.numel(),
        "lengths": lengths,
    }


@invariant("timing.batch")
def every_batch_was_timed(data: Data) -> None:
    """Each row adds the same cache, all share the weights, and a long cache costs more a row."""
    for length in data["lengths"]:
        first, *others = length["rows"]
        for row in others:
            assert row["weights"] == first["weights"], row
            assert row["caches"] == row["batch"] * first["caches"], row
            assert row["seconds"]["samples"] == data["samples"], row
    short, long = data["lengths"]
    assert short["rows"][0]["caches"] < long["rows"][0]["caches"], data["lengths"]
    # The page says that a long cache makes each further row dearer; a check is too short to show.
    if data["samples"] > 2:
        assert short["one_more_of_prefill"] < long["one_more_of_prefill"], data["lengths"]


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
