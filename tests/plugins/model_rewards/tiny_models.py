"""Tiny models in real folders, for tests of functions that use a model."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from creditflow.data import Step, Task, Trajectory
from creditflow.engines.models.tiny import save_tiny_llama

CORPUS = [
    "the sum of four and four is eight, and that is the whole of it\nso the answer is eight\n#### 8\n",
    "first add the apples, then the pears: 3 + 4 = 7\nthe price is 5 € for each of them\n",
]


def bpe_tokenizer(vocabulary: int = 330) -> Tokenizer:
    """Byte-level BPE with some merges, so that token lengths vary; `<s>` begins a sequence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|end|>", "<s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """A tokenizer in the style of SentencePiece: a space before every word, none at the start of a decoded text, bytes
    as <0xE2>.
    """
    words = ["the", "sum", "is", "eight", "t", "h", "e", "s", "u", "m", "i", "\n", "#", "8", "."]
    pieces = ["<unk>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *(f"\u2581{word}" for word in words[:4]), *words]
    model = models.Unigram([(piece, -float(i % 7) - 1) for i, piece in enumerate(pieces)], 0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def save_causal(folder: Path, tokenizer: Tokenizer, seed: int = 0, positions: int = 512) -> Path:
    """A causal Llama of 32 dimensions."""
    save_tiny_llama(folder, tokenizer, hidden=32, layers=2, positions=positions, seed=seed)
    return folder


def save_classifier(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    labels: tuple[str, ...] = ("LABEL_0", "LABEL_1"),
    seed: int = 0,
    positions: int = 512,
    bos: str | None = None,
) -> Path:
    """A Llama that classifies tokens, with weights large enough for distinct scores."""
    from transformers import LlamaConfig, LlamaForTokenClassification, PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", bos_token=bos)
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=positions, initializer_range=0.3, pad_token_id=0,
        id2label=dict(enumerate(labels)), bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForTokenClassification(config)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def a_step(tokenizer: Tokenizer, prompt: str, response: str, end: int | None = 0, **fields: object) -> Step:
    """A step of a policy with this tokenizer: every token sampled, an end-of-sequence token after the text."""
    ids = tuple(tokenizer.encode(response, add_special_tokens=False).ids) + (() if end is None else (end,))
    prompt_ids = tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)
    more: dict[str, object] = {"response_mask": (1,) * len(ids), "logprobs": (-1.0,) * len(ids)} | fields
    return Step("t/0", "t", 0, "a", 0, (), prompt, response, prompt_ids, ids, **more)  # type: ignore[arg-type]


def trajectory_of(*steps: Step) -> Trajectory:
    """A trajectory of these steps, unchanged."""
    return Trajectory("t", "u", Task("test", (), None), list(steps))
