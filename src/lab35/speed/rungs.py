"""The rungs that need PyTorch alone: the textbook, one write, and lean."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lab35.model import GPT
from lab35.speed.engine import Engine, padded


class Textbook(Engine):
    """The decode step of most tutorials: modules, a mask, two writes. The rung to compare with.

    Args:
        model: The model to run, in float32 on the CPU.
        max_len: Positions to make room for. Defaults to the model's block size.
    """

    name = "textbook"

    def _store(self, kv: Tensor) -> None:
        self.k, self.v = padded(kv, self.max_len).unbind(1)  # each (L, 1, H, max_len, D)

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

    name = "one write"

    def _store(self, kv: Tensor) -> None:
        self.kv = padded(kv, self.max_len)  # (L, 2, 1, H, max_len, D)

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

    name = "lean"

    def __init__(self, model: GPT, max_len: int | None = None) -> None:
        super().__init__(model, max_len)
        L, H, D = self.config.n_layer, self.config.n_head, self.config.head_dim
        self.rows = model.wte.weight.new_empty(L, self.max_len, 3 * H * D)
        heads = self.rows.view(L, self.max_len, 3, 1, H, D).permute(0, 2, 3, 4, 1, 5)
        self.q, *self.kv = heads.unbind(1)  # views, each (L, 1, H, max_len, D)
        self.past = heads[:, 1:]

    def _store(self, kv: Tensor) -> None:
        self.past[..., : kv.shape[4], :] = kv

    def _step(self, token: Tensor, at: int) -> Tensor:
        width = (self.config.n_embd,)
        rows = self.rows.select(1, at).unbind()  # one layer's q, k and v, (3·H·D,)
        queries = self.q.narrow(3, at, 1).unbind()  # the same numbers as heads, (1, H, 1, D)
        keys, values = (past.narrow(3, 0, at + 1).unbind() for past in self.kv)
        wte, wpe, blocks, ln_f = self.weights
        x = wte[token.item()] + wpe[at]  # (H·D,)
        for block, row, q, k, v in zip(blocks, rows, queries, keys, values, strict=True):
            ln_1, (w_qkv, b_qkv), (w_proj, b_proj), ln_2, (w_fc, b_fc), (w_out, b_out) = block
            torch.addmv(b_qkv, w_qkv, torch.layer_norm(x, width, *ln_1), out=row)
            y = F.scaled_dot_product_attention(q, k, v).view(width)
            x.add_(b_proj).addmv_(w_proj, y)
            h = torch.addmv(b_fc, w_fc, torch.layer_norm(x, width, *ln_2))
            x.add_(b_out).addmv_(w_out, F.gelu(h, approximate="tanh"))
        return torch.mv(wte, torch.layer_norm(x, width, *ln_f))
