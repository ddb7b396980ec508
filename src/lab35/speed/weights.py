"""A model's weights as plain tensors, on the same memory: a module call costs time by itself."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from lab35.model import GPT, Block

Pair = tuple[Tensor, Tensor]
"""A weight and its bias."""


class Weights(NamedTuple):
    """All weights of a model, in the order of their use.

    Attributes:
        wte: Embeddings of tokens, shape (V, H·D), which are the output head too.
        wpe: Embeddings of positions, shape (block_size, H·D).
        blocks: What `parts_of` lists, for each block.
        ln_f: The last LayerNorm.
    """

    wte: Tensor
    wpe: Tensor
    blocks: list[list[Pair]]
    ln_f: Pair

    @classmethod
    def of(cls, model: GPT) -> Weights:
        """Look at the weights that a model has now."""
        blocks = [[pair(part) for part in parts_of(block)] for block in model.blocks]
        return cls(model.wte.weight.detach(), model.wpe.weight.detach(), blocks, pair(model.ln_f))


def parts_of(block: Block) -> tuple[nn.Module, ...]:
    """List a block's parts in the order of their use."""
    return block.ln_1, block.attn.qkv, block.attn.proj, block.ln_2, block.fc, block.proj


def pair(part: nn.Linear | nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return a part's weight and bias as plain tensors, on the same memory."""
    return part.weight.detach(), part.bias.detach()
