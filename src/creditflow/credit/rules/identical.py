"""`identical`: every step of a trajectory gets its global reward."""

from __future__ import annotations

from creditflow.credit.records import GATE_OPTIONS, NOTHING, propagation_rule
from creditflow.credit.rules.base import SHARED_REWARDS, Credit, PropagationInput, shared_credit


@propagation_rule(
    "identical",
    pays_own=False,
    shares=True,
    ignores=(*GATE_OPTIONS, "outcome_to"),
    comparison_rank=1,
    flows=NOTHING,
)
def identical(inputs: PropagationInput) -> Credit:
    """`c_t = R` for every step, as in verl and Agent Lightning."""
    return shared_credit(inputs, SHARED_REWARDS[inputs.options.shared_reward](inputs))
