"""`uniform`: the global reward is divided evenly among the steps of a trajectory."""

from __future__ import annotations

import numpy as np

from creditflow.credit.records import GATE_OPTIONS, NOTHING, propagation_rule
from creditflow.credit.rules.base import SHARED_REWARDS, Credit, PropagationInput, shared_credit


@propagation_rule("uniform", pays_own=False, shares=True, ignores=(*GATE_OPTIONS, "outcome_to"), flows=NOTHING)
def uniform(inputs: PropagationInput) -> Credit:
    """`c_t = R / #steps`: conserves R, and thus rewards short trajectories."""
    steps_N = np.bincount(inputs.batch.trajectory_of_step, minlength=inputs.batch.n_trajectories)
    reward_S = SHARED_REWARDS[inputs.options.shared_reward](inputs)
    return shared_credit(inputs, reward_S / steps_N[inputs.batch.trajectory_of_step])
