"""Metrics of training steps and evaluations, and the guard rules on them. Reads a run without changing it."""

from creditflow.monitor.evaluation import Evaluation
from creditflow.monitor.guard import Event, Guard, GuardStop
from creditflow.monitor.metrics import (
    error_metrics,
    evaluation_metrics,
    passes,
    rollout_metrics,
    step_errors,
    sub_reward_metrics,
)
from creditflow.monitor.rules import Finding, Rule, guard_rule

__all__ = [
    "Evaluation",
    "Event",
    "Finding",
    "Guard",
    "GuardStop",
    "Rule",
    "error_metrics",
    "evaluation_metrics",
    "guard_rule",
    "passes",
    "rollout_metrics",
    "step_errors",
    "sub_reward_metrics",
]
