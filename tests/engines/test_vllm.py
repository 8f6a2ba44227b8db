"""vLLM itself as the sampler. `make vllm` installs it; CREDITFLOW_VLLM_PYTHON names another environment's Python."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from creditflow.config import ActorConfig, Config, OptimConfig
from creditflow.engines.local.actor import Actor
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.samplers.process import SamplerError
from creditflow.engines.local.samplers.vllm import VllmSampler, attach_samplers
from creditflow.rollout import GenerationRequest
from tests.engines.batches import sampled_batch, update_once
from tests.engines.test_samplers import difference
from tests.paths import ROOT

PYTHON = Path(os.environ.get("CREDITFLOW_VLLM_PYTHON", ROOT / ".venv/vllm/bin/python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason=f"{PYTHON} is absent: make vllm installs vLLM"),
]
# Prompts of several of vLLM's cache blocks, which it would find again after an update.
LONG = [
    GenerationRequest(
        tuple(np.random.default_rng(k % 3).integers(1, 200, 300).tolist()), 12, (1.0, 0.6, 0.0, 1.4)[k % 4], (7, k)
    )
    for k in range(8)
]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Policy]:
    """A byte-level Llama with heads of size 32, whose output head may share the embedding's weights."""
    from creditflow.engines.models.tiny import tiny_byte_model

    tokenizer = Policy.load(tiny_byte_model(), torch.device("cpu")).tokenizer
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1, bos_token_id=None,
        tie_word_embeddings=request.param, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = Policy.load(tmp_path, torch.device("cpu"))
    options: dict[str, Any] = {
        "data": {"max_prompt_length": 320, "max_response_length": 64},
        "actor_rollout_ref": {
            "rollout": {"name": "vllm", "max_num_seqs": 16, "engine_kwargs": {"vllm": {"python": str(PYTHON)}}}
        },
        "trainer": {"num_threads": 1},
    }
    attach_samplers({"default": policy}, Config.model_validate(options))
    yield policy
    assert isinstance(policy.sampler, VllmSampler)
    policy.sampler.close()


def test_vllm_samples_from_the_current_weights(policy: Policy) -> None:
    sampler, actor = policy.sampler, Actor(policy, ActorConfig(optim=OptimConfig(lr=0.01)))
    assert isinstance(sampler, VllmSampler)
    generations = policy.generate(LONG)
    assert policy.generate(LONG) == generations
    assert difference(policy, generations, LONG) < 1e-4
    for _ in range(2):
        update_once(actor, sampled_batch(policy))
        held, sampler._loaded = sampler._loaded, policy.weights_state()  # leave the reload out
        assert difference(policy, policy.generate(LONG), LONG) > 1e-3
        sampler._loaded = held
        generations = policy.generate(LONG)
        assert difference(policy, generations, LONG) < 1e-4
    assert {g.finish_reason for g in generations} <= {"stop", "length"}
    assert all(set(g.response_ids[:-1]).isdisjoint(policy.eos_ids) for g in generations)

    worker = sampler._worker
    assert worker is not None
    worker.process.kill()
    with pytest.raises(SamplerError, match=re.escape("killed by signal 9")):
        policy.generate(LONG)
