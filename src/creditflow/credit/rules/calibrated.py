"""`calibrated`: `own` with weights of scores, and a charge for harm, that are learned from the outcomes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from creditflow.credit.fits.posteriors import fit_score_model, observe
from creditflow.credit.fits.score_weights import PART, score_weights
from creditflow.credit.history import History, Sums
from creditflow.credit.records import (
    NOTHING,
    Credit,
    CreditOptions,
    Fit,
    Formulas,
    Rewards,
    RuleInput,
    propagation_rule,
    weight,
)
from creditflow.credit.rules.base import OutcomeRule, bits
from creditflow.data import Floats


@propagation_rule("calibrated")
@dataclass(frozen=True)
class Calibrated(OutcomeRule):
    """`c_t = weight * (r_t - b) + w_m * (p_t - 1) + w_o * R`.

    weight: `w_r` times the share of the outcome that is lost with the score (`creditflow.credit.fits.score_weights`).
    p_t: the probability that the step did no harm, given all scores and the outcome, of scored steps alone.
    """

    flow: ClassVar[str] = NOTHING
    pays_tokens: ClassVar[bool] = False
    learns: ClassVar[bool] = True

    w_m: float = weight(1.0)
    """Weight of the probability of harm, which is charged to each scored step; 0: no model of harm."""
    score_weight: Literal["calibrated", "fixed"] = "calibrated"
    """The weight of scores. `calibrated`: learned per agent from other groups and earlier batches; with few data, near
    `w_r`. `fixed`: `w_r`."""

    def fit(self, rewards: Rewards, options: CreditOptions, history: History) -> Fit | None:
        if not options.decomposed:
            return None
        sums: dict[str, Sums] = {}
        parts: dict[str, Any] = {}
        facts: dict[str, Any] = {}
        if self.score_weight == "calibrated":
            learned = score_weights(rewards, self.w_r, history, options.max_version_lag)
            parts["score_weight_S"], facts["weights"], sums[PART] = learned
        if self.w_m > 0:
            at, seen = observe(rewards)
            rates, harmless, model_sums = fit_score_model(seen, history)
            parts["harmless_S"] = harmless_S = np.full(rewards.batch.n_steps, np.nan)
            harmless_S[at] = harmless
            facts["model"] = rates.facts(rewards.batch.agent_names)
            sums |= model_sums
        return Fit(**parts, facts=facts, history=history.after(sums))

    def formulas(self, options: CreditOptions) -> Formulas:
        above, charge = "(sub_reward - sub_reward_origin)", "w_m * (harmless - 1)"
        pays = (f"score_weight * {above}", f"w_r * {above}")
        return {**super().formulas(options), "paid": (*(f"{pay} + {charge}" for pay in pays), *pays)}

    def pay(self, inputs: RuleInput) -> Floats:
        fit, sub_reward_S = inputs.fit, inputs.rewards.sub_reward_S
        if fit is None:
            return super().pay(inputs)
        weight_S = float(self.w_r) if fit.score_weight_S is None else fit.score_weight_S
        paid_S = weight_S * (sub_reward_S - self.sub_reward_origin)
        if fit.harmless_S is not None:
            paid_S = np.where(np.isnan(fit.harmless_S), paid_S, paid_S + self.w_m * (fit.harmless_S - 1.0))
        return np.where(np.isnan(sub_reward_S), 0.0, paid_S)

    def credit(self, inputs: RuleInput) -> Credit:
        credit, fit, rewards = self.paid(inputs), inputs.fit, inputs.rewards
        if fit is None or fit.harmless_S is None:
            return credit
        charged_S = ~np.isnan(fit.harmless_S) & ~np.isnan(rewards.sub_reward_S)
        return replace(credit, reached_S=credit.reached_S | bits(charged_S, charged_S & rewards.known_S))
