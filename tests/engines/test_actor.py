import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from creditflow.config import ActorConfig, OptimConfig
from creditflow.engines.local.actor import Actor, fill_reference_logprobs, response_logprobs
from creditflow.engines.local.batching import bucket, pad
from creditflow.engines.local.loss import KL_ESTIMATORS, policy_loss, token_weights_for
from creditflow.engines.local.policy import Policy
from creditflow.rollout import GenerationRequest
from creditflow.trajectory import Step, Task, Trajectory, TrajectoryBatch


def sampled_batch(policy: Policy, n: int = 12, temperatures: tuple[float, ...] = (1.0,)) -> TrajectoryBatch:
    """n one-step trajectories with prompts and responses of many lengths."""
    rng = np.random.default_rng(0)
    requests = [
        GenerationRequest(
            tuple(rng.integers(1, 11, 2 + k % 5).tolist()), 3 + k % 7, temperatures[k % len(temperatures)], (k,)
        )
        for k in range(n)
    ]
    trajectories = []
    for k, (asked, generation) in enumerate(zip(requests, policy.generate(requests), strict=True)):
        step = Step(
            id=f"{k}/0", trajectory_id=str(k), index=0, agent="a", turn=0, parents=(), prompt="", response="",
            prompt_ids=asked.prompt_ids, response_ids=generation.response_ids,
            response_mask=(1,) * len(generation.response_ids), logprobs=generation.logprobs,
            temperature=asked.temperature,
        )  # fmt: skip
        trajectories.append(Trajectory(id=str(k), uid=str(k // 4), task=Task("t", (), None), steps=[step]))
    return TrajectoryBatch.from_trajectories(trajectories)


@pytest.fixture
def policy(word_model_folder: Path) -> Policy:
    return Policy.load(word_model_folder, torch.device("cpu"))


def test_training_forward_pass_gives_the_logprobs_of_sampling(policy: Policy) -> None:
    batch = sampled_batch(policy, temperatures=(1.0, 0.5, 1.3))
    rows = pad(batch, np.arange(batch.n_steps), policy.pad_id, policy.device)
    logprobs, _ = response_logprobs(policy, rows)
    difference = ((logprobs - rows.old_logprobs) * rows.response_mask).abs().max()
    assert difference < 1e-4


def test_buckets_hold_every_step_once_within_the_budget(policy: Policy) -> None:
    batch = sampled_batch(policy, 60)
    groups = bucket(batch, np.arange(60), max_tokens=50)
    assert sorted(np.concatenate(groups).tolist()) == list(range(60))
    for group in groups:
        padded = np.diff(batch.prompt_offsets)[group].max() + np.diff(batch.token_offsets)[group].max()
        assert len(group) == 1 or padded * len(group) <= 50


def slow_loss(
    policy: Policy,
    batch: TrajectoryBatch,
    advantage_T: np.ndarray,
    trained: np.ndarray,
    old: list[np.ndarray],
    mode: str,
) -> torch.Tensor:
    """One row at a time, in float64, straight from the definition."""
    per_step = []
    for s in np.flatnonzero(trained):
        prompt = batch.prompt_ids[batch.prompt_offsets[s] : batch.prompt_offsets[s + 1]]
        response = batch.response_ids[batch.token_offsets[s] : batch.token_offsets[s + 1]]
        ids = torch.tensor([[*prompt, *response]])
        logits = policy.model(ids).logits[0, len(prompt) - 1 : -1]
        logprob = torch.log_softmax(logits, -1)[torch.arange(len(response)), torch.tensor(response)]
        ratio = torch.exp(logprob - torch.tensor(old[s]))
        low, high = ratio.clamp(max=1.1), ratio.clamp(min=0.9)
        a = torch.from_numpy(advantage_T[batch.token_offsets[s] : batch.token_offsets[s + 1]])
        per_step.append(-torch.minimum(a * ratio, a * torch.where(a > 0, low, high)))
    if mode == "token-mean":
        return torch.cat(per_step).mean()
    if mode == "seq-mean-token-mean":
        return torch.stack([tokens.mean() for tokens in per_step]).mean()
    return torch.stack([tokens.sum() for tokens in per_step]).mean()


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("budget", [20, 10_000])
def test_gradient_equals_that_of_a_slow_loss_one_row_at_a_time(policy: Policy, mode: str, budget: int) -> None:
    policy.model.double()
    batch = sampled_batch(policy)
    rng = np.random.default_rng(1)
    advantage, trained = rng.normal(size=len(batch.response_ids)), rng.random(batch.n_steps) < 0.8
    # As if another policy had sampled, so that the clip is active on both sides.
    off = rng.normal(scale=0.2, size=len(batch.logprobs))
    batch.logprobs[:] += off
    old = [batch.logprobs[batch.token_offsets[s] : batch.token_offsets[s + 1]] for s in range(batch.n_steps)]

    slow = copy.deepcopy(policy.model)
    slow_policy = copy.copy(policy)
    slow_policy.model = slow
    slow_loss(slow_policy, batch, advantage, trained, old, mode).backward()

    config = ActorConfig(
        optim=OptimConfig(lr=1e-12), clip_ratio=0.1, loss_agg_mode=mode, ppo_max_token_len_per_gpu=budget, grad_clip=1e9
    )
    Actor(policy, config).update(batch, advantage, trained, np.zeros(batch.n_steps, dtype=np.int64))
    for (name, ours), theirs in zip(policy.model.named_parameters(), slow.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)  # log-softmax is float32


def test_masked_steps_leave_the_loss_and_its_denominator(policy: Policy) -> None:
    weights = token_weights_for("seq-mean-token-mean", torch.tensor([4, 0, 2]))
    torch.testing.assert_close(weights, torch.tensor([1 / 8, 0.0, 1 / 4], dtype=torch.float64))


def test_clipping_stops_the_gradient_only_where_the_ratio_moved_too_far_already() -> None:
    logprob = torch.log(torch.tensor([[1.5, 1.5, 0.5, 0.5]])).requires_grad_()
    advantage = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    loss, clipped = policy_loss(logprob, torch.zeros(1, 4), advantage, torch.full((1, 4), 0.25), 0.2, 0.2)
    loss.backward()
    assert logprob.grad is not None
    assert (logprob.grad[0] == 0).tolist() == [True, False, False, True]
    assert clipped.tolist() == [[True, False, False, True]]


def test_kl_estimators_agree_with_their_definitions() -> None:
    logprob, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    ratio = torch.exp(reference - logprob)
    expected = {
        "kl": logprob - reference,
        "abs": (logprob - reference).abs(),
        "mse": (logprob - reference) ** 2 / 2,
        "low_var_kl": ratio - 1 - (reference - logprob),
    }
    for name, value in expected.items():
        torch.testing.assert_close(KL_ESTIMATORS[name](logprob - reference), value)


def test_kl_loss_pulls_the_policy_back_to_its_reference(policy: Policy) -> None:
    batch = sampled_batch(policy)
    config = ActorConfig(optim=OptimConfig(lr=1e-2, weight_decay=0.0), use_kl_loss=True, kl_loss_coef=10.0)
    actor = Actor(policy, config)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    zero, every = np.zeros(len(batch.response_ids)), np.ones(batch.n_steps, dtype=np.bool_)
    one = np.zeros(batch.n_steps, dtype=np.int64)
    first = actor.update(batch, zero, every, one)["actor/kl_loss"]
    for _ in range(10):
        last = actor.update(batch, zero, every, one)["actor/kl_loss"]
    assert last < 0.5 * first


def far_from_reference(policy: Policy, config: ActorConfig, **options: bool) -> Actor:
    """An actor whose policy has moved since its reference was taken."""
    actor = Actor(policy, config, **options)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return actor


def test_reference_logprobs_are_those_of_one_step_at_a_time_at_its_temperature(policy: Policy) -> None:
    first = copy.deepcopy(policy.model)
    actor = far_from_reference(policy, ActorConfig(), keep_reference=True)
    assert actor.reference is not None
    played = sampled_batch(policy, temperatures=(1.0, 0.0, 0.6)).to_trajectories()
    played[1].steps[0].response_mask = (0,) * len(played[1].steps[0].response_ids)
    played[5].status = "failed"
    fill_reference_logprobs(actor.reference, played, max_tokens=40)
    for k, trajectory in enumerate(played):
        [step] = trajectory.steps
        if k == 5:
            assert step.ref_logprobs == ()
            continue
        expected = []
        for j, token in enumerate(step.response_ids):
            with torch.no_grad():
                logits = first(torch.tensor([[*step.prompt_ids, *step.response_ids[:j]]])).logits[0, -1]
            scaled = logits / (step.temperature or 1.0)
            expected.append(float(scaled[token] - torch.logsumexp(scaled, 0)))
        np.testing.assert_allclose(step.ref_logprobs, expected, atol=1e-5)


def test_a_reference_that_only_reward_functions_need_is_no_part_of_the_loss(policy: Policy) -> None:
    batch = sampled_batch(policy)
    every, one = np.ones(batch.n_steps, dtype=np.bool_), np.zeros(batch.n_steps, dtype=np.int64)
    actor = far_from_reference(policy, ActorConfig(kl_loss_coef=10.0), keep_reference=True)
    metrics = actor.update(batch, np.zeros(len(batch.response_ids)), every, one)
    assert metrics["actor/grad_norm"] == 0
    assert "actor/kl_loss" not in metrics


def test_nothing_is_kept_of_a_policy_whose_reference_nobody_needs(policy: Policy) -> None:
    assert Actor(policy, ActorConfig()).reference is None


def test_warm_up_raises_the_learning_rate_linearly(policy: Policy) -> None:
    batch = sampled_batch(policy)
    actor = Actor(policy, ActorConfig(optim=OptimConfig(lr=1e-3, lr_warmup_steps=4)))
    every, one = np.ones(batch.n_steps, dtype=np.bool_), np.zeros(batch.n_steps, dtype=np.int64)
    rates = [actor.update(batch, np.ones(len(batch.response_ids)), every, one)["actor/lr"] for _ in range(6)]
    assert rates == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3, 1e-3])


def test_a_cosine_schedule_ends_at_zero_with_the_last_update_of_the_run(policy: Policy) -> None:
    batch = sampled_batch(policy)
    optim = OptimConfig(lr=1e-3, lr_warmup_steps=1, lr_scheduler_type="cosine")
    actor = Actor(policy, ActorConfig(optim=optim), total_updates=5)
    every, one = np.ones(batch.n_steps, dtype=np.bool_), np.zeros(batch.n_steps, dtype=np.int64)
    rates = [actor.update(batch, np.ones(len(batch.response_ids)), every, one)["actor/lr"] for _ in range(5)]
    expected = [5e-4, *(1e-3 * (1 + np.cos(np.pi * k / 4)) / 2 for k in range(4))]
    assert rates == pytest.approx(expected)


def test_a_non_finite_gradient_skips_the_update_and_is_counted(policy: Policy) -> None:
    batch = sampled_batch(policy)
    before = copy.deepcopy(policy.model.state_dict())
    advantage = np.full(len(batch.response_ids), np.inf)
    every, one = np.ones(batch.n_steps, dtype=np.bool_), np.zeros(batch.n_steps, dtype=np.int64)
    metrics = Actor(policy, ActorConfig()).update(batch, advantage, every, one)
    assert metrics["actor/skipped_updates"] == 1
    for name, value in policy.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_batch_with_nothing_to_train_on_changes_nothing(policy: Policy) -> None:
    batch = sampled_batch(policy)
    before = copy.deepcopy(policy.model.state_dict())
    none, one = np.zeros(batch.n_steps, dtype=np.bool_), np.zeros(batch.n_steps, dtype=np.int64)
    assert Actor(policy, ActorConfig()).update(batch, np.ones(len(batch.response_ids)), none, one) == {}
    for name, value in policy.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_what_masked_steps_and_masked_tokens_say_changes_no_gradient(policy: Policy) -> None:
    batch = sampled_batch(policy)
    rng = np.random.default_rng(2)
    advantage, trained = rng.normal(size=len(batch.response_ids)), np.arange(batch.n_steps) % 3 > 0
    last_of_step = batch.token_offsets[1:] - 1  # as if a tool had written it
    batch.response_mask[last_of_step] = False

    def gradients(changed: TrajectoryBatch) -> list[torch.Tensor]:
        fresh = copy.copy(policy)
        fresh.model = copy.deepcopy(policy.model)
        actor = Actor(fresh, ActorConfig(optim=OptimConfig(lr=1e-12), grad_clip=1e9))
        actor.update(changed, advantage, trained, np.zeros(batch.n_steps, dtype=np.int64))
        return [parameter.grad for parameter in fresh.model.parameters() if parameter.grad is not None]

    before = gradients(batch)
    for s in np.flatnonzero(~trained):
        batch.response_ids[batch.token_offsets[s] : batch.token_offsets[s + 1]] = 5
    batch.response_ids[last_of_step] = 7
    batch.logprobs[last_of_step] = -9.0
    for one, other in zip(before, gradients(batch), strict=True):
        torch.testing.assert_close(one, other)
