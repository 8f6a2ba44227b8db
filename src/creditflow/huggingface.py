"""Reads Hugging Face folders safely (local files only, safetensors only, no code from the folder), and turns messages
into their tokens.

It must not know what a model is for: that is the engine's, or the reward function's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from creditflow.errors import ModelError, first_line
from creditflow.trajectory import Message

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


class ChatTokenizer:
    """Messages to prompt text and tokens, and a response's tokens to text: the same for every engine.

    `tokenizer`: as transformers has it. `end_ids`: tokens that end a response, where the model's own are not the
    tokenizer's. Holds no model and imports nothing heavy.
    """

    def __init__(self, tokenizer: Any, end_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        padding = (tokenizer.pad_token_id, *sorted(end_ids), tokenizer.eos_token_id, 0)
        self.pad_id = int(next(token for token in padding if token is not None))
        """Stands where there is no token; the prompt's only one where the messages have none."""
        self.special_tokens = [
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content
        ]

    def encode(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        """Prompt text and tokens; with the tokenizer's chat template where it has one, else the contents in lines.

        Special tokens that are spelled out in a message are taken out of it: what one agent writes must not be able to
        close the next one's turn.
        """
        plain = [{**message, "content": self._without_special_tokens(message["content"])} for message in messages]
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            text = "\n".join(message["content"] for message in plain)
            ids = self.tokenizer(text)["input_ids"]
        return text, tuple(ids) or (self.pad_id,)  # there must be a position to predict from

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _without_special_tokens(self, content: object) -> str:
        text = str(content)
        while found := [token for token in self.special_tokens if token in text]:
            for token in found:  # and again: taking one out may join the halves of another
                text = text.replace(token, "")
        return text


def unusable(key: str, path: Path, why: str) -> ModelError:
    """The error that says why the folder that `key` names cannot be used."""
    return ModelError(f"{key}: {path} {why}")
