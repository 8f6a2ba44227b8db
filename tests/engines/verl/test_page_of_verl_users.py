"""The two programs of `docs/coming_from/from_verl.md`: unmodified verl, and the recipe on verl."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from creditflow.engines.models.tiny import tiny_byte_model
from tests.engines.verl.runs import run
from tests.test_coming_from import write_page

verl_cpu = pytest.importorskip("verl_cpu", reason="it is not installed: uv pip install -e tests/verl_cpu --no-deps")


def train_as_printed(folder: Path) -> list[dict[str, float]]:
    """Run the command of the page on a CPU; returns the metrics of each training step."""
    from hydra import compose, initialize_config_module
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    words = shlex.split((folder / "train.sh").read_text().replace("\\\n", " "))[3:]
    here = {
        "data.train_files": f"{folder}/tasks.jsonl",
        "data.val_files": f"{folder}/tasks.jsonl",
        "actor_rollout_ref.model.path": str(tiny_byte_model()),
        "reward.custom_reward_function.path": f"{folder}/score.py",
        "trainer.val_before_train": "false",
        "trainer.default_local_dir": f"{folder}/checkpoints",
        "trainer.logger": "[file]",
        "trainer.project_name": str(folder),  # the file logger writes to a folder of this name
        "trainer.experiment_name": "metrics",
    }
    printed = dict(word.split("=", 1) for word in words) | here
    del printed["actor_rollout_ref.rollout.name"]
    options = [*(f"{key}={value}" for key, value in printed.items()), *verl_cpu.options(1)]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", options)
    run_ppo(config, TaskRunnerV1)
    return [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_command_and_recipe_of_the_page_train_alike(verl_ray, tmp_path) -> None:
    theirs = train_as_printed(write_page("verl", tmp_path))
    model = f"actor_rollout_ref.model.path={tiny_byte_model()}"
    ours = run(tmp_path / "recipe.yaml", tmp_path / "run", model, "trainer.val_before_train=false")
    metrics = [row for row in ours.metrics if row["step"] > 0]
    assert [row["training/global_step"] for row in theirs] == [row["step"] for row in metrics] == [1, 2]
    for verl, credit in zip(theirs, metrics, strict=True):
        assert verl["actor/lr"] == credit["actor/lr"] == 1e-6
        for row in (verl, credit):
            assert row["actor/grad_norm"] > 0
            assert row["training/rollout_probs_diff_max"] < 1e-5
            assert abs(row["actor/kl_loss"]) < 1e-3
    batch = ours.batch(1)
    assert batch.n_steps == 16
    assert len(np.unique(batch.group_of_trajectory)) == 2
