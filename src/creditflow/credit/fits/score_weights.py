"""Calibrated weights: a score weighs as much as it predicts the outcome.

For each agent, the outcome is regressed on the agent's sub-rewards, both relative to the task's other rollouts:

    R - mean of others = slope * (r_t - mean of others) + noise

Its reliability is the share of the outcome that is lost with the score: the slope over the predicted outcome of a
full score, `full = mean R + slope * (1 - mean r)`, with R measured from the lower end of its declared range. It is 1 if
a score of 0 rules out success, however rare success is, and 0 if the score tells nothing. The slope alone is small
wherever errors of other agents make success rare.

The weight is the mean of `w_r * reliability` given the data, under a normal prior with mean `w_r` and standard
deviation `tau = w_r / 2` (Bayesian linear regression with known noise, Gelman et al., Bayesian Data Analysis, section
2.5). With se the standard error of the slope over `full`:

    weight = w_r * (1 / tau^2 + reliability / se^2) / (1 / tau^2 + 1 / se^2),   at least 0

An unreliable score thus loses its weight, and a score with few data keeps its prior weight. The slope of a group comes
from other groups and earlier batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from creditflow.credit.fits.posteriors import outcome_ranges
from creditflow.credit.groups import group_codes, leave_one_out_mean
from creditflow.credit.history import History, Sums
from creditflow.credit.records import Rewards
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch

PART = "score_weight"
"""The name of its sums in a `History`."""
FOLDS = 8
"""Folds of cross-fitting, by group. A batch of up to eight groups leaves out one group at a time."""


def score_weights(
    rewards: Rewards, w_r: float, history: History, max_version_lag: int
) -> tuple[Floats, dict[str, Any], Sums]:
    """[S] the weight of each step's score, in place of the prior weight `w_r`; the facts behind it; and its sums.

    Facts: slopes, their standard errors, and the predicted outcomes of a full score, above the lower end of the range,
    by agent and fold; None without data. Sums: [5, 5] second moments of each agent: 1, score and outcome relative to
    the task's other rollouts, score, and outcome above the lower end of its range.
    """
    batch = rewards.batch
    over_S = rewards.known_S & rewards.scored_S
    at = np.flatnonzero(over_S)
    code_S = group_codes(batch, "task_agent", max_version_lag)
    trajectory_S = batch.trajectory_of_step
    score_of_others_S = np.full(batch.n_steps, np.nan)
    score_of_others_S[at] = leave_one_out_mean(rewards.sub_reward_S, over_S, code_S, trajectory_S, at)
    every = np.arange(batch.n_steps)
    outcome_of_others_S = leave_one_out_mean(rewards.outcome_S, rewards.known_S, code_S, trajectory_S, every)
    over_S = over_S & ~np.isnan(score_of_others_S) & ~np.isnan(outcome_of_others_S)
    score_S, outcome_S = rewards.sub_reward_S, rewards.outcome_S
    relative = (score_S - score_of_others_S, outcome_S - outcome_of_others_S)
    values = (*relative, score_S, outcome_S - outcome_ranges(batch)[0])
    row_S5 = np.column_stack([np.ones(batch.n_steps), *(np.where(over_S, value_S, 0.0) for value_S in values)])
    fold_S = batch.group_of_trajectory[batch.trajectory_of_step] % FOLDS
    moments_KA55 = _fold_moments(row_S5, _parts_of_trajectories(batch, over_S), fold_S, batch)
    others_KA55 = np.stack([np.delete(moments_KA55, fold, axis=0).sum(axis=0) for fold in range(FOLDS)])
    others_KA55 += history.earlier(PART, batch.agent_names, (5, 5))
    slope_KA, error_KA = slopes_and_errors(others_KA55)
    full_KA = full_outcomes(others_KA55, slope_KA)
    weight_KA = np.vectorize(posterior_weight, otypes=[float])(slope_KA, error_KA, full_KA, w_r)
    columns = {"slopes": slope_KA, "errors": error_KA, "full": full_KA}
    facts = {
        name: {key: [float(x) if np.isfinite(x) else None for x in x_KA[:, a]] for key, x_KA in columns.items()}
        for a, name in enumerate(batch.agent_names)
    }
    present = np.unique(batch.agent_of_step[over_S])
    sums = {batch.agent_names[agent]: moments_KA55[:, agent].sum(axis=0) for agent in present}
    return weight_KA[fold_S, batch.agent_of_step], facts, sums


def _parts_of_trajectories(batch: TrajectoryBatch, over_S: Bools) -> Floats:
    """[S] equal parts with the sum 1 over the steps of an agent in a trajectory; 0 outside of `over_S`."""
    cell_S = batch.trajectory_of_step * len(batch.agent_names) + batch.agent_of_step
    count_C = np.bincount(cell_S[over_S], minlength=int(cell_S.max()) + 1)
    return np.where(over_S, 1.0 / np.maximum(count_C[cell_S], 1), 0.0)


def _fold_moments(row_SZ: Floats, part_S: Floats, fold_S: Ints, batch: TrajectoryBatch) -> Floats:
    """[K, A, Z, Z] second moments of rows weighted by `part_S`, by fold and agent."""
    agents, width = len(batch.agent_names), row_SZ.shape[1]
    moments_KAZZ = np.zeros((FOLDS, agents, width, width))
    cell_S = fold_S * agents + batch.agent_of_step
    order = np.argsort(cell_S, kind="stable")
    ends = np.searchsorted(cell_S[order], np.arange(FOLDS * agents + 1))
    for cell in np.flatnonzero(np.diff(ends)):
        at = order[ends[cell] : ends[cell + 1]]
        with np.errstate(over="ignore", invalid="ignore"):  # moments that overflow are not used
            moments_KAZZ[cell // agents, cell % agents] = (row_SZ[at] * part_S[at, None]).T @ row_SZ[at]
    return moments_KAZZ


def slopes_and_errors(moments_KA55: Floats) -> tuple[Floats, Floats]:
    """Slopes through the origin and their standard errors from moments of (1, x, y); (NaN, inf) without variance."""
    n, square, product, total = (moments_KA55[..., i, j] for i, j in ((0, 0), (1, 1), (1, 2), (2, 2)))
    with np.errstate(all="ignore"):
        known = (n > 2) & (square > 1e-12 * n) & np.isfinite(moments_KA55).all(axis=(2, 3))
        slope = product / square
        noise = np.maximum(total - slope * product, 0.0) / (n - 1)
        return np.where(known, slope, np.nan), np.where(known, np.sqrt(noise / square), np.inf)


def full_outcomes(moments_KA55: Floats, slope_KA: Floats) -> Floats:
    """The predicted outcomes of full scores; with a negative slope the mean outcome; NaN without a slope."""
    with np.errstate(all="ignore"):
        score, outcome = (moments_KA55[..., 0, i] / moments_KA55[..., 0, 0] for i in (3, 4))
        return np.asarray(outcome + np.maximum(slope_KA, 0.0) * (1.0 - score))


def posterior_weight(slope: float, error: float, full: float, w_r: float) -> float:
    """The mean of `w_r * reliability` given a slope and its standard error, under the prior of this module.

    `full`: the predicted outcome of a full score, above the lower end of the range. At least 0; `w_r` without data.
    """
    whole = max(full, slope)
    if not np.isfinite(error) or w_r == 0.0 or not whole > 0.0:
        return w_r
    prior_variance = (w_r / 2.0) ** 2
    if prior_variance == 0.0:  # a weight too small to square
        return w_r
    share = prior_variance / (prior_variance + (w_r * error / whole) ** 2)
    return max(0.0, w_r * (share * slope / whole + 1.0 - share))
