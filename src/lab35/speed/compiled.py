"""The compiled rung: the whole step as one function, through C++."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab35.model import GPT, GPTConfig
from lab35.speed.engine import Engine, Step, check_step, padded
from lab35.speed.storage import ONE_AT_A_TIME, Unavailable, cause, code_of, kept, name_of
from lab35.terminal import error_console

INDUCTOR = {
    # Without these two, a LayerNorm is worked out anew in each row of the product that reads it.
    "realize_acc_reads_threshold": 4,
    "realize_opcount_threshold": 8,
    "memory_planning": True,  # one allocation for all that lies between input and output
    "cpp.threads": 1,
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,  # else weights of at most 8 numbers get into the code
    "aot_inductor.precompile_headers": False,  # they would lie in a folder that anyone can make
}
"""How the step is compiled. The names are internal to torch, and belong to a version of it."""

FILE = "step.pt2"


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

    name = "compiled"

    def __init__(self, model: GPT, max_len: int | None = None) -> None:
        super().__init__(model, max_len)  # refuses before anything is compiled
        with ONE_AT_A_TIME:
            self.run = _bound(model)
        self.positions = torch.arange(model.config.block_size, device="cpu")

    def _store(self, kv: Tensor) -> None:
        # The compiled shape is the whole block, whatever max_len allows to be used.
        self.kv = padded(kv[:, :, 0], self.config.block_size)  # (L, 2, H, T, D)

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
    if addresses != bound_to:
        loaded = loaded or _had(model.config)
        _LOADED[model] = loaded, addresses, _point(loaded, model)
    return loaded.run


def _had(config: GPTConfig) -> Any:
    """Load the compiled step of these sizes, which is made where there is none yet."""
    waiting = error_console().status("compiling the decode step, once; this takes half a minute")
    try:
        return kept(_name(config), partial(_compile, config), partial(_load, config), waiting)
    except Exception as error:  # a compiler fails in more ways than can be listed
        raise Unavailable(cause(error)) from error


def _load(config: GPTConfig, folder: Path) -> Any:
    """Load a compiled step, and hold it against a model."""
    # What `aoti_load_package` does too, after it has compiled probes to warn of another processor.
    loader = torch._C._aoti.AOTIModelPackageLoader
    loaded = loader(str(folder / FILE), "model", False, 1, -1)  # one thread at a time, on the CPU

    def step(token: int, at: int, kv: Tensor) -> tuple[Tensor, Tensor]:
        now = (torch.tensor([[token]], device="cpu"), torch.tensor([at], device="cpu"))
        logits, made = loaded.run([*now, kv])
        return logits, made.view_as(kv.narrow(3, at, 1))

    def pointed(model: GPT) -> Step:
        alive.append(_point(loaded, model))
        return step

    alive: list[dict[str, Tensor]] = []
    check_step(config, pointed)
    return loaded


def _point(loaded: Any, model: GPT) -> dict[str, Tensor]:
    """Point a compiled step at a model's weights, and return them: they must live as long."""
    step = _Step(model)
    # Weights that two modules share have a name in each.
    weights = dict(step.named_parameters(remove_duplicate=False)) | dict(step.named_buffers())
    names = set(loaded.get_constant_fqns())
    if names != weights.keys():
        raise Unavailable(f"the compiled step holds {sorted(names ^ weights.keys())} itself")
    constants = {name: weights[name].detach() for name in names}
    borrowed = {name: _borrowed(weight) for name, weight in constants.items()}
    loaded.load_constants(borrowed, False, True, True)  # in use, all of them, without a copy
    return constants


def _borrowed(weight: Tensor) -> Tensor:
    """View a weight without keeping it alive: torch never lets go of a constant it was handed."""
    memory = (ctypes.c_char * weight.nbytes).from_address(weight.data_ptr())
    return torch.frombuffer(memory, dtype=weight.dtype).view(weight.shape)


def _compile(config: GPTConfig, folder: Path) -> None:
    """Compile the step of these sizes into a file."""
    from torch._inductor.utils import clear_caches

    sizes = (config.n_layer, 2, config.n_head, config.block_size, config.head_dim)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),  # whatever the caller's default is
        warnings.catch_warnings(action="ignore"),  # torch's, about its own parts
    ):
        step = _Step(GPT(config)).to("cpu", torch.float32).eval()
        example = (
            torch.zeros(1, 1, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(sizes, dtype=torch.float32),
        )
        clear_caches()  # what torch remembers of other folders, and then of this one
        try:
            torch._inductor.aoti_compile_and_package(
                torch.export.export(step, example),
                package_path=str(folder / FILE),
                inductor_configs=dict(INDUCTOR),  # it is written to
            )
        finally:
            clear_caches()


def _name(config: GPTConfig) -> str | None:
    """Name everything that the compiled file depends on; the weights are not among it."""
    return name_of(
        "decode",
        torch.__version__,
        "float32",
        asdict(replace(config, dropout=0.0)),  # no dropout in a decode step
        INDUCTOR,
        _settings(),
        code_of(_Step.__init__, _Step.forward, _matvec),
    )


def _settings() -> list[object]:
    """List what the caller has set for the compiler, the compiler itself among it."""
    told = [
        (name, value)
        for name, value in sorted(os.environ.items())
        if name in ("CXX", "ATEN_CPU_CAPABILITY") or name.startswith("TORCHINDUCTOR_")
        if name != "TORCHINDUCTOR_CACHE_DIR"
    ]
    # Importing it takes a second; before that, nobody has changed a setting.
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None:
        for name, value in inductor.save_config_portable().items():
            if value != inductor._config[name].default:
                told.append((name, value))
    return told
