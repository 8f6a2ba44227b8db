"""Small transformers models of several families."""

from typing import Any

import torch


def small_model(name: str, vocabulary: int = 50) -> Any:
    """Create a model in evaluation mode, with large random weights."""
    from transformers import (
        BartConfig,
        BartForCausalLM,
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        Llama4ForCausalLM,
        Llama4TextConfig,
        MambaConfig,
        MambaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForTokenClassification,
        Qwen3Config,
        Qwen3ForCausalLM,
    )  # fmt: skip

    small = {"vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0,
             "bos_token_id": None, "eos_token_id": 1}  # fmt: skip
    dense = {**small, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    llama4 = dense | {"num_hidden_layers": 4, "intermediate_size_mlp": 64, "attention_chunk_size": 8,
                      "num_local_experts": 2}  # fmt: skip
    made = {
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**dense)),
        "qwen2 values": lambda: Qwen2ForTokenClassification(Qwen2Config(**dense, num_labels=1)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**dense)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(
            vocab_size=vocabulary, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1)),
        "mistral, window of 8": lambda: MistralForCausalLM(MistralConfig(**dense, sliding_window=8)),
        "llama4, window of 8 in masks alone": lambda: Llama4ForCausalLM(
            Llama4TextConfig(**llama4, attn_temperature_tuning=False)),
        "llama4, scaled by place": lambda: Llama4ForCausalLM(Llama4TextConfig(**llama4, floor_scale=16)),
        "bart, positions by order": lambda: BartForCausalLM(BartConfig(
            vocab_size=vocabulary, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64)),
        "deepseek, values narrower than keys": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(
            **small, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16,
            q_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=2)),
        "gemma2, soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**dense)),
        "mamba, no attention": lambda: MambaForCausalLM(MambaConfig(**small)),
    }  # fmt: skip
    torch.manual_seed(0)
    model = made[name]().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return model
