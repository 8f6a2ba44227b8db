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


def load_folder(
    folder: Path | str, kind: Kind, key: str, dtype: Any = None, *, new_head: bool = False
) -> tuple[Any, Any]:
    """The model and the tokenizer in `folder`; weights as `dtype` (default float32), on the CPU.

    `key`: the option that names the folder, for the message. `new_head`: of a token classifier, whose one output per
    token is then 0 everywhere if the folder has no such weights. Raises ModelError that names what is missing: weights
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
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what is missing is told below, and a head that is no use is not worth a warning
    try:
        model, info = getattr(transformers, _AUTO_CLASS[kind]).from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32 if dtype is None else dtype,
            use_safetensors=True,
            output_loading_info=True,
            **({"num_labels": 1} if new_head else {}),
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise unusable(key, path, f"cannot be loaded: {first_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
    if new_head:
        for name in [name for name in info["missing_keys"] if not name.startswith(f"{model.base_model_prefix}.")]:
            torch.nn.init.zeros_(model.get_parameter(name))
            info["missing_keys"].remove(name)
    if missing := sorted(info["missing_keys"]):
        raise unusable(key, path, f"lacks weights of a {kind.replace('_', ' ')} model: {', '.join(missing[:3])}")
    embedded = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > embedded:
        raise unusable(key, path, f"has a tokenizer of {len(tokenizer)} tokens, but a model that embeds {embedded}")
    _align(model)
    return model, tokenizer


def _align(model: Any) -> None:
    """Weights in memory of torch's own, which begins at multiples of 64 bytes.

    What a file is read into begins anywhere, and products' last bits may depend on that: of two processes that load one
    model, each would have its own.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % _ALIGNED:
            tensor.data = tensor.data.clone()


_ALIGNED = 64


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
