"""`own`: a step's own score and the outcome. No credit moves between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from creditflow.credit.records import NOTHING, Credit, RuleInput, propagation_rule
from creditflow.credit.rules.base import OutcomeRule


@propagation_rule("own")
@dataclass(frozen=True)
class Own(OutcomeRule):
    """`c_t = w_r * (r_t - b) + w_o * R`."""

    flow: ClassVar[str] = NOTHING
    comparison_rank: ClassVar[int] = 2

    def credit(self, inputs: RuleInput) -> Credit:
        return self.paid(inputs)
