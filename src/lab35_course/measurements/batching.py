"""Batching: what a left-out mask or position costs, how much padding runs, what a batch gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from statistics import median

import torch
from torch import Tensor

from lab35 import GPT, cache_bytes, generate, load_pretrained
from lab35.batching import left_pad, position_ids
from lab35.speed import EngineName, choose_engine
from lab35.timing import interleaved, mean_seconds, spread
from lab35_course.measurements.sampling import PASSAGE
from lab35_course.peers import to_ctranslate2
from lab35_course.results import Data, Size, Table, invariant, measurement, table

PROMPTS = ("Holmes", "It was a dark night and", "My dear Watson, said he, I")
COMBINATIONS = ((True, True), (True, False), (False, True), (False, False))
MIXED = (4, 90, 7, 100, 5, 80, 6, 95)


# What row 0 gets wrong


def _scores(model: GPT, idx: Tensor, mask: Tensor, use_mask: bool, use_positions: bool) -> Tensor:
    """Score the next token of row 0 in a padded batch: (V,)."""
    logits, _ = model(
        idx,
        key_mask=mask if use_mask else None,
        position_ids=position_ids(mask) if use_positions else None,
    )
    return logits[0, -1]


def _kl(right: Tensor, wrong: Tensor) -> float:
    """Compute KL(right ‖ wrong) in nats, in float64: float32 rounds it below zero."""
    p, q = (logits.double().log_softmax(-1) for logits in (right, wrong))
    return (p.exp() * (p - q)).sum().item()


def _text(idx: Tensor, mask: Tensor, steps: int, *combination: bool) -> list[int]:
    """Write greedily, and return the new tokens of row 0."""
    model, _ = load_pretrained()
    tokens = []
    for _ in range(steps):
        token = _scores(model, idx, mask, *combination).argmax().view(1, 1)
        tokens.append(token.item())
        # Rows do not see each other, so that what the others write does not matter here.
        idx = torch.cat((idx, token.expand(len(idx), 1)), dim=1)
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
    return tokens


@measurement("batching.row0", kind="measured")
@torch.inference_mode()
def row0(size: Size) -> Data:
    """Leave out the mask, the positions, or both, and compare row 0 with its own run."""
    model, tokenizer = load_pretrained()
    rows = [tokenizer.encode(text) for text in PROMPTS]
    steps, pads = size.pick(24, 3), size.pick(tokenizer.vocab_size, 4)
    alone = generate(model, torch.tensor([rows[0]]), steps, temperature=0).new_tokens[0].tolist()
    right = model(torch.tensor([rows[0]]))[0][0, -1]
    idx, mask = left_pad(rows, tokenizer.eos_id)
    found = []
    for combination in COMBINATIONS:
        wrong = _scores(model, idx, mask, *combination)
        moved = [
            _scores(model, *left_pad(rows, pad_id), *combination).argmax() != right.argmax()
            for pad_id in range(pads)
        ]
        tokens = _text(idx, mask, steps, *combination)
        same = [a == b for a, b in zip(tokens, alone, strict=True)]
        found.append(
            {
                "key_mask": combination[0],
                "position_ids": combination[1],
                "difference": (wrong - right).abs().max().item(),
                "kl": _kl(right, wrong),
                "argmax_moved": bool(wrong.argmax() != right.argmax()),
                "pads_that_move_it": sum(map(bool, moved)),
                "agree": same.index(False) if False in same else steps,
                "text": tokenizer.decode(tokens),
            }
        )
    return {"steps": steps, "pads": pads, "rows": found}


@invariant("batching.row0")
def only_both_together_are_right(data: Data) -> None:
    """With mask and positions row 0 is its own run; with either left out it is not."""
    both, *wrong = data["rows"]
    assert both["difference"] < 1e-4, both
    assert both["kl"] < 1e-6, both
    assert both["agree"] == data["steps"], both
    assert not both["argmax_moved"], both
    assert both["pads_that_move_it"] == 0, both
    for row in wrong:
        assert row["difference"] > 0.1, row
        assert row["kl"] > 0.01, row


def _switches(row: Data) -> list[str]:
    return ["on" if row[name] else "off" for name in ("key_mask", "position_ids")]


@table("batching.row0", result="batching.row0")
def row0_table(data: Data) -> Table:
    """Lay out the error in logits and in nats, and how often a reader could notice."""
    rows = [
        [
            *_switches(row),
            f"{row['difference']:.2f}" if row["difference"] > 1e-3 else f"{row['difference']:.0e}",
            f"{row['kl']:.2f}",
            "yes" if row["argmax_moved"] else "no",
            f"{row['pads_that_move_it']} of {data['pads']}",
        ]
        for row in data["rows"]
    ]
    headers = [
        "`key_mask`",
        "`position_ids`",
        "logit error",
        "KL, nats",
        "argmax moved",
        "pad ids that move it",
    ]
    return Table(headers, rows, align="llrrlr")


@table("batching.texts", result="batching.row0")
def texts_table(data: Data) -> Table:
    """Lay out what row 0 goes on to write."""
    rows = [
        [*_switches(row), f"{row['agree']} of {data['steps']}", " ".join(row["text"].split())]
        for row in data["rows"]
    ]
    headers = ["`key_mask`", "`position_ids`", "tokens before it strays", "text"]
    return Table(headers, rows, align="llrl")


# What padding costs


def _run(model: GPT, lengths: Sequence[int], new_tokens: int) -> tuple[int, int]:
    """Generate for prompts of these lengths; count calls, and the tokens of all rows in them."""
    fed: list[int] = []
    hook = model.register_forward_pre_hook(lambda module, args: fed.append(args[0].numel()))
    try:
        idx, mask = left_pad([[0] * length for length in lengths], 0)
        generate(model, idx, new_tokens, temperature=0, key_mask=mask)
    finally:
        hook.remove()
    return len(fed), sum(fed)


@measurement("batching.padding", kind="exact")
def padding(size: Size) -> Data:
    """Count what batches run and what their rows alone would run."""
    model, tokenizer = load_pretrained()
    three = tuple(len(tokenizer.encode(text)) for text in PROMPTS)
    ordered = tuple(sorted(MIXED))
    cases = (
        ("three", "the three prompts", [three], 24),
        ("two", "a short one and a long one", [(2, 100)], 24),
        ("one_batch", "eight of mixed length, one batch", [MIXED], 24),
        ("arrival", "… in two batches, as they came", [MIXED[:4], MIXED[4:]], 24),
        ("ordered", "… in two batches, by length", [ordered[:4], ordered[4:]], 24),
    )
    found: Data = {}
    for key, name, batches, new_tokens in cases:
        together = [_run(model, lengths, new_tokens) for lengths in batches]
        alone = [_run(model, [length], new_tokens) for lengths in batches for length in lengths]
        calls, tokens = (sum(column) for column in zip(*together, strict=True))
        alone_calls, alone_tokens = (sum(column) for column in zip(*alone, strict=True))
        found[key] = {
            "name": name,
            "batches": [list(lengths) for lengths in batches],
            "new": new_tokens,
            "calls": calls,
            "tokens": tokens,
            "alone_calls": alone_calls,
            "alone_tokens": alone_tokens,
            "padding": tokens - alone_tokens,
            "percent": 100 * (tokens - alone_tokens) / tokens,
        }
    position = cache_bytes(
        n_layer=model.config.n_layer,
        n_kv_head=model.config.n_head,
        head_dim=model.config.head_dim,
        length=1,
    )
    return {"cases": found, "bytes_a_position": position}


@invariant("batching.padding")
def padding_fills_the_rectangle(data: Data) -> None:
    """Compare what was counted with B·T − Σ P, the empty part of each batch's rectangle."""
    for case in data["cases"].values():
        empty = sum(len(batch) * max(batch) - sum(batch) for batch in case["batches"])
        assert case["padding"] == empty, case
        assert case["calls"] == len(case["batches"]) * case["new"], case


@table("batching.padding", result="batching.padding")
def padding_table(data: Data) -> Table:
    """Lay out calls and token-forwards, alone and together."""
    rows = [
        [
            case["name"],
            f"{case['alone_calls']:,}",
            f"{case['calls']:,}",
            f"{case['alone_tokens']:,}",
            f"{case['tokens']:,}",
            f"{case['padding']:,}",
            f"{case['percent']:.0f} %",
        ]
        for case in data["cases"].values()
    ]
    headers = [
        "prompts",
        "calls, alone",
        "together",
        "token-forwards, alone",
        "together",
        "padding",
        "share",
    ]
    return Table(headers, rows, align="lrrrrrr")


# What a batch gives


def windows(rows: int) -> Tensor:
    """Cut prompts of 16 tokens out of a passage, one at every fourth token: (rows, 16).

    No greedy choice that follows them is close, so that other kernels write the same.
    """
    _, tokenizer = load_pretrained()
    return torch.tensor(tokenizer.encode(PASSAGE)).unfold(0, 16, 4)[:rows]


def can_run(engine: EngineName, model: GPT, rows: int) -> bool:
    """Say whether an engine takes so many rows of a model."""
    try:
        choose_engine(engine, model, rows)
    except ValueError:
        return False
    return True


@measurement("batching.throughput", kind="measured", engine="each engine by its name")
def throughput(size: Size) -> Data:
    """Time batches of whole greedy texts: each engine that takes them all, and CTranslate2."""
    model, _ = load_pretrained()
    batches, samples = size.pick((1, 4, 16, 64), (1, 2)), size.pick(15, 2)
    new_tokens, theirs = size.pick(100, 3), to_ctranslate2(model)
    engines: list[EngineName] = [
        name
        for name in ("eager", "lean", *size.pick(("numba",), ()))
        if can_run(name, model, batches[-1])
    ]

    def write(engine: EngineName, rows: int) -> list[list[int]]:
        made = generate(model, windows(rows), new_tokens, temperature=0, engine=engine)
        return made.new_tokens.tolist()

    texts: dict[tuple[str, int], Callable[[], list[list[int]]]] = {}
    for rows in batches:
        for engine in engines:
            texts[f"lab35, {engine}", rows] = partial(write, engine, rows)
        texts["CTranslate2", rows] = partial(theirs, windows(rows).tolist(), new_tokens)
    loops = list(dict.fromkeys(loop for loop, _ in texts))
    written = {variant: text() for variant, text in texts.items()}
    timed = {variant: partial(mean_seconds, text) for variant, text in texts.items()}
    rounds = list(interleaved(timed, repeats=samples))
    return {
        "samples": samples,
        "prompt": windows(1).shape[1],
        "new": new_tokens,
        "ctranslate2": version("ctranslate2"),
        "same_tokens": all(
            text == written["CTranslate2", batches[-1]][:rows]
            for (_, rows), text in written.items()
        ),
        "batches": [
            {
                "batch": rows,
                "loops": [
                    {
                        "loop": loop,
                        "seconds": (told := spread([times[loop, rows] for times in rounds])),
                        "tokens_per_second": rows * new_tokens / told["median"],
                        "gain": median(
                            [rows * times[loop, 1] / times[loop, rows] for times in rounds]
                        ),
                    }
                    for loop in loops
                ],
            }
            for rows in batches
        ],
    }


@invariant("batching.throughput")
def batches_write_what_their_rows_write(data: Data) -> None:
    """A row's text depends on no other row and no engine, and the most rows give more than one.

    A check is too short to show the last.
    """
    assert data["same_tokens"], data["same_tokens"]
    for batch in data["batches"]:
        assert [loop["loop"] for loop in batch["loops"]] == [
            loop["loop"] for loop in data["batches"][0]["loops"]
        ], batch
        for loop in batch["loops"]:
            assert loop["seconds"]["samples"] == data["samples"], loop
    if data["samples"] > 2:
        for alone, most in zip(
            data["batches"][0]["loops"], data["batches"][-1]["loops"], strict=True
        ):
            assert 1 == alone["gain"] < most["gain"], (alone, most)


@table("batching.throughput", result="batching.throughput")
def throughput_table(data: Data) -> Table:
    """Lay out tokens a second, one line a batch and two columns a loop: the rate and the gain."""
    headers = ["rows"]
    for loop in data["batches"][0]["loops"]:
        headers += [loop["loop"].removeprefix("lab35, "), "gain"]
    rows = []
    for batch in data["batches"]:
        cells = [str(batch["batch"])]
        for loop in batch["loops"]:
            cells += [f"{loop['tokens_per_second']:,.0f}", f"{loop['gain']:.1f} ×"]
        rows.append(cells)
    return Table(headers, rows, align="r" * len(headers))
