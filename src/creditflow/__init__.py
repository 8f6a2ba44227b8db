"""Trains teams of LLM agents, and decides for every step of every agent how much of the reward it earned.

Importing this package loads numpy and nothing heavier; what needs torch is imported where it is used.
"""

from creditflow.credit import Assignment, CreditOptions, assign
from creditflow.errors import AgentError, CreditflowError, InputError
from creditflow.reward import RewardManager, outcome, reward
from creditflow.rollout import Reply, Team
from creditflow.trajectory import Score, Step, Task, Trajectory, TrajectoryBatch

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
