"""What each step and each trajectory earned: reward functions, how they are found and how they are run.

This room knows nothing of credit, models or training: it fills `step.scores` and `trajectory.outcome`, and reports.
"""

from creditflow.reward.entries import load_reward_functions
from creditflow.reward.manager import FunctionReport, RewardManager, ScoringReport
from creditflow.reward.registry import RewardFunction, answer, outcome, reward

__all__ = [
    "FunctionReport",
    "RewardFunction",
    "RewardManager",
    "ScoringReport",
    "answer",
    "load_reward_functions",
    "outcome",
    "reward",
]
