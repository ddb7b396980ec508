"""The cache: the memory it takes, the bytes it copies, and the time it saves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lab35 import (
    GPT,
    GPTConfig,
    GrowingCache,
    KVCache,
    cache_bytes,
    load_pretrained,
    token_forwards,
)
from lab35_course.results import Data, Size, Table, invariant, measurement, table, time_paired

GPT2_SMALL = GPTConfig(vocab_size=50_257, block_size=1024, n_layer=12, n_head=12, n_embd=768)
PROMPT, NEW_TOKENS = 16, 100


# Memory


def _footprint(name: str, config: GPTConfig, dtype: torch.dtype) -> Data:
    """Weigh a model, and a full row of its cache, without allocating either."""
    with torch.device("meta"):
        parameters = GPT(config).num_parameters
    row_bytes = cache_bytes(
        n_layer=config.n_layer,
        n_kv_head=config.n_head,
        head_dim=config.head_dim,
        length=config.block_size,
        dtype=dtype,
    )
    weight_bytes = parameters * dtype.itemsize
    return {
        "name": name,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": parameters,
        "weight_bytes": weight_bytes,
        "length": config.block_size,
        "row_bytes": row_bytes,
        "share": row_bytes / weight_bytes,
        "overtakes": weight_bytes // row_bytes + 1,
    }


@measurement("cache.memory", kind="exact")
def memory(size: Size) -> Data:
    """Weigh the caches of three models, and of GPT-2 small's cheaper relatives."""
    models = {
        "this": _footprint("4 × 128, this course", GPTConfig(), torch.float32),
        "wide": _footprint("4 × 256", GPTConfig(n_head=8, n_embd=256), torch.float32),
        "gpt2": _footprint("12 × 768, GPT-2 small", GPT2_SMALL, torch.bfloat16),
    }
    variants = []
    for n_kv_head, dtype in (
        (12, torch.bfloat16),
        (12, torch.int8),
        (4, torch.bfloat16),
        (4, torch.int8),
        (1, torch.bfloat16),
    ):
        row_bytes = cache_bytes(
            n_layer=12, n_kv_head=n_kv_head, head_dim=64, length=1024, dtype=dtype
        )
        variants.append(
            {
                "n_kv_head": n_kv_head,
                "bits": 8 * dtype.itemsize,
                "row_bytes": row_bytes,
                "overtakes": models["gpt2"]["weight_bytes"] // row_bytes + 1,
            }
        )
    return {"models": models, "variants": variants}


@table("cache.memory", result="cache.memory")
def memory_table(data: Data) -> Table:
    """Lay out what a model and a full row of its cache take."""
    rows = [
        [
            f"{model['name']}, {model['dtype']}",
            f"{model['weight_bytes']:,}",
            f"{model['length']:,}",
            f"{model['row_bytes']:,}",
            f"{100 * model['share']:.1f} %",
            str(model["overtakes"]),
        ]
        for model in data["models"].values()
    ]
    headers = [
        "Model",
        "Bytes of weights",
        "Positions",
        "Bytes of cache a row",
        "Of the weights",
        "Overtakes at batch",
    ]
    return Table(headers, rows, "lrrrrr")


@table("cache.variants", result="cache.memory")
def variants_table(data: Data) -> Table:
    """Lay out what fewer key-value heads and narrower elements save."""
    rows = [
        [
            str(variant["n_kv_head"]),
            str(variant["bits"]),
            f"{variant['row_bytes']:,}",
            str(variant["overtakes"]),
        ]
        for variant in data["variants"]
    ]
    headers = ["Key-value heads", "Bits an element", "Bytes of cache a row", "Overtakes at batch"]
    return Table(headers, rows, "rrrr")


# Copies


class _CopiedBytes(TorchDispatchMode):
    """Count the bytes that `torch.cat` and slice assignment write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.cat.default, torch.ops.aten.copy_.default):
            self.count += out.nbytes
        return out


def _copied(cache: KVCache | GrowingCache, model: GPT) -> Data:
    """Count what a cache copies in the prefill and in each decode step."""
    forwards = []
    idx = torch.zeros(1, PROMPT + NEW_TOKENS - 1, dtype=torch.int64)
    for chunk in idx.split([PROMPT, *[1] * (NEW_TOKENS - 1)], dim=1):
        with torch.inference_mode(), _CopiedBytes() as copied:
            model(chunk, cache=cache)
        forwards.append(copied.count)
    total = sum(forwards)
    return {"forwards": forwards, "total": total, "positions": total // _position_bytes(1)}


@measurement("cache.copied", kind="exact")
def copied(size: Size) -> Data:
    """Count the bytes that each cache copies while 100 tokens follow 16."""
    model = GPT(GPTConfig()).eval()
    static = _copied(KVCache(model.config, 1), model)
    growing = _copied(GrowingCache(model.config, 1), model)
    return {
        "prompt": PROMPT,
        "new": NEW_TOKENS,
        "static": static,
        "growing": growing,
        "ratio": growing["total"] / static["total"],
    }


def _position_bytes(length: int) -> int:
    return cache_bytes(n_layer=4, n_kv_head=4, head_dim=32, length=length)


@invariant("cache.copied")
def copies_follow_the_formula(data: Data) -> None:
    """Static copies the new positions, growing all of them, as the two loops run tokens."""
    lengths = range(PROMPT, PROMPT + NEW_TOKENS)
    new = [PROMPT, *[1] * (NEW_TOKENS - 1)]
    assert data["static"]["forwards"] == [_position_bytes(t_new) for t_new in new]
    assert data["growing"]["forwards"] == [_position_bytes(length) for length in lengths]
    for name, use_cache in (("static", True), ("growing", False)):
        assert data[name]["positions"] == token_forwards(PROMPT, NEW_TOKENS, use_cache=use_cache)


@table("cache.copied", result="cache.copied")
def copied_table(data: Data) -> Table:
    """Lay out a few forwards, each with what was copied up to its end."""
    rows = []
    for length in (16, 17, 32, 64, 115):
        index = length - data["prompt"]
        static, growing = data["static"]["forwards"], data["growing"]["forwards"]
        rows.append(
            [
                f"{length}, prefill" if index == 0 else str(length),
                f"{static[index]:,}",
                f"{growing[index]:,}",
                f"{sum(static[: index + 1]):,}",
                f"{sum(growing[: index + 1]):,}",
            ]
        )
    headers = ["Stored", "Static: bytes", "Growing: bytes", "Static: in all", "Growing: in all"]
    return Table(headers, rows, "rrrrr")


# Time


def _greedy(
    model: GPT, idx: Tensor, new_tokens: int, cache: KVCache | GrowingCache | None
) -> Tensor:
    """Run the bare loop, the same for every cache and for none."""
    fed = idx
    with torch.inference_mode():
        for _ in range(new_tokens):
            logits, _ = model(fed, cache=cache)
            token = logits[:, -1].argmax(dim=-1, keepdim=True)
            idx = torch.cat((idx, token), dim=1)
            fed = idx if cache is None else token
    return idx


@measurement("cache.growing", kind="measured", engine="the eager engine")
def growing(size: Size) -> Data:
    """Time the loop with a static cache, a growing one, and none, side by side."""
    model, tokenizer = load_pretrained()
    new_tokens = size.pick(NEW_TOKENS, 4)
    ids = tokenizer.encode("“You see, my dear Watson, but you do not observe,” said Holmes.")
    prompt = torch.tensor([ids[:PROMPT]])
    loops = {
        "uncached": lambda: _greedy(model, prompt, new_tokens, None),
        "growing": lambda: _greedy(model, prompt, new_tokens, GrowingCache(model.config, 1)),
        "static": lambda: _greedy(model, prompt, new_tokens, KVCache(model.config, 1)),
    }
    texts = [loop() for loop in loops.values()]
    return {
        "prompt": prompt.shape[1],
        "new": new_tokens,
        "same_tokens": all(torch.equal(texts[0], text) for text in texts),
        **time_paired(loops, repeats=size.pick(15, 1), baseline="uncached"),
    }


@invariant("cache.growing")
def loops_write_the_same(data: Data) -> None:
    """Loops that are compared must do the same work."""
    assert data["same_tokens"]
    assert data["prompt"] == PROMPT


@table("cache.growing", result="cache.growing")
def growing_table(data: Data) -> Table:
    """Lay out the time of a new token, and how many times faster than without a cache."""
    rows = []
    for name, timed in data["variants"].items():
        microseconds = 1e6 / data["new"]
        median, least = (timed["seconds"][key] * microseconds for key in ("median", "min"))
        speedup = timed["speedup"]
        rows.append(
            [
                name,
                f"{median:,.0f}",
                f"{least:,.0f}",
                f"{speedup['median']:.1f}",
                f"{speedup['min']:.1f} to {speedup['max']:.1f}",
            ]
        )
    headers = ["Cache", "µs a token, median", "least", "Times faster", "over the rounds"]
    return Table(headers, rows, "lrrrr")
