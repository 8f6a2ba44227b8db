"""Fidelity of credit: its rank correlation with the measured values of decisions.

A decision is one step of a recorded trajectory. Its value is the mean return of continuations that keep the record up
to and including the step, minus that of continuations that keep only the steps before it. The values are measured, so
they contain error, and even exact knowledge of the true values correlates with them by less than 1: by the noise
ceiling.

Shape suffixes: D decisions, K continuations of one prefix, X rows, L levels, R samples (the first is the data itself,
each other one leaves out one task).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from creditflow._utils.intervals import LEAST_SEEDS, mean_interval
from creditflow.data import Floats, Ints

_SPLITS = 20
"""Random pairs of parts behind a reliability; their mean varies less than one pair."""
LEAST_CONTINUATIONS = 4
"""The least number of continuations of each prefix for a noise ceiling, which is modelled from halves and quarters."""
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Share:
    """A number with its 95 % interval over tasks; NaN if undefined."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def from_jackknife(cls, value_R: Floats, least: float = -1.0) -> Share:
        """A value in [`least`, 1] (first entry) with the interval from the values without each task (other entries).

        Student's t interval of the pseudo-values `V * value - (V - 1) * value_without` over V tasks (Tukey 1958,
        "Bias and confidence in not quite large samples"), around the value. No interval if one of them is undefined.
        """
        value, tasks = float(value_R[0]), len(value_R) - 1
        pseudo = mean_interval(tasks * value - (tasks - 1) * value_R[1:])
        low, high = np.clip(value + np.array([pseudo.low, pseudo.high]) - pseudo.mean, least, 1.0).tolist()
        return cls(value, low, high)


@dataclass(frozen=True, slots=True, eq=False)
class DecisionValues:
    """The returns of continuations at D decisions, K for each prefix. NaN: the continuation has no return."""

    task_D: Ints
    """[D] index of the decision's task, the unit of the jackknife."""
    after_DK: Floats
    """[D, K] returns with the decision kept, in units of the outcome. Equal if nothing is sampled after it."""
    before_DK: Floats
    """[D, K] returns with the decision sampled anew."""

    def part(self, numbers: slice) -> DecisionValues:
        """The same decisions with some of their continuations."""
        return DecisionValues(self.task_D, self.after_DK[:, numbers], self.before_DK[:, numbers])

    @property
    def value_D(self) -> Floats:
        """[D] the values; NaN without a return on either side."""
        return _differences(self.after_DK, self.before_DK)

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
    """The number of tasks with such a decision; fewer than `LEAST_SEEDS` give no interval and no ceiling."""
    continuations: int
    """The number of continuations of each prefix; fewer than `LEAST_CONTINUATIONS` give no ceiling."""

    @property
    def ceiling_note(self) -> str:
        """The reason why the ceiling is unknown; empty if it is known."""
        if self.continuations < LEAST_CONTINUATIONS:
            return f"no noise ceiling: expected {LEAST_CONTINUATIONS} continuations or more, got {self.continuations}"
        if self.tasks < LEAST_SEEDS:
            return f"no noise ceiling: expected decisions of {LEAST_SEEDS} tasks or more, got {self.tasks}"
        return "no noise ceiling: no difference between values is seen" if math.isnan(self.ceiling.value) else ""


def fidelity(credit_D: Floats, values: DecisionValues) -> Fidelity:
    """The fidelity of `credit_D`, the credit or the advantage of D decisions.

    Decisions with an unknown value, or with credit that is not finite, do not count.
    """
    value_D, k = values.value_D, values.after_DK.shape[1]
    known_D = np.isfinite(value_D) & np.isfinite(credit_D)
    if not known_D.any():
        return Fidelity(Share(), Share(), 0, 0, k)
    task_D = values.task_D[known_D]
    weight_RD = leave_one_out(task_D)
    correlation = Share.from_jackknife(spearman(credit_D[known_D], value_D[known_D], weight_RD))
    ceiling = noise_ceiling(values.after_DK[known_D], values.before_DK[known_D], weight_RD)
    return Fidelity(correlation, ceiling, int(known_D.sum()), len(np.unique(task_D)), k)


def noise_ceiling(after_DK: Floats, before_DK: Floats, weight_RD: Floats) -> Share:
    """The rank correlation of exact knowledge of the decisions with the values of these returns, in [0, 1].

    It is the square root of the reliability: of the correlation of values from K continuations with those from K new
    ones. The reliability of m continuations is modelled as `1 / (a + c / m)`, by the measured ones of K / 2 and K / 4.
    a = 1 is the formula of Spearman (1910) and Brown (1910). a > 1 where most values are equal: however small their
    errors, ranks spread them over the same range.

    NaN with fewer than `LEAST_CONTINUATIONS` continuations, which have no quarters. NaN, with the upper end alone,
    unless the interval of the reliability of K / 2 is above 0: without any difference between the values, the root of
    a noisy number above 0 would be .1 in the mean.
    """
    if (k := after_DK.shape[1]) < LEAST_CONTINUATIONS:
        return Share()
    half, quarter = k // 2, k // 4

    def stepped_up(half_R: Floats, saturation_R: Floats) -> Floats:
        return np.asarray(np.sqrt(half_R / (saturation_R * half_R + (1 - saturation_R * half_R) * half / k)))

    half_R, quarter_R = (_reliability(after_DK, before_DK, weight_RD, size) for size in (half, quarter))
    halves = Share.from_jackknife(half_R)
    if not halves.low > 0:
        return Share(high=stepped_up(np.maximum(halves.high, 0.0), np.ones(())).item())
    half_R, quarter_R = half_R.clip(_TINY, 1.0), quarter_R.clip(_TINY, 1.0)
    # fmax: quarters may have no correlation, if all their values are equal.
    saturation_R = np.fmax((half / half_R - quarter / quarter_R) / (half - quarter), 1.0)
    return Share.from_jackknife(stepped_up(half_R, np.minimum(saturation_R, 1 / half_R)), least=0.0)


def _reliability(after_DK: Floats, before_DK: Floats, weight_RD: Floats, size: int) -> Floats:
    """[R] the mean rank correlation of values from two disjoint sets of `size` continuations; the sets never vary."""
    rng, k, parts = np.random.default_rng(0), after_DK.shape[1], (slice(0, size), slice(size, 2 * size))
    correlation_PR = []
    for _ in range(_SPLITS):
        after, before = rng.permutation(k), rng.permutation(k)
        first_D, second_D = (_differences(after_DK[:, after[at]], before_DK[:, before[at]]) for at in parts)
        known_D = np.isfinite(first_D) & np.isfinite(second_D)
        correlation_PR.append(spearman(first_D[known_D], second_D[known_D], weight_RD[:, known_D]))
    return _mean(np.stack(correlation_PR, axis=1))


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
    """[R, X] the mean rank of each row among the weighted rows. Ties are equal to 9 decimals of the largest value."""
    scaled_X = value_X / (abs(value_X).max() or 1.0)
    _, level_X, count_L = np.unique(scaled_X.round(9), return_inverse=True, return_counts=True)
    below_RX = np.cumsum(weight_RX[:, np.argsort(level_X, kind="stable")], axis=1)
    end_RL = below_RX[:, np.cumsum(count_L) - 1]
    start_RL = np.column_stack([np.zeros(len(weight_RX)), end_RL[:, :-1]])
    return np.asarray(((start_RL + end_RL) / 2)[:, level_X])


def leave_one_out(task_X: Ints) -> Floats:
    """[1 + V, X] weight of each row: 1, then 0 for the rows of one of the V tasks."""
    tasks, index_X = np.unique(task_X, return_inverse=True)
    return np.vstack([np.ones(len(task_X)), np.arange(len(tasks))[:, None] != index_X]).astype(np.float64)


def _mean(value_DK: Floats) -> Floats:
    """[D] means of the known entries; NaN if all are unknown."""
    return np.asarray(np.ma.masked_invalid(value_DK).mean(axis=1).filled(np.nan))


def _differences(after_DK: Floats, before_DK: Floats) -> Floats:
    """[D] differences of the means; 0 if they differ by rounding alone, which would have a rank where all are equal."""
    difference_D, returns = _mean(after_DK) - _mean(before_DK), np.stack([after_DK, before_DK])
    least = 1e-9 * np.max(abs(returns), where=np.isfinite(returns), initial=0.0)
    return np.where(abs(difference_D) <= least, 0.0, difference_D)


def _squared_error(value_DK: Floats) -> Floats:
    """[D] squared standard errors of the means; NaN with fewer than two known entries."""
    known_DK = np.ma.masked_invalid(value_DK)
    return np.asarray((known_DK.var(axis=1, ddof=1) / known_DK.count(axis=1)).filled(np.nan))
