"""Tiny GGUF files for tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["t h", "th e", "Ġ the", "1 2", "12 3", "a b", "123 4", "ab c"]
SPECIAL = ["<|endoftext|>", "<|turn|>", "<|spare_pad|>", "<|begin|>"]
TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m['role'] }}\n{{ m['content'] }}<|turn|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
TOKENIZER: dict[str, Any] = {
    "model": "gpt2",
    "pre": "qwen2",
    "tokens": [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES)],
    "token_type": [3] * len(SPECIAL) + [1] * (len(BYTES) + len(MERGES)),
    "merges": MERGES,
    "bos_token_id": 3,
    "eos_token_id": 0,
    "padding_token_id": 0,
}


def tiny_model(kind: str = "Llama", *, tied: bool = False) -> Any:
    """A random Llama or Qwen2 (which has biases)."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(TOKENIZER["tokens"]),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def write_gguf(
    file: Path,
    model: Any,
    architecture: str = "",
    tokenizer: Mapping[str, Any] = TOKENIZER,
    extra: Mapping[str, float | str] = {},
    template: str | None = TEMPLATE,
    types: Mapping[str, str] = {},
) -> Path:
    """Write the weights of a tiny model and `tokenizer.ggml.*` as a GGUF file; default architecture: the model's.

    `types`: the types of quantized tensors. The output of a tied model is written only if it has a type.
    """
    import gguf

    config = model.config
    architecture = architecture or config.model_type
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    keys = {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    keys |= {f"{architecture}.{name}": value for name, value in extra.items()}
    for name, value in keys.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    if template:
        writer.add_chat_template(template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    for name, weights in model.state_dict().items():
        tensor = names.get_name(name, (".weight", ".bias"))
        if config.tie_word_embeddings and tensor == "output.weight" and tensor not in types:
            continue
        if tensor in types:
            kind = gguf.GGMLQuantizationType[types[tensor]]
            writer.add_tensor(tensor, gguf.quants.quantize(weights.numpy(), kind), raw_dtype=kind)
        elif config.model_type == "llama" and (".attn_q." in tensor or ".attn_k." in tensor):
            # llama.cpp rotates neighbouring pairs, transformers the two halves of a head.
            halves = weights.reshape(-1, 2, config.head_dim // 2, weights.shape[1])
            writer.add_tensor(tensor, halves.swapaxes(1, 2).reshape(weights.shape).contiguous().numpy())
        else:
            writer.add_tensor(tensor, weights.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
