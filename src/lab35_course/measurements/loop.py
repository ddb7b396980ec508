"""What a token costs with and without the cache, and what a wrong position does to it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lab35 import KVCache, decode_steps, generate, load_pretrained, token_forwards
from lab35.timing import compare_texts, interleaved, time_steps
from lab35_course.plain import code
from lab35_course.results import Data, Size, Table, invariant, measurement, table

PROMPT = "It was a dark night and"
CASES = ((1, 127), (16, 10), (16, 100), (64, 64), (120, 8))


@measurement("loop.cost", kind="exact")
def cost(size: Size) -> Data:
    """Count the tokens that really run through the model, in both loops."""
    model, _ = load_pretrained()
    rows = []
    for P, N in CASES:
        prompt = torch.zeros(1, P, dtype=torch.int64)
        cached = generate(model, prompt, N, temperature=0)
        uncached = generate(model, prompt, N, temperature=0, use_cache=False)
        rows.append(
            {
                "prompt": P,
                "new": N,
                "uncached": uncached.token_forwards,
                "cached": cached.token_forwards,
            }
        )
    new_tokens = list(range(1, 113))
    return {
        "rows": rows,
        "lesson": {
            "uncached": token_forwards(16, 100, use_cache=False),
            "cached": token_forwards(16, 100, use_cache=True),
            "factor": token_forwards(16, 100, use_cache=False)
            / token_forwards(16, 100, use_cache=True),
        },
        "curve": {
            "prompt": 16,
            "new": new_tokens,
            "uncached": [token_forwards(16, N, use_cache=False) for N in new_tokens],
            "cached": [token_forwards(16, N, use_cache=True) for N in new_tokens],
        },
    }


@invariant("loop.cost")
def counts_follow_the_formula(data: Data) -> None:
    """Compare what was counted with N·P + N(N − 1)/2 and P + N − 1."""
    for row in data["rows"]:
        P, N = row["prompt"], row["new"]
        assert row["uncached"] == N * P + N * (N - 1) // 2, row
        assert row["cached"] == P + N - 1, row


@table("loop.cost", result="loop.cost")
def cost_table(data: Data) -> Table:
    """Lay out the counts with their ratio."""
    rows = [
        [
            str(row["prompt"]),
            str(row["new"]),
            f"{row['uncached']:,}",
            f"{row['cached']:,}",
            f"{row['uncached'] / row['cached']:.1f} ×",
        ]
        for row in data["rows"]
    ]
    headers = ["prompt, P", "new, N", "uncached", "cached", "ratio"]
    return Table(headers, rows, align="rrrrr")


@measurement("loop.limit", kind="exact")
def limit(size: Size) -> Data:
    """Run both loops into the end of the block."""
    model, _ = load_pretrained()
    rows = []
    for P, N in ((120, 8), (120, 9), (120, 20), (128, 20)):
        prompt = torch.zeros(1, P, dtype=torch.int64)
        row: Data = {"prompt": P, "asked": N}
        for name, use_cache in (("cached", True), ("uncached", False)):
            made = generate(model, prompt, N, temperature=0, use_cache=use_cache)
            row[name] = {"tokens": made.tokens.shape[1], "stop_reason": made.stop_reason}
        rows.append(row)
    return {"rows": rows}


@table("loop.limit", result="loop.limit")
def limit_table(data: Data) -> Table:
    """Lay out lengths and stop reasons side by side."""
    rows = [
        [
            f"{row['prompt']} + {row['asked']}",
            str(row["cached"]["tokens"]),
            code(row["cached"]["stop_reason"]),
            str(row["uncached"]["tokens"]),
            code(row["uncached"]["stop_reason"]),
        ]
        for row in data["rows"]
    ]
    headers = ["prompt + asked", "cached", "stop reason", "uncached", "stop reason"]
    return Table(headers, rows, align="rrlrl")


@measurement("loop.speed", kind="measured", engine="the eager engine")
def speed(size: Size) -> Data:
    """Time both loops side by side, step by step: 16 prompt tokens, 100 greedy ones.

    This is the one measurement of a text that the model itself writes; other pages quote it.
    """
    model, tokenizer = load_pretrained()
    text = "It was a dark night and the wind was howling in the chimney as we sat by the fire"
    prompt = torch.tensor([tokenizer.encode(text)[:16]])
    new_tokens = size.pick(100, 3)
    write = partial(decode_steps, model, prompt, new_tokens, temperature=0)
    loops = {
        "uncached": partial(write, use_cache=False),
        "cached": partial(write, engine="eager"),
    }
    fed = {name: sum(step.fed for step in steps()) for name, steps in loops.items()}
    timed = {name: lambda steps=steps: time_steps(steps()) for name, steps in loops.items()}
    rounds = list(interleaved(timed, repeats=size.pick(31, 2), warmup=size.pick(3, 1)))
    return compare_texts(rounds) | {
        "prompt": prompt.shape[1],
        "new": new_tokens,
        "forwards_ratio": fed["uncached"] / fed["cached"],
    }


@invariant("loop.speed")
def both_loops_write_the_same(data: Data) -> None:
    """A faster loop that writes something else would prove nothing; the counts are the formula's.

    The first token comes after the same forward in both, so it is no later than the whole text.
    """
    assert data["same_tokens"], data["same_tokens"]
    P, N = data["prompt"], data["new"]
    counted = token_forwards(P, N, use_cache=False) / token_forwards(P, N, use_cache=True)
    assert abs(data["forwards_ratio"] / counted - 1) < 1e-4, data["forwards_ratio"]
    for variant in data["variants"].values():
        first, later = variant["time_to_first_token"]["min"], variant["time_per_output_token"]
        assert 0 < first < variant["seconds"]["min"], variant
        assert later["samples"] == data["samples"], variant


@table("loop.speed", result="loop.speed")
def speed_table(data: Data) -> Table:
    """Lay out milliseconds a text, microseconds a token, and the paired ratio."""
    rows = []
    for name in ("uncached", "cached"):
        seconds = data["variants"][name]["seconds"]
        rows.append(
            [
                name,
                f"{1e3 * seconds['median']:.1f} ms",
                f"{1e3 * seconds['min']:.1f} ms",
                f"{1e6 * seconds['median'] / data['new']:.0f} µs",
                f"{data['variants'][name]['speedup']['median']:.2f} ×",
            ]
        )
    headers = ["loop", "median", "fastest", "a token", "speed-up"]
    return Table(headers, rows, align="lrrrr")


@torch.inference_mode()
def _decode(positions: str, steps: int) -> tuple[list[int], Tensor]:
    """Decode greedily with the positions told; return the tokens, and every step's logits."""
    model, tokenizer = load_pretrained()
    prompt = torch.tensor([tokenizer.encode(PROMPT)])
    cache = KVCache(model.config, batch_size=1)
    logits, _ = model(prompt, cache=cache)
    tokens, rows = [], []
    for _ in range(steps):
        rows.append(logits[0, -1])
        token = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(token.item())
        wrong = {"zero": 0, "one behind": cache.length - 1, "right": cache.length}[positions]
        logits, _ = model(token, cache=cache, position_ids=torch.tensor([[wrong]]))
    return tokens, torch.stack(rows)


@measurement("loop.positions", kind="measured")
def wrong_positions(size: Size) -> Data:
    """Decode with positions that are wrong, and compare with the right ones."""
    steps = size.pick(48, 4)
    right, right_logits = _decode("right", steps)
    _, tokenizer = load_pretrained()
    rows = []
    for name in ("right", "one behind", "zero"):
        tokens, logits = _decode(name, steps)
        same = [a == b for a, b in zip(tokens, right, strict=True)]
        agree = same.index(False) if False in same else steps
        rows.append(
            {
                "positions": name,
                # Step 0 reads the prefill's logits, which no decode position has touched.
                "difference": (logits[1] - right_logits[1]).abs().max().item(),
                "agree": agree,
                "text": tokenizer.decode(tokens),
            }
        )
    return {"steps": steps, "rows": rows}


@invariant("loop.positions")
def right_positions_agree(data: Data) -> None:
    """The row of right positions is the reference, and wrong ones move the logits."""
    right, *wrong = data["rows"]
    assert right["difference"] == 0, right
    assert right["agree"] == data["steps"], right
    assert all(row["difference"] > 0.01 for row in wrong), wrong


@table("loop.positions", result="loop.positions")
def positions_table(data: Data) -> Table:
    """Lay out the damage beside the text."""
    rows = [
        [
            row["positions"],
            f"{row['difference']:.2f}",
            f"{row['agree']} of {data['steps']}",
            " ".join(row["text"].split()),
        ]
        for row in data["rows"]
    ]
    headers = ["position of a decoded token", "logit error", "tokens before it strays", "text"]
    return Table(headers, rows, align="lrrl")
