"""A recipe's workflow as an environment of verifiers, for its evaluation and for trainers that run its environments.

Every call of an agent is a run of the role of that name, with a separate trace. Imports verifiers.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, create_model

from creditflow._utils.install import needs
from creditflow.config import Recipe, load_recipe, trained_policies
from creditflow.credit import OutcomeRule, ScoreRule
from creditflow.data import Message, Step, Task, Trajectory
from creditflow.data.datasets import load_tasks, validation_files
from creditflow.engines.common.components import Components, build_components
from creditflow.errors import ConfigError, CreditflowError, PromptTooLong
from creditflow.plugins.verifiers.tasks import SCHEME
from creditflow.rollout import AgentSpec, Rollout, Scheduler
from creditflow.rollout.client import ChatClient, ChatReply
from creditflow.rollout.recorder import spelled
from creditflow.rollout.runner import run_rollout

with needs("the export to verifiers (in a separate environment, see docs/how_to/verifiers.md)", "verifiers"):
    import verifiers.v1 as vf

    from creditflow.plugins.verifiers.harness import HARNESS

OUTCOME = "outcome"
"""The name of the outcome among the rewards of a trace."""


class TeamData(vf.TaskData):  # type: ignore[misc]
    """A task of the recipe."""

    data_source: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = Field(default_factory=dict)


class TeamTask(vf.Task[TeamData]):  # type: ignore[misc]
    """A task of the recipe. The environment scores its traces, not the task: it needs the whole trajectory."""


class TeamTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """`--env.taskset.split val` evaluates on the recipe's validation tasks."""

    split: Literal["train", "val"] = "train"


def export(recipe: Path | str, overrides: Sequence[str] = ()) -> tuple[type[Any], type[Any]]:
    """The taskset and the environment of a recipe, as classes of verifiers.

    A module that has both in its `__all__` is an environment: `vf-eval MODULE`. Each call of an agent makes one trace,
    with the rewards `outcome` and the step's sub-rewards, weighted so that `trace.reward` is
    `w_o * outcome + w_r * sub-reward`, the credit of `propagation: own`. Sampling is the evaluation's: `max_tokens`
    and `temperature` of a call are not passed on.

    Raises ConfigError for an unusable recipe: one of `verifiers://`, or with tools in `team.agents`.
    """
    team = _Team(load_recipe(recipe, overrides))

    class TeamTaskset(vf.Taskset[TeamTask, TeamTasksetConfig]):  # type: ignore[misc]
        def load(self) -> Iterator[TeamTask]:
            return (TeamTask(task, self.config.task) for task in team.tasks(self.config.split))

    seat = vf.AgentConfig(harness={"id": HARNESS}, runtime=vf.SubprocessConfig())
    fields: dict[str, Any] = dict.fromkeys(team.seats, (vf.AgentConfig, seat))
    config = create_model("TeamEnvConfig", __base__=vf.EnvConfig, **fields)

    class TeamEnv(vf.Env[config]):  # type: ignore[misc]
        async def setup(self, agents: Any) -> None:
            for name in team.frozen:
                getattr(agents, name).trainable = False

        async def run(self, task: Any, agents: Any) -> None:
            await team.run(task, agents)

    return TeamTaskset, TeamEnv


@dataclass
class _Team:
    """A recipe whose agents are run by verifiers."""

    recipe: Recipe
    seats: list[str] = field(init=False)
    """The agents that verifiers runs; the others have a model behind an endpoint."""
    frozen: list[str] = field(init=False)

    def __post_init__(self) -> None:
        config = self.recipe.config
        if config.team.workflow.startswith(SCHEME):
            raise ConfigError(f"team.workflow: {config.team.workflow} is an environment of verifiers already")
        remote = {name for name, policy in config.policies.items() if policy.endpoint is not None}
        self.seats = [name for name, agent in config.team.agents.items() if agent.policy not in remote]
        trained = trained_policies(config)
        self.frozen = [name for name in self.seats if config.team.agents[name].policy not in trained]
        for name in self.seats:
            if config.team.agents[name].tools:
                raise ConfigError(
                    f"team.agents.{name}.tools: verifiers runs tools from its own tool servers; call them in the "
                    "workflow, or train this recipe here"
                )

    @cached_property
    def components(self) -> Components:
        """The recipe's parts, loaded with the first episode of a process."""
        return build_components(self.recipe, training=False, tasks=False)

    def tasks(self, split: Literal["train", "val"]) -> Iterator[TeamData]:
        data, folder = self.recipe.config.data, self.recipe.folder
        files = data.train_files if split == "train" else validation_files(data.train_files, data.val_files)
        for task in load_tasks(files, folder, self.recipe.config.recipe, split):
            yield TeamData(
                prompt=list(task.prompt),
                data_source=task.data_source,
                ground_truth=task.ground_truth,
                extra_info=task.extra_info,
            )

    async def run(self, slot: Any, agents: Any) -> None:
        """Run the workflow on a task, score the trajectory, and record the rewards with its traces."""
        data, parts = slot.data, self.components
        prompt = tuple(message.model_dump(exclude_none=True) for message in data.prompt or ())
        task = Task(data.data_source, prompt, data.ground_truth, dict(data.extra_info))
        seats = {name: _Seat(getattr(agents, name)) for name in self.seats}
        specs = {name: replace(spec, policy=name) if name in seats else spec for name, spec in parts.agents.items()}
        rollout = Rollout(task, slot.key, f"{data.idx}-{uuid.uuid4().hex[:8]}", (data.idx or 0,))
        scheduler = Scheduler({**parts.chat_clients, **seats})  # which generates nothing: all are called directly
        trajectory = await run_rollout(rollout, parts.workflow, specs, scheduler, parts.sampling)
        if trajectory.status == "failed":
            raise CreditflowError(str(trajectory.info["error"]))
        await parts.rewards.score([trajectory], max_failed_frac=1.0)
        self._record(trajectory, specs, seats)

    def _record(self, trajectory: Trajectory, specs: Mapping[str, AgentSpec], seats: Mapping[str, _Seat]) -> None:
        options = self.recipe.config.credit
        rule = options.propagation
        w_r = rule.w_r if isinstance(rule, ScoreRule) and options.decomposed else 0.0
        w_o = rule.w_o if isinstance(rule, OutcomeRule) else 1.0
        for step in trajectory.steps:
            if step.agent not in seats:
                continue
            trace = seats[step.agent].take(step)
            outcome = trajectory.outcomes.get(step.agent, trajectory.outcome)
            if outcome is not None:
                if outcome.status != "ok":
                    raise CreditflowError(f"the outcome failed: {outcome.reason}")
                trace.record_reward(OUTCOME, outcome.rescaled, w_o)
            total = sum(score.weight for score in step.scores.values()) or 1.0
            failed = any(score.status != "ok" for score in step.scores.values())
            for name, score in step.scores.items():
                if failed:  # a part of the checks must not count for all of them
                    trace.rewards[name] = None
                else:
                    value = score.rescaled_over(step.response_mask)
                    trace.record_reward(name, value, w_r * score.weight / total)


@dataclass
class _Seat(ChatClient):
    """One role of an episode, from the workflow's side: each call is a run with a separate trace."""

    agent: Any
    runs: list[tuple[str, str, Any]] = field(default_factory=list)
    """Prompt, response and trace of each run."""

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: tuple[int, ...]
    ) -> ChatReply:
        trace = await self.agent.run(vf.Task(vf.TaskData(prompt=list(messages))))
        if not trace.ok:
            error = trace.last_error
            raise CreditflowError(f"{trace.agent.name}: {error.type}: {error.message}"[:500])
        if not trace.assistant_messages:
            raise PromptTooLong(f"was refused: {trace.stop_condition}")
        text = trace.assistant_messages[-1].content or ""
        self.runs.append((spelled(messages), text, trace))
        return ChatReply(text, "length" if trace.is_truncated else "stop")

    def take(self, step: Step) -> Any:
        """Remove and return the trace of a step."""
        at = next(i for i, (prompt, text, _) in enumerate(self.runs) if (prompt, text) == (step.prompt, step.response))
        return self.runs.pop(at)[2]
