"""The parts of credit that are fitted to data: prefix baseline, score weights, score model, expected scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from creditflow.credit import outcome_baseline, score_model, score_weights
from creditflow.credit.decompose import Outcomes, SubRewards
from creditflow.credit.expected_scores import ExpectedScores, expected_scores
from creditflow.credit.groups import BatchColumns
from creditflow.credit.history import History, Sums
from creditflow.credit.options import CreditOptions
from creditflow.credit.outcome_baseline import OutcomeBaseline
from creditflow.credit.records import PREFIX_FEATURES, PROPAGATION_RULES
from creditflow.credit.score_model import ScoreModel
from creditflow.credit.score_weights import ScoreWeights
from creditflow.credit.step_posteriors import successes
from creditflow.credit.tokens import at_first_token
from creditflow.data import Bools, Floats, TrajectoryBatch
from creditflow.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """The fitted parts of one batch; None for each that the options do not use."""

    baseline: OutcomeBaseline | None
    weights: ScoreWeights | None
    model: ScoreModel | None
    expected: ExpectedScores | None

    def sums(self) -> dict[str, Sums]:
        """The batch's contribution to the history, by part."""
        made: dict[str, Sums] = {}
        if self.baseline is not None:
            made[outcome_baseline.part_of(self.baseline.further)] = self.baseline.sums
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
        """Coefficients, slopes and rates as plain numbers, for the record of a training step."""
        made: dict[str, Any] = {}
        if self.baseline is not None:
            made["baseline"] = {
                "features": list(self.baseline.names),
                "coefficients": dict(zip(agents, self.baseline.coefficient_KAF.swapaxes(0, 1).tolist(), strict=True)),
            }
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
    return options.outcome_baseline == "prefix" or by_score or options.pays_expected_score


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
    values_T: Floats | None = None,
) -> Fitted:
    """Fit the parts that the options use, to the batch and the history.

    `values_T`: a critic's values at each sampled token; the prefix baseline takes that of a step's first one as a
    feature. Raises ConfigError if the user's features are not finite arrays [S].
    """
    known_S, judged_S = outcome.known_S & kept_S, rewards.scored_S & options.decomposed
    baseline = weights = model = expected = None
    if options.outcome_baseline == "prefix":
        further = _further_features(columns.batch, options, values_T)
        baseline = outcome_baseline.outcome_baseline(
            columns,
            outcome.value_S,
            known_S,
            rewards.value_S,
            judged_S,
            history.sums(outcome_baseline.part_of(further)),
            further,
        )
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
    return Fitted(baseline, weights, model, expected)


_LARGEST = 1e9
"""The largest absolute value of a feature; squares of larger ones lose their precision."""


def _further_features(batch: TrajectoryBatch, options: CreditOptions, values_T: Floats | None) -> dict[str, Floats]:
    """[S] the features of the user's function and of a critic, by name."""
    found: dict[str, Floats] = {}
    if options.prefix_features is not None:
        made = PREFIX_FEATURES[options.prefix_features](batch)
        if not isinstance(made, Mapping):
            kind = type(made).__name__
            raise ConfigError(f"algorithm.prefix_features: expected a mapping from names to arrays [S], got {kind}")
        for name, values in made.items():
            if (taken := str(name)) in (*outcome_baseline.FEATURES, "critic"):
                raise ConfigError(f"algorithm.prefix_features: expected a new name, got {taken!r}, a built-in feature")
            try:
                values_S = np.asarray(values, dtype=np.float64)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"algorithm.prefix_features: {name}: expected numbers: {error}") from error
            small = np.abs(values_S) <= _LARGEST  # False for NaN
            if values_S.shape != (batch.n_steps,) or not small.all():
                raise ConfigError(
                    f"algorithm.prefix_features: {name}: expected numbers up to {_LARGEST:g} of shape "
                    f"({batch.n_steps},), got shape {values_S.shape} with {int((~small).sum())} other values"
                )
            found[str(name)] = values_S
    if values_T is not None:
        found["critic"] = at_first_token(batch, np.asarray(values_T, dtype=np.float64), 0.0)
    return found


def coefficients_of(facts: Mapping[str, Any], agent: str, fold: int) -> tuple[tuple[str, ...], list[float]]:
    """(names of the features, intercept and coefficients) of an agent's prefix baseline, from `Fitted.facts`."""
    baseline = facts["baseline"]
    return tuple(baseline["features"]), [float(value) for value in baseline["coefficients"][agent][fold]]
