"""verl's asynchronous modes: rollouts that go on while policies are updated."""

from pathlib import Path

import numpy as np
import pytest

from tests.paths import TOY

pytest.importorskip("verl_cpu")

from tests.engines.verl.runs import Run, run

pytestmark = pytest.mark.usefixtures("verl_ray")

STEPS = 5
LAG = "algorithm.max_version_lag=2"


def train(folder: Path, mode: str, *overrides: str, steps: int = STEPS, **more) -> Run:
    separate = (
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
    )
    verl = (f"trainer.v1.trainer_mode={mode}", *(separate if mode == "separate_async" else ()))
    return run(
        TOY, folder, LAG, f"trainer.total_training_steps={steps}", "trainer.val_before_train=false", *overrides,
        verl=verl, **more,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["colocate_async", "separate_async"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp(request.param) / "run", request.param)


def test_batches_hold_every_rollout_once(made: Run):
    assert [row["step"] for row in made.metrics] == list(range(1, STEPS + 1))
    ids = [name for step in range(1, STEPS + 1) for name in made.batch(step).trajectory_ids]
    assert len(ids) == len(set(ids)) == 8 * STEPS


def test_versions_stay_within_the_lag(made: Run):
    for step in range(1, STEPS + 1):
        lag_S = step - 1 - made.batch(step).policy_version
        assert lag_S.min() >= 0
        assert lag_S.max() <= 2
    assert made.series("rollout/staleness").max() > 0
    np.testing.assert_array_less(made.series("rollout/staleness"), 2.1)
