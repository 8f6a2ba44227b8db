"""Tokenizers from the metadata of a GGUF file.

transformers converts the vocabulary of a GGUF file, but ignores its pre-tokenizer (`tokenizer.ggml.pre`): the rule that
splits a text before tokens are merged. It keeps the rule of the architecture instead, so that a Llama with the
vocabulary of SmolLM2 reads `2024` as one number where the model was trained on four digits. The rules here follow
llama.cpp's table of pre-tokenizers (`llama-vocab.cpp`), with the expressions of the original tokenizers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from creditflow.errors import ModelError
from creditflow.rollout.chat import ChatTokenizer

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`: special tokens, and added tokens that are text."""

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"


def _words(digits: str) -> str:
    """The expression of the GPT-4 family: a word with the sign before it, digits, signs, spaces."""
    return rf"{_CONTRACTION}|{_START}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, contraction: str) -> str:
    """The expression of the GPT-4o family, which also splits before capital letters."""
    return (
        rf"{_START}{_UPPER}*{_LOWER}+{contraction}|{_START}{_UPPER}+{_LOWER}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_THREE_DIGITS, _ONE_DIGIT = r"\p{N}{1,3}", r"\p{N}"
GPT2, GPT2_DIGITS = "gpt2", "gpt2 with single digits"
"""GPT-2's own expression, which is built into the tokenizers library, alone or after digits are split one by one."""

_FAMILIES = {
    GPT2: "gpt-2 phi-2 mpt olmo jais gigachat a.x-4.0 mellum modern-bert exaone4 trillion granite-docling",
    GPT2_DIGITS: "smollm starcoder refact command-r codeshell exaone minerva-7b",
    _words(_THREE_DIGITS): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe "
    "chatglm-bpe glm4",
    _words(_ONE_DIGIT): "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan grok-2",
    _cased_words(_THREE_DIGITS, f"{_CONTRACTION}?"): "gpt-4o llama4 kanana2 minimax-m2",
    _cased_words(_ONE_DIGIT, ""): "tekken",
}
PRE_TOKENIZERS: dict[str, str] = {name: rule for rule, names in _FAMILIES.items() for name in names.split()}
"""The splitting rule of each known `tokenizer.ggml.pre`: `GPT2`, `GPT2_DIGITS` or an expression."""
WHOLE_WORDS = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "glm4", "tekken"}
)
"""Pre-tokenizers whose models read a word that is in the vocabulary as one token, without merging."""
_WITH_BEGIN = WHOLE_WORDS - {"glm4"}
"""Pre-tokenizers that begin a text with the beginning-of-text token unless the file says otherwise."""


def byte_level_tokenizer(metadata: Mapping[str, Any], pre_tokenizer: Any) -> Any:
    """A tokenizer (of the tokenizers library) from the byte-level vocabulary of `tokenizer.ggml.*`.

    Raises ModelError if the vocabulary is inconsistent.
    """
    from tokenizers import Tokenizer, decoders, models

    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise ModelError(f"tokenizer.ggml.tokens: expected {len(tokens)} different tokens, got {len(vocabulary)}")
    # A token is never empty, so the blank that separates the two parts of a merge is not its first letter.
    pairs = [(merge[:1] + merge[1:].partition(" ")[0], merge[1:].partition(" ")[2]) for merge in merges]
    pre = metadata.get("tokenizer.ggml.pre", "")
    try:
        # Bytes without a token of their own are dropped, as in llama.cpp and GPT-2.
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in WHOLE_WORDS)
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise ModelError(f"tokenizer.ggml.merges: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    _add_begin(tokenizer, metadata, default=pre in _WITH_BEGIN)
    return tokenizer


def known_pre_tokenizer(metadata: Mapping[str, Any]) -> Any | None:
    """The pre-tokenizer (of the tokenizers library) that `tokenizer.ggml.pre` names; None if it is unknown."""
    from tokenizers import Regex, pre_tokenizers

    rule = PRE_TOKENIZERS.get(metadata.get("tokenizer.ggml.pre", ""))
    if rule is None:
        return None
    if rule in (GPT2, GPT2_DIGITS):
        split: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if rule == GPT2_DIGITS else []
        return pre_tokenizers.Sequence([*digits, split])
    split = pre_tokenizers.Split(Regex(rule), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _add_begin(tokenizer: Any, metadata: Mapping[str, Any], *, default: bool) -> None:
    """Let `tokenizer` begin texts with the beginning-of-text token if the metadata has it set."""
    from tokenizers import processors

    begin = _special(metadata, "bos")
    if begin is not None and metadata.get("tokenizer.ggml.add_bos_token", default):
        # The template has a name for the token, whose text may contain blanks or colons.
        named = {"id": "begin", "ids": [begin], "tokens": [metadata["tokenizer.ggml.tokens"][begin]]}
        tokenizer.post_processor = processors.TemplateProcessing(
            single="begin:0 $A:0", pair="begin:0 $A:0 begin:1 $B:1", special_tokens=[named]
        )


def finished_tokenizer(backend: Any, metadata: Mapping[str, Any], max_length: int | None) -> Any:
    """A tokenizer of transformers over `backend`, with the special tokens, template and ends of the metadata.

    Its end token ends a turn: the token that the chat template writes after a response, else the file's end-of-turn
    token, else its end-of-sequence token. Its padding token is never an end token.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    backend.add_special_tokens(
        [AddedToken(tokens[id], normalized=False, special=True) for id, kind in enumerate(kinds) if kind == CONTROL]
    )
    backend.add_tokens(
        [AddedToken(tokens[id], normalized=False) for id, kind in enumerate(kinds) if kind == USER_DEFINED]
    )
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown"}
    named = {name: tokens[id] for name, role in roles.items() if (id := _special(metadata, role)) is not None}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **named,
        **({"model_max_length": max_length} if max_length else {}),
    )
    if template := metadata.get("tokenizer.chat_template"):
        tokenizer.chat_template = template
    ends = end_tokens(tokenizer, metadata)
    if ends:
        tokenizer.eos_token = tokens[ends[0]]
    if (padding := _padding(tokenizer, metadata, ends)) is not None:
        tokenizer.pad_token = tokens[padding]
    return tokenizer


def end_tokens(tokenizer: Any, metadata: Mapping[str, Any]) -> list[int]:
    """The ids of tokens that end a response, the one that ends a turn first."""
    end, turn = _special(metadata, "eos"), _special(metadata, "eot")
    written = sorted(ChatTokenizer(tokenizer).end_ids - {end})
    first = written if written else [turn]
    if tokenizer.chat_template and not written and end is not None:
        first = [end]  # the template ends a turn with the end-of-sequence token
    return list(dict.fromkeys(id for id in (*first, turn, end) if id is not None))


def _padding(tokenizer: Any, metadata: Mapping[str, Any], ends: Sequence[int]) -> int | None:
    """The id of a padding token that ends nothing: the file's, a token named so, the unknown token, or a spare one."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    template = tokenizer.chat_template or ""
    control = [id for id, kind in enumerate(kinds) if kind == CONTROL and tokens[id] not in template]
    named = [id for id in control if "pad" in tokens[id].lower()]
    begin = _special(metadata, "bos")
    candidates = (_special(metadata, "padding"), *named, _special(metadata, "unknown"), *control)
    return next((id for id in candidates if id is not None and id not in ends and id != begin), None)


def _special(metadata: Mapping[str, Any], role: str) -> int | None:
    """The id of the token with a role; None if the file names none, or one that its vocabulary lacks."""
    id = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if not isinstance(id, int) or not 0 <= id < len(metadata["tokenizer.ggml.tokens"]):
        return None
    return id


def warn_of_pre_tokenizer(metadata: Mapping[str, Any]) -> None:
    """Warn that the pre-tokenizer of a byte-level vocabulary is unknown."""
    warnings.warn(
        f"tokenizer.ggml.pre: {metadata.get('tokenizer.ggml.pre')!r} is unknown here; the tokenizer splits texts as "
        "transformers does for this architecture, which may differ from the original. Compare its tokens with "
        "llama.cpp's before training",
        stacklevel=2,
    )
