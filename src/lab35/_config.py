"""The sizes of a model and the shapes of its weights, for those too who have not loaded torch."""

from __future__ import annotations

from dataclasses import dataclass

from lab35._arguments import integer, number


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; the defaults are the reference model's.

    Attributes:
        vocab_size: Entries in the vocabulary, V.
        block_size: Positions that were trained, and the longest sequence one forward takes.
        n_layer: Transformer blocks, L.
        n_head: Attention heads a block, H.
        n_embd: Width of the residual stream, H·D.
        dropout: Probability of dropping an activation in training; evaluation ignores it.

    Raises:
        ValueError: If a size is below 1, `n_head` does not divide `n_embd`, or `dropout` lies
            outside [0, 1).
    """

    vocab_size: int = 512
    block_size: int = 128
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_head must divide n_embd, got n_head={self.n_head} and n_embd={self.n_embd}"
            )
        object.__setattr__(self, "dropout", number("dropout", self.dropout, "in [0, 1)"))
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")

    @property
    def head_dim(self) -> int:
        """Width of one head, D."""
        return self.n_embd // self.n_head


def weight_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """List the shape of every weight of a GPT, without making any.

    Args:
        config: The sizes.

    Returns:
        The shapes by the names of `state_dict`, in its order.
    """
    C = config.n_embd
    block = {
        "ln_1": (C,), "attn.qkv": (3 * C, C), "attn.proj": (C, C),
        "ln_2": (C,), "fc": (4 * C, C), "proj": (C, 4 * C),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config.vocab_size, C),
        "wpe.weight": (config.block_size, C),
    }
    for layer in range(config.n_layer):
        for name, shape in block.items():
            shapes[f"blocks.{layer}.{name}.weight"] = shape
            shapes[f"blocks.{layer}.{name}.bias"] = shape[:1]
    return shapes | {"ln_f.weight": (C,), "ln_f.bias": (C,)}
