"""What happens at the last position: what each policy sees, costs and loses."""

from __future__ import annotations

import torch
from torch import Tensor

from lab35 import GPT, GPTConfig, KVCache, generate, load_pretrained, sample_next
from lab35.context import (
    refill_start,
    refill_token_forwards,
    rotate,
    slide_token_forwards,
)
from lab35_course.results import Data, Size, Table, invariant, measurement, table

PASSAGE = """It was past ten when the bell rang, and a man in a wet coat was shown up
to our room. “You are Mr. Holmes,” said he, and sat down without being asked. “I have
walked from the river, and I was followed every step of the way.” Holmes drew the curtain
aside and looked down into the street. “There is nobody there now,” said he. “Pray begin
at the beginning, and take your time.”"""

POLICIES = {
    "stop": {},
    "slide": {"use_cache": False},
    "refill": {"on_context_limit": "refill"},
}


def _passage(length: int) -> Tensor:
    """Give the first tokens of the passage, shape (1, length)."""
    _, tokenizer = load_pretrained()
    return torch.tensor([tokenizer.encode(PASSAGE)[:length]])


def _small(block_size: int) -> GPT:
    """Build a model that is cheap to run: windows and counts depend on the block alone."""
    return GPT(GPTConfig(vocab_size=2, block_size=block_size, n_layer=1, n_head=1, n_embd=2)).eval()


def _drop_oldest(cache: KVCache) -> None:
    """Make room by what learned positions forbid: every entry moves down one place, as it is."""
    for stored in (cache.k, cache.v):
        stored[:, :, :, :-1] = stored[:, :, :, 1:].clone()
    cache.length -= 1


# --- What is visible -----------------------------------------------------------------------------


@measurement("context.windows", kind="exact")
def windows(size: Size) -> Data:
    """Watch the loops in a block of eight: which columns each step runs, and which it reads."""
    model, P, N = _small(8), 6, 13
    watched: Data = {"block": 8, "prompt": P, "new": N}
    for name, policy in POLICIES.items():
        steps: list[Data] = []

        def note(module: GPT, args: tuple[Tensor], kwargs: Data, steps: list = steps) -> None:
            fed, cache = args[0].shape[1], kwargs.get("cache")
            end, stored = P + len(steps), cache.length if cache is not None else 0
            steps.append({"first": end - fed - stored, "fed_from": end - fed, "end": end})

        hook = model.register_forward_pre_hook(note, with_kwargs=True)
        generate(model, torch.zeros(1, P, dtype=torch.int64), N, temperature=0, **policy)
        hook.remove()
        watched[name] = steps
    return watched


@invariant("context.windows")
def no_window_is_wider_than_the_block(data: Data) -> None:
    """Nothing is run that is not visible, and no more is visible than there are positions."""
    for name in POLICIES:
        for step in data[name]:
            assert step["end"] - step["first"] <= data["block"], (name, step)
            assert step["first"] <= step["fed_from"] < step["end"], (name, step)


# --- What it costs -------------------------------------------------------------------------------


@measurement("context.cost", kind="exact")
def cost(size: Size) -> Data:
    """Count what really runs through a model, far beyond its block."""
    model, S, P = _small(128), 128, 16
    rows = []
    for N in (100, 300, 1000):
        row: Data = {"new": N}
        for name, policy in POLICIES.items():
            made = generate(model, torch.zeros(1, P, dtype=torch.int64), N, temperature=0, **policy)
            got = made.new_tokens.shape[1]
            row[name] = {
                "tokens": got,
                "token_forwards": made.token_forwards,
                "each": made.token_forwards / got,
            }
        rows.append(row)
    asked = list(range(1, 401))
    return {
        "block": S,
        "prompt": P,
        "rows": rows,
        "cycle": {"fed": S, "tokens": S - S // 2 + 1, "each": S / (S - S // 2 + 1)},
        "ratio": rows[-1]["slide"]["token_forwards"] / rows[-1]["refill"]["token_forwards"],
        "curve": {
            "new": asked,
            "slide": [slide_token_forwards(P, N, S) for N in asked],
            "refill": [refill_token_forwards(P, N, S) for N in asked],
            "slide_visible": [min(S, P + N - 1) for N in asked],
            "refill_visible": _visible_after_refills(P, asked, S),
        },
    }


def _visible_after_refills(prompt_length: int, steps: list[int], block_size: int) -> list[int]:
    """List how many tokens each step of a refilling loop sees."""
    first, seen = 0, []
    for step in steps:
        end = prompt_length + step - 1
        if end - first > block_size:
            first = refill_start(end, block_size)
        seen.append(end - first)
    return seen


@invariant("context.cost")
def counts_follow_the_formulas(data: Data) -> None:
    """Compare what was counted with what the package's functions say."""
    P, S = data["prompt"], data["block"]
    for row in data["rows"]:
        N = row["new"]
        assert row["stop"]["tokens"] == min(N, S - P + 1), row
        assert row["stop"]["token_forwards"] == min(S, P + N - 1), row
        assert row["slide"]["token_forwards"] == slide_token_forwards(P, N, S), row
        assert row["refill"]["token_forwards"] == refill_token_forwards(P, N, S), row


@table("context.cost", result="context.cost")
def cost_table(data: Data) -> Table:
    """Lay out tokens and token-forwards of the three policies."""
    rows = [
        [
            f"{row['new']:,}",
            name,
            f"{row[name]['tokens']:,}",
            f"{row[name]['token_forwards']:,}",
            f"{row[name]['each']:.2f}",
        ]
        for row in data["rows"]
        for name in POLICIES
    ]
    headers = ["new tokens asked", "at the limit", "returned", "token-forwards", "for each"]
    return Table(headers, rows, align="rlrrr")


# --- Why a cache over learned positions cannot slide ---------------------------------------------


@measurement("context.keys", kind="measured")
@torch.inference_mode()
def keys(size: Size) -> Data:
    """Store a full block; crop one token off and store it again; compare what both have."""
    model, _ = load_pretrained()
    S = size.pick(model.config.block_size, 16)
    text = _passage(S + 1)
    caches = []
    for window in (text[:, :S], text[:, 1:]):
        cache = KVCache(model.config, batch_size=1, max_len=S)
        model(window, cache=cache)
        caches.append(cache)
    before, after = caches
    rows = []
    for layer in range(model.config.n_layer):
        row: Data = {"layer": layer}
        for name in ("k", "v"):
            old = getattr(before, name)[layer, 0, :, 1:]  # (H, S - 1, D), at positions 1 …
            new = getattr(after, name)[layer, 0, :, :-1]  # the same tokens, at positions 0 …
            largest = (old - new).abs().amax(dim=-1)
            moved = (old - new).norm(dim=-1) / new.norm(dim=-1)
            row[name] = {
                "vectors": largest.numel(),
                "unchanged": (largest < 1e-4).sum().item(),
                "least": largest.min().item(),
                "median": moved.median().item(),
            }
        rows.append(row)
    return {
        "tokens": S - 1,
        "vectors": sum(row[name]["vectors"] for row in rows for name in ("k", "v")),
        "unchanged": sum(row[name]["unchanged"] for row in rows for name in ("k", "v")),
        "least": min(row[name]["least"] for row in rows for name in ("k", "v")),
        "rows": rows,
    }


@invariant("context.keys")
def no_vector_survives(data: Data) -> None:
    """The point of the table: a crop leaves nothing of the cache as it was."""
    assert data["unchanged"] == 0, data
    assert data["least"] > 1e-4, data


@table("context.keys", result="context.keys")
def keys_table(data: Data) -> Table:
    """Lay out, for each layer, how many vectors are still right and how far they moved."""
    rows = []
    for row in data["rows"]:
        cells = [str(row["layer"])]
        for name in ("k", "v"):
            part = row[name]
            cells += [f"{part['unchanged']} of {part['vectors']}", f"{100 * part['median']:.1f} %"]
        rows.append(cells)
    headers = ["layer", "keys unchanged", "median change", "values unchanged", "median change"]
    return Table(headers, rows, align="rrrrr")


# --- What each policy loses ----------------------------------------------------------------------


@torch.inference_mode()
def _written_by_sliding(rows: int, length: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Let the sliding loop draw texts (B, length), and keep every distribution it drew from.

    Returns:
        The texts, and log-probabilities of shape (B, length, V): entry e is about token e, and
        those of the prompt stay 0.
    """
    model, tokenizer = load_pretrained()
    text = torch.tensor([tokenizer.encode("It was a dark night and")] * rows)
    logs = [torch.zeros(rows, text.shape[1], model.config.vocab_size)]
    while text.shape[1] < length:
        logits = model(text[:, -block_size:])[0][:, -1]
        logs.append(logits.log_softmax(-1)[:, None])
        text = torch.cat((text, sample_next(logits)), dim=1)
    return text, torch.cat(logs, dim=1)


@torch.inference_mode()
def _read_by_refilling(text: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Score a given text as the refilling loop would; also say how many tokens each step saw."""
    model, _ = load_pretrained()
    length = text.shape[1]
    logs = torch.zeros(*text.shape, model.config.vocab_size)
    seen = torch.zeros(length, dtype=torch.int64)
    first, end = 0, 0
    while end < length - 1:
        # One forward over a window gives what the cached steps in it would give.
        window = text[:, first : min(first + block_size, length - 1)]
        scored = model(window)[0].log_softmax(-1)
        fresh = end - first  # what the window before has scored already
        end = first + window.shape[1]
        logs[:, first + fresh + 1 : end + 1] = scored[:, fresh:]
        seen[first + fresh + 1 : end + 1] = torch.arange(fresh + 1, window.shape[1] + 1)
        first = refill_start(end + 1, block_size)
    return logs, seen


@torch.inference_mode()
def _read_by_dropping(text: Tensor, block_size: int) -> Tensor:
    """Score a given text with a cache that drops its oldest entry and keeps the rest as it is."""
    model, _ = load_pretrained()
    logs = torch.zeros(*text.shape, model.config.vocab_size)
    cache = KVCache(model.config, text.shape[0], max_len=block_size)
    for end in range(1, text.shape[1]):
        if cache.length == block_size:
            _drop_oldest(cache)
        logits, _ = model(text[:, end - 1 : end], cache=cache)
        logs[:, end] = logits[:, -1].log_softmax(-1)
    return logs


@torch.inference_mode()
def _read_through(text: Tensor, window: int, first: int) -> Tensor:
    """Score the tokens from `first` on, of which each is told only the last `window` before it."""
    model, _ = load_pretrained()
    logs = torch.zeros(*text.shape, model.config.vocab_size)
    for row, log in zip(text, logs, strict=True):
        windows = row[first - window : -1].unfold(0, window, 1)  # (T - first, window)
        log[first:] = model(windows)[0][:, -1].log_softmax(-1)
    return logs


def _compare(logs: Tensor, truth: Tensor, chosen: Tensor) -> Data:
    """Hold log-probabilities (B, T, V) against those that a text (B, T) was drawn from."""
    return {
        "loss": -logs.gather(-1, chosen[..., None]).mean().item(),
        "kl": (truth.exp() * (truth - logs)).sum(-1).mean().item(),
        "agree": (truth.argmax(-1) == logs.argmax(-1)).double().mean().item(),
    }


@measurement("context.lost", kind="measured")
def lost(size: Size) -> Data:
    """Let all policies read the same texts, and compare what they expect with the full window."""
    model, _ = load_pretrained()
    S = size.pick(model.config.block_size, 16)
    cycle = S - S // 2 + 1
    # The last whole cycle of refills ends with the text.
    text, slid = _written_by_sliding(size.pick(8, 2), S + 1 + size.pick(4, 2) * cycle, S)
    refilled, seen = _read_by_refilling(text, S)
    dropped = _read_by_dropping(text, S)
    beyond = torch.arange(S + 1, text.shape[1])  # tokens that a block cannot reach from the start

    def compare(logs: Tensor, where: Tensor = beyond) -> Data:
        return _compare(logs[:, where], slid[:, where], text[:, where])

    policies = {
        name: compare(logs)
        for name, logs in (("slide", slid), ("refill", refilled), ("drop", dropped))
    }
    windows = [
        {"tokens": c, **compare(_read_through(text, c, S + 1))}
        for c in size.pick((1, 2, 4, 8, 16, 32, 64), (1, 2, 4))
    ]
    visible = []
    for least in range(S // 2, S + 1, S // 8):
        most = min(S, least + S // 8 - 1) if least < S else S
        where = beyond[(seen[beyond] >= least) & (seen[beyond] <= most)]
        visible.append({"least": least, "most": most, **compare(refilled, where)})
    ages = size.pick([(1, 16), (17, 64), (65, 128), (129, 256)], [(1, 16)])
    return {
        "block": S,
        "texts": text.shape[0],
        "predictions": text.shape[0] * len(beyond),
        "policies": policies,
        "windows": windows,
        # The shortest fresh window that is better than a full cache of stale entries.
        "worth": min(
            (row["tokens"] for row in windows if row["kl"] < policies["drop"]["kl"]), default=S
        ),
        "visible": visible,
        "dropped": [{"from": a, "to": b, **compare(dropped, beyond[a - 1 : b])} for a, b in ages],
    }


@invariant("context.lost")
def the_full_window_is_the_measure(data: Data) -> None:
    """A refill that has grown to the full window is the full window; dropping never is."""
    slide, refill, drop = (data["policies"][name] for name in ("slide", "refill", "drop"))
    assert slide["kl"] == 0, slide
    assert slide["agree"] == 1, slide
    assert data["visible"][-1]["kl"] < 1e-5, data["visible"]
    assert refill["kl"] > 1e-5, refill
    assert drop["kl"] > 1e-3, drop


@table("context.lost", result="context.lost")
def lost_table(data: Data) -> Table:
    """Lay out loss, distance and agreement for each policy."""
    titles = {
        "slide": "slide: run the window anew",
        "refill": "refill: keep the last half",
        "drop": "drop the oldest entry, keep the rest",
    }
    rows = [
        [
            title,
            f"{data['policies'][name]['loss']:.3f}",
            f"{data['policies'][name]['kl']:.3f}",
            f"{100 * data['policies'][name]['agree']:.0f} %",
        ]
        for name, title in titles.items()
    ]
    headers = ["at the limit", "loss, nats a token", "KL from sliding, nats", "same first choice"]
    return Table(headers, rows, align="lrrr")


@table("context.visible", result="context.lost")
def visible_table(data: Data) -> Table:
    """Lay out the refill's distance from the full window by how much it sees."""
    rows = [
        [
            f"{row['least']} to {row['most']}" if row["least"] < row["most"] else f"{row['least']}",
            f"{row['kl']:.3f}",
            f"{100 * row['agree']:.0f} %",
        ]
        for row in data["visible"]
    ]
    return Table(
        ["tokens visible", "KL from sliding, nats", "same first choice"], rows, align="rrr"
    )


@table("context.dropped", result="context.lost")
def dropped_table(data: Data) -> Table:
    """Lay out how the error of a cache that drops entries grows."""
    rows = [
        [
            f"{row['from']} to {row['to']}",
            f"{row['kl']:.2f}",
            f"{100 * row['agree']:.0f} %",
        ]
        for row in data["dropped"]
    ]
    headers = ["entries dropped", "KL from sliding, nats", "same first choice"]
    return Table(headers, rows, align="rrr")


@measurement("context.texts", kind="measured")
@torch.inference_mode()
def texts(size: Size) -> Data:
    """Let each policy write on, with the same draws, and keep the end of what it wrote."""
    model, tokenizer = load_pretrained()
    S = size.pick(model.config.block_size, 16)
    prompt, N, shown = _passage(S), size.pick(240, 24), size.pick(40, 8)
    settings = {"temperature": 0.7, "top_k": 40}
    rows = []
    for name in ("slide", "refill"):
        drawn = torch.Generator().manual_seed(1337)
        made = generate(
            model, prompt, N, **settings, **POLICIES[name], generator=drawn, block_size=S
        )
        rows.append({"policy": name, "text": tokenizer.decode(made.tokens[0, -shown:].tolist())})

    drawn = torch.Generator().manual_seed(1337)
    cache, text = KVCache(model.config, 1, max_len=S), prompt
    logits, _ = model(prompt, cache=cache)
    for _ in range(N):
        token = sample_next(logits[:, -1], **settings, generator=drawn)
        text = torch.cat((text, token), dim=1)
        _drop_oldest(cache)
        logits, _ = model(token, cache=cache)
    rows.append({"policy": "drop", "text": tokenizer.decode(text[0, -shown:].tolist())})
    return {"prompt": S, "new": N, "shown": shown, "rows": rows}


@table("context.texts", result="context.texts")
def texts_table(data: Data) -> Table:
    """Lay out the texts under each other."""
    rows = [[row["policy"], " ".join(row["text"].split())] for row in data["rows"]]
    return Table(["at the limit", f"the last {data['shown']} of {data['new']} tokens"], rows, "ll")


# --- Rotary positions ----------------------------------------------------------------------------


def _toy(x: Tensor, layers: Tensor, window: int, first: int = 0) -> Tensor:
    """Run a stack of rotary attention heads over x (T, D), numbered from `first`.

    Each token sees itself and the `window - 1` tokens before it, in every layer.
    """
    i = torch.arange(first, first + len(x))
    distance = i[:, None] - i
    hidden = (distance < 0) | (distance >= window)
    for W_q, W_k, W_v in layers:
        q, k = rotate(x @ W_q, i), rotate(x @ W_k, i)
        scores = (q @ k.T / x.shape[1] ** 0.5).masked_fill(hidden, -torch.inf)
        x = x + scores.softmax(dim=-1) @ (x @ W_v)
    return x


def _toy_sliding(x: Tensor, layers: Tensor, window: int) -> Tensor:
    """Run the same stack token by token, with a cache that drops its oldest entry; last row."""
    stored: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    for i in range(len(x)):
        row, position = x[i : i + 1], torch.tensor([i])
        for (W_q, W_k, W_v), cache in zip(layers, stored, strict=True):
            cache.append((rotate(row @ W_k, position), row @ W_v))
            del cache[:-window]
            k, v = (torch.cat(parts) for parts in zip(*cache, strict=True))
            q = rotate(row @ W_q, position)
            row = row + (q @ k.T / x.shape[1] ** 0.5).softmax(dim=-1) @ v
    return row[0]


@measurement("context.rope", kind="measured")
def rope(size: Size) -> Data:
    """Slide a cache over rotary layers, and ask what the window alone would have given."""
    W, D, T = 8, 16, 30
    x = torch.randn(T, D, dtype=torch.float64)

    def alone(x: Tensor, layers: Tensor, window: int) -> Tensor:
        return _toy(x[-window:], layers, window)[-1]

    rows = []
    for L in size.pick((1, 2, 3, 4), (1, 2)):
        layers = torch.randn(L, 3, D, D, dtype=torch.float64) / D**0.5
        slid, anew = _toy_sliding(x, layers, W), alone(x, layers, W)
        reach: Data = {}
        for name, run, before in (("slid", _toy_sliding, slid), ("alone", alone, anew)):
            moves = []
            for back in range(T):
                changed = x.clone()
                changed[T - 1 - back] += 1
                moves.append(not torch.equal(run(changed, layers, W), before))
            reach[name] = T - 1 - moves[::-1].index(True)
        rows.append(
            {
                "layers": L,
                "difference": (slid - anew).abs().max().item(),
                "relative": ((slid - anew).norm() / anew.norm()).item(),
                "banded": (slid - _toy(x, layers, W)[-1]).abs().max().item(),
                "reach": reach,
            }
        )
    return {"window": W, "tokens": T, "rows": rows}


@invariant("context.rope")
def one_layer_slides_and_two_remember(data: Data) -> None:
    """Without layers below, keys know their own token alone; above them they know more."""
    for row in data["rows"]:
        assert row["banded"] < 1e-10, row
        assert (row["difference"] < 1e-10) == (row["layers"] == 1), row
        assert row["reach"]["alone"] == data["window"] - 1, row
        assert row["reach"]["slid"] == row["layers"] * (data["window"] - 1), row


@table("context.rope", result="context.rope")
def rope_table(data: Data) -> Table:
    """Lay out what the slid cache differs by, and how far back it can be moved from."""
    rows = [
        [
            str(row["layers"]),
            f"{row['difference']:.0e}" if row["difference"] < 1e-10 else f"{row['difference']:.2f}",
            f"{row['reach']['alone']}",
            f"{row['reach']['slid']}",
        ]
        for row in data["rows"]
    ]
    headers = [
        "layers",
        "last outputs differ by",
        "tokens back, window run anew",
        "tokens back, cache slid",
    ]
    return Table(headers, rows, align="rrrr")
