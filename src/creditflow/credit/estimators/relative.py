"""Relative credit: the credit of a rule that compares trajectories itself is the advantage."""

from __future__ import annotations

import numpy as np

from creditflow.credit.records import Estimate, EstimatorInput, advantage_estimator


@advantage_estimator("relative", relative=True)
def relative(inputs: EstimatorInput) -> Estimate:
    """`c`: baseline 0 and divisor 1, for rules such as `gigpo`. A tied task still gets 0."""
    return Estimate(np.where(inputs.groups.group_S >= 0, 0.0, np.nan))
