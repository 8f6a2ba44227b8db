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
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""The names of modules in transformers and in GGUF files."""


def tiny_model(kind: str = "Llama") -> Any:
    """A random Llama or Qwen2 (which has biases), with untied embeddings."""
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
        tie_word_embeddings=False,
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
) -> Path:
    """Write the weights of a tiny model and `tokenizer.ggml.*` as a GGUF file; default architecture: the model's."""
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
    for name, value in tokenizer.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_array(f"tokenizer.ggml.{name}", value)
    for name, value in extra.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.{name}", value)
    if template:
        writer.add_chat_template(template)
    for name, weights in model.state_dict().items():
        tensor = _tensor_name(name)
        if config.model_type == "llama" and (".attn_q." in tensor or ".attn_k." in tensor):
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


def _tensor_name(name: str) -> str:
    module, _, suffix = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{suffix}"
    return f"{_NAMES[module]}.{suffix}"
