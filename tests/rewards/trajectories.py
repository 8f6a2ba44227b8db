"""Trajectories and exceptions for tests of reward functions, and ways to load functions and score with them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from creditflow.data import Step, Task, Trajectory
from creditflow.rewards import RewardFunction, RewardManager
from creditflow.rewards.entries import RewardFunctionConfig, load_reward_functions
from creditflow.rewards.manager import ScoringReport

TASK = Task("test", ({"role": "user", "content": "How many?"},), "72")


class NoException(BaseException):
    """An exception as raised by extensions in Rust."""


class Mute(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def a_trajectory(name: str = "t", agents: str = "pev", **kwargs) -> Trajectory:
    """A chain of steps, one per letter, with two response tokens each."""
    steps = [
        Step(
            f"{name}/{i}", name, i, agent, agents[:i].count(agent), (i - 1,) if i else (), "prompt", f"response {i}",
            response_ids=(5, 6), response_mask=(1, 1), logprobs=(-1.0, -1.0),
        )
        for i, agent in enumerate(agents)
    ]  # fmt: skip
    return Trajectory(name, "u", TASK, steps, (len(steps) - 1,), **{"answer": "72", **kwargs})


def load(
    fn: str, base: Path = Path(), agents: Sequence[str] = (), shared: dict[str, Any] | None = None, **entry
) -> RewardFunction:
    """Load the function of one entry of a recipe."""
    (function,) = load_reward_functions([RewardFunctionConfig(fn, **entry)], base, agents, shared)
    return function


def score(functions: Sequence[RewardFunction], trajectories: Sequence[Trajectory], **options) -> ScoringReport:
    """Score trajectories in this process; failed scores do not stop it."""
    return asyncio.run(RewardManager(functions, **{"max_failed_frac": 1.0, **options}).score(trajectories))
