"""Verification: does a cached decoder compute what the model computes without a cache?

Fluent text is no evidence: a cache that is off by one position writes it too. The logits are.

```{.python title="A cache, held against recomputation"}
import torch

from lab35 import load_pretrained
from lab35.verification import verify_cache

model, tokenizer = load_pretrained()
report = verify_cache(model, torch.tensor([tokenizer.encode("Sherlock Holmes")]), 16)
assert report.passed, report
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lab35._arguments import integer, number
from lab35.loop import check_prompt
from lab35.model import GPT, evaluating
from lab35.speed import Engine, EngineName, choose_engine, new_engine

__all__ = ["Divergence", "VerifyReport", "verify", "verify_cache"]

WINDOW = 16
"""Steps that one entry of `maxima_per_16_steps` covers."""

BARS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2**-5, torch.bfloat16: 2**-2}
"""What two logits of a model in each type may differ by, unless `atol` says otherwise.

The chapter on verification measures what rounding does to the logits of this course, which are
below 32: these bars are at least twice that. Larger logits or more layers may need a wider one."""


@dataclass(frozen=True)
class Divergence:
    """One row at one step where both sides prefer different tokens, after the same prefix.

    Attributes:
        step: Counted from 0, the prefill.
        row: Of the batch.
        decoded: What the cached side chose; the prefix goes on with it.
        expected: What the reference chose.
        margin: How far the reference puts its own choice above the decoded one, in logits.
        excused: Whether the margin is at most twice the report's `atol`. Two logits that each move
            by that much close such a gap, so that rounding may have decided.
    """

    step: int
    row: int
    decoded: int
    expected: int
    margin: float
    excused: bool


@dataclass(frozen=True)
class VerifyReport:
    """What a verification saw, step by step, and what follows from it.

    It is true in a condition if and only if it passed, so that `assert verify_cache(…)` means what
    it says.

    Attributes:
        tokens: Each row's prompt, and what the cached side decoded after it.
        prompt_length: Tokens a row before the first step, P.
        atol: The bar for differences. A divergence is excused up to a margin of twice as much.
        differences: The largest absolute logit difference of each step, over rows and vocabulary.
            NaN where a row has no finite largest logit on either side.
        margins: The smallest distance between the reference's two best logits at each step, over
            the rows.
        divergences: Every choice that differs, in order.
        engine: What decoded, such as `"lean"`; None for a callable that is none of lab35's.
        engine_asked: What `verify_cache` was asked for. Where that cannot be had on this machine,
            `engine` differs from it.
    """

    tokens: tuple[tuple[int, ...], ...]
    prompt_length: int
    atol: float
    differences: tuple[float, ...]
    margins: tuple[float, ...]
    divergences: tuple[Divergence, ...]
    engine: str | None = None
    engine_asked: str | None = None

    @property
    def steps(self) -> int:
        """Tokens a row that were decoded: the first from the prefill, the others from the cache."""
        return len(self.differences)

    @property
    def max_abs_logit_diff(self) -> float:
        """The largest difference of all steps; NaN if any is."""
        return _largest(self.differences)

    @property
    def maxima_per_16_steps(self) -> tuple[float, ...]:
        """The largest difference of steps 0 to 15, 16 to 31, …; the last group may be short."""
        starts = range(0, self.steps, WINDOW)
        return tuple(_largest(self.differences[start : start + WINDOW]) for start in starts)

    @property
    def min_margin(self) -> float:
        """The smallest margin of all steps; NaN if any is."""
        return -_largest([-margin for margin in self.margins])

    @property
    def safety_factor(self) -> float:
        """The smallest margin over the largest difference; above 2, no choice can have moved."""
        largest = self.max_abs_logit_diff
        return self.min_margin / largest if largest else math.inf

    @property
    def tokens_equal(self) -> bool:
        """Whether both sides chose the same token, in every row at every step."""
        return not self.divergences

    @property
    def first_divergence(self) -> Divergence | None:
        """The earliest choice that differs, or None."""
        return self.divergences[0] if self.divergences else None

    @property
    def passed(self) -> bool:
        """Whether every difference is within `atol` and every divergence is excused."""
        # NaN compares false with everything: asked this way round, it fails.
        within = all(difference <= self.atol for difference in self.differences)
        return within and all(divergence.excused for divergence in self.divergences)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Tell the outcome in a few lines; an excused divergence is always among them.

        Returns:
            Lines of text: the verdict, the largest difference, the smallest margin, the tokens,
            then each excused divergence and the first one that is a fault.
        """
        largest, smallest = self.max_abs_logit_diff, self.min_margin
        at = max(range(self.steps), key=lambda step: _rank(self.differences[step]))
        within = "within" if largest <= self.atol else "NOT within"
        rows = len(self.tokens)
        choices = self.steps * rows
        lines = [
            f"verification {'passed' if self.passed else 'FAILED'}: "
            f"1 prefill + {self.steps - 1} decode steps, {self._told_engine()}"
            f"batch of {rows}, atol {self.atol:g}",
            f"  largest logit difference {largest:.1e} at step {at}, {within} atol",
            f"  smallest margin {smallest:.1e}, {self.safety_factor:,.1f} times the difference",
            f"  tokens: {choices - len(self.divergences)} of {choices} choices equal",
        ]
        excused = [divergence for divergence in self.divergences if divergence.excused]
        faults = [divergence for divergence in self.divergences if not divergence.excused]
        for each in excused + faults[:1]:
            lines.append(
                f"  step {each.step}, row {each.row}: {each.decoded} instead of {each.expected}, "
                f"margin {each.margin:.1e}: "
                + ("excused, within twice atol" if each.excused else "a fault, not rounding")
            )
        if len(faults) > 1:
            lines.append(f"  and {len(faults) - 1} more like the last")
        return "\n".join(lines)

    def _told_engine(self) -> str:
        """Name what decoded, and what was asked for if that is something else."""
        if self.engine is None:
            return ""
        if self.engine_asked in (None, self.engine):
            return f"engine {self.engine}, "
        return f"engine {self.engine} in place of {self.engine_asked}, "

    def as_dict(self) -> dict[str, Any]:
        """Give everything as JSON can hold it: what is not finite becomes None.

        Returns:
            The attributes and the properties, by name.
        """
        first = self.first_divergence
        return {
            "passed": self.passed,
            "steps": self.steps,
            "engine": self.engine,
            "engine_asked": self.engine_asked,
            "prompt_length": self.prompt_length,
            "atol": self.atol,
            "max_abs_logit_diff": _finite(self.max_abs_logit_diff),
            "maxima_per_16_steps": [_finite(value) for value in self.maxima_per_16_steps],
            "min_margin": _finite(self.min_margin),
            "safety_factor": _finite(self.safety_factor),
            "tokens": [list(row) for row in self.tokens],
            "tokens_equal": self.tokens_equal,
            "first_divergence": first and _plain(first),
            "divergences": [_plain(divergence) for divergence in self.divergences],
            "differences": [_finite(value) for value in self.differences],
            "margins": [_finite(value) for value in self.margins],
        }


def verify_cache(
    model: GPT,
    idx: Tensor,
    steps: int,
    *,
    atol: float | None = None,
    engine: EngineName = "eager",
) -> VerifyReport:
    """Decode greedily with a cache, and run every prefix again without one.

    Dropout is off meanwhile; the model's mode is as it was afterwards.

    Args:
        model: A GPT.
        idx: Int64 prompt without padding, shape (B, P).
        steps: Tokens a row to decode. The first is the prefill's; the cache is read from the
            second on.
        atol: See `verify`. By default the bar of the type of the weights, float64 included.
        engine: What decodes: the model itself, or one of the engines of `lab35.speed`.

    Returns:
        The report. A fault in the logits is reported; what the model itself raises is raised.

    Raises:
        ValueError: If `idx` is no prompt for the model, `atol` is not positive, `steps` is below 1
            or beyond the last position, or the engine cannot run this.
    """
    check_prompt(model, idx)
    P, block_size = idx.shape[1], model.config.block_size
    room = block_size + 1 - P  # the last sample is never fed
    if room < 1:
        raise ValueError(f"idx must hold at most block_size={block_size} tokens, got {P}")
    steps = integer("steps", steps)
    if not 1 <= steps <= room:
        raise ValueError(
            f"steps must lie in [1, {room}] for a prompt of {P} in a block of {block_size}, "
            f"got {steps}"
        )
    if atol is None:
        atol = max(_bar(weight.dtype) for weight in model.parameters())
    name = choose_engine(engine, model, len(idx))
    decode = new_engine(name, model, batch_size=len(idx))
    with evaluating(model):
        report = verify(decode, lambda tokens: model(tokens)[0][:, -1], idx, steps, atol=atol)
    return replace(report, engine_asked=engine)


@torch.inference_mode()
def verify(
    decode: Callable[[Tensor], Tensor],
    reference: Callable[[Tensor], Tensor],
    idx: Tensor,
    steps: int,
    *,
    atol: float | None = None,
) -> VerifyReport:
    """Hold any incremental decoder against any function of the whole text.

    Both see the same prefix at every step, which the decoder's own greedy choices extend. So a
    choice that differs does not spoil the steps after it. Both run under
    `torch.inference_mode()`.

    Args:
        decode: Takes the tokens it has not seen, int64 of shape (B, P) at first and (B, 1) from
            then on, keeps its own state, and returns the logits after the last one, of shape
            (B, V).
        reference: Takes all tokens so far, int64 of shape (B, T), and returns the same logits,
            of shape (B, V), without any state.
        idx: Int64 prompt, shape (B, P).
        steps: Tokens a row to decode. The first is the prefill's.
        atol: What two logits may differ by. Other shapes take other kernels and add in another
            order, so that float32 agrees to about 1e-5, not to the bit. A differing choice is
            excused where its margin is at most twice this: that is what two such differences close.
            By default 1e-4, and for logits in float16 or bfloat16, on either side, the bar of that
            type. Logits in float64 do not say what they were computed in: pass a lower bar if they
            were.

    Returns:
        The report. Logits that are NaN or +∞, or a row that is all −∞, fail it.

    Raises:
        ValueError: If `idx` is no prompt, `steps` is below 1, `atol` is not positive and finite,
            or a callable returns something else than (B, V) logits.
    """
    check_prompt(decode, idx)
    steps = integer("steps", steps, 1)
    if atol is not None:
        atol = number("atol", atol, "positive and finite")
        if not 0 < atol < math.inf:
            raise ValueError(f"atol must be positive and finite, got {atol}")
    B, P = idx.shape
    bars, new, differences, margins, choices = [BARS[torch.float32]], idx, [], [], []
    for step in range(steps):
        # 1) score the same prefix twice
        found, bar = _scores("decode", decode(new), B)  # (B, V)
        expected, bar_of_reference = _scores("reference", reference(idx), B)
        bars += [bar, bar_of_reference]
        if found.shape != expected.shape:
            raise ValueError(
                f"decode and reference must score one vocabulary, "
                f"got {found.shape[1]} and {expected.shape[1]} tokens"
            )

        # 2) compare
        differences.append(_difference(found, expected))
        best = expected.topk(2).values
        margins.append((best[:, 0] - best[:, 1]).min().item())
        token = found.argmax(dim=-1, keepdim=True)  # (B, 1)
        choice = expected.argmax(dim=-1, keepdim=True)
        margin = expected.gather(1, choice) - expected.gather(1, token)
        for row in (token != choice)[:, 0].nonzero()[:, 0].tolist():
            tokens = token[row].item(), choice[row].item()
            choices.append((step, row, *tokens, margin[row].item()))

        # 3) go on with what the decoder chose
        idx, new = torch.cat((idx, token.to(idx.device)), dim=1), token.to(idx.device)
    atol = max(bars) if atol is None else atol
    return VerifyReport(
        tokens=tuple(map(tuple, idx.tolist())),
        prompt_length=P,
        atol=atol,
        differences=tuple(differences),
        margins=tuple(margins),
        divergences=tuple(
            # Each of the two logits may have moved by the bar.
            Divergence(*choice, margin, excused=margin <= 2 * atol)
            for *choice, margin in choices
        ),
        engine=decode.name if isinstance(decode, Engine) else None,
    )


def _bar(dtype: torch.dtype) -> float:
    """Return what logits of a type may differ by: float32's bar for a type without its own."""
    return BARS.get(dtype, BARS[torch.float32])


def _scores(name: str, logits: Tensor, rows: int) -> tuple[Tensor, float]:
    """Copy logits, in float64: a pair that reuses one buffer would compare it with itself.

    Also return the bar of the type that they came in.
    """
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise ValueError(f"{name} must return a tensor of floats, got {logits!r}")
    if logits.ndim != 2 or logits.shape[0] != rows or logits.shape[1] < 2:
        raise ValueError(
            f"{name} must return logits of shape (B, V) = ({rows}, V) with V at least 2, "
            f"got shape {tuple(logits.shape)}"
        )
    return logits.cpu().to(torch.float64, copy=True), _bar(logits.dtype)


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, or NaN where there is no distribution to compare."""
    # −∞ on both sides is agreement: a decoder may forbid tokens.
    distance = (found - expected).abs().masked_fill(found == expected, 0.0).amax(dim=-1)
    sound = found.amax(dim=-1).isfinite() & expected.amax(dim=-1).isfinite()
    return distance.masked_fill(~sound, math.nan).amax().item()


def _largest(values: Sequence[float]) -> float:
    """Return the maximum; unlike `max`, NaN if any value is NaN."""
    return max(values, key=_rank)


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain(divergence: Divergence) -> dict[str, Any]:
    return {name: _finite(value) for name, value in asdict(divergence).items()}
