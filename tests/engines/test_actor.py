import copy
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from creditflow.config import LOSS_AGG_MODES, ActorConfig, OptimConfig
from creditflow.config.sections import KLLossType
from creditflow.data import TrajectoryBatch
from creditflow.engines.local import actor as actors
from creditflow.engines.local.actor import Actor, fill_reference_logprobs
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.loss import KL_ESTIMATORS, Clip, policy_loss, token_weights
from creditflow.engines.local.policy import Policy
from tests.engines.batches import gradient_error, gradients, sampled_batch, several_steps, update_once


@pytest.fixture
def policy(word_model_folder: Path) -> Policy:
    return Policy.load(word_model_folder, torch.device("cpu"))


def copied(policy: Policy, packed: bool = True) -> Policy:
    """The policy with a copy of its model."""
    fresh = copy.copy(policy)
    fresh.model = copy.deepcopy(policy.model)
    fresh.forward = Forward(fresh.model, packed)
    return fresh


def slow_losses(policy: Policy, batch: TrajectoryBatch, advantage_T: np.ndarray, config: ActorConfig, reference: Any):
    """Yield each step's token losses, one row at a time, computed from the definitions in the model's dtype."""
    for s in range(batch.n_steps):
        tokens = slice(batch.token_offsets[s], batch.token_offsets[s + 1])
        prompt = batch.prompt_ids[batch.prompt_offsets[s] : batch.prompt_offsets[s + 1]]
        response = torch.tensor(batch.response_ids[tokens], dtype=torch.long)
        ids = torch.tensor([[*prompt, *response]])
        T = batch.temperature_of_step[s] or 1.0
        all_logprobs = torch.log_softmax(policy.model(ids).logits[0, len(prompt) - 1 : -1] / T, -1)
        logprob = all_logprobs[torch.arange(len(response)), response]
        with torch.no_grad():
            ref_logprobs = torch.log_softmax(reference(ids).logits[0, len(prompt) - 1 : -1] / T, -1)
            ref = ref_logprobs[torch.arange(len(response)), response]
        losses = []
        for t in range(len(response)):
            a, ratio = advantage_T[tokens][t], torch.exp(logprob[t] - batch.logprobs[tokens][t])
            surrogate = torch.minimum(
                a * ratio, a * torch.clamp(ratio, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
            )
            if a < 0:
                surrogate = torch.maximum(surrogate, torch.tensor(config.clip_ratio_c * a))
            gap = ref[t] - logprob[t]
            kl = {"k1": -gap, "k2": gap**2 / 2, "k3": torch.exp(gap) - 1 - gap}[config.kl_loss_type]
            entropy = -(all_logprobs[t].exp() * all_logprobs[t]).sum()
            losses.append(-surrogate + config.kl_loss_coef * kl - config.entropy_coeff * entropy)
        yield torch.stack(losses)[torch.tensor(batch.response_mask[tokens])]


def norm_in_full_precision(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The norm of transformers' models, which compute it in float32 even where the weights are float64."""
    return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)


def slow_mean(per_step: list[torch.Tensor], trajectory_of: list[int], config: ActorConfig) -> torch.Tensor:
    """Average step losses by the definition of each mode."""
    means, sums = ([step.mean() for step in per_step], [step.sum() for step in per_step])
    trajectories = [
        [m for m, n in zip(means, trajectory_of, strict=True) if n == trajectory]
        for trajectory in sorted(set(trajectory_of))
    ]
    return {
        "token-mean": lambda: torch.cat(per_step).mean(),
        "seq-mean-token-mean": lambda: torch.stack(means).mean(),
        "seq-mean-token-sum": lambda: torch.stack(sums).mean(),
        "seq-mean-token-sum-norm": lambda: torch.stack(sums).mean() / 7.0,
        "traj-mean-step-mean": lambda: torch.stack(
            [torch.stack(trajectory).mean() for trajectory in trajectories]
        ).mean(),
    }[config.loss_agg_mode]()


TERMS = [
    *((mode, "k3", False, 0.0) for mode in LOSS_AGG_MODES),
    *(("token-mean", kl, True, 0.0) for kl in ("k1", "k2", "k3")),
    ("seq-mean-token-mean", "k3", True, 0.01),
    ("token-mean", "k3", False, 0.01),
]
PASSES = [(packed, at_once, budget) for packed, at_once in ((True, 1 << 25), (True, 100), (False, 1 << 25))
          for budget in (20, 10_000)]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "kl", "use_kl", "entropy", "packed", "at_once", "budget"),
    [*((*terms, *PASSES[2]) for terms in TERMS), *((*TERMS[-2], *a_pass) for a_pass in PASSES if a_pass != PASSES[2])],
)
def test_loss_and_gradient_match_single_rows(
    policy, mode, kl, use_kl, entropy, budget, packed, at_once, monkeypatch
) -> None:
    monkeypatch.setattr(actors, "_LOGITS", at_once)
    for norm in {type(part) for part in policy.model.modules() if type(part).__name__.endswith("RMSNorm")}:
        monkeypatch.setattr(norm, "forward", norm_in_full_precision)
    policy.model.double()
    policy.forward = Forward(policy.model, packed)
    batch = several_steps(sampled_batch(policy, 15, temperatures=(1.0, 0.7)))
    rng = np.random.default_rng(1)
    advantage, trained = rng.normal(size=len(batch.response_ids)), rng.random(batch.n_steps) < 0.8
    advantage[np.repeat(np.arange(batch.n_steps), np.diff(batch.token_offsets)) == 3] = 0.0  # a whole step
    # Log-probs of another policy, so that all three bounds are active.
    batch.logprobs[:] += rng.normal(scale=0.8, size=len(batch.logprobs))
    batch.response_mask[rng.random(len(batch.response_mask)) < 0.2] = False
    config = ActorConfig(
        optim=OptimConfig(lr=1e-12), clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0, loss_agg_mode=mode,
        loss_scale_factor=7, ppo_max_token_len_per_gpu=budget, grad_clip=1e9, use_kl_loss=use_kl, kl_loss_type=kl,
        kl_loss_coef=0.3, entropy_coeff=entropy,
    )  # fmt: skip
    actor = Actor(policy, config)
    with torch.no_grad():  # the policy must differ from its reference
        for weight in policy.model.parameters():
            weight.add_(0.02 * torch.from_numpy(rng.normal(size=tuple(weight.shape))))
    slow = copied(policy)
    effective = config.model_copy(update={"kl_loss_coef": config.kl_loss_coef if use_kl else 0.0})
    reference = actor.reference.model if actor.reference else policy.model
    rows = list(slow_losses(slow, batch, advantage, effective, reference))
    kept = [s for s in range(batch.n_steps) if trained[s] and len(rows[s])]
    expected = slow_mean([rows[s] for s in kept], batch.trajectory_of_step[kept].tolist(), effective)
    expected.backward()

    metrics = update_once(actor, batch, advantage, trained)
    assert metrics["actor/pg_clipfrac"] > 0.1
    assert metrics["actor/pg_clipfrac_lower"] > 0
    loss = metrics["actor/pg_loss"] + effective.kl_loss_coef * metrics.get("actor/kl_loss", 0.0)
    if not entropy:
        assert loss == pytest.approx(expected.item(), rel=1e-8)
    assert gradient_error(policy.model, slow.model) < 1e-8


def test_masked_steps_do_not_count_in_the_denominator() -> None:
    weights = token_weights("seq-mean-token-mean", np.array([4, 0, 2]), np.zeros(3, dtype=np.int64))
    np.testing.assert_allclose(weights, [1 / 8, 0.0, 1 / 4])


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo"])
def test_policy_losses_equal_those_of_verl(mode: str) -> None:
    algorithms = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.workers.config import ActorConfig as VerlConfig

    rng = np.random.default_rng(0)
    old, advantage = (torch.from_numpy(rng.normal(size=(6, 9))) for _ in range(2))
    old = -old.abs()
    ours, theirs = ((old + 0.4 * torch.from_numpy(rng.normal(size=(6, 9)))).requires_grad_() for _ in range(2))
    with torch.no_grad():
        theirs.copy_(ours)
    mask = torch.from_numpy(rng.random((6, 9)) < 0.7)
    mask[:, 0] = True
    config = VerlConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.1, clip_ratio_high=0.3,
        clip_ratio_c=1.5,
    )  # fmt: skip
    expected, measured = algorithms.get_policy_loss_fn(mode)(
        old, theirs, advantage, mask.double(), "seq-mean-token-mean", config
    )
    rows = torch.arange(6).repeat_interleave(9)  # the tokens of tools are masked
    token_loss, clipped, bounded = policy_loss(
        ours.flatten(), old.flatten(), advantage.flatten(), Clip(0.1, 0.3, 1.5), mode, (rows, mask.flatten().double())
    )
    weight = mask.flatten() / mask.sum(1).double()[rows] / 6
    loss = (token_loss * weight).sum()
    loss.backward()
    expected.backward()
    # verl adds 1e-8 to the number of tokens that it divides by.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-8)
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-8, atol=1e-12)
    for found, name in ((clipped, "actor/pg_clipfrac"), (bounded, "actor/pg_clipfrac_lower")):
        assert found[mask.flatten()].double().mean().item() == pytest.approx(measured[name])
    assert 0.1 < measured["actor/pg_clipfrac"] < 0.9


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mode", ["gspo", "cispo"])
def test_micro_batches_do_not_change_a_policy_loss(policy: Policy, mode: str, packed: bool) -> None:
    policy.model.double()
    batch = sampled_batch(policy, 9)
    rng = np.random.default_rng(2)
    batch.logprobs[:] += rng.normal(scale=0.3, size=len(batch.logprobs))
    batch.response_mask[rng.random(len(batch.response_mask)) < 0.2] = False
    advantage, losses, models = rng.normal(size=len(batch.response_ids)), [], []
    for budget in (20, 10_000):
        limits = {"grad_clip": 1e9, "ppo_max_token_len_per_gpu": budget}
        config = ActorConfig(optim=OptimConfig(lr=1e-12), policy_loss={"loss_mode": mode}, **limits)
        fresh = copied(policy, packed)
        losses.append(update_once(Actor(fresh, config), batch, advantage)["actor/pg_loss"])
        models.append(fresh.model)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert gradient_error(*models) < 1e-6


def test_kl_estimators_agree_with_their_definitions() -> None:
    logprob, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    ratio = torch.exp(reference - logprob)
    expected = {
        "k1": logprob - reference,
        "abs": (logprob - reference).abs(),
        "k2": (logprob - reference) ** 2 / 2,
        "k3": ratio - 1 - (reference - logprob),
    }
    expected |= {"kl": expected["k1"], "mse": expected["k2"], "low_var_kl": expected["k3"]}
    assert expected.keys() == set(get_args(KLLossType)) == KL_ESTIMATORS.keys()
    for name, value in expected.items():
        torch.testing.assert_close(KL_ESTIMATORS[name](logprob - reference), value)


def far_from_reference(policy: Policy, config: ActorConfig, **options: bool) -> Actor:
    """An actor with a policy that differs from its reference."""
    actor = Actor(policy, config, **options)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return actor


def test_reference_logprobs_match_single_steps(policy: Policy) -> None:
    first = copy.deepcopy(policy.model)
    actor = far_from_reference(policy, ActorConfig(), keep_reference=True)
    assert actor.reference is not None
    trajectories = sampled_batch(policy, temperatures=(1.0, 0.0, 0.6)).to_trajectories()
    trajectories[1].steps[0].response_mask = (0,) * len(trajectories[1].steps[0].response_ids)
    trajectories[5].status = "failed"
    fill_reference_logprobs({"default": actor.reference}, trajectories, max_tokens=40)
    for k, trajectory in enumerate(trajectories):
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


def test_reference_for_rewards_does_not_change_the_loss(policy: Policy) -> None:
    batch = sampled_batch(policy)
    actor = far_from_reference(policy, ActorConfig(kl_loss_coef=10.0), keep_reference=True)
    metrics = update_once(actor, batch, np.zeros(len(batch.response_ids)))
    assert metrics["actor/grad_norm"] == 0
    assert "actor/kl_loss" not in metrics
    assert Actor(policy, ActorConfig()).reference is None


@pytest.mark.parametrize(
    ("optim", "rates"),
    [
        ({"lr_warmup_steps": 4}, [2e-4, 4e-4, 6e-4, 8e-4, 1e-3, 1e-3]),
        (
            {"lr_warmup_steps": 1, "lr_scheduler_type": "cosine"},
            [5e-4, *(1e-3 * (1 + np.cos(np.pi * k / 4)) / 2 for k in range(4))],
        ),
    ],
)
def test_learning_rate_follows_its_schedule(policy: Policy, optim, rates) -> None:
    batch, config = sampled_batch(policy), ActorConfig(optim=OptimConfig(lr=1e-3, **optim))
    actor, one_T = Actor(policy, config, (5, 1)), np.ones(len(batch.response_ids))
    assert [update_once(actor, batch, one_T)["actor/lr"] for _ in rates] == pytest.approx(rates)


@pytest.mark.parametrize("updates", [1, 2])
def test_learning_rate_follows_training_steps(policy: Policy, updates) -> None:
    """With `filter_groups`, a training step may have one update where a whole batch has two."""
    batch = sampled_batch(policy)
    config = ActorConfig(optim=OptimConfig(lr=1e-3, lr_scheduler_type="cosine"))
    actor, one_T = Actor(policy, config, (4, 2)), np.ones(len(batch.response_ids))
    every_S, mini_batch_of_step = np.ones(batch.n_steps, dtype=np.bool_), np.arange(batch.n_steps) % updates
    rates = [actor.update(batch, one_T, every_S, mini_batch_of_step)["actor/lr"] for _ in range(4)]
    at = (np.arange(4)[:, None] + np.arange(updates) / updates) / 4
    assert rates == pytest.approx((1e-3 * (1 + np.cos(np.pi * at)) / 2).mean(1))


@pytest.mark.parametrize(("value", "trains", "skipped"), [(np.inf, True, 1), (1.0, False, None)])
def test_update_without_a_usable_gradient_changes_nothing(policy: Policy, value, trains, skipped) -> None:
    batch, before = sampled_batch(policy), copy.deepcopy(policy.model.state_dict())
    trained_S = np.full(batch.n_steps, trains)
    metrics = update_once(Actor(policy, ActorConfig()), batch, np.full(len(batch.response_ids), value), trained_S)
    assert metrics.get("actor/skipped_updates") == skipped
    assert bool(metrics) == trains
    for name, weight in policy.model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_skipped_steps_do_not_change_the_update(policy: Policy) -> None:
    """A KL term of weight 0 makes every step computed; without it, steps without an advantage are skipped.

    The second update has no advantage at all: AdamW's momentum and decay act in it as for a computed gradient of 0.
    """
    batch = sampled_batch(policy)
    step_of_token = np.repeat(np.arange(batch.n_steps), np.diff(batch.token_offsets))
    all_T = np.ones(len(batch.response_ids))
    some_T = np.where(step_of_token % 3 == 0, all_T, 0.0)
    before = copy.deepcopy(policy.model.state_dict())
    gradients_of, weights, metrics = [], [], []
    for use_kl_loss in (False, True):
        policy.model.load_state_dict(before)
        optim = OptimConfig(lr=1e-2, weight_decay=0.1)
        actor = Actor(policy, ActorConfig(optim=optim, use_kl_loss=use_kl_loss, kl_loss_coef=0.0))
        metrics.append([update_once(actor, batch, advantage_T) for advantage_T in (all_T, 0 * all_T)])
        weights.append(copy.deepcopy(policy.model.state_dict()))
        metrics[-1].append(update_once(actor, batch, some_T))
        gradients_of.append(gradients(policy.model).clone())

    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
    torch.testing.assert_close(*gradients_of, atol=1e-6, rtol=1e-4)
    lengths_S = np.diff(batch.prompt_offsets) + np.diff(batch.token_offsets)
    third, whole = lengths_S[::3].sum(), lengths_S.sum()
    assert [row["actor/tokens"] for row in metrics[0]] == [whole, 0, third]
    assert [row["actor/tokens"] for row in metrics[1]] == [whole] * 3
    for rows in metrics:
        assert [row["actor/tied_updates"] for row in rows] == [0, 1, 0]
        assert rows[1]["actor/grad_norm"] == 0
        assert rows[2]["actor/pg_loss"] == pytest.approx(metrics[0][2]["actor/pg_loss"], rel=1e-5)
