"""Trees of branches: the values of alternatives at a decision, and of every step around it.

A decision is a step of a recorded trajectory at which m alternatives were sampled; the recorded response is the first.
Each alternative was continued to its end by the same team, k times. All leaves of the tree are samples of the
outcome, so a step's value is the mean return of the leaves below it, and its share of the loss is the share of leaves
below it. The comparison is that of C3 (arXiv 2603.06859): `A_i = Qbar_i - mean over j != i of Qbar_j`.

A decision that was drawn with probability p has the weight w (`creditflow.credit.branch_points`). The tree
replaces the recorded trajectory with the weight w, and the trajectory alone keeps the weight 1 - w. If p depends on
nothing that happened after the decision began, w is 1.

Shape suffixes: N trajectories, S steps, D decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from creditflow.credit.groups import (
    BACK_OFF,
    DECISION,
    LEVEL_NAMES,
    TIE_TOLERANCE,
    BatchColumns,
    Groups,
    cells_of,
    group_statistics,
    spread_of,
    tied_groups,
)
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.errors import BatchError

KEY = "branching"
"""The key in `trajectory.info`. A trajectory with a decision: `{at, probability, weight}`, the index of the step. A
branch: `{of, alternative, continuation}`, with the id of the recorded trajectory; numbers count from 0, which is the
recorded response, or the first continuation."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of a recorded trajectory, with the trajectories below it."""

    root: int
    """Index of the recorded trajectory."""
    at: int
    """Index of the step in the trajectory."""
    weight: float
    leaves: tuple[tuple[int, ...], ...]
    """The trajectories of each alternative. The first of each holds the alternative, the others hold copies of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """The branches of a batch."""

    root_N: Ints
    """[N] the recorded trajectory that a branch continues; every other trajectory is its own root."""
    new_N: Ints
    """[N] index of a branch's first new step; 0 for other trajectories. The steps before it are copies."""
    decisions: tuple[Decision, ...]

    def copied_S(self, batch: TrajectoryBatch) -> Bools:
        """[S] copies of recorded steps, which are trained in the trajectory that they were copied from."""
        return np.asarray(batch.index_of_step < self.new_N[batch.trajectory_of_step])

    def branch_S(self, batch: TrajectoryBatch) -> Bools:
        """[S] the steps of branches, copies included."""
        branch_N = self.root_N != np.arange(len(self.root_N))
        return np.asarray(branch_N[batch.trajectory_of_step])


def branch_entries(batch: TrajectoryBatch) -> tuple[Mapping[str, Any] | None, ...]:
    """[N] `info[KEY]` of each branch, a refused one included; None for the other trajectories."""
    return batch.derived("branch_entries", lambda: tuple(map(_branch_entry, batch.trajectory_info)))


def _branch_entry(info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    # Trajectories of other systems may use the key for something else.
    entry = info.get(KEY)
    numbers = ("alternative", "continuation")
    if not isinstance(entry, Mapping) or not isinstance(entry.get("of"), str):
        return None
    return entry if all(isinstance(entry.get(name), int) for name in numbers) else None


def rollouts_of(batch: TrajectoryBatch) -> Bools:
    """[N] the rollouts of tasks. The others are branches, which count in no statistic of tasks or rollouts."""
    return np.array([entry is None for entry in branch_entries(batch)], dtype=np.bool_)


def counted_steps(batch: TrajectoryBatch, *, branches: bool) -> Bools:
    """[S] the steps that statistics of steps count: no copy, and of branches the new steps if `branches`, else none.

    A refused branch has no step that counts.
    """
    rollout_S = rollouts_of(batch)[batch.trajectory_of_step]
    trees = trees_of(batch) if branches else None
    return rollout_S if trees is None else rollout_S | (trees.branch_S(batch) & ~trees.copied_S(batch))


def trees_of(batch: TrajectoryBatch) -> Trees | None:
    """The branches of a batch; None without any. Raises BatchError for a branch without its recorded trajectory."""
    # Most batches have no branch, and then no info is decoded.
    return batch.derived("trees", lambda: _trees(batch)) if any(batch.branch_of) else None


def _trees(batch: TrajectoryBatch) -> Trees | None:
    root_N, new_N = np.arange(batch.n_trajectories), np.zeros(batch.n_trajectories, dtype=np.int64)
    index_of = {id: n for n, id in enumerate(batch.trajectory_ids)}
    found: dict[int, dict[tuple[int, int], int]] = {}
    for s in np.flatnonzero([parent is not None for parent in batch.branch_of]).tolist():
        n = int(batch.trajectory_of_step[s])
        if (entry := branch_entries(batch)[n]) is None:  # a branch of another system
            continue
        if (root := index_of.get(entry["of"])) is None:
            raise BatchError(
                f"trajectory {batch.trajectory_ids[n]}: expected the trajectory {entry['of']}, of which it is a "
                "branch, in the same batch"
            )
        root_N[n], new_N[n] = root, batch.index_of_step[s]
        found.setdefault(root, {})[entry["alternative"], entry["continuation"]] = n
    if not found:
        return None
    return Trees(root_N, new_N, tuple(_decision(batch, root, leaves) for root, leaves in sorted(found.items())))


def _decision(batch: TrajectoryBatch, root: int, leaves: dict[tuple[int, int], int]) -> Decision:
    entry = batch.trajectory_info[root][KEY]
    by_alternative: dict[int, list[int]] = {0: [root]}
    for alternative, continuation in sorted(leaves):
        by_alternative.setdefault(alternative, []).append(leaves[alternative, continuation])
    return Decision(root, entry["at"], entry["weight"], tuple(map(tuple, by_alternative.values())))


def mean(values: Sequence[float]) -> float:
    """The mean, added from left to right: the order in which explanations repeat it."""
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


@dataclass(frozen=True, slots=True)
class MeasuredDecision:
    """A decision with at least two alternatives of known value."""

    decision: Decision
    """With the leaves of known outcome alone."""
    rows: tuple[int, ...]
    """The step of each alternative."""
    returns: tuple[tuple[float, ...], ...]
    """The outcomes of each alternative's leaves."""

    @property
    def values(self) -> tuple[float, ...]:
        """Qbar_i: the mean return of each alternative."""
        return tuple(map(mean, self.returns))


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """The values of S steps in trees, and their part in training.

    Steps outside of trees have their outcome as value, share 1 and factor 1.
    """

    trees: Trees
    decisions: tuple[MeasuredDecision, ...]
    value_S: Floats
    """[S] the value in place of the outcome: the mean return of the leaves below the step."""
    residual_S: Floats
    """[S] the weight of the recorded outcome that is added to a decision's recorded step; 0 if the weight is 1."""
    factor_S: Floats
    """[S] the weight of the advantage, from the decision's weight."""
    share_S: Floats
    """[S] the share of leaves below the step."""
    left_out_S: Bools
    """[S] copies, and branches without a known outcome or of a decision without alternatives to compare."""
    root_S: Bools
    """[S] the steps of recorded trajectories."""
    tree_S: Ints
    """[S] the recorded trajectory of each step's tree."""

    @property
    def decided_S(self) -> Ints:
        """[S] the decision at which the step is an alternative; -1 for other steps."""
        decided_S = np.full(len(self.value_S), -1)
        for d, one in enumerate(self.decisions):
            decided_S[list(one.rows)] = d
        return decided_S


def measure_branches(batch: TrajectoryBatch, outcome_S: Floats, known_S: Bools) -> Branches | None:
    """The values of a batch's trees; None without branches.

    `outcome_S`, `known_S`: [S] the outcome of the step's agent, and whether it is known. A tree whose recorded outcome
    is unknown, or that has fewer than two alternatives with a known one, is not compared: its trajectory is trained as
    if it had no branches.
    """
    if (trees := trees_of(batch)) is None:
        return None
    first_N = np.searchsorted(batch.trajectory_of_step, np.arange(batch.n_trajectories))
    branch_S = trees.branch_S(batch)
    value_S, residual_S = outcome_S.copy(), np.zeros(batch.n_steps)
    factor_S, share_S, left_out_S = np.ones(batch.n_steps), np.ones(batch.n_steps), branch_S.copy()
    end_N = np.append(first_N[1:], batch.n_steps)
    measured = []
    for decision in trees.decisions:
        if (one := _measured(decision, first_N, outcome_S, known_S)) is None:
            continue
        measured.append(one)
        at, w, leaves = decision.at, decision.weight, one.decision.leaves
        root, m = int(first_N[decision.root]), len(leaves)
        for index in range(at):
            below = [[int(first_N[n]) + index for n in alternative] for alternative in leaves]
            if all(known_S[row] for rows in below for row in rows):  # single agents' outcomes may be unknown
                value = mean([mean([float(outcome_S[row]) for row in rows]) for rows in below])
                value_S[root + index] = value if w == 1.0 else (1.0 - w) * outcome_S[root + index] + w * value
        for row, value in zip(one.rows, one.values, strict=True):
            value_S[row], factor_S[row], share_S[row], left_out_S[row] = value, w, 1.0 / m, False
        residual_S[one.rows[0]] = 0.0 if w == 1.0 else m * (1.0 - w) / w
        for alternative in leaves:
            for n in alternative:
                after = slice(max(int(first_N[n] + trees.new_N[n]), int(first_N[n]) + at + 1), int(end_N[n]))
                leaf = 1.0 / (m * len(alternative))
                share_S[after], left_out_S[after] = leaf, False
                # The recorded continuation is a leaf with the weight w, and the recorded trajectory with 1 - w.
                factor_S[after] = w if n != decision.root or w == 1.0 else w + (1.0 - w) / leaf
    return Branches(
        trees,
        tuple(measured),
        value_S,
        residual_S,
        factor_S,
        share_S,
        left_out_S,
        ~branch_S,
        trees.root_N[batch.trajectory_of_step],
    )


def _measured(decision: Decision, first_N: Ints, outcome_S: Floats, known_S: Bools) -> MeasuredDecision | None:
    leaves, rows, returns = [], [], []
    for alternative in decision.leaves:
        known = tuple(n for n in alternative if known_S[first_N[n] + decision.at])
        if known:
            leaves.append(known)
            rows.append(int(first_N[alternative[0]]) + decision.at)
            returns.append(tuple(float(outcome_S[first_N[n] + decision.at]) for n in known))
    recorded = bool(leaves) and decision.root in leaves[0]
    if not recorded or len(leaves) < 2:
        return None
    return MeasuredDecision(replace(decision, leaves=tuple(leaves)), tuple(rows), tuple(returns))


# ---- groups --------------------------------------------------------------------------------------------------------


def tree_statistics(
    columns: BatchColumns, branches: Branches, recorded_S: Floats, compared_S: Floats, trained_S: Bools, group_by: str
) -> Groups:
    """Groups of a batch with branches.

    The mean of a group comes from recorded trajectories and their recorded credit `recorded_S` alone, so that no
    branch enters a baseline. A step of a branch is compared with the group of its key. The spread covers all trained
    steps with their values `compared_S`; a trajectory with its branches has the weight of one. The alternatives of a
    decision are compared with one another, see `compare_alternatives`. They keep the spread of the group of their key.
    """
    groups = group_statistics(columns, recorded_S, trained_S & branches.root_S, group_by)
    levels = tuple(dict.fromkeys((group_by, *BACK_OFF)))
    _join(columns, branches, recorded_S, trained_S, levels, groups)
    members, recorded = np.flatnonzero(trained_S), np.flatnonzero(trained_S & branches.root_S)
    members = members[np.argsort(branches.tree_S[members], kind="stable")]  # `cells_of` expects trajectories in order
    for level in np.unique(groups.level_S[groups.level_S >= 0]).tolist():
        code_S = columns.code_S(LEVEL_NAMES[level])
        at = np.flatnonzero(groups.level_S == level)
        mean_G = np.zeros(int(code_S.max()) + 1)
        mean_G[code_S[at]] = groups.mean_S[at]
        cells = cells_of(compared_S[members], code_S[members], branches.tree_S[members])
        spread_G = spread_of(cells, code_S[members], compared_S[members], mean_G)
        values = np.concatenate([compared_S[members], recorded_S[recorded]])
        tied_G = tied_groups(values, code_S[np.concatenate([members, recorded])], mean_G)
        groups.spread_S[at], groups.tied_S[at] = spread_G[code_S[at]], tied_G[code_S[at]]
    compare_alternatives(branches, recorded_S, compared_S, groups)
    return groups


def _join(
    columns: BatchColumns,
    branches: Branches,
    recorded_S: Floats,
    trained_S: Bools,
    levels: tuple[str, ...],
    groups: Groups,
) -> None:
    """Give each trained step of a branch the group of its key, at the first level with other recorded trajectories."""
    batch, n = columns.batch, columns.batch.n_trajectories
    recorded = np.flatnonzero(trained_S & branches.root_S)
    missing = np.flatnonzero(trained_S & ~branches.root_S).tolist()
    if not recorded.size:
        return
    next_group = int(groups.group_S.max(initial=-1)) + 1
    for number, level in ((LEVEL_NAMES.index(level), level) for level in levels):
        code_S = columns.code_S(level)
        code, trajectory = code_S[recorded], batch.trajectory_of_step[recorded]
        cells = cells_of(recorded_S[recorded], code, trajectory)
        size_G, mean_G = dict(enumerate(cells.size_G.tolist())), cells.mean_G
        own_of = dict(zip((code * n + trajectory).tolist(), cells.mean_C[cells.cell].tolist(), strict=True))
        there = np.flatnonzero(groups.level_S == number)
        group_of = dict(zip(code_S[there].tolist(), groups.group_S[there].tolist(), strict=True))
        left = []
        for s in missing:
            g = int(code_S[s])
            own, size = own_of.get(g * n + int(branches.tree_S[s])), size_G.get(g, 0)
            others = size - (own is not None)
            if others < 1:
                left.append(s)
                continue
            if g not in group_of:
                group_of[g], next_group = next_group, next_group + 1
            groups.group_S[s], groups.level_S[s], groups.size_S[s] = group_of[g], number, size
            groups.mean_S[s] = mean_G[g]
            groups.others_S[s] = mean_G[g] if own is None else (size * mean_G[g] - own) / others
        missing = left


def compare_alternatives(branches: Branches, recorded_S: Floats, compared_S: Floats, groups: Groups) -> None:
    """Make the alternatives of each decision a group in `groups`, with the mean of the others as each one's baseline.

    The baseline of a recorded step whose decision has another weight than 1 also contains that of its recorded credit.
    """
    first = int(groups.group_S.max(initial=-1)) + 1
    for d, one in enumerate(branches.decisions):
        values = [float(compared_S[row]) for row in one.rows]
        tied = max(values) - min(values) <= TIE_TOLERANCE * max(1.0, abs(mean(values)))
        for i, row in enumerate(one.rows):
            others, residual = others_mean(values, i), float(branches.residual_S[row])
            for column_S in (groups.mean_S, groups.others_S):
                if residual:  # a step without a group has no advantage by its recorded credit
                    of_group = recorded_S[row] if np.isnan(column_S[row]) else column_S[row]
                    column_S[row] = others + residual * of_group
                else:
                    column_S[row] = others
            if np.isnan(groups.spread_S[row]):
                groups.spread_S[row] = float(np.std(values, ddof=1))
            groups.group_S[row], groups.level_S[row] = first + d, LEVEL_NAMES.index(DECISION)
            groups.size_S[row], groups.tied_S[row] = len(values), tied and not residual


def others_mean(values: Sequence[float], i: int) -> float:
    """The mean of all values except the one at place `i`."""
    return mean([value for place, value in enumerate(values) if place != i])
