"""Credit assignment on arrays. Usable alone: needs numpy, numba and `creditflow.data`, no model and no file.

`assign(batch, CreditOptions())` computes the credit and the advantage of every step. `explain` lists the operations
behind one advantage. `check_groups` lists the problems of a batch.
"""

from creditflow.credit.analysis.explain import Explanation, explain
from creditflow.credit.analysis.linter import LintFinding, check_groups
from creditflow.credit.analysis.metrics import unreached_agents
from creditflow.credit.assignment import Assignment, assign
from creditflow.credit.estimators.base import Estimate, EstimatorInput
from creditflow.credit.groups import Groups
from creditflow.credit.options import CreditOptions
from creditflow.credit.records import advantage_estimator, propagation_rule
from creditflow.credit.rules.base import Credit, PropagationInput
from creditflow.credit.thresholds.base import BatchStats, Threshold, make_threshold, threshold_kind

__all__ = [
    "Assignment",
    "BatchStats",
    "Credit",
    "CreditOptions",
    "Estimate",
    "EstimatorInput",
    "Explanation",
    "Groups",
    "LintFinding",
    "PropagationInput",
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
