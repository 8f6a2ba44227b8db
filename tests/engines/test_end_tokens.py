"""End tokens, prompts without end tokens, padded vocabularies, and adapters that cannot be merged."""

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from creditflow._utils.huggingface import end_ids
from creditflow.config import ActorModelConfig
from creditflow.engines.local.lora import Adapter
from creditflow.engines.local.policy import Policy
from creditflow.engines.models.tiny import byte_tokenizer
from creditflow.errors import ConfigError
from creditflow.rollout import GenerationRequest

CPU = torch.device("cpu")
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}


def tokenizer(template: bool, post: str = "$A") -> transformers.PreTrainedTokenizerFast:
    backend, written = byte_tokenizer()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|system|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    names = [(name, fast.convert_tokens_to_ids(name)) for name in ("<|system|>", "<|end|>")]
    fast.backend_tokenizer.post_processor = TemplateProcessing(single=post, special_tokens=names)
    if template:
        fast.chat_template = written
    return fast


def loaded(
    folder: Path,
    *,
    template: bool = True,
    post: str = "$A",
    gen_eos: int | list[int] | None = None,
    vocabulary: int = 0,
) -> Policy:
    fast = tokenizer(template, post)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=vocabulary or len(fast), eos_token_id=fast.eos_token_id, **SIZES)
    model = transformers.LlamaForCausalLM(config)
    if gen_eos is not None:
        model.generation_config.eos_token_id = gen_eos
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return Policy.load(folder, CPU)


@pytest.mark.parametrize("generation", [None, "", "{}", '{"eos_token_id": null}'])
def test_end_tokens_of_the_model_configuration_are_the_default(tmp_path: Path, generation: str | None) -> None:
    assert end_ids(tmp_path) is None
    (tmp_path / "config.json").write_text('{"eos_token_id": [0, 2]}')
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)
    assert end_ids(tmp_path) == [0, 2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert end_ids(tmp_path) == 0


@pytest.mark.parametrize(("gen_eos", "ends"), [(1, {0, 1}), ([0, 2], {0, 2}), (None, {0})])
def test_every_end_token_ends_a_response(tmp_path: Path, gen_eos: int | list[int] | None, ends: set[int]):
    policy = loaded(tmp_path, gen_eos=gen_eos)
    assert policy.tokenizer.eos_token_id == 0
    assert policy.eos_ids == ends
    generations = policy.generate([GenerationRequest((5, 6, 7), 200, 1.0, (k,)) for k in range(40)])
    last = {generation.response_ids[-1] for generation in generations if len(generation.response_ids) < 200}
    assert last <= ends
    assert not any(token in ends for generation in generations for token in generation.response_ids[:-1])


@pytest.mark.parametrize(
    ("post", "expected"), [("<|system|> $A <|end|>", ["<|system|>", "h", "i"]), ("$A <|end|>", ["h", "i"])]
)
def test_prompt_without_template_has_no_end_token(tmp_path: Path, post: str, expected: list[str]):
    policy = loaded(tmp_path, template=False, post=post)
    _, ids = policy.encode([{"role": "user", "content": "hi"}])
    assert policy.tokenizer.convert_ids_to_tokens(list(ids)) == expected


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_of_tied_weights_are_rejected(target: str):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, tie_word_embeddings=True, **SIZES))
    chosen = ActorModelConfig(lora_rank=4, target_modules=["q_proj", target])
    with pytest.raises(ConfigError, match=f"target_modules: {target} shares its weights with another module"):
        Adapter.add(model, "default", 4, chosen, 0)


def test_all_linear_adapts_the_layers_of_gpt2(tmp_path: Path):
    config = transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    tokenizer(template=True).save_pretrained(tmp_path / "base")
    policy = Policy.load(tmp_path / "base", CPU)
    adapter = Adapter.add(policy.model, "default", 4, ActorModelConfig(lora_rank=4), 0)
    torch.manual_seed(1)
    for weight in adapter.parameters:
        torch.nn.init.normal_(weight, std=0.2)
    ids = torch.arange(1, 30)[None]
    with torch.no_grad(), adapter.in_force():
        live = adapter.model(ids).logits
    policy.with_adapter(adapter).export(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, live, atol=1e-5, rtol=1e-5)
