"""The shipped checkpoint: how it was trained, and how its tokenizer cuts text."""

from __future__ import annotations

import math

from lab35.checkpoint import ASSETS, MODEL_FILE, load_pretrained, read_record
from lab35_course.plain import Markdown, code
from lab35_course.results import Data, Size, Table, invariant, measurement, table

TEXTS = ("Holmes", "Sherlock Holmes", "It was a dark night and", "My dear Watson, said he, I")


@measurement("training.record", kind="exact")
def record(size: Size) -> Data:
    """Read the training record out of the checkpoint, and add its sizes."""
    model, tokenizer = load_pretrained()
    record = read_record()
    recipe, parameters = record["recipe"], list(model.parameters())
    tokens_seen = record["steps"] * recipe["batch_size"] * model.config.block_size
    return {
        **record,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "weight_bytes": sum(parameter.nbytes for parameter in parameters),
        "file_bytes": (ASSETS / MODEL_FILE).stat().st_size,
        "block_size": model.config.block_size,
        # Rounded: the last bit of exp and log is the machine's own.
        "passes": round(tokens_seen / record["train_tokens"], 1),
        "perplexity": round(math.exp(record["held_out_nats_per_token"]), 2),
        "uniform_nats": round(math.log(tokenizer.vocab_size), 2),
    }


@invariant("training.record")
def best_is_lowest(data: Data) -> None:
    """The shipped weights are those of the lowest held-out point on the curve."""
    best = min(data["curve"], key=lambda point: point["held_out"])
    assert best["step"] == data["best_step"], f"lowest at step {best['step']}"
    assert best["held_out"] == data["held_out_nats_per_token"], f"lowest is {best['held_out']}"


@invariant("training.record")
def bits_follow_from_nats(data: Data) -> None:
    """Bits a byte are the same loss in other units."""
    bits = data["held_out_nats_per_token"] * (data["held_out_tokens"] - 1) / math.log(2)
    expected = bits / data["held_out_bytes"]
    assert math.isclose(data["held_out_bits_per_byte"], expected), f"expected {expected}"


@table("training.record", result="training.record")
def record_table(data: Data) -> Table:
    """What was trained, on what, and how well it does."""
    versions = data["versions"]
    return Table(
        headers=["Quantity", "Value"],
        rows=[
            ["Parameters", f"{data['parameters']:,}"],
            ["Weights in float32", f"{data['weight_bytes']:,} bytes"],
            ["Weight file with its header", f"{data['file_bytes']:,} bytes"],
            ["Text, first digits of its sha256", code(data["corpus_sha256"][:16])],
            ["Tokens to train on", f"{data['train_tokens']:,}"],
            ["Tokens held out", f"{data['held_out_tokens']:,}"],
            ["Bytes held out", f"{data['held_out_bytes']:,}"],
            ["Steps taken", f"{data['steps']:,}"],
            ["Best step, whose weights are shipped", f"{data['best_step']:,}"],
            ["Held-out loss, nats a token", f"{data['held_out_nats_per_token']:.3f}"],
            ["Held-out loss, bits a byte", f"{data['held_out_bits_per_byte']:.3f}"],
            ["Seed", str(data["recipe"]["seed"])],
            ["Trained on", f"{data['date']}, {data['threads']} CPU threads"],
            [f"Versions of {', '.join(versions)}", ", ".join(versions.values())],
        ],
        align="lr",
    )


@table("training.recipe", result="training.record")
def recipe_table(data: Data) -> Table:
    """The settings of the run."""
    recipe = data["recipe"]
    return Table(
        headers=["Setting", "Value"],
        rows=[
            ["Windows a step, tokens each", f"{recipe['batch_size']} × {data['block_size']}"],
            ["Second beta of AdamW", f"{recipe['beta2']}"],
            ["Weight decay, on matrices alone", f"{recipe['weight_decay']}"],
            ["Steps of linear warm-up", f"{recipe['warmup']}"],
            ["Highest learning rate", f"{recipe['learning_rate']}"],
            ["Lowest, after a cosine", f"{recipe['final_fraction']:.0%} of it"],
            ["Dropout", f"{recipe['dropout']}"],
            ["Decay of the averaged weights", f"{recipe['average_decay']}"],
            ["Steps between two held-out losses", f"{recipe['eval_every']}"],
        ],
        align="lr",
    )


@measurement("training.tokenizer", kind="exact")
def tokenizer(size: Size) -> Data:
    """Cut four texts into tokens."""
    _, tokenizer = load_pretrained()
    cuts = []
    for text in TEXTS:
        ids = tokenizer.encode(text)
        tokens = [tokenizer.token_bytes(i).decode("utf-8", "backslashreplace") for i in ids]
        cuts.append({"text": text, "count": len(ids), "tokens": tokens})
    return {"texts": cuts}


@invariant("training.tokenizer")
def nothing_is_lost(data: Data) -> None:
    """The tokens of a text, put together, are the text."""
    for cut in data["texts"]:
        assert "".join(cut["tokens"]) == cut["text"], f"{cut['tokens']} is not {cut['text']!r}"
        assert len(cut["tokens"]) == cut["count"], f"{cut['text']!r} has {len(cut['tokens'])}"


@table("training.tokenizer", result="training.tokenizer")
def tokenizer_table(data: Data) -> Table:
    """Each text, and the tokens it becomes."""
    return Table(
        headers=["Text", "Tokens", "Cut into"],
        rows=[
            [
                code(cut["text"]),
                str(cut["count"]),
                Markdown(" ".join(code(token.replace(" ", "␣")) for token in cut["tokens"])),
            ]
            for cut in data["texts"]
        ],
        align="lrl",
    )
