"""Rollouts of a recipe's workflow with scripted models, scored by the recipe's functions."""

import asyncio
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from creditflow._utils.loading import load_object
from creditflow.config import load_recipe
from creditflow.data import Task, Trajectory
from creditflow.rewards import RewardManager, load_reward_functions
from creditflow.rollout import AgentSpec, Rollout, Sampling, Scheduler, run_rollouts
from tests.builders import Scripted, make_trajectory, step
from tests.paths import RECIPES


def loader(recipe: str) -> Callable[[str], Any]:
    """A function that loads objects of a recipe's file by name."""
    return lambda name: load_object(f"{recipe}.py:{name}", RECIPES, "test")


@cache
def functions_of(recipe: str):
    """The reward functions of a recipe, with its sandbox."""
    reward = load_recipe(RECIPES / f"{recipe}.yaml").config.reward
    return load_reward_functions(reward.functions, RECIPES, [], {"sandbox": reward.sandbox})


def scored_rollout(
    solve: Callable, task: Task, agents: Mapping[str, AgentSpec], models: Mapping[str, Any], functions: Any
) -> Trajectory:
    """One trajectory with its scores. `models`: clients by policy. A score that fails raises."""

    async def main() -> Trajectory:
        sampling = Sampling(max_tokens=512, max_prompt_tokens=100_000)
        (trajectory,) = await run_rollouts([Rollout(task, "u", "t", (0,))], solve, agents, Scheduler(models), sampling)
        await RewardManager(functions, 0.0).score([trajectory])
        return trajectory

    return asyncio.run(main())


def run_recipe(
    recipe: str, task: Task, systems: Mapping[str, str], answer: Callable[[str], bytes], workflow: str = "solve"
) -> tuple[Trajectory, Scripted]:
    """The scored trajectory of a team with one model, and the model. `systems`: system prompts by agent."""
    model = Scripted(answer)
    agents = {name: AgentSpec(system=system) for name, system in systems.items()}
    return scored_rollout(loader(recipe)(workflow), task, agents, {"default": model}, functions_of(recipe)), model


def agents_of(trajectory: Trajectory) -> str:
    """The initials of the agents of its steps."""
    return "".join(step.agent[0] for step in trajectory.steps)


def scores_of(trajectory: Trajectory) -> list[float]:
    return [score.value for step in trajectory.steps for score in step.scores.values()]


def spoken(
    task: Task, team: Mapping[str, str], *replies: tuple[str, str], retries: Mapping[int, int] = MappingProxyType({})
) -> Trajectory:
    """A trajectory with one step per (initial of the agent, response), each after the one before.

    `team`: agents by initial. `retries`: repeating step -> repeated step.
    """
    steps = [
        step(team[initial], response=response, tokens=1, info={"retry_of": retries[i]} if i in retries else {})
        for i, (initial, response) in enumerate(replies)
    ]
    trajectory = make_trajectory("t", steps, answer_steps=(len(steps) - 1,))
    trajectory.task, trajectory.answer = task, replies[0][1]
    return trajectory
