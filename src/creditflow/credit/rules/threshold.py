"""`threshold`: credit flows to parents through gates that open above a threshold."""

from __future__ import annotations

import numpy as np

from creditflow.credit.records import FORMULA, propagation_rule
from creditflow.credit.rules.base import Credit, PropagationInput, decomposed


@propagation_rule("threshold", ignores=("shared_reward",), comparison_rank=4, flows=FORMULA, decomposed=True)
def threshold(inputs: PropagationInput) -> Credit:
    """The formula."""
    return decomposed(inputs, inputs.gate_open_S.astype(np.float64))
