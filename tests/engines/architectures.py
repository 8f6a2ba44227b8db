"""Tiny models of transformers' architectures by name: dense, experts, windows, caps, rotary embeddings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 300
"""More than the byte tokenizer's 260 tokens, because vocabularies are often padded."""
WINDOW = 8
SWITCH = 32
"""The length at which rotary frequencies change, in architectures that change them."""


@dataclass(frozen=True)
class Architecture:
    """A model's class, its configuration and the row limit from its rotary frequencies, if any."""

    model: str
    config: dict[str, Any]
    limit: int | None = None


def _of(name: str, config: dict[str, Any], limit: int | None = None) -> Architecture:
    return Architecture(f"{name}ForCausalLM:{name}Config", config, limit)


def _text(name: str, config: dict[str, Any]) -> Architecture:
    return Architecture(f"{name}ForCausalLM:{name}TextConfig", config)


_small = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 0, "max_position_embeddings": 256}  # fmt: skip
_many = {**_small, "intermediate_size": 64, "num_attention_heads": 4}
_dense = {**_many, "num_key_value_heads": 2}
_heads = {**_dense, "head_dim": 8}
_four = {"num_hidden_layers": 4}
_window = {"sliding_window": WINDOW}
_experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_routed = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
           "first_k_dense_replace": 1}  # fmt: skip
_latent = {**_many, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16,
           "qk_rope_head_dim": 8, "v_head_dim": 16}  # fmt: skip
_ends = {"bos_token_id": 0, "eos_token_id": 0}
_falcon = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **_ends}
_gpt = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, **_ends}
_longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0,
             "original_max_position_embeddings": SWITCH}  # fmt: skip
_gemma3n = {**_heads, **_four, **_window, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
            "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2}  # fmt: skip
_gemma4 = {**_heads, **_window, "num_hidden_layers": 4, "vocab_size_per_layer_input": VOCABULARY,
           "hidden_size_per_layer_input": 8, "global_head_dim": 8,
           "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
_linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
           "linear_value_head_dim": 8}  # fmt: skip
_states = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


ARCHITECTURES = {
    **{name.lower(): _of(name, _dense) for name in (
        "Llama", "Phi", "Phi3", "Qwen2", "Olmo2", "Cohere", "StableLm", "Nemotron", "DiffLlama")},
    **{name.lower(): _of(name, _heads) for name in ("Qwen3", "Gemma", "Glm4", "SeedOss")},
    **{f"{name.lower()}_window": _of(name, _heads | _window) for name in ("Mistral", "Gemma2", "VaultGemma")},
    **{name.lower(): _of(name, _many) for name in ("GPTNeoX", "Persimmon")},
    "llama_tied": _of("Llama", _dense | {"tie_word_embeddings": True}),
    "llama_llama3_rope": _of("Llama", _dense | _rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=SWITCH)),
    "llama_yarn": _of("Llama", _dense | _rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=SWITCH)),
    "llama_linear_rope": _of("Llama", _dense | _rope(rope_type="linear", factor=2.0)),
    "llama_dynamic_ntk": _of("Llama", _dense | {"max_position_embeddings": SWITCH} | _rope(
        rope_type="dynamic", factor=4.0), limit=SWITCH),
    "llama4_chunked": _text("Llama4", {
        **_heads, **_four, "intermediate_size_mlp": 64, "attention_chunk_size": WINDOW, "num_local_experts": 2}),
    "phi3_window": _of("Phi3", _dense | _window),
    "phi3_longrope": _of("Phi3", _dense | {
        "original_max_position_embeddings": SWITCH, "rope_parameters": dict(_longrope)}, limit=SWITCH),
    "phi3_longrope_one_factor": _of("Phi3", _dense | {
        "original_max_position_embeddings": SWITCH, "rope_parameters": {**_longrope, "long_factor": [1.0] * 4}}),
    "phimoe_longrope": _of("Phimoe", _dense | {
        "num_local_experts": 2, "original_max_position_embeddings": SWITCH,
        "rope_parameters": {**_longrope, "short_mscale": 1.0, "long_mscale": 1.2}}, limit=SWITCH),
    "ministral3_scaled_yarn": _of("Ministral3", _heads | {"rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        "max_position_embeddings": 16, "rope_theta": 10000.0}}),
    "mixtral": _of("Mixtral", _dense | {"num_local_experts": 4}),
    "qwen2_window_in_one_layer": _of("Qwen2", _dense | _window | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen2_moe": _of("Qwen2Moe", _dense | _experts | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": _of("Qwen3Moe", _heads | _experts),
    "gemma3_window": _text("Gemma3", _heads | _window | {"num_hidden_layers": 6}),
    "gemma3n": _text("Gemma3n", _gemma3n | {"num_kv_shared_layers": 2, "layer_types": [
        "sliding_attention", "full_attention"] * 2}),
    "gemma3n_unshared": _text("Gemma3n", _gemma3n | {"num_kv_shared_layers": 0}),
    "gemma4": _text("Gemma4", _gemma4 | {"num_kv_shared_layers": 2}),
    "gemma4_unshared": _text("Gemma4", _gemma4 | {"num_kv_shared_layers": 0}),
    "smollm3": _of("SmolLM3", _dense | _four),
    "gpt2": Architecture("GPT2LMHeadModel:GPT2Config", _gpt),
    "gpt_neo_window": _of("GPTNeo", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": WINDOW,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 256, **_ends}),
    "gptj": _of("GPTJ", _gpt | {"rotary_dim": 4, "n_positions": 256}),
    "gpt_bigcode": _of("GPTBigCode", _gpt | {"n_positions": 256}),
    "gpt_oss_window_sink": _of("GptOss", _heads | _window | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "codegen": _of("CodeGen", _gpt | {"rotary_dim": 4, "n_positions": 256, "n_ctx": 256}),
    "opt": _of("OPT", _falcon | {
        "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 256, "pad_token_id": 0}),
    "bloom_alibi": _of("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, **_ends}),
    "mpt_alibi": _of("Mpt", {
        "vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, **_ends}),
    "falcon": _of("Falcon", _falcon),
    "falcon_alibi": _of("Falcon", _falcon | {"alibi": True}),
    "olmo3_window": _of("Olmo3", _dense | _four | _window),
    "olmoe": _of("Olmoe", _dense | {"num_experts": 4, "num_experts_per_tok": 2}),
    "granite": _of("Granite", _dense | {
        "logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.2}),
    "granite_moe": _of("GraniteMoe", _dense | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite_hybrid_of_attention": _of("GraniteMoeHybrid", _dense | _states | {
        "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["attention"] * 2,
        "shared_intermediate_size": 64}),
    "cohere2_window": _of("Cohere2", _heads | _four | _window),
    "starcoder2_window": _of("Starcoder2", _dense | _window),
    "glm4_moe": _of("Glm4Moe", _heads | _routed),
    "deepseek_v2": _of("DeepseekV2", _latent | _routed),
    "deepseek_v3": _of("DeepseekV3", _latent | _routed),
    "exaone4_window": _of("Exaone4", _dense | _four | _window | {"sliding_window_pattern": 4}),
    "modernbert_decoder": _of("ModernBertDecoder", _dense | {
        "local_attention": WINDOW, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 1}),
    "minimax_linear_attention": _of("MiniMax", _heads | _four | {"num_local_experts": 2, "block_size": WINDOW}),
    "xglm": _of("XGLM", {
        "vocab_size": VOCABULARY, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64,
        "max_position_embeddings": 256, "pad_token_id": 0, **_ends}),
}  # fmt: skip
"""Supported architectures."""

REFUSED = {
    "mamba": _of("Mamba", _small),
    "granite_hybrid_of_mamba": _of("GraniteMoeHybrid", _dense | _states | {
        "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 64}),
    "lfm2_convolutions": _of("Lfm2", _dense | _four | {"full_attn_idxs": [1, 3]}),
    "qwen3_next": _of("Qwen3Next", _heads | _four | _experts | _linear | {"shared_expert_intermediate_size": 32}),
    "recurrent_gemma": _of("RecurrentGemma", {
        **_many, "attention_window_size": WINDOW, "lru_width": 32, "num_hidden_layers": 3}),
    "rwkv": _of("Rwkv", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, **_ends}),
    "doge_dynamic_mask": _of("Doge", _dense),
    "bart_positions_by_order": _of("Bart", {
        "vocab_size": VOCABULARY, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64}),
    "roberta_positions_by_padding": _of("Roberta", _many | {"is_decoder": True}),
    "gpt_without_cache": Architecture("OpenAIGPTLMHeadModel:OpenAIGPTConfig", _gpt | {"n_positions": 256}),
}  # fmt: skip
"""Unsupported architectures: they keep a state, take no `position_ids` or attend to tokens outside the row."""


_VARIANTS = {
    "qwen2_values": Architecture("Qwen2ForTokenClassification:Qwen2Config", _dense | {"num_labels": 1}),
    "llama4_window_in_masks": _text(
        "Llama4", ARCHITECTURES["llama4_chunked"].config | {"attn_temperature_tuning": False}
    ),
    "llama4_scaled_by_place": _text("Llama4", ARCHITECTURES["llama4_chunked"].config | {"floor_scale": 16}),
    "deepseek_values_narrower_than_keys": _of("DeepseekV3", _latent | _routed | {"first_k_dense_replace": 2}),
    "gemma2_softcap": _of("Gemma2", _heads),
}


def _model(architecture: Architecture, **changes: Any) -> Any:
    import transformers

    model_class, config_class = (getattr(transformers, name) for name in architecture.model.split(":"))
    torch.manual_seed(0)
    return model_class(config_class(**architecture.config | changes)).eval()


def small_model(name: str, vocabulary: int = 50) -> Any:
    """Create a model in evaluation mode, with large random weights; its end token is 1."""
    architecture = (ARCHITECTURES | REFUSED | _VARIANTS)[name]
    model = _model(architecture, vocab_size=vocabulary, pad_token_id=0, bos_token_id=None, eos_token_id=1)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return model


def save_tiny(architecture: Architecture, folder: Path) -> None:
    """Save a model with large random weights and the byte tokenizer as a Hugging Face folder."""
    import transformers

    from creditflow.engines.models.tiny import byte_tokenizer

    model = _model(architecture)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.12)
            else:
                weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(folder)
    tokenizer, template = byte_tokenizer()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
