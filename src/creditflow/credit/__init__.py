"""Credit assignment: arrays in, arrays out. Useful alone; needs numpy and the nouns, and knows no model or file.

`assign(batch, CreditOptions())` decides for every step of every agent how much of the reward it earned.
"""

from creditflow.credit.advantage import Credited, advantage_estimator
from creditflow.credit.assignment import Assignment, assign
from creditflow.credit.metrics import unreached_agents
from creditflow.credit.options import CreditOptions
from creditflow.credit.propagate import Credit, Flow, propagation_rule

__all__ = [
    "Assignment",
    "Credit",
    "CreditOptions",
    "Credited",
    "Flow",
    "advantage_estimator",
    "assign",
    "propagation_rule",
    "unreached_agents",
]
