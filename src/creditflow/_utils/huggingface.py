"""Loads Hugging Face folders safely: local files only, safetensors only, no code from them. Lists missing files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from creditflow.errors import ModelError, first_line

Kind = Literal["causal", "token_classification"]
_AUTO_CLASS: dict[Kind, str] = {
    "causal": "AutoModelForCausalLM",
    "token_classification": "AutoModelForTokenClassification",
}
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def load_folder(
    folder: Path | str, kind: Kind, key: str, dtype: Any = None, *, new_head: bool = False
) -> tuple[Any, Any]:
    """Load the model and the tokenizer in `folder`; weights as `dtype` (default float32), on the CPU.

    `key`: the option that names the folder, for error messages. `new_head`: load a token classifier with one output
    per token, which is 0 everywhere if the folder has no head weights. Raises ModelError with the missing part.
    Missing weights are an error too: transformers would fill in random ones (a causal LM loaded as a token classifier
    would get a random head).
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
        with quiet():  # missing weights raise an error below; unused ones need no warning
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
    if new_head:
        for name in [name for name in info["missing_keys"] if not name.startswith(f"{model.base_model_prefix}.")]:
            torch.nn.init.zeros_(model.get_parameter(name))
            info["missing_keys"].remove(name)
    if missing := sorted(info["missing_keys"]):
        raise unusable(key, path, f"lacks weights of a {kind.replace('_', ' ')} model: {', '.join(missing[:3])}")
    embedded = n_tokens(model)
    if len(tokenizer) > embedded:
        raise unusable(key, path, f"has a tokenizer of {len(tokenizer)} tokens, but a model that embeds {embedded}")
    _align(model)
    return model, tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars and the warnings of transformers."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _align(model: Any) -> None:
    """Move weights to memory that torch allocated, which begins at multiples of 64 bytes.

    Weights read from a file may begin at any address, and the last bits of matrix products may depend on it: two
    processes that load the same model would compute different results.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % _ALIGNED:
            tensor.data = tensor.data.clone()


_ALIGNED = 64


def load_tokenizer(folder: Path | str, key: str) -> Any:
    """Load the tokenizer in `folder`; raise ModelError if it has no usable one."""
    from transformers import AutoTokenizer

    path = Path(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise unusable(key, path, f"has no usable tokenizer: {first_line(error)}") from error
    if len(tokenizer) == 0:
        raise unusable(key, path, "has no usable tokenizer: its vocabulary is empty")
    return tokenizer


def end_ids(folder: Path) -> int | list[int] | None:
    """The `eos_token_id` of the model in `folder`, which its tokenizer may lack."""
    for name in ("generation_config.json", "config.json"):
        with suppress(FileNotFoundError, ValueError):  # transformers, too, passes over a file that is no JSON
            if (ids := json.loads((folder / name).read_text()).get("eos_token_id")) is not None:
                return cast(int | list[int], ids)
    return None


def unusable(key: str, path: Path, why: str) -> ModelError:
    """An error for the unusable folder that option `key` names, with the reason."""
    return ModelError(f"{key}: {path} {why}")


def n_tokens(model: Any) -> int:
    """The size of a model's vocabulary, which may be padded beyond that of its tokenizer."""
    return int(model.get_input_embeddings().num_embeddings)


@dataclass(frozen=True, slots=True)
class PositionLimit:
    """The largest number of tokens in one row of a model, prompt and response together."""

    tokens: int
    rope: str = ""
    """The kind of rotary embedding whose frequencies change beyond the limit; empty if they do not."""

    @property
    def reason(self) -> str:
        """The cause of the limit, for messages."""
        if not self.rope:
            return f"the model takes {self.tokens} positions"
        return (
            f"the model's rotary frequencies ({self.rope}) change beyond {self.tokens} tokens, for all tokens of a row "
            "at once, so log-probs from before the change would not be those that are trained"
        )


_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")
_UNLIMITED = 1 << 30


def position_limit(config: Any) -> PositionLimit:
    """The position limit in a model's configuration.

    transformers computes the rotary frequencies of longrope (Phi-3, Phi-4-mini) and dynamic NTK from the longest
    position of a pass. Beyond a threshold the rows of a batch would affect each other, and a row that grows past it
    would change its earlier positions. Up to the threshold neither happens, so it is the limit.
    """
    text = config.get_text_config(decoder=True)
    limits = (getattr(text, name, None) for name in _LIMITS)
    tokens, kind = next((int(limit) for limit in limits if limit), _UNLIMITED), ""
    for rope, switch in _rope_switches(text, tokens):
        if switch <= tokens:
            tokens, kind = switch, rope
    return PositionLimit(tokens, kind)


def _rope_switches(text: Any, positions: int) -> Iterator[tuple[str, int]]:
    """Kinds of rotary embedding whose frequencies change, each with the most tokens before the change."""
    parameters = getattr(text, "rope_parameters", None) or {}
    each = parameters.values() if all(isinstance(part, dict) for part in parameters.values()) else [parameters]
    for rope in each:
        kind = str(rope.get("rope_type", "default"))
        if "dynamic" in kind:
            yield kind, positions
        elif kind == "longrope" and _changes(rope):
            original = rope.get("original_max_position_embeddings")
            yield kind, int(original or getattr(text, "original_max_position_embeddings", None) or positions)


def _changes(rope: dict[str, Any]) -> bool:
    """Whether the long factors of longrope differ from the short ones."""
    return rope.get("short_factor") != rope.get("long_factor") or rope.get("short_mscale") != rope.get("long_mscale")


def missing_files(folder: Path) -> list[str]:
    """The missing files of a Hugging Face folder: its configuration, and the weights in one file or in parts.

    An index of parts that cannot be read counts as missing. Empty for a folder that does not exist or has no file, and
    for one with a GGUF file.
    """
    files = {file.name for file in folder.iterdir()} if folder.is_dir() else set[str]()
    if not files or any(name.lower().endswith(".gguf") for name in files):
        return []
    expected = ["config.json"]
    for whole in _WEIGHTS:
        if f"{whole}.index.json" in files:
            try:
                index = json.loads((folder / f"{whole}.index.json").read_text())
                parts = sorted({str(part) for part in index["weight_map"].values()})
            except (ValueError, LookupError, TypeError, AttributeError):
                return [f"{whole}.index.json"]
            return [name for name in (*expected, *parts) if name not in files]
    if not any(name in files for name in _WEIGHTS):
        expected.append(_WEIGHTS[0])
    return [name for name in expected if name not in files]
