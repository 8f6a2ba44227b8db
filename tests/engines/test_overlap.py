"""`rollout.overlap`: the next training step's rollouts begin while the last ones of the present step run."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.credit import assign
from creditflow.data import TRAJECTORY_STATUSES
from creditflow.engines.local.engine import LocalEngine
from creditflow.errors import ConfigError
from creditflow.runs import Ledger
from tests.paths import TOY

OVERLAP = ("actor_rollout_ref.rollout.overlap=true", "algorithm.max_version_lag=1")
QUICK = ("trainer.val_before_train=false", "data.val_max_samples=1", "actor_rollout_ref.rollout.timeout_s=60")
WAITS = """

import asyncio

begun = asyncio.Event()

async def solve_with_a_slow_tool(task, team):
    '''One rollout of the first training step waits until one of the second step has begun.'''
    draft = await team.writer(task.text)
    step, place = draft.step.trajectory_id.split("-", 2)[1:]
    if step == "2":
        begun.set()
    if (step, place) == ("1", "0-0"):
        await begun.wait()
    return await team.critic(f"{task.text} {draft}")
"""


def train(folder: Path, *overrides: str, recipe: Path = TOY, steps: int = 4) -> Ledger:
    chosen = load_recipe(
        recipe, [f"trainer.default_local_dir={folder}", f"trainer.total_training_steps={steps}", *QUICK, *overrides]
    )
    LocalEngine().train(chosen, (), Reporter())
    return Ledger.open(folder)


def waiting_recipe(folder: Path) -> Path:
    shutil.copy(TOY, folder)
    (folder / "toy.py").write_text(TOY.with_suffix(".py").read_text() + WAITS)
    return folder / "toy.yaml"


def test_next_rollouts_begin_before_the_last_ones_end(tmp_path: Path):
    workflow = "team.workflow=toy.py:solve_with_a_slow_tool"
    made = train(tmp_path / "run", workflow, *OVERLAP, recipe=waiting_recipe(tmp_path))
    for step in made.steps:
        batch = made.read(step).batch
        failed = batch.status_of_trajectory == TRAJECTORY_STATUSES.index("failed")
        assert not failed.any()  # without overlap, the waiting rollout would time out
        assert set((step - 1 - batch.policy_version).tolist()) <= {0, 1}
    assert (made.read(2).batch.policy_version == 0).any()
    staleness = [row["rollout/staleness_max"] for row in made.metrics()]
    assert staleness[0] == 0
    assert staleness[1] == 1


def test_overlap_takes_the_same_tasks_and_credit(tmp_path: Path):
    plain, overlapped = train(tmp_path / "plain"), train(tmp_path / "overlapped", *OVERLAP)
    for step in plain.steps:
        here, there = plain.read(step), overlapped.read(step)
        assert here.batch.trajectory_ids == there.batch.trajectory_ids
        assert [task.text for task in here.batch.tasks] == [task.text for task in there.batch.tasks]
        assert there.assignment is not None
        again = assign(there.batch, there.assignment.options, threshold=there.assignment.standing_threshold())
        np.testing.assert_array_equal(again.advantage_S, there.assignment.advantage_S)


def test_overlapped_run_resumes(tmp_path: Path):
    train(tmp_path / "run", *OVERLAP, "trainer.save_freq=1", steps=2)
    made = train(tmp_path / "run", *OVERLAP, "trainer.resume_mode=resume_path",
                 f"trainer.resume_from_path={tmp_path / 'run' / 'checkpoints' / 'global_step_2'}", steps=4)  # fmt: skip
    ids = [name for step in made.steps for name in made.read(step).batch.trajectory_ids]
    assert made.steps == (1, 2, 3, 4)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("algorithm.max_version_lag=0", "algorithm.max_version_lag: 0, but actor_rollout_ref.rollout.overlap samples"),
        ("algorithm.propagation=replay", "algorithm.propagation: replay, but"),
        ("algorithm.propagation=shapley", "algorithm.propagation: shapley, but"),
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.enable: true, but"),
        ("audit.every=1", "audit.every: 1, but"),
    ],
)
def test_overlap_rejects_what_needs_one_version(tmp_path: Path, given: str, says: str):
    with pytest.raises(ConfigError) as caught:
        train(tmp_path / "run", *OVERLAP, given)
    assert str(caught.value).startswith(says)
    assert not (tmp_path / "run").exists()
