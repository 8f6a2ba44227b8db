"""Trains teams of LLM agents, and decides for every step of every agent how much of the reward it earned.

Importing this package loads numpy and nothing heavier; the rest is imported where it is used.
"""

from typing import TYPE_CHECKING

from creditflow.errors import AgentError, CreditflowError, InputError
from creditflow.lazy import attach
from creditflow.reward.registry import outcome, reward
from creditflow.trajectory import Score, Step, Task, Trajectory, TrajectoryBatch

if TYPE_CHECKING:
    from creditflow.credit import Assignment, CreditOptions, assign
    from creditflow.reward import RewardManager
    from creditflow.rollout import Reply, Team

__getattr__ = attach(
    __name__,
    {
        "creditflow.credit": ("Assignment", "CreditOptions", "assign"),
        "creditflow.reward": ("RewardManager",),
        "creditflow.rollout": ("Reply", "Team"),
    },
)

__all__ = [
    "AgentError",
    "Assignment",
    "CreditOptions",
    "CreditflowError",
    "InputError",
    "Reply",
    "RewardManager",
    "Score",
    "Step",
    "Task",
    "Team",
    "Trajectory",
    "TrajectoryBatch",
    "assign",
    "outcome",
    "reward",
]


def __dir__() -> list[str]:
    return __all__
