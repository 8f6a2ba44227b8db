"""The rewards of an environment (`creditflow.plugins.environments`): of a step, and the returns as the outcome."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from creditflow.data import Step, Trajectory, into_range
from creditflow.errors import ScoreRangeError
from creditflow.rewards.registry import outcome, reward
from creditflow.rewards.scores import COMMON


@reward
class StepReward:
    """The environment's reward for a step, as a sub-reward.

    `low`, `high`: its smallest and largest value; a score outside this range fails. A step without a reward scores 0,
    clipped to the range.
    """

    def __init__(self, low: float = 0.0, high: float = 1.0) -> None:
        self.range = (float(low), float(high))

    def __call__(self, step: Step, trajectory: Trajectory) -> float:
        """Return the reward, in [low, high]. Raises ValueError if it is outside."""
        paid = step.info.get("reward")
        return float(np.clip(0.0, *self.range)) if paid is None else _within(paid, self.range)


@outcome
class Returns:
    """The returns of the seats as the outcome: the mean over seats, or one seat's or agent's return.

    `low`, `high`: the smallest and largest return of a seat; a score outside this range fails. `seat`: the seat that
    counts. `agent`: the agent whose seats count, if it changes seats between tasks. In a competition, name one of the
    two: the mean of a zero-sum game is always 0. `per_agent`: also give each agent that acted its own outcome, the mean
    return of its seats, for competitions in which several agents are trained.
    """

    def __init__(
        self,
        low: float = 0.0,
        high: float = 1.0,
        seat: str | None = None,
        per_agent: bool = False,
        agent: str | None = None,
    ) -> None:
        if seat is not None and agent is not None:
            raise ValueError(f"expected seat or agent, got both: {seat!r} and {agent!r}")
        self.range = (float(low), float(high))
        self.seat, self.per_agent, self.agent = seat, per_agent, agent

    def __call__(self, trajectory: Trajectory) -> float | dict[str, float]:
        """Compute the outcome, in [low, high], or the outcomes by agent. Raises ValueError if it is outside."""
        earned: dict[str, float] = json.loads(trajectory.answer or "{}")
        if not earned:
            raise ValueError("the trajectory has no returns: it ended before the environment did")
        if self.seat is not None and self.seat not in earned:
            raise ValueError(f"no seat {self.seat!r} in this trajectory; there is {', '.join(earned)}")
        value = float(np.mean(list(earned.values()))) if self.seat is None else earned[self.seat]
        if self.agent is not None:
            value = _return_of_agent(trajectory, earned, self.agent)
        common = _within(value, self.range)
        return {COMMON: common, **_returns_of_agents(trajectory, earned)} if self.per_agent else common


def _returns_of_agents(trajectory: Trajectory, earned: Mapping[str, float]) -> dict[str, float]:
    """The mean return of the seats of each agent that acted; the manager checks their range."""
    seats: dict[str, set[str]] = {}
    for step in trajectory.steps:
        seat = str(step.info.get("seat"))
        if seat not in earned:
            raise ValueError(f"step {step.id}: expected a seat of the environment in its info, got {seat!r}")
        seats.setdefault(step.agent, set()).add(seat)
    return {agent: float(np.mean([earned[seat] for seat in sorted(its)])) for agent, its in seats.items()}


def _return_of_agent(trajectory: Trajectory, earned: Mapping[str, float], agent: str) -> float:
    """The mean return of an agent's seats, even if it has not acted."""
    seats = trajectory.info.get("seats", {})
    own = [earned[seat] for seat, name in seats.items() if name == agent and seat in earned]
    if not own:
        names = ", ".join(dict.fromkeys(seats.values()))
        raise ValueError(f"no agent {agent!r} has a seat in this trajectory; there is {names or 'none'}")
    return float(np.mean(own))


def _within(earned: float, allowed: tuple[float, float]) -> float:
    """Return `earned`, clipped if rounding alone puts it outside. Raises ValueError for values further out."""
    try:
        return into_range(float(earned), allowed)
    except ScoreRangeError as error:
        raise ValueError(f"{error}; the arguments low and high say the least and the most that can be earned") from None
