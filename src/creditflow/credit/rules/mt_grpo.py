"""`mt_grpo`: the normalised rewards of this turn and later ones, plus the normalised outcome."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from creditflow.credit.records import Credit, RuleInput, propagation_rule
from creditflow.credit.rules.base import flow_up
from creditflow.credit.rules.relative import WeightedRule, by_steps, comparable, credit_of


@propagation_rule("mt_grpo")
@dataclass(frozen=True)
class MtGrpo(WeightedRule):
    """`A_t = step_weight * sum over k >= t of GN(r_k) + episode_weight * GN(R)`.

    MT-GRPO (arXiv 2505.11821) adds the normalised reward of a turn to the normalised outcome. The sum over later turns
    is its form for more than two turns, as described in arXiv 2604.02869. GN(r_k): over the rollouts of the task, at
    the same agent and turn. The sum follows edges, discounted by `gamma` (1 in the preset).

    The sum biases the gradient: it has one baseline for each remaining turn, and their number depends on when the
    policy stops.
    """

    def credit(self, inputs: RuleInput) -> Credit:
        over_S = comparable(inputs) & ~np.isnan(inputs.rewards.sub_reward_S)
        own_S = by_steps(inputs, self.pay(inputs), "task_agent_turn", over_S)
        received_S = flow_up(inputs.batch, own_S, np.ones_like(own_S), inputs.options.gamma)
        weight = self.step_weight
        return credit_of(inputs, weight * own_S, weight * received_S, self.episode_S(inputs))
