"""Fidelity of credit: its rank correlation with the measured values of decisions.

A decision is one step of a recorded trajectory. Its value is the mean return of continuations that keep the record up
to and including the step, minus that of continuations that keep only the steps before it. The values are measured, so
they contain error, and even perfect credit correlates with them by less than 1: by the noise ceiling.

Shape suffixes: D decisions, K continuations of one prefix, X rows, V tasks, L levels, R resamples (the first is the
data itself).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from creditflow.data import Bools, Floats, Ints

_RESAMPLES = 1000
_SEED = 0
_SPLITS = 20
"""Splits into halves behind a noise ceiling; their mean varies less than one split."""
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Share:
    """A number with its 95 % bootstrap interval over tasks; NaN if undefined."""

    value: float
    low: float
    high: float

    @classmethod
    def from_resamples(cls, value_R: Floats) -> Share:
        """A value (first entry) with the interval from its resamples (other entries), if there are any."""
        value, resampled = float(value_R[0]), value_R[1:][np.isfinite(value_R[1:])]
        if np.isnan(value) or not len(resampled):
            return cls(value, float("nan"), float("nan"))
        low, high = np.quantile(resampled, [0.025, 0.975])
        return cls(value, float(low), float(high))


@dataclass(frozen=True, slots=True, eq=False)
class DecisionValues:
    """The returns of continuations at D decisions, K for each prefix. NaN: the continuation has no return."""

    task_D: Ints
    """[D] index of the decision's task, the unit of the bootstrap."""
    after_DK: Floats
    """[D, K] returns with the decision kept, in units of the outcome. Equal if nothing is sampled after it."""
    before_DK: Floats
    """[D, K] returns with the decision sampled anew."""

    @property
    def value_D(self) -> Floats:
        """[D] the values; NaN without a return on either side."""
        return _mean(self.after_DK) - _mean(self.before_DK)

    @property
    def error_D(self) -> Floats:
        """[D] standard errors of the values; NaN with fewer than two returns on either side."""
        return np.sqrt(_squared_error(self.after_DK) + _squared_error(self.before_DK))


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The agreement of credit with the values of decisions."""

    correlation: Share
    """Spearman's rank correlation, in [-1, 1]."""
    ceiling: Share
    """The correlation that perfect credit would have with these values, in [0, 1]."""
    decisions: int
    """The number of decisions with a known value."""
    tasks: int
    """The number of tasks with such a decision; a single task gives no interval."""


def fidelity(credit_D: Floats, values: DecisionValues) -> Fidelity:
    """The fidelity of `credit_D`, the credit or the advantage of D decisions.

    Decisions with an unknown value, or with credit that is not finite, do not count.
    """
    value_D = values.value_D
    known_D = np.isfinite(value_D) & np.isfinite(credit_D)
    if not known_D.any():
        unknown = Share(float("nan"), float("nan"), float("nan"))
        return Fidelity(unknown, unknown, 0, 0)
    task_D = values.task_D[known_D]
    weight_RD = task_weights(task_D)[:, task_D]
    correlation = Share.from_resamples(spearman(credit_D[known_D], value_D[known_D], weight_RD))
    ceiling = noise_ceiling(values.after_DK[known_D], values.before_DK[known_D], weight_RD)
    return Fidelity(correlation, ceiling, int(known_D.sum()), len(np.unique(task_D)))


def noise_ceiling(after_DK: Floats, before_DK: Floats, weight_RD: Floats) -> Share:
    """The correlation of perfect credit with values from these returns, estimated from split halves.

    The rank correlation r of values from two halves of the continuations is stepped up to the full number by
    Spearman-Brown (Spearman 1910, Brown 1910: `m r / (1 + (m - 1) r)` for m times as many). Its square root is the
    correlation of the true values with the measured ones. The halves are the same in every call. NaN if K is 1.
    """
    k = after_DK.shape[1]
    if k < 2:
        return Share(float("nan"), float("nan"), float("nan"))
    half, rng = k // 2, np.random.default_rng(_SEED)
    halves_R = []
    for _ in range(_SPLITS if k > 2 else 1):
        after, before = rng.permutation(k), rng.permutation(k)
        first_D, second_D = (
            _mean(after_DK[:, after[at]]) - _mean(before_DK[:, before[at]])
            for at in (slice(0, half), slice(half, 2 * half))
        )
        known_D = np.isfinite(first_D) & np.isfinite(second_D)
        halves_R.append(spearman(first_D[known_D], second_D[known_D], weight_RD[:, known_D]))
    r_R = np.clip(_mean(np.stack(halves_R, axis=1)), 0.0, 1.0)
    factor = k / half
    return Share.from_resamples(np.sqrt(factor * r_R / (1 + (factor - 1) * r_R)))


def spearman(a_X: Floats, b_X: Floats, weight_RX: Floats) -> Floats:
    """[R] rank correlations of the rows, weighted by `weight_RX`; ties get their mean rank. NaN without variance."""
    if not len(a_X):
        return np.full(len(weight_RX), np.nan)
    total_R = weight_RX.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        ranks = (_ranks(column_X, weight_RX) for column_X in (a_X, b_X))
        a_RX, b_RX = (rank_RX - ((weight_RX * rank_RX).sum(axis=1) / total_R)[:, None] for rank_RX in ranks)
        norm_R = np.sqrt((weight_RX * a_RX**2).sum(axis=1) * (weight_RX * b_RX**2).sum(axis=1))
        return np.where(norm_R > _TINY, (weight_RX * a_RX * b_RX).sum(axis=1) / norm_R, np.nan)


def _ranks(value_X: Floats, weight_RX: Floats) -> Floats:
    """[R, X] the mean rank of each row among the weighted rows. Values equal to 9 decimals are ties."""
    _, level_X, count_L = np.unique(value_X.round(9), return_inverse=True, return_counts=True)
    below_RX = np.cumsum(weight_RX[:, np.argsort(level_X, kind="stable")], axis=1)
    end_RL = below_RX[:, np.cumsum(count_L) - 1]
    start_RL = np.column_stack([np.zeros(len(weight_RX)), end_RL[:, :-1]])
    return np.asarray(((start_RL + end_RL) / 2)[:, level_X])


def task_weights(task_X: Ints) -> Floats:
    """[1 + R, V] weight of each task: one each, then bootstrap counts. A single task gets no resamples (R = 0)."""
    tasks = np.unique(task_X)
    resamples = _RESAMPLES if len(tasks) > 1 else 0
    drawn_RV = np.zeros((1 + resamples, tasks[-1] + 1))
    drawn_RV[0, tasks] = 1.0
    rng = np.random.default_rng(_SEED)
    drawn_RV[1:, tasks] = rng.multinomial(len(tasks), np.full(len(tasks), 1 / len(tasks)), resamples)
    return drawn_RV


def _mean(value_DK: Floats) -> Floats:
    """[D] means of the known entries; NaN if all are unknown."""
    known_DK: Bools = np.isfinite(value_DK)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(known_DK, value_DK, 0.0).sum(axis=1) / known_DK.sum(axis=1))


def _squared_error(value_DK: Floats) -> Floats:
    """[D] squared standard errors of the means; NaN with fewer than two known entries."""
    known_DK: Bools = np.isfinite(value_DK)
    count_D = known_DK.sum(axis=1)
    square_D = np.where(known_DK, (value_DK - _mean(value_DK)[:, None]) ** 2, 0.0).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(count_D > 1, square_D / (count_D - 1) / count_D, np.nan)
