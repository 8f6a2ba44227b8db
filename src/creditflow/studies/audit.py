"""Agreement of credit with counterfactual values, which were measured by replacing agents in rollouts.

A row is one agent in one trajectory: its mean credit there, and its counterfactual value (`creditflow.credit.shapley`).
Independent of how credit was assigned and how values were measured.

Shape suffixes: X rows, V tasks, L levels, R resamples (the first is the data itself).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from creditflow.credit import Assignment
from creditflow.credit.shapley import Values
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch

_RESAMPLES = 1000
_SEED = 0


@dataclass(frozen=True, slots=True)
class Precision:
    """The variance of measured values, and the part of it that is measurement error."""

    variance: float
    """Variance of the values, in squared units of the outcome."""
    error: float
    """Mean squared standard error of the values, in the same units."""
    count: int

    @property
    def reliability(self) -> float:
        """Share of the variance that is not measurement error, in [0, 1].

        Its square root is an approximate upper bound on the correlation of any rule with the values.
        """
        return max(0.0, 1 - self.error / self.variance)

    @property
    def is_noise(self) -> bool:
        """Whether the variance may be measurement error only: a one-sided test at 5 %.

        The variance of n normal values has the relative standard error `sqrt(2 / (n - 1))`.
        """
        return self.variance <= self.error * (1 + 1.645 * self._relative_error)

    @property
    def sufficient_factor(self) -> float:
        """Factor on the number of rollouts at which half of the variance is real; a lower bound if it is noise.

        The squared error falls with the number of rollouts. The real variance is taken at its estimate, or, if the
        values are noise, at its upper 95 % bound; the factor is infinite if that is 0.
        """
        real = self.variance * (1 + (1.96 * self._relative_error if self.is_noise else 0.0)) - self.error
        return self.error / real if real > 0 else float("inf")

    @property
    def _relative_error(self) -> float:
        return float((2 / max(self.count - 1, 1)) ** 0.5)


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """X rows of a batch with their measured values."""

    trajectory_X: Ints
    agent_X: Ints
    task_X: Ints
    shapley_X: Floats
    left_out_X: Floats
    shapley_se_X: Floats
    agents: tuple[str, ...]

    @classmethod
    def from_values(cls, batch: TrajectoryBatch, measured: Mapping[str, Values]) -> Measured:
        """The rows of `batch` with known Shapley values. `measured`: values by trajectory id."""
        rows = []
        codes = {name: code for code, name in enumerate(batch.agent_names)}
        for n, id in enumerate(batch.trajectory_ids):
            if (values := measured.get(id)) is None:
                continue
            columns = (values.shapley_A, values.left_out_A, values.shapley_se_A)
            for name, *numbers in zip(values.agents, *map(np.ndarray.tolist, columns), strict=True):
                rows.append((n, codes[name], int(batch.group_of_trajectory[n]), *numbers))
        table = np.array(rows, dtype=np.float64).reshape(-1, 6)
        table = table[np.isfinite(table[:, 3])]
        trajectory_X, agent_X, task_X = table[:, :3].T.astype(np.int64)
        shapley_X, left_out_X, shapley_se_X = table[:, 3:].T
        return cls(trajectory_X, agent_X, task_X, shapley_X, left_out_X, shapley_se_X, batch.agent_names)

    @property
    def precision(self) -> Precision | None:
        """The precision of the Shapley values; None if it is unknown.

        Based on the values with a known standard error, which must be more than half of all and must not be equal.
        """
        known_X = np.isfinite(self.shapley_se_X)
        spread = float(np.var(self.shapley_X[known_X])) if 2 * known_X.sum() > len(known_X) else 0.0
        if not spread:
            return None
        return Precision(spread, float(np.mean(self.shapley_se_X[known_X] ** 2)), int(known_X.sum()))


@dataclass(frozen=True, slots=True)
class Share:
    """A number with its 95 % bootstrap interval over tasks; NaN if undefined."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of one rule's credit with counterfactual values."""

    rule: str
    credit: Share
    """Spearman's rank correlation of credit with Shapley values, over all rows."""
    advantage: Share
    """The same for advantages, the input of the loss."""
    left_out: Share
    """Correlation of credit with leave-one-out values: the loss in outcome without the agent."""
    by_agent: Mapping[str, Share]
    """Correlation of advantages with Shapley values among the rows of one agent, the rows that a baseline per agent
    compares."""
    within: Share
    """Among two agents of one trajectory with different values: how often the agent with the higher value has more
    credit; ties count half. Chance: 0.5."""


def agreement(rule: str, assignment: Assignment, seen: Measured) -> Agreement:
    """Agreement of credit and advantages, as means over an agent's steps in a trajectory, with `seen`."""
    credit_X = _mean_over_steps(assignment.batch, assignment.credit_S, seen)
    advantage_X = _mean_over_steps(assignment.batch, assignment.advantage_S, seen)
    drawn_RV = _resampled(seen.task_X)
    everywhere_X = np.ones(len(credit_X), dtype=np.bool_)

    def correlation(value_X: Floats, other_X: Floats, at_X: Bools = everywhere_X) -> Share:
        at_X = at_X & np.isfinite(value_X) & np.isfinite(other_X)
        return _share(spearman(value_X[at_X], other_X[at_X], drawn_RV[:, seen.task_X[at_X]]))

    return Agreement(
        rule,
        credit=correlation(credit_X, seen.shapley_X),
        advantage=correlation(advantage_X, seen.shapley_X),
        left_out=correlation(credit_X, seen.left_out_X),
        by_agent={
            name: correlation(advantage_X, seen.shapley_X, seen.agent_X == code)
            for code, name in enumerate(seen.agents)
            if (seen.agent_X == code).any()
        },
        within=_within(credit_X, seen, drawn_RV),
    )


def _mean_over_steps(batch: TrajectoryBatch, value_S: Floats, seen: Measured) -> Floats:
    """[X] the mean of `value_S` over the steps of a row's agent in its trajectory."""
    agents = len(batch.agent_names)
    cell_S = batch.trajectory_of_step * agents + batch.agent_of_step
    count_C, sum_C = (np.bincount(cell_S, w, batch.n_trajectories * agents) for w in (np.ones(len(value_S)), value_S))
    cell_X = seen.trajectory_X * agents + seen.agent_X
    return np.asarray(sum_C[cell_X] / count_C[cell_X])


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


_TINY = 1e-12


def _ranks(value_X: Floats, weight_RX: Floats) -> Floats:
    """[R, X] the mean rank of each row among the weighted rows. Values equal to 9 decimals are ties."""
    _, level_X, count_L = np.unique(value_X.round(9), return_inverse=True, return_counts=True)
    below_RX = np.cumsum(weight_RX[:, np.argsort(level_X, kind="stable")], axis=1)
    end_RL = below_RX[:, np.cumsum(count_L) - 1]
    start_RL = np.column_stack([np.zeros(len(weight_RX)), end_RL[:, :-1]])
    return np.asarray(((start_RL + end_RL) / 2)[:, level_X])


def _within(credit_X: Floats, seen: Measured, drawn_RV: Floats) -> Share:
    pairs = [
        (seen.task_X[i], (np.sign(round(credit_X[i] - credit_X[j], 9)) * np.sign(difference) + 1) / 2)
        for rows in _rows_by_trajectory(seen.trajectory_X)
        for place, i in enumerate(rows)
        for j in rows[place + 1 :]
        if (difference := round(seen.shapley_X[i] - seen.shapley_X[j], 9)) != 0
    ]
    if not pairs:
        return Share(float("nan"), float("nan"), float("nan"))
    task_P, right_P = np.array(pairs).T
    weight_RP = drawn_RV[:, task_P.astype(np.int64)]
    with np.errstate(invalid="ignore"):
        return _share((weight_RP @ right_P) / weight_RP.sum(axis=1))


def _rows_by_trajectory(trajectory_X: Ints) -> Sequence[Sequence[int]]:
    rows: dict[int, list[int]] = {}
    for row, trajectory in enumerate(trajectory_X.tolist()):
        rows.setdefault(trajectory, []).append(row)
    return list(rows.values())


def _resampled(task_X: Ints) -> Floats:
    """[1 + R, V] weight of each task: one each, then bootstrap counts. A single task gets no resamples (R = 0)."""
    there = np.unique(task_X)
    resamples = _RESAMPLES if len(there) > 1 else 0
    drawn_RV = np.zeros((1 + resamples, there[-1] + 1))
    drawn_RV[0, there] = 1.0
    rng = np.random.default_rng(_SEED)
    drawn_RV[1:, there] = rng.multinomial(len(there), np.full(len(there), 1 / len(there)), resamples)
    return drawn_RV


def _share(value_R: Floats) -> Share:
    """A value (first entry) with the interval from its resamples (other entries), if there are any."""
    value, resampled = float(value_R[0]), value_R[1:][np.isfinite(value_R[1:])]
    if np.isnan(value) or not len(resampled):
        return Share(value, float("nan"), float("nan"))
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Share(value, float(low), float(high))
