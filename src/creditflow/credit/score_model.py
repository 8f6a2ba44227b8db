"""`algorithm.score_model: noisy_and`: a charge for the probability that a step did harm.

The model of `creditflow.credit.step_posteriors`, in which no harm is survived (`s_a = 0`). The own reward of a scored
step gains `w_m * (p_t - 1)`. The steps that were likely wrong explain a failure: a wrong verdict on a trajectory that
succeeded costs nothing. Unscored steps take part in the model and are not charged: the outcome itself tells as much
about them, without the model's errors. The rates are learned by expectation maximization (Dempster, Laird, Rubin 1977)
over this batch and faded expected counts of earlier ones, regularized by a prior.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from creditflow.credit.history import Sums
from creditflow.credit.step_posteriors import (
    BINS,
    SLIP,
    TRUST,
    Rates,
    bins,
    cells_of,
    counts_of,
    harm_and_scores,
    step_posteriors,
)
from creditflow.data import Bools, Floats, TrajectoryBatch

PART, SLIPS = "score_model", "score_model_slips"
"""The names of its sums in a `History`."""
_ROUNDS, _CONVERGED = 100, 1e-3
"""The largest number of rounds, and the change of every rate of harm at which they end."""
_HARM = 0.2
"""The prior probability that a step does harm."""


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
    success_S: Floats,
    known_S: Bools,
    kept_S: Bools,
    sub_reward_S: Floats,
    scored_S: Bools,
    counts: Sums,
    slips: Sums,
) -> ScoreModel:
    """Fit the model and compute every step's posterior.

    `success_S`, `known_S`: [S] the outcome of the step's agent, from 0 to 1, and whether it is known. `kept_S`: [S]
    steps that are not masked. `sub_reward_S`, `scored_S`: [S] sub-rewards, read where scored. `counts`, `slips`: the
    sums of earlier batches.
    """
    at = np.flatnonzero(kept_S)
    bin_S = np.where(scored_S, bins(np.where(scored_S, sub_reward_S, 0.0)), -1)[at]
    agent_S, known_S, success_S = batch.agent_of_step[at], known_S[at], success_S[at]
    cell_S = cells_of(batch, at)
    agents = len(batch.agent_names)
    before_AZB = np.zeros((agents, 2, 1 + BINS))
    for agent, name in enumerate(batch.agent_names):
        if name in counts and counts[name].shape == before_AZB[agent].shape:
            before_AZB[agent] = counts[name]
    before_2 = slips.get("", np.zeros(2))
    before_2 = before_2 if before_2.shape == (2,) else np.zeros(2)
    rates, found_AZB, found_2 = _rates(before_AZB, before_2), np.zeros_like(before_AZB), np.zeros(2)
    harmless_S = alone_S = np.ones(len(at))
    seen_S = (cell_S, agent_S, bin_S, success_S, known_S)
    for _ in range(_ROUNDS if len(at) else 0):
        of_S = step_posteriors(rates, *seen_S)
        found_AZB, found_2 = counts_of(of_S, agent_S, bin_S, agents), of_S.slips
        rates, last = _rates(before_AZB + found_AZB, before_2 + found_2), rates
        if np.abs(rates.harm_A - last.harm_A).max() < _CONVERGED:
            break
    if len(at):
        of_S = step_posteriors(rates, *seen_S)
        harmless_S, alone_S, found_2 = of_S.harmless_S, of_S.alone_S, of_S.slips
    whole = np.full((2, batch.n_steps), np.nan)
    whole[:, at] = harmless_S, alone_S
    present = np.unique(agent_S)
    return ScoreModel(whole[0], whole[1], rates, {batch.agent_names[a]: found_AZB[a] for a in present}, {"": found_2})


def _rates(counts_AZB: Floats, slips_2: Floats) -> Rates:
    harm_A, score_AZB = harm_and_scores(counts_AZB, _HARM)
    slip = float((slips_2[0] + TRUST * SLIP) / (slips_2[1] + TRUST))
    return Rates(harm_A, score_AZB, np.zeros(len(harm_A)), slip)
