"""Conformance checks for a user's reward function, propagation rule or threshold.

Each function returns a Report, or raises one ConformanceError that lists every failed check. The checks need no test
framework and no model.
"""

from creditflow.testing.report import ConformanceError, FailedCheck, Fault, Report
from creditflow.testing.rewards import check_reward_function
from creditflow.testing.rules import check_propagation_rule
from creditflow.testing.thresholds import check_threshold

__all__ = [
    "ConformanceError",
    "FailedCheck",
    "Fault",
    "Report",
    "check_propagation_rule",
    "check_reward_function",
    "check_threshold",
]
