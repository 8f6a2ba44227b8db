"""The parts of credit that are fitted to data: score weights, score model, expected scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from creditflow.credit import score_model, score_weights
from creditflow.credit.decompose import Outcomes, SubRewards
from creditflow.credit.expected_scores import ExpectedScores, expected_scores
from creditflow.credit.groups import BatchColumns
from creditflow.credit.history import History, Sums
from creditflow.credit.options import CreditOptions
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.credit.score_model import ScoreModel
from creditflow.credit.score_weights import ScoreWeights
from creditflow.credit.step_posteriors import successes
from creditflow.data import Bools, Floats


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """The fitted parts of one batch; None for each that the options do not use."""

    weights: ScoreWeights | None
    model: ScoreModel | None
    expected: ExpectedScores | None

    def sums(self) -> dict[str, Sums]:
        """The batch's contribution to the history, by part."""
        made: dict[str, Sums] = {}
        if self.weights is not None:
            made[score_weights.PART] = self.weights.sums
        if self.model is not None:
            made |= {score_model.PART: self.model.counts, score_model.SLIPS: self.model.slips}
        return made

    @property
    def harmless_S(self) -> Floats | None:
        """[S] the probability that a step did no harm; None without a model of it."""
        found = self.expected or self.model
        return None if found is None else found.harmless_S

    def history_after(self, history: History) -> History:
        """The history for the next batch."""
        return history.after(self.sums(), history.shadow, None if self.expected is None else self.expected.observed)

    def facts(self, agents: tuple[str, ...]) -> dict[str, Any]:
        """Slopes and rates as plain numbers, for the record of a training step."""
        made: dict[str, Any] = {}
        if self.weights is not None:
            found = self.weights
            columns = {"slopes": found.slope_KA, "errors": found.error_KA, "full": found.full_KA}
            lists = {key: _finite(values_KA) for key, values_KA in columns.items()}
            made["weights"] = {
                name: {key: [row[a] for row in rows] for key, rows in lists.items()} for a, name in enumerate(agents)
            }
        if (found_rates := self.expected or self.model) is not None:
            rates = found_rates.rates
            made["model"] = {
                "slip": rates.slip,
                "agents": {
                    name: {
                        "harm": float(rates.harm_A[a]),
                        "survives": float(rates.survives_A[a]),
                        "scores": rates.score_AZB[a].tolist(),
                    }
                    for a, name in enumerate(agents)
                },
            }
        return made


def _finite(values_KA: Any) -> list[list[float | None]]:
    return [[float(value) if np.isfinite(value) else None for value in row] for row in values_KA]


def fits(options: CreditOptions) -> bool:
    """Whether the options use a fitted part."""
    of_scores = options.score_weight == "calibrated" or options.score_model != "none"
    by_score = of_scores and _pays_by_score(options)
    return by_score or options.pays_expected_score


def _pays_by_score(options: CreditOptions) -> bool:
    """Whether a step is paid for its own score."""
    rule = PROPAGATION_RULES[options.propagation]
    return options.decomposed and rule.pays_own and not rule.expects


def fit(
    columns: BatchColumns,
    options: CreditOptions,
    outcome: Outcomes,
    rewards: SubRewards,
    kept_S: Bools,
    history: History,
) -> Fitted:
    """Fit the parts that the options use, to the batch and the history."""
    known_S, judged_S = outcome.known_S & kept_S, rewards.scored_S & options.decomposed
    weights = model = expected = None
    if options.score_weight == "calibrated" and _pays_by_score(options):
        weights = score_weights.score_weights(
            columns,
            outcome.value_S,
            known_S,
            rewards.value_S,
            judged_S,
            options.w_r,
            history.sums(score_weights.PART),
        )
    if options.score_model != "none" and _pays_by_score(options):
        model = score_model.score_model(
            columns.batch,
            successes(columns.batch, outcome.value_S),
            known_S,
            kept_S,
            rewards.value_S,
            judged_S,
            history.sums(score_model.PART),
            history.sums(score_model.SLIPS),
        )
    if options.pays_expected_score:
        expected = expected_scores(
            columns.batch,
            successes(columns.batch, outcome.value_S),
            known_S,
            kept_S,
            outcome.masked_S,
            rewards.value_S,
            judged_S,
            history.observations,
        )
    return Fitted(weights, model, expected)
