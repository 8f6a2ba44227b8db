"""The parts of a recipe: tasks, workflow, agents, rewards, strata. Every engine uses the same objects."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditflow._utils.loading import load_object
from creditflow.config import Config, EndpointConfig, PolicyConfig, Recipe, workflow_source
from creditflow.data import Step, Task, Trajectory
from creditflow.data.datasets import load_tasks, validation_files
from creditflow.errors import ConfigError, RewardError
from creditflow.rewards import RewardFunction, RewardManager, load_reward_functions
from creditflow.rewards.execution.backends import BackendOptions, make_backend
from creditflow.rollout import AgentSpec, FrozenModel, Workflow
from creditflow.rollout.endpoint import Endpoint, expect_packages, expect_set
from creditflow.rollout.recorder import Sampling
from creditflow.rollout.toolbox import load_tools

_BACKOFF = 0.5
"""Seconds; see `rollout.endpoint.Endpoint.backoff`."""

StratumFunction = Callable[[Step], str | None]


@dataclass(frozen=True, slots=True)
class Components:
    """Everything that a recipe names, except the engine's models."""

    recipe: Recipe
    train_tasks: Sequence[Task]
    val_tasks: Sequence[Task]
    workflow: Workflow
    agents: dict[str, AgentSpec]
    chat_clients: dict[str, FrozenModel]
    """The policies behind an endpoint, by name."""
    rewards: RewardManager
    stratum: StratumFunction | None

    @property
    def sampling(self) -> Sampling:
        """How agents sample in training."""
        config = self.recipe.config
        rollout = config.actor_rollout_ref.rollout
        turns = rollout.multi_turn
        return Sampling(
            max_tokens=config.data.max_response_length,
            max_prompt_tokens=config.data.max_prompt_length,
            temperature=rollout.temperature,
            max_assistant_turns=turns.max_assistant_turns,
            max_parallel_calls=turns.max_parallel_calls,
            max_tool_response_length=turns.max_tool_response_length,
            timeout_s=rollout.timeout_s,
            timeout_outcome=rollout.timeout_outcome,
        )

    def endpoint_metrics(self) -> dict[str, float]:
        """`endpoint/<policy>/*` since the last call: see `FrozenModel.metrics`."""
        return {
            f"endpoint/{name}/{key}": value
            for name, client in self.chat_clients.items()
            for key, value in client.metrics().items()
        }

    def label(self, trajectories: Sequence[Trajectory]) -> None:
        """Set the stratum of every step in the trajectories that did not fail."""
        if self.stratum is None:
            return
        for trajectory in trajectories:
            for step in trajectory.steps if trajectory.status != "failed" else ():
                label = self.stratum(step)
                if not (label is None or isinstance(label, str)):
                    raise ConfigError(f"algorithm.strata: step {step.id}: expected a text or None, got {label!r}")
                step.stratum = label


def build_components(recipe: Recipe, *, training: bool = True, tasks: bool = True) -> Components:
    """Load and check everything that the recipe names; raises an InputError before anything is written.

    `training`: require training tasks and something to learn from. `tasks`: load tasks; a process that only runs the
    rollouts it receives needs none.
    """
    config, folder = recipe.config, recipe.folder
    train_tasks, val_tasks = _tasks(recipe, training) if tasks else ((), ())
    workflow = _workflow(config.team.workflow, folder)
    functions = load_functions(recipe)
    if training and not any(f.level == "outcome" or f.weight > 0 for f in functions):
        raise RewardError(
            "reward.functions: no outcome and no sub-reward of positive weight, so nothing can be learned"
        )
    return Components(
        recipe=recipe,
        train_tasks=train_tasks,
        val_tasks=val_tasks,
        workflow=workflow,
        agents=_agents(config, folder),
        chat_clients={
            name: _chat_client(name, policy, policy.endpoint)
            for name, policy in config.policies.items()
            if policy.endpoint is not None
        },
        rewards=_reward_manager(functions, config),
        stratum=_stratum(config.algorithm.strata, recipe),
    )


def _workflow(reference: str, folder: Path) -> Workflow:
    """The workflow that a recipe names: a function, or that of a plug-in by its address."""
    if (source := workflow_source(reference)) is not None:
        return source.load(reference, "team.workflow")
    workflow: Workflow = load_object(reference, folder, "team.workflow")
    plain = inspect.isfunction(workflow) and "team" in inspect.signature(workflow).parameters
    if not (plain or inspect.iscoroutinefunction(workflow)):
        raise ConfigError(
            f"team.workflow: expected `async def solve(task, team)`, or `def` with these parameters, got {reference}"
        )
    return workflow


def load_functions(recipe: Recipe) -> tuple[RewardFunction, ...]:
    """Load the recipe's reward functions."""
    config = recipe.config
    options = {"sandbox": config.reward.sandbox}
    return load_reward_functions(config.reward.functions, recipe.folder, list(config.team.agents), options)


def _agents(config: Config, folder: Path) -> dict[str, AgentSpec]:
    agents: dict[str, AgentSpec] = {}
    for name, agent in config.team.agents.items():
        key = f"team.agents.{name}.tools"
        policy = config.policies.get(agent.policy)
        if agent.tools and policy is not None and policy.endpoint is not None:
            raise ConfigError(f"{key}: are for policies of the run, and {agent.policy} is behind an endpoint")
        tools = load_tools(agent.tools, folder, key, {"sandbox": config.reward.sandbox})
        try:
            re.compile(agent.match)
        except re.error as error:
            raise ConfigError(f"team.agents.{name}.match: {agent.match!r} is no regular expression: {error}") from error
        ignored = frozenset(config.team.ignored_fields)
        agents[name] = AgentSpec(agent.system, agent.policy, tools, agent.match, ignored)
    return agents


def _chat_client(name: str, policy: PolicyConfig, section: EndpointConfig) -> FrozenModel:
    """The client of a model behind an endpoint. Opens no connection. Raises ConfigError if it cannot be used."""
    try:
        expect_packages()
        expect_set(section.api_key_env)
    except ValueError as error:
        raise ConfigError(f"policies.{name}.endpoint: {error}") from error
    return FrozenModel(
        Endpoint(
            url=section.base_url.rstrip("/"),
            model=str(section.model or policy.model.path),
            api_key_env=section.api_key_env,
            body=section.extra_body,
            max_concurrency=section.max_in_flight,
            request_timeout=section.timeout,
            retries=section.max_retries,
            backoff=_BACKOFF,
            give_up_after=section.give_up_after,
            headers=section.headers,
            patient=True,
        )
    )


def _tasks(recipe: Recipe, training: bool) -> tuple[Sequence[Task], Sequence[Task]]:
    config, folder = recipe.config, recipe.folder
    if config.data.train_files is None and (training or config.data.val_files is None):
        raise ConfigError("data.train_files: expected a file or `file.py:function`, got nothing")
    train_tasks: Sequence[Task] = ()
    if training:
        train_tasks = load_tasks(config.data.train_files, folder, config.recipe, "train")
        if len(train_tasks) < config.data.train_batch_size:
            raise ConfigError(
                f"data.train_batch_size: {config.data.train_batch_size} tasks a step, but the data set has "
                f"{len(train_tasks)}; set it to {len(train_tasks)} or less"
            )
    val_files = validation_files(config.data.train_files, config.data.val_files)
    val_tasks = load_tasks(val_files, folder, config.recipe, "val")
    if config.data.val_max_samples >= 0:
        val_tasks = val_tasks[: config.data.val_max_samples]
    return train_tasks, val_tasks


def _reward_manager(functions: Sequence[RewardFunction], config: Config) -> RewardManager:
    """The manager of reward functions, with the options of the section `reward`."""
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
