"""Sampling: exact kept sets, a fixed order, honest randomness, and clear refusals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from lab35 import GPT, filtered_logits, generate, probabilities, sample_next, sampling
from lab35.sampling import Sampler

EXAMPLE = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]])
INF = math.inf

# Logits: any, with ties, and either equal or so far apart that no rounding makes them equal.
rows = st.lists(st.floats(-12, 12, width=32), min_size=1, max_size=40)
rows_with_ties = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, -INF]), min_size=1, max_size=12)
rows_apart = st.lists(st.integers(-160, 160).map(lambda n: n / 64), min_size=4, max_size=40)
masses = st.floats(0.01, 0.999)


def kept(logits: Tensor) -> list[list[int]]:
    """List the ids that are left in each row."""
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def exact_probabilities(row: list[float]) -> list[float]:
    """Softmax in Python's own arithmetic."""
    weights = [math.exp(z - max(row)) for z in row]
    return [weight / math.fsum(weights) for weight in weights]


def by_rank(row: list[float]) -> list[int]:
    """Order ids from the highest logit down, equal ones by id."""
    return sorted(range(len(row)), key=lambda v: (-row[v], v))


def seeded(seed: int) -> torch.Generator:
    """Make a generator of its own."""
    return torch.Generator().manual_seed(seed)


@given(row=rows_with_ties, k=st.integers(1, 15))
def test_top_k_keeps_exactly_k_and_the_lower_ids(row: list[float], k: int) -> None:
    """The classic fault keeps every token that ties with the k-th, and so more than k."""
    assume(max(row) > -INF)
    expected = [v for v in by_rank(row)[:k] if row[v] > -INF]
    assert kept(filtered_logits(torch.tensor([row]), top_k=k)) == [sorted(expected)]


def test_ties_in_a_long_row() -> None:
    """A sort that is not stable keeps short rows in order, and shuffles the ties of long ones."""
    row = torch.randint(0, 5, (512,), generator=seeded(11)).tolist()
    for k in (1, 40, 300):
        found = kept(filtered_logits(torch.tensor([row]), top_k=k))
        assert found == [sorted(by_rank(row)[:k])]


def test_top_k_ranks_the_logits_as_they_came() -> None:
    """Shifted by 3, the last two would round to the same number, and the lower id would win."""
    logits = torch.tensor([[3.0, -1e-9, 0.0]])
    assert kept(filtered_logits(logits, top_k=2)) == [[0, 2]]


@given(row=rows_with_ties, seed=st.integers(0, 2**63 - 1))
def test_top_k_of_one_is_argmax(row: list[float], seed: int) -> None:
    """With one token kept there is nothing left to draw, ties or not."""
    assume(max(row) > -INF)
    logits = torch.tensor([row])
    drawn = sample_next(logits, temperature=3.0, top_k=1, generator=seeded(seed))
    assert drawn.tolist() == logits.argmax(-1, keepdim=True).tolist()
    assert drawn.tolist() == sample_next(logits, temperature=0).tolist()


@given(row=st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=8), p=masses)
def test_top_p_is_the_smallest_set_that_reaches_p(row: list[float], p: float) -> None:
    """Holtzman's definition, by trying every subset of the vocabulary in float64."""
    probs = exact_probabilities(row)
    subsets = [s for n in range(len(row) + 1) for s in combinations(range(len(row)), n)]
    mass = {s: math.fsum(probs[v] for v in s) for s in subsets}
    assume(all(abs(m - p) > 1e-5 for m in mass.values()))  # rounding decides on the boundary
    enough = [s for s in subsets if mass[s] >= p]
    smallest = min(map(len, enough))
    (found,) = kept(filtered_logits(torch.tensor([row]), top_p=p))
    assert len(found) == smallest
    heaviest = max(mass[s] for s in enough if len(s) == smallest)
    assert math.isclose(mass[tuple(found)], heaviest, abs_tol=1e-9)


@given(row=rows, p=masses)
def test_top_p_equals_a_loop_in_float64(row: list[float], p: float) -> None:
    """Walk down the ranking and stop once p is reached: the kept ids must be these."""
    probs = exact_probabilities(row)
    expected, mass = [], 0.0
    for v in by_rank(row):
        assume(abs(mass - p) > 1e-5)
        if mass >= p:
            break
        expected.append(v)
        mass += probs[v]
    assume(abs(mass - p) > 1e-5)
    assert kept(filtered_logits(torch.tensor([row]), top_p=p)) == [sorted(expected)]


@given(row=rows, rank=st.integers(0, 39))
def test_top_p_on_the_boundary_is_still_a_prefix(row: list[float], rank: int) -> None:
    """With p equal to a prefix's mass, rounding may add or drop one token, never punch a hole."""
    probs = exact_probabilities(row)
    order = by_rank(row)
    p = min(1.0, math.fsum(probs[v] for v in order[: rank % len(row) + 1]))
    (found,) = kept(filtered_logits(torch.tensor([row]), top_p=p))
    assert found == sorted(order[: len(found)])
    assert math.fsum(probs[v] for v in found) >= p - 1e-5
    assert math.fsum(probs[v] for v in order[: len(found) - 1]) < p + 1e-5


@given(row=rows_with_ties, p=st.floats(0, 1, exclude_min=True))
def test_the_first_token_always_stays(row: list[float], p: float) -> None:
    """Even where p rounds to 0 in float32, the most likely token can be drawn."""
    assume(max(row) > -INF)
    logits = torch.tensor([row])
    assert logits.argmax().item() in kept(filtered_logits(logits, top_p=p))[0]


def test_filters_run_in_one_order() -> None:
    """Temperature, top-k, top-p: each swap of neighbours would keep another set here."""
    logits = EXAMPLE.log()
    # top-k first leaves 0.625 and 0.375: one token reaches 0.6. Top-p first would keep two.
    assert kept(filtered_logits(logits, top_k=2, top_p=0.6)) == [[0]]
    assert kept(filtered_logits(filtered_logits(logits, top_p=0.6), top_k=2)) == [[0, 1]]
    # Temperature 2 leaves 0.351 and 0.272: two tokens reach 0.5. Top-p first would keep one.
    assert kept(filtered_logits(logits, 2.0, top_p=0.5)) == [[0, 1]]
    assert kept(filtered_logits(filtered_logits(logits, top_p=0.5), 2.0)) == [[0]]


@given(row=rows_apart, temperature=st.floats(0.5, 5), k=st.integers(2, 12), p=masses)
def test_one_call_is_three_calls_in_order(
    row: list[float], temperature: float, k: int, p: float
) -> None:
    """One sort for both filters does what two filters after each other do."""
    probs = exact_probabilities([z / temperature for z in row])
    head = sorted(probs, reverse=True)[:k]
    total, mass = math.fsum(head), 0.0
    for probability in head:
        mass += probability / total
        assume(abs(mass - p) > 1e-5)
    logits = torch.tensor([row])
    staged = filtered_logits(
        filtered_logits(filtered_logits(logits, temperature), top_k=k), top_p=p
    )
    assert kept(filtered_logits(logits, temperature, k, p)) == kept(staged)


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_kept_sets_equal_hugging_faces(scale: float) -> None:
    """An independent implementation sorts the other way round, and keeps the same tokens."""
    logits = scale * torch.randn(64, 512, generator=seeded(35))
    for k in (1, 2, 40, 511, 512, 600):
        peer = TopKLogitsWarper(k)(None, logits)
        assert kept(filtered_logits(logits, top_k=k)) == kept(peer)
    for p in (0.05, 0.3, 0.5, 0.9, 0.95, 0.99):
        mass = logits.double().softmax(-1).sort(descending=True).values.cumsum(-1)
        clear = (mass - p).abs().amin(-1) > 1e-6  # rounding decides on the boundary
        assert clear.sum() > 32, "pick another seed"
        peer = TopPLogitsWarper(p)(None, logits[clear])
        assert kept(filtered_logits(logits[clear], top_p=p)) == kept(peer)


def test_probabilities_of_what_is_kept() -> None:
    """The worked example: what is left keeps its proportions and sums to 1."""
    logits = EXAMPLE.log()
    for settings, expected in [
        ({}, EXAMPLE),
        ({"temperature": 0.5}, EXAMPLE**2 / (EXAMPLE**2).sum()),
        ({"temperature": 2.0}, EXAMPLE**0.5 / (EXAMPLE**0.5).sum()),
        ({"top_k": 2}, torch.tensor([[0.625, 0.375, 0, 0, 0]])),
        ({"top_p": 0.5}, torch.tensor([[1.0, 0, 0, 0, 0]])),
        ({"top_p": 0.89}, torch.tensor([[5 / 9, 3 / 9, 1 / 9, 0, 0]])),
        ({"top_p": 0.91}, torch.tensor([[0.5, 0.3, 0.1, 0.06, 0]]) / 0.96),
    ]:
        torch.testing.assert_close(probabilities(logits, **settings), expected)


def test_no_filter_is_softmax() -> None:
    """Without settings, and with settings that keep all, nothing is removed."""
    logits = torch.randn(3, 50, generator=seeded(1))
    for settings in ({}, {"top_k": 50}, {"top_k": 10**30}, {"top_p": 1.0}, {"top_p": 1}):
        assert torch.equal(probabilities(logits, **settings), probabilities(logits))
    torch.testing.assert_close(probabilities(logits), logits.softmax(-1))


@pytest.mark.parametrize("temperature", [0, 0.0, 5e-324, 1e-46, 1e-30])
def test_the_cold_end_is_argmax(temperature: float) -> None:
    """No temperature above 0 is too small to divide by, not even one that float32 rounds to 0."""
    logits = torch.tensor([[1.0, 3.0, -INF, 2.999], [-5.0, -9.0, -7.0, -6.0]])
    expected = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert torch.equal(probabilities(logits, temperature), expected)
    assert sample_next(logits, temperature).tolist() == [[1], [0]]


def test_temperature_zero_and_a_tiny_one_differ_on_a_tie() -> None:
    """Greedy takes the lower id; the limit of sampling shares the mass."""
    logits = torch.tensor([[2.0, 5.0, 5.0]])
    assert probabilities(logits, 0).tolist() == [[0.0, 1.0, 0.0]]
    assert probabilities(logits, 1e-46).tolist() == [[0.0, 0.5, 0.5]]


@pytest.mark.parametrize("temperature", [1e30, 3.5e38, 1.7e308])
def test_the_hot_end_is_uniform(temperature: float) -> None:
    """No temperature is too large, not even one that float32 rounds to infinity."""
    logits = torch.tensor([[1.0, 30.0, -30.0, -INF]])
    expected = torch.tensor([[1.0, 1.0, 1.0, 0.0]]) / 3
    torch.testing.assert_close(probabilities(logits, temperature), expected)
    assert sample_next(logits, temperature, generator=seeded(0)).item() < 3


def test_no_logit_overflows() -> None:
    """Logits near the end of float32 would overflow if they were divided first."""
    logits = torch.tensor([[3e38, 2.9e38, -3e38]])
    assert probabilities(logits, 0.1).tolist() == [[1.0, 0.0, 0.0]]


@given(row=rows, a=st.floats(0.05, 20), b=st.floats(0.05, 20))
def test_entropy_rises_with_temperature(row: list[float], a: float, b: float) -> None:
    """Hotter is never surer."""
    cold, hot = (
        torch.special.entr(probabilities(torch.tensor([row]).double(), t)).sum().item()
        for t in sorted((a, b))
    )
    assert cold <= hot + 1e-9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Half precision is computed in float32; double stays double."""
    logits = (3 * torch.randn(4, 50, generator=seeded(2))).to(dtype)
    settings = {"temperature": 0.7, "top_k": 20, "top_p": 0.93}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = probabilities(logits, **settings)
    assert found.dtype == wide
    assert torch.equal(found, probabilities(logits.to(wide), **settings))
    drawn = sample_next(logits, **settings, generator=seeded(3))
    assert (drawn.dtype, drawn.shape) == (torch.int64, (4, 1))


def test_the_input_is_not_modified() -> None:
    """The caller's logits, shifted or filled in place, would spoil a report on the step."""
    logits = torch.randn(3, 20, generator=seeded(4))
    before = logits.clone()
    sample_next(logits, 0.5, 5, 0.9, seeded(0))
    sample_next(logits, 0)
    filtered_logits(logits, 0.5, 5, 0.9)
    probabilities(logits)
    assert torch.equal(logits, before)


def test_rows_do_not_see_each_other() -> None:
    """A row's distribution is the same alone and in a batch, wherever its best token stands."""
    stack = 3 * torch.randn(16, 60, generator=seeded(10)) + torch.arange(16.0)[:, None]
    settings = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    alone = [probabilities(row[None], **settings) for row in stack]
    assert torch.equal(probabilities(stack, **settings), torch.cat(alone))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_k": 40, "top_p": 0.95}])
def test_the_draw_is_an_exponential_race(settings: dict) -> None:
    """What the chapter re-enacts: the same tokens, and the same state of the generator after."""
    logits = 3 * torch.randn(16, 512, generator=seeded(5))
    for seed in range(20):
        race, draw = seeded(seed), seeded(seed)
        probs = probabilities(logits, **settings)
        arrival = torch.empty_like(probs).exponential_(generator=race)
        winners = (probs / arrival).argmax(-1, keepdim=True)
        assert sample_next(logits, **settings, generator=draw).tolist() == winners.tolist()
        assert torch.equal(draw.get_state(), race.get_state())


def test_draws_follow_the_probabilities() -> None:
    """A chi-square test at 1 in 1,000, with a fixed seed; what is filtered out never comes."""
    logits = EXAMPLE.log()
    settings = {"temperature": 1.3, "top_k": 4}
    count = 40_000
    drawn = sample_next(logits.expand(count, -1), **settings, generator=seeded(6))
    observed = torch.bincount(drawn.flatten(), minlength=5)
    expected = count * (EXAMPLE[0, :4] ** (1 / 1.3)) / (EXAMPLE[0, :4] ** (1 / 1.3)).sum()
    assert observed[4] == 0
    chi_square = ((observed[:4] - expected) ** 2 / expected).sum().item()
    assert chi_square < 16.27, f"{observed.tolist()} against {expected.tolist()}"


@pytest.mark.parametrize("seed", [0, 1337])
def test_a_generator_leaves_the_global_one_alone(model: GPT, prompt: Tensor, seed: int) -> None:
    """Seed 0 is a seed like any other; the global state is the same before and after."""
    settings = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
    before = torch.get_rng_state()
    texts = [
        generate(model, prompt, 20, **settings, generator=seeded(seed)).tokens.tolist()
        for _ in range(2)
    ]
    logits = torch.randn(2, 30, generator=seeded(7))
    sample_next(logits, **settings, generator=seeded(seed))
    assert torch.equal(torch.get_rng_state(), before)
    assert texts[0] == texts[1]


def test_without_a_generator_the_global_one_draws() -> None:
    """`torch.manual_seed` then decides, and each draw moves its state on."""
    logits = torch.zeros(8, 512)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        first, second = sample_next(logits), sample_next(logits)
        torch.manual_seed(8)
        assert torch.equal(sample_next(logits), first)
    assert not torch.equal(first, second)
    assert torch.equal(sample_next(logits, generator=seeded(8)), first)


def test_greedy_draws_nothing() -> None:
    """Temperature 0 takes no random number, so that it cannot shift the draws that follow."""
    generator = seeded(9)
    before = generator.get_state()
    sample_next(torch.randn(2, 30, generator=seeded(1)), 0, 5, 0.5, generator)
    assert torch.equal(generator.get_state(), before)


LOGITS = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize("function", [sample_next, probabilities, filtered_logits])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and at least 0, got -0.1"),
        ({"temperature": math.nan}, "temperature must be finite and at least 0, got nan"),
        ({"temperature": INF}, "temperature must be finite and at least 0, got inf"),
        ({"top_k": 0}, "top_k must be None or an integer of at least 1, got 0"),
        ({"top_k": -3}, "top_k must be None or an integer of at least 1, got -3"),
        ({"top_k": 2.5}, r"top_k must be None or an integer of at least 1, got 2\.5"),
        ({"top_p": 0}, r"top_p must be None or lie in \(0, 1\], got 0"),
        ({"top_p": -0.5}, r"top_p must be None or lie in \(0, 1\], got -0\.5"),
        ({"top_p": 1.01}, r"top_p must be None or lie in \(0, 1\], got 1\.01"),
        ({"top_p": math.nan}, r"top_p must be None or lie in \(0, 1\], got nan"),
        ({"temperature": 0, "top_k": 0}, "top_k must be .* at least 1, got 0"),
        ({"temperature": 0, "top_p": 2}, r"top_p must be .*\(0, 1\], got 2"),
        ({"logits": LOGITS[0]}, r"logits must have shape \(B, V\), got \(3,\)"),
        ({"logits": LOGITS[None]}, r"logits must have shape \(B, V\), got \(1, 2, 3\)"),
        ({"logits": torch.zeros(2, 0)}, r"logits must have shape \(B, V\), got \(2, 0\)"),
        ({"logits": torch.zeros(0, 3)}, r"logits must have shape \(B, V\), got \(0, 3\)"),
    ],
)
def test_bad_arguments_are_named(function, arguments: dict, message: str) -> None:
    """Each refusal names the argument, what was given, and what is allowed."""
    with pytest.raises(ValueError, match=message):
        function(**{"logits": LOGITS} | arguments)


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("bad", [[1.0, math.nan, 2.0], [-INF, -INF, -INF], [1.0, INF, 2.0]])
def test_logits_that_mean_nothing_are_refused(bad: list[float], temperature: float) -> None:
    """One bad row spoils the batch; the argmax of NaN would pass for a token."""
    for stack in ([bad], [[1.0, 2.0, 3.0], bad]):
        for dtype in (torch.float32, torch.float16):
            with pytest.raises(ValueError, match=r"logits must hold no NaN and no \+inf"):
                sample_next(torch.tensor(stack, dtype=dtype), temperature, top_k=2, top_p=0.9)


# --- the draw without a sort ---------------------------------------------------------------------


def plain_filter(logits: Tensor, temperature: float, k: int | None, p: float | None) -> Tensor:
    """Filter as the chapter does: sort all, drop behind k, drop behind the mass of p."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    limits = torch.finfo(logits.dtype)
    divisor = min(max(temperature, limits.tiny), limits.max)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ordered = (ordered - ordered[:, :1]) / divisor
    if k is not None:
        ordered[:, k:] = -INF
    if p is not None and p < 1:
        probs = ordered.softmax(dim=-1)
        dropped = probs.cumsum(dim=-1) - probs >= p
        dropped[:, 0] = False
        ordered[dropped] = -INF
    return torch.empty_like(ordered).scatter_(-1, order, ordered)


def brute_force(row: list[float], temperature: float, k: int | None, p: float | None) -> list[int]:
    """List the kept ids by Python's sort and sums in float64; none where rounding may decide."""
    order = by_rank(row)[:k]
    if p is None or p == 1:
        return sorted(v for v in order if row[v] > -INF)
    divisor = max(temperature, torch.finfo(torch.float32).tiny)
    weights = [math.exp((row[v] - row[order[0]]) / divisor) for v in order]
    total, mass, found = math.fsum(weights), 0.0, []
    for v, weight in zip(order, weights, strict=True):
        if abs(mass - p * total) < 1e-4 * total:
            return []
        if mass >= p * total:
            break
        found.append(v)
        mass += weight
    return sorted(found)


@pytest.fixture(scope="module")
def real_logits(model: GPT, passage: list[int]) -> Tensor:
    """What the model says along the passage and pieces of it put together anew, (8,000, 512)."""
    text = torch.tensor(passage[:128])
    starts = torch.randint(0, 96, (62, 4), generator=seeded(51))
    windows = torch.stack([torch.cat([text[s : s + 32] for s in row]) for row in starts.tolist()])
    with torch.inference_mode():
        logits, _ = model(torch.cat((text[None], windows)))
    return logits.flatten(0, 1).clone()


LOOKS = {
    "random": lambda x: x,
    "rounded": lambda x: (4 * x).round() / 4,
    "whole": torch.round,
    "constant": torch.zeros_like,
    "bfloat16": lambda x: x.bfloat16(),
    "float16": lambda x: x.half(),
    "float64": lambda x: x.double(),
    "forbidden": lambda x: x.masked_fill(x.roll(1, 0) < x.roll(1, -1), -INF).index_fill(
        1, torch.tensor([x.shape[1] // 2]), 0.5
    ),
    "shifted": lambda x: x + 1e4,  # so far from 0 that many round to the same number
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand_as(x),
    "sliced": lambda x: torch.cat((x, x), dim=1)[:, ::2],
}
KS = (None, 1, 2, 5, 40, "V/8", "V/8+1", "V-1", "V", "V+5", 10**30)
PS = (None, 1e-50, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-7, 1.0)
TEMPERATURES = (5e-324, 1e-30, 0.1, 0.5, 0.8, 1, 1.7, 1e6, 1.7e308)


def one_of(options: Sequence, generator: torch.Generator) -> object:
    """Pick one."""
    return options[torch.randint(len(options), (1,), generator=generator).item()]


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Count how often a cut was found without a sort, and how often a sort had to decide."""
    counts: Counter = Counter()
    original = sampling._lowest_kept

    def counting(*arguments: object) -> object:
        lowest = original(*arguments)
        counts["sorted" if lowest is None else "found"] += 1
        return lowest

    monkeypatch.setattr(sampling, "_lowest_kept", counting)
    return counts


def check_draw(logits: Tensor, settings: tuple, seed: int) -> None:
    """Hold one draw against the plain filter and multinomial: bits, tokens, states after."""
    expected = plain_filter(logits, *settings)
    found = filtered_logits(logits, *settings)
    assert expected.dtype == found.dtype
    assert torch.equal(expected, found), settings
    one, other = seeded(seed), seeded(seed)
    token = torch.multinomial(expected.softmax(-1), 1, generator=one)
    assert torch.equal(token, sample_next(logits, *settings, generator=other)), settings
    assert torch.equal(one.get_state(), other.get_state())


def test_the_draw_without_a_sort_is_the_one_with_it(paths: Counter) -> None:
    """Bit for bit over 90,000 rows of any look, at settings from one end to the other."""
    pick, rows = seeded(52), 0
    for trial in range(1100):
        V = 2 + torch.randint(260, (1,), generator=pick).item() if trial % 50 else 1
        B = 1 + torch.randint(70, (1,), generator=pick).item() if trial % 3 else 180
        named = {"V/8": V // 8 or 1, "V/8+1": V // 8 + 1, "V-1": V - 1 or 1, "V": V, "V+5": V + 5}
        k = one_of(KS, pick)
        x = one_of((0.1, 1.0, 3.0, 10.0), pick) * torch.randn(B, V, generator=pick)
        settings = (one_of(TEMPERATURES, pick), named.get(k, k), one_of(PS, pick))
        check_draw([*LOOKS.values()][trial % len(LOOKS)](x), settings, trial)
        rows += B
    assert rows > 90_000
    assert min(paths["found"], paths["sorted"]) > 100


def test_the_draw_from_the_models_logits(real_logits: Tensor, paths: Counter) -> None:
    """16,000 rows of text, alone and in batches, where nearly every cut is found."""
    pick = seeded(53)
    for trial, stack in enumerate(real_logits.repeat(2, 1).split(64)):
        settings = (one_of((0.7, 0.8, 1.0, 1.3), pick), one_of((5, 40, 64), pick), 0.95)
        rows = stack.split(1) if trial % 64 == 0 else [stack]
        for row in rows:
            check_draw(row, settings if trial % 3 else (*settings[:2], None), trial)
    assert paths["found"] > 10 * paths["sorted"]


def test_the_cut_of_top_p_at_a_cumulated_mass(real_logits: Tensor, paths: Counter) -> None:
    """A p that is the mass of a run of tokens, or a few roundings off, is left to the sort."""
    for row, logits in enumerate(real_logits[:300].split(1)):
        probs = plain_filter(logits, 0.8, 40, None).softmax(-1)
        mass = probs.sort(descending=True).values.cumsum(-1)
        p = mass[0, row % 7].item() * (1 + (row % 5 - 2) * 2.0**-23)
        check_draw(logits, (0.8, 40, min(p, 1.0)), row)
    assert paths["sorted"] > 250


def test_the_kept_sets_by_brute_force(real_logits: Tensor) -> None:
    """Python's sort and sums in float64 say the same, wherever rounding has no say."""
    pick, told = seeded(54), 0
    ties = (2 * real_logits[:40]).round() / 2
    for row in torch.cat((real_logits[:80], ties)).split(1):
        settings = (one_of((0.5, 0.8, 1.3), pick), one_of((1, 7, 40, 64), pick), one_of(PS, pick))
        expected = brute_force(row[0].tolist(), *settings)
        if expected:
            told += 1
            assert kept(filtered_logits(row, *settings)) == [expected]
    assert told > 80


def test_the_global_generator_draws_as_multinomial_does(real_logits: Tensor) -> None:
    """Without a generator too the tokens and the state afterwards are those of multinomial."""
    with torch.random.fork_rng(devices=[]):
        for seed in range(20):
            torch.manual_seed(seed)
            probs = plain_filter(real_logits[:8], 0.8, 40, 0.95).softmax(-1)
            expected, state = torch.multinomial(probs, 1), torch.get_rng_state()
            torch.manual_seed(seed)
            assert torch.equal(expected, sample_next(real_logits[:8], 0.8, 40, 0.95))
            assert torch.equal(state, torch.get_rng_state())


def test_a_sampler_is_its_settings(real_logits: Tensor) -> None:
    """Any kind of number, checked once; it draws what `sample_next` draws, again and again."""
    sampler = Sampler(np.float64(0.8), np.int64(40), torch.tensor(0.5), seeded(1))
    assert [type(value) for value in (sampler.temperature, sampler.top_k, sampler.top_p)] == [
        float,
        int,
        float,
    ]
    generator = seeded(1)
    for row in real_logits[:20].split(1):
        assert torch.equal(sample_next(row, 0.8, 40, 0.5, generator), sampler(row))
    for wrong in ({"top_k": True}, {"top_k": 2.0}, {"top_p": 0}, {"temperature": "1"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            Sampler(**wrong)
    for temperature in (0, 1):
        with pytest.raises(
            ValueError, match=r"generator must be None or a torch\.Generator, got 3"
        ):
            Sampler(temperature, generator=3)(real_logits[:1])


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}])
def test_probabilities_have_a_gradient(settings: dict) -> None:
    """Filling in place must not break what learns through the distribution."""
    logits = torch.randn(2, 64, generator=seeded(55)).requires_grad_()
    probs = probabilities(logits, **settings)
    probs.square().sum().backward()
    # d/dz of sum(p²) is 2·p·(p − sum(p²)); what was filtered out has none.
    p = probs.detach()
    expected = 2 * p * (p - p.square().sum(-1, keepdim=True))
    torch.testing.assert_close(expected, logits.grad)
