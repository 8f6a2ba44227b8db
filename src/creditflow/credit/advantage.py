"""Estimators: from credit to advantage, the number that the loss multiplies log-probabilities with.

An estimator sees credit and groups. It does not know which rule made the credit, nor what model is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from creditflow.credit.groups import Groups, compact
from creditflow.credit.registry import Registry
from creditflow.trajectory import Bools, Floats, Ints, TrajectoryBatch

if TYPE_CHECKING:
    from creditflow.credit.options import CreditOptions

EPSILON = 1e-6
"""Added to the spread before dividing, as verl does."""

MAX_STRATUM_WEIGHT = 2.0
"""A stratum of a few steps must not have its noise multiplied: at 10, a verifier's forty wrong candidates among six
hundred drowned what everybody else had to learn, and learning rates above 3e-4 diverged on arithmetic_chain."""


@dataclass(frozen=True, slots=True)
class Credited:
    """What an estimator may look at."""

    batch: TrajectoryBatch
    options: CreditOptions
    credit_S: Floats
    """[S] c_t."""
    trained_S: Bools
    """[S] steps that the loss will see; the others are in no mean."""
    groups: Groups


Estimator = Callable[[Credited], Floats]
"""[S] advantages, before weights; where a step is masked, tied or without a group the caller sets 0."""

ADVANTAGE_ESTIMATORS: Registry[Estimator] = Registry("algorithm.adv_estimator")


def advantage_estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Register a function from Credited to [S] advantages as `algorithm.adv_estimator: name`."""

    def register(function: Estimator) -> Estimator:
        ADVANTAGE_ESTIMATORS.add(name, function)
        return function

    return register


@advantage_estimator("grpo")
def grpo(given: Credited) -> Floats:
    """`(c - m) / (spread + 1e-6)`, or `c - m` without `norm_adv_by_std_in_grpo` (arXiv 2402.03300).

    The own trajectory is part of m and of the spread, as in the paper. With one step per trajectory the spread is the
    unbiased standard deviation (n - 1), as in verl's estimator of this name; the paper leaves that open. Unlike verl's,
    a group of one gets 0 rather than its raw reward.
    """
    difference_S = given.credit_S - given.groups.mean_S
    if not given.options.norm_adv_by_std_in_grpo:
        return difference_S
    return difference_S / (given.groups.spread_S + EPSILON)


def stratum_weights(batch: TrajectoryBatch, stratum_S: Ints, trained_S: Bools) -> Floats:
    """[S] weights that give each stratum the same say within an agent and policy; 1 for steps without a stratum.

    A stratum of n_s out of n trained steps, L strata occurring, weighs `n / (L * n_s)` per step: all strata have the
    same total, and the mean weight is 1. Capped at MAX_STRATUM_WEIGHT, beyond which the mean falls below 1.
    """
    weight_S = np.ones(batch.n_steps)
    at = np.flatnonzero(trained_S & (stratum_S >= 0))
    if not at.size:
        return weight_S
    agent, n_agents = compact(batch.agent_of_step[at], batch.policy_of_step[at])
    stratum, n_strata = compact(agent, stratum_S[at])
    steps_of_stratum = np.bincount(stratum, minlength=n_strata)
    agent_of_stratum = np.empty(n_strata, dtype=np.int64)
    agent_of_stratum[stratum] = agent
    strata_of_agent = np.bincount(agent_of_stratum, minlength=n_agents)
    steps_of_agent = np.bincount(agent, minlength=n_agents)
    weight = steps_of_agent[agent] / (strata_of_agent[agent] * steps_of_stratum[stratum])
    weight_S[at] = np.minimum(weight, MAX_STRATUM_WEIGHT)
    return weight_S
