"""`uniform`: the global reward is divided evenly among the steps of a trajectory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from creditflow.credit.records import Credit, RuleInput, propagation_rule
from creditflow.credit.rules.base import SharingRule


@propagation_rule("uniform")
@dataclass(frozen=True)
class Uniform(SharingRule):
    """`c_t = R / #steps`: conserves R, and thus rewards short trajectories."""

    def credit(self, inputs: RuleInput) -> Credit:
        steps_N = np.bincount(inputs.batch.trajectory_of_step, minlength=inputs.batch.n_trajectories)
        return self.give(inputs, self.shared_S(inputs) / steps_N[inputs.batch.trajectory_of_step])
