"""Probabilities that steps did no harm, given all scores and the outcome.

Each step of agent a does harm with probability h_a; otherwise it is right. Its score is drawn from one distribution if
it does harm and from another if it does not. Each harm is survived with probability s_a, independently, for instance
because a later step repairs it. A trajectory fails if one of its harms is not survived, and otherwise with the small
probability `slip`. With `pi_t` the probability of no harm given the score alone, and `a_t = pi_t + (1 - pi_t) * s_t`,

    succeeded:  p_t = pi_t / a_t
    failed:     p_t = pi_t * (1 - (1 - slip) * product over other steps k of a_k)
                      / (1 - (1 - slip) * product over all steps k of a_k)
    unknown:    p_t = pi_t

This is a noisy-AND network (Pearl 1988, section 4.3.2) with its exact posterior. An outcome between the ends of its
range is a success with the probability q of its place there: `p_t = q * (succeeded) + (1 - q) * (failed)`.

The rates are learned by expectation maximization (Dempster, Laird, Rubin 1977), regularized by a prior, in two ways.

* The rule `calibrated` (`fit_score_model`). No harm is survived (`s_a = 0`), and the own reward of a
  scored step gains `w_m * (p_t - 1)`. The steps that were likely wrong explain a failure: a wrong verdict on a
  trajectory that succeeded costs nothing. Unscored steps take part in the model and are not charged: the outcome itself
  tells as much about them, without the model's errors. Learned over this batch and faded expected counts of earlier
  ones.
* The rule `posterior` (`learn_rates`). The sub-reward of a step is replaced with its expectation
  `x_t = p_t + (1 - p_t) * v_t`, see `worth_if_wrong`. Learned over this and the last seven batches, from the prior on
  and for a fixed number of rounds: an agent without scores has rates that the data do not determine, and such rates
  stay near the prior.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from creditflow.credit.groups import compact
from creditflow.credit.history import WINDOW, History, Observations, Sums
from creditflow.credit.records import Rewards
from creditflow.credit.rewards import own_outcomes
from creditflow.data import Floats, Ints, TrajectoryBatch

BINS = 4
"""A score is 0, below half, from half to below 1, or 1."""
PRIOR_ZB = np.array([[0.35, 0.3, 0.25, 0.1], [0.05, 0.05, 0.05, 0.85]])
"""Prior distributions of the scores of steps that do harm (row 0) and no harm (row 1)."""
TRUST = 20.0
"""The weight of a prior, in steps of an agent; of that on slips, in trajectories."""
SLIP = 0.02
"""The prior of `slip`, or its fixed value."""


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """Parameters of the model for A agents."""

    harm_A: Floats
    """[A] the probability that a step does harm."""
    score_AZB: Floats
    """[A, 2, B] score distributions of steps that do harm (0) and no harm (1)."""
    survives_A: Floats
    """[A] the probability that a trajectory survives a harm."""
    slip: float
    """The probability that a trajectory fails although it has no harm, or survived all of it."""

    @classmethod
    def from_counts(cls, counts_AZB: Floats, harm: float, survives_A: Floats, slip: float) -> Rates:
        """The rates that maximize the expected likelihood of `expected_counts` times the prior.

        `harm`: the prior probability that a step does harm.
        """
        steps_AZ = counts_AZB.sum(axis=2)
        harm_A = (steps_AZ[:, 0] + TRUST * harm) / (steps_AZ.sum(axis=1) + TRUST)
        score_AZB = counts_AZB[:, :, 1:] + TRUST * PRIOR_ZB
        return cls(harm_A, score_AZB / score_AZB.sum(axis=2, keepdims=True), survives_A, slip)

    def facts(self, agents: tuple[str, ...]) -> dict[str, Any]:
        """The rates of the first agents as plain numbers."""
        rates = zip(agents, self.harm_A.tolist(), self.survives_A.tolist(), self.score_AZB.tolist(), strict=False)
        by_agent = {name: {"harm": harm, "survives": alive, "scores": bins} for name, harm, alive, bins in rates}
        return {"slip": self.slip, "agents": by_agent}


@dataclass(frozen=True, slots=True, eq=False)
class StepPosteriors:
    """Posteriors of S steps."""

    harmless_S: Floats
    """[S] p_t."""
    alone_S: Floats
    """[S] pi_t."""
    survived_S: Floats
    """[S] the probability that the step did harm and its trajectory survived it."""
    slips: Floats
    """[2] the expected numbers of trajectories that failed without harm, and of all trajectories without harm."""


def step_posteriors(rates: Rates, seen: Observations) -> StepPosteriors:
    """The posteriors of the steps that were seen."""
    cell_S, agent_S, bin_S, success_C = seen.cell_S, seen.agent_S, seen.bin_S, seen.success_C
    known_C = success_C >= 0.0
    likely_SZ = np.where((bin_S >= 0)[:, None], rates.score_AZB[agent_S, :, bin_S], 1.0)
    harmless = (1.0 - rates.harm_A[agent_S]) * likely_SZ[:, 1]
    alone_S = harmless / (harmless + rates.harm_A[agent_S] * likely_SZ[:, 0])
    survives_S = rates.survives_A[agent_S]
    alive_S = alone_S + (1.0 - alone_S) * survives_S
    # As logarithms: in a long trajectory both products are 0, and their ratio is not. A score can exclude "no harm".
    with np.errstate(divide="ignore"):
        clean_C, alive_C = (np.bincount(cell_S, np.log(of_S), len(success_C)) for of_S in (alone_S, alive_S))
    whole_S, sound = np.exp(alive_C)[cell_S], 1.0 - rates.slip
    failed_S = (1.0 - sound * np.minimum(whole_S / alive_S, 1.0)) / (1.0 - sound * whole_S)
    # P(outcome | the trajectory survives this step) / P(outcome)
    success_S = success_C[cell_S]
    ratio_S = np.where(known_C[cell_S], success_S / alive_S + (1.0 - success_S) * failed_S, 1.0)
    harmless_S, survived_S = (np.clip(of_S * ratio_S, 0.0, 1.0) for of_S in (alone_S, (1.0 - alone_S) * survives_S))
    slipped_C = (1.0 - success_C) * rates.slip * np.exp(clean_C) / (1.0 - sound * np.exp(alive_C))
    sound_C = success_C * np.exp(clean_C - alive_C)
    slips = np.array([slipped_C[known_C].sum(), (slipped_C + sound_C)[known_C].sum()])
    return StepPosteriors(harmless_S, alone_S, survived_S, slips)


def expected_counts(posteriors: StepPosteriors, seen: Observations) -> Floats:
    """[A, 2, 1 + B] expected steps that did harm (0) and no harm (1): unscored, then by bin of the score."""
    index_S, agents = seen.agent_S * (1 + BINS) + 1 + seen.bin_S, len(seen.agents)
    harmless_S, size = posteriors.harmless_S, agents * (1 + BINS)
    counts = [np.bincount(index_S, part_S, size).reshape(agents, -1) for part_S in (1.0 - harmless_S, harmless_S)]
    return np.stack(counts, axis=1)


# ---- observations --------------------------------------------------------------------------------------------------


def observe(rewards: Rewards) -> tuple[Ints, Observations]:
    """The steps that are not masked, with their scores and outcomes."""
    batch, at = rewards.batch, np.flatnonzero(~rewards.masked_S)
    agent_S, cell = batch.agent_of_step[at].astype(np.int64), batch.trajectory_of_step[at].astype(np.int64)
    if any(batch.outcomes_of_agents or ()):
        # Such agents compete: each judges the trajectory by its own outcome, among its own steps.
        cell = cell * len(batch.agent_names) + agent_S
    cell_S, n_cells = compact(cell)
    bin_S = np.where(rewards.scored_S, bins(np.where(rewards.scored_S, rewards.sub_reward_S, 0.0)), -1)[at]
    low_S, high_S = outcome_ranges(batch)
    place_S = np.clip((rewards.outcome_S - low_S) / (high_S - low_S), 0.0, 1.0)
    success_C = np.zeros(n_cells)
    success_C[cell_S] = np.where(rewards.known_S, place_S, -1.0)[at]
    return at, Observations(batch.agent_names, cell_S, agent_S, bin_S, success_C)


def bins(score_S: Floats) -> Ints:
    """[S] the bin of each score in [0, 1]."""
    return np.searchsorted((1e-9, 0.5, 1.0 - 1e-9), score_S, side="right")


def outcome_ranges(batch: TrajectoryBatch) -> Floats:
    """[2, S] the ends of the declared range of each step's outcome; [0, 1] where it is unknown."""
    range_N2 = np.array([(0.0, 1.0) if score is None else score.range for score in batch.outcome_scores], np.float64)
    range_2S: Floats = range_N2.reshape(-1, 2)[batch.trajectory_of_step].T
    at, scores, place = batch.derived("own_outcomes", lambda: own_outcomes(batch))
    if at.size:
        range_2S[:, at] = np.array([score.range for score in scores], np.float64)[place].T
    return range_2S


# ---- the rule `calibrated` -------------------------------------------------------------------------------------------

PART, SLIPS = "score_model", "score_model_slips"
"""The names of its sums in a `History`: expected counts by agent, and `StepPosteriors.slips`."""
_MAX_ROUNDS, _CONVERGED = 100, 1e-3
"""The largest number of rounds, and the change of every rate of harm at which they end."""
_MODEL_HARM = 0.2
"""The prior probability that a step does harm."""


def fit_score_model(seen: Observations, history: History) -> tuple[Rates, Floats, dict[str, Sums]]:
    """The rates, [S] the probability that a step did no harm, and the sums of this batch for the history."""
    before_AZB, (before_2,) = history.earlier(PART, seen.agents, (2, 1 + BINS)), history.earlier(SLIPS, ("",), (2,))
    rates = _rates_with_slips(before_AZB, before_2)
    for _ in range(_MAX_ROUNDS):
        posteriors = step_posteriors(rates, seen)
        counts_AZB = expected_counts(posteriors, seen)
        rates, last = _rates_with_slips(before_AZB + counts_AZB, before_2 + posteriors.slips), rates
        if np.abs(rates.harm_A - last.harm_A).max() < _CONVERGED:
            break
    posteriors = step_posteriors(rates, seen)
    counts = {seen.agents[a]: counts_AZB[a] for a in np.unique(seen.agent_S)}
    return rates, posteriors.harmless_S, {PART: counts, SLIPS: {"": posteriors.slips}}


def _rates_with_slips(counts_AZB: Floats, slips_2: Floats) -> Rates:
    slip = float((slips_2[0] + TRUST * SLIP) / (slips_2[1] + TRUST))
    return Rates.from_counts(counts_AZB, _MODEL_HARM, np.zeros(len(counts_AZB)), slip)


# ---- the rule `posterior` ------------------------------------------------------------------------------------------

_HARM, _SURVIVES = 0.3, 0.1
"""Prior probabilities that a step does harm, and that a trajectory survives a harm."""
_ROUNDS = 30
_LEARNED_STEPS = 65_536
"""Rates are learned from whole trajectories with about this many steps at most, the newest batches first."""


def learn_rates(seen: Observations, before: Sequence[Observations]) -> tuple[Rates, Observations]:
    """The rates of the agents, those of this batch first, and the part of the batch to keep for the history.

    `before`: the observations of earlier batches.
    """
    thinned = _thinned(seen)
    merged = _merged([*before, thinned], seen.agents)
    known_S, agents = merged.success_C[merged.cell_S] >= 0.0, len(merged.agents)
    rates = _rates_with_survivals(np.zeros((agents, 2, 1 + BINS)), np.zeros((agents, 2)))
    for _ in range(_ROUNDS):
        posteriors = step_posteriors(rates, merged)
        harms = (posteriors.survived_S * known_S, (1.0 - posteriors.harmless_S) * known_S)
        survivals_A2: Floats = np.stack([np.bincount(merged.agent_S, harm_S, agents) for harm_S in harms], axis=1)
        rates = _rates_with_survivals(expected_counts(posteriors, merged), survivals_A2)
    return rates, thinned


def _rates_with_survivals(counts_AZB: Floats, survivals_A2: Floats) -> Rates:
    """`survivals_A2`: [A, 2] the expected harms that were survived, and all harms, in trajectories with an outcome."""
    survives_A = (survivals_A2[:, 0] + TRUST * _SURVIVES) / (survivals_A2[:, 1] + TRUST)
    return Rates.from_counts(counts_AZB, _HARM, survives_A, SLIP)


def _thinned(seen: Observations) -> Observations:
    """The observations of every k-th trajectory, with the smallest k that leaves few enough steps."""
    every = -(-len(seen.cell_S) // _LEARNED_STEPS) or 1
    at = np.flatnonzero(seen.cell_S % every == 0)
    cell_S = seen.cell_S[at] // every
    return Observations(seen.agents, cell_S, seen.agent_S[at], seen.bin_S[at], seen.success_C[::every])


def _merged(batches: Sequence[Observations], names: tuple[str, ...]) -> Observations:
    """The newest batches as one, with the agents `names` first."""
    newest = batches[-WINDOW:][::-1]
    steps = np.cumsum([len(batch.cell_S) for batch in newest])
    newest = newest[: max(1, int((steps <= _LEARNED_STEPS).sum()))]
    names = tuple(dict.fromkeys((*names, *(name for batch in reversed(newest) for name in batch.agents))))
    code_of = {name: code for code, name in enumerate(names)}
    first_cells = np.cumsum([0, *(len(batch.success_C) for batch in newest)])
    return Observations(
        names,
        np.concatenate([batch.cell_S + first for batch, first in zip(newest, first_cells, strict=False)]),
        np.concatenate([np.array([code_of[name] for name in batch.agents])[batch.agent_S] for batch in newest]),
        np.concatenate([batch.bin_S for batch in newest]),
        np.concatenate([batch.success_C for batch in newest]),
    )


def worth_if_wrong(rewards: Rewards) -> Floats:
    """[S] v_t, the sub-reward of a wrong step.

    The step's own sub-reward if below 1, else the mean of its agent's sub-rewards below 1 over steps of the batch that
    are not masked, or 0 without any.
    """
    agent_S, agents = rewards.batch.agent_of_step, len(rewards.batch.agent_names)
    score_S = np.where(rewards.scored_S, rewards.sub_reward_S, 1.0)
    below_S = rewards.scored_S & (bins(score_S) < BINS - 1)
    among = np.flatnonzero(below_S & ~rewards.masked_S)
    count_A = np.bincount(agent_S[among], minlength=agents)
    mean_A = np.bincount(agent_S[among], score_S[among], agents) / np.maximum(count_A, 1)
    return np.where(below_S, score_S, mean_A[agent_S])
