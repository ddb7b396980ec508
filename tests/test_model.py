"""The GPT: its sizes, its architecture against an independent peer, and its refusals."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lab35 import GPT, GPTConfig, position_ids
from lab35.model import evaluating, weight_shapes
from lab35_course.peers import to_hugging_face


def test_sizes_of_the_reference_model() -> None:
    """The sizes that every page quotes."""
    model = GPT(GPTConfig())
    assert model.num_parameters == 875_264
    assert sum(p.nbytes for p in model.parameters()) == 3_501_056


@pytest.mark.parametrize("length", [1, 10, 128])
def test_logits_are_those_of_hugging_face(model: GPT, passage: list[int], length: int) -> None:
    """The same weights in `transformers`' GPT-2 score every position alike."""
    idx = torch.tensor([passage[:length]])
    with torch.inference_mode():
        ours, _ = model(idx)
        theirs = to_hugging_face(model)(idx).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_loss_is_the_mean_cross_entropy(model: GPT, passage: list[int]) -> None:
    """The loss is −log p of each target, averaged, in nats."""
    idx, targets = torch.tensor([passage[:40]]), torch.tensor([passage[1:41]])
    with torch.inference_mode():
        logits, loss = model(idx, targets=targets)
    chosen = logits.double().softmax(-1)[0, range(40), targets[0]]
    assert loss.item() == pytest.approx(-chosen.log().mean().item(), abs=1e-5)


def test_a_fresh_model_knows_nothing() -> None:
    """At initialisation the loss is near log V: no token is favoured."""
    torch.manual_seed(0)
    model = GPT(GPTConfig())
    idx = torch.randint(512, (4, 65))
    with torch.inference_mode():
        _, loss = model(idx[:, :-1], targets=idx[:, 1:])
    assert loss.item() == pytest.approx(math.log(512), abs=0.1)


def test_no_logit_depends_on_a_later_token(model: GPT, passage: list[int]) -> None:
    """Causality: change position 20, and nothing before it moves."""
    idx = torch.tensor([passage[:40]])
    changed = idx.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 512
    with torch.inference_mode():
        before, after = model(idx)[0], model(changed)[0]
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_dropout_acts_in_training_only() -> None:
    """Two forwards differ in training and agree in evaluation."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(dropout=0.5))
    idx = torch.randint(512, (1, 8))
    assert not torch.equal(model(idx)[0], model(idx)[0])
    model.eval()
    assert torch.equal(model(idx)[0], model(idx)[0])


def test_padding_is_invisible_and_never_nan(model: GPT, passage: list[int]) -> None:
    """Whatever stands in the padding, the real logits stay, and all outputs are finite."""
    real = torch.tensor([passage[:8]])
    mask = torch.tensor([[False] * 5 + [True] * 8])
    outputs = []
    with torch.inference_mode():
        alone, _ = model(real)
        for pad_id in (0, 511):
            idx = torch.cat((torch.full((1, 5), pad_id), real), 1)
            logits, _ = model(idx, key_mask=mask, position_ids=position_ids(mask))
            assert logits.isfinite().all()
            outputs.append(logits[:, 5:])
    assert torch.equal(*outputs)
    torch.testing.assert_close(outputs[0], alone, atol=1e-4, rtol=0)


def test_a_row_of_nothing_but_padding_is_finite(model: GPT) -> None:
    """A fully masked row would be a softmax over nothing: every query sees itself."""
    mask = torch.zeros(1, 6, dtype=torch.bool)
    with torch.inference_mode():
        logits, _ = model(torch.zeros(1, 6, dtype=torch.int64), key_mask=mask)
    assert logits.isfinite().all()


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4))
def test_position_ids_count_the_real_tokens_before(rows: list[list[bool]]) -> None:
    """Real token number n of a row sits at position n, whatever stands between."""
    positions = position_ids(torch.tensor(rows))
    for row, found in zip(rows, positions.tolist(), strict=True):
        real = [position for position, is_real in zip(found, row, strict=True) if is_real]
        assert real == list(range(len(real)))
        assert min(found) >= 0


def test_default_positions_are_the_columns(model: GPT, passage: list[int]) -> None:
    """Without position ids the model counts from 0; told so, it does the same."""
    idx = torch.tensor([passage[:9]])
    with torch.inference_mode():
        assert torch.equal(model(idx)[0], model(idx, position_ids=torch.arange(9)[None])[0])
        shifted, _ = model(idx, position_ids=torch.arange(1, 10)[None])
        assert not torch.equal(model(idx)[0], shifted)


def test_the_head_is_tied(tiny_model: GPT) -> None:
    """The logits are the last hidden state against the token embeddings, with no bias."""
    seen: list[Tensor] = []
    hook = tiny_model.ln_f.register_forward_hook(lambda module, args, output: seen.append(output))
    logits, _ = tiny_model(torch.tensor([[1, 2, 3]]))
    hook.remove()
    assert torch.equal(logits, F.linear(seen[0], tiny_model.wte.weight))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"idx": torch.zeros(3, dtype=torch.int64)}, r"idx must have shape \(B, T\).*\(3,\)"),
        ({"idx": torch.zeros(1, 0, dtype=torch.int64)}, r"idx must have shape.*\(1, 0\)"),
        ({"idx": torch.tensor([[0, 37]])}, r"idx must lie in \[0, 37\), got values from 0 to 37"),
        ({"idx": torch.tensor([[-1]])}, r"idx must lie in \[0, 37\)"),
        ({"idx": torch.zeros(1, 82, dtype=torch.int64)}, "block_size=81 positions, got 82"),
        (
            {"idx": torch.zeros(1, 2, dtype=torch.int64), "position_ids": torch.tensor([[0, 81]])},
            r"position_ids must lie in \[0, 81\), got values from 0 to 81",
        ),
        (
            {"idx": torch.zeros(1, 2, dtype=torch.int64), "position_ids": torch.tensor([0, 1])},
            r"position_ids must have shape \(1, 2\) or \(1, 2\), got \(2,\)",
        ),
        (
            {
                "idx": torch.zeros(1, 2, dtype=torch.int64),
                "targets": torch.zeros(1, 3, dtype=torch.int64),
            },
            r"targets must have the shape of idx, \(1, 2\), got \(1, 3\)",
        ),
        (
            {"idx": torch.zeros(1, 1, dtype=torch.int64), "targets": torch.tensor([[37]])},
            r"targets must lie in \[0, 37\), got values from 37 to 37",
        ),
        (
            {"idx": torch.zeros(1, 2, dtype=torch.int64), "key_mask": torch.ones(1, 2)},
            "key_mask must be bool",
        ),
        (
            {
                "idx": torch.zeros(1, 2, dtype=torch.int64),
                "key_mask": torch.ones(1, 3, dtype=torch.bool),
            },
            r"key_mask must be bool with shape \(B, T\) = \(1, 2\).*\(1, 3\)",
        ),
    ],
)
def test_bad_input_is_named(tiny_model: GPT, arguments: dict, message: str) -> None:
    """Each refusal names the argument, the value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        tiny_model(**arguments)


@pytest.mark.parametrize("mask", [torch.ones(3, dtype=torch.bool), torch.ones(1, 3)])
def test_position_ids_refuses_what_is_no_mask(mask: Tensor) -> None:
    """A mask of ones and zeros is not a mask of truths: guessing would hide a mistake."""
    with pytest.raises(ValueError, match="mask must be bool"):
        position_ids(mask)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"n_layer": -1}, "n_layer must be at least 1, got -1"),
        ({"n_head": 3}, "n_head must divide n_embd, got n_head=3 and n_embd=128"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict, message: str) -> None:
    """A configuration is checked when it is made, not when it is used."""
    with pytest.raises(ValueError, match=message):
        GPTConfig(**sizes)


def test_overlapping_blocks_restore_the_modes_once(tiny_model: GPT) -> None:
    """The first to end must not switch dropout on for the second, whichever that is."""
    model = copy.deepcopy(tiny_model).train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    for order in ((0, 1), (1, 0)):
        blocks = [evaluating(model), evaluating(model)]
        for block in blocks:
            block.__enter__()
        blocks[order[0]].__exit__(None, None, None)
        assert not any(module.training for module in model.modules())
        blocks[order[1]].__exit__(None, None, None)
        assert [module.training for module in model.modules()] == modes
    with evaluating(nn.Linear(1, 1)), evaluating(lambda: None):
        pass  # no model, or one without parts


def test_shapes_are_known_without_the_weights() -> None:
    """What a file is held against, and how an engine is chosen: names, shapes and order."""
    names = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
    for sizes in ((7, 5, 1, 1, 3), (300, 2, 3, 2, 10), (1, 1, 2, 4, 4)):
        config = GPTConfig(**dict(zip(names, sizes, strict=True)))
        expected = {name: tuple(t.shape) for name, t in GPT(config).state_dict().items()}
        assert list(expected.items()) == list(weight_shapes(config).items())
