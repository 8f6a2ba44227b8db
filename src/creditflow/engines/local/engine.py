"""The entry of the embedded engine in the registry."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from creditflow._utils.progress import Reporter, phase
from creditflow.config import Recipe, trained_policies
from creditflow.data import Trajectory, TrajectoryBatch
from creditflow.engines.base import CheckResult, Engine
from creditflow.engines.common.components import Components
from creditflow.engines.local.policy import Policy, pick_device
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.rollouts import sample_trajectories, score
from creditflow.engines.local.run import NAME
from creditflow.engines.local.trainer import train, validate
from creditflow.engines.models.folders import model_folder
from creditflow.errors import ConfigError
from creditflow.monitoring.evaluation import Evaluation
from creditflow.monitoring.trackers.base import MakeReport
from creditflow.monitoring.tracking import expect_installed
from creditflow.rewards import ScoringReport
from creditflow.runs import RunFolder

_CHECK = 2
"""The first part of a check rollout's random key; training uses 0, validation 1."""


class LocalEngine(Engine):
    """A run in this process."""

    name = NAME
    rolls_out = True

    def train(
        self, recipe: Recipe, options: Sequence[str], reporter: Reporter, make_report: MakeReport | None = None
    ) -> RunFolder:
        _expect_whole_batches(recipe)
        return train(recipe, reporter, make_report)

    def prepare(self, recipe: Recipe, prepared: set[Path]) -> None:
        for name in trained_policies(recipe.config):
            if (folder := model_folder(recipe, name)) not in prepared:
                Policy.load(folder, pick_device(recipe.config.trainer.device))
                prepared.add(folder)

    def concurrent_runs(self, recipe: Recipe) -> int:
        if pick_device(recipe.config.trainer.device).type == "cuda":  # runs would share the GPU
            return 1
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def expect_trainable(self, recipe: Recipe, reporter: Reporter) -> None:
        super().expect_trainable(recipe, reporter)
        expect_installed(recipe.config.trainer.logger)
        _expect_whole_batches(recipe)

    def check(self, components: Components, n_tasks: int) -> CheckResult:
        recipe = components.recipe
        with phase("loading models"):
            policy_set = PolicySet.from_recipe(recipe, steps=1, keep_reference=components.rewards.needs_reference)
        memory = policy_set.memory_estimates()
        trajectories, report = asyncio.run(_roll_out(components, policy_set, n_tasks))
        values_T = policy_set.values(TrajectoryBatch.from_trajectories(trajectories))
        return CheckResult(trajectories, report, values_T, memory)

    def evaluate(self, components: Components, reporter: Reporter) -> Evaluation:
        with phase("loading models"):
            policy_set = PolicySet.for_rollouts(components.recipe)
        return asyncio.run(_evaluate(components, policy_set, reporter))


def _expect_whole_batches(recipe: Recipe) -> None:
    """Raise ConfigError if `min_complete_frac` is below 1."""
    if (complete := recipe.config.actor_rollout_ref.rollout.min_complete_frac) < 1:
        raise ConfigError(
            f"actor_rollout_ref.rollout.min_complete_frac: {complete:g}, which --engine local does not support; "
            "expected 1, or --engine verl with trainer.v1.trainer_mode colocate_async or separate_async"
        )


async def _roll_out(
    components: Components, policy_set: PolicySet, n_tasks: int
) -> tuple[list[Trajectory], ScoringReport]:
    """Roll out and score the first training tasks."""
    rollout = components.recipe.config.actor_rollout_ref.rollout
    tasks = components.train_tasks[:n_tasks]
    trajectories = await sample_trajectories(components, policy_set, tasks, rollout.n, rollout.temperature, (_CHECK,))
    async with components.rewards.open(policy_set.policies):
        report = await score(components, trajectories, max_failed_frac=1.0)  # the caller checks the limit of failures
    components.label(trajectories)
    return trajectories, report


async def _evaluate(components: Components, policy_set: PolicySet, reporter: Reporter) -> Evaluation:
    async with components.rewards.open(policy_set.policies):
        return await validate(components, policy_set, reporter, "evaluation")


ENGINE = LocalEngine()
