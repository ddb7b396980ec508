"""Other people's implementations of the same mathematics, to hold lab35 against."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab35 import GPT, KVCache

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

__all__ = ["to_ctranslate2", "to_hugging_face", "to_onnx_runtime"]

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


def to_ctranslate2(model: GPT) -> Callable[[Sequence[Sequence[int]], int], list[list[int]]]:
    """Convert a model for CTranslate2, and run it there in float32 on one thread.

    What is converted is the peer of `to_hugging_face`, by CTranslate2's own converter. That reads
    a folder of transformers with a tokenizer in it; both folders are gone when this returns.

    Args:
        model: Any lab35 GPT.

    Returns:
        A function that continues rows of ids, of any lengths, by so many greedy tokens, and returns
        the new ones. Nothing ends a row early. Like the model it has `block_size` positions:
        CTranslate2 raises a `RuntimeError` when a text needs one more.
    """
    import ctranslate2
    from ctranslate2.converters import TransformersConverter
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    # CTranslate2 takes tokens by their names. Here an id is its own name, and so no text is needed.
    names = [str(id_) for id_ in range(model.config.vocab_size)]
    end = names[-1]  # it ends nothing, but the converter crashes without all three
    vocabulary = WordLevel({name: id_ for id_, name in enumerate(names)}, unk_token=end)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(vocabulary), bos_token=end, eos_token=end, unk_token=end
    )
    with tempfile.TemporaryDirectory() as folder, _no_progress_bars():
        theirs, converted = str(Path(folder) / "transformers"), str(Path(folder) / "converted")
        to_hugging_face(model).save_pretrained(theirs)
        tokenizer.save_pretrained(theirs)
        TransformersConverter(theirs).convert(converted, quantization="float32")
        generator = ctranslate2.Generator(
            converted, device="cpu", compute_type="float32", inter_threads=1, intra_threads=1
        )

    def write(rows: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        # The columns that every row fills are the prefill. What a longer row has beyond them is
        # forced on it token by token, and counts as new; so the others write that much too much.
        shortest = min(map(len, rows))
        longest = max(map(len, rows))
        results = generator.generate_batch(
            [[names[id_] for id_ in row] for row in rows],
            max_length=longest - shortest + new_tokens,
            end_token=[],  # nothing ends a row: end-of-text is a token like any other
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [
            result.sequences_ids[0][len(row) - shortest :][:new_tokens]
            for row, result in zip(rows, results, strict=True)
        ]

    return write


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars while it saves and loads."""
    from transformers.utils import logging as theirs

    shown = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            theirs.enable_progress_bar()


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
