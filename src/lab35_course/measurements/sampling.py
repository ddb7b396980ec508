"""What temperature and the filters keep, how close a draw can be, and what greedy repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from lab35 import (
    GPT,
    Generation,
    KVCache,
    Tokenizer,
    filtered_logits,
    generate,
    load_pretrained,
    probabilities,
    sample_next,
    trace_step,
)
from lab35_course.plain import Markdown, code, outcome, plain
from lab35_course.results import Data, Size, Table, invariant, measurement, table

FIVE = ("0.5", "0.3", "0.1", "0.06", "0.04")
"""The worked example, as decimal numbers that no float has rounded."""

PASSAGE = """“To the man who loves art for its own sake,” remarked Sherlock Holmes,
tossing aside the advertisement sheet of _The Daily Telegraph_, “it is
frequently in its least important and lowliest manifestations that the
keenest pleasure is to be derived. It is pleasant to me to observe,
Watson, that you have so far grasped this truth that in these little
records of our cases which you have been good enough to draw up, and, I
am bound to say, occasionally to embellish, you have given prominence
not so much to the many _causes célèbres_ and sensational trials in
which I have figured but rather to those incidents which may have been
trivial in themselves, but which have given room for those faculties of
deduction and of logical synthesis which I have made my special
province.”"""
"""From the last tenth of the book, which the training never saw."""

PROMPTS = (
    "Sherlock Holmes",
    "It was a dark night and",
    "My dear Watson, said he, I",
    "The door opened and",
    "“I have heard of you,",
    "In the morning",
    "She had",
    "There was no",
)

SETTINGS: dict[str, Data] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "unfiltered": {},
}

NAMES = {
    "greedy": "greedy",
    "sampled": "0.8, 40, 0.95",
    "unfiltered": "no filter",
}

WINDOW = 8
"""How many tokens back a choice is tried with."""


# --- The worked example ---


def _on_paper(temperature: float, k: int, p: Fraction) -> list[Fraction]:
    """Follow the definitions with fractions; only the power of a temperature is a float."""
    probs = [Fraction(text) for text in FIVE]
    if temperature != 1:
        probs = [Fraction(float(x) ** (1 / temperature)) for x in probs]
    probs = [x / sum(probs) for x in probs][:k]
    kept: list[Fraction] = []
    for x in probs:  # FIVE is in descending order
        if sum(kept) >= p * sum(probs):
            break
        kept.append(x)
    return [x / sum(kept) for x in kept] + [Fraction(0)] * (len(FIVE) - len(kept))


@measurement("sampling.example", kind="exact")
def example(size: Size) -> Data:
    """Work the five probabilities out on paper, one setting at a time."""
    everything = {"temperature": 1.0, "k": 5, "p": "1"}
    rows = []
    for name, change in (
        ("no setting", {}),
        ("τ = 0.5", {"temperature": 0.5}),
        ("τ = 2", {"temperature": 2.0}),
        ("k = 2", {"k": 2}),
        ("p = 0.5", {"p": "0.5"}),
        ("p = 0.9", {"p": "0.9"}),
    ):
        settings = everything | change
        found = _on_paper(settings["temperature"], settings["k"], Fraction(settings["p"]))
        rows.append(
            {
                "name": name,
                "settings": settings,
                "probabilities": [round(float(x), 4) for x in found],
                "kept": sum(x > 0 for x in found),
            }
        )
    return {"five": [float(text) for text in FIVE], "rows": rows}


@invariant("sampling.example")
def the_package_agrees(data: Data) -> None:
    """Off the boundary, float32 gives what the paper gives; p = 0.9 is on it."""
    logits = torch.tensor([data["five"]]).log()
    for row in data["rows"]:
        p = float(row["settings"]["p"])
        if p == 0.9:
            continue
        found = probabilities(logits, row["settings"]["temperature"], row["settings"]["k"], p)
        expected = torch.tensor([row["probabilities"]])
        assert torch.allclose(found, expected, atol=1e-4), (row["name"], found.tolist())


@table("sampling.example", result="sampling.example")
def example_table(data: Data) -> Table:
    """Lay out what is left of each token's probability."""
    rows = [
        [
            row["name"],
            *(f"{x:.3f}" if x else "–" for x in row["probabilities"]),
            str(row["kept"]),
        ]
        for row in data["rows"]
    ]
    headers = ["setting", *(f"token {v}" for v in range(5)), "kept"]
    return Table(headers, rows, align="lrrrrrr")


# --- The last bit ---


@measurement("sampling.boundary", kind="measured")
def boundary(size: Size) -> Data:
    """Sum the first three probabilities in four ways, and compare with p = 0.9 each time."""
    numbers = [float(text) for text in FIVE]
    rows = []
    for name, dtype, softmax, limit in (
        ("float32, as typed", torch.float32, False, torch.float32),
        ("float32, from logits", torch.float32, True, torch.float32),
        ("float32, from logits, p as a double", torch.float32, True, torch.float64),
        ("float64, from logits", torch.float64, True, torch.float64),
    ):
        probs = torch.tensor(numbers, dtype=dtype)
        if softmax:
            probs = torch.tensor(numbers, dtype=torch.float64).log().to(dtype).softmax(-1)
        before = probs.cumsum(-1) - probs  # what stands before the fourth token decides
        reached = before.double() >= torch.tensor(0.9, dtype=limit).double()
        rows.append(
            {
                "name": name,
                "mass": before[3].item().hex(),
                "p": torch.tensor(0.9, dtype=limit).item().hex(),
                "kept": int((~reached).sum()),
            }
        )
    return {"rows": rows}


@invariant("sampling.boundary")
def three_or_four(data: Data) -> None:
    """Rounding moves the cut by one token, not more."""
    assert all(row["kept"] in (3, 4) for row in data["rows"]), data["rows"]
    assert data["rows"][0]["kept"] == 3, "additions alone are the same everywhere"


@table("sampling.boundary", result="sampling.boundary")
def boundary_table(data: Data) -> Table:
    """Lay out the digits that decide."""

    def digits(text: str) -> str:
        """As many as the number's own type needs to tell it from its neighbours."""
        value = float.fromhex(text)
        single = torch.tensor(value, dtype=torch.float32).item() == value
        return f"{value:.9g}" if single else repr(value)

    rows = [
        [row["name"], digits(row["mass"]), digits(row["p"]), str(row["kept"])]
        for row in data["rows"]
    ]
    return Table(["computed in", "mass of three", "p", "kept"], rows, align="lllr")


# --- Top-k against top-p on the model ---


def _passage(tokenizer: Tokenizer) -> Tensor:
    """The first 128 tokens of the passage, shape (1, 128)."""
    return torch.tensor([tokenizer.encode(PASSAGE)[:128]])


def _entropy(probs: Tensor) -> Tensor:
    """Entropy in nats of each row of (B, V): shape (B,)."""
    return torch.special.entr(probs).sum(-1)


def _count(logits: Tensor, **settings: float) -> int:
    return int(filtered_logits(logits, **settings).isfinite().sum())


@measurement("sampling.contexts", kind="measured")
def contexts(size: Size) -> Data:
    """Find where in the passage the model is surest and least sure, and filter both."""
    model, tokenizer = load_pretrained()
    idx = _passage(tokenizer)
    with torch.inference_mode():
        logits = model(idx)[0][0]  # (T, V)
    entropy = _entropy(logits.softmax(-1))
    first = 16  # a few words to go by
    found: Data = {"first": first, "places": idx.shape[1] - first}
    for name, choose in (("sure", torch.argmin), ("unsure", torch.argmax)):
        place = first + int(choose(entropy[first:]))
        here = logits[place : place + 1]
        ranked = here.softmax(-1)[0].sort(descending=True)
        found[name] = {
            "context": " ".join(tokenizer.decode(idx[0, : place + 1].tolist()).split()[-6:]),
            "entropy": entropy[place].item(),
            "top": [
                {"token": tokenizer.decode([token]), "probability": probability}
                for token, probability in zip(
                    ranked.indices[:3].tolist(), ranked.values[:3].tolist(), strict=True
                )
            ],
            "top_k": _count(here, top_k=40),
            "top_k_mass": ranked.values[:40].sum().item(),
            "top_p": _count(here, top_p=0.95),
            "both": _count(here, temperature=0.8, top_k=40, top_p=0.95),
            "mass": ranked.values.cumsum(-1).tolist(),
        }
    return found


@invariant("sampling.contexts")
def counts_follow_the_curves(data: Data) -> None:
    """Top-k keeps its number everywhere; top-p keeps more where the model is less sure."""
    sure, unsure = data["sure"], data["unsure"]
    assert sure["entropy"] < unsure["entropy"], data
    assert sure["top_k"] == unsure["top_k"] == 40, data
    assert sure["top_p"] < unsure["top_p"], data
    for place in (sure, unsure):
        assert place["mass"][place["top_p"] - 1] > 0.949, place["top_p"]


@table("sampling.contexts", result="sampling.contexts")
def contexts_table(data: Data) -> Table:
    """Lay out the two places side by side."""
    places = data["sure"], data["unsure"]

    def row(name: str, tell) -> list[str]:
        return [name, *(tell(place) for place in places)]

    def likeliest(place: Data) -> str:
        lines = [f"{_token(t['token'])} {plain(_share(t['probability']))}" for t in place["top"]]
        return Markdown("<br>".join(lines))

    rows = [
        row("the text before", lambda place: f"… {place['context']}"),
        row("the likeliest tokens", likeliest),
        row("entropy, nats", lambda place: f"{place['entropy']:.2f}"),
        row("k = 40 keeps", lambda place: str(place["top_k"])),
        row("mass of these", lambda place: f"{place['top_k_mass']:.3f}"),
        row("p = 0.95 keeps", lambda place: str(place["top_p"])),
        row("0.8, 40, 0.95 keep", lambda place: str(place["both"])),
    ]
    return Table(["place", "surest place", "least sure place"], rows, align="lll")


def _share(probability: float) -> str:
    """Three decimals, without calling anything certain or impossible."""
    if probability > 0.9995:
        return "> 0.999"
    return f"{probability:.3f}" if probability >= 0.0005 else "< 0.001"


def _token(text: str) -> str:
    """Show a token as code, its spaces and line breaks visible."""
    return code(text.replace(" ", "␣").replace("\n", "↵"))


# --- The same draw on another machine ---


@torch.inference_mode()
def _token_by_token(model: GPT, idx: Tensor) -> Tensor:
    """The logits of one cached decode after another: shape (T, V)."""
    cache = KVCache(model.config, batch_size=1)
    steps = [model(idx[:, i : i + 1], cache=cache)[0][0] for i in range(idx.shape[1])]
    return torch.cat(steps)


@measurement("sampling.race", kind="measured")
def race(size: Size) -> Data:
    """Draw with the same numbers from logits that were computed in two ways."""
    model, tokenizer = load_pretrained()
    idx = _passage(tokenizer)
    with torch.inference_mode():
        usual = model(idx)[0][0]
        others = {
            "with the cache, token by token": _token_by_token(model, idx),
            "in float64": load_pretrained()[0].double()(idx)[0][0],
            "in bfloat16": load_pretrained()[0].bfloat16()(idx)[0][0].double(),
        }
    rounds = size.pick(400, 1)
    draws = [_draw(usual, seed) for seed in range(rounds)]
    rows = []
    for name, logits in others.items():
        moved = logits.double() - usual
        changed = sum(int((_draw(logits, s) != drawn).sum()) for s, drawn in enumerate(draws))
        law = _expected_changes(usual.double().softmax(-1), moved)
        rows.append(
            {
                "name": name,
                "difference": moved.abs().max().item(),
                "changed": changed,
                "expected": law * rounds * idx.shape[1],
                "one_in": int(float(f"{1 / law:.1e}")),  # two digits
            }
        )
    return {"draws": rounds * idx.shape[1], "rows": rows}


def _draw(logits: Tensor, seed: int) -> Tensor:
    """Draw one token a row from (T, V); in float64, so that all ways take the same numbers."""
    return sample_next(logits.double(), generator=torch.Generator().manual_seed(seed))


def _expected_changes(probs: Tensor, moved: Tensor) -> float:
    """Return the chance that a draw changes when each logit moves by a little, both (T, V).

    Token j follows the winner i within a distance d with probability p_i p_j d, to first order.
    The chance is thus half the mean distance between the moves of two tokens drawn from p: the sum,
    over the moves in ascending order, of each gap times the mass below it times the mass above it.
    """
    order = moved.argsort(dim=-1)
    below = probs.gather(-1, order).cumsum(-1)[:, :-1]
    gaps = moved.gather(-1, order).diff(dim=-1)
    return (gaps * below * (1 - below)).sum(-1).mean().item()


@invariant("sampling.race")
def no_more_than_drawn(data: Data) -> None:
    """Every way moves the logits a little, and changes some draws at most."""
    for row in data["rows"]:
        assert 0 <= row["changed"] <= data["draws"], row
        assert row["difference"] > 0, row
        assert row["one_in"] > 1, row


@table("sampling.race", result="sampling.race")
def race_table(data: Data) -> Table:
    """Lay out how far the logits moved, and how many tokens changed."""
    rows = [
        [
            row["name"],
            f"{row['difference']:.1e}",
            f"{row['changed']:,} of {data['draws']:,}",
            f"1 in {row['one_in']:,}",
        ]
        for row in data["rows"]
    ]
    headers = ["logits computed", "largest change", "tokens changed", "expected"]
    return Table(headers, rows, align="lrrr")


# --- Another library's choices ---


@measurement("sampling.peers", kind="exact")
def peers(size: Size) -> Data:
    """Count what lab35 and Hugging Face's warpers keep where they could differ."""
    from transformers.generation.logits_process import (
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    second = torch.tensor([[3.0, 2.0, 2.0, 2.0, 0.0]])
    first = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    five = torch.tensor([[float(text) for text in FIVE]]).log()
    top_k, top_p, temperature = TopKLogitsWarper, TopPLogitsWarper, TemperatureLogitsWarper
    cases = (
        (
            "k = 2, three tie for second place",
            second,
            {"top_k": 2},
            lambda z: top_k(2)(None, z),
        ),
        ("k = 1, two tie for first place", first, {"top_k": 1}, lambda z: top_k(1)(None, z)),
        ("p = 0.55", five, {"top_p": 0.55}, lambda z: top_p(0.55)(None, z)),
        ("p = 0", five, {"top_p": 0.0}, lambda z: top_p(0.0)(None, z)),
        ("τ = 0", five, {"temperature": 0.0}, lambda z: temperature(0.0)(None, z)),
    )
    rows = [
        {
            "name": name,
            "lab35": _kept(partial(filtered_logits, **settings), logits),
            "hugging_face": _kept(theirs, logits),
        }
        for name, logits, settings, theirs in cases
    ]
    at_least_two = top_p(0.1, min_tokens_to_keep=2)(None, five)
    return {"rows": rows, "min_tokens_to_keep": int(at_least_two.isfinite().sum())}


def _kept(filter_logits: Callable[[Tensor], Tensor], logits: Tensor) -> str:
    """Count what a filter keeps, or name its refusal."""
    try:
        return str(int(filter_logits(logits).isfinite().sum()))
    except ValueError:
        return "ValueError"


@table("sampling.peers", result="sampling.peers")
def peers_table(data: Data) -> Table:
    """Lay out how many tokens each keeps."""
    rows = [
        [row["name"], *map(outcome, (row["lab35"], row["hugging_face"]))] for row in data["rows"]
    ]
    return Table(["case", "lab35 keeps", "Hugging Face keeps"], rows, align="lrr")


# --- What greedy repeats ---


@measurement("sampling.repetition", kind="measured")
def repetition(size: Size) -> Data:
    """Continue the same beginnings in three ways, and count what each text says twice."""
    model, tokenizer = load_pretrained()
    new_tokens = size.pick(112, 12)
    prompts = [torch.tensor([tokenizer.encode(text)]) for text in PROMPTS[: size.pick(8, 1)]]
    found: Data = {"new": new_tokens, "texts": len(prompts), "window": WINDOW}
    for name, settings in SETTINGS.items():
        texts = [
            generate(
                model, prompt, new_tokens, **settings, generator=torch.Generator().manual_seed(1337)
            )
            for prompt in prompts
        ]
        shares = [repeated(text.new_tokens[0].tolist()) for text in texts]
        log_probs = torch.cat(
            [_log_probs(model, text.tokens, text.prompt_length) for text in texts]
        )
        found[name] = _summary(shares, log_probs)
        found[name]["text"] = tokenizer.decode(texts[0].tokens[0].tolist())
        if name == "greedy":
            same = torch.cat([_same_from_window(model, text) for text in texts])
            found["same_from_window"] = same.double().mean().item()
    human = tokenizer.encode(PASSAGE)
    pieces = [human[i : i + new_tokens] for i in range(0, len(human) - new_tokens + 1, new_tokens)]
    found["human"] = _summary(
        [repeated(piece) for piece in pieces], _log_probs(model, _passage(tokenizer), 1)
    )
    return found


def _summary(shares: Sequence[float], log_probs: Tensor) -> Data:
    """Mean and highest share of repetition, and the geometric mean of the tokens' probabilities."""
    return {
        "repeated": sum(shares) / len(shares),
        "worst": max(shares),
        "probability": log_probs.mean().exp().item(),
    }


def repeated(tokens: Sequence[int], n: int = 4) -> float:
    """Return the share of n-grams that stood earlier in the same text."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams)


@torch.inference_mode()
def _log_probs(model: GPT, tokens: Tensor, start: int) -> Tensor:
    """What the model gives to each token of (1, T) from `start` on, before any setting: (n, 1)."""
    logits = model(tokens[:, :-1])[0][0, start - 1 :]
    return logits.log_softmax(-1).gather(-1, tokens[:, start:].T)


@torch.inference_mode()
def _same_from_window(model: GPT, text: Generation) -> Tensor:
    """Mark the new tokens that are also the argmax after the last few tokens alone."""
    first = max(text.prompt_length, WINDOW)
    windows = text.tokens[0, first - WINDOW : -1].unfold(0, WINDOW, 1)
    return model(windows)[0][:, -1].argmax(-1) == text.tokens[0, first:]


@invariant("sampling.repetition")
def shares_are_shares(data: Data) -> None:
    """A share lies between none and all."""
    for name in (*SETTINGS, "human"):
        row = data[name]
        assert 0 <= row["repeated"] <= row["worst"] <= 1, name
        assert 0 < row["probability"] <= 1, name
    assert 0 <= data["same_from_window"] <= 1, data["same_from_window"]


@table("sampling.texts", result="sampling.repetition")
def texts_table(data: Data) -> Table:
    """Lay out one text of each kind."""
    rows = [[NAMES[name], f"{data[name]['text']} …"] for name in SETTINGS]
    return Table(["settings", "text"], rows, align="ll")


@table("sampling.repetition", result="sampling.repetition")
def repetition_table(data: Data) -> Table:
    """Lay out the shares of repeated 4-grams, and how likely the texts are."""
    names = NAMES | {"human": "Conan Doyle"}
    rows = [
        [
            names[key],
            f"{data[key]['repeated']:.1%}",
            f"{data[key]['worst']:.1%}",
            f"{data[key]['probability']:.2f}",
        ]
        for key in names
    ]
    headers = ["settings", "repeated", "worst text", "probability of a token"]
    return Table(headers, rows, align="lrrr")


# --- One real step ---


@measurement("sampling.trace", kind="measured")
def one_step(size: Size) -> Data:
    """Tell the step after "Sherlock Holmes" at the command line's defaults."""
    model, tokenizer = load_pretrained()
    idx = torch.tensor([tokenizer.encode("Sherlock Holmes")])
    generator = torch.Generator().manual_seed(1337)
    told = trace_step(model, idx, **SETTINGS["sampled"], generator=generator, candidates=40)
    drawn = next(i for i, each in enumerate(told.candidates) if each.token == told.drawn)
    return {
        "kept_by_top_k": told.kept_by_top_k,
        "kept_by_top_p": told.kept_by_top_p,
        "drawn": drawn,
        "candidates": [
            {
                "text": tokenizer.decode([each.token]).replace(" ", "␣").replace("\n", "⏎"),
                "probability": each.probability,
                "tempered": each.tempered,
                "final": each.final,
            }
            for each in told.candidates
        ],
    }


@invariant("sampling.trace")
def the_filters_raise_what_they_leave(data: Data) -> None:
    """What is left shares the mass of what is gone, and the draw is one of those that are left."""
    for each in data["candidates"]:
        assert each["final"] == 0 or each["final"] >= each["tempered"], each
    assert data["candidates"][data["drawn"]]["final"] > 0, data["drawn"]
