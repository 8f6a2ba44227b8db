"""Self-play against earlier versions: which snapshot acts, ratings, and resumption."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from creditflow.config import load_recipe
from creditflow.data import Score
from creditflow.engines.local.policy import Policy
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.errors import ConfigError
from creditflow.plugins.environments.config import PoolConfig
from creditflow.plugins.environments.opponents import OpponentPool
from creditflow.plugins.environments.report import ratings
from creditflow.reports.overview import curves
from creditflow.rollout import GenerationRequest
from creditflow.runs import Ledger
from tests.builders import make_trajectory, step
from tests.cli.commands import toy_run

SELF_PLAY = "tic_tac_toe_self_play"
SMALL = (
    "actor_rollout_ref.model.path=tiny", "data.max_prompt_length=120", "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2", "recipe.val_tasks=2",
    "trainer.device=cpu", "policies.earlier.pool.every=1", "policies.earlier.pool.size=2",
)  # fmt: skip


@pytest.fixture
def learner() -> Policy:
    return Policy.load(tiny_byte_model(), torch.device("cpu"))


def changed(policy: Policy) -> Policy:
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(policy.version)))
    policy.version += 1
    return policy


def test_group_meets_one_snapshot_with_its_own_weights(learner):
    pool = OpponentPool("earlier", learner, PoolConfig(of="default", size=3))
    for _ in range(2):
        pool.add(changed(learner))
    requests = [
        GenerationRequest((9, 9, k), 4, 1.0, (0, 0, 1, t, k, 0), (0, 0, 1, t, k)) for t in range(12) for k in (0, 1)
    ]
    made = pool.generate(requests)
    versions = [one.version for one in made]
    assert versions[::2] == versions[1::2]
    assert set(versions) == {0, 1, 2}
    for request, one in zip(requests, made, strict=True):
        (alone,) = pool.snapshots[one.version].generate([request])
        assert alone.response_ids == one.response_ids
        np.testing.assert_allclose(alone.logprobs, one.logprobs, atol=1e-4)


def test_full_pool_keeps_the_first_and_the_newest(learner):
    pool = OpponentPool("earlier", learner, PoolConfig(of="default", size=3))
    pool.add(learner)
    for _ in range(4):
        pool.add(changed(learner))
    assert list(pool.snapshots) == [0, 3, 4]
    assert pool.taken == [0, 1, 2, 3, 4]


def game(learner_version: int, opponent_version: int, own: float, other: float | None):
    outcomes = {"a": Score(own), "b": Score(0.0, status="failed", reason="x") if other is None else Score(other)}
    made = make_trajectory(
        "t",
        [
            step("a", policy="default", policy_version=learner_version),
            step("b", policy="earlier", policy_version=opponent_version),
        ],
        own,
    )
    made.outcomes = outcomes
    return made


def test_games_are_counted_by_version_and_rated(learner):
    pool = OpponentPool("earlier", learner, PoolConfig(of="default", size=3))
    for _ in range(2):
        pool.add(changed(learner))
    games = [game(2, 0, 1.0, 0.0)] * 9 + [game(2, 0, 0.0, 1.0), game(2, 1, 0.5, 0.5), game(3, 1, 1.0, 0.0)]
    metrics = pool.record([*games, game(2, 0, 1.0, None)])
    assert pool.points == {(2, 0): (9.0, 1.0), (2, 1): (1.5, 0.5)}
    assert metrics["pool/earlier/games"] == 12
    assert metrics["pool/earlier/win_rate"] == pytest.approx(10.5 / 12)
    learners = 400 * np.log10(9.5 / 1.5)
    assert metrics["pool/earlier/rating"] == pytest.approx(learners, abs=1e-3)
    assert metrics["pool/earlier/rating/0"] == 0.0
    assert metrics["pool/earlier/rating/1"] == pytest.approx(learners - 400 * np.log10(2.0), abs=1e-3)
    assert "pool/earlier/rating/2" not in metrics


def trained(folder: Path, n_steps: int) -> Ledger:
    return Ledger.open(toy_run(folder, f"trainer.total_training_steps={n_steps}", *SMALL, recipe=SELF_PLAY))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return trained(tmp_path_factory.mktemp("whole") / "run", 3)


def test_self_play_meets_one_earlier_version_per_step(whole):
    for training_step, versions in ((1, {0}), (2, {0, 1}), (3, {0, 2})):
        for trajectory in whole.read(training_step).batch.to_trajectories():
            seats, outcomes = trajectory.info["seats"], trajectory.outcomes
            assert set(seats.values()) == {"learner", "earlier"}
            assert (seats["player_1"] == "learner") == (trajectory.task.extra_info["index"] % 2 == 0)
            assert outcomes["learner"].value == -outcomes["earlier"].value == trajectory.outcome.value
            theirs = [step for step in trajectory.steps if step.agent == "earlier"]
            assert all(sum(step.response_mask) == 0 for step in theirs)
            (version,) = {step.policy_version for step in theirs}
            assert version in versions
    last = next(row for row in whole.metrics() if row["step"] == 3 and "pool/earlier/size" in row)
    assert (last["pool/earlier/games"], last["pool/earlier/rating/0"]) == (4, 0.0)


def test_resumed_self_play_repeats_the_run(whole, tmp_path):
    trained(tmp_path, 2)
    parts = trained(tmp_path, 3)
    assert parts.file(3).read_bytes() == whole.file(3).read_bytes()
    ours, theirs = (
        [{k: v for k, v in row.items() if k.startswith("pool/")} for row in ledger.metrics()]
        for ledger in (whole, parts)
    )
    assert [row for row in ours if row] == [row for row in theirs if row]
    rated = ratings(parts.metrics())
    assert rated is not None
    assert [row[0] for row in rated.rows[:2]] == ["earlier: the learner now", "earlier: version 0"]
    assert rated.rows[1][1] == "0"
    assert rated.curves == {"earlier": "pool/earlier/rating"}
    assert curves(parts, parts.metrics())["pool/earlier/rating"]["unit"] == "Elo"
    snapshots = [
        load_file(ledger.path / "checkpoints/global_step_3/state/pool-earlier-3.safetensors")
        for ledger in (whole, parts)
    ]
    assert all(torch.equal(weight, snapshots[1][name]) for name, weight in snapshots[0].items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["policies.earlier.pool.of=learnr"], r"expected a trained policy \(learner\), got 'learnr'.*did you mean"),
        (["policies.earlier.trainable=true"], "policies.earlier.pool provides the policy, which is frozen"),
        (["policies.learner.lora_rank=2"], "expected a policy without an adapter"),
        (["guard.fallback.trainable=lora"], "guard.fallback.trainable is lora; use all"),
        (["policies.earlier.pool.size=1"], "pool.size"),
    ],
)
def test_impossible_pool_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(SELF_PLAY, settings)
