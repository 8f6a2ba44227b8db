from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from creditflow.config import ActorConfig, ActorModelConfig, OptimConfig
from creditflow.engines.local.actor import Actor, token_logprobs
from creditflow.engines.local.lora import Adapter
from creditflow.engines.local.packing import micro_batches
from creditflow.engines.local.policy import Policy
from creditflow.errors import ConfigError, ModelError
from creditflow.rollout import GenerationRequest
from tests.engines.batches import sampled_batch, update_once

CPU = torch.device("cpu")


def policies(folder: Path, names: str, **config) -> list[Policy]:
    """Policies with separate adapters over one base, one per letter of `names`."""
    base, adapted, model = Policy.load(folder, CPU), [], None
    for seed, name in enumerate(names):
        adapter = Adapter.add(model or base.model, f"policy_{name}", 4, ActorModelConfig(**config), seed)
        model = adapter.model
        adapted.append(base.with_adapter(adapter))
    return adapted


def update(policy: Policy, batch, lr: float = 0.01, **config) -> dict[str, float]:
    return update_once(Actor(policy, ActorConfig(optim=OptimConfig(lr=lr), **config)), batch)


def logprobs(policy: Policy, batch) -> torch.Tensor:
    (packed,) = micro_batches(batch, np.arange(batch.n_steps), 10_000)
    with torch.no_grad():
        return token_logprobs(policy.forward, packed, batch)[0][torch.from_numpy(np.argsort(packed.token_at))]


def test_adapter_training_changes_only_its_policy(word_model_folder) -> None:
    plain = Policy.load(word_model_folder, CPU)
    batch = sampled_batch(plain)
    a, b = policies(word_model_folder, "ab")
    before = logprobs(plain, batch)
    for policy in (a, b):
        torch.testing.assert_close(logprobs(policy, batch), before, atol=0, rtol=0)
    assert len(a.parameters) == 2 * 2 * 7  # two matrices for each of seven linear modules in each of two layers
    weights = {name: weight.clone() for name, weight in a.model.named_parameters() if "lora" not in name}

    assert all(update(a, batch, lr=0.05)["actor/grad_norm"] > 0 for _ in range(5))
    assert (logprobs(a, batch) - before).abs().max() > 1e-3
    torch.testing.assert_close(logprobs(b, batch), before, atol=0, rtol=0)
    assert all(torch.equal(weight, dict(a.model.named_parameters())[name]) for name, weight in weights.items())
    torch.testing.assert_close(logprobs(a.reference(), batch), before, atol=0, rtol=0)
    own, fresh = sampled_batch(a), sampled_batch(b)
    for policy, samples in ((a, own), (b, fresh)):
        np.testing.assert_allclose(logprobs(policy, samples), samples.logprobs, atol=1e-5)
    assert not np.array_equal(own.response_ids, fresh.response_ids)


def test_kl_loss_with_an_adapter_needs_one_model(word_model_folder) -> None:
    batch = sampled_batch(Policy.load(word_model_folder, CPU))
    (a,) = policies(word_model_folder, "a")
    assert update(a, batch, use_kl_loss=True)["actor/kl_loss"] == 0
    actor = Actor(a, ActorConfig(use_kl_loss=True))
    assert actor.reference is not None
    assert actor.reference.model is a.model
    assert update(a, batch, use_kl_loss=True, kl_loss_coef=1.0)["actor/kl_loss"] > 0


def test_adapter_gradients_match_the_chain_rule(word_model_folder) -> None:
    """Gradients of A and B in W + BA follow from the full gradient of W."""
    batch = sampled_batch(Policy.load(word_model_folder, CPU))
    (a,) = policies(word_model_folder, "a", target_modules=["q_proj"], layers_to_transform=[1])
    a.model.double()
    A, B = a.parameters
    with torch.no_grad():
        B.normal_(std=0.1)
    full = Policy.load(word_model_folder, CPU)
    full.model.double()
    scale = 16 / 4
    weight = full.model.get_parameter("model.layers.1.self_attn.q_proj.weight")
    with torch.no_grad():
        weight.add_(scale * B @ A)
    update(a, batch, lr=1e-12, grad_clip=1e9)
    update(full, batch, lr=1e-12, grad_clip=1e9)
    assert weight.grad is not None
    torch.testing.assert_close(A.grad, scale * B.T @ weight.grad, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(B.grad, scale * weight.grad @ A.T, rtol=1e-8, atol=1e-12)


def test_saved_adapter_loads_in_peft_and_here(word_model_folder, tmp_path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    batch = sampled_batch(Policy.load(word_model_folder, CPU))
    a, b = policies(word_model_folder, "ab")
    update(a, batch)
    (tmp_path / "a").mkdir()
    a.save(tmp_path / "a")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(word_model_folder), tmp_path / "a").eval()
    ids = torch.tensor([[1, 2, 3, 4]])
    with a.forward.in_force():
        expected = a.model(ids).logits
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=0, atol=1e-6)
    assert b.adapter is not None
    b.adapter.load(tmp_path / "a")
    torch.testing.assert_close(logprobs(b, batch), logprobs(a, batch), rtol=0, atol=0)


def test_weights_of_another_adapter_are_rejected(word_model_folder, tmp_path) -> None:
    (a,) = policies(word_model_folder, "a")
    a.save(tmp_path)
    (b,) = policies(word_model_folder, "b", target_modules=["q_proj"])
    assert b.adapter is not None
    with pytest.raises(ModelError, match="holds another adapter"):
        b.adapter.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"target_modules": ["query"]}, r"model.target_modules: .*linear modules .*q_proj"),
        ({"target_modules": ["q_proj", "qq_proj"]}, "model.target_modules: no module is named qq_proj; the model has"),
        ({"layers_to_transform": [0, 99]}, r"model.layers_to_transform: there is no layer 99"),
        ({"layers_to_transform": [2]}, r"model.layers_to_transform: .*the model has 2 layers"),
    ],
)
def test_unknown_modules_and_layers_are_rejected(word_model_folder, config, message) -> None:
    with pytest.raises(ConfigError, match=message):
        policies(word_model_folder, "a", **config)


def test_policies_of_one_base_generate_in_two_threads(word_model_folder) -> None:
    both = policies(word_model_folder, "ab")
    update(both[0], sampled_batch(both[0]))
    requests = [GenerationRequest((1 + k % 9, 2, 3), 20, 1.0, (k,)) for k in range(40)]
    alone = [policy.generate(requests) for policy in both]
    assert alone[0] != alone[1]

    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(lambda policy: [policy.generate(requests) for _ in range(5)], both))

    assert together == [[answers] * 5 for answers in alone]
