"""Claims that circulate: a cache for a small model, a second thread, and a nucleus of nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lab35 import GPT, GPTConfig, KVCache, filtered_logits, generate, load_pretrained
from lab35_course.plain import outcome
from lab35_course.results import (
    Data,
    Size,
    Table,
    invariant,
    measurement,
    table,
    threads,
    time_paired,
)

SMALL = GPTConfig(n_head=8, n_embd=256)
LENGTHS = ((16, 16), (16, 48), (16, 112), (112, 16))
"""Prompt and new tokens; the last two fill the block."""


# --- Does the cache pay for a small model? ---


@torch.inference_mode()
def _largest_difference(model: GPT, idx: Tensor) -> float:
    """Compare the logits of one cached decode after another with one uncached forward."""
    cache = KVCache(model.config, batch_size=1)
    steps = [model(token, cache=cache)[0] for token in idx.split(1, dim=1)]
    return (torch.cat(steps, dim=1) - model(idx)[0]).abs().max().item()


@measurement("claims.small_model", kind="measured", engine="the eager engine")
def small_model(size: Size) -> Data:
    """Time both loops of a 4 × 256 model; random weights take as long as trained ones."""
    model = GPT(SMALL).eval()
    samples = size.pick(15, 2)
    rows = []
    for P, N in size.pick(LENGTHS, ((4, 2),)):
        write = partial(generate, model, torch.randint(SMALL.vocab_size, (1, P)), N, temperature=0)
        loops = {
            "uncached": partial(write, use_cache=False),
            "cached": partial(write, engine="eager"),
        }
        row: Data = {name: {"token_forwards": loops[name]().token_forwards} for name in loops}
        timed = time_paired(loops, repeats=samples)["variants"]
        for name in loops:
            row[name]["seconds"] = timed[name]["seconds"]
        rows.append({"prompt": P, "new": N, "speedup": timed["cached"]["speedup"], **row})
    idx = torch.randint(SMALL.vocab_size, (1, size.pick(SMALL.block_size, 8)))
    return {
        "samples": samples,
        "parameters": model.num_parameters,
        "difference": _largest_difference(model, idx),
        "rows": rows,
        "shortest": rows[0]["speedup"]["median"],
        "longest": max(rows, key=lambda row: row["new"])["speedup"]["median"],
    }


@invariant("claims.small_model")
def both_loops_do_their_work(data: Data) -> None:
    """The two loops feed what the formulas say, and compute the same logits."""
    # One token and many take different kernels: 0 would come of comparing a loop with itself.
    assert 0 < data["difference"] < 1e-4, data["difference"]
    for row in data["rows"]:
        P, N = row["prompt"], row["new"]
        assert row["uncached"]["token_forwards"] == N * P + N * (N - 1) // 2, row
        assert row["cached"]["token_forwards"] == P + N - 1, row
        assert row["speedup"]["samples"] == data["samples"], row


@table("claims.small_model", result="claims.small_model")
def small_model_table(data: Data) -> Table:
    """Lay out milliseconds a text for each length, and the paired ratio."""
    rows = [
        [
            f"{row['prompt']} + {row['new']}",
            f"{1e3 * row['uncached']['seconds']['median']:.0f} ms",
            f"{1e3 * row['cached']['seconds']['median']:.0f} ms",
            f"{row['speedup']['median']:.1f}",
            f"{row['speedup']['min']:.1f} to {row['speedup']['max']:.1f}",
        ]
        for row in data["rows"]
    ]
    headers = ["prompt + new", "uncached", "cached", "times faster", "over the rounds"]
    return Table(headers, rows, align="rrrrr")


# --- Is a second thread faster? ---


def _on(count: int, write: Callable[[], object]) -> None:
    """Write a text on so many threads."""
    with threads(count):
        write()


@measurement("claims.threads", kind="measured", threads=2, engine="the eager engine")
def two_threads(size: Size) -> Data:
    """Time each loop on one thread and on two, which take turns."""
    model, tokenizer = load_pretrained()
    ids = tokenizer.encode("It was a dark night and the wind was howling in the chimney")
    prompt, new_tokens = torch.tensor([ids[:16]]), size.pick(100, 3)
    samples = size.pick(31, 2)
    found: Data = {"samples": samples, "prompt": prompt.shape[1], "new": new_tokens}
    for name, use_cache in (("cached", True), ("uncached", False)):
        write = partial(generate, model, prompt, new_tokens, temperature=0, use_cache=use_cache)
        write = partial(write, engine="eager")
        timed = time_paired(
            {"one": partial(_on, 1, write), "two": partial(_on, 2, write)}, repeats=samples
        )["variants"]
        found[name] = {"speedup": timed["two"]["speedup"]}
    return found


@invariant("claims.threads")
def every_ratio_was_sampled(data: Data) -> None:
    """Each ratio comes of as many rounds as the small print says."""
    for name in ("cached", "uncached"):
        assert data[name]["speedup"]["samples"] == data["samples"], data[name]


@table("claims.threads", result="claims.threads")
def threads_table(data: Data) -> Table:
    """Lay out the paired ratio for each loop; the times of one thread are those of `loop.speed`."""
    rows = [
        [
            name,
            f"{data[name]['speedup']['median']:.2f}",
            f"{data[name]['speedup']['min']:.2f} to {data[name]['speedup']['max']:.2f}",
        ]
        for name in ("cached", "uncached")
    ]
    return Table(["loop", "two threads, times faster", "over the rounds"], rows, align="lrr")


# --- What is a nucleus of nothing? ---


@measurement("claims.top_p", kind="exact")
def top_p(size: Size) -> Data:
    """Hand the edges of p to lab35 and to Hugging Face, on random rows without ties."""
    from transformers.generation.logits_process import TopPLogitsWarper

    logits = torch.randn(64, 512)
    rows = []
    for p in (-0.1, 0.0, 1.0, 1.1):
        ours = partial(filtered_logits, logits, top_p=p)
        rows.append(
            {
                "p": p,
                "lab35": _kept(ours),
                "hugging_face": _kept(lambda p=p: TopPLogitsWarper(p)(None, logits)),
            }
        )
    greedy = TopPLogitsWarper(0.0)(None, logits).softmax(-1)
    chosen = greedy.gather(-1, logits.argmax(-1, keepdim=True))
    return {"rows": rows, "zero_is_greedy": bool((chosen == 1).all())}


def _kept(filter_logits: Callable[[], Tensor]) -> str:
    """Say how many tokens of a row a filter keeps, or name its refusal."""
    try:
        counts = filter_logits().isfinite().sum(-1)
    except ValueError:
        return "ValueError"
    assert (counts == counts[0]).all(), counts
    return str(counts[0].item())


@invariant("claims.top_p")
def zero_keeps_the_argmax(data: Data) -> None:
    """The one token that Hugging Face keeps at p = 0 is the likeliest."""
    assert data["zero_is_greedy"], data


@table("claims.top_p", result="claims.top_p")
def top_p_table(data: Data) -> Table:
    """Lay out how many of 512 tokens each keeps."""
    rows = [
        [f"p = {row['p']:g}".replace("-", "−"), *map(outcome, (row["lab35"], row["hugging_face"]))]
        for row in data["rows"]
    ]
    return Table(["setting", "lab35 keeps", "Hugging Face keeps"], rows, align="lrr")
