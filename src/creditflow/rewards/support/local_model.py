"""Models from Hugging Face folders: loaded once and shared; and one that answers chat messages, for local judges."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from creditflow._utils.huggingface import Kind, load_folder, position_limit
from creditflow.errors import ModelError
from creditflow.rollout.chat import ChatModel, ChatTokenizer
from creditflow.rollout.client import Generation, GenerationRequest

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


class LocalModel(ChatModel):
    """Model and tokenizer as a greedy `rollout.ModelClient` (its generations carry no log-probs)."""

    version = 0

    def __init__(self, folder: Path, model: Any, tokenizer: Any, device: Any) -> None:
        """Use as the argument `make` of `load_model`."""
        self.model = model
        self.device = device
        self.chat_tokenizer = ChatTokenizer(tokenizer, model.generation_config.eos_token_id)
        self.end_ids = sorted(self.chat_tokenizer.end_ids)
        self.max_positions = position_limit(model.config).tokens

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate greedily, in one batch that is padded on the left."""
        if any(request.temperature for request in requests):
            raise ValueError("a local model answers greedily: expected temperature 0")
        # Rows that have ended are fed until the longest response ends. Beyond the model's last position they would
        # change the other rows (`PositionLimit`), so that each request is a batch then.
        longest = max(len(request.prompt_ids) for request in requests)
        fits = longest + max(request.max_tokens for request in requests) <= self.max_positions
        batches = [requests] if fits else [[request] for request in requests]
        return [generation for batch in batches for generation in self._generate(batch)]

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        import torch
        from transformers import GenerationConfig

        width = max(len(request.prompt_ids) for request in requests)
        ids = torch.full((len(requests), width), self.chat_tokenizer.pad_id)
        mask = torch.zeros((len(requests), width), dtype=torch.long)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        greedily = GenerationConfig(
            max_new_tokens=max(request.max_tokens for request in requests),
            do_sample=False,
            num_beams=1,
            eos_token_id=self.end_ids or None,
            pad_token_id=self.chat_tokenizer.pad_id,
        )
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids.to(self.device), attention_mask=mask.to(self.device), generation_config=greedily
            )
        rows: list[list[int]] = out[:, width:].tolist()
        return [self._generation(row, request.max_tokens) for row, request in zip(rows, requests, strict=True)]

    def _generation(self, row: Sequence[int], limit: int) -> Generation:
        """The response up to the first end-of-sequence token; the rest of the row is padding."""
        end = next((t for t, token in enumerate(row[:limit]) if token in self.end_ids), None)
        if end is None:
            return Generation(tuple(row[:limit]), (), "length")
        return Generation(tuple(row[: end + 1]), (), "stop")
