"""Generated tiny models with real architectures and files but random weights, for tests and for trying recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from creditflow._utils.files import cache_folder, make_whole


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` in the cache; `make` fills it the first time.

    It is created under another name and then renamed, so a killed run leaves no partial folder and runs may race.
    """
    folder = cache_folder() / name
    if not folder.is_dir():
        make_whole(folder, make)
    return folder


def tiny_byte_model() -> Path:
    """A byte-level Llama of 0.1 M parameters with a chat template."""
    return made_once("tiny-bytes-1", _make_byte_model)


def byte_tokenizer() -> tuple[Any, str]:
    """A byte-level tokenizer (of the tokenizers library) and a chat template with its special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*special, *alphabet])}, merges=[]))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return tokenizer, template


def word_tokenizer(words: Iterable[str]) -> Any:
    """A tokenizer (of the tokenizers library) with one token per word, after the end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["<|end|>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def _make_byte_model(folder: Path) -> None:
    tokenizer, template = byte_tokenizer()
    save_tiny_llama(folder, tokenizer, hidden=64, layers=2, positions=4096, seed=0, chat_template=template)


def save_tiny_llama(
    folder: Path,
    tokenizer: Any,
    *,
    hidden: int,
    layers: int,
    positions: int,
    seed: int,
    chat_template: str | None = None,
) -> None:
    """Save a randomly initialized Llama and `tokenizer` (of the tokenizers library) as a Hugging Face folder.

    Weights have a standard deviation of 0.06. With 0.02, which suits wide models, a model this narrow learned nothing
    in 500 steps.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    if chat_template:
        fast.chat_template = chat_template
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
