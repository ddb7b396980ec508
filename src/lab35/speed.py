"""Speed: a ladder of decode steps for one text, from the textbook down to what memory allows.

A rung runs one token through the model, against everything stored before it. All rungs compute the
same logits, up to float rounding; each removes one thing that the rung above it pays for.

```{.python title="The same text, by two engines"}
import torch

from lab35 import generate, load_pretrained

model, tokenizer = load_pretrained()
prompt = torch.tensor([tokenizer.encode("Sherlock Holmes")])
eager = generate(model, prompt, 20, temperature=0, engine="eager")
lean = generate(model, prompt, 20, temperature=0, engine="lean")
assert torch.equal(eager.tokens, lean.tokens)
```
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import json
import os
import platform
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lab35.cache import KVCache
from lab35.model import GPT, Attention, Block, GPTConfig

__all__ = [
    "Compiled",
    "Engine",
    "EngineName",
    "Jitted",
    "Lean",
    "OneWrite",
    "Recorded",
    "Textbook",
    "cache_folder",
    "choose_engine",
    "new_engine",
    "why_not",
]

EngineName = Literal["eager", "lean", "compiled", "numba"]
"""What `generate` can run its decode steps with; `"eager"` is the model itself."""

EPS = 1e-5  # of every LayerNorm


class Engine:
    """A decoder of one text that keeps its own cache; the base of every rung.

    The prompt runs through the model itself. A rung says how its keys and values are laid out, and
    how one token is run against them. It reads the model's own weights: the next step sees a change
    in place, and the next text a weight that was replaced. Everything runs under
    `torch.inference_mode()`.

    Args:
        model: The model to run, in eval mode, in float32 and on the CPU.
        max_len: Positions to make room for. Defaults to the model's block size.

    Attributes:
        length: Positions stored so far; the next token's position.

    Raises:
        ValueError: If `max_len` lies outside [1, block_size].
    """

    def __init__(self, model: GPT, max_len: int | None = None) -> None:
        self.model = model
        self.config = model.config
        self.max_len = self.config.block_size if max_len is None else max_len
        self.length = 0
        if not 1 <= self.max_len <= self.config.block_size:
            raise ValueError(f"max_len must lie in [1, {self.config.block_size}], got {max_len}")

    def __call__(self, idx: Tensor) -> Tensor:
        """Run the tokens that were not seen yet: the prompt at first, then one at a time."""
        return self.step(idx) if self.length else self.prefill(idx)

    def prefill(self, idx: Tensor) -> Tensor:
        """Run a prompt, and forget everything before it.

        Args:
            idx: Int64, shape (1, P).

        Returns:
            The logits after its last token, shape (1, V).

        Raises:
            ValueError: If the prompt is empty, or does not fit into `max_len`.
            RuntimeError: Outside `torch.inference_mode()`.
        """
        stored = KVCache.for_model(self.model, 1, max(1, min(idx.shape[-1], self.max_len)))
        logits, _ = self.model(idx, cache=stored)
        self._store(stored.k, stored.v)
        self.length = stored.length
        return logits[:, -1]

    def step(self, token: Tensor) -> Tensor:
        """Run one token against everything stored; the first one is a prompt of its own.

        Args:
            token: Int64, shape (1, 1).

        Returns:
            The logits after it, shape (1, V).

        Raises:
            ValueError: If `token` is not one token of the vocabulary, or no position is left. The
                engine is left as it was.
            RuntimeError: Outside `torch.inference_mode()`.
        """
        if token.shape != (1, 1) or not 0 <= token.item() < self.config.vocab_size:
            raise ValueError(
                f"token must have shape (1, 1) and lie in [0, {self.config.vocab_size}), "
                f"got {token.tolist()} with shape {tuple(token.shape)}"
            )
        if self.length >= self.max_len:
            raise ValueError(f"a token must fit into max_len={self.max_len}, got one more")
        if not torch.is_inference_mode_enabled():
            raise RuntimeError("a decode step must run under torch.inference_mode()")
        if not self.length:
            return self.prefill(token)
        logits = self._step(token, self.length)
        self.length += 1  # last: nothing can fail after it
        return logits.view(1, -1)

    def reset(self) -> None:
        """Forget everything; the next tokens are a prompt."""
        self.length = 0

    def _store(self, k: Tensor, v: Tensor) -> None:
        """Make room, and take over the prompt's keys and values, each (L, 1, H, P, D)."""
        raise NotImplementedError  # each rung has its own

    def _step(self, token: Tensor, at: int) -> Tensor:
        """Run one token (1, 1) at position `at`; returns V logits in any shape."""
        raise NotImplementedError  # each rung has its own


def _padded(stored: Tensor, length: int) -> Tensor:
    """Copy keys or values (…, P, D) into room for more positions, (…, length, D)."""
    return F.pad(stored, (0, 0, 0, length - stored.shape[-2]))


class Textbook(Engine):
    """The decode step of most tutorials: modules, a mask, two writes. The rung to compare with.

    Args:
        model: The model to run, in float32 on the CPU.
        max_len: Positions to make room for. Defaults to the model's block size.
    """

    def _store(self, k: Tensor, v: Tensor) -> None:
        # each (L, 1, H, max_len, D)
        self.k, self.v = _padded(k, self.max_len), _padded(v, self.max_len)

    def _step(self, token: Tensor, at: int) -> Tensor:
        model, n = self.model, at + 1
        C, H, D = self.config.n_embd, self.config.n_head, self.config.head_dim
        mask = torch.ones(1, n, dtype=torch.bool)  # causal, for a single query: all of it
        x = model.wte(token) + model.wpe(torch.tensor([[at]]))  # (1, 1, H·D)
        for block, keys, values in zip(model.blocks, self.k, self.v, strict=True):
            parts = block.attn.qkv(block.ln_1(x)).split(C, dim=-1)
            q, k, v = (part.view(1, 1, H, D).transpose(1, 2) for part in parts)  # (1, H, 1, D)
            keys[:, :, at:n] = k
            values[:, :, at:n] = v
            y = F.scaled_dot_product_attention(q, keys[:, :, :n], values[:, :, :n], attn_mask=mask)
            x = x + block.attn.proj(y.transpose(1, 2).reshape(1, 1, C))
            x = x + block.proj(F.gelu(block.fc(block.ln_2(x)), approximate="tanh"))
        return F.linear(model.ln_f(x), model.wte.weight)


class OneWrite(Engine):
    """No mask, and keys and values written as one: the same modules with less around them.

    Args:
        model: The model to run, in float32 on the CPU.
        max_len: Positions to make room for. Defaults to the model's block size.
    """

    def _store(self, k: Tensor, v: Tensor) -> None:
        # (L, 2, 1, H, max_len, D)
        self.kv = _padded(torch.stack((k, v), dim=1), self.max_len)

    def _step(self, token: Tensor, at: int) -> Tensor:
        model, n = self.model, at + 1
        heads = (3, 1, self.config.n_head, 1, self.config.head_dim)
        x = model.wte(token) + model.wpe.weight[at]  # (1, 1, H·D)
        for block, kv in zip(model.blocks, self.kv.unbind(), strict=True):
            qkv = block.attn.qkv(block.ln_1(x)).view(heads)  # with one token, no transpose
            kv[:, :, :, at:n] = qkv[1:]
            y = F.scaled_dot_product_attention(qkv[0], *kv[:, :, :, :n])
            x = x + block.attn.proj(y.view(1, 1, -1))
            x = x + block.proj(F.gelu(block.fc(block.ln_2(x)), approximate="tanh"))
        return F.linear(model.ln_f(x), model.wte.weight)


class Lean(Engine):
    """No modules, one-dimensional vectors, and the projection writes into the cache itself.

    A row of the cache holds query, key and value of one position, as the projection makes them:
    nothing is copied. The query is not read again; it costs half as much memory once more.

    Args:
        model: The model to run, in float32 on the CPU.
        max_len: Positions to make room for. Defaults to the model's block size.
    """

    def __init__(self, model: GPT, max_len: int | None = None) -> None:
        super().__init__(model, max_len)
        self.blocks = [[_pair(part) for part in _parts(block)] for block in model.blocks]
        self.ln_f = _pair(model.ln_f)
        self.wte, self.wpe = model.wte.weight.detach(), model.wpe.weight.detach()

    def _store(self, k: Tensor, v: Tensor) -> None:
        L, _, H, P, D = k.shape
        self.rows = k.new_empty(L, self.max_len, 3 * H * D)
        heads = self.rows.view(L, self.max_len, 3, 1, H, D)
        self.q, *self.kv = heads.permute(2, 0, 3, 4, 1, 5)  # views, each (L, 1, H, max_len, D)
        for past, stored in zip(self.kv, (k, v), strict=True):
            past[..., :P, :] = stored

    def _step(self, token: Tensor, at: int) -> Tensor:
        width = (self.config.n_embd,)
        rows = self.rows.select(1, at).unbind()  # one layer's q, k and v, (3·H·D,)
        queries = self.q.narrow(3, at, 1).unbind()  # the same numbers as heads, (1, H, 1, D)
        keys, values = (past.narrow(3, 0, at + 1).unbind() for past in self.kv)
        x = self.wte[token.item()] + self.wpe[at]  # (H·D,)
        for block, row, q, k, v in zip(self.blocks, rows, queries, keys, values, strict=True):
            ln_1, (w_qkv, b_qkv), (w_proj, b_proj), ln_2, (w_fc, b_fc), (w_out, b_out) = block
            torch.addmv(b_qkv, w_qkv, torch.layer_norm(x, width, *ln_1), out=row)
            y = F.scaled_dot_product_attention(q, k, v).view(width)
            x.add_(b_proj).addmv_(w_proj, y)
            h = torch.addmv(b_fc, w_fc, torch.layer_norm(x, width, *ln_2))
            x.add_(b_out).addmv_(w_out, F.gelu(h, approximate="tanh"))
        return torch.mv(self.wte, torch.layer_norm(x, width, *self.ln_f))


def _parts(block: Block) -> tuple[nn.Module, ...]:
    """List a block's parts in the order of their use."""
    return block.ln_1, block.attn.qkv, block.attn.proj, block.ln_2, block.fc, block.proj


def _pair(part: nn.Linear | nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return a part's weight and bias as plain tensors, on the same memory."""
    return part.weight.detach(), part.bias.detach()


_ONE_AT_A_TIME = threading.Lock()
"""Held while something is compiled: neither torch nor numba's settings stand two threads there."""


# --- the compiled rung ---------------------------------------------------------------------------

INDUCTOR = {
    # Without these two, a LayerNorm is worked out anew in each row of the product that reads it.
    "realize_acc_reads_threshold": 4,
    "realize_opcount_threshold": 8,
    "memory_planning": True,  # one allocation for all that lies between input and output
    "cpp.threads": 1,
    "aot_inductor.package_constants_in_so": False,
}
"""How the step is compiled. The names are internal to torch, and belong to a version of it."""


class _Step(nn.Module):
    """The decode step as one pure function, for the compiler: static shapes, no write.

    Attention runs over the whole block, and what is not stored yet weighs nothing. The token's own
    key and value take part beside the cache, and are returned for the caller to store.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model
        columns = torch.arange(model.config.block_size, device=model.wte.weight.device)
        self.register_buffer("columns", columns)

    def forward(self, token: Tensor, at: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Take token (1, 1), position (1,) and cache (L, 2, H, T, D); see `Compiled`."""
        model, (C, D) = self.model, (self.model.config.n_embd, self.model.config.head_dim)
        past = self.columns < at  # (T,)
        x = (model.wte.weight[token] + model.wpe.weight[at]).view(C)
        made = []
        for block, (keys, values) in zip(model.blocks, kv, strict=True):  # each (H, T, D)
            q, k, v = _matvec(block.attn.qkv, block.ln_1(x)).view(3, -1, 1, D)  # (H, 1, D)
            made.append(torch.stack((k, v)))
            q = q * D**-0.5
            own = (k * q).sum(-1)  # (H, 1)
            scores = torch.where(past, (keys * q).sum(-1), float("-inf"))  # (H, T)
            # A softmax over both, in its parts: to join them first would copy all values.
            top = torch.maximum(scores.amax(-1, keepdim=True), own)
            weights, weight = (scores - top).exp(), (own - top).exp()
            y = (weights[..., None] * values).sum(1) + weight * v[:, 0]  # (H, D)
            y = y / (weights.sum(-1, keepdim=True) + weight)
            x = x + _matvec(block.attn.proj, y.view(C))
            h = F.gelu(_matvec(block.fc, block.ln_2(x)), approximate="tanh")
            x = x + _matvec(block.proj, h)
        logits = (model.wte.weight * model.ln_f(x)).sum(-1)  # (V,)
        return logits, torch.stack(made)  # (L, 2, H, 1, D)


def _matvec(linear: nn.Linear, x: Tensor) -> Tensor:
    """Multiply a matrix and a vector in a spelling that the compiler fuses and vectorises."""
    return (linear.weight * x).sum(-1) + linear.bias


class Compiled(Engine):
    """The whole step as one compiled function: no dispatch between operations.

    `torch.export` traces it, AOTInductor writes C++ and has it compiled, once, into a file in the
    user's cache folder. The file holds no weights: it reads the model's own, and serves every
    checkpoint of these sizes.

    Args:
        model: The model to run, in float32 on the CPU.
        max_len: Positions to make room for. Defaults to the model's block size.

    Raises:
        RuntimeError: If the step cannot be compiled here.
    """

    def __init__(self, model: GPT, max_len: int | None = None) -> None:
        with _ONE_AT_A_TIME:
            self.run = _bound(model)
        self.positions = torch.arange(model.config.block_size, device="cpu")
        super().__init__(model, max_len)

    def _store(self, k: Tensor, v: Tensor) -> None:
        # The compiled shape is the whole block, whatever max_len allows to be used.
        self.kv = _padded(torch.cat((k, v), dim=1), self.config.block_size)  # (L, 2, H, T, D)

    def _step(self, token: Tensor, at: int) -> Tensor:
        logits, made = self.run([token, self.positions.narrow(0, at, 1), self.kv])
        self.kv.narrow(3, at, 1).copy_(made)
        return logits


_LOADED: WeakKeyDictionary[GPT, tuple[Any, list[int], dict[str, Tensor]]] = WeakKeyDictionary()
"""The compiled step of each model that is alive: loading a file takes as long as a short text.

Beside it stand the addresses of the weights that it points at, and these weights, so that they live
as long."""


def _bound(model: GPT) -> Any:
    """Load the compiled step, and point it at the weights that the model has now."""
    loaded, bound_to, _ = _LOADED.get(model, (None, None, {}))
    addresses = [weight.data_ptr() for weight in model.parameters()]
    if addresses == bound_to:
        return loaded.loader.run
    if loaded is None:
        path, reason = _compile(model.config)
        if path is not None and not path.exists():  # deleted since
            _compile.cache_clear()
            path, reason = _compile(model.config)
        if path is None:
            raise RuntimeError(reason)
        try:
            loaded = torch._inductor.aoti_load_package(str(path))
        except Exception as error:  # whatever a damaged file does to the loader
            raise RuntimeError(f"{path} cannot be loaded, delete it: {error}") from None
    step = _Step(model)
    # Weights that two modules share have a name in each.
    weights = dict(step.named_parameters(remove_duplicate=False)) | dict(step.named_buffers())
    constants = {name: weights[name].detach() for name in loaded.get_constant_fqns()}
    borrowed = {name: _borrowed(weight) for name, weight in constants.items()}
    loaded.load_constants(borrowed, check_full_update=True, user_managed=True)
    _LOADED[model] = loaded, addresses, constants
    return loaded.loader.run


def _borrowed(weight: Tensor) -> Tensor:
    """View a weight without keeping it alive: torch never lets go of a constant it was handed."""
    memory = (ctypes.c_char * weight.nbytes).from_address(weight.data_ptr())
    return torch.frombuffer(memory, dtype=weight.dtype).view(weight.shape)


@cache
def _compile(config: GPTConfig) -> tuple[Path | None, str]:
    """Find the compiled step of these sizes, or make it; None and the reason where that fails."""
    path = cache_folder() / f"decode-{_key(config)}.pt2"
    if path.exists():
        return path, ""
    console = Console(stderr=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            console.status("compiling the decode step, once; this takes half a minute"),
            tempfile.TemporaryDirectory(dir=path.parent) as folder,
            torch.inference_mode(False),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),  # whatever the caller's default is
            warnings.catch_warnings(action="ignore"),  # torch's, about its own parts
        ):
            sizes = (config.n_layer, 2, config.n_head, config.block_size, config.head_dim)
            step = _Step(GPT(config)).to("cpu", torch.float32).eval()
            example = (
                torch.zeros(1, 1, dtype=torch.int64),
                torch.zeros(1, dtype=torch.int64),
                torch.zeros(sizes, dtype=torch.float32),
            )
            made = torch._inductor.aoti_compile_and_package(
                torch.export.export(step, example),
                package_path=str(Path(folder) / path.name),
                inductor_configs=dict(INDUCTOR),  # it is written to
            )
            Path(made).replace(path)  # whole or not at all
    except Exception as error:  # a compiler fails in more ways than can be listed
        first = str(error).strip().partition("\n")[0]
        return None, f"{type(error).__name__}: {first}"
    return path, ""


def _key(config: GPTConfig) -> str:
    """Name everything that the compiled file depends on; the weights are not among it."""
    told = [
        torch.__version__,
        platform.platform(),
        _processor(),
        asdict(replace(config, dropout=0.0)),  # no dropout in a decode step
        INDUCTOR,
        inspect.getsource(_Step),
        inspect.getsource(_matvec),
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:20]


def _processor() -> str:
    """Tell apart processors whose instructions differ: the compiler uses all that it finds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return "\n".join(
            sorted({line for line in lines if line.startswith(("model name", "flags"))})
        )
    except OSError:
        return platform.processor()


# --- the recorded rung, for a GPU ----------------------------------------------------------------


class Recorded(Engine):
    """The step as a CUDA graph: recorded once for a text, and replayed as a single launch.

    A graph repeats the same kernels on the same addresses. So the token and its position are
    written into fixed places, and attention runs over the whole block, behind a mask. This is the
    idea of PyTorch's `torch.cuda.CUDAGraph`, and what a static cache is for.

    Args:
        model: The model to run, in eval mode, on a CUDA device.
        max_len: Positions to make room for. Defaults to the model's block size.
    """

    def __init__(self, model: GPT, max_len: int | None = None) -> None:
        super().__init__(model, max_len)
        config, like = model.config, model.wte.weight
        sizes = (2, 1, config.n_head, self.max_len, config.head_dim)
        self.kv = [like.new_zeros(sizes) for _ in model.blocks]
        self.columns = torch.arange(self.max_len, device=like.device)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
        self.at = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.logits = like.new_zeros(1, 1, config.vocab_size)
        self.replay = _record(self._run, like.device)

    def _store(self, k: Tensor, v: Tensor) -> None:
        for kv, *new in zip(self.kv, k, v, strict=True):
            kv[..., : k.shape[3], :] = torch.stack(new)

    def _step(self, token: Tensor, at: int) -> Tensor:
        self.token.copy_(token)
        self.at.fill_(at)
        self.replay()
        return self.logits.clone()  # the next step writes here again

    def _run(self) -> None:
        """Run the token that lies in its place, and leave the logits in theirs."""
        model = self.model
        heads = (3, 1, self.config.n_head, 1, self.config.head_dim)
        visible = (self.columns <= self.at)[None]  # (1, max_len)
        x = model.wte(self.token) + model.wpe(self.at)  # (1, 1, H·D)
        for block, kv in zip(model.blocks, self.kv, strict=True):
            qkv = block.attn.qkv(block.ln_1(x)).view(heads)
            kv.index_copy_(3, self.at, qkv[1:])
            y = F.scaled_dot_product_attention(qkv[0], *kv, attn_mask=visible)
            x = x + block.attn.proj(y.view(1, 1, -1))
            x = x + block.proj(F.gelu(block.fc(block.ln_2(x)), approximate="tanh"))
        self.logits.copy_(F.linear(model.ln_f(x), model.wte.weight))


def _record(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Record what a function launches, and return what repeats it."""
    with torch.cuda.device(device):
        # A first run, on a stream of its own, loads what cannot be loaded in a recording.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return graph.replay


# --- the plain rung ------------------------------------------------------------------------------


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

    def __init__(self, model: GPT, max_len: int | None = None) -> None:
        super().__init__(model, max_len)
        blocks = tuple(_arrays(*_parts(block)) for block in model.blocks)
        wte, wpe = (table.weight.detach().numpy() for table in (model.wte, model.wpe))
        self.weights = (wte, wpe, blocks, _arrays(model.ln_f))
        with _ONE_AT_A_TIME:
            self.run = _jitted()
        if not self.run.signatures:  # the first step of a process compiles, or reads what was kept
            self._warm_up()

    def _warm_up(self) -> None:
        config, console = self.config, Console(stderr=True)
        sizes = (config.n_layer, 2, config.n_head, 1, config.head_dim)
        with console.status("getting the loops ready; the first time takes some seconds"):
            self.run(0, 0, *self.weights, np.zeros(sizes, f32))

    def _store(self, k: Tensor, v: Tensor) -> None:
        # (L, 2, H, max_len, D)
        self.kv = _padded(torch.cat((k, v), dim=1), self.max_len).numpy()

    def _step(self, token: Tensor, at: int) -> Tensor:
        return torch.from_numpy(self.run(token.item(), at, *self.weights, self.kv))


def _arrays(*parts: nn.Module) -> tuple[np.ndarray, ...]:
    """Return weights and biases in turn as arrays, on the same memory."""
    return tuple(tensor.numpy() for part in parts for tensor in _pair(part))


LOOPS = {part.__name__: part for part in (_exp, _norm, _add_matvec, _gelu, _attend, _decode)}


@cache
def _jitted() -> Callable[..., np.ndarray]:
    """Compile `_decode`, or take what an earlier process compiled."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        return _jit(LOOPS, keep=True)
    except (OSError, RuntimeError):  # there is no place to keep it
        return _jit(LOOPS, keep=False)


def _jit(loops: Mapping[str, Callable], *, keep: bool) -> Callable[..., np.ndarray]:
    """Hand functions to numba, which compiles them when they are first called.

    What is kept is found again by the place of `_decode` in its file, and not by the functions that
    it calls: only the ones of this file may be kept.
    """
    try:
        import numba
    except ImportError as error:
        raise RuntimeError(f"{error}; pip install numba") from None
    # Compiled functions call compiled ones, so each is defined again, in a namespace of their own.
    # The ones above stay plain Python, to be stepped through, and nothing imports numba before.
    names = dict(globals())
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = before or str(cache_folder())  # read by njit
        # Sums may be taken in any order, or nothing would vectorise; NaN stays NaN.
        jit = numba.njit(
            cache=keep, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"}
        )
        for name, part in loops.items():
            names[name] = jit(FunctionType(part.__code__, names, name))
    finally:
        numba.config.CACHE_DIR = before
    return names["_decode"]


def cache_folder() -> Path:
    """Say where compiled steps are kept: `$XDG_CACHE_HOME/lab35`, or `~/.cache/lab35`.

    Returns:
        The folder, which need not exist. Deleting it costs one compilation.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # By the XDG specification a relative path is to be ignored.
    return (root if root.is_absolute() else Path.home() / ".cache") / "lab35"


# --- which one runs ------------------------------------------------------------------------------


def choose_engine(
    engine: EngineName | None,
    model: object,
    batch_size: int,
    *,
    key_mask: Tensor | None = None,
    use_cache: bool = True,
) -> EngineName:
    """Say which engine decodes, and refuse one that cannot.

    Engines other than `"eager"` run one text without padding, in float32, and never call the
    model's modules in a step. So they are out where someone could tell: hooks would not fire, and a
    replaced part would not run. By default such a call is left to `"eager"`, as is everything that
    does not run on the CPU, and the rest to `"lean"`.

    Args:
        engine: What the caller asked for; None leaves the choice.
        model: What is to be run.
        batch_size: Rows, B.
        key_mask: Bool, shape (B, P), or None.
        use_cache: Whether keys and values are kept.

    Returns:
        The name of an engine that can run this.

    Raises:
        ValueError: If the name is unknown, or that engine cannot run this.
    """
    if engine is not None:
        _check_name(engine)
    if engine == "eager":
        return engine
    devices = ("cpu", "cuda") if engine in ("lean", "compiled") else ("cpu",)
    obstacle = _obstacle(model, batch_size, key_mask, use_cache, devices)
    if engine is None:
        return "lean" if obstacle is None else "eager"
    if obstacle is not None:
        raise ValueError(f"engine must be 'eager' for {obstacle}, got {engine!r}")
    return engine


def new_engine(name: EngineName, model: GPT, max_len: int | None = None) -> Engine:
    """Make an engine; where a compiled one cannot be had, the lean one, with one warning.

    On a GPU, `"compiled"` is a CUDA graph.

    Args:
        name: `"lean"`, `"compiled"` or `"numba"`.
        model: The model to run.
        max_len: Positions to make room for, as `Engine` checks. Defaults to the block size.

    Returns:
        The engine, empty.
    """
    try:
        return _make(name, model, max_len)
    except RuntimeError as error:
        _warn_once(name, str(error))
        return Lean(model, max_len)


def why_not(name: EngineName, model: GPT) -> str | None:
    """Say why an engine cannot run one text of a model on this machine.

    It tries, so that the first call for the compiled engine takes as long as a compilation.

    Args:
        name: The engine.
        model: The model to run.

    Returns:
        The reason in words, or None where nothing is in the way.

    Raises:
        ValueError: If the name is unknown.
    """
    _check_name(name)
    try:
        if choose_engine(name, model, 1) != "eager":
            _make(name, model)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def _check_name(engine: str) -> None:
    if engine not in get_args(EngineName):
        known = ", ".join(map(repr, get_args(EngineName)))
        raise ValueError(f"engine must be one of {known}, got {engine!r}")


def _make(name: EngineName, model: GPT, max_len: int | None = None) -> Engine:
    """Make the rung that stands behind a name on the model's device."""
    rungs = {"lean": Lean, "compiled": Compiled, "numba": Jitted}
    if model.wte.weight.is_cuda:
        rungs["compiled"] = Recorded
    return rungs[name](model, max_len)


@cache
def _warn_once(name: EngineName, reason: str) -> None:
    warnings.warn(
        f"engine={name!r} is not to be had here, and 'lean' runs instead ({reason})",
        RuntimeWarning,
        stacklevel=3,
    )


PARTS = (GPT, Block, Attention, nn.ModuleList, nn.Linear, nn.LayerNorm, nn.Embedding)


def _obstacle(
    model: object,
    batch_size: int,
    key_mask: Tensor | None,
    use_cache: bool,
    devices: tuple[str, ...],
) -> str | None:
    """Name what only the model itself can do, or None."""
    if not use_cache:
        return "use_cache=False"
    if batch_size != 1:
        return f"a batch of {batch_size} rows"
    if key_mask is not None:
        return "padding, which a key_mask tells"
    if not isinstance(model, GPT):
        return f"a {type(model).__name__}"
    if any(torch.is_autocast_enabled(device) for device in devices):
        return "autocast"
    if _has_any_global_hook():
        return "hooks on all modules"
    shapes = []
    for module in model.modules():
        if type(module) not in PARTS or vars(module).keys() & vars(type(module)).keys():
            return f"a model with a part of its own ({type(module).__name__})"
        if module._forward_hooks or module._forward_pre_hooks:
            return "a model with hooks"
        if type(module) is nn.LayerNorm and module.eps != EPS:
            return f"a LayerNorm with eps={module.eps}"
        if type(module) is nn.Embedding and module.max_norm is not None:
            return f"an Embedding with max_norm={module.max_norm}"
        for weight in module._parameters.values():
            if weight is None:
                return f"a {type(module).__name__} without all of its weights"
            if weight.dtype != torch.float32 or weight.device.type not in devices:
                return f"weights in {weight.dtype} on {weight.device.type}"
            if not weight.is_contiguous():
                return "weights that are not contiguous"
            shapes.append(weight.shape)
    return None if shapes == _shapes(model.config) else "weights of other shapes than its config's"


@cache
def _shapes(config: GPTConfig) -> list[torch.Size]:
    """List the shapes of all weights, in the order in which modules are walked."""
    with torch.device("meta"):
        walked = GPT(config).modules()
        return [weight.shape for module in walked for weight in module._parameters.values()]
