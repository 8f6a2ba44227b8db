"""verl's asynchronous modes: rollouts that go on while policies are updated."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from creditflow.data import Step, Task, Trajectory, TrajectoryBatch
from creditflow.engines.common.metrics import staleness_metrics
from creditflow.errors import CreditflowError
from creditflow.runs import Ledger
from creditflow.studies.reassignment import reassigned
from tests.paths import TOY

pytest.importorskip("verl_cpu")

from verl_cpu import mode_options

from tests.builders import mostly_slow
from tests.engines.verl.runs import TWO_POLICIES, Run, run

pytestmark = pytest.mark.usefixtures("verl_ray")

STEPS = 5
LAG = "algorithm.max_version_lag=2"


def train(folder: Path, mode: str, *overrides: str, steps: int = STEPS, recipe: Path = TOY, **more) -> Run:
    return run(
        recipe, folder, LAG, f"trainer.total_training_steps={steps}", "trainer.val_before_train=false", *overrides,
        verl=mode_options(mode, more.get("n_ranks", 1)), **more,
    )  # fmt: skip


@pytest.fixture(scope="module", params=mostly_slow(["colocate_async", "separate_async"], {}))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp(request.param) / "run", request.param)


def test_batches_hold_every_rollout_once(trained: Run):
    assert [row["step"] for row in trained.metrics] == list(range(1, STEPS + 1))
    ids = [name for step in range(1, STEPS + 1) for name in trained.batch(step).trajectory_ids]
    assert len(ids) == len(set(ids)) == 8 * STEPS


def test_versions_stay_within_the_lag(trained: Run):
    for step in range(1, STEPS + 1):
        lag_S = step - 1 - trained.batch(step).policy_version
        assert lag_S.min() >= 0
        assert lag_S.max() <= 2
    assert 0 < trained.series("rollout/staleness").max() <= trained.series("rollout/staleness_max").max() <= 2
    assert trained.series("rollout_corr/rollout_is_max").max() <= 2.0
    assert (trained.series("rollout_corr/rollout_is_mean") != 1.0).any()
    idle = trained.series("throughput/trainer_idle_frac")
    assert ((idle >= 0) & (idle <= 1)).all()


def test_recorded_credit_is_that_of_the_trajectories(trained: Run):
    """The mode has no part in it: credit assigned without an engine has the same bytes."""
    for recorded, assignment in reassigned(Ledger.open(trained.folder), {}):
        assert recorded.assignment is not None
        assert recorded.assignment.options.max_version_lag == 2
        np.testing.assert_array_equal(assignment.groups.trained_S, recorded.assignment.groups.trained_S)
        np.testing.assert_array_equal(assignment.token_advantages(), recorded.assignment.token_advantages())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_resumed_run_loses_and_repeats_nothing(tmp_path: Path, mode: str):
    train(tmp_path / "run", mode, "trainer.save_freq=3", steps=3)
    trained = train(tmp_path / "run", mode, steps=6)
    assert [row["step"] for row in trained.metrics] == list(range(1, 7))
    ids = [name for step in range(1, 7) for name in trained.batch(step).trajectory_ids]
    assert len(ids) == len(set(ids)) == 8 * 6
    groups = [tuple(trained.batch(step).group_names) for step in range(1, 7)]
    assert all(len(of_step) == 2 for of_step in groups)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_two_policies_train_asynchronously(tmp_path: Path, mode: str):
    trained = train(tmp_path / "run", mode, *TWO_POLICIES, n_ranks=2)
    for name in ("first", "second"):
        assert (trained.series(f"{name}/actor/grad_norm") > 0).all()
    for step in range(1, STEPS + 1):
        batch = trained.batch(step)
        assert batch.policy_names == ("first", "second")
        assert set((step - 1 - batch.policy_version).tolist()) <= {0, 1, 2}


LATE = """

async def solve_late(task, team):
    import asyncio, pathlib
    draft = await team.writer(task.text)
    late, metrics = draft.step.policy_version == 0 and task.ground_truth % 4 == 0, pathlib.Path({metrics!r})
    while late and not metrics.exists():  # as if it waited for a tool
        await asyncio.sleep(0.05)
    return await team.critic(f"{{task.text}} {{draft}}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_late_groups_join_a_later_batch(tmp_path: Path, mode: str):
    """Rollouts of every fourth task wait until the first training step is recorded, so it must not wait for them."""
    shutil.copy(TOY, tmp_path)
    text = TOY.with_suffix(".py").read_text() + LATE.format(metrics=str(tmp_path / "run" / "metrics.jsonl"))
    (tmp_path / "toy.py").write_text(text)
    trained = train(
        tmp_path / "run", mode, "actor_rollout_ref.rollout.min_complete_frac=0.5",
        "team.workflow=toy.py:solve_late", "data.shuffle=false", steps=4, recipe=tmp_path / "toy.yaml",
    )  # fmt: skip
    batches = [trained.batch(step) for step in range(1, 5)]
    late = [
        [task.ground_truth % 4 == 0 and version == 0 for task, version in zip(b.tasks, first_versions(b), strict=True)]
        for b in batches
    ]
    assert not any(late[0])
    assert any(map(any, late[1:]))
    ids = [name for batch in batches for name in batch.trajectory_ids]
    assert len(ids) == len(set(ids))
    assert all(batch.n_trajectories % 4 == 0 for batch in batches)  # whole groups


def first_versions(batch: TrajectoryBatch) -> list[int]:
    """The version of each trajectory's first step."""
    first = np.searchsorted(batch.trajectory_of_step, np.arange(batch.n_trajectories))
    return batch.policy_version[first].tolist()


@pytest.mark.slow
def test_asynchronous_run_resumes_in_its_own_mode(tmp_path: Path):
    train(tmp_path / "run", "colocate_async", "trainer.save_freq=2", steps=2)
    with pytest.raises(CreditflowError, match="trainer_mode: expected colocate_async, as the run began"):
        train(tmp_path / "run", "sync", steps=3)


def test_staleness_counts_sampled_tokens_by_version():
    steps = [
        Step("t/0", "t", 0, "a", 0, (), "p", "r", (1,), (5, 6, 7, 8), (1, 1, 0, 1), (-1.0,) * 4, policy_version=3,
             version_spans=((0, 3), (1, 5))),
        Step("t/1", "t", 1, "b", 0, (0,), "p", "r", (1,), (5, 6), (1, 1), (-1.0,) * 2, policy="other",
             policy_version=9),
    ]  # fmt: skip
    batch = TrajectoryBatch.from_trajectories([Trajectory("t", "u", Task("d", (), ""), steps)])
    # Tokens of versions 3, 5 and 5 for a policy that is trained at 6; the masked token does not count.
    assert staleness_metrics(batch, {"default": 6}) == {
        "rollout/staleness": pytest.approx((3 + 1 + 1) / 3),
        "rollout/staleness_max": 3.0,
    }
    assert staleness_metrics(batch, {"other": 9})["rollout/staleness"] == 0
