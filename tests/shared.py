"""What many tests share: the checkpoint, a tiny model of other sizes, and a passage to run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from lab35 import GPT, GPTConfig, Tokenizer, load_pretrained

# No test asserts a time, and an example that is slow on a busy machine is no failure.
settings.register_profile("lab35", deadline=None)
settings.load_profile("lab35")

PASSAGE = """It was late in the evening when the bell rang, and a young lady in a grey cloak was
shown into our sitting-room. “I have come to you, Mr. Holmes,” said she, “because I do not know to
whom else I could turn.” My friend laid down his pipe and waved her to a chair. “Pray tell us
everything from the beginning,” he said, “and leave out nothing, however small it may seem.”"""


@pytest.fixture(scope="session", autouse=True)
def kept(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Keep what is compiled from one run of the tests to the next, and out of the user's cache."""
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("compiled") if cache else tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.fixture(scope="session")
def pretrained() -> tuple[GPT, Tokenizer]:
    """The checkpoint of the course."""
    return load_pretrained()


@pytest.fixture(scope="session")
def model(pretrained: tuple[GPT, Tokenizer]) -> GPT:
    """The trained model: random weights repeat one token, and prove little."""
    return pretrained[0]


@pytest.fixture(scope="session")
def tokenizer(pretrained: tuple[GPT, Tokenizer]) -> Tokenizer:
    """Its tokenizer."""
    return pretrained[1]


@pytest.fixture(scope="session")
def passage(tokenizer: Tokenizer) -> list[int]:
    """More than 130 tokens of text in the manner of the book."""
    return tokenizer.encode(PASSAGE)


@pytest.fixture
def prompt(tokenizer: Tokenizer) -> Tensor:
    """Ten tokens, shape (1, 10)."""
    return torch.tensor([tokenizer.encode("It was a dark night and")])


@pytest.fixture(scope="session")
def tiny_model() -> GPT:
    """A small model of sizes that share no factor with the reference model's."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=37, block_size=81, n_layer=3, n_head=3, n_embd=15)).eval()
