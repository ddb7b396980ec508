"""The plain rung: loops over arrays, which numba turns into machine code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab35._arguments import check_generator
from lab35.model import GPT, GPTConfig
from lab35.sampling import Sampler, probabilities, race
from lab35.speed.engine import EPS, Engine, Step, check_step, padded
from lab35.speed.storage import ONE_AT_A_TIME, Unavailable, cause, code_of, kept, name_of
from lab35.speed.weights import Weights
from lab35.terminal import error_console

f32, i32 = np.float32, np.int32  # a bare 1.0 is a float64, and would make its whole sum one


def _exp(x: f32) -> f32:
    """Return e**x, in steps that run on sixteen numbers at once; a call to exp does not."""
    # e**x is 2**(whole + part): a polynomial for the part, and the whole is an exponent's bits.
    x = x * f32(1.44269504)  # 1 / ln 2
    x = f32(-126) if x < f32(-126) else x  # not max and min: NaN stays NaN
    x = f32(126) if x > f32(126) else x
    whole = np.floor(x)
    part = x - whole
    y = f32(1.8775767e-3)
    y = y * part + f32(8.9893397e-3)
    y = y * part + f32(5.5826318e-2)
    y = y * part + f32(2.4015361e-1)
    y = y * part + f32(6.9315308e-1)
    y = y * part + f32(0.99999994)
    return y * i32((i32(whole) + i32(127)) << i32(23)).view(f32)


def _norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, y: np.ndarray) -> None:
    """Write the LayerNorm of x into y, all (C,)."""
    mean = f32(0)
    for i in range(x.size):
        mean += x[i]
    mean /= f32(x.size)
    var = f32(0)
    for i in range(x.size):
        var += (x[i] - mean) * (x[i] - mean)
    scale = f32(1) / np.sqrt(var / f32(x.size) + f32(EPS))
    for i in range(x.size):
        y[i] = (x[i] - mean) * scale * weight[i] + bias[i]


def _add_matvec(weight: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """Add weight (N, M) times x (M,) to y (N,), where a bias or the residual stands already."""
    for i in range(y.size):
        total = f32(0)
        for j in range(x.size):
            total += weight[i, j] * x[j]
        y[i] += total


def _gelu(x: np.ndarray) -> None:
    """Apply the tanh-GELU in place: x * (1 + tanh(u)) / 2 is x / (1 + exp(-2 * u))."""
    for i in range(x.size):
        u = f32(0.7978845608) * x[i] * (f32(1) + f32(0.044715) * x[i] * x[i])  # sqrt(2 / pi)
        x[i] /= f32(1) + _exp(f32(-2) * u)


def _attend(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, p: np.ndarray, y: np.ndarray
) -> None:
    """Attend from q (H·D,) to the first n of keys and values (H, T, D), into y (H·D,).

    It leaves the last head's weights, not yet divided by their sum, in p (n,).
    """
    H, _, D = keys.shape
    scale = f32(1) / np.sqrt(f32(D))
    for h in range(H):
        top = f32(-np.inf)
        for t in range(p.size):
            score = f32(0)
            for d in range(D):
                score += q[h * D + d] * keys[h, t, d]
            p[t] = score * scale
            top = max(top, p[t])
        total = f32(0)
        for t in range(p.size):
            p[t] = _exp(p[t] - top)
            total += p[t]
        y[h * D : (h + 1) * D] = f32(0)
        for t in range(p.size):
            share = p[t] / total
            for d in range(D):
                y[h * D + d] += share * values[h, t, d]


def _decode(
    token: int,
    at: int,
    wte: np.ndarray,
    wpe: np.ndarray,
    blocks: tuple[tuple[np.ndarray, ...], ...],
    ln_f: tuple[np.ndarray, np.ndarray],
    kv: np.ndarray,
) -> np.ndarray:
    """Run one token at position `at`, write into kv (L, 2, H, T, D), and return logits (V,).

    The whole decode step in loops over float32 arrays. It runs as plain Python too, very slowly.
    """
    V, C = wte.shape
    L, _, H, _, D = kv.shape
    x, y, qkv = np.empty(C, f32), np.empty(C, f32), np.empty(3 * C, f32)
    hidden, p = np.empty(4 * C, f32), np.empty(at + 1, f32)
    for i in range(C):
        x[i] = wte[token, i] + wpe[at, i]
    for layer in range(L):
        ln_1, b_1, w_qkv, b_qkv, w_proj, b_proj, ln_2, b_2, w_fc, b_fc, w_out, b_out = blocks[layer]
        _norm(x, ln_1, b_1, y)
        qkv[:] = b_qkv
        _add_matvec(w_qkv, y, qkv)
        for h in range(H):
            for d in range(D):
                kv[layer, 0, h, at, d] = qkv[C + h * D + d]
                kv[layer, 1, h, at, d] = qkv[2 * C + h * D + d]
        _attend(qkv[:C], kv[layer, 0], kv[layer, 1], p, y)
        x += b_proj
        _add_matvec(w_proj, y, x)
        _norm(x, ln_2, b_2, y)
        hidden[:] = b_fc
        _add_matvec(w_fc, y, hidden)
        _gelu(hidden)
        x += b_out
        _add_matvec(w_out, hidden, x)
    _norm(x, ln_f[0], ln_f[1], y)
    logits = np.zeros(V, f32)
    _add_matvec(wte, y, logits)
    return logits


def _best(logits: np.ndarray) -> int:
    """Return the id of the highest logit, the lowest of several; -1 if that is no number."""
    best = 0
    for i in range(logits.size):
        if logits[i] != logits[i]:  # NaN
            return -1
        if logits[i] > logits[best]:
            best = i
    return best if np.isfinite(logits[best]) else -1


def _draw(logits: np.ndarray, times: np.ndarray, divisor: float, top_k: int, top_p: float) -> int:
    """Draw a token by the race of `lab35.sampling`; -1 where rounding might decide.

    These sums round in another way than torch's. So a cut that is closer to p, or a race that is
    closer, than any rounding could move it is left to the function that defines the answer.
    """
    # 1) the top k logits and one more, in order, by insertion
    ids = np.empty(top_k + 1, np.int64)
    found = 0
    for i in range(logits.size):
        if found <= top_k or logits[i] > logits[ids[found - 1]]:
            at = min(found, top_k)
            while at > 0 and logits[ids[at - 1]] < logits[i]:
                ids[at] = ids[at - 1]
                at -= 1
            ids[at] = i
            found = min(found + 1, top_k + 1)
    # 2) top-p: the shortest run from the front whose mass reaches p
    weights = np.empty(top_k)
    total = 0.0
    for i in range(top_k):
        weights[i] = np.exp((np.float64(logits[ids[i]]) - logits[ids[0]]) / divisor)
        total += weights[i]
    rounding = (top_k + 32) * 2.0**-23 * total
    before, kept = 0.0, 0
    while kept < top_k and (top_p == 1 or before < top_p * total - rounding):
        before += weights[kept]
        kept += 1
    if kept < top_k and before < top_p * total + rounding:
        return -1
    if logits[ids[kept - 1]] == logits[ids[kept]]:  # their ids would decide
        return -1
    # 3) the race
    first, second, token = -1.0, -1.0, 0
    for i in range(kept):
        speed = weights[i] / times[ids[i]]
        if speed > first:
            first, second, token = speed, first, ids[i]
        elif speed > second:
            second = speed
    return -1 if second > first * (1 - 1e-4) else token


class Jitted(Engine):
    """The decode step in plain loops, which numba turns into machine code at the first call.

    It needs `pip install numba` and no C++ compiler. The first call takes some seconds;
    the result is kept in the user's cache folder.

    Args:
        model: The model to run, in float32 on the CPU.
        max_len: Positions to make room for. Defaults to the model's block size.

    Raises:
        RuntimeError: If numba is not installed.
    """

    name = "numba"

    def __init__(self, model: GPT, max_len: int | None = None) -> None:
        super().__init__(model, max_len)
        self.arrays = _arrays(self.weights)
        with ONE_AT_A_TIME:
            loops = _had(model.config)
        self.run, self.best, self.draw = (loops[name] for name in ("_decode", "_best", "_draw"))
        self.times = torch.empty(1, model.config.vocab_size, dtype=torch.float32, device="cpu")

    def next(self, token: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """Run one token and choose the next, both in plain loops.

        Args:
            token: Int64, shape (1, 1).
            choose: Takes logits of shape (1, V), and returns an id of shape (1, 1). The work of a
                `Sampler` that keeps few tokens is done here.

        Returns:
            Int64, shape (1, 1).

        Raises:
            ValueError: As for `Engine.next`.
        """
        V = self.config.vocab_size
        # A subclass may choose in another way.
        known = type(choose) is Sampler and (choose.temperature == 0 or choose.is_narrow(V))
        if not known or not self.length:
            return super().next(token, choose)
        logits = self.step(token)
        numbers = logits.numpy()[0]
        chosen = self.best(numbers)
        if chosen < 0:
            return choose(logits)  # and be told why not
        check_generator("generator", choose.generator, logits.device)
        if choose.temperature > 0:
            self.times.exponential_(generator=choose.generator)
            limits = torch.finfo(logits.dtype)
            divisor = min(max(choose.temperature, limits.tiny), limits.max)
            chosen = self.draw(
                numbers, self.times.numpy()[0], divisor, choose.top_k, choose.top_p or 1.0
            )
            if chosen < 0:
                probs = probabilities(logits, choose.temperature, choose.top_k, choose.top_p)
                return race(probs, self.times)
        return torch.tensor([[chosen]], device="cpu")

    def _store(self, k: Tensor, v: Tensor) -> None:
        # (L, 2, H, max_len, D)
        self.kv = padded(torch.cat((k, v), dim=1), self.max_len).numpy()

    def _step(self, token: Tensor, at: int) -> Tensor:
        return torch.from_numpy(self.run(token.item(), at, *self.arrays, self.kv))


def _arrays(weights: Weights) -> tuple:
    """Lay out all weights as `_decode` takes them, on the same memory."""
    wte, wpe, blocks, ln_f = weights
    flat = (tuple(tensor.numpy() for pair in block for tensor in pair) for block in blocks)
    return wte.numpy(), wpe.numpy(), tuple(flat), tuple(tensor.numpy() for tensor in ln_f)


LOOPS = {
    part.__name__: part
    for part in (_exp, _norm, _add_matvec, _gelu, _attend, _decode, _best, _draw)
}


@cache
def _had(config: GPTConfig) -> dict[str, Callable]:
    """Compile the loops, or take what an earlier process compiled."""
    waiting = error_console().status("getting the loops ready, once; this takes some seconds")
    try:
        numba = _numba()
        name = name_of(
            "loops",
            (numba.__version__, sys.version, np.__version__),
            __file__,  # numba finds a function again by its place
            config.n_layer,  # the other sizes are no part of the code
            code_of(*LOOPS.values()),
        )
        return kept(name, lambda folder: None, partial(_load, config), waiting)
    except Exception as error:  # a damaged installation fails in more ways than can be listed
        raise Unavailable(cause(error)) from error


def _numba() -> ModuleType:
    try:
        import numba
    except ImportError as error:
        raise Unavailable(f"{error}; pip install numba") from None
    if numba.config.DISABLE_JIT:
        raise Unavailable("NUMBA_DISABLE_JIT is set")
    return numba


def _load(config: GPTConfig, folder: Path) -> dict[str, Callable]:
    """Let numba compile into a folder, or load from it, and hold the loops against a model."""
    known = Path(_decode.__code__.co_filename).exists()  # else numba keeps nothing
    jitted = _jit(LOOPS, folder if known else None)

    def pointed(model: GPT) -> Step:
        weights = _arrays(Weights.of(model))

        def step(token: int, at: int, kv: Tensor) -> tuple[Tensor, Tensor]:
            logits = jitted["_decode"](token, at, *weights, kv.numpy())
            return torch.from_numpy(logits), kv.narrow(3, at, 1)

        return step

    check_step(config, pointed)
    _check_draw(jitted)
    for part in jitted.values():
        part._cache.disable()  # the folder does not stay
    return jitted


def _check_draw(jitted: Mapping[str, Callable]) -> None:
    """Hold the draw once against the one that it stands for.

    Raises:
        RuntimeError: If they differ.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode():
        logits, times = (3 * torch.randn(2, 64, dtype=torch.float32)).unbind()
        times.abs_()
        found = jitted["_draw"](logits.numpy(), times.numpy(), 0.8, 8, 0.9)
        expected = race(probabilities(logits[None], 0.8, 8, 0.9), times[None])
        if jitted["_best"](logits.numpy()) != logits.argmax() or found not in (expected, -1):
            raise RuntimeError("its draw differs from torch's")


def _jit(loops: Mapping[str, Callable], folder: Path | None = None) -> dict[str, Any]:
    """Hand functions to numba, which compiles them when they are first called.

    What is kept in a folder is found again by the place of `_decode` in its file, and not by the
    functions that it calls: only the ones of this file may be kept.
    """
    numba = _numba()
    # Compiled functions call compiled ones, so each is defined again, in a namespace of their own.
    # The ones above stay plain Python, to be stepped through, and nothing imports numba before.
    names = dict(globals())
    settings = {"CACHE_DIR": str(folder or ""), "CACHE_LOCATOR_CLASSES": ""}
    before = {name: getattr(numba.config, name, "") for name in settings}
    try:
        for name, value in settings.items():  # read by njit
            setattr(numba.config, name, value)
        # Sums may be taken in any order, or nothing would vectorise; NaN stays NaN.
        jit = numba.njit(
            cache=folder is not None,
            error_model="numpy",
            fastmath={"reassoc", "contract", "nsz", "arcp"},
        )
        for name, part in loops.items():
            names[name] = jit(FunctionType(part.__code__, names, name))
    finally:
        for name, value in before.items():
            setattr(numba.config, name, value)
    return {name: names[name] for name in loops}
