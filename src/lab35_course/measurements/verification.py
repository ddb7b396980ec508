"""Verification: what rounding moves, what a broken cache moves, and the margins between choices."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lab35 import GPT, KVCache, generate, load_pretrained
from lab35.verification import BARS, verify, verify_cache
from lab35_course.plain import Markdown, code
from lab35_course.results import Data, Size, Table, invariant, measurement, table

PROMPT = "Sherlock Holmes"
ATOL = 1e-4
THRESHOLDS = (1.0, 0.1, 0.01, 1e-3, 1e-4)


def _prompt() -> Tensor:
    _, tokenizer = load_pretrained()
    return torch.tensor([tokenizer.encode(PROMPT)])


def _uncached(model: GPT) -> Callable[[Tensor], Tensor]:
    return lambda tokens: model(tokens)[0][:, -1]


def _cached(model: GPT, cache: KVCache) -> Callable[[Tensor], Tensor]:
    return lambda new: model(new, cache=cache)[0][:, -1]


def _tell(number: float) -> str:
    """Write a number of any size with two digits."""
    return f"{number:.2g}" if number >= 0.01 or number == 0 else f"{number:.1e}"


# The report


@measurement("verification.report", kind="measured")
def report(size: Size) -> Data:
    """Verify the cache along one text, and group the steps by sixteen."""
    model, _ = load_pretrained()
    prompt = _prompt()
    checked = verify_cache(model, prompt, size.pick(64, 20))
    groups = []
    for start, largest in zip(
        range(0, checked.steps, 16), checked.maxima_per_16_steps, strict=True
    ):
        margins = checked.margins[start : start + 16]
        groups.append(
            {
                "first": start,
                "last": start + len(margins) - 1,
                "difference": largest,
                "margin": min(margins),
                "factor": min(margins) / largest,
            }
        )
    return checked.as_dict() | {"groups": groups}


@invariant("verification.report")
def the_cache_passes(data: Data) -> None:
    """The chapter shows a cache that works."""
    assert data["passed"], data
    assert data["tokens_equal"], data
    assert max(group["difference"] for group in data["groups"]) == data["max_abs_logit_diff"]
    assert min(group["margin"] for group in data["groups"]) == data["min_margin"]


@table("verification.report", result="verification.report")
def report_table(data: Data) -> Table:
    """Lay out the groups, and the whole text below them."""
    whole = {
        "difference": data["max_abs_logit_diff"],
        "margin": data["min_margin"],
        "factor": data["safety_factor"],
    }
    labels = [f"{group['first']} to {group['last']}" for group in data["groups"]]
    rows = [
        [label, f"{row['difference']:.1e}", f"{row['margin']:.3f}", f"{row['factor']:,.0f}"]
        for label, row in zip([*labels, Markdown("**all**")], [*data["groups"], whole], strict=True)
    ]
    headers = ["steps", "largest logit difference", "smallest margin", "margin / difference"]
    return Table(headers, rows, "lrrr")


# Precision


@torch.inference_mode()
def _both(model: GPT, tokens: Tensor, prompt_length: int) -> tuple[Tensor, Tensor]:
    """Score one given text with a cache and without: two (steps, V) in float64."""
    weights = next(model.parameters())
    cache = KVCache(model.config, 1, dtype=weights.dtype)
    pieces = tokens.split([prompt_length, *[1] * (tokens.shape[1] - prompt_length)], dim=1)
    cached = [model(piece, cache=cache)[0][0, -1] for piece in pieces]
    ends = range(prompt_length, tokens.shape[1] + 1)
    uncached = [model(tokens[:, :end])[0][0, -1] for end in ends]
    return torch.stack(cached).double(), torch.stack(uncached).double()


@measurement("verification.precision", kind="measured")
def precision(size: Size) -> Data:
    """Score one text in four precisions, and hold each against float64 without a cache."""
    model, _ = load_pretrained()
    prompt = _prompt()
    text = generate(model, prompt, size.pick(64, 4), temperature=0).tokens[:, :-1]
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    scores = {
        dtype: _both(copy.deepcopy(model).to(dtype), text, prompt.shape[1]) for dtype in types
    }
    truth = scores[torch.float64][1]
    rows = []
    for dtype in types:
        cached, uncached = scores[dtype]
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "eps": torch.finfo(dtype).eps,
                "apart": (cached - uncached).abs().max().item(),
                "cached": (cached - truth).abs().max().item(),
                "uncached": (uncached - truth).abs().max().item(),
                "bar": BARS[dtype],
            }
        )
    return {"steps": len(truth), "largest_logit": truth.abs().max().item(), "rows": rows}


@invariant("verification.precision")
def more_digits_agree_better(data: Data) -> None:
    """The difference is rounding: it shrinks with the type's epsilon."""
    double, single, *halves = data["rows"]
    assert double["apart"] < 1e-10, double
    assert single["apart"] <= ATOL < min(half["cached"] for half in halves), data["rows"]
    assert all(row["apart"] < row["bar"] for row in data["rows"]), data["rows"]


@table("verification.precision", result="verification.precision")
def precision_table(data: Data) -> Table:
    """Lay out both sides' distances from each other and from float64."""
    rows = []
    for row in data["rows"]:
        distances = [f"{row[key]:.1e}" for key in ("apart", "cached", "uncached")]
        if row["dtype"] == "float64":
            distances[2] = "the reference"
        rows.append([row["dtype"], f"{row['eps']:.1e}", *distances, f"{row['bar']:.1e}"])
    headers = [
        "weights and cache",
        "epsilon",
        "cached from uncached",
        "cached from float64",
        "uncached from float64",
        "bar",
    ]
    return Table(headers, rows, "lrrrrr")


# Faults


class _HastyCache(KVCache):
    """Counts a chunk in each layer."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        stored = super().write(layer, k, v)
        self.length += k.shape[2]
        return stored

    def advance(self, t_new: int) -> None:
        pass


class _RoundedCache(KVCache):
    """Keeps keys and values in another type than the model computes in."""

    def __init__(self, model: GPT, stored: torch.dtype) -> None:
        super().__init__(model.config, 1)
        self.stored = stored

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().write(layer, k.to(self.stored).to(k.dtype), v.to(self.stored).to(v.dtype))


def _shifted(model: GPT, new: Tensor, cache: KVCache) -> Tensor:
    """Tell a decoded token that it stands one place further on."""
    where = None if cache.length == 0 else torch.tensor([[cache.length + 1]])
    return model(new, cache=cache, position_ids=where)[0][:, -1]


def _hidden(model: GPT, new: Tensor, cache: KVCache) -> Tensor:
    """Hide the key before a decoded token's own: the mask ends one short."""
    mask = None
    if cache.length:
        mask = torch.ones(1, cache.length + 1, dtype=torch.bool)
        mask[:, -2] = False
    return model(new, cache=cache, key_mask=mask)[0][:, -1]


def _decoders(model: GPT) -> dict[str, Callable[[Tensor], Tensor]]:
    """Make one decoder that is right, two that round, and three that are broken."""
    return {
        "none": _cached(model, KVCache(model.config, 1)),
        "keys and values kept in float16": _cached(model, _RoundedCache(model, torch.float16)),
        "keys and values kept in bfloat16": _cached(model, _RoundedCache(model, torch.bfloat16)),
        "position one too high": functools.partial(_shifted, model, cache=KVCache(model.config, 1)),
        "mask one key short": functools.partial(_hidden, model, cache=KVCache(model.config, 1)),
        "each layer advances": _cached(model, _HastyCache(model.config, 1)),
    }


@measurement("verification.faults", kind="measured")
def faults(size: Size) -> Data:
    """Verify caches with one change each, along the text that each writes."""
    model, tokenizer = load_pretrained()
    steps = size.pick(24, 3)  # the block is used up after 27 where each layer counts the chunk
    rows = []
    for name, decode in _decoders(model).items():
        checked = verify(decode, _uncached(model), _prompt(), steps, atol=ATOL)
        rows.append(
            {
                "change": name,
                "first_decode": checked.differences[1],
                "difference": checked.max_abs_logit_diff,
                "equal": steps - len(checked.divergences),
                "passed": checked.passed,
                "text": tokenizer.decode(list(checked.tokens[0])),
            }
        )
    return {"steps": steps, "rows": rows}


@invariant("verification.faults")
def only_the_right_cache_passes(data: Data) -> None:
    """The bar lies above rounding and below every fault, at the first step that reads the cache."""
    right, *wrong = data["rows"]
    assert right["passed"], right
    assert not any(row["passed"] for row in wrong), wrong
    assert all(row["first_decode"] > ATOL for row in wrong), wrong


@table("verification.faults", result="verification.faults")
def faults_table(data: Data) -> Table:
    """Lay out what the check sees beside what a reader sees."""
    rows = [
        [
            row["change"],
            _tell(row["first_decode"]),
            _tell(row["difference"]),
            f"{row['equal']} of {data['steps']}",
            "passed" if row["passed"] else "failed",
            " ".join(row["text"].split()),
        ]
        for row in data["rows"]
    ]
    headers = [
        "change",
        "difference at step 1",
        "largest difference",
        "choices equal",
        "verdict",
        "text",
    ]
    return Table(headers, rows, "lrrrll")


# A flip


def _recorded(score: Callable[[Tensor], Tensor], into: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Keep a copy of what a callable returns."""

    def keep(tokens: Tensor) -> Tensor:
        into.append(score(tokens).double())
        return into[-1]

    return keep


def _tipped(
    score: Callable[[Tensor], Tensor], step: int, bias: Tensor
) -> Callable[[Tensor], Tensor]:
    """Add a bias, (V,), to the logits of one step."""
    calls = 0

    def add(tokens: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return score(tokens).double() + (bias if calls == step + 1 else 0)

    return add


@measurement("verification.flip", kind="measured")
def flip(size: Size) -> Data:
    """Balance two tokens on what rounding moves, and verify again."""
    model, tokenizer = load_pretrained()
    prompt, steps = _prompt(), size.pick(64, 8)

    def pair() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        return _cached(model, KVCache(model.config, 1)), _uncached(model)

    # 1) at each step, how far each side puts the best token above the second
    cached: list[Tensor] = []
    uncached: list[Tensor] = []
    decode, reference = pair()
    verify(_recorded(decode, cached), _recorded(reference, uncached), prompt, steps, atol=ATOL)
    best = torch.cat(uncached).topk(2).indices  # (steps, 2)
    gaps = [
        logits.gather(1, best).diff(dim=1)[:, 0].neg()  # (steps,)
        for logits in (torch.cat(cached), torch.cat(uncached))
    ]

    # 2) where they disagree most, raise the second by the mean of both
    step = int((gaps[0] - gaps[1]).abs().argmax())
    raised = ((gaps[0] + gaps[1]) / 2)[step]
    bias = torch.zeros(model.config.vocab_size, dtype=torch.float64)
    bias[best[step, 1]] = raised
    decode, reference = pair()
    checked = verify(
        _tipped(decode, step, bias), _tipped(reference, step, bias), prompt, steps, atol=ATOL
    )
    return {
        "step": step,
        "best": tokenizer.decode([best[step, 0].item()]),
        "second": tokenizer.decode([best[step, 1].item()]),
        "raised": raised.item(),
        "gaps": {
            "cached": (gaps[0][step] - raised).item(),
            "uncached": (gaps[1][step] - raised).item(),
        },
        "report": checked.as_dict(),
    }


@invariant("verification.flip")
def a_flip_is_excused_and_told(data: Data) -> None:
    """The two sides choose differently, and the report passes and says so."""
    report, gaps = data["report"], data["gaps"]
    assert report["passed"], report
    if gaps["cached"] != gaps["uncached"]:  # else this machine adds in one order, and nothing flips
        assert not report["tokens_equal"], report
        assert report["first_divergence"]["step"] == data["step"], report
        assert report["first_divergence"]["excused"], report


@table("verification.flip", result="verification.flip")
def flip_table(data: Data) -> Table:
    """Lay out which token each side puts first, and by how little."""
    tokens = [code(repr(data[key])) for key in ("best", "second")]
    rows = []
    for side, name in (("uncached", "recomputed"), ("cached", "from the cache")):
        gap = data["gaps"][side]
        rows.append([name, *tokens, f"{gap:+.1e}", tokens[0] if gap >= 0 else tokens[1]])
    headers = ["logits", "first token", "second token", "first − second", "chosen"]
    return Table(headers, rows, "lllrl")


# Many texts


@measurement("verification.prompts", kind="measured")
def prompts(size: Size) -> Data:
    """Verify many rows at once, from prompts that the model drew, and count small margins."""
    model, tokenizer = load_pretrained()
    B, steps = size.pick(64, 2), size.pick(100, 4)
    start = torch.full((B, 1), tokenizer.eos_id)
    generator = torch.Generator().manual_seed(1337)
    drawn = generate(model, start, 15, generator=generator).new_tokens
    scores: list[Tensor] = []
    cache = KVCache(model.config, B)
    checked = verify(
        _cached(model, cache), _recorded(_uncached(model), scores), drawn, steps, atol=ATOL
    )
    best = torch.stack(scores).topk(2).values  # (steps, B, 2)
    margins = best[..., 0] - best[..., 1]
    return {
        "prompts": B,
        "steps": steps,
        "choices": margins.numel(),
        "passed": checked.passed,
        "equal": margins.numel() - len(checked.divergences),
        "excused": sum(divergence.excused for divergence in checked.divergences),
        "max_abs_logit_diff": checked.max_abs_logit_diff,
        "min_margin": checked.min_margin,
        "safety_factor": checked.safety_factor,
        "median_margin": margins.median().item(),
        "below": [
            {"threshold": threshold, "count": int((margins < threshold).sum())}
            for threshold in THRESHOLDS
        ],
    }


@invariant("verification.prompts")
def every_row_passes(data: Data) -> None:
    """Every choice is equal or excused."""
    assert data["passed"], data
    assert data["equal"] + data["excused"] == data["choices"], data


@table("verification.prompts", result="verification.prompts")
def prompts_table(data: Data) -> Table:
    """Lay out how many choices are close."""
    rows = []
    for row in data["below"]:
        share = 100 * row["count"] / data["choices"]
        rows.append([f"{row['threshold']:g}", f"{row['count']:,}", f"{share:.2f} %"])
    return Table(["margin below", f"of {data['choices']:,} choices", "share"], rows, "rrr")
