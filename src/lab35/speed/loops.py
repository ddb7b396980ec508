"""The plain rung: loops over arrays, which numba turns into machine code."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lab35._arguments import check_generator
from lab35.model import GPT, GPTConfig
from lab35.sampling import Sampler, probabilities, race
from lab35.speed.engine import EPS, Engine, Step, check_step
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
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int, p: np.ndarray, y: np.ndarray
) -> None:
    """Attend from q (H·D,) to n of keys and values (H, T, D), from `first` on, into y (H·D,).

    It leaves the last head's weights, not yet divided by their sum, in p (n,).
    """
    H, _, D = keys.shape
    scale = f32(1) / np.sqrt(f32(D))
    for h in range(H):
        top = f32(-np.inf)
        for t in range(p.size):
            score = f32(0)
            for d in range(D):
                score += q[h * D + d] * keys[h, first + t, d]
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
                y[h * D + d] += share * values[h, first + t, d]


def _norm_rows(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, y: np.ndarray) -> None:
    """Write the LayerNorm of each row of x into y, both (B, C)."""
    for b in range(len(x)):
        _norm(x[b], weight, bias, y[b])


def _attend_rows(
    qkv: np.ndarray, kv: np.ndarray, firsts: np.ndarray, at: int, y: np.ndarray
) -> None:
    """Store the keys and values of qkv (B, 3·H·D) at position `at`, and attend, into y (B, H·D).

    kv is (2, B, H, T, D). Each row begins with its own first position: before it stands padding.
    """
    _, B, H, _, D = kv.shape
    C, p = H * D, np.empty(at + 1, f32)
    for b in range(B):
        for h in range(H):
            for d in range(D):
                kv[0, b, h, at, d] = qkv[b, C + h * D + d]
                kv[1, b, h, at, d] = qkv[b, 2 * C + h * D + d]
        _attend(qkv[b, :C], kv[0, b], kv[1, b], firsts[b], p[firsts[b] :], y[b])


def _vector(place: int, size: int) -> np.ndarray:
    """Look at float32 numbers in memory; `_jit` puts numba's own way into the place of this."""
    return np.ctypeslib.as_array((ctypes.c_float * int(size)).from_address(int(place)))


def _matrix(place: int, rows: int, columns: int) -> np.ndarray:
    """Look at float32 numbers in memory, row by row."""
    return _vector(place, rows * columns).reshape(rows, columns)


def _decode(token: int, at: int, places: np.ndarray, kv: np.ndarray, logits: np.ndarray) -> int:
    """Run one token at position `at`; write into kv (L, 2, H, T, D), and the logits, (V,).

    The whole decode step in loops over float32 arrays. It runs as plain Python too, very slowly.
    It returns the best token, and -1 if its logit is no finite number.

    The weights are told by their places in memory, in the order of `Weights`: to hand over fifty
    arrays at each call would take longer than attention.
    """
    (L, _, H, _, D), V = kv.shape, logits.size
    C = H * D
    x, y, qkv = np.empty(C, f32), np.empty(C, f32), np.empty(3 * C, f32)
    hidden, p = np.empty(4 * C, f32), np.empty(at + 1, f32)
    wte, wpe = _matrix(places[0], V, C), _matrix(places[1], at + 1, C)
    for i in range(C):
        x[i] = wte[token, i] + wpe[at, i]
    for layer in range(L):
        # ln_1, qkv, proj, ln_2, fc and out: a weight and a bias each
        block = places[2 + 12 * layer : 14 + 12 * layer]
        _norm(x, _vector(block[0], C), _vector(block[1], C), y)
        qkv[:] = _vector(block[3], 3 * C)
        _add_matvec(_matrix(block[2], 3 * C, C), y, qkv)
        for h in range(H):
            for d in range(D):
                kv[layer, 0, h, at, d] = qkv[C + h * D + d]
                kv[layer, 1, h, at, d] = qkv[2 * C + h * D + d]
        _attend(qkv[:C], kv[layer, 0], kv[layer, 1], 0, p, y)
        x += _vector(block[5], C)
        _add_matvec(_matrix(block[4], C, C), y, x)
        _norm(x, _vector(block[6], C), _vector(block[7], C), y)
        hidden[:] = _vector(block[9], 4 * C)
        _add_matvec(_matrix(block[8], 4 * C, C), y, hidden)
        _gelu(hidden)
        x += _vector(block[11], C)
        _add_matvec(_matrix(block[10], C, 4 * C), hidden, x)
    last = places[2 + 12 * L :]
    _norm(x, _vector(last[0], C), _vector(last[1], C), y)
    logits[:] = 0
    _add_matvec(wte, y, logits)
    return _best(logits)


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
    # 1) the top k logits in order, by insertion; of equal ones the lower id comes first
    ids = np.empty(top_k, np.int64)
    found = 0
    for i in range(logits.size):
        if found < top_k or logits[i] > logits[ids[top_k - 1]]:
            at = min(found, top_k - 1)
            while at > 0 and logits[ids[at - 1]] < logits[i]:
                ids[at] = ids[at - 1]
                at -= 1
            ids[at] = i
            found = min(found + 1, top_k)
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
        self.places = _places(self.weights)
        with ONE_AT_A_TIME:
            loops = compiled_loops(model.config)
        self.decode, self.draw = loops["_decode"], loops["_draw"]
        L, H, D = self.config.n_layer, self.config.n_head, self.config.head_dim
        self.kv = np.empty((L, 2, H, self.max_len, D), f32)
        self.logits = np.empty(model.config.vocab_size, f32)
        self.times = torch.empty(model.config.vocab_size, dtype=torch.float32, device="cpu")

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
        if not self.length or not self._knows(choose):
            return super().next(token, choose)
        logits = self.logits
        chosen = self.decode(self._id(token), self.length, self.places, self.kv, logits)
        self.length += 1
        if chosen < 0:
            return choose(torch.from_numpy(logits)[None])  # and be told why not
        check_generator("generator", choose.generator, self.times.device)
        if choose.temperature > 0:
            self.times.exponential_(generator=choose.generator)
            chosen = self.draw(logits, self.times.numpy(), *_plain(choose))
        if chosen < 0:
            settings = choose.temperature, choose.top_k, choose.top_p
            return race(probabilities(torch.from_numpy(logits)[None], *settings), self.times[None])
        self.chosen[self.length] = chosen
        return self.tokens[self.length]

    def _id(self, token: Tensor) -> int:
        """Look a token up; the one that was chosen here needs no call of torch."""
        at = self.length
        if token is self.tokens[at] and at < self.max_len and torch.is_inference_mode_enabled():
            number = self.chosen[at]
            if 0 <= number < self.config.vocab_size:  # it is the caller's to change
                return number
        self._check_token(token)
        return token.item()

    def _knows(self, choose: Callable[[Tensor], Tensor]) -> bool:
        """Say whether the loops can choose like this; a subclass may do it in another way."""
        if type(choose) is not Sampler:
            return False
        return choose.temperature == 0 or choose.is_narrow(self.config.vocab_size)

    def _store(self, kv: Tensor) -> None:
        self.kv[..., : kv.shape[4], :] = kv[:, :, 0].numpy()
        # A tensor for each token to come, all in one go: to make one takes as long as to draw one.
        tokens = torch.empty(self.max_len + 1, 1, 1, dtype=torch.int64, device="cpu")
        self.tokens, self.chosen = tokens.unbind(), tokens.view(-1).numpy()

    def _step(self, token: Tensor, at: int) -> Tensor:
        self.decode(token.item(), at, self.places, self.kv, self.logits)
        return torch.from_numpy(self.logits.copy())  # the next step writes here again


def _plain(sampler: Sampler) -> tuple[float, int, float]:
    """Return a sampler's settings as `_draw` takes them."""
    limits = torch.finfo(torch.float32)
    divisor = min(max(sampler.temperature, limits.tiny), limits.max)
    return divisor, sampler.top_k, sampler.top_p or 1.0


def _places(weights: Weights) -> np.ndarray:
    """List where all weights lie in memory, in the order in which `_decode` takes them.

    Raises:
        ValueError: If one is not laid out as the loops go through it.
    """
    wte, wpe, blocks, ln_f = weights
    tensors = [wte, wpe, *(each for block in blocks for pair in block for each in pair), *ln_f]
    for each in tensors:
        if each.dtype != torch.float32 or not each.is_cpu or not each.is_contiguous():
            raise ValueError(
                f"weights must be contiguous float32 on the CPU, got {each.dtype} on {each.device}"
            )
    return np.array([each.data_ptr() for each in tensors])


_PARTS = (_exp, _norm, _add_matvec, _gelu, _attend, _matrix, _best, _decode, _draw)
_PARTS_OF_ROWS = (_norm_rows, _attend_rows)
LOOPS = {part.__name__: part for part in _PARTS + _PARTS_OF_ROWS}


@cache
def compiled_loops(config: GPTConfig) -> dict[str, Callable]:
    """Compile the loops, or take what an earlier process compiled."""
    waiting = error_console().status("getting the loops ready, once; this takes some seconds")
    try:
        numba = _numba()
        name = name_of(
            "loops",
            (numba.__version__, sys.version, np.__version__),
            __file__,  # numba finds a function again by its place
            code_of(*LOOPS.values()),
        )
        return kept(name, lambda folder: None, partial(_load, config), waiting)
    except Exception as error:  # a damaged installation fails in more ways than can be listed
        raise Unavailable(cause(error)) from error


def _check_rows(config: GPTConfig, jitted: Mapping[str, Callable]) -> None:
    """Hold the parts of a batch's step once against torch's, with padding before one row.

    Raises:
        RuntimeError: If they differ by more than rounding.
    """
    H, T, D = config.n_head, config.block_size, config.head_dim
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode():
        kv, qkv = torch.randn(2, 2, H, T, D), torch.randn(2, 3 * H * D)
        x, norm, y = torch.randn(2, H * D), torch.randn(2, H * D), torch.empty(2, H * D)
        kv, qkv, x, norm, y = (each.float() for each in (kv, qkv, x, norm, y))
        jitted["_norm_rows"](x.numpy(), *norm.numpy(), y.numpy())
        differences = [y - torch.layer_norm(x, (H * D,), *norm)]
        firsts = torch.tensor([0, T // 2])
        jitted["_attend_rows"](qkv.numpy(), kv.numpy(), firsts.numpy(), T - 1, y.numpy())
        q, *made = qkv.view(2, 3, H, D).unbind(1)
        visible = torch.arange(T) >= firsts[:, None, None, None]
        expected = F.scaled_dot_product_attention(q[:, :, None], *kv, attn_mask=visible)
        differences += [y - expected.view(2, -1), kv[:, :, :, -1] - torch.stack(made)]
        jitted["_gelu"](y.numpy().reshape(-1))
        differences += [y - F.gelu(expected.view(2, -1), approximate="tanh")]
    if not all(each.abs().max() < 1e-3 for each in differences):  # NaN is not
        raise RuntimeError("its rows differ from torch's")


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
        places, logits = _places(Weights.of(model)), np.empty(config.vocab_size, f32)

        def step(token: int, at: int, kv: Tensor) -> tuple[Tensor, Tensor]:
            jitted["_decode"](token, at, places, kv.numpy(), logits)
            return torch.from_numpy(logits), kv.narrow(3, at, 1)

        return step

    check_step(config, pointed)
    _check_draw(jitted)
    _check_rows(config, jitted)
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
        if found not in (expected, -1):
            raise RuntimeError("its draw differs from torch's")


def _jit(loops: Mapping[str, Callable], folder: Path | None = None) -> dict[str, Any]:
    """Hand functions to numba, which compiles them when they are first called.

    What is kept in a folder is found again by the place of `_decode` in its file, and not by the
    functions that it calls: only the ones of this file may be kept.
    """
    numba = _numba()
    # Compiled functions call compiled ones, so each is defined again, in a namespace of their own.
    # The ones above stay plain Python, to be stepped through, and nothing imports numba before.
    names = globals() | {"_vector": _vector_of(numba)}
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


def _vector_of(numba: ModuleType) -> Callable[[int, int], np.ndarray]:
    """Make what `_vector` is in compiled code: an array around an address."""

    @numba.extending.intrinsic
    def pointer(_: object, place: numba.types.Type) -> tuple:
        def written(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = context.get_value_type(signature.return_type)
            return builder.inttoptr(arguments[0], kind)

        return numba.types.voidptr(place), written

    @numba.njit(inline="always")
    def vector(place: int, size: int) -> np.ndarray:
        return numba.carray(pointer(place), size, f32)

    return vector
