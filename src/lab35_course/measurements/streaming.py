"""What a token shows, what it makes wait, and what streaming costs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate, groupby, islice
from pathlib import Path
from types import SimpleNamespace

import tokenizers
import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor

import lab35
from lab35 import GPT, Tokenizer, generate, load_pretrained
from lab35.streaming import generate_stream, stream_decode
from lab35_course.plain import Markdown, code
from lab35_course.results import Data, Size, Table, invariant, measurement, table, time_paired

PROMPT = "Sherlock Holmes"
STOP = ("\n\n#", "said the Red King")
"""Stop strings that the text will not hold, and whose beginnings it is full of."""

CHARACTERS = {
    "em dash": "—",
    "one code point": "é",
    "e and an accent": "e\u0301",
    "emoji": "😀",
    "a flag": "🇬🇧",
    "a detective": "🕵️‍♂️",
}

PEER_TEXTS = (
    "“You saw it—all of it—then?” he asked. “Yes…”",
    "Donaudampfschifffahrtskapitän",
    "rows[i].append(j);print(rows[i])",
    "赤毛連盟、緋色の研究",
    "😀😀😀😀😀😀",
)
"""Dialogue, a long word, Python, Japanese and emoji."""


def _steps(ids: Sequence[int]) -> Iterator[SimpleNamespace]:
    """Pretend to be a loop that writes these ids."""
    for position, token_id in enumerate(ids, start=1):
        last = "max_new_tokens" if position == len(ids) else None
        yield SimpleNamespace(token=torch.tensor([[token_id]]), stop_reason=last)


# --- What is shown of a character ---


@measurement("streaming.characters", kind="exact")
def characters(size: Size) -> Data:
    """Take characters apart into tokens, and stream them."""
    _, tokenizer = load_pretrained()
    rows = []
    for name, text in CHARACTERS.items():
        ids = tokenizer.encode(text)
        rows.append(
            {
                "name": name,
                "text": text,
                "tokens": [tokenizer.token_bytes(i).hex(" ").upper() for i in ids],
                "alone": [tokenizer.decode([i]) for i in ids],
                "pieces": list(stream_decode(tokenizer, ids)),
            }
        )
    return {"rows": rows}


@invariant("streaming.characters")
def pieces_join_to_the_text(data: Data) -> None:
    """Nothing is lost, and nothing is replaced."""
    for row in data["rows"]:
        assert "".join(row["pieces"]) == row["text"], row


@table("streaming.characters", result="streaming.characters")
def characters_table(data: Data) -> Table:
    """Lay out bytes, what naive printing shows, and what streaming shows."""
    rows = []
    for row in data["rows"]:
        pieces = [" ".join(f"U+{ord(char):04X}" for char in piece) for piece in row["pieces"]]
        rows.append(
            [
                f"{row['text']} ({row['name']})",
                str(len(row["tokens"])),
                Markdown(" · ".join(code(token) for token in row["tokens"])),
                "".join(row["alone"]),
                " · ".join(pieces),
            ]
        )
    headers = ["text", "tokens", "their bytes", "decoded one by one", "pieces shown"]
    return Table(headers, rows, align="lrlll")


@measurement("streaming.timeline", kind="exact")
def timeline(size: Size) -> Data:
    """Follow the bytes of a short text: arrived, part of a whole character, shown."""
    _, tokenizer = load_pretrained()
    ids = tokenizer.encode("“No—\nO 😀\n\n")
    events = generate_stream(tokenizer, _steps(ids), stop=["\n\n"])
    rows, arrived, shown = [], b"", ""
    for event in events:
        if event.token_id is not None:
            token = tokenizer.token_bytes(event.token_id)
            arrived, shown = arrived + token, shown + event.text
            rows.append(
                {
                    "bytes": token.hex(" ").upper().split(),
                    "whole": len(arrived.decode("utf-8", errors="ignore").encode()),
                    "shown": len(shown.encode()),
                    "text": event.text,
                }
            )
    return {"rows": rows, "stop_reason": event.stop_reason}


# --- What waits in a text ---


def _write(model: GPT, prompt: Tensor, new_tokens: int) -> list[list[int]]:
    """Let the model write with the command line's defaults, past the end of its block."""
    made = generate(
        model,
        prompt,
        new_tokens,
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        generator=torch.Generator().manual_seed(1337),
        on_context_limit="refill",
    )
    return made.new_tokens.tolist()


def _waiting(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> list[int]:
    """Count the bytes that have arrived and are not shown, after each token."""
    arrived, shown, waiting = 0, 0, []
    for event in generate_stream(tokenizer, _steps(ids), stop=stop):
        if event.token_id is not None:
            if event.token_id != tokenizer.eos_id:
                arrived += len(tokenizer.token_bytes(event.token_id))
            shown += len(event.text.encode())
            waiting.append(arrived - shown)
    return waiting


@measurement("streaming.held", kind="measured")
def held(size: Size) -> Data:
    """Count the tokens of sampled texts after which something waits."""
    model, tokenizer = load_pretrained()
    prompts = torch.tensor([tokenizer.encode(PROMPT)] * size.pick(8, 2))
    texts = _write(model, prompts, size.pick(500, 40))
    byte_ids = {tokenizer.token_bytes(i): i for i in range(256)}
    as_bytes = [[byte_ids[bytes([b])] for b in tokenizer.decode(ids).encode()] for ids in texts]
    rows = []
    for tokens, written, stop in (
        ("the model's", texts, ()),
        ("single bytes", as_bytes, ()),
        ("the model's", texts, STOP[:1]),
        ("the model's", texts, STOP),
    ):
        waiting = [_waiting(tokenizer, ids, stop) for ids in written]
        flags = [[count > 0 for count in counts] for counts in waiting]
        read = sum(map(len, waiting))
        rows.append(
            {
                "tokens": tokens,
                "stop": [repr(string) for string in stop],
                "written": sum(map(len, written)),
                "read": read,
                "held": sum(map(sum, flags)),
                "share": sum(map(sum, flags)) / read,
                "most": max(map(max, waiting)),
                "in_a_row": max(map(_longest_run, flags)),
            }
        )
    return {"texts": len(texts), "new": len(texts[0]), "rows": rows}


def _longest_run(flags: Sequence[bool]) -> int:
    return max((len(list(group)) for flag, group in groupby(flags) if flag), default=0)


@invariant("streaming.held")
def only_a_little_waits(data: Data) -> None:
    """Everything is read, and what waits is part of a character or of a stop string."""
    for row in data["rows"]:
        assert row["read"] == row["written"], row
        assert row["most"] < (max(map(len, STOP)) + 3 if row["stop"] else 4), row


@table("streaming.held", result="streaming.held")
def held_table(data: Data) -> Table:
    """Lay out how often something waits, and how much."""
    rows = [
        [
            row["tokens"],
            Markdown(", ".join(code(string) for string in row["stop"]) or "none"),
            f"{row['held']:,} of {row['read']:,}",
            f"{row['share']:.2%}",
            f"{row['most']} bytes",
            str(row["in_a_row"]),
        ]
        for row in data["rows"]
    ]
    headers = [
        "tokens",
        "stop strings",
        "leave something waiting",
        "share",
        "most at once",
        "in a row",
    ]
    return Table(headers, rows, align="llrrrr")


# --- How long others wait ---


@measurement("streaming.peers", kind="measured")
def peers(size: Size) -> Data:
    """Feed the same ids to lab35, to `tokenizers` and to `transformers`."""
    _, tokenizer = load_pretrained()
    path = Path(lab35.__file__).parent / "assets" / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    rows = []
    for text in PEER_TEXTS:
        ids = tokenizer.encode(text)
        row: Data = {"text": text, "tokens": len(ids)}
        for stream, shown in (
            ("lab35", _shown_by_lab35(tokenizer, ids)),
            ("decode_stream", _shown_by_decode_stream(backend, ids)),
            ("text_streamer", _shown_by_text_streamer(backend, ids)),
        ):
            row[stream] = {"wait": _wait(tokenizer, ids, shown), "late": len(text) - shown[-1]}
        rows.append(row)
    versions = {name: version(name) for name in ("tokenizers", "transformers")}
    return {"rows": rows, "versions": versions}


def _shown_by_lab35(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Count the characters on the screen after each token."""
    events = generate_stream(tokenizer, _steps(ids))
    return list(accumulate(len(event.text) for event in islice(events, len(ids))))


def _shown_by_decode_stream(backend: tokenizers.Tokenizer, ids: Sequence[int]) -> list[int]:
    stream = DecodeStream(skip_special_tokens=False)
    return list(accumulate(len(stream.step(backend, token_id) or "") for token_id in ids))


def _shown_by_text_streamer(backend: tokenizers.Tokenizer, ids: Sequence[int]) -> list[int]:
    from transformers import PreTrainedTokenizerFast, TextStreamer

    printed: list[str] = []
    streamer = TextStreamer(
        PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    )
    streamer.on_finalized_text = lambda text, stream_end=False: printed.append(text)
    for token_id in ids:
        streamer.put(torch.tensor([token_id]))
    return list(accumulate(map(len, printed)))


def _wait(tokenizer: Tokenizer, ids: Sequence[int], shown: Sequence[int]) -> int:
    """Return the most tokens that any character waited for after its last byte had come."""
    arrived = accumulate(tokenizer.token_bytes(token_id) for token_id in ids)
    whole = [len(data.decode("utf-8", errors="ignore")) for data in arrived]
    return max(
        bisect_right(shown, character) - bisect_right(whole, character)
        for character in range(whole[-1])
    )


@invariant("streaming.peers")
def nobody_is_sooner(data: Data) -> None:
    """lab35 keeps no character waiting."""
    for row in data["rows"]:
        assert row["lab35"] == {"wait": 0, "late": 0}, row


@table("streaming.peers", result="streaming.peers")
def peers_table(data: Data) -> Table:
    """Lay out the longest wait in each stream."""
    rows = [
        [
            code(row["text"]),
            str(row["tokens"]),
            *(str(row[name]["wait"]) for name in ("lab35", "decode_stream", "text_streamer")),
            str(row["text_streamer"]["late"]),
        ]
        for row in data["rows"]
    ]
    headers = ["text", "tokens", "lab35", "DecodeStream", "TextStreamer", "at the end"]
    return Table(headers, rows, align="lrrrrr")


# --- What streaming costs ---


@measurement("streaming.cost", kind="measured", engine="the lean engine")
def cost(size: Size) -> Data:
    """Time the model and four ways to show what it writes, on the same tokens."""
    model, tokenizer = load_pretrained()
    prompt = torch.tensor([tokenizer.encode(PROMPT)])
    (ids,) = _write(model, prompt, size.pick(500, 20))
    steps = list(_steps(ids))
    timed = time_paired(
        {
            "model": lambda: _write(model, prompt, len(ids)),
            "stream_decode": lambda: list(stream_decode(tokenizer, ids)),
            "generate_stream": lambda: list(generate_stream(tokenizer, steps)),
            "stop": lambda: list(generate_stream(tokenizer, steps, stop=STOP)),
            "again": lambda: [tokenizer.decode(ids[:n]) for n in range(1, len(ids) + 1)],
        },
        repeats=size.pick(31, 2),
    )
    return timed | {"tokens": len(ids)}


@invariant("streaming.cost")
def times_are_positive(data: Data) -> None:
    """Every way takes some time."""
    for name, variant in data["variants"].items():
        assert variant["seconds"]["min"] > 0, name


@table("streaming.cost", result="streaming.cost")
def cost_table(data: Data) -> Table:
    """Lay out microseconds a token, and each as a share of the model's own."""
    names = {
        "model": "the model's steps, for comparison",
        "stream_decode": code("stream_decode"),
        "generate_stream": code("generate_stream"),
        "stop": Markdown("`generate_stream`, two stop strings"),
        "again": "decode everything again, each time",
    }
    rows = []
    for name, label in names.items():
        variant = data["variants"][name]
        seconds, speedup = variant["seconds"], variant["speedup"]["median"]
        each = [f"{1e6 * seconds[key] / data['tokens']:.2f} µs" for key in ("median", "min")]
        rows.append([label, *each, f"{1 / speedup:.2%}"])
    headers = [f"a token of {data['tokens']}", "median", "fastest", "of the model's time"]
    return Table(headers, rows, align="lrrr")
