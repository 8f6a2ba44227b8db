"""`posterior`: a step's own reward is that of its expected sub-reward, given all scores and the outcome."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from creditflow.credit.fits.posteriors import learn_rates, observe, step_posteriors, worth_if_wrong
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
        if self.w_r == 0:
            return None
        if not options.decomposed:  # given the outcome alone
            rewards = replace(rewards, scored_S=np.zeros_like(rewards.scored_S))
        at, seen = observe(rewards)
        rates, observed = learn_rates(seen, history.observations)
        harmless_S = np.full(rewards.batch.n_steps, np.nan)
        harmless_S[at] = step_posteriors(rates, seen).harmless_S
        harmless_S[~(rewards.scored_S | rewards.known_S)] = np.nan  # no evidence about the step
        if_wrong_S, facts = worth_if_wrong(rewards), {"model": rates.facts(rewards.batch.agent_names)}
        return Fit(harmless_S=harmless_S, if_wrong_S=if_wrong_S, facts=facts, history=history.after({}, observed))

    def formulas(self, options: CreditOptions) -> Formulas:
        expected = "harmless + (1 - harmless) * if_wrong"
        return {**super().formulas(options), "paid": (f"w_r * ({expected} - sub_reward_origin)",)}

    def credit(self, inputs: RuleInput) -> Credit:
        zero_S, fit = np.zeros(inputs.batch.n_steps), inputs.fit
        if fit is None or fit.harmless_S is None or fit.if_wrong_S is None:
            return Credit(zero_S, zero_S, zero_S, zero_S.astype(np.uint8), paid_S=zero_S)
        expected_S = fit.harmless_S + (1.0 - fit.harmless_S) * fit.if_wrong_S
        is_paid_S = ~np.isnan(expected_S)
        paid_S = np.where(is_paid_S, float(self.w_r) * (expected_S - self.sub_reward_origin), 0.0)
        known_S = inputs.rewards.known_S & is_paid_S
        reached_S = bits(known_S | (inputs.rewards.scored_S & inputs.options.decomposed), known_S)
        frozen_S = ~is_paid_S & ~inputs.rewards.masked_S  # no evidence about the step
        return Credit(paid_S, zero_S, zero_S, reached_S, paid_S=paid_S, frozen_S=frozen_S if frozen_S.any() else None)
