"""Other people's implementations of the same mathematics, to hold lab35 against."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab35 import GPT, KVCache

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

__all__ = ["to_hugging_face", "to_onnx_runtime"]

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


class _GrowingStep(nn.Module):
    """A decode step as exporters like it: what was stored goes in, and one more comes out."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Run token (1, 1) after kv (L, 2, 1, H, n, D); returns logits and kv with n + 1."""
        model, n = self.model, kv.shape[4]
        heads = (3, 1, model.config.n_head, 1, model.config.head_dim)
        x, grown = model.wte(token) + model.wpe.weight[n], []
        for block, past in zip(model.blocks, kv.unbind(), strict=True):
            qkv = block.attn.qkv(block.ln_1(x)).view(heads)
            grown.append(torch.cat((past, qkv[1:]), dim=3))
            y = F.scaled_dot_product_attention(qkv[0], *grown[-1])
            x = x + block.attn.proj(y.view(1, 1, -1))
            x = x + block.proj(F.gelu(block.fc(block.ln_2(x)), approximate="tanh"))
        return F.linear(model.ln_f(x), model.wte.weight), torch.stack(grown)


def to_onnx_runtime(model: GPT) -> Callable[[Tensor, int], Tensor]:
    """Export a model's decode step to ONNX, and run it with onnxruntime on one thread.

    Args:
        model: Any lab35 GPT in eval mode. It runs the prompt itself.

    Returns:
        A function that continues a prompt (1, P) by so many greedy tokens, and returns all.
    """
    import onnxruntime

    config, past = model.config, torch.export.Dim("past", min=1, max=model.config.block_size - 1)
    example = (
        torch.zeros(1, 1, dtype=torch.int64),
        torch.zeros(config.n_layer, 2, 1, config.n_head, 7, config.head_dim),
    )
    logging.disable(logging.WARNING)  # the exporter tells of packages that it does not find
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            torch.no_grad(),
            warnings.catch_warnings(action="ignore"),  # torch's, about its own parts
        ):
            path = Path(folder) / "step.onnx"
            torch.onnx.export(
                _GrowingStep(model).eval(),
                example,
                path,
                dynamo=True,
                verbose=False,
                external_data=False,
                input_names=["token", "kv"],
                output_names=["logits", "grown"],
                dynamic_shapes=(None, {4: past}),
            )
            content = path.read_bytes()
    finally:
        logging.disable(logging.NOTSET)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    @torch.inference_mode()
    def write(prompt: Tensor, new_tokens: int) -> Tensor:
        cache = KVCache.for_model(model, 1, prompt.shape[1])
        logits = model(prompt, cache=cache)[0].numpy()
        kv, tokens = torch.stack((cache.k, cache.v), dim=1).numpy(), []
        while True:
            tokens.append(logits[:, -1].argmax(-1, keepdims=True))
            if len(tokens) == new_tokens:
                return torch.cat((prompt, torch.from_numpy(np.hstack(tokens))), dim=1)
            logits, kv = session.run(None, {"token": tokens[-1], "kv": kv})

    return write
