"""`identical`: every step of a trajectory gets its global reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from creditflow.credit.records import Credit, RuleInput, propagation_rule
from creditflow.credit.rules.base import SharingRule


@propagation_rule("identical")
@dataclass(frozen=True)
class Identical(SharingRule):
    """`c_t = R` for every step, as in verl and Agent Lightning."""

    comparison_rank: ClassVar[int] = 1

    def credit(self, inputs: RuleInput) -> Credit:
        return self.give(inputs, self.shared_S(inputs))
