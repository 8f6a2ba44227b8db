"""`replay`: each step gets the mean return of the leaves below it, from branches that were run to their end."""

from __future__ import annotations

import numpy as np

from creditflow.credit.records import GATE_OPTIONS, NOTHING, propagation_rule
from creditflow.credit.rules.base import Credit, PropagationInput, sources


@propagation_rule(
    "replay",
    ignores=(*GATE_OPTIONS, "share", "shared_reward"),
    flows=NOTHING,
    decomposed=True,
    branches=True,
)
def replay(inputs: PropagationInput) -> Credit:
    """`none` with the mean return of the leaves below a step in place of the outcome (C3, arXiv 2603.06859).

    An alternative at a decision gets Qbar_i, the mean return of its continuations. A recorded step whose decision has a
    weight w other than 1 also gets `m (1 - w) / w` times its recorded credit, since the trajectory alone keeps the
    weight 1 - w (`creditflow.credit.trees`). Without branches the rule is `none`.
    """
    nothing_S, w_o = np.zeros_like(inputs.own_S), inputs.options.w_o
    if (branches := inputs.branches) is None:
        return Credit(inputs.own_S, nothing_S, w_o * inputs.outcome_S, nothing_S, sources(inputs))
    recorded_S = inputs.own_S + w_o * inputs.outcome_S
    shared_S = w_o * branches.value_S
    shared_S = np.where(branches.residual_S != 0, shared_S + branches.residual_S * recorded_S, shared_S)
    return Credit(inputs.own_S, nothing_S, shared_S, nothing_S, sources(inputs), frozen_S=branches.left_out_S)
