"""`decoupled`: `own`, with scores and outcomes weighed by their spread."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from creditflow.credit.groups import TIE_TOLERANCE, cells_of, group_codes
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


@propagation_rule("decoupled")
@dataclass(frozen=True)
class Decoupled(OutcomeRule):
    """`c_t = w_r * spread of R / spread of r * (r_t - b) + w_o * R`.

    GDPO (arXiv 2601.05242) normalises each reward before it adds them, so that a reward that rarely differs keeps its
    weight. Here they are the score and the outcome of a step, with the spreads of its group (`algorithm.group_by`).
    Each spread is over the steps that have the value. Where one of them is 0, the factor is 1.
    """

    flow: ClassVar[str] = NOTHING
    pays_tokens: ClassVar[bool] = False
    learns: ClassVar[bool] = True

    def fit(self, rewards: Rewards, options: CreditOptions, history: History) -> Fit:
        of_score_S, of_outcome_S = (
            _spreads(rewards, options, value_S, has_S)
            for value_S, has_S in ((rewards.sub_reward_S, rewards.scored_S), (rewards.outcome_S, rewards.known_S))
        )
        known_S = (of_score_S > 0.0) & (of_outcome_S > 0.0)
        ratio_S = np.where(known_S, of_outcome_S / np.where(known_S, of_score_S, 1.0), 1.0)
        return Fit(score_weight_S=self.w_r * ratio_S, history=history)

    def formulas(self, options: CreditOptions) -> Formulas:
        return {**super().formulas(options), "paid": ("score_weight * (sub_reward - sub_reward_origin)",)}

    def pay(self, inputs: RuleInput) -> Floats:
        sub_reward_S, fit = inputs.rewards.sub_reward_S, inputs.fit
        assert fit is not None
        assert fit.score_weight_S is not None
        return np.where(np.isnan(sub_reward_S), 0.0, fit.score_weight_S * (sub_reward_S - self.sub_reward_origin))

    def credit(self, inputs: RuleInput) -> Credit:
        credit, rewards = self.paid(inputs), inputs.rewards
        return replace(credit, reached_S=credit.reached_S | bits(rewards.scored_S, rewards.scored_S & rewards.known_S))


def _spreads(rewards: Rewards, options: CreditOptions, value_S: Floats, has_S: Bools) -> Floats:
    """[S] the spread of the values in the step's group, over the steps in `has_S`; 0 if equal or missing."""
    batch, at = rewards.batch, np.flatnonzero(has_S & ~rewards.masked_S)
    code_S = group_codes(batch, options.group_by, options.max_version_lag, rewards.stratum_S)
    spread_S = np.zeros(batch.n_steps)
    if at.size:
        cells = cells_of(value_S[at], code_S[at], batch.trajectory_of_step[at])
        tied_G = cells.spread_G <= TIE_TOLERANCE * np.maximum(1.0, np.abs(cells.mean_G))
        spread_S[at] = np.where(tied_G, 0.0, cells.spread_G)[code_S[at]]
    return spread_S
