"""Reward functions: declaration, loading, execution and scoring.

Scoring fills `step.scores` and `trajectory.outcome`, and returns a report. The package is independent of credit
assignment and training.
"""

from typing import TYPE_CHECKING

from creditflow._utils.lazy import attach
from creditflow.rewards.registry import RewardFunction, answer, outcome, reward

if TYPE_CHECKING:
    from creditflow.rewards.entries import load_reward_functions, reward_functions_of
    from creditflow.rewards.manager import FunctionReport, RewardManager, ScoringReport

__getattr__ = attach(
    __name__,
    {
        "creditflow.rewards.entries": ("load_reward_functions", "reward_functions_of"),
        "creditflow.rewards.manager": ("FunctionReport", "RewardManager", "ScoringReport"),
    },
)

__all__ = [
    "FunctionReport",
    "RewardFunction",
    "RewardManager",
    "ScoringReport",
    "answer",
    "load_reward_functions",
    "outcome",
    "reward",
    "reward_functions_of",
]


def __dir__() -> list[str]:
    return __all__
