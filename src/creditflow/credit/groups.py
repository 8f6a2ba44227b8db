"""Groups: the steps that share a baseline, with the group's mean and spread, for any values (credit, sub-rewards).

Each trajectory has the same weight in its group, whatever its number of steps there. With equal weights for steps, the
trajectories with many turns, which are not a random sample, would dominate the baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from creditflow.credit.records import CreditOptions, Groups, Rewards
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


def compact(*columns: Ints) -> tuple[Ints, int]:
    """[S] codes from 0 for the distinct combinations of the columns' values, and the number of codes."""
    from creditflow.credit import kernels

    code = np.zeros(len(columns[0]), dtype=np.int64)
    if not code.size:
        return code, 0
    low = [int(column.min()) for column in columns]
    width = [int(column.max()) - least + 1 for column, least in zip(columns, low, strict=True)]
    differ = [i for i, values in enumerate(width) if values > 1]
    if not differ:
        return code, 1
    table_KS = np.stack([columns[i].astype(np.int64) - low[i] for i in differ])
    # The largest table of all pairs; beyond it, sorting the occurring pairs costs less.
    n = kernels.compact(table_KS, np.array([width[i] for i in differ]), 8 * code.size + 1024, code)
    if n < 0:
        order = np.lexsort(table_KS[::-1])
        code[order[1:]] = np.cumsum((np.diff(table_KS[:, order]) != 0).any(axis=0))
        code[order[0]], n = 0, int(code.max()) + 1
    return code, n


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


def group_codes(batch: TrajectoryBatch, level: str, max_version_lag: int = 0, stratum_S: Ints | None = None) -> Ints:
    """[S] group codes at `level`, a name of LEVEL_NAMES. Computed once and kept on the batch.

    From the level's parts, the policy, its version (`shared_versions`), and `stratum_S`: [S] the strata in force
    (`Rewards.stratum_S`); None: groups of steps whose own score does not count.
    """
    by_stratum = stratum_S is not None and bool((stratum_S >= 0).any())

    def compute() -> Ints:
        if level == POLICY:
            return compact(batch.policy_of_step)[0]
        columns = [_PARTS[part](batch) for part in LEVELS[level]]
        columns += [batch.policy_of_step, shared_versions(batch, max_version_lag)]
        return compact(*columns, *([] if stratum_S is None else [stratum_S]))[0]

    return batch.derived(f"codes {level} {max_version_lag} {by_stratum}", compute)


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


def group_statistics(rewards: Rewards, values_S: Floats, trained_S: Bools, options: CreditOptions) -> Groups:
    """Mean and spread of each trained step's group; masked steps are in no group.

    A step is alone if its trajectory is the only one in the group. It then takes the first group of BACK_OFF with at
    least two trajectories; the members of that group are all steps of its key, alone or not. Without such a group, the
    step has none: an advantage equal to the raw reward would push in one direction only.
    """
    from creditflow.credit import kernels

    batch, groups = rewards.batch, no_groups(trained_S)
    members = np.flatnonzero(trained_S)
    everybody = members.size == batch.n_steps  # the usual case, which needs no selection
    values = values_S if everybody else values_S[members]
    trajectory = batch.trajectory_of_step if everybody else batch.trajectory_of_step[members]
    n_groups = singletons = 0
    missing = members.size
    for level in (options.group_by, *BACK_OFF):
        if not missing:
            break
        code_S = group_codes(batch, level, options.max_version_lag, rewards.stratum_S)
        code = code_S if everybody else code_S[members]
        size = int(code.max()) + 1
        numbers = size, n_groups, LEVEL_NAMES.index(level)
        places = groups.group_S, groups.level_S, groups.group_size_S
        results = groups.mean_S, groups.others_S, groups.spread_S, groups.tied_S
        columns = members, code, values, trajectory
        missing, alone = kernels.group_level(*columns, TIE_TOLERANCE, numbers, places, results)
        singletons = singletons if n_groups else alone
        n_groups += size
    return replace(groups, singletons=singletons)


def no_groups(trained_S: Bools) -> Groups:
    """Return groups without members: no step has a baseline."""
    n_steps = len(trained_S)
    group_S, level_S, size_S = np.full(n_steps, -1), np.full(n_steps, -1), np.zeros(n_steps, dtype=np.int64)
    mean_S, others_S, spread_S = (np.full(n_steps, np.nan) for _ in range(3))
    return Groups(trained_S, group_S, level_S, size_S, spread_S, np.zeros(n_steps, dtype=np.bool_), 0, mean_S, others_S)


class Cells(NamedTuple):
    """The groups of one level over M member steps. `cell`: the part of one trajectory in one group."""

    cell: Ints
    """[M] index of each member's part."""
    group_C: Ints
    mean_C: Floats
    size_G: Ints
    """[G] number of trajectories in the group."""
    mean_G: Floats
    """[G] the mean over trajectories of their means."""
    spread_G: Floats
    """[G] square root of n/(n-1) times the mean over trajectories of their mean squared difference from `mean_G`."""


def cells_of(values: Floats, code: Ints, trajectory: Ints) -> Cells:
    """The groups given by `code`, over members with their values and trajectories."""
    from creditflow.credit import kernels

    return Cells(*kernels.group_moments(code, trajectory, values, int(code.max()) + 1))


def leave_one_out_mean(values_S: Floats, over_S: Bools, code_S: Ints, trajectory_S: Ints, at: Ints) -> Floats:
    """[at] the mean over the group's other trajectories of their mean value over `over_S`; NaN if they have none.

    The whole own trajectory is left out, because its other steps are not independent of the step.
    """
    cell_S, group_C, *_ = cells_of(values_S, code_S, trajectory_S)
    over = np.flatnonzero(over_S)
    count_C = np.bincount(cell_S[over], minlength=len(group_C))
    mean_C, has_any = np.bincount(cell_S[over], values_S[over], len(group_C)) / np.maximum(count_C, 1), count_C > 0
    sum_G, trajectories_G = np.bincount(group_C, mean_C), np.bincount(group_C, has_any)
    code, cell = code_S[at], cell_S[at]
    others = trajectories_G[code] - has_any[cell]
    return np.where(others > 0, (sum_G[code] - mean_C[cell]) / np.maximum(others, 1), np.nan)
