"""Timing on a clock that is moved by hand, and counts against counts by hand."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from lab35 import GPT, GPTConfig, KVCache, Step, decode_steps, generate
from lab35.timing import (
    Latency,
    bytes_read,
    clock_on,
    compare,
    compare_texts,
    count_calls,
    count_flops,
    interleaved,
    mean_seconds,
    spread,
    threads,
    time_paired,
    time_steps,
)


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now


def steps_at(clock: Clock, durations: list[float], rows: int = 1, fed: int = 7) -> Iterator[Step]:
    """Pretend to generate: each step takes so long, and the first feeds a prompt."""
    for index, seconds in enumerate(durations):
        clock.now += seconds
        yield Step(torch.full((rows, 1), index), fed if index == 0 else 1, None)


# --- One text ------------------------------------------------------------------------------------


def test_first_token_and_output_tokens_are_told_apart() -> None:
    """TTFT is the first step, TPOT the mean of the others, and the rate is over everything."""
    clock = Clock()
    told = time_steps(steps_at(clock, [0.5, 0.25, 0.125, 0.125]), clock=clock)
    assert told.arrivals == (0.5, 0.75, 0.875, 1.0)
    assert told.time_to_first_token == 0.5
    assert told.time_per_output_token == pytest.approx(0.5 / 3)
    assert told.seconds == 1.0
    assert told.tokens_per_second == 4.0
    assert told.tokens.tolist() == [[0, 1, 2, 3]]


def test_one_token_has_no_time_per_output_token() -> None:
    """Guards against a division by zero, and against 0 in place of None."""
    clock = Clock()
    told = time_steps(steps_at(clock, [0.5]), clock=clock)
    assert told.time_per_output_token is None
    assert (told.time_to_first_token, told.seconds, told.tokens_per_second) == (0.5, 0.5, 2.0)


def test_a_clock_that_saw_nothing_gives_no_rate() -> None:
    """Guards against a division by zero where a step is shorter than a tick of the clock."""
    clock = Clock()
    told = time_steps(steps_at(clock, [0.0, 0.0]), clock=clock)
    assert told.arrivals == (0.0, 0.0)
    assert told.tokens_per_second is None
    assert told.time_per_output_token == 0.0


def test_prompt_tokens_are_no_output() -> None:
    """A prompt a hundred times as long makes no rate higher when the times are the same."""
    rates = []
    for fed in (1, 100):
        clock = Clock()
        rates.append(time_steps(steps_at(clock, [1, 1], fed=fed), clock=clock).tokens_per_second)
    assert rates == [1.0, 1.0]


def test_every_row_counts() -> None:
    """Three rows write three tokens a step, and wait as long as one."""
    clock = Clock()
    told = time_steps(steps_at(clock, [1.0, 1.0], rows=3), clock=clock)
    assert told.tokens_per_second == 3.0
    assert told.time_per_output_token == 1.0


def test_the_clock_starts_with_the_first_step() -> None:
    """What happens between making the steps and running them is not the model's time."""
    clock = Clock()
    steps = steps_at(clock, [1.0])
    clock.now += 50.0
    assert time_steps(steps, clock=clock).time_to_first_token == 1.0


def test_no_step_is_refused() -> None:
    """Nothing was written, so there is nothing to tell."""
    with pytest.raises(ValueError, match="steps must yield at least one token"):
        time_steps([])


def test_the_real_loop_is_timed_and_not_changed(model: GPT, prompt: torch.Tensor) -> None:
    """The tokens are those of `generate`, and each comes later than the one before."""
    told = time_steps(decode_steps(model, prompt, 6, temperature=0))
    assert torch.equal(told.tokens, generate(model, prompt, 6, temperature=0).new_tokens)
    assert len(told.arrivals) == 6
    assert all(a < b for a, b in zip((0.0, *told.arrivals), told.arrivals, strict=False))


# --- Several ways to do one thing ----------------------------------------------------------------


def test_time_paired_takes_turns_and_ratios_within_a_round() -> None:
    """On a machine that slows down from round to round the ratio stays what it is."""
    clock, calls = Clock(), []

    def variant(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            slowness = 1 + (len(calls) - 1) // 2  # the same for both variants of a round
            clock.now += seconds * slowness

        return run

    variants = {"slow": variant("slow", 4.0), "fast": variant("fast", 1.0)}
    found = time_paired(variants, repeats=3, clock=clock)
    assert calls == ["slow", "fast", "fast", "slow", "slow", "fast", "fast", "slow"]
    assert found["baseline"] == "slow"
    assert found["samples"] == 3
    assert found["threads"] == torch.get_num_threads()
    assert found["variants"]["fast"]["seconds"]["median"] == 3.0  # rounds 2 to 4 count
    fast = found["variants"]["fast"]["speedup"]
    assert (fast["median"], fast["min"], fast["max"]) == (4.0, 4.0, 4.0)


def test_a_block_of_calls_is_divided() -> None:
    """Ten calls of a quarter take a quarter each; no call is refused."""
    clock, calls = Clock(), []

    def quarter() -> None:
        calls.append(1)
        clock.now += 0.25

    assert mean_seconds(quarter, 10, clock=clock) == 0.25
    assert len(calls) == 10
    with pytest.raises(ValueError, match="calls must be at least 1, got 0"):
        mean_seconds(quarter, 0)


def latency(*arrivals: float, token: int = 1) -> Latency:
    """Pretend that one row was timed."""
    return Latency(torch.full((1, len(arrivals)), token), arrivals)


def test_texts_are_compared_by_their_latencies() -> None:
    """Each quantity is the spread over rounds, and the ratio is that of whole texts."""
    rounds = [
        {"a": latency(1.0, 2.0, 3.0), "b": latency(1.0, 1.25, 1.5)},
        {"a": latency(2.0, 4.0, 6.0), "b": latency(2.0, 2.5, 3.0)},
    ]
    told = compare_texts(rounds)
    assert told["same_tokens"] is True
    a, b = told["variants"].values()
    assert b["speedup"]["min"] == b["speedup"]["max"] == 2.0
    assert (a["time_to_first_token"]["min"], a["time_to_first_token"]["max"]) == (1.0, 2.0)
    assert b["time_per_output_token"]["median"] == 0.375
    assert b["tokens_per_second"]["max"] == 2.0


def test_texts_that_differ_and_texts_of_one_token() -> None:
    """Another token is told, in whichever round; one token has no time per output token."""
    one, other = latency(1.0), latency(1.0, token=2)
    assert compare_texts([{"a": one, "b": one}])["same_tokens"] is True
    told = compare_texts([{"a": one, "b": one}, {"a": one, "b": other}])
    assert told["same_tokens"] is False
    assert told["variants"]["b"]["time_per_output_token"] is None


def test_the_baseline_can_be_named() -> None:
    """A speed-up is baseline time over own time: below 1 for what is slower."""
    found = compare([{"a": 1.0, "b": 4.0}], "b")["variants"]
    assert (found["a"]["speedup"]["median"], found["b"]["speedup"]["median"]) == (4.0, 1.0)


def test_the_claim_is_a_median_of_ratios() -> None:
    """Guards against the ratio of medians, which here would be 2 / 1."""
    rounds = [{"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 4.0}, {"a": 8.0, "b": 1.0}]
    assert compare(rounds)["variants"]["b"]["speedup"]["median"] == 1.0
    assert compare(rounds)["variants"]["b"]["speedup"]["max"] == 8.0


def test_warm_up_rounds_run_and_are_not_told() -> None:
    """Each variant runs warm-up and repeats, and only the repeats come out."""
    calls = []
    rounds = list(interleaved({"a": lambda: calls.append(1) or len(calls)}, repeats=2, warmup=3))
    assert rounds == [{"a": 4}, {"a": 5}]


def test_the_first_variant_is_the_baseline_whoever_began() -> None:
    """Guards the order within a round: the only one that counts here has begun with b."""
    rounds = list(interleaved({"a": lambda: 1.0, "b": lambda: 2.0}, repeats=1))
    assert list(rounds[0]) == ["a", "b"]
    assert compare(rounds)["baseline"] == "a"


def test_the_collector_sleeps_while_it_is_timed() -> None:
    """A collection would fall on a random variant; afterwards all is as it was."""
    assert gc.isenabled()
    seen = []
    time_paired({"a": lambda: seen.append(gc.isenabled())}, repeats=1, warmup=0)
    time_steps(seen.append(gc.isenabled()) or Step(torch.zeros(1, 1), 1, None) for _ in "a")
    assert seen == [False, False]
    with pytest.raises(ZeroDivisionError):
        time_paired({"a": lambda: 1 / 0}, repeats=1)
    assert gc.isenabled()
    gc.disable()
    try:
        time_paired({"a": int}, repeats=1)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("variants", "options", "name"),
    [
        ({}, {"repeats": 1}, "variants"),
        ({"a": int}, {"repeats": 0}, "repeats"),
        ({"a": int}, {"repeats": 1, "warmup": -1}, "warmup"),
        ({"a": int}, {"repeats": 1, "baseline": "b"}, "baseline"),
    ],
)
def test_time_paired_refuses(variants: dict, options: dict, name: str) -> None:
    """Bad arguments are named, and before anything has run."""
    calls = []
    watched = {key: lambda: calls.append(1) for key in variants}
    with pytest.raises(ValueError, match=f"{name} must"):
        time_paired(watched, **options)
    assert not calls


def test_no_round_is_refused() -> None:
    """There is nothing to compare."""
    with pytest.raises(ValueError, match="rounds must hold at least one round"):
        compare([])


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["a", "b"])
def test_what_the_clock_did_not_see_has_no_ratio(bad: float, name: str) -> None:
    """Guards against a division by zero, and against NaN that a median would hide."""
    rounds = [{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0} | {name: bad}]
    with pytest.raises(ValueError, match=f"seconds above 0, got {bad} for '{name}' in round 1"):
        compare(rounds)
    texts = [{key: latency(seconds) for key, seconds in times.items()} for times in rounds]
    with pytest.raises(ValueError, match="the clock is too coarse"):
        compare_texts(texts)
    still = Clock()
    with pytest.raises(ValueError, match="the clock is too coarse"):
        time_paired({"a": int, "b": int}, repeats=2, clock=still)


def test_spread_agrees_with_numpy() -> None:
    """Median and quartiles are those of an independent library, down to one sample."""
    for samples in ([3.0, 1.0, 2.0, 10.0, 4.0], [2.0, 1.0], [7.0]):
        found = spread(samples)
        lower, middle, upper = np.percentile(samples, [25, 50, 75])
        assert found == {
            "median": middle, "min": min(samples), "max": max(samples),
            "iqr": pytest.approx(upper - lower), "samples": len(samples),
        }  # fmt: skip
    with pytest.raises(ValueError, match="samples must hold at least one"):
        spread([])


def test_threads_are_set_and_restored() -> None:
    """Also when the block fails; and none at all are refused."""
    before = torch.get_num_threads()
    seen = []
    with pytest.raises(ZeroDivisionError), threads(before + 1):
        seen.append(torch.get_num_threads()) or 1 / 0
    assert seen == [before + 1]
    assert torch.get_num_threads() == before
    with pytest.raises(ValueError, match="count must be at least 1, got 0"), threads(0):
        pass


# --- Counts --------------------------------------------------------------------------------------


def test_calls_are_counted_by_hand() -> None:
    """Two additions, a product and a view, by their names."""
    x = torch.ones(3, 3)
    with torch.inference_mode():
        found = count_calls(lambda: ((x + x) @ x + x).view(9))
    assert found == {"aten.add": 2, "aten.matmul": 1, "aten.view": 1}


def test_the_mode_changes_the_count() -> None:
    """A linear layer is one call under inference mode, and comes apart without gradients."""
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with torch.inference_mode():
        assert count_calls(lambda: layer(x)) == {"aten.linear": 1}
    with torch.no_grad():
        assert count_calls(lambda: layer(x)) == {"aten.t": 1, "aten.addmm": 1}


def test_a_decode_step_counts_what_the_model_says(model: GPT, prompt: torch.Tensor) -> None:
    """Four linear layers, two norms and two cache writes a layer, whatever the views."""
    steps = decode_steps(model, prompt, 3, temperature=0, engine="eager")
    next(steps)
    found, L = count_calls(lambda: next(steps)), model.config.n_layer
    assert found["aten.linear"] == 4 * L + 1
    assert found["aten.layer_norm"] == 2 * L + 1
    assert found["aten.copy_"] == 2 * L
    assert found["aten.scaled_dot_product_attention"] == found["aten.gelu"] == L


def flops_by_hand(config: GPTConfig, t_new: int, t_total: int) -> int:
    """Count 2 a weight that multiplies, and 4·L·C·t_total for attention, for each new token."""
    L, C = config.n_layer, config.n_embd
    products = 2 * (L * (3 + 1 + 4 + 4) * C * C + C * config.vocab_size)
    return t_new * (products + 4 * L * C * t_total)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_flops_are_counted_by_hand(tiny_model: GPT, device: str, batch_size: int) -> None:
    """Prefill, one token behind it, and a chunk behind both, attention included on each device."""
    config = tiny_model.config
    with torch.device(device):
        model = GPT(config).eval()
        cache = KVCache(config, batch_size, device=device)
        idx = torch.zeros(batch_size, 20, dtype=torch.int64)
    for t_new in (20, 1, 5):
        t_total = cache.length + t_new
        with torch.inference_mode():
            found = count_flops(lambda t_new=t_new: model(idx[:, :t_new], cache=cache))
        assert found == batch_size * flops_by_hand(config, t_new, t_total), (t_new, t_total)


def test_bytes_are_weights_once_and_caches_for_each_row(tiny_model: GPT) -> None:
    """Held against the buffers themselves, in two types."""
    for dtype in (torch.float32, torch.float64):
        model = GPT(tiny_model.config).to(dtype)
        weights = model.num_parameters * dtype.itemsize
        for batch_size, positions in ((1, 1), (3, 40)):
            cache = KVCache(model.config, batch_size, positions, dtype=dtype)
            found = bytes_read(model, positions, batch_size=batch_size)
            assert found == weights + cache.nbytes
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        bytes_read(tiny_model, 0)


def test_a_latency_is_plain_data() -> None:
    """It can be made from stored arrivals as well."""
    told = Latency(torch.zeros(2, 3, dtype=torch.int64), (1.0, 1.5, 2.0))
    assert (told.time_per_output_token, told.tokens_per_second) == (0.5, 3.0)


def test_the_clock_of_a_gpu_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the time is read after the work is done; a CPU need not be waited for."""
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(str(device)))
    monkeypatch.setattr(time, "perf_counter", lambda: order.append("read") or 1.5)
    assert clock_on("cuda:0")() == 1.5
    assert order == ["cuda:0", "read"]
    assert clock_on(torch.device("cpu"))() == 1.5
    assert order == ["cuda:0", "read", "read"]
