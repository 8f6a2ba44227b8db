"""The model folders of a recipe's policies and critics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from creditflow._utils.loading import is_reference, load_object
from creditflow.config import Recipe, model_of
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.errors import ConfigError


def model_folder(recipe: Recipe, policy: str) -> Path:
    """The folder of a policy's model; creates the model if the path is `tiny` or a function."""
    return _folder(recipe, *model_of(recipe.config, policy))


def critic_folder(recipe: Recipe, policy: str) -> tuple[Path, str]:
    """The folder of a critic's initial model, created if necessary, and the config key that set it."""
    path, key = recipe.config.critic.model.path, "critic.model.path"
    if path is None:
        path, key = model_of(recipe.config, policy)
    return _folder(recipe, path, key), key


def _folder(recipe: Recipe, path: Any, key: str) -> Path:
    if recipe.config.trainer.num_threads:  # set here because a warm-up's last bits depend on it
        torch.set_num_threads(recipe.config.trainer.num_threads)
    if path == "tiny":
        return tiny_byte_model()
    if is_reference(path):
        return Path(load_object(path, recipe.folder, key)(recipe.config.recipe))
    if not isinstance(path, str):
        got = "nothing" if path is None else repr(path)
        raise ConfigError(f"{key}: expected a Hugging Face folder, `tiny` or `file.py:function`, got {got}")
    return Path(path)
