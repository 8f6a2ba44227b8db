"""Sequential updates of several policies: their order, and the factor of the policies updated before."""

import copy
import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from creditflow.config import ActorConfig, OptimConfig, TrainerConfig, load_recipe
from creditflow.credit import CreditOptions, assign
from creditflow.data import TrajectoryBatch
from creditflow.engines.common.update_schedule import policies_due
from creditflow.engines.local import sequential
from creditflow.engines.local.actor import Actor
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.sequential import JointRatio
from creditflow.errors import ConfigError
from creditflow.runs.run_folder import read_metrics
from tests.builders import batch_of, make_trajectory, step
from tests.engines.test_actor import sampled_batch, several_steps
from tests.engines.test_correction import row_logprobs
from tests.engines.test_resume import EVERY_STEP, TWO_POLICIES, recipe_file, run  # noqa: F401

POLICIES = ("first", "second", "third")
SEQUENTIAL = TrainerConfig(update_schedule="sequential")


@given(st.integers(1, 500), st.integers(0, 5), st.permutations(POLICIES))
def test_sequential_order_is_a_permutation_of_the_step(at: int, seed: int, names: list[str]) -> None:
    order = policies_due(at, SEQUENTIAL, names, seed)

    assert sorted(order) == sorted(POLICIES)
    assert order == policies_due(at, SEQUENTIAL, names, seed)


def test_sequential_orders_are_equally_frequent() -> None:
    for seed in (0, 1):
        orders = [tuple(policies_due(at, SEQUENTIAL, POLICIES, seed)) for at in range(1, 1201)]
        counts = [orders.count(order) for order in itertools.permutations(POLICIES)]
        assert sum(counts) == 1200
        assert min(counts) > 150  # 200 expected, with a standard deviation of 13


def test_sequential_orders_differ_between_seeds() -> None:
    orders = [[policies_due(at, SEQUENTIAL, POLICIES, seed) for at in range(1, 21)] for seed in (0, 1)]
    assert orders[0] != orders[1]


def test_sequential_updates_begin_after_the_warm_up() -> None:
    schedule = TrainerConfig(update_schedule="sequential", critic_warmup=2)
    assert [len(policies_due(at, schedule, POLICIES, 0)) for at in (1, 2, 3)] == [0, 0, 3]


def test_sequential_schedule_refuses_replay(recipe_file: Path) -> None:  # noqa: F811
    overrides = [*TWO_POLICIES, "trainer.update_schedule=sequential", "algorithm.propagation=replay"]
    with pytest.raises(
        ConfigError, match=r"^trainer.update_schedule: sequential, but .*replay are means over branches"
    ):
        load_recipe(recipe_file, overrides)
    load_recipe(recipe_file, [*overrides, "trainer.update_schedule=alternating"])


# The factor by enumeration of a small game


def log_sigmoid(logit: float) -> float:
    return -math.log1p(math.exp(-logit))


def game_logprobs(actions: tuple[int, int, int], ones: np.ndarray, twos: np.ndarray) -> list[float]:
    """Log-probs of three binary actions: policy one acts first and last, two between, each sees the action before.

    `ones` [3] and `twos` [2]: the logits of action 1, one for each observation.
    """
    first, middle, _ = actions
    logits = (ones[0], twos[first], ones[1 + middle])
    return [log_sigmoid(logit if action else -logit) for logit, action in zip(logits, actions, strict=True)]


ACTIONS = list(itertools.product((0, 1), repeat=3))


def value(ones: np.ndarray, twos: np.ndarray, reward: np.ndarray) -> float:
    """The expected reward of the team."""
    return sum(math.exp(sum(game_logprobs(one, ones, twos))) * reward[one] for one in ACTIONS)


@pytest.mark.parametrize("seed", range(5))
def test_factor_gives_the_gradient_beside_updated_policies(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all trajectories, weighted by their probability under the old team: exact, whatever the baseline."""
    rng = np.random.default_rng(seed)
    ones, updated, twos, reward = rng.normal(size=3), rng.normal(size=3), rng.normal(size=2), rng.normal(size=(2, 2, 2))
    baseline = rng.normal(size=2)  # depends on the action before the middle step
    steps = [step(agent=agent, tokens=1) for agent in ("one", "two", "one")]
    batch = batch_of(*(make_trajectory(str(k), steps) for k in range(8)))
    tables = iter(
        np.concatenate([game_logprobs(actions, weights, twos) for actions in ACTIONS]) for weights in (ones, updated)
    )
    monkeypatch.setattr(sequential, "actor_logprobs", lambda *_: next(tables))
    joint, actor, middle_S = JointRatio(batch, None), SimpleNamespace(), np.arange(24) % 3 == 1
    joint.begin(actor, ~middle_S)  # type: ignore[arg-type]
    joint.end(actor, ~middle_S)  # type: ignore[arg-type]
    advantage_T = np.repeat([reward[actions] - baseline[actions[0]] for actions in ACTIONS], 3)
    weighted_T, _ = joint.apply(advantage_T, middle_S)

    gradient = np.zeros(2)
    for k, (first, middle, last) in enumerate(ACTIONS):
        likely = math.exp(sum(game_logprobs((first, middle, last), ones, twos)))
        slope = middle - 1 / (1 + math.exp(-twos[first]))  # of the action's log-prob by its logit
        gradient[first] += likely * weighted_T[3 * k + 1] * slope
    nudge = 1e-6 * np.eye(2)
    expected = [(value(updated, twos + d, reward) - value(updated, twos - d, reward)) / 2e-6 for d in nudge]
    np.testing.assert_allclose(gradient, expected, atol=1e-8)


# Updates of real models


@pytest.fixture
def team(word_model_folder: Path) -> tuple[dict[str, Policy], TrajectoryBatch]:
    """Two policies in float64 that differ, and trajectories of one to three of their steps in turn."""
    policies = {}
    for place, name in enumerate(("one", "two")):
        policy = Policy.load(word_model_folder, torch.device("cpu"))
        policy.model.double()
        policy.forward = Forward(policy.model, True)
        generator = torch.Generator().manual_seed(place)
        with torch.no_grad():
            for weight in policy.model.parameters():
                weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
        policies[name] = policy
    trajectories = several_steps(sampled_batch(policies["one"], 18, temperatures=(1.0, 0.7))).to_trajectories()
    for trajectory in trajectories:
        for place, one in enumerate(trajectory.steps):
            one.policy = ("one", "two")[place % 2]
            if len(one.response_ids) > 2:
                one.response_mask = (1, 0, *one.response_mask[2:])
    return policies, TrajectoryBatch.from_trajectories(trajectories)


def actors_of(policies: dict[str, Policy]) -> dict[str, Actor]:
    config = ActorConfig(optim=OptimConfig(lr=3e-3), ppo_max_token_len_per_gpu=60)
    return {name: Actor(policy, config) for name, policy in policies.items()}


def assigned(batch: TrajectoryBatch) -> Any:
    """Random advantages; one step is not trained."""
    made = assign(batch, CreditOptions())
    rng = np.random.default_rng(3)
    made.trained_S[:] = np.arange(batch.n_steps) != 2
    advantage_T = rng.normal(size=len(batch.response_ids))
    return SimpleNamespace(
        batch=batch,
        returns_T=None,
        trained_S=made.trained_S,
        share_S=made.share_S,
        token_advantages=lambda: advantage_T,
    ), advantage_T


def weights_of(policy: Policy) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in policy.model.parameters()])


@pytest.mark.parametrize("ratio_max", [None, 1.05])
def test_sequential_update_matches_rows_alone(team: Any, ratio_max: float | None) -> None:
    policies, batch = team
    assignment, advantage_T = assigned(batch)
    one_mini_batch = np.zeros(batch.n_steps, dtype=np.int64)

    slow = {name: copy.copy(policy) for name, policy in policies.items()}
    for policy in slow.values():
        policy.model = copy.deepcopy(policy.model)
        policy.forward = Forward(policy.model, True)
    by_hand = actors_of(slow)
    of_two = np.array([batch.policy_names[p] == "two" for p in batch.policy_of_step])

    def total_logprobs() -> list[float]:
        """The log-prob of the sampled tokens of all steps of `two` in each trajectory."""
        sums = [0.0] * batch.n_trajectories
        for s in np.flatnonzero(of_two):
            mask = torch.tensor(batch.response_mask[batch.token_offsets[s] : batch.token_offsets[s + 1]])
            with torch.no_grad():
                sums[batch.trajectory_of_step[s]] += float(row_logprobs(slow["two"], batch, s)[mask].sum())
        return sums

    before = total_logprobs()
    by_hand["two"].update(batch, advantage_T, assignment.trained_S & of_two, one_mini_batch)
    factors = [math.exp(new - old) for new, old in zip(total_logprobs(), before, strict=True)]
    assert max(factors) > 1.05
    assert min(factors) < 0.95
    kept = [factor if ratio_max is None else min(factor, ratio_max) for factor in factors]
    weight_T = np.repeat(np.array(kept)[batch.trajectory_of_step], np.diff(batch.token_offsets))
    by_hand["one"].update(batch, advantage_T * weight_T, assignment.trained_S & ~of_two, one_mini_batch)

    policy_set, joint = PolicySet(policies, actors_of(policies), {}), JointRatio(batch, ratio_max)
    metrics = policy_set.update(assignment, None, one_mini_batch, only=("two", "one"), joint=joint)

    for name in ("one", "two"):
        torch.testing.assert_close(weights_of(policies[name]), weights_of(slow[name]), rtol=0, atol=1e-9)
    trained = np.flatnonzero(assignment.trained_S & ~of_two)
    factor_S = np.array(kept)[batch.trajectory_of_step[trained]]
    assert metrics["one/actor/sequential_factor_mean"] == pytest.approx(factor_S.mean())
    assert metrics["one/actor/sequential_factor_min"] == pytest.approx(factor_S.min())
    assert metrics["one/actor/sequential_factor_max"] == pytest.approx(factor_S.max())
    above = np.array(factors)[batch.trajectory_of_step[trained]] > (ratio_max or math.inf)
    assert metrics["one/actor/sequential_factor_truncated"] == pytest.approx(above.mean())
    assert not any(key.startswith("two/actor/sequential") for key in metrics)


def test_single_policy_has_no_sequential_factor(team: Any) -> None:
    policies, batch = team
    first, made = weights_of(policies["one"]), []
    for joint in (None, JointRatio(batch, 2.0)):
        alone = copy.copy(policies["one"])
        alone.model = copy.deepcopy(alone.model)
        alone.forward = Forward(alone.model, True)
        policy_set = PolicySet({"one": alone}, actors_of({"one": alone}), {})
        metrics = policy_set.update(assigned(batch)[0], None, np.zeros(batch.n_steps, dtype=np.int64), joint=joint)
        made.append((weights_of(alone), metrics))
    assert torch.equal(made[0][0], made[1][0])
    assert made[0][1] == made[1][1]
    assert not torch.equal(made[0][0], first)


def test_sequential_run_follows_the_drawn_orders(recipe_file: Path) -> None:  # noqa: F811
    """The policy that is updated second in a step has the factor's metrics, and the first has none."""
    path = run(recipe_file, "run", *EVERY_STEP, *TWO_POLICIES, "trainer.update_schedule=sequential", "data.seed=1")
    rows, key = read_metrics(path)[1:], "actor/sequential_factor_mean"
    second = [policies_due(row["step"], SEQUENTIAL, ("one", "two"), 1)[1] for row in rows]
    assert [[name for name in ("one", "two") if f"{name}/{key}" in row] for row in rows] == [[name] for name in second]
    assert set(second) == {"one", "two"}
    assert all(row[f"{name}/{key}"] != 1.0 for name, row in zip(second, rows, strict=True))
    assert all(row[f"{name}/actor/grad_norm"] > 0 for row in rows for name in ("one", "two"))
