"""`decoupled`: `own`, with scores rescaled to the spread of the outcomes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from creditflow.credit.groups import group_statistics
from creditflow.credit.history import History
from creditflow.credit.records import (
    NOTHING,
    Credit,
    CreditOptions,
    Fit,
    Formulas,
    Rewards,
    RuleInput,
    propagation_rule,
)
from creditflow.credit.rules.base import OutcomeRule, bits
from creditflow.data import Bools, Floats
from creditflow.errors import ConfigError


@propagation_rule("decoupled")
@dataclass(frozen=True)
class Decoupled(OutcomeRule):
    """`c_t = w_r * spread of R / spread of r * (r_t - b) + w_o * R`.

    GDPO (arXiv 2601.05242) normalises each reward before it adds them, so that a reward that rarely differs keeps its
    weight. Here the rewards are the score and the outcome of a step. Spreads are those of the step's group, over the
    steps with a score or a known outcome. If either is 0, the factor is 1.
    """

    flow: ClassVar[str] = NOTHING
    pays_tokens: ClassVar[bool] = False
    learns: ClassVar[bool] = True

    def fit(self, rewards: Rewards, options: CreditOptions, history: History) -> Fit:
        if not options.estimator.grouped:
            raise ConfigError(
                "algorithm.adv_estimator: decoupled takes spreads within groups: expected an estimator with groups, "
                f"such as grpo, got {options.adv_estimator}"
            )
        of_score_S, of_outcome_S = (
            _spreads(rewards, options, value_S, has_S)
            for value_S, has_S in ((rewards.sub_reward_S, rewards.scored_S), (rewards.outcome_S, rewards.known_S))
        )
        known_S = (of_score_S > 0.0) & (of_outcome_S > 0.0)
        ratio_S = np.where(known_S, of_outcome_S / np.where(known_S, of_score_S, 1.0), 1.0)
        weight_S = self.w_r * ratio_S
        return Fit(weight_S, score_spread_S=of_score_S, outcome_spread_S=of_outcome_S, history=history)

    def formulas(self, options: CreditOptions) -> Formulas:
        formulas = super().formulas(options)
        weights = ("w_r * (outcome_spread / score_spread)", "w_r")
        return {**formulas, "paid": ("score_weight * (sub_reward - sub_reward_origin)",), "score_weight": weights}

    def pay(self, inputs: RuleInput) -> Floats:
        sub_reward_S, fit = inputs.rewards.sub_reward_S, inputs.fit
        assert fit is not None
        assert fit.score_weight_S is not None
        return np.where(np.isnan(sub_reward_S), 0.0, fit.score_weight_S * (sub_reward_S - self.sub_reward_origin))

    def credit(self, inputs: RuleInput) -> Credit:
        credit, rewards = self.paid(inputs), inputs.rewards
        paid_S = rewards.scored_S & inputs.options.decomposed & (self.w_r > 0)  # the outcomes are in their weight
        return replace(credit, reached_S=credit.reached_S | bits(paid_S, paid_S & rewards.known_S))


def _spreads(rewards: Rewards, options: CreditOptions, value_S: Floats, has_S: Bools) -> Floats:
    """[S] the spread of the values in the step's group, over the steps in `has_S`; 0 if all are equal or none."""
    groups = group_statistics(rewards, value_S, has_S & ~rewards.masked_S, options)
    return np.where(groups.tied_S | (groups.group_S < 0), 0.0, groups.spread_S)
