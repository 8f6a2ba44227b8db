"""The pay for sub-rewards, with its fitted parts: score weights, score model, expected scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from creditflow.credit.decompose import Outcomes, SubRewards
from creditflow.credit.groups import BatchColumns
from creditflow.credit.history import History, Observations, Sums
from creditflow.credit.options import CreditOptions
from creditflow.credit.posteriors import fit_score_model, learn_rates, observe, step_posteriors, worth_if_wrong
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.credit.score_weights import PART, score_weights
from creditflow.data import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Pay:
    """The pay for the sub-rewards of S steps."""

    paid_S: Floats
    """[S] the weight times the sub-reward above the origin, less the charge for harm; 0 for steps without pay."""
    is_paid_S: Bools
    """[S] scored, with a substitute for a failed score, or with an expected sub-reward."""
    score_weight_S: Floats
    """[S] `w_r`, or a calibrated weight."""
    fold_S: Ints
    """[S] the fold of cross-fitting behind a calibrated weight; -1 without one."""
    harmless_S: Floats
    """[S] the probability that the step did no harm; NaN without a model of it."""
    facts: dict[str, Any]
    """Slopes and rates as plain numbers, for the record of a training step."""
    history: History
    """The history for the next batch."""


def pay_for_scores(
    columns: BatchColumns, options: CreditOptions, outcome: Outcomes, rewards: SubRewards, history: History
) -> Pay:
    """Compute the pay, and fit the parts that the options use to the batch and the history."""
    batch, rule = columns.batch, PROPAGATION_RULES[options.propagation]
    by_score = options.decomposed and rule.pays_own and not rule.expects
    sub_reward_S, harmless_S = rewards.value_S, np.full(batch.n_steps, np.nan)
    score_weight_S, fold_S = np.full(batch.n_steps, float(options.w_r)), np.full(batch.n_steps, -1)
    facts: dict[str, Any] = {}
    sums: dict[str, Sums] = {}
    observed: Observations | None = None
    if by_score and options.score_weight == "calibrated":
        weights = score_weights(columns, outcome, rewards, options.w_r, history.sums(PART))
        score_weight_S, fold_S, sums[PART] = weights.value_S, weights.fold_S, weights.sums
        facts["weights"] = weights.facts(batch.agent_names)
    charges = by_score and options.score_model != "none"
    if charges or options.pays_expected_score:
        at, seen = observe(batch, outcome, rewards)
        if charges:
            rates, harmless_S[at], model_sums = fit_score_model(seen, history)
            sums |= model_sums
        else:
            rates, observed = learn_rates(seen, history.observations)
            harmless_S[at] = step_posteriors(rates, seen).harmless_S
            harmless_S[~(rewards.scored_S | outcome.known_S)] = np.nan  # no evidence about the step
            worth_S = worth_if_wrong(batch, rewards.value_S, rewards.scored_S, outcome.masked_S)
            sub_reward_S = harmless_S + (1.0 - harmless_S) * worth_S
        facts["model"] = rates.facts(batch.agent_names)
    is_paid_S = ~np.isnan(sub_reward_S)
    paid_S = score_weight_S * (sub_reward_S - options.sub_reward_origin)
    if charges:
        paid_S = np.where(np.isnan(harmless_S), paid_S, paid_S + options.w_m * (harmless_S - 1.0))
    return Pay(
        np.where(is_paid_S, paid_S, 0.0),
        is_paid_S,
        score_weight_S,
        fold_S,
        harmless_S,
        facts,
        history.after(sums, observed),
    )
