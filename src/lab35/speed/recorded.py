"""The recorded rung, for a GPU: the step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lab35.model import GPT
from lab35.speed.engine import Engine


class Recorded(Engine):
    """The step as a CUDA graph: recorded once for a text, and replayed as a single launch.

    A graph repeats the same kernels on the same addresses. So the token and its position are
    written into fixed places, and attention runs over the whole block, behind a mask. This is the
    idea of PyTorch's `torch.cuda.CUDAGraph`, and what a static cache is for.

    Args:
        model: The model to run, in eval mode, on a CUDA device.
        max_len: Positions to make room for. Defaults to the model's block size.
    """

    name = "compiled"

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

    def _store(self, kv: Tensor) -> None:
        for past, new in zip(self.kv, kv, strict=True):
            past[..., : new.shape[3], :] = new

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
