"""How well credit agrees with what agents added to the outcome, by plays in which others stood in for them.

A row is one agent in one play: its mean credit there, and its counterfactual value (`creditflow.credit.shapley`). Knows
neither how credit was assigned nor how values were measured.

Shape suffixes: X rows, V tasks, L levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from creditflow.credit import Assignment
from creditflow.credit.shapley import Values
from creditflow.trajectory import Bools, Floats, Ints, TrajectoryBatch

_RESAMPLES = 1000
_SEED = 0


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """X rows of a batch, and what was measured of them."""

    play_X: Ints
    agent_X: Ints
    task_X: Ints
    shapley_X: Floats
    left_out_X: Floats
    shapley_se_X: Floats
    agents: tuple[str, ...]

    @classmethod
    def of(cls, batch: TrajectoryBatch, measured: Mapping[str, Values]) -> Measured:
        """The rows of `batch` whose Shapley values are known. `measured`: by the trajectory's id."""
        rows = []
        codes = {name: code for code, name in enumerate(batch.agent_names)}
        for n, id in enumerate(batch.trajectory_ids):
            if (found := measured.get(id)) is None:
                continue
            columns = (found.shapley_A, found.left_out_A, found.shapley_se_A)
            for name, *numbers in zip(found.agents, *map(np.ndarray.tolist, columns), strict=True):
                rows.append((n, codes[name], int(batch.group_of_trajectory[n]), *numbers))
        table = np.array(rows, dtype=np.float64).reshape(-1, 6)
        table = table[np.isfinite(table[:, 3])]
        play_X, agent_X, task_X = table[:, :3].T.astype(np.int64)
        shapley_X, left_out_X, shapley_se_X = table[:, 3:].T
        return cls(play_X, agent_X, task_X, shapley_X, left_out_X, shapley_se_X, batch.agent_names)

    @property
    def reliability(self) -> float:
        """Of the variance of Shapley values, the part that is not error of measurement, from 0 to 1; NaN: not known.

        Of the values whose error is known. No rule can correlate with them by more than about its square root.
        """
        known_X = np.isfinite(self.shapley_se_X)
        spread = float(np.var(self.shapley_X[known_X])) if known_X.any() else 0.0
        return max(0.0, 1 - float(np.mean(self.shapley_se_X[known_X] ** 2)) / spread) if spread else float("nan")


@dataclass(frozen=True, slots=True)
class Share:
    """A number with its 95 % interval, by the bootstrap over tasks; NaN where there is none."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """How one rule's numbers agree with counterfactual values."""

    rule: str
    credit: Share
    """Spearman's rank correlation of credit with Shapley values, all rows."""
    advantage: Share
    """The same of advantages: of what was trained on."""
    left_out: Share
    """Credit with what leaving the agent out costs."""
    by_agent: Mapping[str, Share]
    """Advantages with Shapley values, among plays of one agent: what a baseline by agent compares."""
    within: Share
    """Of two agents of one play whose values differ, how often the one that added more has more credit; ties count
    half. Chance: 0.5."""


def agreement(rule: str, made: Assignment, seen: Measured) -> Agreement:
    """How the credit and the advantages of `made`, means over each agent's steps in a play, agree with `seen`."""
    credit_X = _mean_over_steps(made.batch, made.credit_S, seen)
    advantage_X = _mean_over_steps(made.batch, made.advantage_S, seen)
    weights_RV = _resampled(seen.task_X)
    everywhere_X = np.ones(len(credit_X), dtype=np.bool_)

    def correlation(value_X: Floats, other_X: Floats, at_X: Bools = everywhere_X) -> Share:
        at_X = at_X & np.isfinite(value_X) & np.isfinite(other_X)
        return _share(lambda weight_X: spearman(value_X[at_X], other_X[at_X], weight_X[at_X]), seen.task_X, weights_RV)

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
        within=_within(credit_X, seen, weights_RV),
    )


def _mean_over_steps(batch: TrajectoryBatch, value_S: Floats, seen: Measured) -> Floats:
    """[X] the mean of `value_S` over the steps of a row's agent in its play."""
    agents = len(batch.agent_names)
    cell_S = batch.trajectory_of_step * agents + batch.agent_of_step
    count_C, sum_C = (np.bincount(cell_S, w, batch.n_trajectories * agents) for w in (np.ones(len(value_S)), value_S))
    cell_X = seen.play_X * agents + seen.agent_X
    return np.asarray(sum_C[cell_X] / count_C[cell_X])


def spearman(a_X: Floats, b_X: Floats, weight_X: Floats) -> float:
    """Rank correlation, ties at their mean rank; `weight_X`: how often each row counts. NaN without any spread."""
    if len(a_X) < 2 or not weight_X.sum():
        return float("nan")
    a_X, b_X = _ranks(a_X, weight_X), _ranks(b_X, weight_X)
    a_X, b_X = a_X - np.average(a_X, weights=weight_X), b_X - np.average(b_X, weights=weight_X)
    norm = float(np.sqrt((weight_X * a_X**2).sum() * (weight_X * b_X**2).sum()))
    return float((weight_X * a_X * b_X).sum()) / norm if norm > _TINY else float("nan")


_TINY = 1e-12


def _ranks(value_X: Floats, weight_X: Floats) -> Floats:
    """[X] the mean rank of each row among the rows, each taken as often as it counts. Values that differ by rounding
    alone are the same.
    """
    _, level_X = np.unique(value_X.round(9), return_inverse=True)
    weight_L = np.bincount(level_X, weight_X)
    return np.asarray((np.cumsum(weight_L) - weight_L / 2)[level_X])


def _within(credit_X: Floats, seen: Measured, weights_RV: Floats) -> Share:
    pairs = [
        (seen.task_X[i], (np.sign(round(credit_X[i] - credit_X[j], 9)) * np.sign(difference) + 1) / 2)
        for rows in _rows_of_plays(seen.play_X)
        for place, i in enumerate(rows)
        for j in rows[place + 1 :]
        if (difference := round(seen.shapley_X[i] - seen.shapley_X[j], 9)) != 0
    ]
    if not pairs:
        return Share(float("nan"), float("nan"), float("nan"))
    task_P, right_P = np.array(pairs).T
    return _share(lambda weight_P: _average(right_P, weight_P), task_P.astype(np.int64), weights_RV)


def _average(value: Floats, weight: Floats) -> float:
    return float(np.average(value, weights=weight)) if weight.sum() else float("nan")


def _rows_of_plays(play_X: Ints) -> Sequence[Sequence[int]]:
    found: dict[int, list[int]] = {}
    for row, play in enumerate(play_X.tolist()):
        found.setdefault(play, []).append(row)
    return list(found.values())


def _resampled(task_X: Ints) -> Floats:
    """[R, V] how often each task is drawn."""
    tasks = int(task_X.max()) + 1 if len(task_X) else 1
    there = np.bincount(task_X, minlength=tasks) > 0
    drawn_RV = np.zeros((_RESAMPLES, tasks))
    count = int(there.sum())
    if count:
        drawn_RV[:, there] = np.random.default_rng(_SEED).multinomial(count, np.full(count, 1 / count), _RESAMPLES)
    return drawn_RV


def _share(statistic: Callable[[Floats], float], task_X: Ints, weights_RV: Floats) -> Share:
    value = statistic(np.ones(len(task_X)))
    found = np.array([statistic(weight_V[task_X]) for weight_V in weights_RV])
    found = found[np.isfinite(found)]
    if np.isnan(value) or not len(found) or len(np.unique(task_X)) < 2:
        return Share(value, float("nan"), float("nan"))
    low, high = np.quantile(found, [0.025, 0.975])
    return Share(value, float(low), float(high))
