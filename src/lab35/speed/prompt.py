"""The prompt in one piece, as lean as the steps that follow it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lab35.model import GPTConfig, attention_mask, position_ids
from lab35.speed.weights import Weights


def run_prompt(
    weights: Weights, config: GPTConfig, idx: Tensor, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Score what follows a prompt, and make its keys and values.

    It does what the model does, but for what nobody reads: after the last block's keys and values,
    only the last position goes on.

    Args:
        weights: The model's weights.
        config: Its sizes.
        idx: Int64, shape (B, P).
        key_mask: Bool, shape (B, P). False marks padding, on the left.

    Returns:
        The logits after the last token, (B, V), and all keys and values, (L, 2, B, H, P, D).
    """
    (B, P), width = idx.shape, (config.n_embd,)
    heads = (B, P, 3, config.n_head, config.head_dim)
    if key_mask is None:
        mask, where = None, weights.wpe[:P]
    else:
        mask = attention_mask(P, 0, key_mask, idx)  # (B, 1, P, P)
        where = F.embedding(position_ids(key_mask), weights.wpe)
    x = (F.embedding(idx, weights.wte) + where).view(B * P, -1)  # (B·P, H·D)
    stored = []
    for block in weights.blocks:
        ln_1, (w_qkv, b_qkv), (w_proj, b_proj), ln_2, (w_fc, b_fc), (w_out, b_out) = block
        qkv = F.linear(torch.layer_norm(x, width, *ln_1), w_qkv, b_qkv)
        q, *kv = qkv.view(heads).permute(2, 0, 3, 1, 4)  # each (B, H, P, D)
        stored += kv
        if len(stored) == 2 * config.n_layer:
            q, mask = q[:, :, -1:], None if mask is None else mask[:, :, -1:]
            x = x.view(B, P, -1)[:, -1]  # (B, H·D)
        causal = mask is None and q.shape[2] > 1  # one query sees every key
        y = F.scaled_dot_product_attention(q, *kv, attn_mask=mask, is_causal=causal)
        x = x + F.linear(y.transpose(1, 2).reshape(x.shape), w_proj, b_proj)
        h = F.linear(torch.layer_norm(x, width, *ln_2), w_fc, b_fc)
        x = x + F.linear(gelu(h), w_out, b_out)
    logits = F.linear(torch.layer_norm(x, width, *weights.ln_f), weights.wte)
    return logits, torch.stack(stored).unflatten(0, (-1, 2))


TWICE = torch.tensor(2 * 0.7978845608, dtype=torch.float32, device="cpu")  # 2·sqrt(2 / pi)


def gelu(x: Tensor) -> Tensor:
    """Compute the tanh-GELU of many numbers, for less than `F.gelu` takes on a CPU.

    Half of (1 + tanh(u)) is sigmoid(2·u), and each of these passes runs on whole vectors.

    Args:
        x: Float32, any shape.

    Returns:
        A tensor of the same shape.
    """
    if not x.is_cpu:
        return F.gelu(x, approximate="tanh")
    doubled = torch.addcmul(TWICE, x, x, value=0.044715 * 2 * 0.7978845608).mul_(x)
    return doubled.sigmoid_().mul_(x)
