"""The model itself, with a cache: what every other engine is held against."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lab35.cache import KVCache
from lab35.model import GPT, evaluating, position_ids
from lab35.speed.engine import Engine


class Eager(Engine):
    """The model's own forward, for anything that it can run: any type, device, hook or part.

    Dropout is off in each forward, and the model's mode is its owner's between two of them.

    Args:
        model: The model to run.
        max_len: Positions to make room for. Defaults to the model's block size.
        batch_size: Texts that are written at once, B.
    """

    name = "eager"
    takes_batches = True

    def __init__(self, model: GPT, max_len: int | None = None, batch_size: int = 1) -> None:
        super().__init__(model, max_len, batch_size)
        self.cache = KVCache.for_model(model, batch_size, max_len)
        self.visible: Tensor | None = None

    def reset(self) -> None:
        """Forget everything; the buffers stay where they are."""
        super().reset()
        self.cache.reset()
        self.visible = None

    def _prefill(self, idx: Tensor, key_mask: Tensor | None) -> Tensor:
        self.reset()
        if key_mask is not None:  # what follows is no padding
            self.visible = F.pad(key_mask, (0, self.max_len - idx.shape[1]), value=True)
        return self._run(idx)

    def _step(self, token: Tensor, at: int) -> Tensor:
        return self._run(token)

    def _run(self, new: Tensor) -> Tensor:
        masks: dict[str, Tensor] = {}
        if self.visible is not None:
            visible = self.visible[:, : self.cache.length + new.shape[1]]
            positions = position_ids(visible)[:, self.cache.length :]
            masks = {"key_mask": visible, "position_ids": positions}
        with evaluating(self.model):
            return self.model(new, cache=self.cache, **masks)[0][:, -1]
