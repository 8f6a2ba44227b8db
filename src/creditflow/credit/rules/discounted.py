"""`discounted`: credit flows to parents, discounted by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from creditflow.credit.records import FORMULA, Credit, RuleInput, propagation_rule
from creditflow.credit.rules.base import OutcomeRule


@propagation_rule("discounted")
@dataclass(frozen=True)
class Discounted(OutcomeRule):
    """`c_t = h_t + w_o * R`: own rewards flow to the parents of their steps, discounted.

    `h_t = e_t + gamma * sum over children k of h_k / #parents(k)`, with the own reward `e_t = w_r * (r_t - b)`.
    """

    flow: ClassVar[str] = FORMULA
    comparison_rank: ClassVar[int] = 3

    def credit(self, inputs: RuleInput) -> Credit:
        return self.paid(inputs, np.ones(inputs.batch.n_steps))
