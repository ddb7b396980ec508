"""The command line: `lab35 generate` writes a continuation as it comes.

The completion goes to stdout and everything else to stderr. Bad input is one line, and exit code 2.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
from importlib.metadata import version
from typing import Annotated, NoReturn

import torch
import typer
from typer.exceptions import TyperException

from lab35.checkpoint import CheckpointError, load_pretrained
from lab35.loop import Step, decode_steps

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__
)
"""The Typer application behind the console script."""


@app.callback(invoke_without_command=True)
def _lab35(
    ctx: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.")
    ] = False,
) -> None:
    """Generate text with the course's GPT."""
    if show_version:
        print(f"lab35 {version('lab35')}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "Sherlock Holmes",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy, 1 the model's odds.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 512 keeps all.")] = 40,
    top_p: Annotated[
        float, typer.Option(help="Keep the top tokens that reach this mass; 1 keeps all.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the draws.")] = 1337,
    cache: Annotated[bool, typer.Option(help="Keep keys and values, or recompute them.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
) -> None:
    """Continue a prompt; the text appears token by token.

    The end-of-text token ends it early, and so does the model's last position, unless --no-cache
    lets the window slide.
    """
    model, tokenizer = load_pretrained()
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("prompt must hold at least one character, got ''")
    steps = decode_steps(
        model,
        torch.tensor([ids]),
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=torch.Generator().manual_seed(seed),
        eos_id=tokenizer.eos_id,
        use_cache=cache,
    )
    if not as_json:
        print(prompt, end="", file=sys.stderr, flush=True)
    # A token can end inside a character: the decoder holds the bytes back until it is whole.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    taken: list[Step] = []
    pieces: list[str] = []
    for step in steps:
        taken.append(step)
        token_id = step.token.item()
        if token_id != tokenizer.eos_id:
            pieces.append(decoder.decode(tokenizer.token_bytes(token_id)))
            if not as_json:
                print(pieces[-1], end="", flush=True)
    pieces.append(decoder.decode(b"", final=True))
    if not as_json:
        print(pieces[-1])
        return
    result = {
        "prompt": prompt,
        "completion": "".join(pieces),
        "stop_reason": taken[-1].stop_reason if taken else "max_new_tokens",
        "tokens": [step.token.item() for step in taken],
        "token_forwards": sum(step.fed for step in taken),
    }
    print(json.dumps(result, ensure_ascii=False))


def main() -> None:
    """Run the command line; what the console script `lab35` calls.

    Raises:
        SystemExit: With 2 after bad input, told on one line of stderr.
    """
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
        sys.exit(status)
    except TyperException as error:
        _fail(error.format_message())
    except (ValueError, CheckpointError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader has left. Point stdout elsewhere, so that Python's own flush stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _fail(message: str) -> NoReturn:
    print("lab35: error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)
