"""Models from Hugging Face folders, loaded once and shared."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from creditflow._utils.huggingface import Kind, load_folder
from creditflow.errors import ModelError

Loaded = TypeVar("Loaded")

_LOADED: weakref.WeakValueDictionary[tuple[Path, Kind, str, object], Any] = weakref.WeakValueDictionary()
_LOADING = threading.Lock()


def load_model(
    folder: Path | str, kind: Kind, make: Callable[[Path, Any, Any, Any], Loaded], device: str = "auto"
) -> Loaded:
    """The model in a Hugging Face folder; the same object for the same arguments while it is in use.

    Reads safetensors and local files only, and runs no code from the folder. `device`: `auto` is CUDA if available.
    `make`: makes the object from folder, model, tokenizer and device. Raises ModelError that names the missing part.
    """
    import torch

    path = Path(folder).resolve()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cuda = device.startswith("cuda")
    if on_cuda and not torch.cuda.is_available():
        raise ModelError(f"{path}: device cuda was asked for, but torch sees no CUDA device")
    with _LOADING:  # concurrent callers must not load it twice
        loaded: Loaded | None = _LOADED.get((path, kind, device, make))
        if loaded is None:
            model, tokenizer = load_folder(path, kind, "path", torch.bfloat16 if on_cuda else torch.float32)
            loaded = make(path, model.to(device).eval(), tokenizer, torch.device(device))
            _LOADED[path, kind, device, make] = loaded
    return loaded


def model_folder(path: object, argument: str) -> Path:
    """Check that an argument names the folder of a model; raises ValueError if not.

    Only looks for config.json: cheap enough for the loading of a recipe.
    """
    if not isinstance(path, str | Path) or not (Path(path) / "config.json").is_file():
        raise ValueError(f"{argument}: expected a Hugging Face folder, {path!r} is none (no config.json)")
    return Path(path)
