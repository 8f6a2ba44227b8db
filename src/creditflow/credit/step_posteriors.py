"""Probabilities that steps did no harm, given their scores and the outcome, under given rates.

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
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from creditflow.data import Bools, Floats, Ints, TrajectoryBatch

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


def step_posteriors(
    rates: Rates, cell_S: Ints, agent_S: Ints, bin_S: Ints, success_S: Floats, known_S: Bools
) -> StepPosteriors:
    """The posteriors of S steps.

    `cell_S`: the trajectory of each step, from 0. `bin_S`: the bin of its score; -1: unscored. `success_S`: q, read
    where `known_S`.
    """
    likely_SZ = np.where((bin_S >= 0)[:, None], rates.score_AZB[agent_S, :, bin_S], 1.0)
    harmless = (1.0 - rates.harm_A[agent_S]) * likely_SZ[:, 1]
    alone_S = harmless / (harmless + rates.harm_A[agent_S] * likely_SZ[:, 0])
    survives_S = rates.survives_A[agent_S]
    alive_S = alone_S + (1.0 - alone_S) * survives_S
    cells = int(cell_S.max()) + 1
    first = np.zeros(cells, dtype=np.int64)
    first[cell_S] = np.arange(len(cell_S))
    success_C, known_C = success_S[first], known_S[first]
    # As logarithms: in a long trajectory both products are 0, and their ratio is not. A score can exclude "no harm".
    with np.errstate(divide="ignore"):
        clean_C, alive_C = (np.bincount(cell_S, np.log(of_S), cells) for of_S in (alone_S, alive_S))
    whole_S, sound = np.exp(alive_C)[cell_S], 1.0 - rates.slip
    failed_S = (1.0 - sound * np.minimum(whole_S / alive_S, 1.0)) / (1.0 - sound * whole_S)
    # P(outcome | the trajectory survives this step) / P(outcome)
    ratio_S = np.where(known_S, success_S / alive_S + (1.0 - success_S) * failed_S, 1.0)
    harmless_S, survived_S = (np.clip(of_S * ratio_S, 0.0, 1.0) for of_S in (alone_S, (1.0 - alone_S) * survives_S))
    slipped_C = (1.0 - success_C) * rates.slip * np.exp(clean_C) / (1.0 - sound * np.exp(alive_C))
    sound_C = success_C * np.exp(clean_C - alive_C)
    slips = np.array([slipped_C[known_C].sum(), (slipped_C + sound_C)[known_C].sum()])
    return StepPosteriors(harmless_S, alone_S, survived_S, slips)


def counts_of(found: StepPosteriors, agent_S: Ints, bin_S: Ints, agents: int) -> Floats:
    """[A, 2, 1 + B] expected steps that did harm (0) and no harm (1): unscored, then by bin of the score."""
    index_S, size = agent_S * (1 + BINS) + 1 + bin_S, agents * (1 + BINS)
    counts = [np.bincount(index_S, w_S, size).reshape(agents, -1) for w_S in (1.0 - found.harmless_S, found.harmless_S)]
    return np.stack(counts, axis=1)


def harm_and_scores(counts_AZB: Floats, harm: float) -> tuple[Floats, Floats]:
    """(`Rates.harm_A`, `Rates.score_AZB`) that maximize the expected likelihood of the counts times the prior.

    `harm`: the prior probability that a step does harm.
    """
    steps_AZ = counts_AZB.sum(axis=2)
    harm_A = (steps_AZ[:, 0] + TRUST * harm) / (steps_AZ.sum(axis=1) + TRUST)
    score_AZB = counts_AZB[:, :, 1:] + TRUST * PRIOR_ZB
    return harm_A, score_AZB / score_AZB.sum(axis=2, keepdims=True)


def bins(score_S: Floats) -> Ints:
    """[S] the bin of each score in [0, 1]."""
    return np.searchsorted((1e-9, 0.5, 1.0 - 1e-9), score_S, side="right")


def cells_of(batch: TrajectoryBatch, at: Ints) -> Ints:
    """The trajectory of each of the steps `at`, numbered from 0.

    Agents with outcomes of their own compete: each judges the trajectory by its own outcome, among its own steps.
    """
    cell = batch.trajectory_of_step[at].astype(np.int64)
    if bool(batch.outcomes_of_agents) and any(batch.outcomes_of_agents):
        cell = cell * len(batch.agent_names) + batch.agent_of_step[at]
    return numbered(cell)


def numbered(codes: Ints) -> Ints:
    """The codes, numbered from 0 without gaps."""
    return np.unique(codes, return_inverse=True)[1].reshape(-1)


def successes(batch: TrajectoryBatch, outcome_S: Floats) -> Floats:
    """[S] q: the place of the outcome of each step's agent in its declared range, from 0 to 1."""
    low_S, width_S = batch.derived("outcome_ranges", lambda: _ranges(batch))
    return np.clip((outcome_S - low_S) / width_S, 0.0, 1.0)


def _ranges(batch: TrajectoryBatch) -> tuple[Floats, Floats]:
    """([S] lowest outcome, [S] width of its range); an unknown outcome has the range [0, 1]."""
    range_N2 = np.array([(0.0, 1.0) if score is None else score.range for score in batch.outcome_scores], np.float64)
    range_S2 = range_N2.reshape(-1, 2)[batch.trajectory_of_step]
    first_N = np.searchsorted(batch.trajectory_of_step, np.arange(batch.n_trajectories + 1))
    for n, scores in enumerate(batch.outcomes_of_agents):
        for agent, score in scores.items():
            if agent in batch.agent_names:
                steps = slice(first_N[n], first_N[n + 1])
                range_S2[steps][batch.agent_of_step[steps] == batch.agent_names.index(agent)] = score.range
    return range_S2[:, 0], range_S2[:, 1] - range_S2[:, 0]
