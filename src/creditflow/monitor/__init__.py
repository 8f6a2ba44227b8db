"""Looks on: turns what happened in a training step or an evaluation into named numbers. Changes nothing."""

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
