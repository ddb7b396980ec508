"""The engines: equal logits, texts and reasons to stop, and a way out without a compiler."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lab35 import GPT, ContextLimitError, Generation, GPTConfig, KVCache, decode_steps, generate
from lab35.batching import position_ids
from lab35.cli import main
from lab35.sampling import Sampler, probabilities, race
from lab35.speed import (
    Compiled,
    Eager,
    Engine,
    Jitted,
    JittedRows,
    Lean,
    LeanRows,
    OneWrite,
    Recorded,
    Textbook,
    cache_folder,
    choice,
    choose_engine,
    compiled,
    loops,
    new_engine,
    recorded,
    storage,
    why_not,
)
from lab35.speed.engine import check_step
from lab35.speed.prompt import run_prompt
from lab35.speed.weights import Weights
from lab35.verification import verify, verify_cache

ROWS = {"eager": Eager, "lean": LeanRows, "numba": JittedRows}
"""The engines that write several texts at once."""

RUNGS = {
    "textbook": Textbook,
    "one_write": OneWrite,
    "lean": Lean,
    "compiled": Compiled,
    "numba": Jitted,
    "recorded": Recorded,
}
FAST = ("lean", "compiled", "numba")


def or_skip(name: str, model: GPT) -> str:
    """Skip an engine that this machine cannot have, unless everything is required."""
    reason = None
    if name == "numba" and find_spec("numba") is None:
        reason = "numba is not installed: pip install numba"
    if name == "compiled" and (told := why_not("compiled", model)):
        reason = (
            f"nothing can be compiled here, a C++ compiler as of apt install g++ may do: {told}"
        )
    if reason and os.environ.get("LAB35_REQUIRE_ALL"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return name


@pytest.fixture(params=FAST)
def engine(request: pytest.FixtureRequest, model: GPT) -> str:
    """Name each engine that is not the model itself."""
    return or_skip(request.param, model)


@pytest.fixture(params=("lean", "numba"))
def batch_engine(request: pytest.FixtureRequest, model: GPT) -> str:
    """Name each engine for several texts that is not the model itself."""
    return or_skip(request.param, model)


@pytest.fixture(params=RUNGS)
def rung(request: pytest.FixtureRequest, model: GPT, no_recording: None) -> Engine:
    """Make each rung of the ladder, empty."""
    return RUNGS[or_skip(request.param, model)](model)


@pytest.fixture
def no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what a CUDA graph would repeat: only the recording itself needs a GPU."""
    monkeypatch.setattr(recorded, "_record", lambda run, device: run)


def last_logits(model: GPT, idx: Tensor) -> Tensor:
    """Score the whole text without a cache."""
    with torch.inference_mode():
        return model(idx)[0][:, -1]


@pytest.mark.parametrize("P", [1, 16, 127])
def test_every_rung_scores_what_the_uncached_model_scores(
    model: GPT, passage: list[int], rung: Engine, P: int
) -> None:
    """Logits agree at every step up to the last position, and choices wherever they are clear."""
    idx = torch.tensor([passage[:P]])
    report = verify(rung, lambda idx: last_logits(model, idx), idx, 129 - P)
    assert report.passed, report
    assert report.tokens_equal, "pick a prompt whose choices are clear"
    assert rung.length == 128


@pytest.mark.parametrize("name", [name for name in RUNGS if name != "compiled"])
def test_rungs_run_models_of_other_sizes(tiny_model: GPT, name: str, no_recording: None) -> None:
    """Three layers, three heads of five: no number of the reference model is built in."""
    check_other_sizes(tiny_model, or_skip(name, tiny_model))


@pytest.mark.slow
def test_the_compiled_rung_runs_models_of_other_sizes(tiny_model: GPT) -> None:
    """As above, where it takes half a minute."""
    check_other_sizes(tiny_model, or_skip("compiled", tiny_model))


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_text_compiles_its_step_and_leaves_the_process_as_it_was(
    model: GPT, prompt: Tensor, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty folder, with nothing left but the file, wherever torch stores by itself."""
    stores = Path(tempfile.mkdtemp(dir=fresh))
    monkeypatch.setattr("torch._inductor.codecache._HEADER_DIR", str(stores / "headers"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(stores / "inductor"))
    before = torch.get_rng_state(), torch.get_num_threads()
    or_skip("compiled", model)  # compiles
    expected = generate(model, prompt, 20, temperature=0, engine="eager")
    found = generate(model, prompt, 20, temperature=0, engine="compiled")
    assert torch.equal(expected.tokens, found.tokens)
    assert [] == [*stores.iterdir()], "torch has stored something where others might"
    names = {path.name for path in cache_folder().rglob("*") if path.is_file()}
    assert names == {"step.pt2", "SHA256SUMS"}
    assert len([*cache_folder().iterdir()]) == 1
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == torch.get_num_threads()


@pytest.mark.slow
@pytest.mark.parametrize("default", ["float64", "meta"])
def test_a_step_is_compiled_the_same_whatever_torch_makes_by_default(
    model: GPT, prompt: Tensor, fresh: Path, default: str
) -> None:
    """The file outlives the moment, so the caller's defaults must not get into it."""
    or_skip("numba", model)  # with everything there, nothing below may fall back
    expected = generate(model, prompt, 20, temperature=0, engine="eager").tokens
    previous = torch.get_default_dtype()
    try:
        if default == "float64":
            torch.set_default_dtype(torch.float64)
            generate(model, prompt, 2, temperature=0, engine="compiled")
        else:
            with torch.device("meta"):
                new_engine("compiled", model)
    finally:
        torch.set_default_dtype(previous)
    found = generate(model, prompt, 20, temperature=0, engine="compiled").tokens
    assert expected.tolist() == found.tolist()
    assert or_skip("compiled", model)


def check_other_sizes(model: GPT, name: str) -> None:
    """Decode to the end of a model's block, and compare."""
    reference = lambda idx: last_logits(model, idx)  # noqa: E731
    assert verify(RUNGS[name](model), reference, torch.tensor([[3, 1, 2]]), 79).passed


def test_the_loops_that_numba_compiles_are_right_as_plain_python(
    model: GPT, prompt: Tensor
) -> None:
    """Without numba, the same function scores and stores what the model does."""
    cache = KVCache(model.config, 1)
    with torch.inference_mode():
        model(prompt[:, :-1], cache=cache)
        kv = torch.cat((cache.k, cache.v), dim=1).clone().numpy()  # (L, 2, H, T, D)
        expected = model(prompt[:, -1:], cache=cache)[0][0, -1]
    at, logits = prompt.shape[1] - 1, np.empty(512, np.float32)
    loops._decode(prompt[0, -1].item(), at, loops._places(Weights.of(model)), kv, logits)
    assert np.abs(logits - expected.numpy()).max() < 1e-4
    stored = torch.cat((cache.k, cache.v), dim=1).numpy()
    assert np.abs(kv - stored).max() < 1e-5


@pytest.mark.parametrize("jitted", [False, True])
def test_the_exponential_of_the_loops(jitted: bool) -> None:
    """It follows the real one as far as float32 goes, and stays finite and positive beyond."""
    exp = loops._exp
    if jitted:
        or_skip("numba", GPT(GPTConfig(n_layer=1)))
        exp = loops._jit({"_exp": loops._exp})["_exp"]
    for x in np.linspace(-87, 87, 2001, dtype=np.float32):
        assert exp(x) == pytest.approx(np.exp(np.float64(x)), rel=1e-5)
    for x in (-1e4, -np.inf):
        assert 0 < exp(np.float32(x)) < 1e-37
    for x in (1e4, np.inf):
        assert 1e37 < exp(np.float32(x)) < np.inf


def test_the_gelu_of_the_loops() -> None:
    """Far out it is 0 on one side and the identity on the other, as torch's is."""
    x = np.concatenate([np.linspace(-9, 9, 999), [-1e4, -50, 50, 1e4]]).astype(np.float32)
    expected = nn.functional.gelu(torch.from_numpy(x.copy()), approximate="tanh").numpy()
    loops._gelu(x)
    assert np.abs(x - expected).max() < 1e-5


# --- one suite for every engine ------------------------------------------------------------------


CASES = {
    "greedy": {"P": 16, "N": 100},
    "nothing": {"P": 5, "N": 0},
    "one": {"P": 5, "N": 1},
    "fits": {"P": 120, "N": 9},
    "limit": {"P": 120, "N": 20},
    "full": {"P": 128, "N": 20},
    "refill": {"P": 120, "N": 40, "on_context_limit": "refill"},
    "long_prompt": {"P": 130, "N": 10, "on_context_limit": "refill"},
    "small_block": {"P": 10, "N": 10, "block_size": 12},
    "small_block_refill": {"P": 10, "N": 30, "block_size": 12, "on_context_limit": "refill"},
    "sampled": {"P": 10, "N": 60, "temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "sampled_refill": {"P": 100, "N": 60, "temperature": 1.0, "on_context_limit": "refill"},
}


@pytest.mark.parametrize("case", CASES)
def test_engines_write_the_same(model: GPT, passage: list[int], engine: str, case: str) -> None:
    """Tokens, counts and the reason to stop are those of the model itself."""
    arguments = dict(CASES[case])
    idx, N = torch.tensor([passage[: arguments.pop("P")]]), arguments.pop("N")
    made = [
        generate(
            model,
            idx,
            N,
            **{"temperature": 0} | arguments,
            generator=torch.Generator().manual_seed(1337),
            engine=name,
        )
        for name in ("eager", engine)
    ]
    assert made[0].tokens.tolist() == made[1].tokens.tolist()
    for field in ("prompt_length", "stop_reason", "forwards", "token_forwards"):
        assert getattr(made[0], field) == getattr(made[1], field), field


def test_engines_end_at_the_end_of_text(model: GPT, prompt: Tensor, engine: str) -> None:
    """The token that ends a text ends it under each engine, and at the same place."""
    text = generate(model, prompt, 12, temperature=0, engine="eager").new_tokens[0].tolist()
    eos = text[7]
    made = generate(model, prompt, 12, temperature=0, eos_id=eos, engine=engine)
    assert made.new_tokens[0].tolist() == text[: text.index(eos) + 1]
    assert made.stop_reason == "eos"


def test_engines_raise_at_the_context_limit(model: GPT, passage: list[int], engine: str) -> None:
    """The strict policy tells how far it came, and a long prompt is refused at the call."""
    arguments = {"temperature": 0, "on_context_limit": "raise", "engine": engine}
    with pytest.raises(ContextLimitError, match="128 positions are used after 9 of 20 tokens"):
        generate(model, torch.tensor([passage[:120]]), 20, **arguments)
    with pytest.raises(ContextLimitError, match=r"block_size=128.*got 130"):
        decode_steps(model, torch.tensor([passage[:130]]), 20, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"idx": torch.zeros(1, 0, dtype=torch.int64)},
        {"idx": torch.tensor([[1, 512]])},
        {"idx": torch.tensor([[1.0]])},
        {"max_new_tokens": -1},
        {"temperature": -0.5},
        {"top_p": 0.0},
        {"eos_id": 512},
        {"block_size": 129},
        {"on_context_limit": "slide"},
    ],
)
def test_engines_refuse_in_the_same_words(model: GPT, engine: str, arguments: dict) -> None:
    """Bad input is found before an engine is chosen."""
    told = []
    for name in ("eager", engine):
        with pytest.raises(ValueError, match="must") as caught:
            generate(
                model,
                **{"idx": torch.tensor([[1, 2]]), "max_new_tokens": 2, "engine": name} | arguments,
            )
        told.append(str(caught.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["blocks.1.fc.bias", "blocks.3.ln_2.weight", "ln_f.bias"])
def test_engines_refuse_logits_that_are_no_numbers(
    model: GPT, prompt: Tensor, engine: str, place: str, value: float
) -> None:
    """A model that is broken says so under each engine, also where only a step meets the fault."""
    model = copy.deepcopy(model)
    steps = decode_steps(model, prompt, 3, engine=engine)
    next(steps)
    with torch.no_grad():
        model.get_parameter(place)[3] = value
    with pytest.raises(ValueError, match="logits must hold no NaN and no"):
        next(steps)


def test_engines_leave_the_random_state_alone(model: GPT, prompt: Tensor, engine: str) -> None:
    """With a generator of its own, a text draws nothing from torch's."""
    before = torch.get_rng_state()
    generate(model, prompt, 5, generator=torch.Generator().manual_seed(1), engine=engine)
    assert torch.equal(before, torch.get_rng_state())


def test_two_texts_at_once_do_not_mix(model: GPT, prompt: Tensor, engine: str) -> None:
    """Each iterator has a cache of its own, also where both share one compiled function."""
    alone = generate(model, prompt, 8, temperature=0, engine=engine).new_tokens[0].tolist()
    other = decode_steps(model, prompt[:, 1:], 8, temperature=0, engine=engine)
    mixed = []
    for step in decode_steps(model, prompt, 8, temperature=0, engine=engine):
        mixed.append(step.token.item())
        next(other)
    assert alone == mixed


def test_engines_follow_the_weights(model: GPT, prompt: Tensor, engine: str) -> None:
    """Weights that change in place, or are replaced, are the ones that the next text runs on."""
    model = copy.deepcopy(model)
    generate(model, prompt, 2, temperature=0, engine=engine)
    with torch.no_grad():
        model.blocks[1].fc.weight.mul_(1.5)
    model.blocks[2].proj.weight = nn.Parameter(model.blocks[2].proj.weight.flip(0).clone())
    texts = [generate(model, prompt, 20, temperature=0, engine=e) for e in ("eager", engine)]
    assert texts[0].tokens.tolist() == texts[1].tokens.tolist()


def test_engines_ignore_the_default_dtype(model: GPT, prompt: Tensor, engine: str) -> None:
    """Buffers are float32 because the weights are, whatever torch makes by default."""
    expected = generate(model, prompt, 9, temperature=0, engine="eager")
    torch.set_default_dtype(torch.float64)
    try:
        found = generate(model, prompt, 9, temperature=0, engine=engine)
    finally:
        torch.set_default_dtype(torch.float32)
    assert expected.tokens.tolist() == found.tokens.tolist()


# --- the draw in plain loops ---------------------------------------------------------------------


class Given(Jitted):
    """Draws from logits that it is given: the loops without a model."""

    def __init__(self, model: GPT) -> None:
        super().__init__(model)
        best = loops._jit({"_best": loops._best})["_best"]

        def decode(token: int, at: int, places: object, kv: object, logits: np.ndarray) -> int:
            logits[:] = self.given.numpy()
            return best(logits)

        self.decode = decode

    def _step(self, token: Tensor, at: int) -> Tensor:
        return self.given


@pytest.fixture(scope="module")
def given(model: GPT) -> Given:
    """Make one, behind a first token."""
    or_skip("numba", model)
    engine = Given(model)
    with torch.inference_mode():
        engine.prefill(torch.tensor([[1]]))
    return engine


def drawn(engine: Given, logits: Tensor, choose: Callable) -> int | str:
    """Let an engine choose after logits of shape (512,); a refusal is what it says."""
    engine.given, engine.length = logits, 1
    try:
        with torch.inference_mode():
            return engine.next(torch.tensor([[0]]), choose).item()
    except ValueError as error:
        return str(error)


def asked(logits: Tensor, choose: Callable) -> int | str:
    """Ask the function that defines the answer."""
    try:
        return choose(logits[None]).item()
    except ValueError as error:
        return str(error)


@pytest.fixture
def fallbacks(given: Given, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the draws, and those that were left to the function that defines the answer."""
    counts = [0, 0]
    original = given.draw

    def draw(*arguments: object) -> int:
        token = original(*arguments)
        counts[0] += 1
        counts[1] += token < 0
        return token

    monkeypatch.setattr(given, "draw", draw)
    return counts


def shapes_of(model: GPT, passage: list[int]) -> list[tuple[str, Tensor]]:
    """Make rows of logits: of the model, random, with ties, with tokens that are forbidden."""
    generator = torch.Generator().manual_seed(61)
    with torch.inference_mode():
        real = model(torch.tensor([passage[:128]]))[0][0].clone()
    noise = torch.randn(128, 512, generator=generator)
    rare = (real > real.topk(30).values[:, -1:]) | (noise > 2.5)
    return [
        ("real", real),
        ("random", 3 * noise),
        ("flat", 0.01 * noise),
        ("wide", 60 * noise),
        ("tied", (2 * real).round() / 2),
        ("forbidden", real.masked_fill(~rare, -torch.inf)),
        ("shifted", real + 1e5),
    ]


DRAWS = [
    (temperature, top_k, top_p)
    for temperature in (1e-300, 1e-6, 0.2, 0.8, 1.0, 2.5, 1e30, 1.7e308)
    for top_k in (1, 2, 40, 64)
    for top_p in (None, 1e-30, 0.5, 0.95, 1.0)
]


def test_the_loops_draw_what_the_sampler_draws(
    model: GPT, passage: list[int], given: Given, fallbacks: list[int]
) -> None:
    """20,000 tokens are equal, and so is the generator's state after each run of them."""
    for look, stack in shapes_of(model, passage):
        one, other = (torch.Generator().manual_seed(62) for _ in range(2))
        for n in range(3000):
            settings = DRAWS[n % len(DRAWS)]
            row = stack[n % 127]
            expected = asked(row, Sampler(*settings, one))
            found = drawn(given, row, Sampler(*settings, other))
            assert (look, settings, expected) == (look, settings, found)
        assert torch.equal(one.get_state(), other.get_state())
    draws, left = fallbacks
    assert draws == 21_000
    assert 100 < left < 11_000


def test_the_loops_leave_what_rounding_decides(
    model: GPT, passage: list[int], given: Given, fallbacks: list[int]
) -> None:
    """A p that is the mass of a run of tokens, and a race that two tokens nearly win together."""
    real = dict(shapes_of(model, passage))["real"]
    for n in range(200):
        ordered = probabilities(real[n % 127][None], 0.8, 40)[0].sort(descending=True).values
        p = ordered.cumsum(0)[n % 9].item() * (1 + (n % 5 - 2) * 2.0**-23)
        one, other = (torch.Generator().manual_seed(n) for _ in range(2))
        settings = (0.8, 40, min(p, 1.0))
        expected = asked(real[n % 127], Sampler(*settings, one))
        assert expected == drawn(given, real[n % 127], Sampler(*settings, other))
    left = fallbacks[1]
    assert left > 190
    for n in range(200):
        times = torch.empty(512).exponential_(generator=torch.Generator().manual_seed(n))
        # Weights that are as their times, so that all race neck and neck, but for some roundings.
        logits = times.log() + 1e-7 * torch.randn(512, generator=torch.Generator().manual_seed(n))
        one, other = (torch.Generator().manual_seed(n) for _ in range(2))
        expected = asked(logits, Sampler(1.0, 40, None, one))
        assert expected == drawn(given, logits, Sampler(1.0, 40, None, other))
        assert torch.equal(one.get_state(), other.get_state())
    assert fallbacks[1] == left + 200


def test_the_loops_choose_the_argmax(model: GPT, passage: list[int], given: Given) -> None:
    """The lowest of equal ids, and no draw, not even from a generator that is at hand."""
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    for _, stack in shapes_of(model, passage):
        for row in stack:
            assert row.argmax().item() == drawn(given, row, Sampler(0, generator=generator))
    assert torch.equal(before, generator.get_state())


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_the_loops_refuse_what_the_sampler_refuses(given: Given, temperature: float) -> None:
    """In the same words, and nothing is drawn, wherever in the row it stands."""
    nan, inf = float("nan"), float("inf")
    for at in (0, 7, 511):
        for value, rest in ((nan, 0.0), (inf, 0.0), (nan, -inf), (-inf, -inf), (nan, inf)):
            row = torch.full((512,), rest)
            row[at] = value
            generator = torch.Generator().manual_seed(1)
            before = generator.get_state()
            sampler = Sampler(temperature, 40, 0.95, generator)
            told = drawn(given, row, sampler)
            assert "logits must hold no NaN and no +inf" in str(told)
            assert told == asked(row, sampler)
            assert torch.equal(before, generator.get_state())
    for wrong in ("torch", 3):
        sampler = Sampler(temperature, 40, 0.95, wrong)
        told = drawn(given, torch.zeros(512), sampler)
        assert told == asked(torch.zeros(512), sampler)
        assert "generator must be None or a torch.Generator" in str(told)


def test_the_loops_draw_from_the_global_generator(
    model: GPT, passage: list[int], given: Given
) -> None:
    """Without a generator `torch.manual_seed` decides, and the state moves on as it would."""
    real = dict(shapes_of(model, passage))["real"]
    sampler = Sampler(0.8, 40, 0.95)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(63)
        expected = [asked(row, sampler) for row in real]
        state = torch.get_rng_state()
        torch.manual_seed(63)
        assert expected == [drawn(given, row, sampler) for row in real]
        assert torch.equal(state, torch.get_rng_state())


class Picky(Sampler):
    """A sampler of somebody's own."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose the least likely token."""
        return logits.argmin(dim=-1, keepdim=True)


def test_the_loops_leave_a_choice_of_somebodys_own_alone(given: Given) -> None:
    """A subclass of the sampler may choose in another way, and any function may."""
    row = torch.arange(512.0)
    assert drawn(given, row, Picky(0.8, 40)) == 0
    assert drawn(given, row, Picky(0)) == 0
    assert drawn(given, row, lambda logits: torch.tensor([[7]])) == 7


def test_the_draw_of_the_loops_is_right_as_plain_python(model: GPT, passage: list[int]) -> None:
    """Without numba the same functions choose the same, or leave it to who knows."""
    told = 0
    for look, stack in shapes_of(model, passage):
        for n, row in enumerate(stack[:40]):
            assert loops._best(row.numpy()) == row.argmax()
            k, p = (1, 2, 40)[n % 3], (1.0, 0.5, 0.95)[n // 3 % 3]
            times = torch.empty(1, 512).exponential_(generator=torch.Generator().manual_seed(n))
            found = loops._draw(row.numpy(), times[0].numpy(), 0.8, k, p)
            expected = race(probabilities(row[None], 0.8, k, p), times).item()
            assert found in (expected, -1), (look, k, p)
            told += found == expected
    for bad in (float("nan"), float("inf")):
        assert loops._best(np.array([0, bad, 1], np.float32)) == -1
    assert loops._best(np.full(3, -np.inf, np.float32)) == -1
    assert told > 150


# --- the prompt ----------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("size", ["reference", "tiny"])
@torch.inference_mode()
def test_the_lean_prompt_is_the_models(
    model: GPT, tiny_model: GPT, passage: list[int], size: str, padded: bool
) -> None:
    """Logits, keys and values of every length, with rows of different lengths and without."""
    model = model if size == "reference" else tiny_model
    V, most = model.config.vocab_size, model.config.block_size
    for P in range(1, most + 1):
        B = 1 + P % 3
        idx = torch.tensor([passage[row : row + P] for row in range(B)]) % V
        masks, real = {}, torch.ones(B, P, dtype=torch.bool)
        if padded:
            starts = torch.tensor([(7 * row + P) % P for row in range(B)])
            real = torch.arange(P) >= starts[:, None]
            masks = {"key_mask": real, "position_ids": position_ids(real)}
        cache = KVCache(model.config, B, P)
        expected = model(idx, cache=cache, **masks)[0][:, -1]
        mask = masks.get("key_mask")
        logits, kv = run_prompt(Weights.of(model), model.config, idx, mask)
        torch.testing.assert_close(logits, expected, atol=5e-5, rtol=0)
        for found, stored in zip(kv.unbind(1), (cache.k, cache.v), strict=True):
            shown = real[None, :, None, :, None]  # what stands in the padding, nobody reads
            torch.testing.assert_close(found * shown, stored * shown, atol=5e-5, rtol=0)


# --- several texts -------------------------------------------------------------------------------


LENGTHS = (5, 30, 17, 30)
BATCHES = {
    "greedy": {},
    "one": {"max_new_tokens": 1},
    "nothing": {"max_new_tokens": 0},
    "sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "own_generators": {"temperature": 0.9, "top_k": 64, "generators": True},
    "limit": {"max_new_tokens": 120},
    "refill": {"max_new_tokens": 170, "on_context_limit": "refill"},
    "sampled_refill": {"max_new_tokens": 120, "temperature": 1, "on_context_limit": "refill"},
    "small_block": {"block_size": 33},
    "small_block_refill": {"block_size": 32, "max_new_tokens": 60, "on_context_limit": "refill"},
    "ends": {"temperature": 1.0, "eos_id": 11, "generators": True, "max_new_tokens": 90},
    "ends_refill": {
        "temperature": 1.0,
        "eos_id": 11,
        "max_new_tokens": 150,
        "on_context_limit": "refill",
    },
}


def batch_of(passage: list[int], rows: int, pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Pad pieces of a passage to the left."""
    pieces = [passage[3 * n : 3 * n + LENGTHS[n]] for n in range(rows)]
    width = max(map(len, pieces))
    idx = torch.tensor([[pad_id] * (width - len(row)) + row for row in pieces])
    columns = torch.arange(width)
    return idx, columns >= width - torch.tensor([[len(row)] for row in pieces])


def made_of(
    model: GPT, idx: Tensor, arguments: dict, **more: object
) -> tuple[Generation, list[list[int]]]:
    """Generate with generators that begin anew; also return their states afterwards."""
    arguments = {"temperature": 0, "max_new_tokens": 40} | arguments | more
    seeds = [torch.Generator().manual_seed(seed) for seed in range(len(idx) + 1)]
    if arguments.pop("generators", False):
        arguments["generators"] = seeds[1:]
    else:
        arguments["generator"] = seeds[0]
    made = generate(model, idx, **arguments)
    return made, [seed.get_state().tolist() for seed in seeds]


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_is_the_eager_one(
    model: GPT, passage: list[int], batch_engine: str, case: str, rows: int
) -> None:
    """Tokens, reasons, counts and random states, with padding and without."""
    idx, mask = batch_of(passage, rows)
    if rows == 1:
        mask[0, :2] = False  # one row can be padded too
    for masks in ({"key_mask": mask}, {"key_mask": torch.ones_like(mask)}, {}):
        made, states = zip(
            *(
                made_of(model, idx, BATCHES[case], engine=e, **masks)
                for e in ("eager", batch_engine)
            ),
            strict=True,
        )
        assert made[0].tokens.tolist() == made[1].tokens.tolist()
        for field in ("prompt_length", "stop_reason", "forwards", "token_forwards"):
            assert getattr(made[0], field) == getattr(made[1], field), field
        assert states[0] == states[1]
        # Where nothing tells that there is a batch, one text has an engine of its own.
        if case != "nothing":
            assert [one.engine for one in made] == ["eager", batch_engine]


def test_rows_of_a_lean_batch_end_at_different_times(model: GPT, passage: list[int]) -> None:
    """Guards the case above: rows end one after another, and repeat the end of text."""
    idx, mask = batch_of(passage, 4)
    made, _ = made_of(model, idx, BATCHES["ends"], key_mask=mask)
    ends = [row.index(11) if 11 in row else None for row in made.new_tokens.tolist()]
    assert made.engine == "lean"
    assert len(set(ends)) > 2
    for row, end in zip(made.new_tokens.tolist(), ends, strict=True):
        assert end is None or set(row[end:]) == {11}


@pytest.mark.parametrize("pad_id", [0, 11, 511])
def test_padding_of_a_batch_may_be_a_real_token(
    model: GPT, passage: list[int], batch_engine: str, pad_id: int
) -> None:
    """The mask alone says what is real: each row writes what it writes alone."""
    idx, mask = batch_of(passage, 4, pad_id)
    made = generate(model, idx, 30, temperature=0, key_mask=mask, engine=batch_engine)
    for row, real, written in zip(idx, mask, made.new_tokens, strict=True):
        alone = generate(model, row[real][None], 30, temperature=0)
        assert alone.new_tokens[0].tolist() == written.tolist()


def test_a_batch_is_verified(
    model: GPT, tiny_model: GPT, passage: list[int], batch_engine: str
) -> None:
    """Every step against recomputation, up to the last position, at odd sizes too."""
    idx = torch.tensor([passage[:20], passage[20:40]])
    report = verify_cache(model, idx, 109, engine=batch_engine)
    assert report.passed, report
    assert (report.engine, len(report.tokens)) == (batch_engine, 2)
    idx = torch.tensor([[1, 2], [3, 4], [5, 6]])
    report = verify_cache(tiny_model, idx, 80, engine=batch_engine)
    assert report.passed, report


def test_a_fault_in_the_lean_batch_is_found(
    model: GPT, passage: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the test above: one position beside the right one fails it."""
    step = LeanRows._step
    monkeypatch.setattr(LeanRows, "_step", lambda self, token, at: step(self, token, at + 1))
    idx = torch.tensor([passage[:20], passage[20:40]])
    assert not verify_cache(model, idx, 20, engine="lean").passed


def test_two_batches_at_once_do_not_mix(model: GPT, passage: list[int]) -> None:
    """Padding and cache are each batch's own."""
    idx, mask = batch_of(passage, 3)
    alone = generate(model, idx, 12, temperature=0, key_mask=mask).new_tokens
    other = decode_steps(model, idx.flip(1), 12, temperature=0)
    mixed = []
    for step in decode_steps(model, idx, 12, temperature=0, key_mask=mask):
        mixed.append(step.token)
        next(other)
    assert torch.equal(alone, torch.cat(mixed, dim=1))


@pytest.mark.parametrize("place", ["blocks.1.fc.bias", "wpe.weight", "ln_f.bias"])
def test_a_batch_refuses_logits_that_are_no_numbers(
    model: GPT, passage: list[int], batch_engine: str, place: str
) -> None:
    """In the words of the sampler, where only a step meets the fault."""
    model = copy.deepcopy(model)
    idx, mask = batch_of(passage, 3)
    steps = decode_steps(model, idx, 3, key_mask=mask, engine=batch_engine)
    next(steps)
    with torch.no_grad():
        model.get_parameter(place).fill_(float("nan"))
    with pytest.raises(ValueError, match="logits must hold no NaN and no"):
        next(steps)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("eager", 1), ("eager", 3), ("lean", 3), ("numba", 3), *((name, 1) for name in FAST)],
)
def test_texts_in_threads_do_not_mix(model: GPT, passage: list[int], name: str, rows: int) -> None:
    """Two at a time on one model, each with draws of its own, several times over."""
    or_skip(name, model)

    def text(seed: int) -> list[list[int]]:
        idx = torch.tensor([passage[seed + n : seed + n + 10 + seed] for n in range(rows)])
        generator = torch.Generator().manual_seed(seed)
        settings = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "engine": name}
        return generate(model, idx, 40, **settings, generator=generator).tokens.tolist()

    expected = [text(seed) for seed in range(6)]
    with ThreadPoolExecutor(2) as pool:
        assert expected == [*pool.map(text, range(6))]


# --- a rung by itself ----------------------------------------------------------------------------


@torch.inference_mode()
def test_a_rung_forgets(rung: Engine, prompt: Tensor) -> None:
    """A reset, or another prompt, leaves nothing of the text before."""
    expected = Textbook(rung.model).prefill(prompt[:, :4])
    rung(prompt)
    rung(prompt[:, :1])
    assert rung.length == prompt.shape[1] + 1
    rung.reset()
    assert rung.length == 0
    assert torch.equal(rung(prompt[:, :4]), expected)
    rung(prompt[:, 4:5])
    assert torch.equal(rung.prefill(prompt[:, :4]), expected)
    assert rung.length == 4


@torch.inference_mode()
def test_logits_can_be_kept(rung: Engine, prompt: Tensor) -> None:
    """What a step returned is not written to by the next one."""
    kept = [rung(prompt), rung(prompt[:, :1])]
    before = [logits.clone() for logits in kept]
    rung(prompt[:, 1:2])
    assert all(map(torch.equal, kept, before))


@pytest.mark.parametrize("token", [torch.tensor([[512]]), torch.tensor([[-1]]), torch.tensor([5])])
@torch.inference_mode()
def test_a_rung_refuses_what_is_no_token(rung: Engine, prompt: Tensor, token: Tensor) -> None:
    """A negative id would read the table from its end; the text can go on after the refusal."""
    rung(prompt)
    with pytest.raises(ValueError, match=r"token must have shape \(1, 1\) and lie in \[0, 512\)"):
        rung.step(token)
    assert rung.length == prompt.shape[1]


def test_a_rung_has_so_much_room(model: GPT, prompt: Tensor) -> None:
    """Beyond `max_len` nothing is written, and a size outside the block is refused."""
    lean = Lean(model, 11)
    with torch.inference_mode():
        lean(prompt)
        lean(prompt[:, :1])
        with pytest.raises(ValueError, match="max_len=11"):
            lean(prompt[:, :1])
        with pytest.raises(ValueError, match="max_len=5"):
            Lean(model, 5).prefill(prompt)
    assert lean.length == 11
    for wrong in (0, 129):
        with pytest.raises(ValueError, match=rf"max_len must lie in \[1, 128\], got {wrong}"):
            Lean(model, wrong)
    for wrong in (12.5, True, "12"):
        with pytest.raises(ValueError, match=r"max_len must be an integer in \[1, 128\], got"):
            Lean(model, wrong)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        LeanRows(model, 12, 0)


def test_a_rung_asks_for_inference_mode(model: GPT, prompt: Tensor) -> None:
    """No gradient graph may hold on to a row that is overwritten."""
    lean = Lean(model)
    with pytest.raises(RuntimeError, match="inference_mode"):
        lean(prompt)
    with torch.inference_mode():
        lean(prompt)
    with pytest.raises(RuntimeError, match="inference_mode"):
        lean(prompt[:, :1])


@torch.inference_mode()
def test_a_rung_reads_int64_ids_and_nothing_like_them(rung: Engine, prompt: Tensor) -> None:
    """Machine code would read the memory of int32 as int64; True would index like a mask."""
    rung(prompt)
    for wrong in (torch.tensor([[1]], dtype=torch.int32), torch.tensor([[True]]), [[1]], 1.0):
        with pytest.raises(ValueError, match="token must be an int64 tensor, got"):
            rung.step(wrong)
        with pytest.raises(ValueError, match="idx must be an int64 tensor, got"):
            rung.prefill(wrong)
    assert rung.length == prompt.shape[1]


@torch.inference_mode()
def test_a_rung_for_one_text_takes_no_padding_and_no_batch(rung: Engine, prompt: Tensor) -> None:
    """A mask that its steps do not know of would be lost without a word."""
    expected = rung(prompt)
    with pytest.raises(ValueError, match=f"key_mask must be None for {type(rung).__name__}, got"):
        rung.prefill(prompt, torch.ones_like(prompt, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"idx must have shape \(1, 1 to max_len=128\)"):
        rung.prefill(prompt.repeat(2, 1))
    with pytest.raises((ValueError, TypeError), match=r"batch_size|positional"):
        type(rung)(rung.model, 20, 2)
    assert torch.equal(rung.prefill(prompt), expected)


@pytest.mark.parametrize("name", ROWS)
@torch.inference_mode()
def test_a_refused_prompt_leaves_a_batch_as_it_was(
    model: GPT, passage: list[int], name: str
) -> None:
    """Its cache, its padding and its length: the steps after it score what they would have."""
    idx = torch.tensor([passage[:6], passage[6:12]])
    mask = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    engine, other = (ROWS[name](model, 20, 2) for _ in range(2))
    engine.prefill(idx, mask)
    other.prefill(idx, mask)
    ones = torch.ones_like(mask)
    for wrong, told in (
        ((idx[:1], mask[:1]), r"idx must have shape \(2, 1 to max_len=20\)"),
        ((idx.repeat(1, 4), None), "idx must have shape.*got values from .* with shape"),
        ((idx - 511, None), r"lie in \[0, 512\), got values from"),
        ((idx, mask.flip(1)), r"key_mask must have the shape of idx, \(2, 6\), and be True in"),
        ((idx, ones[:, :3]), "key_mask must have the shape of idx"),
        ((idx, ones[:1]), "key_mask must have the shape of idx"),
        ((idx, ones.float()), "key_mask must be a bool tensor"),
        ((idx, ones.tolist()), "key_mask must be a bool tensor"),
    ):
        with pytest.raises(ValueError, match=told):
            engine.prefill(*wrong)
    for token in idx.T[:, :, None]:
        assert torch.equal(other.step(token), engine.step(token))
    assert engine.length == 12


@pytest.mark.parametrize("name", ROWS)
@torch.inference_mode()
def test_a_batch_forgets_its_padding_too(model: GPT, passage: list[int], name: str) -> None:
    """After a reset, or another prompt, no column of the text before is hidden."""
    idx, mask = torch.tensor([passage[:6]] * 2), torch.ones(2, 6, dtype=torch.bool)
    mask[0, :3] = False
    engine = ROWS[name](model, 20, 2)
    for forget in (engine.reset, lambda: engine.prefill(idx[:, :1])):
        engine.prefill(idx, mask)
        forget()
        if engine.length == 0:
            engine.step(idx[:, :1])
        expected = ROWS[name](model, 20, 2)
        expected.prefill(idx[:, :1])
        for token in idx.T[1:, :, None]:
            assert torch.equal(expected.step(token), engine.step(token))


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
@torch.inference_mode()
def test_a_rung_is_not_copied(rung: Engine, prompt: Tensor, way: Callable) -> None:
    """Its buffers look at one memory in several ways, and those of a pickled one would not."""
    rung(prompt)
    with pytest.raises(TypeError, match="an engine cannot be copied or pickled: make a new one"):
        way(rung)


@pytest.mark.parametrize("name", ["eager", *FAST])
def test_a_default_device_of_the_caller_changes_nothing(
    model: GPT, prompt: Tensor, name: str
) -> None:
    """What an engine makes for itself lies beside the weights; on meta, anything else fails."""
    or_skip(name, model)
    settings = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "eos_id": 511, "engine": name}
    seed = torch.Generator().manual_seed
    expected = generate(model, prompt, 12, **settings, generator=seed(1))
    with torch.device("meta"):
        found = generate(model, prompt, 12, **settings, generator=seed(1))
    assert torch.equal(expected.tokens, found.tokens)


# --- which one runs ------------------------------------------------------------------------------


class Own(GPT):
    """A model that someone has changed."""


def hooked(model: GPT) -> GPT:
    """Watch one part of a model."""
    model.blocks[0].register_forward_hook(lambda *args: None)
    return model


def patched(model: GPT) -> GPT:
    """Replace how one part of a model runs."""
    model.blocks[0].ln_1.forward = lambda x: x
    return model


def changed(owner: object, name: str, value: object) -> bool:
    """Set an attribute of a part."""
    setattr(owner, name, value)
    return True


OBSTACLES = {
    "uncached": (lambda m: m, {"use_cache": False}, "use_cache=False"),
    "subclass": (lambda m: Own(m.config), {}, "a model with a part of its own"),
    "hook": (hooked, {}, "a model with hooks"),
    "patch": (patched, {}, "a model with a part of its own"),
    "eps": (lambda m: changed(m.ln_f, "eps", 1e-3) and m, {}, "a LayerNorm with eps=0.001"),
    "no_bias": (
        lambda m: changed(m.blocks[1].fc, "bias", None) and m,
        {},
        "a Linear without all of its weights",
    ),
    "strides": (
        lambda m: (
            changed(m.blocks[1].attn.proj, "weight", nn.Parameter(torch.rand(15, 15).T)) and m
        ),
        {},
        "weights that are not contiguous",
    ),
    "shapes": (
        lambda m: (
            changed(m.blocks[1], "fc", nn.Linear(15, 64))
            and changed(m.blocks[1], "proj", nn.Linear(64, 15))
            and m
        ),
        {},
        "weights of other shapes than its config's",
    ),
    "max_norm": (
        lambda m: changed(m.wte, "max_norm", 0.5) and m,
        {},
        "an Embedding with max_norm=0.5",
    ),
    "method": (
        lambda m: changed(m, "_embed", lambda *args: GPT._embed(m, *args)) and m,
        {},
        "a model with a part of its own",
    ),
    "fewer_blocks": (
        lambda m: changed(m, "blocks", m.blocks[:2]) and m,
        {},
        "weights of other shapes than its config's",
    ),
    "same_block_twice": (
        lambda m: changed(m, "blocks", nn.ModuleList([m.blocks[0]] * 3)) and m,
        {},
        "weights of other shapes than its config's",
    ),
    "callable": (lambda m: len, {}, "a builtin_function_or_method"),
    "bfloat16": (lambda m: m.to(torch.bfloat16), {}, "weights in torch.bfloat16 on cpu"),
    "meta": (lambda m: m.to("meta"), {}, "weights in torch.float32 on meta"),
}


@pytest.mark.parametrize("case", OBSTACLES)
@pytest.mark.parametrize("name", FAST)
def test_what_only_the_model_can_do_is_left_to_it(tiny_model: GPT, case: str, name: str) -> None:
    """By default nobody can tell the engines apart; asked for by name, they say why they cannot."""
    change, arguments, reason = OBSTACLES[case]
    arguments = {"batch_size": 1} | arguments
    model = change(copy.deepcopy(tiny_model))
    assert choose_engine(None, model, **arguments) == "eager"
    assert choose_engine("eager", model, **arguments) == "eager"
    with pytest.raises(ValueError, match=f"engine must be 'eager' for {reason}.*got '{name}'"):
        choose_engine(name, model, **arguments)


def test_hooks_on_all_modules_are_left_to_the_model(tiny_model: GPT) -> None:
    """Torch's own way to watch every module sees every step."""
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda *args: seen.append(1))
    try:
        assert choose_engine(None, tiny_model, 1) == "eager"
        with pytest.raises(ValueError, match="engine must be 'eager' for hooks on all modules"):
            choose_engine("lean", tiny_model, 1)
    finally:
        hook.remove()
    assert choose_engine(None, tiny_model, 1) == "lean"


def test_autocast_is_left_to_the_model(tiny_model: GPT) -> None:
    """Its types are chosen by the operations of the model, and other ones would get others."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert choose_engine(None, tiny_model, 1) == "eager"
        with pytest.raises(ValueError, match="engine must be 'eager' for autocast"):
            choose_engine("compiled", tiny_model, 1)


def test_the_default_is_lean(tiny_model: GPT) -> None:
    """One text of an unchanged model gets the fastest step that needs nothing else."""
    assert choose_engine(None, tiny_model, 1) == "lean"
    seen = []
    original = Lean._step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lean, "_step", lambda *args: seen.append(1) or original(*args))
        generate(tiny_model, torch.tensor([[1, 2]]), 5)
        generate(tiny_model, torch.tensor([[1, 2], [1, 2]]), 5)
        generate(tiny_model, torch.tensor([[1, 2]]), 5, engine="eager")
    assert len(seen) == 4


@pytest.mark.parametrize(
    "case", [case for case in OBSTACLES if case not in ("callable", "meta", "uncached")]
)
def test_a_changed_model_writes_what_it_writes_step_by_step(tiny_model: GPT, case: str) -> None:
    """The default makes no error and no difference out of any of these."""
    model = OBSTACLES[case][0](copy.deepcopy(tiny_model))
    idx = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        for _ in range(9):
            logits, _ = model(idx)
            idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    if case == "bfloat16":  # coarse enough for a cache to change a choice
        assert generate(model, idx[:, :3], 9, temperature=0).new_tokens.shape == (1, 9)
    else:
        assert generate(model, idx[:, :3], 9, temperature=0).tokens.tolist() == idx.tolist()


def test_a_padded_row_is_left_to_the_model(model: GPT, prompt: Tensor) -> None:
    """One row can be padded too, and the lean step knows of no mask."""
    padded = torch.cat((torch.full((1, 3), 511), prompt), dim=1)
    made = generate(model, padded, 12, temperature=0, key_mask=padded != 511)
    expected = generate(model, prompt, 12, temperature=0)
    assert made.new_tokens.tolist() == expected.new_tokens.tolist()


def test_engines_run_weights_that_two_modules_share(
    model: GPT, prompt: Tensor, engine: str
) -> None:
    """A tied weight is one tensor under two names."""
    model = copy.deepcopy(model)
    model.blocks[1].fc.weight = model.blocks[0].fc.weight
    texts = [generate(model, prompt, 12, temperature=0, engine=e) for e in ("eager", engine)]
    assert texts[0].tokens.tolist() == texts[1].tokens.tolist()


def test_models_that_are_gone_leave_no_weights_behind(
    model: GPT, prompt: Tensor, engine: str
) -> None:
    """An engine keeps a model's weights as long as the model lives, and no longer."""
    model = copy.deepcopy(model)
    weight = weakref.ref(model.blocks[0].fc.weight.untyped_storage())
    generate(model, prompt, 3, temperature=0, engine=engine)
    held = weakref.ref(model)
    del model
    gc.collect()
    assert held() is None
    assert weight() is None


def test_on_a_gpu_nothing_is_chosen_that_was_never_run_there(
    tiny_model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default the model itself; by name the lean and the recorded step, and never numba."""
    on_gpu = torch.device("cuda", 0)
    monkeypatch.setattr(nn.Parameter, "device", on_gpu, raising=False)
    assert choose_engine(None, tiny_model, 1) == "eager"
    assert choose_engine("lean", tiny_model, 1) == "lean"
    assert choose_engine("compiled", tiny_model, 1) == "compiled"
    with pytest.raises(ValueError, match=r"weights in torch\.float32 on cuda, got 'numba'"):
        choose_engine("numba", tiny_model, 1)


def test_compiled_means_recorded_on_a_gpu(
    tiny_model: GPT, monkeypatch: pytest.MonkeyPatch, no_recording: None
) -> None:
    """The name stays the same, so that `--engine compiled --device cuda` is all there is to say."""
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    assert isinstance(new_engine("compiled", tiny_model), Recorded)


@torch.inference_mode()
def test_the_recorded_step_mixes_no_devices(tiny_model: GPT, no_recording: None) -> None:
    """All that a graph reads and writes lies beside the weights; meta refuses anything else."""
    engine = Recorded(copy.deepcopy(tiny_model).to("meta"), 9)
    logits = engine.prefill(torch.zeros(1, 5, dtype=torch.int64, device="meta"))
    engine._run()
    assert (logits.shape, engine.logits.shape) == ((1, 37), (1, 1, 37))
    assert {logits.device.type, engine.logits.device.type} == {"meta"}


def test_a_prompt_on_another_device_is_named(tiny_model: GPT) -> None:
    """The error says where the prompt is and where it should be."""
    model = copy.deepcopy(tiny_model).to("meta")
    with pytest.raises(ValueError, match="idx must be on the model's device meta, got cpu"):
        generate(model, torch.tensor([[1, 2]]), 2)
    idx, mask = torch.tensor([[1, 2]]), torch.ones(1, 2, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match="key_mask must be on the model's device cpu, got meta"):
        generate(tiny_model, idx, 2, key_mask=mask)


def test_why_not(tiny_model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    """None where an engine runs; else the reason, be it the model or the machine."""
    assert why_not("eager", Own(tiny_model.config)) is None
    assert why_not("lean", tiny_model) is None
    assert "part of its own (Own)" in why_not("lean", Own(tiny_model.config))
    with monkeypatch.context() as patch:
        patch.setattr(loops, "compiled_loops", raise_runtime_error)
        assert why_not("numba", tiny_model) == "RuntimeError: no numba here"


def raise_runtime_error(config: GPTConfig) -> None:
    """Fail as an engine that cannot be had does."""
    raise RuntimeError("no numba here")


def test_the_model_goes_where_its_weights_are(tiny_model: GPT) -> None:
    """On another device the loop's own cache is made there too; meta computes shapes alone."""
    model = copy.deepcopy(tiny_model).to("meta")
    cache = KVCache.for_model(model, 1, 9)
    with torch.inference_mode():
        model(torch.zeros(1, 5, dtype=torch.int64, device="meta"), cache=cache)
        logits, _ = model(torch.zeros(1, 1, dtype=torch.int64, device="meta"), cache=cache)
    assert logits.shape == (1, 1, 37)
    assert {logits.device.type, cache.k.device.type} == {"meta"}
    assert cache.length == 6


def test_the_command_line_hands_the_engine_on(
    model: GPT, prompt: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every engine writes what the model writes, and a refusal is one line and exit code 2."""
    texts = []
    for name in ("eager", "lean"):
        assert main(["generate", "--engine", name, "--max-new-tokens", "20"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
    for more, told in (
        (["fast"], "--engine must be one of"),
        (["lean", "--no-cache"], "--no-cache must stand without --engine lean"),
        (["compiled", "--batch-prompts", "a|b"], "--engine must be one of eager, lean, numba with"),
    ):
        assert main(["generate", "--engine", *more]) == 2
        assert f"lab35: error: {told}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "generate --verify"])
def test_the_command_line_verifies_the_engine_that_it_runs(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in the lean step is the lean engine's alone, and `lean` is what runs by default."""
    monkeypatch.setattr(Lean, "_step", lambda self, token, at: torch.zeros(512))
    codes = {}
    for more in ("", " --engine lean", " --engine eager"):
        codes[more] = main(f"{command}{more}".split())
    assert codes == {"": 1, " --engine lean": 1, " --engine eager": 0}


def test_the_command_line_warns_on_one_line(
    fresh: Path, no_compiler: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a compiler the text comes all the same, after one line that says what runs."""
    assert main(["generate", "--engine", "compiled", "--max-new-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert lines[0].startswith("lab35: warning: engine='compiled' is not to be had here")
    assert lines[1] == "Sherlock Holmes"
    assert len(lines) == 2
    assert out.strip()


def test_unknown_engine(model: GPT, prompt: Tensor) -> None:
    """The refusal lists what there is."""
    with pytest.raises(ValueError, match="one of 'eager', 'lean', 'compiled', 'numba', got 'fast'"):
        decode_steps(model, prompt, 1, engine="fast")


# --- without a compiler, without numba -----------------------------------------------------------


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Start with an empty cache folder, and forget what was found or warned of before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remembered = (
        choice._MISSING.clear,
        choice._warn_once.cache_clear,
        loops.compiled_loops.cache_clear,
        compiled._LOADED.clear,
    )
    for forget in remembered:
        forget()
    yield tmp_path
    for forget in remembered:
        forget()


@pytest.fixture
def no_compiler() -> Iterator[None]:
    """Hide every C++ compiler from torch."""
    import torch._inductor.config as inductor

    with inductor.patch({"cpp.cxx": (None, "no-such-compiler")}):
        yield


def test_without_a_compiler_lean_runs_with_one_warning(
    fresh: Path, no_compiler: None, tiny_model: GPT
) -> None:
    """The text comes all the same, the reason is told once, and nothing half-written stays."""
    before = torch.get_rng_state()
    idx = torch.tensor([[1, 2, 3]])
    with pytest.warns(RuntimeWarning, match="'compiled' is not to be had.*'lean' runs") as warned:
        texts = [generate(tiny_model, idx, 9, temperature=0, engine="compiled") for _ in range(2)]
    assert len([w for w in warned if w.category is RuntimeWarning]) == 1
    expected = generate(tiny_model, idx, 9, temperature=0, engine="eager")
    assert texts[0].tokens.tolist() == texts[1].tokens.tolist() == expected.tokens.tolist()
    assert not any(cache_folder().iterdir())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_ran_is_named_and_not_what_was_asked_for(
    fresh: Path, no_compiler: None, model: GPT, prompt: Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    """A verification of the lean step must not be taken for one of the compiled step."""
    assert new_engine("compiled", model).name == "lean"
    assert generate(model, prompt, 3, engine="compiled").engine == "lean"
    report = verify_cache(model, prompt, 3, engine="compiled")
    assert (report.engine, report.engine_asked) == ("lean", "compiled")
    assert "engine lean in place of compiled," in report.summary()
    assert report.as_dict()["engine"] == "lean"
    assert main(["verify", "--engine", "compiled", "--steps", "3"]) == 0
    assert "engine lean in place of compiled" in "".join(capsys.readouterr())


def test_each_engine_goes_by_its_name(model: GPT, prompt: Tensor, engine: str) -> None:
    """A text, a step and a report say which engine ran; without a cache there is none."""
    assert generate(model, prompt, 2, engine=engine).engine == engine
    assert next(decode_steps(model, prompt, 2, engine=engine)).engine == engine
    assert f"engine {engine}, batch of 1" in verify_cache(model, prompt, 2, engine=engine).summary()
    assert generate(model, prompt, 2).engine == "lean"
    assert generate(model, prompt.repeat(2, 1), 2).engine == "lean"
    assert verify_cache(model, prompt, 2).engine == "eager"
    assert generate(model, prompt, 2, use_cache=False).engine is None
    assert generate(model, prompt, 0, engine=engine).engine is None
    assert (
        verify(
            lambda new: last_logits(model, new), lambda idx: last_logits(model, idx), prompt, 1
        ).engine
        is None
    )


def test_why_not_tells_the_cause_in_one_line(
    fresh: Path, no_compiler: None, tiny_model: GPT
) -> None:
    """A missing compiler is told in the words of who missed it, and the reason has one line."""
    reason = why_not("compiled", tiny_model)
    assert "no-such-compiler" in reason
    assert "\n" not in reason


def test_without_numba_lean_runs_with_one_warning(
    fresh: Path, tiny_model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extra that is not installed is named."""
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.warns(RuntimeWarning, match="not to be had.*pip install numba") as warned:
        engines = [new_engine("numba", tiny_model) for _ in range(2)]
    assert len(warned) == 1
    assert all(isinstance(engine, Lean) for engine in engines)


def test_the_compiled_file_is_named_after_what_it_depends_on(
    model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another torch, processor, size, step or setting is another file; other weights are not."""
    name = compiled._name
    keys = [name(model.config), name(GPTConfig(n_layer=5))]
    assert name(GPTConfig()) == name(GPTConfig(dropout=0.2)) == keys[0]
    for owner, attribute, value in (
        (storage, "processor", lambda: "another"),
        (compiled, "INDUCTOR", {}),
        (compiled._Step, "forward", hooked),
        (compiled, "_matvec", hooked),
        (torch, "__version__", "0.0"),
        (storage.platform, "platform", lambda: "another"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value)
            keys.append(name(model.config))
    for variable in ("CXX", "ATEN_CPU_CAPABILITY", "TORCHINDUCTOR_CPP_MARCH"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "another")
            keys.append(name(model.config))
    import torch._inductor.config as inductor

    with inductor.patch({"cpp.simdlen": 256}):
        keys.append(name(model.config))
    assert len(set(keys)) == len(keys)
    assert name(model.config) == keys[0]


X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC
cpu MHz\t\t: {}
flags\t\t: fpu {}
"""
ARM = """processor\t: 0
BogoMIPS\t: {}
Features\t: fp asimd {}
CPU implementer\t: 0x41
CPU part\t: {}
"""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (X86.format(2500, "avx2"), X86.format(2500, "avx2 avx512f")),
        (ARM.format(50, "", "0xd0c"), ARM.format(50, "", "0xd40")),
        (ARM.format(50, "", "0xd0c"), ARM.format(50, "sve", "0xd0c")),
        ("processor: 0\nisa: rv64imafdc\n", "processor: 0\nisa: rv64imafdcv\n"),
        ("features\t: esan3 zarch\n", "features\t: esan3 zarch vxe\n"),
    ],
)
def test_processors_are_told_apart(tmp_path: Path, one: str, other: str) -> None:
    """Each architecture has its own words for what its instructions are."""
    told = []
    for text in (one, other):
        (tmp_path / "cpuinfo").write_text(text)
        told.append(storage.processor(tmp_path / "cpuinfo"))
    assert all(told)
    assert told[0] != told[1]


def test_the_moment_is_no_part_of_a_processor(tmp_path: Path) -> None:
    """The clock rate and the number of a core would make a new file at each start."""
    (tmp_path / "a").write_text(X86.format(2500, "avx2"))
    (tmp_path / "b").write_text(X86.format(1800, "avx2").replace("processor\t: 0", "processor: 7"))
    assert storage.processor(tmp_path / "a") == storage.processor(tmp_path / "b")


@pytest.mark.parametrize("text", [None, "", "processor\t: 0\n", "model name: ?\nflags\t:\n"])
def test_an_unknown_processor_shares_nothing(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    """An empty part of a name would be the same on every such machine."""
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert storage.processor(tmp_path / "cpuinfo") is None
    monkeypatch.setattr(storage, "processor", lambda: None)
    assert storage.name_of("decode", 1) is None
    assert storage.kept(None, make, load, nullcontext()) == "made"
    assert not cache_folder().exists()


# --- what is kept --------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Make something that can be kept."""
    (folder / "deep").mkdir()
    (folder / "deep" / "file").write_text("made")


def load(folder: Path) -> str:
    """Load it, from a place of its own."""
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    return (folder / "deep" / "file").read_text()


class Maker:
    """Counts how often something is made."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, folder: Path) -> None:
        """Make it, and count."""
        self.times += 1
        make(folder)

    def get(self) -> str:
        """Get what is kept, or make it."""
        return storage.kept("thing", self, load, nullcontext())


def test_what_is_kept_is_made_once(fresh: Path) -> None:
    """The second process finds it, in a folder that is private, and nothing else is left."""
    maker = Maker()
    assert [maker.get(), maker.get()] == ["made", "made"]
    assert maker.times == 1
    assert [path.name for path in cache_folder().iterdir()] == ["thing"]
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700


DAMAGE = {
    "emptied": lambda entry: (entry / "deep" / "file").write_bytes(b""),
    "cut": lambda entry: (entry / "deep" / "file").write_bytes(b"ma"),
    "flipped": lambda entry: (entry / "deep" / "file").write_bytes(b"mode"),
    "deleted": lambda entry: (entry / "deep" / "file").unlink(),
    "added": lambda entry: (entry / "more").touch(),
    "linked": lambda entry: (entry / "more").symlink_to("/etc/hostname"),
    "no_digests": lambda entry: (entry / storage.DIGESTS).unlink(),
    "no_text": lambda entry: (entry / storage.DIGESTS).write_bytes(b"\xff\n"),
    "empty_digests": lambda entry: (entry / storage.DIGESTS).write_bytes(b""),
    "a_file": lambda entry: (shutil.rmtree(entry), entry.touch()),
    "a_link": lambda entry: (entry.rename(f"{entry}-2"), entry.symlink_to(f"{entry}-2")),
    "others": lambda entry: (entry / "deep" / "file").chmod(0o666),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_made_anew_once(fresh: Path, damage: str) -> None:
    """Neither loaded nor kept: the next process makes it, and the one after finds it."""
    maker = Maker()
    maker.get()
    DAMAGE[damage](cache_folder() / "thing")
    assert [maker.get(), maker.get()] == ["made", "made"]
    assert maker.times == 2


def test_what_cannot_be_loaded_is_made_anew_once(fresh: Path) -> None:
    """Whole as it is, it may not run here; then it is not tried again at each run."""
    maker, failed = Maker(), []

    def load_second(folder: Path) -> str:
        if maker.times == 1:
            failed.append(1)
            raise RuntimeError("foreign")
        return load(folder)

    maker.get()
    for _ in range(3):
        assert storage.kept("thing", maker, load_second, nullcontext()) == "made"
    assert (maker.times, len(failed)) == (2, 1)


def test_what_fails_leaves_nothing(fresh: Path) -> None:
    """A make that fails, or that is interrupted, leaves no folder."""
    for error in (OSError("full"), KeyboardInterrupt()):

        def fail(folder: Path, error: BaseException = error) -> None:
            make(folder)
            raise error

        with pytest.raises(type(error)):
            storage.kept("thing", fail, load, nullcontext())
        assert not any(cache_folder().iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_no_code_is_loaded_from_where_others_may_write(
    fresh: Path, tiny_model: GPT, mode: int
) -> None:
    """What lies there may be anyone's; lean runs, and one line says why."""
    cache_folder().mkdir()
    cache_folder().chmod(mode)
    for name in ("compiled", "numba"):
        if name == "numba" and find_spec("numba") is None:
            continue
        with pytest.warns(RuntimeWarning, match="no code is loaded from .*others may write"):
            assert new_engine(name, tiny_model).name == "lean"
    assert not any(cache_folder().iterdir())


def test_no_code_is_loaded_through_a_link_or_from_below_a_shared_folder(fresh: Path) -> None:
    """A link can be turned elsewhere, and so can a folder by who may write above it."""
    (fresh / "elsewhere").mkdir(mode=0o700)
    cache_folder().symlink_to(fresh / "elsewhere")
    with pytest.raises(storage.Unavailable, match="it is a link"):
        Maker().get()
    cache_folder().unlink()
    fresh.chmod(0o777)
    with pytest.raises(storage.Unavailable, match=f"others may write to {fresh}"):
        Maker().get()
    fresh.chmod(0o755)
    assert Maker().get() == "made"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_no_code_is_loaded_from_the_folder_of_somebody_else(fresh: Path) -> None:
    """Also where its mode looks private: its owner may write to it."""
    cache_folder().mkdir(mode=0o700)
    os.chown(cache_folder(), 12345, -1)
    with pytest.raises(storage.Unavailable, match="it belongs to user 12345"):
        Maker().get()


def test_without_a_home_nothing_is_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable, and no entry for the user: it is made in a temporary folder."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    maker = Maker()
    assert [maker.get(), maker.get()] == ["made", "made"]
    assert maker.times == 2


@pytest.mark.parametrize("folder", ["a file/x", "with a blank"])
def test_a_folder_that_cannot_be_used_is_gone_around(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Below a file nothing can be kept; a compiler cannot work where a path has a blank."""
    (fresh / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / folder))
    worked_in = []
    for _ in range(2):
        storage.kept("thing", lambda f: worked_in.append(f) or make(f), load, nullcontext())
    assert len(worked_in) == (2 if "/" in folder else 1)
    assert not any(" " in str(path) for path in worked_in)


def test_compilers_are_sent_to_the_private_folder(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself torch stores in a folder whose name is known, and the caller may name another."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(fresh / "planted"))
    before = dict(os.environ)
    seen = {}
    storage.kept("thing", lambda f: seen.update(os.environ) or make(f), load, nullcontext())
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR"):
        assert Path(seen[variable]).is_relative_to(cache_folder())
    assert dict(os.environ) == before


WAIT = """
import sys, time
from contextlib import nullcontext
from lab35.speed import storage
def make(folder):
    print("making", flush=True)
    time.sleep(60)
storage.kept("thing", make, lambda folder: None, nullcontext())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_process_that_is_ended_leaves_no_folder(fresh: Path, number: int) -> None:
    """Nor does one that had no time to clean up, after the next one has come."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout.readline() == b"making\n"
    running = [*cache_folder().iterdir()]
    assert len(running) == 1
    Maker().get()  # in the middle of it, and it sweeps nothing that is in use
    assert running[0].exists()
    process.send_signal(number)
    assert process.wait(30) == -number
    process.stdout.close()
    if number == signal.SIGKILL:
        shutil.rmtree(cache_folder() / "thing")
        Maker().get()
    assert [path.name for path in cache_folder().iterdir()] == ["thing"]


def test_a_step_is_held_against_a_model() -> None:
    """A step that ignores one bias, or stores nothing, is refused; the model's own passes."""
    config = GPTConfig(vocab_size=5, block_size=8, n_layer=2, n_head=2, n_embd=4)

    def step_of(model: GPT, *, forget: str | None = None, store: bool = True) -> Callable:
        other = copy.deepcopy(model)
        if forget:
            other.get_parameter(forget).data.zero_()

        def step(token: int, at: int, kv: Tensor) -> tuple[Tensor, Tensor]:
            places, after = loops._places(Weights.of(other)), kv.clone()
            logits = np.empty(config.vocab_size, np.float32)
            loops._decode(token, at, places, after.numpy(), logits)
            return torch.from_numpy(logits), (after if store else kv).narrow(3, at, 1)

        return step

    check_step(config, step_of)
    for fault in ({"forget": "blocks.1.fc.bias"}, {"forget": "ln_f.bias"}, {"store": False}):
        with pytest.raises(RuntimeError, match="differ from the model's"):
            check_step(config, partial(step_of, **fault))


def test_a_step_that_holds_weights_itself_is_refused(tiny_model: GPT) -> None:
    """What the compiler took for a constant has no name in its file."""

    class Loaded:
        def get_constant_fqns(self) -> list[str]:
            names = [*dict(compiled._Step(tiny_model).named_parameters()), "columns"]
            return [name for name in names if name != "model.ln_f.bias"]

    with pytest.raises(RuntimeError, match=r"holds \['model.ln_f.bias'\] itself"):
        compiled._point(Loaded(), tiny_model)


@pytest.mark.slow
def test_the_compiled_step_is_right_for_the_smallest_models(fresh: Path) -> None:
    """Inductor puts tensors of at most 8 numbers into the code, unless it is told not to."""
    torch.manual_seed(1)
    config = GPTConfig(vocab_size=8, block_size=8, n_layer=1, n_head=2, n_embd=8)
    model = GPT(config).eval()
    or_skip("compiled", model)
    for weight in model.parameters():
        nn.init.normal_(weight)
    report = verify_cache(model, torch.tensor([[3, 1, 2]]), 6, engine="compiled")
    assert report.passed, report
    assert report.engine == "compiled"


def test_a_wrong_step_from_numba_is_not_run(
    fresh: Path, tiny_model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever makes the machine code differ from the model, lean runs."""
    or_skip("numba", tiny_model)
    loops.compiled_loops.cache_clear()
    monkeypatch.setitem(loops.LOOPS, "_gelu", skip_gelu)
    with pytest.warns(RuntimeWarning, match="its logits differ from the model's"):
        assert new_engine("numba", tiny_model).name == "lean"
    assert not any(cache_folder().glob("*/*.nbc"))


def skip_gelu(x: np.ndarray) -> None:
    """Leave out the activation."""
    x[0] += np.float32(0)


@pytest.mark.parametrize("error", [ImportError("odd"), SystemError("odd"), ValueError("odd")])
def test_whatever_fails_in_an_optional_engine_lean_runs(
    fresh: Path, tiny_model: GPT, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The internals of numba and torch fail in more ways than can be listed; Ctrl-C is none."""

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(storage, "_workshop", fail)
    monkeypatch.setattr(loops, "_numba", fail)
    for name in ("compiled", "numba"):
        with pytest.warns(RuntimeWarning, match=f"{type(error).__name__}: odd"):
            assert new_engine(name, tiny_model).name == "lean"
        assert why_not(name, tiny_model) == f"{type(error).__name__}: odd"
        with pytest.raises(ValueError, match="max_len must lie in"):
            new_engine(name, tiny_model, 0)
    error = KeyboardInterrupt()
    choice._MISSING.clear()
    with pytest.raises(KeyboardInterrupt):
        new_engine("numba", tiny_model)


@pytest.mark.slow
def test_numba_runs_without_sources(
    fresh: Path, tiny_model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a copy that holds bytecode alone, numba keeps nothing, and runs."""
    or_skip("numba", tiny_model)
    loops.compiled_loops.cache_clear()
    for name, part in loops.LOOPS.items():
        moved = FunctionType(
            part.__code__.replace(co_filename="/nowhere/loops.py"), vars(loops), name
        )
        monkeypatch.setitem(loops.LOOPS, name, moved)
    monkeypatch.setattr(loops, "_decode", loops.LOOPS["_decode"])
    assert new_engine("numba", tiny_model).name == "numba"
    assert not any(cache_folder().rglob("*.nbi"))


@pytest.mark.parametrize(
    "mess", [b"cut", *(pytest.param(mess, marks=pytest.mark.slow) for mess in (b"", None))]
)
def test_a_damaged_cache_of_numba_is_built_anew(
    fresh: Path, tiny_model: GPT, mess: bytes | None
) -> None:
    """An emptied, garbled or half-deleted file is no end, and no reason for lean."""
    or_skip("numba", tiny_model)
    loops.compiled_loops.cache_clear()
    new_engine("numba", tiny_model)
    before = sorted(path.name for path in cache_folder().rglob("*"))
    for path in cache_folder().rglob("*.nb?"):
        path.write_bytes(path.read_bytes()[:100] if mess is None else mess)
    loops.compiled_loops.cache_clear()
    assert new_engine("numba", tiny_model).name == "numba"
    assert sorted(path.name for path in cache_folder().rglob("*")) == before
    assert min(path.stat().st_size for path in cache_folder().rglob("*.nb?")) > 100


@pytest.mark.slow
def test_numba_keeps_its_own_folder(fresh: Path, tiny_model: GPT) -> None:
    """The loops go to our folder, and what others compile does not follow them."""
    or_skip("numba", tiny_model)
    import numba

    before = numba.config.CACHE_DIR
    new_engine("numba", tiny_model)
    assert before == numba.config.CACHE_DIR
    assert any(cache_folder().rglob("*.nbi"))


def test_replaced_weights_live_as_long_as_the_compiled_step_points_at_them(
    model: GPT, prompt: Tensor
) -> None:
    """A text that has begun goes on with the weights that it began with, whatever comes after."""
    or_skip("compiled", model)
    model = copy.deepcopy(model)
    expected = generate(model, prompt, 12, temperature=0, engine="compiled")
    steps = decode_steps(model, prompt, 12, temperature=0, engine="compiled")
    tokens = [next(steps).token.item()]
    for block in model.blocks:
        block.fc.weight = nn.Parameter(torch.zeros_like(block.fc.weight))
    _ = [torch.full((512, 128), 7.0) for _ in range(50)]  # takes any memory that was let go
    tokens += [step.token.item() for step in steps]
    assert tokens == expected.new_tokens[0].tolist()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder follows the convention of the platform's users."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lab35"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / ".cache" / "lab35"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "lab35"
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(RuntimeError, match="HOME must be an absolute path, got 'relative'"):
        cache_folder()


@pytest.mark.slow
def test_numba_runs_where_nothing_can_be_kept(
    fresh: Path, tiny_model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that cannot be made costs a compilation a process, and no text."""
    or_skip("numba", tiny_model)
    loops.compiled_loops.cache_clear()
    (fresh / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    assert isinstance(new_engine("numba", tiny_model), Jitted)


def test_a_first_text_imports_no_compiler() -> None:
    """Choosing an engine builds nothing: torch's compiler alone takes longer than the text."""
    code = (
        "import sys, torch, lab35\n"
        "model, _ = lab35.load_pretrained()\n"
        "lab35.generate(model, torch.tensor([[1, 2]]), 3)\n"
        "print('torch._dynamo' in sys.modules, 'numba' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ("False False\n", "") == (ran.stdout, ran.stderr)
