"""REINFORCE++ with baseline: credit minus the group's mean, whitened."""

from __future__ import annotations

from creditflow.credit.records import Estimate, EstimatorInput, advantage_estimator


@advantage_estimator("reinforce_plus_plus_baseline", whitened=True)
def reinforce_plus_plus_baseline(inputs: EstimatorInput) -> Estimate:
    """`c - m`, whitened (arXiv 2501.03262, "with baseline")."""
    return Estimate(inputs.groups.mean_S)
