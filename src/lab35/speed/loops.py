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
from torch import Tensor, nn

from lab35.model import GPT, GPTConfig
from lab35.speed.engine import EPS, Engine, Step, check_step, padded, pair, parts_of
from lab35.speed.storage import ONE_AT_A_TIME, Unavailable, cause, code_of, kept, name_of
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
        self.weights = _weights(model)
        with ONE_AT_A_TIME:
            self.run = _had(model.config)

    def _store(self, k: Tensor, v: Tensor) -> None:
        # (L, 2, H, max_len, D)
        self.kv = padded(torch.cat((k, v), dim=1), self.max_len).numpy()

    def _step(self, token: Tensor, at: int) -> Tensor:
        return torch.from_numpy(self.run(token.item(), at, *self.weights, self.kv))


def _weights(model: GPT) -> tuple:
    """Lay out all weights as `_decode` takes them, on the same memory."""
    blocks = tuple(_arrays(*parts_of(block)) for block in model.blocks)
    wte, wpe = (table.weight.detach().numpy() for table in (model.wte, model.wpe))
    return wte, wpe, blocks, _arrays(model.ln_f)


def _arrays(*parts: nn.Module) -> tuple[np.ndarray, ...]:
    """Return weights and biases in turn as arrays, on the same memory."""
    return tuple(tensor.numpy() for part in parts for tensor in pair(part))


LOOPS = {part.__name__: part for part in (_exp, _norm, _add_matvec, _gelu, _attend, _decode)}


@cache
def _had(config: GPTConfig) -> Callable[..., np.ndarray]:
    """Compile `_decode`, or take what an earlier process compiled."""
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


def _load(config: GPTConfig, folder: Path) -> Callable[..., np.ndarray]:
    """Let numba compile into a folder, or load from it, and hold the loops against a model."""
    known = Path(_decode.__code__.co_filename).exists()  # else numba keeps nothing
    jitted = _jit(LOOPS, folder if known else None)

    def pointed(model: GPT) -> Step:
        weights = _weights(model)

        def step(token: int, at: int, kv: Tensor) -> tuple[Tensor, Tensor]:
            logits = jitted["_decode"](token, at, *weights, kv.numpy())
            return torch.from_numpy(logits), kv.narrow(3, at, 1)

        return step

    check_step(config, pointed)
    for part in jitted.values():
        part._cache.disable()  # the folder does not stay
    return jitted["_decode"]


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
