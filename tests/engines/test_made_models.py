"""Tests of recipes that build their own model, from the warm-up to a trained policy, on the smallest scale."""

import pytest

from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.engines.local.trainer import train
from creditflow.runs import Ledger
from tests.builders import mostly_slow
from tests.paths import RECIPES

TINY = ("recipe.hidden=16", "recipe.layers=1", "recipe.train_tasks=8", "recipe.val_tasks=2", "data.train_batch_size=2")
ROUGH = {"tic_tac_toe": "legal", "tool_chain": "warmup"}
"""The setting for the target accuracy of the warm-up."""


@pytest.mark.parametrize("recipe", mostly_slow(ROUGH, {"tool_chain"}))
def test_recipe_builds_its_model_and_updates_trainable_policies(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("CREDITFLOW_CACHE", str(tmp_path))
    settings = [*TINY, f"recipe.{ROUGH[recipe]}=0.0", f"trainer.default_local_dir={tmp_path}/run"]
    settings += ["actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=2"]
    settings += ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.optim.lr_warmup_steps=0"]

    done = train(load_recipe(RECIPES / f"{recipe}.yaml", settings), Reporter())

    config = load_recipe(RECIPES / f"{recipe}.yaml").config
    learns = {name: policy.trainable for name, policy in config.policies.items()} or {"default": True}
    steps = [step for trajectory in Ledger.open(done.path).read(2).batch.to_trajectories() for step in trajectory.steps]
    assert {step.policy: step.policy_version for step in steps} == {
        name: int(is_ is not False) for name, is_ in learns.items()
    }
