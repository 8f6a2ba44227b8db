"""Train teams of LLM agents, and assign every step of every agent its share of the reward.

Importing this package loads numpy and nothing heavier; other modules are imported on first use.
"""

from typing import TYPE_CHECKING

from creditflow._utils.lazy import attach
from creditflow.data import Score, Step, Task, Trajectory, TrajectoryBatch
from creditflow.errors import AgentError, CreditflowError, InputError
from creditflow.rewards.registry import outcome, reward

if TYPE_CHECKING:
    from creditflow.config import credit_options
    from creditflow.credit import Assignment, CreditOptions, assign, explain
    from creditflow.rewards import RewardManager
    from creditflow.rollout import Reply, Team
    from creditflow.runs import Ledger

__getattr__ = attach(
    __name__,
    {
        "creditflow.config": ("credit_options",),
        "creditflow.credit": ("Assignment", "CreditOptions", "assign", "explain"),
        "creditflow.rewards.manager": ("RewardManager",),
        "creditflow.rollout": ("Reply", "Team"),
        "creditflow.runs": ("Ledger",),
    },
)

__all__ = [
    "AgentError",
    "Assignment",
    "CreditOptions",
    "CreditflowError",
    "InputError",
    "Ledger",
    "Reply",
    "RewardManager",
    "Score",
    "Step",
    "Task",
    "Team",
    "Trajectory",
    "TrajectoryBatch",
    "assign",
    "credit_options",
    "explain",
    "outcome",
    "reward",
]


def __dir__() -> list[str]:
    return __all__
