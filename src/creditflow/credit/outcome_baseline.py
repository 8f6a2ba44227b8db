"""`algorithm.outcome_baseline: prefix`: subtract from a step's outcome what its past predicts of it.

The prediction for a step uses only facts that are known before the step: the scores of its ancestors and its turn. The
coefficients come from other groups and earlier batches. So the prediction does not depend on the step's own response,
and with groups within a task and `rloo` the gradient stays unbiased, however bad the scores are (Williams 1992, section
4; Greensmith, Bartlett, Baxter 2004: the best baseline of a step is close to its expected return).

For each agent a ridge regression predicts `R - m`, where m is the mean outcome of the task's other rollouts:

    D_t = c_0 + sum over features f of c_f * x_tf

The outcome enters credit as `R - D_t`; the group's mean is subtracted from it as from any credit. Generalised
cross-validation (Golub, Heath, Wahba 1979) chooses the penalty from the same data as the coefficients. An infinite
penalty is among the choices; it gives D_t = 0, the baseline of the group alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from creditflow.credit.groups import BatchColumns, leave_one_out_mean
from creditflow.credit.history import Sums
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch

PART = "outcome_baseline"
"""The name of its sums in a `History`; `part_of` adds the names of further features."""
FOLDS = 8
"""Folds of cross-fitting, by group. A batch of up to eight groups leaves out one group at a time."""
FEATURES = ("wrong so far", "last wrong", "worst so far", "scored so far", "turn")
"""The built-in features. `wrong` is 1 minus a sub-reward. `last` is the newest scored ancestor."""
_PENALTIES = (np.inf, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0)
"""Penalties, in trajectories, for standardized features. The first of the best ones is taken."""
_TINY = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class OutcomeBaseline:
    """Prefix baselines of S steps, with the numbers that they are made of."""

    value_S: Floats
    """[S] D_t; 0 for a step without a known outcome."""
    names: tuple[str, ...]
    """The names of the F features."""
    further: Mapping[str, Floats]
    """[S] each feature besides the built-in ones, by name."""
    fold_S: Ints
    """[S] the fold of the step's group, which its coefficients leave out."""
    coefficient_KAF: Floats
    """[K, A, 1 + F] intercept and coefficients of each fold and agent."""
    sums: Sums
    """By agent: [2 + F, 2 + F] second moments of (1, features, R - m), one unit of weight for each trajectory."""


def outcome_baseline(
    columns: BatchColumns,
    outcome_S: Floats,
    known_S: Bools,
    sub_reward_S: Floats,
    scored_S: Bools,
    earlier: Sums,
    further: Mapping[str, Floats] | None = None,
) -> OutcomeBaseline:
    """Predict from each step's past how much its outcome differs from the task's mean.

    `known_S`: [S] steps with a known outcome that are not masked; only these are fitted and predicted. `sub_reward_S`,
    `scored_S`: [S] sub-rewards, read where scored. `earlier`: the sums of earlier batches. `further`: [S]
    features by name, such as a critic's values, which must not depend on the step's response.
    """
    batch = columns.batch
    mean_S = mean_of_others(columns, outcome_S, known_S)
    feature_SF = prefix_features(batch, sub_reward_S, scored_S)
    further = dict(sorted((further or {}).items()))
    names = (*FEATURES, *further)
    if further:
        feature_SF = np.column_stack([feature_SF, *further.values()])
    fold_S = batch.group_of_trajectory[batch.trajectory_of_step] % FOLDS
    # A task's only rollout has nothing to be compared with, so it is not fitted; it gets a prediction all the same.
    fitted_S = known_S & ~np.isnan(mean_S)
    row_SZ = np.column_stack([np.ones(batch.n_steps), feature_SF, np.where(fitted_S, outcome_S - mean_S, 0.0)])
    moments_KAZZ = fold_moments(row_SZ, trajectory_weights(batch, fitted_S), fold_S, batch)
    coefficient_KAF = np.zeros((*moments_KAZZ.shape[:2], row_SZ.shape[1] - 1))
    for agent, agent_name in enumerate(batch.agent_names):
        before = earlier.get(agent_name)
        for fold in range(FOLDS):
            others_ZZ = moments_KAZZ[np.arange(FOLDS) != fold, agent].sum(axis=0)
            if before is not None and before.shape == others_ZZ.shape:
                others_ZZ = others_ZZ + before
            coefficient_KAF[fold, agent] = ridge(others_ZZ)
    coefficient_SF = coefficient_KAF[fold_S, batch.agent_of_step]
    value_S = coefficient_SF[:, 0]
    for f in range(feature_SF.shape[1]):  # from left to right, so that an explanation gives the same bits
        value_S = value_S + coefficient_SF[:, 1 + f] * feature_SF[:, f]
    present = np.unique(batch.agent_of_step[fitted_S])
    sums = {batch.agent_names[agent]: moments_KAZZ[:, agent].sum(axis=0) for agent in present}
    value_S = np.where(known_S, value_S, 0.0)
    return OutcomeBaseline(value_S, names, further, fold_S, coefficient_KAF, sums)


def part_of(further: Mapping[str, Floats]) -> str:
    """The name of the sums in a `History`: sums of other features are of no use."""
    return " ".join([PART, *sorted(further)])


def mean_of_others(columns: BatchColumns, outcome_S: Floats, known_S: Bools) -> Floats:
    """[S] the mean outcome of the task's other rollouts for the step's agent; NaN without one."""
    every = np.arange(columns.batch.n_steps)
    return leave_one_out_mean(outcome_S, known_S, columns.code_S("task_agent"), columns.batch.trajectory_of_step, every)


def prefix_features(batch: TrajectoryBatch, sub_reward_S: Floats, scored_S: Bools) -> Floats:
    """[S, F] the features FEATURES, made from each step's ancestors."""
    from creditflow.credit import kernels

    wrong_S = np.where(scored_S, 1.0 - np.where(scored_S, sub_reward_S, 1.0), np.nan)
    edges_S = np.concatenate([[0], np.cumsum(np.bincount(batch.edge_child, minlength=batch.n_steps))])
    past_S4 = kernels.past_of_steps(batch.edge_parent, edges_S, wrong_S)
    return np.column_stack([past_S4, batch.turn_of_step.astype(np.float64)])


def trajectory_weights(batch: TrajectoryBatch, used_S: Bools) -> Floats:
    """[S] weights with the sum 1 over the used steps of an agent in a trajectory; 0 for other steps."""
    cell_S = batch.trajectory_of_step * len(batch.agent_names) + batch.agent_of_step
    count_C = np.bincount(cell_S[used_S], minlength=int(cell_S.max()) + 1)
    return np.where(used_S, 1.0 / np.maximum(count_C[cell_S], 1), 0.0)


def fold_moments(row_SZ: Floats, weight_S: Floats, fold_S: Ints, batch: TrajectoryBatch) -> Floats:
    """[K, A, Z, Z] weighted second moments of rows, by fold and agent."""
    agents, width = len(batch.agent_names), row_SZ.shape[1]
    moments_KAZZ = np.zeros((FOLDS, agents, width, width))
    cell_S = fold_S * agents + batch.agent_of_step
    order = np.argsort(cell_S, kind="stable")
    ends = np.searchsorted(cell_S[order], np.arange(FOLDS * agents + 1))
    for cell in np.flatnonzero(np.diff(ends)):
        at = order[ends[cell] : ends[cell + 1]]
        with np.errstate(over="ignore", invalid="ignore"):  # moments that overflow are not used, see `ridge`
            moments_KAZZ[cell // agents, cell % agents] = (row_SZ[at] * weight_S[at, None]).T @ row_SZ[at]
    return moments_KAZZ


def ridge(moments_ZZ: Floats) -> Floats:
    """[1 + F] intercept and coefficients of a ridge regression from the moments of (1, features, target).

    Features are standardized, and the penalty with the least generalised cross-validation error is taken. Zeros if the
    group mean alone is best, or without data.
    """
    n = float(moments_ZZ[0, 0])
    coefficient_F = np.zeros(len(moments_ZZ) - 1)
    if n <= 2 or not np.isfinite(moments_ZZ).all():
        return coefficient_F
    mean_Z = moments_ZZ[0] / n
    covariance = moments_ZZ / n - np.outer(mean_Z, mean_Z)
    variance_Z = np.diagonal(covariance)
    used = np.flatnonzero(variance_Z[1:-1] > _TINY * (1.0 + mean_Z[1:-1] ** 2)) + 1
    spread = np.sqrt(variance_Z[used])
    correlation = covariance[np.ix_(used, used)] / np.outer(spread, spread)
    target, total = covariance[used, -1] / spread, float(variance_Z[-1])
    eigenvalue, vector = np.linalg.eigh(correlation) if used.size else (np.zeros(0), np.zeros((0, 0)))
    rotated = vector.T @ target
    best, chosen = np.inf, np.inf
    for penalty in _PENALTIES:
        pull = 1.0 / (np.maximum(eigenvalue, 0.0) + penalty / n)  # 0 at an infinite penalty
        left = total - 2.0 * float(rotated @ (pull * rotated)) + float((eigenvalue * pull**2) @ rotated**2)
        free = 1.0 - (1.0 + float((np.maximum(eigenvalue, 0.0) * pull).sum())) / n
        error = max(left, 0.0) / free**2 if free > 0 else np.inf
        if error < best:
            best, chosen = error, penalty
    if not np.isfinite(chosen):
        return coefficient_F
    slope = (vector @ (rotated / (np.maximum(eigenvalue, 0.0) + chosen / n))) / spread
    coefficient_F[used] = slope
    coefficient_F[0] = mean_Z[-1] - float(slope @ mean_Z[used])
    return coefficient_F
