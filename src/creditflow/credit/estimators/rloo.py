"""RLOO: credit minus the mean of the group's other trajectories."""

from __future__ import annotations

from creditflow.credit.records import Estimate, EstimatorInput, advantage_estimator


@advantage_estimator("rloo")
def rloo(inputs: EstimatorInput) -> Estimate:
    """`c - mean of the group's other trajectories` (arXiv 2402.14740, equation 7).

    The whole own trajectory is left out, because its other steps depend on this one. The baseline is then independent
    of the action, and the gradient is unbiased.
    """
    return Estimate(inputs.groups.others_S)
