from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from creditflow.engines.local.policy import Policy
from creditflow.engines.models.tiny import save_tiny_llama, tiny_byte_model
from tests.engines.small_runs import run, write_recipe


@pytest.fixture(scope="session")
def byte_policy() -> Policy:
    return Policy.load(tiny_byte_model(), torch.device("cpu"))


@pytest.fixture(scope="session")
def word_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template, with a vocabulary of a dozen one-token words."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<|end|>", *"abcdefghij"])}, unk_token="<|end|>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end|>"])
    save_tiny_llama(folder, tokenizer, hidden=32, layers=2, positions=64, seed=1)
    return folder


@pytest.fixture
def recipe_file(tmp_path: Path, word_model_folder: Path) -> Path:
    return write_recipe(tmp_path, word_model_folder)


@pytest.fixture(scope="session")
def shared_recipe(tmp_path_factory: pytest.TempPathFactory, word_model_folder: Path) -> Path:
    return write_recipe(tmp_path_factory.mktemp("shared"), word_model_folder)


@pytest.fixture(scope="session")
def finished(shared_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Finished runs of the shared recipe by their settings, which tests do not modify."""
    return cache(lambda *settings: run(shared_recipe, tmp_path_factory.mktemp("finished") / "run", *settings))
