"""Agreement of credit with counterfactual values, which were measured by replacing agents in rollouts.

A row is one agent in one trajectory: its mean credit there, and its counterfactual value (`creditflow.credit.shapley`).
Independent of how credit was assigned and how values were measured.

Shape suffixes: X rows, V tasks, R resamples (the first is the data itself).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from creditflow.credit import Assignment
from creditflow.credit.analysis.fidelity import Precision, Share, spearman, task_weights
from creditflow.credit.shapley import Values
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch


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
        """The precision of the Shapley values; None if it is unknown."""
        return Precision.from_errors(self.shapley_X, self.shapley_se_X)


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
    drawn_RV = task_weights(seen.task_X)
    everywhere_X = np.ones(len(credit_X), dtype=np.bool_)

    def correlation(value_X: Floats, other_X: Floats, at_X: Bools = everywhere_X) -> Share:
        at_X = at_X & np.isfinite(value_X) & np.isfinite(other_X)
        return Share.from_resamples(spearman(value_X[at_X], other_X[at_X], drawn_RV[:, seen.task_X[at_X]]))

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
        return Share.from_resamples((weight_RP @ right_P) / weight_RP.sum(axis=1))


def _rows_by_trajectory(trajectory_X: Ints) -> Sequence[Sequence[int]]:
    rows: dict[int, list[int]] = {}
    for row, trajectory in enumerate(trajectory_X.tolist()):
        rows.setdefault(trajectory, []).append(row)
    return list(rows.values())
