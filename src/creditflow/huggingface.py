"""Reads Hugging Face folders safely: local files only, safetensors only, no code from the folder.

It must not know what a model is for: that is the engine's, or the reward function's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from creditflow.errors import ModelError, first_line

Kind = Literal["causal", "token_classification"]
_AUTO_CLASS: dict[Kind, str] = {
    "causal": "AutoModelForCausalLM",
    "token_classification": "AutoModelForTokenClassification",
}


def load_folder(folder: Path | str, kind: Kind, key: str, dtype: Any = None) -> tuple[Any, Any]:
    """The model and the tokenizer in `folder`; weights as `dtype` (default float32), on the CPU.

    `key`: the option that names the folder, for the message. Raises ModelError that names what is missing: weights
    among them, for transformers fills in random ones (a causal LM read as a token classifier gets a random head).
    """
    import torch
    import transformers
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise unusable(key, path, "is not a Hugging Face model folder (no config.json)")
    try:
        transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise unusable(key, path, f"has no usable config.json: {first_line(error)}") from error
    tokenizer = load_tokenizer(path, key)
    try:
        model, info = getattr(transformers, _AUTO_CLASS[kind]).from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32 if dtype is None else dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise unusable(key, path, f"cannot be loaded: {first_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise unusable(key, path, f"lacks weights of a {kind.replace('_', ' ')} model: {', '.join(missing[:3])}")
    embedded = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > embedded:
        raise unusable(key, path, f"has a tokenizer of {len(tokenizer)} tokens, but a model that embeds {embedded}")
    return model, tokenizer


def load_tokenizer(folder: Path | str, key: str) -> Any:
    """The tokenizer in `folder`; raises ModelError where there is none that can be used."""
    from transformers import AutoTokenizer

    path = Path(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise unusable(key, path, f"has no usable tokenizer: {first_line(error)}") from error
    if len(tokenizer) == 0:
        raise unusable(key, path, "has no usable tokenizer: its vocabulary is empty")
    return tokenizer


def unusable(key: str, path: Path, why: str) -> ModelError:
    """The error that says why the folder that `key` names cannot be used."""
    return ModelError(f"{key}: {path} {why}")
