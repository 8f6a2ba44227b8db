"""`decoupled`: a step's score, its expectation and the outcome, each normalised apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from creditflow.credit.fits.posteriors import expected_sub_reward, fit_posterior
from creditflow.credit.history import History
from creditflow.credit.records import Credit, CreditOptions, Fit, Rewards, RuleInput, propagation_rule, weight
from creditflow.credit.rules.base import bits
from creditflow.credit.rules.relative import RelativeRule, by_steps, comparable, scored
from creditflow.data import Bools, Floats


@propagation_rule("decoupled")
@dataclass(frozen=True)
class Decoupled(RelativeRule):
    """`A_t = w_r * GN(r_t) + w_x * GN(x_t) + w_o * GN(R)`.

    GDPO (arXiv 2601.05242) normalises each reward before it adds them, so that a reward that rarely differs keeps its
    weight. Here they are the step's own score, its expectation `x_t` given all scores and the outcome (as in the rule
    `posterior`), and the outcome. GN: over the steps in the group that have the value.
    """

    by_task: ClassVar[bool] = False
    learns: ClassVar[bool] = True

    w_o: float = weight(0.5)
    """Weight of the outcome, at least 0."""
    w_x: float = weight(0.5)
    """Weight of the expected score, at least 0; 0: nothing is learned."""

    def fit(self, rewards: Rewards, options: CreditOptions, history: History) -> Fit | None:
        return fit_posterior(rewards, options, history) if self.w_x > 0 else None

    def credit(self, inputs: RuleInput) -> Credit:
        rewards, scored_S, known_S = inputs.rewards, scored(inputs), inputs.rewards.known_S
        level, over_S, expected_S = inputs.options.group_by, comparable(inputs), expected_sub_reward(inputs.fit)

        def part(weight: float, value_S: Floats, has_S: Bools) -> Floats:
            return weight * by_steps(inputs, np.where(has_S, value_S, 0.0), level, over_S & has_S)

        own_S = part(self.w_r, rewards.sub_reward_S, scored_S)
        if expected_S is not None:
            own_S += part(self.w_x, expected_S, ~np.isnan(expected_S))
        shared_S = part(self.w_o, rewards.outcome_S, known_S)
        return Credit(own_S, np.zeros_like(own_S), shared_S, bits(scored_S | known_S, known_S))
