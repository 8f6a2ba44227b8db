"""Metrics of training steps and evaluations, and the guard rules on them. Reads a run without changing it."""

from creditflow.monitoring.evaluation import Evaluation
from creditflow.monitoring.guard import Guard, GuardEvent, GuardStop
from creditflow.monitoring.guard_rules.base import GuardRule, RuleResult, guard_rule
from creditflow.monitoring.metrics import (
    error_metrics,
    evaluation_metrics,
    passes,
    rollout_metrics,
    step_errors,
    sub_reward_metrics,
)

__all__ = [
    "Evaluation",
    "Guard",
    "GuardEvent",
    "GuardRule",
    "GuardStop",
    "RuleResult",
    "error_metrics",
    "evaluation_metrics",
    "guard_rule",
    "passes",
    "rollout_metrics",
    "step_errors",
    "sub_reward_metrics",
]
