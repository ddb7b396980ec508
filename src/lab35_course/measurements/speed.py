"""The ladder of decode steps, the floor under it, and other people's loops beside it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn

from lab35 import GPT, GrowingCache, KVCache, generate, load_pretrained
from lab35.speed import Compiled, Engine, EngineName, Jitted, Lean, OneWrite, Textbook, why_not
from lab35.speed import compiled as compiled_rung
from lab35.speed.loops import LOOPS, _jit
from lab35.timing import compare, interleaved, mean_seconds, spread
from lab35_course.measurements.batching import can_run, windows
from lab35_course.peers import to_ctranslate2, to_hugging_face, to_onnx_runtime
from lab35_course.plain import code
from lab35_course.results import Data, Size, Table, invariant, measurement, table

PROMPT = "It was a dark night and the wind was howling in the chimney as we sat by the fire"

RUNGS: dict[str, type[Engine]] = {
    "textbook": Textbook,
    "one write": OneWrite,
    "lean": Lean,
    "compiled": Compiled,
    "numba": Jitted,
}


def _model_and_prompt() -> tuple[GPT, Tensor]:
    """Load what every rung runs: the checkpoint, and 16 tokens."""
    model, tokenizer = load_pretrained()
    return model, torch.tensor([tokenizer.encode(PROMPT)[:16]])


def _to_compile(model: GPT, size: Size) -> list[EngineName]:
    """Name the engines that are compiled; a check leaves them out, as that takes time.

    Raises:
        RuntimeError: If one cannot be had here: a table with holes would be taken for whole.
    """
    if size is Size.TINY:
        return []
    for name in ("compiled", "numba"):
        if reason := why_not(name, model):
            raise RuntimeError(f"the {name} engine cannot be measured on this machine: {reason}")
    return ["compiled", "numba"]


@torch.inference_mode()
def _greedy(engine: Engine, prompt: Tensor, new_tokens: int) -> list[int]:
    """Write a text with nothing around the steps but the choice of the best token."""
    engine.reset()
    tokens = [engine(prompt).argmax(-1, keepdim=True)]
    for _ in range(new_tokens - 1):
        tokens.append(engine(tokens[-1]).argmax(-1, keepdim=True))
    return torch.cat(tokens, dim=1)[0].tolist()


@torch.inference_mode()
def _uncached(model: GPT, prompt: Tensor, new_tokens: int) -> list[int]:
    """Write a text by running all of it again for each token, with as little around it."""
    idx = prompt
    for _ in range(new_tokens):
        idx = torch.cat((idx, model(idx)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
    return idx[0, prompt.shape[1] :].tolist()


def _read_all(weights: Tensor, times: int) -> None:
    """Read every weight so many times, and do as little as possible with it."""
    for _ in range(times):
        weights.sum()


def _whole_microseconds(seconds: float) -> int:
    """Round to what a table shows, so that the difference of two cells is what a reader finds."""
    return round(1e6 * seconds)


def _sum_up(rounds: list[dict[str, float]], name: str, other: str) -> float:
    """Return the median over the rounds of one time divided by another."""
    return median([times[name] / times[other] for times in rounds])


@measurement("speed.ladder", kind="measured", engine="each rung by its name")
def ladder(size: Size) -> Data:
    """Time every rung and the floor in turns: 16 prompt tokens, 100 greedy ones."""
    model, prompt = _model_and_prompt()
    new_tokens, samples = size.pick(100, 3), size.pick(31, 2)
    names = ["textbook", "one write", "lean", *_to_compile(model, size)]
    engines = {name: RUNGS[name](model) for name in names}
    texts = [_greedy(engine, prompt, new_tokens) for engine in engines.values()]
    reference = _uncached(model, prompt, new_tokens)
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])

    variants: dict[str, Callable[[], object]] = {
        "no cache": partial(_uncached, model, prompt, new_tokens)
    }
    for name, engine in engines.items():
        variants[name] = partial(_greedy, engine, prompt, new_tokens)
    variants["prefill"] = partial(_greedy, engines["textbook"], prompt, 1)
    variants["floor"] = partial(_read_all, weights, new_tokens)
    timed = {name: partial(mean_seconds, run) for name, run in variants.items()}
    rounds = list(interleaved(timed, repeats=samples, warmup=size.pick(3, 1)))
    seconds = {name: spread([times[name] for times in rounds]) for name in variants}
    rows = [
        {
            "rung": name,
            "seconds": seconds[name],
            "microseconds": 1e6 * seconds[name]["median"] / new_tokens,
            "gigabytes": 1e-9 * weights.nbytes * new_tokens / seconds[name]["median"],
            "of_textbook": _sum_up(rounds, name, "textbook"),
            "of_floor": _sum_up(rounds, name, "floor"),
            "than_uncached": _sum_up(rounds, "no cache", name),
        }
        for name in ("no cache", *engines, "floor")
    ]
    steps = {
        name: [(times[name] - times["prefill"]) / max(1, new_tokens - 1) for times in rounds]
        for name in engines
    }
    return {
        "samples": samples,
        "prompt": prompt.shape[1],
        "new": new_tokens,
        "weight_bytes": weights.nbytes,
        "prefill_microseconds": 1e6 * seconds["prefill"]["median"],
        "same_tokens": all(text == reference for text in texts),
        "rows": rows,
        "steps": [
            {
                "rung": name,
                "microseconds": 1e6 * median(each),
                "of_textbook": median(
                    [a / b for a, b in zip(each, steps["textbook"], strict=True)]
                ),
                "of_floor": median(
                    [a * new_tokens / times["floor"] for a, times in zip(each, rounds, strict=True)]
                ),
            }
            for name, each in steps.items()
        ],
    }


@invariant("speed.ladder")
def every_rung_writes_the_same(data: Data) -> None:
    """A rung that writes something else would prove nothing; each ratio is to the right row."""
    assert data["same_tokens"], data["same_tokens"]
    rows = {row["rung"]: row for row in data["rows"]}
    assert list(rows)[:4] == ["no cache", "textbook", "one write", "lean"], list(rows)
    assert rows["textbook"]["of_textbook"] == rows["floor"]["of_floor"] == 1, rows
    assert all(row["seconds"]["samples"] == data["samples"] for row in data["rows"]), rows


@invariant("speed.ladder")
def each_rung_is_lower(data: Data) -> None:
    """What the figure shows: each rung is faster than the last, and none reads faster than the sum.

    The two compiled rungs may change places. A check is too short to show an order.
    """
    if data["samples"] > 2:
        of_floor = {row["rung"]: row["of_floor"] for row in data["rows"]}
        falling = [of_floor[name] for name in ("no cache", "textbook", "one write", "lean")]
        assert falling == sorted(falling, reverse=True), of_floor
        for name in ("compiled", "numba"):
            assert of_floor["lean"] > of_floor[name] > 1, of_floor


REMOVES = {
    "no cache": "",
    "textbook": "the past, run again",
    "one write": "mask, second write",
    "lean": "modules, batch axis, the write itself",
    "compiled": "dispatch, intermediate results",
    "numba": "PyTorch",
    "floor": "everything but reading the weights",
}


@table("speed.ladder", result="speed.ladder")
def ladder_table(data: Data) -> Table:
    """Lay out each rung as time, as bandwidth, and against the top and the bottom."""
    rows = [
        [
            row["rung"],
            REMOVES[row["rung"]],
            f"{row['microseconds']:,.0f} µs",
            f"{1e6 * row['seconds']['min'] / data['new']:,.0f} µs",
            "" if row["rung"] == "no cache" else f"{row['gigabytes']:.1f} GB/s",
            f"{row['of_textbook']:.2f}",
            f"{row['of_floor']:.2f}",
        ]
        for row in data["rows"]
    ]
    headers = [
        "rung",
        "removes",
        "a token",
        "fastest",
        "weights read",
        "times the textbook",
        "times the floor",
    ]
    return Table(headers, rows, align="llrrrrr")


# --- What is waited for ---


@measurement("speed.calls", kind="measured", engine="each rung by its name")
def calls(size: Size) -> Data:
    """Time the steps of the rungs made of calls, and the same calls on a model of width 4."""
    model, prompt = _model_and_prompt()
    tiny = GPT(replace(model.config, vocab_size=8, n_head=4, n_embd=4)).eval()
    samples, tokens = size.pick(21, 2), [1] * size.pick(99, 2)
    rungs = ("textbook", "one write", "lean")
    timed = {}
    for name in rungs:
        timed[name] = partial(_step_seconds, RUNGS[name](model), prompt, tokens)
        timed[f"{name}, calls"] = partial(
            _step_seconds, RUNGS[name](tiny), torch.ones_like(prompt), tokens
        )
    rounds = list(interleaved(timed, repeats=samples))
    return {
        "samples": samples,
        "rows": [
            {
                "rung": name,
                "seconds": spread([times[name] for times in rounds]),
                "calls": spread([times[f"{name}, calls"] for times in rounds]),
                "share": spread([times[f"{name}, calls"] / times[name] for times in rounds]),
            }
            for name in rungs
        ],
    }


@invariant("speed.calls")
def calls_are_most_of_a_step(data: Data) -> None:
    """The account of the page: more than half of the textbook's step is calls; lean has fewer.

    A check is too short to show it.
    """
    textbook, _, lean = data["rows"]
    assert all(row["share"]["samples"] == data["samples"] for row in data["rows"]), data["rows"]
    if data["samples"] > 2:
        assert textbook["share"]["median"] > 0.5, textbook
        assert textbook["calls"]["median"] > lean["calls"]["median"], data["rows"]


@table("speed.calls", result="speed.calls")
def speed_calls_table(data: Data) -> Table:
    """Lay out the step, its calls without the numbers, and their share of it."""
    rows = [
        [
            row["rung"],
            f"{1e6 * row['seconds']['median']:,.0f} µs",
            f"{1e6 * row['calls']['median']:,.0f} µs",
            f"{row['share']['median']:.0%}",
        ]
        for row in data["rows"]
    ]
    headers = ["rung", "a step", "its calls, width 4", "share of the step"]
    return Table(headers, rows, align="lrrr")


# --- Peers ---


@torch.inference_mode()
def _growing(model: GPT, prompt: Tensor, new_tokens: int) -> Tensor:
    """Write a greedy text with the cache of most tutorials."""
    idx, cache = prompt, GrowingCache(model.config, 1)
    for _ in range(new_tokens):
        logits, _ = model(idx[:, cache.length :], cache=cache)
        idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return idx


def _hugging_face(peer: Any, prompt: Tensor, new_tokens: int, use_cache: bool) -> Tensor:
    """Let transformers write a greedy text; nothing ends it early."""
    return peer.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        use_cache=use_cache,
        pad_token_id=0,
    )


@measurement("speed.peers", kind="measured", engine="each engine by its name")
def peers(size: Size) -> Data:
    """Time whole loops in turns: lab35's engines through `generate`, and other people's."""
    model, prompt = _model_and_prompt()
    new_tokens, samples = size.pick(100, 3), size.pick(15, 2)
    peer = to_hugging_face(model)
    ours = partial(generate, model, prompt, new_tokens, temperature=0)
    engines = ["eager", "lean", *_to_compile(model, size)]
    texts: dict[str, Callable[[], Tensor]] = {
        "transformers, no cache": partial(_hugging_face, peer, prompt, new_tokens, False),
        "lab35, no cache": lambda: ours(use_cache=False).tokens,
        "transformers, DynamicCache": partial(_hugging_face, peer, prompt, new_tokens, True),
        "lab35, growing cache": partial(_growing, model, prompt, new_tokens),
    }
    for name in engines:
        texts[f"lab35, {name}"] = lambda name=name: ours(engine=name).tokens
    theirs = to_ctranslate2(model)
    texts["CTranslate2"] = lambda: torch.cat(
        (prompt, torch.tensor(theirs(prompt.tolist(), new_tokens))), dim=1
    )
    if size is Size.FULL and find_spec("onnxruntime") and find_spec("onnxscript"):
        texts["onnxruntime, growing cache"] = partial(to_onnx_runtime(model), prompt, new_tokens)
    bare = {
        f"lab35, {name}": partial(_greedy, RUNGS[name](model), prompt, new_tokens)
        for name in engines
        if name != "eager"
    }
    with warnings.catch_warnings(action="ignore"):
        written = [write() for write in texts.values()]
        timed = {name: partial(mean_seconds, write) for name, write in texts.items()}
        timed |= {f"{name}, bare": partial(mean_seconds, write) for name, write in bare.items()}
        rounds = list(interleaved(timed, repeats=samples, warmup=size.pick(2, 1)))
    told = compare(rounds)["variants"]
    shown = {
        name: _whole_microseconds(variant["seconds"]["median"] / new_tokens)
        for name, variant in told.items()
    }
    ours_best = min((f"lab35, {name}" for name in engines), key=shown.__getitem__)
    rows = [
        {
            "loop": name,
            "seconds": told[name]["seconds"],
            "microseconds": shown[name],
            "than_uncached": _sum_up(rounds, "lab35, no cache", name),
            "than_transformers": _sum_up(rounds, "transformers, DynamicCache", name),
            "bare": shown.get(f"{name}, bare"),
            "loop_adds": shown[name] - shown[f"{name}, bare"] if name in bare else None,
        }
        for name in texts
    ]
    return {
        "samples": samples,
        "prompt": prompt.shape[1],
        "new": new_tokens,
        "transformers": version("transformers"),
        "ctranslate2": version("ctranslate2"),
        "ctranslate2_of_best": _sum_up(rounds, "CTranslate2", ours_best),
        "onnxruntime": version("onnxruntime") if find_spec("onnxruntime") else "none",
        "same_tokens": all(torch.equal(text, written[0]) for text in written),
        "rows": rows,
    }


@invariant("speed.peers")
def peers_write_the_same(data: Data) -> None:
    """All loops wrote one text: they did the same work. What a loop adds is what two cells say."""
    assert data["same_tokens"], data["same_tokens"]
    rows = {row["loop"]: row for row in data["rows"]}
    assert rows["lab35, no cache"]["than_uncached"] == 1, rows
    assert rows["transformers, DynamicCache"]["than_transformers"] == 1, rows
    # What is told of CTranslate2 against our best is what the two columns say, up to their medians.
    ours = [row["than_uncached"] for name, row in rows.items() if name.startswith("lab35, ")]
    told = data["ctranslate2_of_best"] * rows["CTranslate2"]["than_uncached"] / max(ours)
    assert 0.5 < told < 2, data["ctranslate2_of_best"]
    for row in data["rows"]:
        assert row["seconds"]["samples"] == data["samples"], row
        assert (row["bare"] is None) == (row["loop_adds"] is None), row
        if row["bare"] is not None:
            assert row["loop_adds"] == row["microseconds"] - row["bare"], row


@invariant("speed.peers")
def the_order_of_the_page(data: Data) -> None:
    """What the page says about the order: what is compiled here is faster than onnxruntime."""
    than = {row["loop"]: row["than_uncached"] for row in data["rows"]}
    if data["samples"] > 2:
        ours = min(than["lab35, compiled"], than["lab35, numba"])
        # Where onnxruntime is not installed, its row is left out.
        assert than.get("onnxruntime, growing cache", ours) <= ours, than


@table("speed.peers", result="speed.peers")
def peers_table(data: Data) -> Table:
    """Lay out microseconds a token, and how many times faster each is than two of them."""
    rows = [
        [
            row["loop"],
            f"{row['microseconds']:,} µs",
            "" if row["bare"] is None else f"{row['bare']:,} µs",
            f"{row['than_uncached']:.1f} ×",
            f"{row['than_transformers']:.1f} ×",
        ]
        for row in data["rows"]
    ]
    headers = ["loop", "a token", "in a bare loop", "against no cache", "against DynamicCache"]
    return Table(headers, rows, align="lrrrr")


# --- What sampling adds ---


@measurement("speed.sampled", kind="measured", engine="each engine by its name")
def sampled(size: Size) -> Data:
    """Time each engine as it writes greedily, draws, and draws from what filters leave."""
    model, prompt = _model_and_prompt()
    new_tokens, samples = size.pick(100, 3), size.pick(21, 2)
    engines = ["eager", "lean", *_to_compile(model, size)]

    def write(engine: EngineName, choice: str) -> Tensor:
        generator = torch.Generator().manual_seed(1337)
        how = {"engine": engine, "generator": generator, **CHOICES[choice]}
        return generate(model, prompt, new_tokens, **how).tokens

    texts = [[write(engine, choice).tolist() for engine in engines] for choice in CHOICES]
    timed = {
        # Differences of two times are small: each is the mean of some texts.
        f"{engine} {choice}": partial(mean_seconds, partial(write, engine, choice), size.pick(4, 1))
        for engine in engines
        for choice in CHOICES
    }
    rounds = list(interleaved(timed, repeats=samples))
    rows = []
    for engine in engines:
        row: Data = {"engine": engine}
        for choice in ("drawn", "filtered"):
            added = [r[f"{engine} {choice}"] - r[f"{engine} greedy"] for r in rounds]
            row[choice] = spread([1e6 * seconds / new_tokens for seconds in added])
        row["share"] = median(
            [(r[f"{engine} filtered"] / r[f"{engine} greedy"]) - 1 for r in rounds]
        )
        rows.append(row)
    return {
        "samples": samples,
        "new": new_tokens,
        "same_tokens": all(text == row[0] for row in texts for text in row),
        "different_choices": len({str(row[0]) for row in texts}),
        "rows": rows,
    }


CHOICES = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
}


@invariant("speed.sampled")
def engines_draw_the_same(data: Data) -> None:
    """The same generator gives the same text with every engine, and another for each choice.

    With PyTorch's draw, less of a step goes into the choice, the slower the step is; a check is too
    short to show it.
    """
    assert data["same_tokens"], data["same_tokens"]
    assert all(row["drawn"]["samples"] == data["samples"] for row in data["rows"]), data["rows"]
    if data["samples"] > 2:
        assert data["different_choices"] == len(CHOICES), data["different_choices"]
        shares = [row["share"] for row in data["rows"] if row["engine"] != "numba"]
        assert shares[0] == min(shares), shares


@table("speed.sampled", result="speed.sampled")
def sampled_table(data: Data) -> Table:
    """Lay out what each way to choose adds to a greedy token, and as a share of it."""
    rows = [
        [
            code(row["engine"]),
            f"{row['drawn']['median']:.0f} µs",
            f"{row['filtered']['median']:.0f} µs",
            f"{row['share']:.0%}",
        ]
        for row in data["rows"]
    ]
    headers = ["engine", "a temperature adds", "with top-k and top-p", "of the greedy token"]
    return Table(headers, rows, align="lrrr")


# --- Ratios of one run ---

RATIOS = (
    ("numba, greedy", "floor"),
    ("numba, sampled", "floor"),
    ("lean, sampled", "lean, greedy"),
    ("compiled, sampled", "compiled, greedy"),
    ("numba, sampled", "numba, greedy"),
    ("lean, batch", "eager, batch"),
    ("lean, batch", "CTranslate2, batch"),
    ("numba, batch", "eager, batch"),
    ("numba, batch", "CTranslate2, batch"),
    ("eager, batch", "CTranslate2, batch"),
    ("lean, prefill", "eager, prefill"),
    ("compiled, prefill", "eager, prefill"),
    ("numba, prefill", "eager, prefill"),
)
"""What is compared with what, besides our fastest text with CTranslate2's."""


@measurement("speed.ratios", kind="measured", engine="each engine by its name")
def ratios(size: Size) -> Data:
    """Time in one run what the page compares: texts and batches through `generate`, and prefills.

    What an engine cannot run here or yet, such as a batch, is left out with its ratios.
    """
    model, prompt = _model_and_prompt()
    new_tokens, samples, rows = size.pick(100, 3), size.pick(21, 2), size.pick(64, 2)
    names = ["lean", *_to_compile(model, size)]
    theirs, many = to_ctranslate2(model), windows(rows)
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])

    def write(idx: Tensor, engine: EngineName, choice: str) -> list[list[int]]:
        generator = torch.Generator().manual_seed(1337)
        how = {"engine": engine, "generator": generator, **CHOICES[choice]}
        return generate(model, idx, new_tokens, **how).new_tokens.tolist()

    greedy = {f"{name}, greedy": partial(write, prompt, name, "greedy") for name in names}
    greedy["CTranslate2, greedy"] = partial(theirs, prompt.tolist(), new_tokens)
    sampled = {f"{name}, sampled": partial(write, prompt, name, "filtered") for name in names}
    batches = {
        f"{name}, batch": partial(write, many, name, "greedy")
        for name in ("eager", *names)
        if can_run(name, model, rows)
    }
    batches["CTranslate2, batch"] = partial(theirs, many.tolist(), new_tokens)
    room = prompt.shape[1] + new_tokens - 1
    prefills = {f"{name}, prefill": RUNGS[name](model, room).prefill for name in names}
    prefills["eager, prefill"] = lambda idx: model(idx, cache=KVCache.for_model(model, 1, room))

    timed = {"floor": partial(mean_seconds, partial(_read_all, weights, new_tokens))}
    for name, run in (greedy | sampled | batches).items():
        timed[name] = partial(mean_seconds, run)
    for name, prefill in prefills.items():
        timed[name] = partial(mean_seconds, partial(prefill, prompt), size.pick(10, 1))
    with torch.inference_mode():
        rounds = list(interleaved(timed, repeats=samples, warmup=size.pick(2, 1)))
    seconds = {name: spread([times[name] for times in rounds]) for name in timed}
    fastest = min((f"{name}, greedy" for name in names), key=lambda name: seconds[name]["median"])
    return {
        "samples": samples,
        "prompt": prompt.shape[1],
        "new": new_tokens,
        "batch": rows,
        "ctranslate2": version("ctranslate2"),
        "same_tokens": [_all_same(texts) for texts in (greedy, sampled, batches)],
        "seconds": [{"name": name, **told} for name, told in seconds.items()],
        "rows": [
            {
                "one": one,
                "other": other,
                "ratio": spread([times[one] / times[other] for times in rounds]),
            }
            for one, other in ((fastest, "CTranslate2, greedy"), *RATIOS)
            if {one, other} <= timed.keys()
        ],
    }


def _all_same(texts: dict[str, Callable[[], list[list[int]]]]) -> bool:
    """Say whether all of these write the same."""
    first, *others = (write() for write in texts.values())
    return all(text == first for text in others)


@invariant("speed.ratios")
def ratios_compare_what_they_say(data: Data) -> None:
    """The same tokens on both sides, our fastest text first, and no pair missing that was timed."""
    assert all(data["same_tokens"]), data["same_tokens"]
    assert all(row["ratio"]["samples"] == data["samples"] for row in data["rows"]), data["rows"]
    (fastest, other), *pairs = [(row["one"], row["other"]) for row in data["rows"]]
    median_of = {row["name"]: row["median"] for row in data["seconds"]}
    ours = {name for name in median_of if name.endswith(", greedy")} - {"CTranslate2, greedy"}
    assert (fastest, other) == (min(ours, key=median_of.__getitem__), "CTranslate2, greedy"), data
    assert pairs == [pair for pair in RATIOS if median_of.keys() >= set(pair)], pairs


@table("speed.ratios", result="speed.ratios")
def ratios_table(data: Data) -> Table:
    """Lay out how many times as long one takes as the other, and the range over the rounds."""
    rows = [
        [
            row["one"],
            row["other"],
            f"{row['ratio']['median']:.2f}",
            f"{row['ratio']['min']:.2f} to {row['ratio']['max']:.2f}",
        ]
        for row in data["rows"]
    ]
    return Table(["this", "beside this", "times as long", "range"], rows, align="llrr")


# --- What each idea brings ---


@torch.inference_mode()
def _step_seconds(engine: Engine, prompt: Tensor, tokens: list[int]) -> float:
    """Time the steps alone that feed these tokens after a prompt, in seconds a step."""
    engine.prefill(prompt)
    fed = iter([torch.tensor([[token]]) for token in tokens])
    return mean_seconds(lambda: engine.step(next(fed)), len(tokens))


def _time_steps(decoders: dict[str, Engine], prompt: Tensor, size: Size) -> list[Data]:
    """Time the steps alone, in turns, and compare each decoder with the first.

    Raises:
        AssertionError: If one writes another text than the first: it would prove nothing.
    """
    new_tokens, samples = size.pick(100, 3), size.pick(21, 2)
    texts = {name: _greedy(engine, prompt, new_tokens) for name, engine in decoders.items()}
    first, *others = decoders
    assert all(texts[name] == texts[first] for name in others), texts

    timed = {
        name: partial(_step_seconds, engine, prompt, texts[first][:-1])
        for name, engine in decoders.items()
    }
    rounds = list(interleaved(timed, repeats=samples))
    return [
        {
            "name": name,
            "seconds": spread([times[name] for times in rounds]),
            "ratio": spread([times[name] / times[first] for times in rounds]),
        }
        for name in decoders
    ]


def _first_is_one(data: Data) -> None:
    """The others are compared with the first, and what is taken back was worth its while.

    A check has no others, and a ratio a little below 1 would be noise.
    """
    first, *others = data["rows"]
    assert first["ratio"]["min"] == first["ratio"]["max"] == 1, first
    for row in others:
        assert row["ratio"]["samples"] == data["samples"], row
        assert row["ratio"]["median"] > 0.97, row


compiled_steps_are_compared = invariant("speed.compiled")(_first_is_one)
loops_are_compared = invariant("speed.loops")(_first_is_one)


def _ideas_table(rows: list[Data], header: str) -> Table:
    """Lay out one row for each idea that was taken back."""
    cells = [
        [
            row["name"],
            f"{1e6 * row['seconds']['median']:,.0f} µs",
            f"{row['ratio']['median']:.2f} ×",
        ]
        for row in rows
    ]
    return Table([header, "a step", "times the first"], cells, align="lrr")


class _JustInTime(Compiled):
    """The same step through `torch.compile`, which looks at its arguments before each call."""

    def __init__(self, model: GPT) -> None:
        super().__init__(model)
        ahead_of_time = [name for name in compiled_rung.INDUCTOR if name.startswith("aot_inductor")]
        ahead_of_time += ["memory_planning", "always_keep_tensor_constants"]
        options = {k: v for k, v in compiled_rung.INDUCTOR.items() if k not in ahead_of_time}
        step = torch.compile(compiled_rung._Step(model), options=options)
        self.run = lambda inputs: step(*inputs)


def _plain_matvec(linear: nn.Linear, x: Tensor) -> Tensor:
    """Multiply by a call into a library, which the compiler cannot look into."""
    return F.linear(x, linear.weight, linear.bias)


@measurement("speed.compiled", kind="measured", engine="variants of the compiled engine")
def compiled(size: Size) -> Data:
    """Take back one choice of the compiled step at a time."""
    model, prompt = _model_and_prompt()
    decoders: dict[str, Engine] = {"lean, not compiled": Lean(model)}
    if _to_compile(model, size):
        decoders = {"as it is": Compiled(model)}
        thresholds = ("realize_acc_reads_threshold", "realize_opcount_threshold")
        usual = {name: getattr(torch._inductor.config, name) for name in thresholds}
        for name, options, matvec in (
            ("an allocation for each result", {"memory_planning": False}, compiled_rung._matvec),
            ("the usual thresholds: LayerNorm in each row", usual, compiled_rung._matvec),
            ("products as calls of F.linear", {}, _plain_matvec),
        ):
            with (
                patch.dict(compiled_rung.INDUCTOR, options),
                patch.object(compiled_rung, "_matvec", matvec),
            ):
                decoders[name] = Compiled(copy.deepcopy(model))
        decoders["torch.compile at run time"] = _JustInTime(model)
    return {"samples": size.pick(21, 2), "rows": _time_steps(decoders, prompt, size)}


@table("speed.compiled", result="speed.compiled")
def compiled_table(data: Data) -> Table:
    """Lay out what each choice is worth."""
    return _ideas_table(data["rows"], "the compiled step")


def _with_loop(model: GPT, name: str, loop: Callable) -> Jitted:
    """Make the rung of plain loops with one of them in another form."""
    engine = Jitted(model)
    engine.decode = _jit(LOOPS | {name: loop})["_decode"]
    return engine


def _exp_of_numpy(x):
    return np.exp(x)


def _gelu_of_numpy(x):
    for i in range(x.size):
        u = np.float32(0.7978845608) * x[i] * (np.float32(1) + np.float32(0.044715) * x[i] * x[i])
        x[i] *= np.float32(0.5) * (np.float32(1) + np.tanh(u))


def _norm_of_arrays(x, weight, bias, y):
    centred = x - x.mean()
    y[:] = centred / np.sqrt((centred * centred).mean() + np.float32(1e-5)) * weight + bias


def _four_rows(weight, x, y):
    whole = y.size // 4 * 4
    for i in range(0, whole, 4):
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for j in range(x.size):
            a += weight[i, j] * x[j]
            b += weight[i + 1, j] * x[j]
            c += weight[i + 2, j] * x[j]
            d += weight[i + 3, j] * x[j]
        y[i] += a
        y[i + 1] += b
        y[i + 2] += c
        y[i + 3] += d
    for i in range(whole, y.size):
        total = np.float32(0)
        for j in range(x.size):
            total += weight[i, j] * x[j]
        y[i] += total


@measurement("speed.loops", kind="measured", engine="variants of the numba engine")
def loops(size: Size) -> Data:
    """Write one of the loops that numba compiles in another way at a time."""
    model, prompt = _model_and_prompt()
    decoders: dict[str, Engine] = {"lean, no loops": Lean(model)}
    if _to_compile(model, size):
        decoders = {
            "as it is": Jitted(model),
            "np.exp in place of the polynomial": _with_loop(model, "_exp", _exp_of_numpy),
            "np.tanh in the GELU": _with_loop(model, "_gelu", _gelu_of_numpy),
            "LayerNorm of whole arrays": _with_loop(model, "_norm", _norm_of_arrays),
            "four rows of a matrix at once": _with_loop(model, "_add_matvec", _four_rows),
        }
    return {"samples": size.pick(21, 2), "rows": _time_steps(decoders, prompt, size)}


@table("speed.loops", result="speed.loops")
def loops_table(data: Data) -> Table:
    """Lay out what each way of writing a loop costs."""
    return _ideas_table(data["rows"], "the step in plain loops")


def _no_attend(q, keys, values, first, p, y):
    y[:] = q


def _no_matvec(weight, x, y):
    y[0] += x[0]


def _no_decode(token, at, places, kv, logits):
    logits[0] = 0


@measurement("speed.budget", kind="measured", engine="each engine by its name")
def budget(size: Size) -> Data:
    """Leave out one part of the step in plain loops at a time, and time what is left."""
    model, prompt = _model_and_prompt()
    new_tokens, samples = size.pick(100, 3), size.pick(21, 2)
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    decoders: dict[str, Engine] = {"the whole step": Lean(model)}
    if _to_compile(model, size):
        decoders = {
            "the whole step": Jitted(model),
            "without attention": _with_loop(model, "_attend", _no_attend),
            "without the products": _with_loop(model, "_add_matvec", _no_matvec),
            "the call alone": _with_loop(model, "_decode", _no_decode),
        }
    timed = {
        name: partial(_step_seconds, engine, prompt, [1] * (new_tokens - 1))
        for name, engine in decoders.items()
    }
    timed["reading the weights"] = partial(mean_seconds, weights.sum, new_tokens)
    rounds = list(interleaved(timed, repeats=samples))
    seconds = {name: spread([times[name] for times in rounds]) for name in timed}
    shown = {name: _whole_microseconds(told["median"]) for name, told in seconds.items()}
    return {
        "samples": samples,
        "rows": [
            {
                "name": name,
                "seconds": seconds[name],
                "microseconds": shown[name],
                "less": shown["the whole step"] - shown[name],
            }
            for name in timed
        ],
    }


@invariant("speed.budget")
def a_step_takes_time(data: Data) -> None:
    """A part is less than the whole, and what a row says is what a reader can subtract."""
    whole, *others = data["rows"]
    assert whole["name"] == "the whole step", whole
    assert others[-1]["name"] == "reading the weights", others
    for row in data["rows"]:
        assert row["seconds"]["samples"] == data["samples"], row
        assert row["less"] == whole["microseconds"] - row["microseconds"], row
    if data["samples"] > 2:
        assert all(row["less"] > 0 for row in others), others


@table("speed.budget", result="speed.budget")
def budget_table(data: Data) -> Table:
    """Lay out what is left, and what the missing part had taken."""
    rows = [
        [
            row["name"],
            f"{row['microseconds']} µs",
            f"{row['less']} µs" if row["less"] else "",
        ]
        for row in data["rows"]
    ]
    return Table(["the step in plain loops", "takes", "less than the whole"], rows, align="lrr")


# --- One matrix, one vector ---


def _products(weight: Tensor, bias: Tensor, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Spell `weight @ x + bias` in several ways, each of the shape that its rung uses."""
    row, stack, column = x.view(1, -1), x.view(1, 1, -1), weight.t().contiguous()
    return {
        "F.linear, (1, 1, n)": lambda: F.linear(stack, weight, bias),
        "F.linear, (1, n)": lambda: F.linear(row, weight, bias),
        "torch.addmv, (n,)": lambda: torch.addmv(bias, weight, x),
        "torch.addmm, transposed copy": lambda: torch.addmm(bias, row, column),
        "(W * x).sum(-1) + b": lambda: (weight * x).sum(-1) + bias,
    }


def _with_onednn(enabled: bool, function: Callable[[], Tensor], calls: int) -> float:
    """Time a product with oneDNN on or off, in seconds a call."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = enabled
    try:
        return mean_seconds(function, calls)
    finally:
        torch.backends.mkldnn.enabled = before


@measurement("speed.matvec", kind="measured", engine="no model")
def matvec(size: Size) -> Data:
    """Time one product of the model's largest shape in several spellings."""
    weight, bias, x = torch.randn(512, 128), torch.randn(512), torch.randn(128)
    products, calls = _products(weight, bias, x), size.pick(500, 2)
    samples = size.pick(31, 2)
    timed = {
        f"{name} {enabled}": partial(_with_onednn, enabled, product, calls)
        for name, product in products.items()
        for enabled in (True, False)
    }
    with torch.inference_mode():
        exact = weight.double() @ x.double() + bias.double()
        error = max(
            (product().flatten() - exact).abs().max().item() for product in products.values()
        )
        rounds = list(interleaved(timed, repeats=samples))
    rows = [
        {
            "product": name,
            "seconds": spread([r[f"{name} True"] for r in rounds]),
            "without_onednn": spread([r[f"{name} False"] for r in rounds]),
            "ratio": spread([r[f"{name} False"] / r[f"{name} True"] for r in rounds]),
            "of_addmv": _sum_up(rounds, f"{name} True", "torch.addmv, (n,) True"),
        }
        for name in products
    ]
    return {"samples": samples, "shape": [512, 128], "error": error, "rows": rows}


@invariant("speed.matvec")
def products_agree(data: Data) -> None:
    """Every spelling computes the same product, and the page's words about them hold.

    The switch changes no ratio that stays on one side of 1, and the last spelling is the slowest.
    A check is too short for these.
    """
    assert 0 < data["error"] < 1e-3, data["error"]
    for row in data["rows"]:
        assert row["ratio"]["samples"] == data["samples"], row
        if data["samples"] > 2:
            assert row["ratio"]["min"] <= 1 <= row["ratio"]["max"], row
    of_addmv = [row["of_addmv"] for row in data["rows"]]
    assert of_addmv[2] == 1, of_addmv
    if data["samples"] > 2:
        assert of_addmv[-1] == max(of_addmv), of_addmv


@table("speed.matvec", result="speed.matvec")
def matvec_table(data: Data) -> Table:
    """Lay out microseconds a product, with oneDNN and without."""
    rows = [
        [
            code(row["product"]),
            f"{1e6 * row['seconds']['median']:.1f} µs",
            f"{1e6 * row['without_onednn']['median']:.1f} µs",
            f"{row['ratio']['median']:.2f}",
            f"{row['ratio']['min']:.2f} to {row['ratio']['max']:.2f}",
        ]
        for row in data["rows"]
    ]
    return Table(
        ["512 × 128 times a vector", "oneDNN on", "off", "off / on", "range"], rows, align="lrrrr"
    )
