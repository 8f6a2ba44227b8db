"""`shapley`: each agent gets its Shapley value in place of the outcome."""

from __future__ import annotations

import numpy as np

from creditflow.credit.records import GATE_OPTIONS, NOTHING, propagation_rule
from creditflow.credit.rules.base import Credit, PropagationInput, sources
from creditflow.credit.shapley import of_steps


@propagation_rule(
    "shapley",
    ignores=(*GATE_OPTIONS, "share", "shared_reward"),
    flows=NOTHING,
    needs_replays=True,
    engines=("local",),
    decomposed=True,
)
def shapley(inputs: PropagationInput) -> Credit:
    """`none` with the agent's Shapley value in place of the outcome, see `creditflow.credit.shapley`."""
    value_S = of_steps(inputs.batch, inputs.outcome_known_S)
    nothing_S = np.zeros_like(inputs.own_S)
    return Credit(inputs.own_S, nothing_S, inputs.options.w_o * value_S, nothing_S, sources(inputs))
