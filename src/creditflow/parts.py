"""What a recipe is made of: tasks, workflow, agents, rewards, strata. The same objects serve every engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from creditflow.config import Config, Recipe
from creditflow.data import load_tasks
from creditflow.errors import ConfigError, RewardError
from creditflow.loading import load_object
from creditflow.reward import RewardFunction, RewardManager, load_reward_functions
from creditflow.reward.backends import BackendOptions, make_backend
from creditflow.rollout import AgentSpec, Workflow
from creditflow.rollout.team import Sampling
from creditflow.trajectory import Step, Task, Trajectory

StratumFunction = Callable[[Step], str | None]


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything but the model."""

    recipe: Recipe
    train_tasks: Sequence[Task]
    val_tasks: Sequence[Task]
    workflow: Workflow
    agents: dict[str, AgentSpec]
    rewards: RewardManager
    stratum: StratumFunction | None

    @property
    def sampling(self) -> Sampling:
        """How agents sample in training."""
        config = self.recipe.config
        return Sampling(
            max_tokens=config.data.max_response_length,
            max_prompt_tokens=config.data.max_prompt_length,
            temperature=config.actor_rollout_ref.rollout.temperature,
        )

    def label(self, trajectories: Sequence[Trajectory]) -> None:
        """Give every step of the plays that did not fail its stratum."""
        if self.stratum is None:
            return
        for trajectory in trajectories:
            for step in trajectory.steps if trajectory.status != "failed" else ():
                label = self.stratum(step)
                if not (label is None or isinstance(label, str)):
                    raise ConfigError(f"algorithm.strata: step {step.id}: expected a text or None, got {label!r}")
                step.stratum = label


def build_parts(recipe: Recipe, *, training: bool = True) -> Parts:
    """Load and check everything that the recipe names; raises an InputError before anything is written.

    `training`: whether training tasks are needed, and something to learn from.
    """
    config, folder = recipe.config, recipe.folder
    if config.data.train_files is None and (training or config.data.val_files is None):
        raise ConfigError("data.train_files: expected a file or `file.py:function`, got nothing")
    train_tasks: Sequence[Task] = ()
    if training:
        train_tasks = load_tasks(config.data.train_files, folder, config.recipe, "train")
        if len(train_tasks) < config.data.train_batch_size:
            raise ConfigError(
                f"data.train_batch_size: {config.data.train_batch_size} tasks a step, but the data set has "
                f"{len(train_tasks)}"
            )
    val_files = config.data.train_files if config.data.val_files is None else config.data.val_files
    val_tasks = load_tasks(val_files, folder, config.recipe, "val")
    if config.data.val_max_samples >= 0:
        val_tasks = val_tasks[: config.data.val_max_samples]

    workflow = load_object(config.team.workflow, folder, "team.workflow")
    if not inspect.iscoroutinefunction(workflow):
        raise ConfigError(f"team.workflow: expected `async def solve(task, team)`, got {config.team.workflow}")
    functions = load_reward_functions(
        config.reward.functions, folder, list(config.team.agents), {"sandbox": config.reward.sandbox}
    )
    if training and not any(f.level == "outcome" or f.weight > 0 for f in functions):
        raise RewardError(
            "reward.functions: no outcome and no sub-reward of positive weight, so nothing can be learned"
        )
    return Parts(
        recipe=recipe,
        train_tasks=train_tasks,
        val_tasks=val_tasks,
        workflow=workflow,
        agents={name: AgentSpec(system=agent.system) for name, agent in config.team.agents.items()},
        rewards=_manager(functions, config),
        stratum=_stratum(config.algorithm.strata, recipe),
    )


def _manager(functions: Sequence[RewardFunction], config: Config) -> RewardManager:
    section = config.reward
    options = BackendOptions(
        num_workers=section.num_workers,
        timeout=section.timeout,
        max_in_flight=section.max_in_flight,
        ray_init=config.ray_kwargs.ray_init,
    )
    return RewardManager(
        functions,
        section.max_failed_frac,
        backend=make_backend(section.backend, functions, options),
        timeout=section.timeout,
        max_in_flight=section.max_in_flight,
        cache_size=section.cache_size,
    )


def _stratum(reference: str | None, recipe: Recipe) -> StratumFunction | None:
    if reference is None:
        return None
    function: Any = load_object(reference, recipe.folder, "algorithm.strata")
    if not callable(function):
        raise ConfigError(f"algorithm.strata: expected a function of a step, got {reference}")
    return function  # type: ignore[no-any-return]
