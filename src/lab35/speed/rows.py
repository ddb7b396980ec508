"""Several texts at once, padded or not: the lean step, with a row for each of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lab35.model import GPT
from lab35.speed.engine import Engine, padded
from lab35.speed.loops import compiled_loops
from lab35.speed.prompt import gelu
from lab35.speed.storage import ONE_AT_A_TIME


class LeanRows(Engine):
    """The lean step for a batch: no modules, and nothing computed for padding where there is none.

    Products of a matrix and many rows are worth their calls, so there is less to save than for one
    text: the mask is made once, keys and values are written as one, and the GELU is a cheaper one.

    Args:
        model: The model to run, in float32.
        max_len: Positions to make room for. Defaults to the model's block size.
        batch_size: Texts, B.
    """

    name = "lean"
    takes_batches = True

    def _prefill(self, idx: Tensor, key_mask: Tensor | None) -> Tensor:
        logits = super()._prefill(idx, key_mask)
        self.padding = self.bias = None
        if key_mask is not None:
            self.padding = (~key_mask).sum(dim=1)  # (B,)
            hidden = F.pad(~key_mask, (0, self.max_len - idx.shape[1]))[:, None, None]
            self.bias = torch.zeros_like(hidden, dtype=logits.dtype)  # (B, 1, 1, max_len)
            self.bias.masked_fill_(hidden, float("-inf"))
        return logits

    def _store(self, kv: Tensor) -> None:
        self.kv = padded(kv, self.max_len)  # (L, 2, B, H, max_len, D)

    def _step(self, token: Tensor, at: int) -> Tensor:
        wte, wpe, blocks, ln_f = self.weights
        B, C, n = self.batch_size, self.config.n_embd, at + 1
        heads, width = (B, 3, self.config.n_head, 1, self.config.head_dim), (C,)
        bias = None if self.bias is None else self.bias[..., :n]
        x = F.embedding(token[:, 0], wte)  # (B, H·D)
        x += wpe[at] if self.padding is None else F.embedding(at - self.padding, wpe)
        for block, kv in zip(blocks, self.kv.unbind(), strict=True):  # kv is (2, B, H, max_len, D)
            ln_1, (w_qkv, b_qkv), (w_proj, b_proj), ln_2, (w_fc, b_fc), (w_out, b_out) = block
            qkv = F.linear(torch.layer_norm(x, width, *ln_1), w_qkv, b_qkv).view(heads)
            kv[:, :, :, at:n] = qkv[:, 1:].transpose(0, 1)
            y = F.scaled_dot_product_attention(qkv[:, 0], *kv[:, :, :, :n], attn_mask=bias)
            x = x + F.linear(y.reshape(B, C), w_proj, b_proj)
            h = F.linear(torch.layer_norm(x, width, *ln_2), w_fc, b_fc)
            x = x + F.linear(gelu(h), w_out, b_out)
        return F.linear(torch.layer_norm(x, width, *ln_f), wte)


class JittedRows(LeanRows):
    """A batch's step with products by torch, and what lies between them in plain loops.

    A library multiplies matrices better than loops do. But attention with one query a row only
    reads: a loop does that at the speed of memory, skips the padding, and stores on its way.

    Args:
        model: The model to run, in float32 on the CPU.
        max_len: Positions to make room for. Defaults to the model's block size.
        batch_size: Texts, B.

    Raises:
        RuntimeError: If numba is not installed.
    """

    name = "numba"

    def __init__(self, model: GPT, max_len: int | None = None, batch_size: int = 1) -> None:
        super().__init__(model, max_len, batch_size)
        with ONE_AT_A_TIME:
            loops = compiled_loops(model.config)
        self.norm, self.attend, self.gelu = (
            loops[name] for name in ("_norm_rows", "_attend_rows", "_gelu")
        )

    def _step(self, token: Tensor, at: int) -> Tensor:
        wte, wpe, blocks, ln_f = self.weights
        C, firsts = self.config.n_embd, self.padding
        if firsts is None:
            firsts = torch.zeros_like(token[:, 0])
        x = F.embedding(token[:, 0], wte) + F.embedding(at - firsts, wpe)  # (B, H·D)
        y, qkv, h = torch.empty_like(x), x.new_empty(len(x), 3 * C), x.new_empty(len(x), 4 * C)
        for block, kv in zip(blocks, self.kv.numpy(), strict=True):  # kv is (2, B, H, max_len, D)
            ln_1, (w_qkv, b_qkv), (w_proj, b_proj), ln_2, (w_fc, b_fc), (w_out, b_out) = block
            self._norm(x, ln_1, y)
            torch.addmm(b_qkv, y, w_qkv.t(), out=qkv)
            self.attend(qkv.numpy(), kv, firsts.numpy(), at, y.numpy())
            x.add_(b_proj).addmm_(y, w_proj.t())
            self._norm(x, ln_2, y)
            torch.addmm(b_fc, y, w_fc.t(), out=h)
            self.gelu(h.view(-1).numpy())
            x.add_(b_out).addmm_(h, w_out.t())
        self._norm(x, ln_f, y)
        return y @ wte.t()

    def _norm(self, x: Tensor, part: tuple[Tensor, Tensor], y: Tensor) -> None:
        self.norm(x.numpy(), part[0].numpy(), part[1].numpy(), y.numpy())
