"""GRPO: credit minus the group's mean, divided by its spread."""

from __future__ import annotations

from creditflow.credit.groups import EPSILON
from creditflow.credit.records import Estimate, EstimatorInput, advantage_estimator


@advantage_estimator("grpo", formulas={"divisor": (f"spread + {EPSILON}",)})
def grpo(inputs: EstimatorInput) -> Estimate:
    """`(c - m) / (spread + 1e-6)`, or `c - m` without `norm_adv_by_std_in_grpo` (arXiv 2402.03300; 2503.20783).

    The own trajectory is part of m and of the spread, as in the paper. With one step per trajectory the spread is the
    unbiased standard deviation (n - 1), as in verl's `grpo`; the paper does not specify it. A group of one trajectory
    gets 0; in verl it gets its raw reward.
    """
    scaled = inputs.options.norm_adv_by_std_in_grpo
    return Estimate(inputs.groups.mean_S, inputs.groups.spread_S + EPSILON if scaled else None)
