"""`leave_one_out`: each agent gets its own reward, the outcome, and its measured contribution to the outcome."""

from __future__ import annotations

import numpy as np

from creditflow.credit.records import GATE_OPTIONS, NOTHING, propagation_rule
from creditflow.credit.rules.base import Credit, PropagationInput, sources
from creditflow.credit.shapley import of_steps


@propagation_rule(
    "leave_one_out",
    ignores=(*GATE_OPTIONS, "share", "shared_reward"),
    flows=NOTHING,
    needs_replays=True,
    engines=("local",),
    reads=("step_weight",),
)
def leave_one_out(inputs: PropagationInput) -> Credit:
    """`c_t = w_r * (r_t - b) + w_o * R + step_weight * (R - R without the agent)`.

    The three parts of SHARP (arXiv 2602.08335): the reward of the process, the outcome for everybody, and the agent's
    marginal contribution, measured by masking the agent. Here a masked agent's answers come from its policy's initial
    model, see `creditflow.credit.shapley`. An agent whose contribution could not be measured is not trained.
    """
    options = inputs.options
    marginal_S = of_steps(inputs.batch, inputs.outcome_known_S, left_out=True)
    unknown_S = np.isnan(marginal_S)
    shared_S = options.w_o * inputs.outcome_S + options.step_weight * np.where(unknown_S, 0.0, marginal_S)
    nothing_S = np.zeros_like(inputs.own_S)
    return Credit(inputs.own_S, nothing_S, shared_S, nothing_S, sources(inputs), frozen_S=unknown_S)
