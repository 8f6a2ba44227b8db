"""The model folders of a recipe's policies and critics."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from creditflow._utils.huggingface import missing_files
from creditflow._utils.loading import is_reference, load_object
from creditflow.config import Recipe, model_of
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.errors import ConfigError, ModelError
from creditflow.registry import Registry

PATHS: Registry[Callable[[str, str], Path | None]] = Registry("model.path", group="creditflow.models", kind=Callable)
"""Model paths of plug-ins. Each entry returns the folder of a path and the option that names it; None for any other."""
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def model_folder(recipe: Recipe, policy: str) -> Path:
    """The folder of a policy's model, created if necessary.

    Raises InputError if there is no such model, or if it cannot be created.
    """
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
        raise ConfigError(
            f"{key}: expected a Hugging Face folder, a GGUF file, a name in the Hugging Face cache, `tiny`, "
            f"`smollm2` or `file.py:function`, got {got}"
        )
    return local_folder(path, key)


def is_hub_name(path: str) -> bool:
    """Whether `path` can only be a model's name on the hub, such as `org/name`."""
    return bool(_ON_HUB.fullmatch(path)) and path not in ("tiny", "smollm2") and not Path(path).exists()


def local_folder(path: str, key: str) -> Path:
    """The Hugging Face folder of a folder, a path of a plug-in, or a name in the local Hugging Face cache.

    Nothing is downloaded. `key`: the option that names the path. Raises ModelError if there is no such model.
    """
    if not path:
        raise ConfigError(f"{key}: expected a model, got an empty text")
    if (folder := _folder_of_plug_in(path, key)) is not None:
        return folder
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise ModelError(f"{key}: expected a Hugging Face folder or a GGUF file, got the file {folder}")
    snapshot = _cached_snapshot(path) if is_hub_name(path) else None
    if snapshot is None:
        name = re.sub(r"^https?://[^/]+/", "", path)
        fetch = f" or in the local Hugging Face cache (`hf download {name}` fetches it)"
        download = fetch if "/" in name and is_hub_name(name) else ""
        raise ModelError(
            f"{key}: {path} is not a Hugging Face model folder: there is nothing of that name here{download}; "
            "expected a folder, a GGUF file, a name in the Hugging Face cache, `tiny` or `smollm2`"
        )
    if absent := missing_files(snapshot):
        raise ModelError(
            f"{key}: {path} is incomplete in the local Hugging Face cache: {absent[0]} is missing; "
            f"`hf download {path}` completes it"
        )
    return _folder_of_plug_in(str(snapshot), key) or snapshot


def _folder_of_plug_in(path: str, key: str) -> Path | None:
    folders = (folder_of(path, key) for _, folder_of in PATHS.items())
    return next((folder for folder in folders if folder is not None), None)


def _cached_snapshot(name: str) -> Path | None:
    """The folder of a model in the local Hugging Face cache; None if it is not there. Never uses the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
