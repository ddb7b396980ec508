"""Which engine runs."""

from __future__ import annotations

import warnings
from functools import cache
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lab35._engines import BATCH_ENGINES, EngineName
from lab35.model import GPT, Attention, Block, GPTConfig, weight_shapes
from lab35.speed.compiled import Compiled
from lab35.speed.eager import Eager
from lab35.speed.engine import EPS, Engine
from lab35.speed.loops import Jitted
from lab35.speed.recorded import Recorded
from lab35.speed.rows import JittedRows, LeanRows
from lab35.speed.rungs import Lean
from lab35.speed.storage import Unavailable, cause


def choose_engine(
    engine: EngineName | None,
    model: object,
    batch_size: int,
    *,
    key_mask: Tensor | None = None,
    use_cache: bool = True,
) -> EngineName:
    """Say which engine decodes, and refuse one that cannot.

    Engines other than `"eager"` run in float32, and never call the model's modules. So they are out
    where someone could tell: hooks would not fire, and a replaced part would not run. By default
    such a call is left to `"eager"`, as is everything that does not run on the CPU, and the rest to
    `"lean"`. It and `"numba"` take several rows and padding; `"compiled"` writes one text.

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
    obstacle = _obstacle(model, use_cache, devices)
    if engine is None:
        return "lean" if obstacle is None else "eager"
    if obstacle is not None:
        raise ValueError(f"engine must be 'eager' for {obstacle}, got {engine!r}")
    if engine not in BATCH_ENGINES:
        able = "one of " + ", ".join(map(repr, BATCH_ENGINES))
        if batch_size != 1:
            raise ValueError(
                f"engine must be {able} for a batch of {batch_size} rows, got {engine!r}"
            )
        if key_mask is not None:
            raise ValueError(
                f"engine must be {able} for padding, which a key_mask tells, got {engine!r}"
            )
    return engine


def new_engine(
    name: EngineName,
    model: GPT,
    max_len: int | None = None,
    *,
    batch_size: int = 1,
    padded: bool = False,
) -> Engine:
    """Make an engine; where a compiled one cannot be had, the lean one, with one warning.

    On a GPU, `"compiled"` is a CUDA graph.

    Args:
        name: One that `choose_engine` returned for this.
        model: The model to run.
        max_len: Positions to make room for, as `Engine` checks. Defaults to the block size.
        batch_size: Texts that are written at once, B.
        padded: Whether a prompt will come with a key mask.

    Returns:
        The engine, empty. Its `name` says which one it is.

    Raises:
        ValueError: If `max_len` or `batch_size` is out of range.
    """
    if name == "eager":
        return Eager(model, max_len, batch_size)
    several = batch_size > 1 or padded

    def made(name: EngineName) -> Engine:
        rung = _rung(name, model, several)
        return rung(model, max_len, batch_size) if several else rung(model, max_len)

    if name == "lean":
        return made(name)
    reason = _MISSING.get((name, model.config))
    if reason is None:
        try:
            return made(name)
        except Exception as error:  # an optional engine may fail in any way
            reason = cause(error)
            if isinstance(error, Unavailable):
                _MISSING[name, model.config] = reason
    lean = made("lean")  # refuses a wrong max_len, which is no reason to warn
    _warn_once(name, reason)
    return lean


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
            _rung(name, model)(model)
    except Exception as error:  # an optional engine may fail in any way
        return str(error) if isinstance(error, ValueError) else cause(error)
    return None


def _check_name(engine: str) -> None:
    if engine not in get_args(EngineName):
        known = ", ".join(map(repr, get_args(EngineName)))
        raise ValueError(f"engine must be one of {known}, got {engine!r}")


def _rung(name: EngineName, model: GPT, several: bool = False) -> type[Engine]:
    """Say which rung stands behind a name on the model's device, for one text or several."""
    rungs: dict[str, type[Engine]] = {"lean": Lean, "compiled": Compiled, "numba": Jitted}
    if several:
        rungs = {"lean": LeanRows, "numba": JittedRows}
    if model.wte.weight.is_cuda:
        rungs["compiled"] = Recorded
    return rungs[name]


_MISSING: dict[tuple[EngineName, GPTConfig], str] = {}
"""Why an engine cannot be had here, so that not every text waits for it again."""


@cache
def _warn_once(name: EngineName, reason: str) -> None:
    warnings.warn(
        f"engine={name!r} is not to be had here, and 'lean' runs instead ({reason})",
        RuntimeWarning,
        stacklevel=3,
    )


PARTS = (GPT, Block, Attention, nn.ModuleList, nn.Linear, nn.LayerNorm, nn.Embedding)


def _obstacle(model: object, use_cache: bool, devices: tuple[str, ...]) -> str | None:
    """Name what only the model itself can do, or None."""
    if not use_cache:
        return "use_cache=False"
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
            shapes.append(tuple(weight.shape))
    return None if shapes == _shapes(model.config) else "weights of other shapes than its config's"


@cache
def _shapes(config: GPTConfig) -> list[tuple[int, ...]]:
    """List the shapes of all weights, in the order in which modules are walked."""
    return list(weight_shapes(config).values())
