"""Groups: the steps that share a baseline, with the group's mean and spread, for any values (credit, sub-rewards).

Each trajectory has the same weight in its group, whatever its number of steps there. With equal weights for steps, the
trajectories with many turns, which are not a random sample, would dominate the baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from creditflow.data import Bools, Floats, Ints, TrajectoryBatch

TIE_TOLERANCE = 1e-9
"""Largest difference of credits in a tied group, relative to the group's mean if that is above 1."""

EPSILON = 1e-6
"""Added to the spread before dividing by it, as in verl."""


def _prompts(batch: TrajectoryBatch) -> Ints:
    code_of: dict[str, int] = {}
    return np.array([code_of.setdefault(prompt, len(code_of)) for prompt in batch.prompts], dtype=np.int64)


_PARTS: dict[str, Callable[[TrajectoryBatch], Ints]] = {
    "task": lambda batch: batch.group_of_trajectory[batch.trajectory_of_step],
    "agent": lambda batch: batch.agent_of_step,
    "turn": lambda batch: batch.turn_of_step,
    "prompt": _prompts,
}
"""The parts of a group's key, each an [S] column of integers."""

LEVELS: dict[str, tuple[str, ...]] = {
    "task": ("task",),
    "task_agent": ("task", "agent"),
    "task_agent_turn": ("task", "agent", "turn"),
    "task_agent_state": ("task", "agent", "prompt"),
    "agent": ("agent",),
    "agent_turn": ("agent", "turn"),
}
"""`algorithm.group_by`: the parts of each level's key. Policy, policy version and stratum belong to every key."""

BACK_OFF = ("task_agent", "agent_turn", "agent")
"""Levels that provide the baseline of a step alone in its group, in this order."""

POLICY = "policy"
"""The level of estimators that compare all tokens of a policy."""
LEVEL_NAMES = (*LEVELS, POLICY)


@dataclass(frozen=True, slots=True)
class Groups:
    """The group of each of S steps. Steps without one have NaN, -1, 0 or False."""

    group_S: Ints
    """[S] id, unique within the batch; -1: none."""
    level_S: Ints
    """[S] index into LEVEL_NAMES: the level of the baseline, after any back-off; -1: none."""
    size_S: Ints
    """[S] number of trajectories in the group."""
    mean_S: Floats
    """[S] m: the mean over trajectories of each trajectory's mean."""
    others_S: Floats
    """[S] the same without the step's own trajectory."""
    spread_S: Floats
    """[S] the square root of `n/(n-1) * mean over trajectories of mean_t (c - m)^2`."""
    tied_S: Bools
    """[S] whether all values of the group are the same: `max - min <= 1e-9 * max(1, |m|)`."""
    singletons: int
    """Number of groups of one trajectory at the level `group_by`."""


def compact(*columns: Ints) -> tuple[Ints, int]:
    """[S] codes from 0 for the distinct combinations of the columns' values, and the number of codes."""
    from creditflow.credit import kernels

    code, n = np.zeros(len(columns[0]), dtype=np.int64), 1
    affordable = 8 * code.size + 1024  # largest table of all pairs; beyond it, sorting the occurring pairs costs less
    for column in columns:
        low, high = int(column.min()), int(column.max())
        digit, width = column, high - low + 1
        if width == 1:
            continue
        if n * width > affordable:
            low, (digit, width) = 0, _sorted_codes(column)
        if n * width > affordable:
            code, n = _sorted_codes(code * width + digit)
        else:
            n = kernels.refine(code, digit, low, width, np.zeros(n * width, dtype=np.int64))
    return code, n


def _sorted_codes(column: Ints) -> tuple[Ints, int]:
    values, code = np.unique(column, return_inverse=True)
    return code.reshape(-1).astype(np.int64), len(values)


def shared_versions(batch: TrajectoryBatch, max_version_lag: int) -> Ints:
    """[S] the policy version in a step's group key.

    The policy's newest version in the batch, for steps at most `max_version_lag` older; otherwise the step's own.
    """
    if max_version_lag == 0 or not batch.n_steps:
        return batch.policy_version
    newest = np.full(len(batch.policy_names), np.iinfo(np.int64).min)
    np.maximum.at(newest, batch.policy_of_step, batch.policy_version)
    newest_S = newest[batch.policy_of_step]
    return np.where(newest_S - batch.policy_version <= max_version_lag, newest_S, batch.policy_version)


def codes_of_level(batch: TrajectoryBatch, level: str, stratum_S: Ints, max_version_lag: int = 0) -> Ints:
    """[S] group codes at `level`, from its parts, policy, policy version (`shared_versions`) and stratum.

    `stratum_S`: [S] the strata in force, -1 for none. `batch.stratum_of_step` also has labels of steps that must ignore
    theirs.
    """
    components = [_PARTS[part](batch) for part in LEVELS[level]]
    return compact(*components, batch.policy_of_step, shared_versions(batch, max_version_lag), stratum_S)[0]


class BatchColumns:
    """Columns of one batch that several stages of credit assignment read, each computed once, at its first use."""

    def __init__(self, batch: TrajectoryBatch, stratum_S: Ints, max_version_lag: int = 0) -> None:
        """`stratum_S`: [S] the strata in force, see `codes_of_level`; `max_version_lag`: see `shared_versions`."""
        self.batch, self.stratum_S, self.max_version_lag = batch, stratum_S, max_version_lag
        self._code_S: dict[str, Ints] = {}

    def with_strata(self, stratum_S: Ints) -> BatchColumns:
        """The columns of the same batch under the strata `stratum_S`; these columns if both are the same."""
        if np.array_equal(self.stratum_S, stratum_S):
            return self
        return BatchColumns(self.batch, stratum_S, self.max_version_lag)

    @cached_property
    def sampled_S(self) -> Ints:
        """[S] the number of sampled response tokens of each step."""
        from creditflow.credit import kernels

        return kernels.sampled_tokens(self.batch.token_offsets, self.batch.response_mask)

    def code_S(self, level: str) -> Ints:
        """[S] group codes at `level`, a name of LEVEL_NAMES."""
        if level not in self._code_S:
            self._code_S[level] = (
                compact(self.batch.policy_of_step)[0]
                if level == POLICY
                else codes_of_level(self.batch, level, self.stratum_S, self.max_version_lag)
            )
        return self._code_S[level]


def describe(batch: TrajectoryBatch, level: str, step: int, stratum: int, max_version_lag: int = 0) -> str:
    """The key of `step`'s group at `level`, in words."""
    words = {
        "task": batch.group_names[batch.group_of_trajectory[batch.trajectory_of_step[step]]],
        "agent": batch.agent_names[batch.agent_of_step[step]],
        "turn": str(batch.turn_of_step[step]),
        "prompt": repr(batch.prompts[step][:40]),
    }
    if level == POLICY:
        return f"policy={batch.policy_names[batch.policy_of_step[step]]}"
    components = [f"{part}={words[part]}" for part in LEVELS[level]]
    newest = int(shared_versions(batch, max_version_lag)[step])
    version = str(newest) if max_version_lag == 0 else f"{newest - max_version_lag}..{newest}"
    components += [f"policy={batch.policy_names[batch.policy_of_step[step]]}", f"version={version}"]
    return " ".join(components + ([f"stratum={batch.stratum_names[stratum]}"] if stratum >= 0 else []))


def group_statistics(columns: BatchColumns, values_S: Floats, trained_S: Bools, group_by: str) -> Groups:
    """Mean and spread of each trained step's group; masked steps are in no group.

    A step is alone if its trajectory is the only one in the group. It then takes the first group of BACK_OFF with at
    least two trajectories; the members of that group are all steps of its key, alone or not. Without such a group, the
    step has none: an advantage equal to the raw reward would push in one direction only.
    """
    from creditflow.credit import kernels

    batch = columns.batch
    groups = no_groups(batch.n_steps)
    members = np.flatnonzero(trained_S)
    everybody = members.size == batch.n_steps  # the usual case, which needs no selection
    values = values_S if everybody else values_S[members]
    trajectory = batch.trajectory_of_step if everybody else batch.trajectory_of_step[members]
    n_groups = singletons = 0
    missing = members.size
    for level in (group_by, *BACK_OFF):
        if not missing:
            break
        code_S = columns.code_S(level)
        code = code_S if everybody else code_S[members]
        cells = cells_of(values, code, trajectory)
        if not n_groups:
            singletons = int((cells.size_G == 1).sum())
        missing = kernels.fill_groups(
            members,
            code,
            cells.cell,
            cells.mean_C,
            cells.size_G,
            cells.mean_G,
            spread_of(cells, code, values, cells.mean_G),
            tied_groups(values, code, cells.mean_G),
            n_groups,
            LEVEL_NAMES.index(level),
            groups.group_S,
            groups.level_S,
            groups.size_S,
            groups.mean_S,
            groups.others_S,
            groups.spread_S,
            groups.tied_S,
        )
        n_groups += len(cells.size_G)
    return replace(groups, singletons=singletons)


def no_groups(n_steps: int) -> Groups:
    """Return groups without members: no step has a baseline."""
    group_S, level_S, size_S = np.full(n_steps, -1), np.full(n_steps, -1), np.zeros(n_steps, dtype=np.int64)
    mean_S, others_S, spread_S = (np.full(n_steps, np.nan) for _ in range(3))
    return Groups(group_S, level_S, size_S, mean_S, others_S, spread_S, np.zeros(n_steps, dtype=np.bool_), 0)


@dataclass(frozen=True, slots=True)
class Cells:
    """The groups of one level over M member steps. `cell`: the part of one trajectory in one group."""

    cell: Ints
    """[M] index of each member's part."""
    group_C: Ints
    steps_C: Ints
    mean_C: Floats
    size_G: Ints
    """[G] number of trajectories in the group."""
    mean_G: Floats


def cells_of(values: Floats, code: Ints, trajectory: Ints) -> Cells:
    """The groups given by `code`, over members with their values and trajectories."""
    n_groups = int(code.max()) + 1
    cell, group_C, n_cells = _cells(code, trajectory)
    mean_C, steps_C = _means_of(values, cell, n_cells)
    mean_G, size_G = _means_of(mean_C, group_C, n_groups)
    return Cells(cell, group_C, steps_C, mean_C, size_G, mean_G)


def _means_of(values: Floats, cell: Ints, n: int) -> tuple[Floats, Ints]:
    """[n] the mean and the number of each cell's values; both 0 for an empty cell."""
    count = np.bincount(cell, minlength=n)
    return np.bincount(cell, values, n) / np.maximum(count, 1), count


def spread_of(cells: Cells, code: Ints, values: Floats, mean_G: Floats) -> Floats:
    """[G] square root of n/(n-1) times the mean over trajectories of their mean squared difference from `mean_G`."""
    square_C = np.bincount(cells.cell, (values - mean_G[code]) ** 2, len(cells.steps_C)) / cells.steps_C
    # n/(n-1) times the mean over n trajectories is their sum over n-1.
    total_G = np.bincount(cells.group_C, square_C, len(cells.size_G))
    return np.sqrt(total_G / np.maximum(cells.size_G - 1, 1))


def tied_groups(values: Floats, code: Ints, mean_G: Floats) -> Bools:
    """[G] whether all values of a group are the same, up to rounding."""
    from creditflow.credit import kernels

    low_G, high_G = kernels.low_and_high(values, code, len(mean_G))
    return np.asarray(high_G - low_G <= TIE_TOLERANCE * np.maximum(1.0, np.abs(mean_G)))


def _cells(code: Ints, trajectory: Ints) -> tuple[Ints, Ints, int]:
    """Number the pairs of group and trajectory: [M] each member's pair, each pair's group, the number of pairs."""
    from creditflow.credit import kernels

    cell, group_C = np.empty_like(code), np.empty_like(code)
    n_cells = kernels.number_cells(code, trajectory, int(code.max()) + 1, cell, group_C)
    return cell, group_C[:n_cells], n_cells


def leave_one_out_mean(values_S: Floats, over_S: Bools, code_S: Ints, trajectory_S: Ints, at: Ints) -> Floats:
    """[at] the mean over the group's other trajectories of their mean value over `over_S`; NaN if they have none.

    The whole own trajectory is left out, because its other steps are not independent of the step.
    """
    cell_S, group_C, n_cells = _cells(code_S, trajectory_S)
    n_groups = int(code_S.max()) + 1
    over = np.flatnonzero(over_S)
    mean_C, count_C = _means_of(values_S[over], cell_S[over], n_cells)
    has_any = count_C > 0
    sum_G = np.bincount(group_C, mean_C, n_groups)
    trajectories_G = np.bincount(group_C, has_any, n_groups)
    code, cell = code_S[at], cell_S[at]
    others = trajectories_G[code] - has_any[cell]
    return np.where(others > 0, (sum_G[code] - mean_C[cell]) / np.maximum(others, 1), np.nan)
