"""`discounted`: credit flows to parents, discounted by step."""

from __future__ import annotations

import numpy as np

from creditflow.credit.records import FORMULA, GATE_OPTIONS, propagation_rule
from creditflow.credit.rules.base import Credit, PropagationInput, decomposed


@propagation_rule(
    "discounted", ignores=(*GATE_OPTIONS, "shared_reward"), comparison_rank=3, flows=FORMULA, decomposed=True
)
def discounted(inputs: PropagationInput) -> Credit:
    """The formula with every gate open."""
    return decomposed(inputs, np.ones_like(inputs.paid_S))
