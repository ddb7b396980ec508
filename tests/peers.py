"""Other people's implementations of the same mathematics, to hold lab35 against."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

    from lab35 import GPT

# What is called what in a block: ours, theirs.
NORMS = {"ln_1": "ln_1", "ln_2": "ln_2"}
CONV1D = {  # these keep their weight as (in, out), the transpose of a Linear's
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "fc": "mlp.c_fc",
    "proj": "mlp.c_proj",
}


def to_hugging_face(model: GPT) -> GPT2LMHeadModel:
    """Build Hugging Face's GPT-2 around a copy of a model's weights, in memory.

    Its attention is the "eager" one: matrix products and a softmax, no fused kernel.

    Args:
        model: Any lab35 GPT.

    Returns:
        The peer in eval mode, with the dtype of `model`.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = model.config
    config = GPT2Config(
        vocab_size=sizes.vocab_size,
        n_positions=sizes.block_size,
        n_layer=sizes.n_layer,
        n_head=sizes.n_head,
        n_embd=sizes.n_embd,
        activation_function="gelu_new",
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    ours = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    theirs = {
        "transformer.wte.weight": ours["wte.weight"],
        "transformer.wpe.weight": ours["wpe.weight"],
        "transformer.ln_f.weight": ours["ln_f.weight"],
        "transformer.ln_f.bias": ours["ln_f.bias"],
        "lm_head.weight": ours["wte.weight"],
    }
    for layer in range(sizes.n_layer):
        for here, there in (NORMS | CONV1D).items():
            weight = ours[f"blocks.{layer}.{here}.weight"]
            theirs[f"transformer.h.{layer}.{there}.weight"] = weight.T if here in CONV1D else weight
            theirs[f"transformer.h.{layer}.{there}.bias"] = ours[f"blocks.{layer}.{here}.bias"]
    peer = GPT2LMHeadModel(config).to(next(iter(ours.values())).dtype)
    peer.load_state_dict(theirs)
    return peer.eval()
