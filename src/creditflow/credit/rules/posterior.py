"""`posterior`: a step's own reward is that of its expected sub-reward, given all scores and the outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from creditflow.credit.fits.posteriors import expected_sub_reward, fit_posterior
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
from creditflow.credit.rules.base import ScoreRule, bits


@propagation_rule("posterior")
@dataclass(frozen=True)
class Posterior(ScoreRule):
    """`c_t = w_r * (x_t - b)` with the expected sub-reward `x_t = p_t + (1 - p_t) * v_t`.

    p_t: the probability that the step did no harm (`creditflow.credit.fits.posteriors`), which contains the outcome.
    The outcome is not paid again. v_t: the sub-reward of a wrong step.
    """

    flow: ClassVar[str] = NOTHING
    learns: ClassVar[bool] = True
    why_frozen: ClassVar[str] = "neither its score nor the outcome is known"
    comparison_rank: ClassVar[int] = 5

    def fit(self, rewards: Rewards, options: CreditOptions, history: History) -> Fit | None:
        return fit_posterior(rewards, options, history) if self.w_r > 0 else None

    def formulas(self, options: CreditOptions) -> Formulas:
        expected = "harmless + (1 - harmless) * if_wrong"
        return {**super().formulas(options), "paid": (f"w_r * ({expected} - sub_reward_origin)",)}

    def credit(self, inputs: RuleInput) -> Credit:
        zero_S, expected_S = np.zeros(inputs.batch.n_steps), expected_sub_reward(inputs.fit)
        if expected_S is None:
            return Credit(zero_S, zero_S, zero_S, zero_S.astype(np.uint8), paid_S=zero_S)
        is_paid_S = ~np.isnan(expected_S)
        paid_S = np.where(is_paid_S, float(self.w_r) * (expected_S - self.sub_reward_origin), 0.0)
        known_S = inputs.rewards.known_S & is_paid_S
        reached_S = bits(known_S | (inputs.rewards.scored_S & inputs.options.decomposed), known_S)
        frozen_S = ~is_paid_S & ~inputs.rewards.masked_S  # no evidence about the step
        return Credit(paid_S, zero_S, zero_S, reached_S, paid_S=paid_S, frozen_S=frozen_S if frozen_S.any() else None)
