"""The rewards of `arithmetic_chain`, and what becomes of them from a training step on: for `benchmarks.guarded`."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

from creditflow import Step, Trajectory, reward
from creditflow.loading import load_object

_RECIPES = Path(__file__).parent.parent / "recipes"
_FAILS = 15
"""Percent of the verdicts that fail."""


def _of(name: str) -> Callable[[Step, Trajectory], float]:
    found: Callable[[Step, Trajectory], float] = load_object(f"arithmetic_chain.py:{name}", _RECIPES, name)
    return found


def _judged(name: str, step: Step, trajectory: Trajectory, sick: str, first: int) -> float:
    # Ids are 0-STEP-TASK-PLAY in training and 1-TASK-PLAY in an evaluation, which is to be trusted.
    kind, at = trajectory.id.split("-")[:2]
    is_sick = kind == "0" and int(at) >= first
    if is_sick and sick == "failing" and zlib.crc32(step.id.encode()) % 100 < _FAILS:
        raise TimeoutError("no verdict")
    value = _of(name)(step, trajectory)
    return 1.0 - value if is_sick and sick == "contradictory" else value


@reward(agent_match="planner")
def plan_right(step: Step, trajectory: Trajectory, *, sick: str, first: int = 10) -> float:
    """As the recipe's."""
    return _judged("plan_right", step, trajectory, sick, first)


@reward(agent_match="executor")
def digits_right(step: Step, trajectory: Trajectory, *, sick: str, first: int = 10) -> float:
    """As the recipe's."""
    return _judged("digits_right", step, trajectory, sick, first)


@reward(agent_match="verifier")
def verdict_right(step: Step, trajectory: Trajectory, *, sick: str, first: int = 10) -> float:
    """As the recipe's."""
    return _judged("verdict_right", step, trajectory, sick, first)
