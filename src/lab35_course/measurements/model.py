"""The model: what its parts cost, what it expects after each token, and what breaks it unseen."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab35 import GPT, GPTConfig, KVCache, load_pretrained
from lab35.timing import count_flops
from lab35_course.plain import Markdown, code
from lab35_course.results import Data, Size, Table, invariant, measurement, table

SENTENCE = " said Sherlock"
PROMPT = "It was a dark night and"
HEADS = ((0, 0), (0, 3))
"""Layer and head: one looks at the token before, the other at the beginning of the word."""


def _spelled(token: str) -> str:
    """Show a token: a space as the sign that stands for it elsewhere."""
    return token.replace(" ", "␣").replace("\n", "⏎")


# What each part costs

SHARES = {"mlp": ("up", "down"), "attention": ("qkv", "output"), "embedding": ("token",)}
"""Shares of the parameters that the page quotes."""


@measurement("model.parts", kind="exact")
def parts(size: Size) -> Data:
    """Count the parameters of each part, and what the last of 128 tokens costs there."""
    config = GPTConfig()
    model = GPT(config).eval()
    block = model.blocks[0]
    x = torch.zeros(1, 1, config.n_embd)  # the token that is fed last
    q = torch.zeros(1, config.n_head, 1, config.head_dim)
    k = v = q.expand(-1, -1, config.block_size, -1)
    L = config.n_layer
    work = {
        "token": ("token embedding", 1, [model.wte], lambda: model.wte(torch.zeros(1, 1).long())),
        "position": ("position embedding", 1, [model.wpe], lambda: model.wpe.weight[:1]),
        "norms": (
            "two LayerNorms",
            L,
            [block.ln_1, block.ln_2],
            lambda: block.ln_2(block.ln_1(x)),
        ),
        "qkv": ("queries, keys, values", L, [block.attn.qkv], lambda: block.attn.qkv(x)),
        "attention": (
            "attention, no weights",
            L,
            [],
            lambda: F.scaled_dot_product_attention(q, k, v),
        ),
        "output": ("attention's output", L, [block.attn.proj], lambda: block.attn.proj(x)),
        "up": ("MLP, up", L, [block.fc], lambda: block.fc(x)),
        "down": ("MLP, down", L, [block.proj], lambda: block.proj(x.repeat(1, 1, 4))),
        "last": ("last LayerNorm", 1, [model.ln_f], lambda: model.ln_f(x)),
        "head": ("head, tied", 1, [], lambda: F.linear(x, model.wte.weight)),
    }
    rows = {}
    for key, (name, times, modules, run) in work.items():
        weights = [p for module in modules for p in module.parameters()]
        with torch.inference_mode():
            flops = times * count_flops(run)
        rows[key] = {
            "part": name,
            "times": times,
            "parameters": times * sum(p.numel() for p in weights),
            "bytes": times * sum(p.nbytes for p in weights),
            "flops": flops,
        }
    cache = KVCache(config, 1)
    idx = torch.zeros(1, config.block_size, dtype=torch.int64)
    with torch.inference_mode():
        model(idx[:, :-1], cache=cache)
        flops = count_flops(lambda: model(idx[:, -1:], cache=cache))
    return {
        "rows": rows,
        "positions": config.block_size,
        "parameters": model.num_parameters,
        "bytes": sum(p.nbytes for p in model.parameters()),
        "flops": flops,
        "kept": cache.nbytes,
        "shares": {
            name: sum(rows[key]["parameters"] for key in keys) / model.num_parameters
            for name, keys in SHARES.items()
        },
    }


@invariant("model.parts")
def parts_make_the_whole(data: Data) -> None:
    """What the parts cost one by one is what the model costs."""
    for key in ("parameters", "bytes", "flops"):
        assert data[key] == sum(row[key] for row in data["rows"].values()), key
    assert data["bytes"] == 4 * data["parameters"], data["bytes"]


@table("model.parts", result="model.parts")
def parts_table(data: Data) -> Table:
    """Lay out the parts in the order in which a token meets them."""

    def cells(name: str, row: Data) -> list[str]:
        return [name, *(f"{row[key]:,}" for key in ("parameters", "bytes", "flops"))]

    rows = [
        cells(row["part"] + (f", × {row['times']}" if row["times"] > 1 else ""), row)
        for row in data["rows"].values()
    ]
    headers = ["part", "parameters", "bytes in float32", "FLOPs per token"]
    return Table(headers, [*rows, cells("the whole model", data)], "lrrr")


# What it expects


@torch.inference_mode()
def _streams(model: GPT, ids: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Run a text; return the residual stream (T, C) after 0, 1, … blocks, with its weights.

    The attention weights (H, T, T) of each layer are computed by hand: SDPA keeps none.
    """
    x = model._embed(torch.tensor([ids]), None, 0)
    T, H, D = len(ids), model.config.n_head, model.config.head_dim
    streams, weights = [x[0]], []
    for layer, block in enumerate(model.blocks):
        q, k, _ = block.attn.qkv(block.ln_1(x)).view(T, 3, H, D).permute(1, 2, 0, 3)
        scores = (q @ k.mT / math.sqrt(D)).masked_fill(_future(T), -torch.inf)
        weights.append(scores.softmax(-1))
        x = block(x, layer, None, None, True)
        streams.append(x[0])
    return torch.stack(streams), weights


def _future(T: int) -> Tensor:
    """Mark what no query may see: (T, T), True above the diagonal."""
    return torch.ones(T, T, dtype=torch.bool).triu(1)


@measurement("model.odds", kind="measured")
def odds(size: Size) -> Data:
    """Take the likeliest next token after each token of a text, and after each block."""
    model, tokenizer = load_pretrained()
    ids = tokenizer.encode(SENTENCE)
    streams, _ = _streams(model, ids)
    with torch.inference_mode():
        p = F.linear(model.ln_f(streams), model.wte.weight).softmax(-1)  # (L + 1, T, V)
        expected = model(torch.tensor([ids]))[0][0].softmax(-1)
    best, token = p.max(dim=-1)
    holmes = tokenizer.encode(" Holmes")[0]
    return {
        "tokens": [_spelled(tokenizer.decode([i])) for i in ids],
        "next": [[_spelled(tokenizer.decode([i])) for i in row] for row in token.tolist()],
        "odds": best.tolist(),
        "last": best[-1, -1].item(),
        "holmes": p[:, -1, holmes].tolist(),
        "error": (p[-1] - expected).abs().max().item(),
    }


@invariant("model.odds")
def odds_are_the_model_s(data: Data) -> None:
    """The sentences of the page: what the model reads there, block by block."""
    assert data["error"] < 1e-5, data["error"]
    assert data["tokens"] == data["next"][0], data["next"][
        0
    ]  # without a block, each expects itself
    assert data["next"][-1] == ["␣he", "her", "lo", "ck", "␣Holmes"], data["next"][-1]
    assert data["holmes"][0] < 0.01 < 0.5 < min(data["holmes"][1:]), data["holmes"]


@table("model.lens", result="model.odds")
def lens_table(data: Data) -> Table:
    """Lay out the likeliest next token after each number of blocks, for three of the tokens."""
    rows, shown = [], (0, 1, len(data["tokens"]) - 1)
    for blocks, (tokens, shares) in enumerate(zip(data["next"], data["odds"], strict=True)):
        cells = [Markdown(f"{code(tokens[i])} {shares[i]:.2f}") for i in shown]
        rows.append([str(blocks), *cells])
    headers = ["blocks", *(f"after {code(data['tokens'][i])}" for i in shown)]
    return Table(headers, rows, "r" + len(shown) * "l")


@measurement("model.attention", kind="measured")
def attention(size: Size) -> Data:
    """Take the attention weights of two heads of the first layer over a few tokens."""
    model, tokenizer = load_pretrained()
    ids = tokenizer.encode(SENTENCE)
    _, weights = _streams(model, ids)
    found = {
        name: weights[layer][head].tolist()
        for name, (layer, head) in zip(("before", "begins"), HEADS, strict=True)
    }
    return {
        "tokens": [_spelled(tokenizer.decode([i])) for i in ids],
        "heads": found,
        "before_last": found["before"][4][3],
        "begins_last": found["begins"][4][1],
    }


@invariant("model.attention")
def weights_are_a_distribution(data: Data) -> None:
    """Each query shares out one unit among the past; the two heads do what the page says."""
    for rows in data["heads"].values():
        for query, row in enumerate(rows):
            assert abs(sum(row) - 1) < 1e-4, row
            assert not any(row[query + 1 :]), row
    assert data["before_last"] > 0.5 < data["begins_last"], data
    assert all(max(row) == row[1] for row in data["heads"]["begins"][2:]), data


# What breaks it unseen


@torch.inference_mode()
def _logits(W: dict[str, Tensor], config: GPTConfig, ids: list[int], fault: str | None) -> Tensor:
    """Run the forward pass by hand, with a fault or without: (T, V)."""
    T, C, H, D = len(ids), config.n_embd, config.n_head, config.head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (C,), W[f"{name}.weight"], W[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, W[f"{name}.weight"], W[f"{name}.bias"])

    def attend(x: Tensor, name: str) -> Tensor:
        heads = linear(x, f"{name}.qkv")
        if fault == "interleaved":
            q, k, v = heads.view(T, H, 3, D).permute(2, 1, 0, 3)
        else:
            q, k, v = heads.view(T, 3, H, D).permute(1, 2, 0, 3)
        scores = q @ k.mT / (1 if fault == "unscaled" else math.sqrt(D))
        if fault != "acausal":
            scores = scores.masked_fill(_future(T), -torch.inf)
        mixed = scores.softmax(-1) @ v  # (H, T, D)
        mixed = mixed if fault == "stacked" else mixed.transpose(0, 1)
        return linear(mixed.reshape(T, C), f"{name}.proj")

    def mlp(x: Tensor, name: str) -> Tensor:
        how = "none" if fault == "erf" else "tanh"
        return linear(F.gelu(linear(x, f"{name}.fc"), approximate=how), f"{name}.proj")

    x = W["wte.weight"][ids] + W["wpe.weight"][:T]
    for layer in range(config.n_layer):
        name = f"blocks.{layer}"
        if fault == "post":
            x = norm(x + attend(x, f"{name}.attn"), f"{name}.ln_1")
            x = norm(x + mlp(x, name), f"{name}.ln_2")
        else:
            x = x + attend(norm(x, f"{name}.ln_1"), f"{name}.attn")
            x = x + mlp(norm(x, f"{name}.ln_2"), name)
    return F.linear(norm(x, "ln_f"), W["wte.weight"])


FAULTS = {
    "none": "none",
    "erf": "exact GELU for the tanh form",
    "acausal": "no causal mask",
    "unscaled": "scores not divided by √32",
    "stacked": "heads joined without the transpose",
    "interleaved": "heads cut before q, k, v",
    "post": "LayerNorm after the sum",
}


@measurement("model.faults", kind="measured")
def faults(size: Size) -> Data:
    """Write a text with each fault, and compare logits on a prompt."""
    model, tokenizer = load_pretrained()
    W, config = dict(model.state_dict()), model.config
    prompt, ids = tokenizer.encode(PROMPT), tokenizer.encode(SENTENCE)
    holmes = tokenizer.encode(" Holmes")[0]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt]))[0][0]
    rows: list[dict[str, Any]] = []
    for fault, name in FAULTS.items():
        written = list(prompt)
        for _ in range(size.pick(24, 2)):
            written.append(_logits(W, config, written, fault)[-1].argmax().item())
        error = (_logits(W, config, prompt, fault) - expected).abs().max().item()
        share = _logits(W, config, ids, fault)[-1].softmax(-1)[holmes].item()
        text = tokenizer.decode(written[len(prompt) :])
        rows.append({"fault": name, "error": error, "holmes": share, "text": text})
    return {"rows": rows}


@invariant("model.faults")
def faults_show_in_the_logits(data: Data) -> None:
    """Without a fault the forward by hand is the model's, and every fault is beyond the bar."""
    right, *wrong = data["rows"]
    assert right["error"] < 1e-4, right
    assert all(row["error"] > 1e-3 for row in wrong), wrong
    named = {row["fault"]: row["holmes"] for row in wrong}
    assert min(named[FAULTS[name]] for name in ("erf", "acausal", "unscaled")) > 0.9, named
    assert named[FAULTS["stacked"]] > 0.5, named
    assert right["text"] == wrong[0]["text"], wrong[0]


@table("model.faults", result="model.faults")
def faults_table(data: Data) -> Table:
    """Lay out the damage beside the text."""
    rows = [
        [
            row["fault"],
            f"{row['error']:.3f}",
            f"{100 * row['holmes']:.1f} %",
            " ".join(row["text"].split()),
        ]
        for row in data["rows"]
    ]
    headers = ["fault", "logit error", f"probability of {code('␣Holmes')}", "text"]
    return Table(headers, rows, "lrrl")
