"""`algorithm.score_model: noisy_and`: the probability that a step did no harm, given its score and the outcome.

Each step of agent a does harm with probability h_a. Its score is drawn from one distribution if it does harm and from
another if it does not. A trajectory succeeds only if no step does harm, and then fails with the small probability
`slip`. With `pi_t` the probability of no harm given the score alone,

    succeeded:  p_t = 1
    failed:     p_t = pi_t * (1 - (1 - slip) * product over other steps k of pi_k)
                      / (1 - (1 - slip) * product over all steps k of pi_k)

The own reward of a scored step gains `w_m * (p_t - 1)`. This is a noisy-AND network (Pearl 1988, section 4.3.2) with
its exact posterior. The steps that were likely wrong explain a failure: a wrong verdict on a trajectory that succeeded
costs nothing. Unscored steps take part in the model and are not charged: the outcome itself tells as much about them,
without the model's errors. The rates are learned by expectation maximization (Dempster, Laird, Rubin 1977) over this
batch and faded expected counts of earlier ones, regularized by a prior.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from creditflow.credit.history import Sums
from creditflow.credit.trees import rollouts_of, trees_of
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch

PART, SLIPS = "score_model", "score_model_slips"
"""The names of its sums in a `History`."""
SUCCESS = 0.5
"""An outcome above this is a success."""
BINS = 4
"""A score is 0, at most half, above half, or full."""
_ROUNDS, _CONVERGED = 100, 1e-3
"""The largest number of rounds, and the change of every rate of harm at which they end."""
_TRUST = 20.0
"""The weight of the prior, in steps of an agent; of that on slips, in trajectories."""
_HARM, _SLIP = 0.2, 0.02
_PRIOR_ZB = np.array([[0.35, 0.3, 0.25, 0.1], [0.05, 0.05, 0.05, 0.85]])
"""Prior distributions of the scores of steps that do harm (row 0) and no harm (row 1)."""


@dataclass(frozen=True, slots=True, eq=False)
class Rates:
    """Parameters of the model for A agents."""

    harm_A: Floats
    """[A] the probability that a step does harm."""
    score_AZB: Floats
    """[A, 2, B] score distributions of steps that do harm (0) and no harm (1)."""
    slip: float
    """The probability that a trajectory without harm fails."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreModel:
    """Posteriors of S steps, with the rates behind them."""

    harmless_S: Floats
    """[S] the probability that the step did no harm; NaN for a masked step."""
    alone_S: Floats
    """[S] the same given its own score alone."""
    rates: Rates
    counts: Sums
    """By agent: [2, 1 + B] expected steps that did harm (0) and no harm (1): unscored, then by bin of the score."""
    slips: Sums
    """Expected trajectories without harm that failed, and all without harm."""


def score_model(
    batch: TrajectoryBatch,
    outcome_S: Floats,
    known_S: Bools,
    kept_S: Bools,
    sub_reward_S: Floats,
    scored_S: Bools,
    counts: Sums,
    slips: Sums,
) -> ScoreModel:
    """Fit the model and compute every step's posterior.

    `outcome_S`, `known_S`: [S] the outcome of the step's agent and whether it is known. `kept_S`: [S] steps that are
    not masked. `sub_reward_S`, `scored_S`: [S] sub-rewards, read where scored. `counts`, `slips`: the sums of earlier
    batches.

    The rates come from rollouts alone: branches repeat steps. The posterior of a branch also reads the copied steps.
    """
    at = np.flatnonzero(_with_copies(batch, kept_S))
    bin_S = np.where(scored_S, bins(np.where(scored_S, sub_reward_S, 0.0)), -1)[at]
    agent_S, known_S, passed_S = batch.agent_of_step[at], known_S[at], outcome_S[at] > SUCCESS
    # Agents with outcomes of their own compete: each judges the trajectory by its own outcome, among its own steps.
    competing = bool(batch.outcomes_of_agents) and any(batch.outcomes_of_agents)
    cell_S = batch.trajectory_of_step[at].astype(np.int64)
    if competing:
        cell_S = cell_S * len(batch.agent_names) + agent_S
    cell_S = _numbered(cell_S)
    agents = len(batch.agent_names)
    before_AZB = np.zeros((agents, 2, 1 + BINS))
    for agent, name in enumerate(batch.agent_names):
        if name in counts:
            before_AZB[agent] = counts[name]
    before_2 = slips.get("", np.zeros(2))
    rates, found_AZB, found_2 = _rates(before_AZB, before_2), np.zeros_like(before_AZB), np.zeros(2)
    harmless_S = alone_S = np.ones(len(at))
    # L: the steps of rollouts.
    learned = np.flatnonzero(rollouts_of(batch)[batch.trajectory_of_step[at]])
    cell_L, agent_L, bin_L = _numbered(cell_S[learned]), agent_S[learned], bin_S[learned]
    passed_L, known_L = passed_S[learned], known_S[learned]
    index_L = agent_L * (1 + BINS) + 1 + bin_L
    for _ in range(_ROUNDS if len(learned) else 0):
        harmless_L, _, found_2 = posterior(rates, cell_L, agent_L, bin_L, passed_L, known_L)
        size = agents * (1 + BINS)
        found = [
            np.bincount(index_L, weight_L, size).reshape(agents, -1) for weight_L in (1.0 - harmless_L, harmless_L)
        ]
        found_AZB = np.stack(found, axis=1)
        rates, last = _rates(before_AZB + found_AZB, before_2 + found_2), rates
        if np.abs(rates.harm_A - last.harm_A).max() < _CONVERGED:
            break
    if len(learned):
        _, _, found_2 = posterior(rates, cell_L, agent_L, bin_L, passed_L, known_L)
    if len(at):
        harmless_S, alone_S, _ = posterior(rates, cell_S, agent_S, bin_S, passed_S, known_S)
    whole = np.full((2, batch.n_steps), np.nan)
    whole[:, at] = harmless_S, alone_S
    present = np.unique(agent_L)
    return ScoreModel(whole[0], whole[1], rates, {batch.agent_names[a]: found_AZB[a] for a in present}, {"": found_2})


def _numbered(code_S: Ints) -> Ints:
    """[S] the codes, numbered from 0 without gaps."""
    return np.unique(code_S, return_inverse=True)[1].reshape(-1)


def _with_copies(batch: TrajectoryBatch, kept_S: Bools) -> Bools:
    """[S] kept steps, and the copies before those of branches."""
    if (trees := trees_of(batch)) is None:
        return kept_S
    kept_N = np.bincount(batch.trajectory_of_step[kept_S], minlength=batch.n_trajectories) > 0
    return np.asarray(kept_S | (trees.copied_S(batch) & kept_N[batch.trajectory_of_step]))


def posterior(
    rates: Rates, cell_S: Ints, agent_S: Ints, bin_S: Ints, passed_S: Bools, known_S: Bools
) -> tuple[Floats, Floats, Floats]:
    """(p_t [S], pi_t [S], expected slips [2]) under given rates.

    `cell_S`: the trajectory of each step, from 0. `bin_S`: the bin of its score; -1: unscored. The slips are the
    expected numbers of trajectories that failed without harm, and of all trajectories without harm.
    """
    likely_SZ = np.where((bin_S >= 0)[:, None], rates.score_AZB[agent_S, :, bin_S], 1.0)
    harmless = (1.0 - rates.harm_A[agent_S]) * likely_SZ[:, 1]
    alone_S = harmless / (harmless + rates.harm_A[agent_S] * likely_SZ[:, 0])
    cells = int(cell_S.max()) + 1
    first = np.zeros(cells, dtype=np.int64)
    first[cell_S] = np.arange(len(cell_S))
    passed_C, known_C = passed_S[first], known_S[first]
    clean_C = np.exp(np.bincount(cell_S, np.log(alone_S), cells))
    clean_S, sound = clean_C[cell_S], 1.0 - rates.slip
    failed_S = alone_S * (1.0 - sound * np.minimum(clean_S / alone_S, 1.0)) / (1.0 - sound * clean_S)
    harmless_S = np.where(known_S, np.where(passed_S, 1.0, np.clip(failed_S, 0.0, 1.0)), alone_S)
    slipped_C = np.where(known_C & ~passed_C, rates.slip * clean_C / (1.0 - sound * clean_C), 0.0)
    slips = np.array([slipped_C.sum(), slipped_C.sum() + float((known_C & passed_C).sum())])
    return harmless_S, alone_S, slips


def bins(score_S: Floats) -> Ints:
    """[S] the bin of each score in [0, 1]."""
    return np.searchsorted((1e-9, 0.5, 1.0 - 1e-9), score_S, side="right")


def _rates(counts_AZB: Floats, slips_2: Floats) -> Rates:
    """The rates that maximize the expected likelihood of the counts times the prior."""
    steps_AZ = counts_AZB.sum(axis=2)
    harm_A = (steps_AZ[:, 0] + _TRUST * _HARM) / (steps_AZ.sum(axis=1) + _TRUST)
    score_AZB = counts_AZB[:, :, 1:] + _TRUST * _PRIOR_ZB
    slip = float((slips_2[0] + _TRUST * _SLIP) / (slips_2[1] + _TRUST))
    return Rates(harm_A, score_AZB / score_AZB.sum(axis=2, keepdims=True), slip)
