"""Credit assignment: arrays in, arrays out. Useful alone; needs numpy and the nouns, and knows no model or file.

`assign(batch, CreditOptions())` decides for every step of every agent how much of the reward it earned; `explain` says
where one number came from; `check_groups` what is wrong with a batch of plays.
"""

from creditflow.credit.advantage import Credited, Estimate, advantage_estimator
from creditflow.credit.assignment import Assignment, assign
from creditflow.credit.explain import Explanation, explain
from creditflow.credit.groups import Groups
from creditflow.credit.linter import Finding, check_groups
from creditflow.credit.metrics import unreached_agents
from creditflow.credit.options import CreditOptions
from creditflow.credit.propagate import Credit, Flow, propagation_rule
from creditflow.credit.thresholds import Observed, Threshold, make_threshold, threshold_kind

__all__ = [
    "Assignment",
    "Credit",
    "CreditOptions",
    "Credited",
    "Estimate",
    "Explanation",
    "Finding",
    "Flow",
    "Groups",
    "Observed",
    "Threshold",
    "advantage_estimator",
    "assign",
    "check_groups",
    "explain",
    "make_threshold",
    "propagation_rule",
    "threshold_kind",
    "unreached_agents",
]
