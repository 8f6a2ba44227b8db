"""Samplers in a separate process, with a worker that samples with transformers."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from creditflow._utils.progress import Reporter
from creditflow.config import ActorConfig, ActorModelConfig, Config, OptimConfig, load_recipe
from creditflow.engines.local.actor import Actor
from creditflow.engines.local.lora import Adapter
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.samplers import vllm
from creditflow.engines.local.samplers.process import SamplerError
from creditflow.engines.local.samplers.vllm import VllmSampler, attach_samplers
from creditflow.engines.local.trainer import train
from creditflow.errors import ConfigError, ModelError
from creditflow.rollout import Generation, GenerationRequest
from creditflow.runs.run_folder import read_metrics
from tests.engines.batches import sampled_batch, update_once
from tests.forks import fast_python
from tests.paths import TOY
from tests.rewards.processes import alive, until

WORKER = Path(__file__).parent / "transformers_worker.py"
REQUESTS = [GenerationRequest((1 + k, 2, 3), 9, (1.0, 0.6, 0.0, 1.4)[k % 4], (7, k)) for k in range(8)]


def sampler_of(**options: Any) -> VllmSampler:
    return VllmSampler("default", [fast_python(), str(WORKER)], {"max_model_len": 40, **options})


def difference(
    policy: Policy, generations: Sequence[Generation], requests: Sequence[GenerationRequest] = REQUESTS
) -> float:
    """The largest difference from log-probs that transformers computes of the same tokens, one row at a time."""
    worst = 0.0
    for asked, generation in zip(requests, generations, strict=True):
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*asked.prompt_ids, *generation.response_ids]])).logits[0]
        logprobs = torch.log_softmax(logits[len(asked.prompt_ids) - 1 : -1] / (asked.temperature or 1.0), -1)
        own = logprobs.gather(1, torch.tensor(generation.response_ids)[:, None]).squeeze(1)
        worst = max(worst, float((own - torch.tensor(generation.logprobs)).abs().max()))
    return worst


@pytest.fixture
def policy(word_model_folder: Path) -> Policy:
    return Policy.load(word_model_folder, torch.device("cpu"))


def test_worker_samples_from_the_current_weights(policy: Policy) -> None:
    policy.sampler = sampler = sampler_of()
    actor = Actor(policy, ActorConfig(optim=OptimConfig(lr=0.01)))
    generations = policy.generate(REQUESTS)
    assert policy.generate(REQUESTS) == generations
    assert difference(policy, generations) < 1e-4
    for update in (1, 2):
        update_once(actor, sampled_batch(policy))
        assert difference(policy, generations) > 1e-3  # of the weights before
        generations = policy.generate(REQUESTS)
        assert difference(policy, generations) < 1e-4
        assert sampler.reloads == update
    sampler.close()


def test_worker_alternates_between_a_policy_and_its_reference(policy: Policy) -> None:
    policy.sampler = sampler = sampler_of()
    actor = Actor(policy, ActorConfig(optim=OptimConfig(lr=0.01)), keep_reference=True)
    assert actor.reference is not None
    update_once(actor, sampled_batch(policy))
    for each in (policy, actor.reference, policy):
        assert difference(each, each.generate(REQUESTS)) < 1e-4
    assert sampler.reloads == 3
    sampler.close()


def test_worker_receives_merged_adapters(policy: Policy) -> None:
    adapter = Adapter.add(policy.model, "policy_0", 4, ActorModelConfig(), 0)
    adapted = policy.with_adapter(adapter)
    adapted.sampler = sampler = sampler_of()
    with torch.no_grad():
        for weight in adapted.parameters:
            weight.add_(0.1)
    before = {name: weight.clone() for name, weight in adapted.model.state_dict().items()}
    generations = adapted.generate(REQUESTS)
    assert difference(adapted, generations) < 1e-4
    reference = adapted.reference()
    plain = reference.generate(REQUESTS)
    assert difference(adapted, plain) > 1e-3
    with adapter.out_of_force():
        assert difference(reference, plain) < 1e-4
    assert all(torch.equal(weight, before[name]) for name, weight in adapted.model.state_dict().items())
    sampler.close()


def test_killed_worker_ends_with_advice_and_its_log(policy: Policy) -> None:
    policy.sampler = sampler_of(dies_at=2)
    policy.generate(REQUESTS)
    with pytest.raises(SamplerError, match=r"killed by signal 9; .*max_num_seqs.*(?s:.*)\| about to die"):
        policy.generate(REQUESTS)


def test_failed_call_reports_the_error_and_the_log(policy: Policy) -> None:
    policy.sampler = sampler = sampler_of(fails_at=1)
    with pytest.raises(SamplerError, match=r"ValueError: no such kernel\n(?s:.*)\| Traceback"):
        policy.generate(REQUESTS)
    assert len(policy.generate(REQUESTS)) == len(REQUESTS)
    sampler.close()


def test_worker_that_never_starts_times_out(policy: Policy) -> None:
    policy.sampler = VllmSampler(
        "default", [fast_python(), str(WORKER)], {"max_model_len": 40, "hangs": True}, timeout_s=0.01
    )
    with pytest.raises(SamplerError, match=r"not ready after 0\.01 s"):
        policy.generate(REQUESTS)


def test_request_beyond_the_context_is_rejected(policy: Policy) -> None:
    policy.sampler = sampler_of(max_model_len=11)
    with pytest.raises(ModelError, match=r"expected at most 11 tokens .*, got 12"):
        policy.generate(REQUESTS)


def test_worker_and_its_folder_end_with_a_killed_parent(word_model_folder: Path) -> None:
    code = f"""
import sys, torch
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.samplers.vllm import VllmSampler
policy = Policy.load({str(word_model_folder)!r}, torch.device("cpu"))
sampler = VllmSampler("default", [{fast_python()!r}, {str(WORKER)!r}], {{"max_model_len": 40}})
print(sampler.sync(policy).process.pid, sampler._folder.name, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().decode().split()
    assert alive(int(pid))
    parent.kill()
    parent.wait()
    until(lambda: not alive(int(pid)))
    assert not Path(folder).exists()


def test_run_with_a_worker_measures_its_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "WORKER", WORKER)
    monkeypatch.setattr(vllm, "find_python", lambda named: Path(fast_python()))
    monkeypatch.setattr(vllm, "expect_supported", lambda name, policy: None)
    recipe = load_recipe(
        TOY,
        [
            "actor_rollout_ref.rollout.name=vllm",
            "trainer.total_training_steps=2",
            "data.train_batch_size=2",
            "data.val_max_samples=2",
            "data.max_response_length=4",
            "actor_rollout_ref.rollout.n=2",
            f"trainer.default_local_dir={tmp_path / 'run'}",
        ],
    )
    rows = read_metrics(train(recipe, Reporter()).path)[1:]
    assert len(rows) == 2
    for row in rows:
        assert row["training/rollout_probs_diff_max"] < 1e-4
        assert row["rollout_corr/logprob_diff_max"] < 1e-4
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor_rollout_ref.rollout.engine_kwargs.vllm.python=/no/python"], "vllm.python: expected the Python of"),
        (["actor_rollout_ref.rollout.engine_kwargs.sglang.a=1"], "engine_kwargs: expected vllm, got sglang"),
        (["actor_rollout_ref.rollout.engine_kwargs.vllm.model=x"], "vllm.model: expected options that creditflow"),
        ([f"actor_rollout_ref.rollout.engine_kwargs.vllm.python={sys.executable}"], "which has none: build it with"),
    ],
)
def test_unusable_options_are_rejected_by_name(policy, overrides, message) -> None:
    recipe = load_recipe(TOY, ["actor_rollout_ref.rollout.name=vllm", *overrides])
    with pytest.raises(ConfigError, match=re.escape(message)):
        attach_samplers({"default": policy}, recipe.config)


def test_unsupported_head_size_is_rejected_by_name(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_python", lambda named: Path(fast_python()))
    with pytest.raises(ConfigError, match=r"from policy words on the CPU: .*, got 8; set .*name=local"):
        attach_samplers({"words": policy}, Config())
