"""`none`: no credit moves between steps."""

from __future__ import annotations

import numpy as np

from creditflow.credit.records import GATE_OPTIONS, NOTHING, propagation_rule
from creditflow.credit.rules.base import OUTCOME_TO, Credit, PropagationInput, sources


@propagation_rule("none", ignores=(*GATE_OPTIONS, "shared_reward"), comparison_rank=2, flows=NOTHING, decomposed=True)
def none(inputs: PropagationInput) -> Credit:
    """The step's own reward, and the outcome as set by `outcome_to`; no flow between steps."""
    own_S, shared_S = OUTCOME_TO[inputs.options.outcome_to](inputs)
    zero_S = np.zeros_like(own_S)
    return Credit(own_S, zero_S, shared_S, zero_S, sources(inputs))
