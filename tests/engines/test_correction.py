"""The correction for a sampler whose log-probs differ from the actor's, against loops over tokens."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from creditflow.config import ActorConfig, OptimConfig, load_recipe
from creditflow.data import TrajectoryBatch
from creditflow.engines.local.actor import Actor
from creditflow.engines.local.correction import RolloutCorrection
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.policy import Policy
from tests.engines.batches import gradient_error, sampled_batch, update_once
from tests.paths import TOY


@pytest.fixture
def policy(word_model_folder: Path) -> Policy:
    policy = Policy.load(word_model_folder, torch.device("cpu"))
    policy.model.double()
    policy.forward = Forward(policy.model, True)
    return policy


def row_logprobs(policy: Policy, batch: TrajectoryBatch, s: int) -> torch.Tensor:
    """The log-probs of a step's response, from a pass over its row alone."""
    prompt = batch.prompt_ids[batch.prompt_offsets[s] : batch.prompt_offsets[s + 1]]
    response = torch.tensor(batch.response_ids[batch.token_offsets[s] : batch.token_offsets[s + 1]], dtype=torch.long)
    logits = policy.model(torch.tensor([[*prompt.tolist(), *response.tolist()]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / batch.temperature_of_step[s], -1)[torch.arange(len(response)), response]


@pytest.mark.parametrize("level", ["token", "sequence", None])
def test_gradient_and_metrics_match_loops_over_tokens(policy: Policy, level) -> None:
    batch = sampled_batch(policy, 12, temperatures=(1.0, 0.7))
    rng = np.random.default_rng(0)
    batch.logprobs[:] += rng.normal(scale=0.6, size=len(batch.logprobs))  # another sampler
    batch.response_mask[rng.random(len(batch.response_mask)) < 0.2] = False
    advantage_T, trained_S = rng.normal(size=len(batch.logprobs)), np.arange(batch.n_steps) != 3
    slow = copy.copy(policy)
    slow.model = copy.deepcopy(policy.model)

    losses, weights, log_ratios, differences = [], [], [], []
    for s in np.flatnonzero(trained_S):
        tokens = range(batch.token_offsets[s], batch.token_offsets[s + 1])
        logprobs = row_logprobs(slow, batch, s)
        kept = [(i, t) for i, t in enumerate(tokens) if batch.response_mask[t]]
        of_row = sum(logprobs[i].item() - batch.logprobs[t] for i, t in kept)
        for i, t in kept:
            old = logprobs[i].item()
            ratio = old - batch.logprobs[t]
            weight = 1.0 if level is None else min(2.0, math.exp(of_row if level == "sequence" else ratio))
            # At the old policy the clipped surrogate is the ratio times the advantage.
            losses.append(-weight * advantage_T[t] * torch.exp(logprobs[i] - old))
            weights.append(weight)
            log_ratios.append(ratio)
            differences.append(abs(math.exp(old) - math.exp(batch.logprobs[t])))
    torch.stack(losses).mean().backward()

    actor = Actor(policy, ActorConfig(optim=OptimConfig(lr=1e-12), grad_clip=1e9, ppo_max_token_len_per_gpu=40))
    recorded = batch.logprobs.copy()
    corrected, weighted_T, metrics = RolloutCorrection(level, 2.0).apply(actor, batch, advantage_T, trained_S)
    np.testing.assert_array_equal(batch.logprobs, recorded)
    measured = update_once(actor, corrected, weighted_T, trained_S)
    assert gradient_error(policy.model, slow.model) < 1e-8
    assert measured["actor/ppo_kl"] == pytest.approx(0, abs=1e-9)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(np.mean(differences))
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(max(differences))
    assert metrics["rollout_corr/kl"] == pytest.approx(-np.mean(log_ratios))
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(np.mean([math.exp(r) - r - 1 for r in log_ratios]))
    if level is None:
        assert "rollout_corr/rollout_is_mean" not in metrics
    else:
        assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(np.mean(weights))
        assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(
            sum(weights) ** 2 / len(weights) / sum(w * w for w in weights)
        )
        assert max(weights) == 2.0
        assert 0 < metrics["rollout_corr/rollout_is_ratio_fraction_high"] < 1


@pytest.mark.parametrize(
    ("overrides", "level"),
    [
        ([], "absent"),
        (["algorithm.rollout_correction.rollout_is=sequence"], "sequence"),
        (["actor_rollout_ref.rollout.name=vllm"], "token"),
        (["actor_rollout_ref.rollout.name=vllm", "algorithm.rollout_correction.rollout_is=null"], None),
    ],
)
def test_sampler_decides_the_default(overrides, level) -> None:
    correction = RolloutCorrection.from_config(load_recipe(TOY, overrides).config)
    assert ("absent" if correction is None else correction.level) == level
