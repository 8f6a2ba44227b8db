"""Groups: which steps share a baseline, and what that baseline is.

Knows how steps are keyed and how a group's mean and spread are taken; not what the values mean (credit, sub-rewards).

Each trajectory weighs the same in its group, however many steps it has there. Were steps to weigh the same, the plays
with many turns, which are not a random selection of plays, would set the baseline of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from creditflow.trajectory import Bools, Floats, Ints, TrajectoryBatch

TIE_TOLERANCE = 1e-9
"""A group is tied where its credits differ by less than this, relative to its mean if that is above 1."""


def _prompts(batch: TrajectoryBatch) -> Ints:
    code_of: dict[str, int] = {}
    return np.array([code_of.setdefault(prompt, len(code_of)) for prompt in batch.prompts], dtype=np.int64)


_PARTS: dict[str, Callable[[TrajectoryBatch], Ints]] = {
    "task": lambda batch: batch.group_of_trajectory[batch.trajectory_of_step],
    "agent": lambda batch: batch.agent_of_step,
    "turn": lambda batch: batch.turn_of_step,
    "prompt": _prompts,
}
"""What a key is made of: each an [S] column of integers."""

LEVELS: dict[str, tuple[str, ...]] = {
    "task": ("task",),
    "task_agent": ("task", "agent"),
    "task_agent_turn": ("task", "agent", "turn"),
    "task_agent_state": ("task", "agent", "prompt"),
    "agent": ("agent",),
    "agent_turn": ("agent", "turn"),
}
"""`algorithm.group_by`. Policy, policy version and stratum are part of the key at every level."""

BACK_OFF = ("task_agent", "agent_turn", "agent")
"""Where a step that is alone in its group looks for a baseline, in this order."""

LEVEL_NAMES = tuple(LEVELS)


@dataclass(frozen=True, slots=True)
class Groups:
    """The group that each of S steps was measured against. Steps without one: NaN, -1, 0 or False."""

    group_S: Ints
    """[S] id, unique within the batch; -1: none."""
    level_S: Ints
    """[S] index into LEVEL_NAMES: the level the baseline was found at, after any back-off; -1: none."""
    size_S: Ints
    """[S] trajectories in the group."""
    mean_S: Floats
    """[S] m: the mean over trajectories of their means."""
    spread_S: Floats
    """[S] square root of `n/(n-1) * mean over trajectories of mean_t (c - m)^2`."""
    tied_S: Bools
    """[S] the group's values are all the same: `max - min <= 1e-9 * max(1, |m|)`."""
    singletons: int
    """How many groups, at the level asked for, had one trajectory only."""


def compact(*columns: Ints) -> tuple[Ints, int]:
    """[S] codes from 0, one for each distinct combination of the columns' values, and how many there are."""
    code, n = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        low = int(column.min())
        width = int(column.max()) - low + 1
        if width == 1:
            continue
        digit = column - low
        if width > column.size:
            digit, width = _dense(digit, width)
        code, n = _dense(code * width + digit, n * width)
    return code, n


def _dense(code: Ints, n: int) -> tuple[Ints, int]:
    """`code`, below `n`, without gaps. By table where that is affordable: sorting would cost more than all the rest."""
    if n > 8 * code.size + 1024:
        values, dense = np.unique(code, return_inverse=True)
        return dense.reshape(-1).astype(np.int64), len(values)
    seen = np.zeros(n, dtype=np.int64)
    seen[code] = 1
    rank = np.cumsum(seen)
    return rank[code] - 1, int(rank[-1])


def codes_of_level(batch: TrajectoryBatch, level: str, stratum_S: Ints) -> Ints:
    """[S] group codes at `level`: its parts, policy, policy version and stratum.

    `stratum_S`: [S] the strata to respect, -1 for none (`batch.stratum_of_step` holds them for steps that must ignore
    theirs, too).
    """
    parts = [_PARTS[part](batch) for part in LEVELS[level]]
    return compact(*parts, batch.policy_of_step, batch.policy_version, stratum_S)[0]


def describe(batch: TrajectoryBatch, level: str, step: int, stratum: int) -> str:
    """The key of the group that `step` has at `level`, in words."""
    words = {
        "task": batch.group_names[batch.group_of_trajectory[batch.trajectory_of_step[step]]],
        "agent": batch.agent_names[batch.agent_of_step[step]],
        "turn": str(batch.turn_of_step[step]),
        "prompt": repr(batch.prompts[step][:40]),
    }
    parts = [f"{part}={words[part]}" for part in LEVELS[level]]
    parts += [f"policy={batch.policy_names[batch.policy_of_step[step]]}", f"version={batch.policy_version[step]}"]
    return " ".join(parts + ([f"stratum={batch.stratum_names[stratum]}"] if stratum >= 0 else []))


def group_statistics(
    batch: TrajectoryBatch, values_S: Floats, trained_S: Bools, stratum_S: Ints, group_by: str
) -> Groups:
    """Mean and spread of each trained step's group; masked steps are in no group.

    A step is alone if its trajectory is the only one in the group: there is nothing to compare with. It takes the
    first group of BACK_OFF that has two trajectories; the members of that group are all steps of its key, whether alone
    or not. If none has, it has no group: an advantage that was the raw reward would push one way only.
    """
    s = batch.n_steps
    group_S, level_S, size_S = np.full(s, -1), np.full(s, -1), np.zeros(s, dtype=np.int64)
    mean_S, spread_S, tied_S = np.full(s, np.nan), np.full(s, np.nan), np.zeros(s, dtype=np.bool_)
    members = searching = np.flatnonzero(trained_S)
    n_groups = singletons = 0
    for level in (group_by, *BACK_OFF):
        if not searching.size:
            break
        code_S = codes_of_level(batch, level, stratum_S)
        table = _table(values_S[members], code_S[members], batch.trajectory_of_step[members])
        if not n_groups:
            singletons = int((table.size_G == 1).sum())
        found = table.size_G[code_S[searching]] > 1
        at, searching = searching[found], searching[~found]
        code = code_S[at]
        group_S[at] = code + n_groups
        level_S[at] = LEVEL_NAMES.index(level)
        size_S[at] = table.size_G[code]
        mean_S[at] = table.mean_G[code]
        spread_S[at] = table.spread_G[code]
        tied_S[at] = table.tied_G[code]
        n_groups += len(table.size_G)
    return Groups(group_S, level_S, size_S, mean_S, spread_S, tied_S, singletons)


@dataclass(frozen=True, slots=True)
class _Table:
    size_G: Ints
    mean_G: Floats
    spread_G: Floats
    tied_G: Bools


def _table(values: Floats, code: Ints, trajectory: Ints) -> _Table:
    """Statistics of the groups that `code` names, over members given by value, code and trajectory."""
    n_groups = int(code.max()) + 1
    play, group_of_play, n_plays = _plays(code, trajectory)
    steps_of_play = np.bincount(play, minlength=n_plays)
    size_G = np.bincount(group_of_play, minlength=n_groups)
    plays_G = np.maximum(size_G, 1)
    mean_of_play = np.bincount(play, values, n_plays) / steps_of_play
    mean_G = np.bincount(group_of_play, mean_of_play, n_groups) / plays_G
    square_of_play = np.bincount(play, (values - mean_G[code]) ** 2, n_plays) / steps_of_play
    # n/(n-1) times the mean over n plays is their sum over n-1.
    variance_G = np.bincount(group_of_play, square_of_play, n_groups) / np.maximum(size_G - 1, 1)
    low_G, high_G = np.full(n_groups, np.inf), np.full(n_groups, -np.inf)
    np.minimum.at(low_G, code, values)
    np.maximum.at(high_G, code, values)
    empty_G = size_G == 0
    low_G[empty_G] = high_G[empty_G] = 0.0
    tied_G = high_G - low_G <= TIE_TOLERANCE * np.maximum(1.0, np.abs(mean_G))
    return _Table(size_G, mean_G, np.sqrt(variance_G), tied_G)


def _plays(code: Ints, trajectory: Ints) -> tuple[Ints, Ints, int]:
    """Numbers the pairs of group and trajectory: each member's pair, each pair's group, how many there are."""
    play, n_plays = compact(trajectory, code)
    group_of_play = np.empty(n_plays, dtype=np.int64)
    group_of_play[play] = code
    return play, group_of_play, n_plays


def leave_one_out_mean(values_S: Floats, known_S: Bools, code_S: Ints, trajectory_S: Ints) -> Floats:
    """[S] mean over the **other** trajectories of the step's group of their mean known value; NaN where none is known.

    Leaving out the step alone would let a trajectory's other steps vouch for it.
    """
    play_S, group_of_play, n_plays = _plays(code_S, trajectory_S)
    n_groups = int(code_S.max()) + 1
    known = np.flatnonzero(known_S)
    count_of_play = np.bincount(play_S[known], minlength=n_plays)
    mean_of_play = np.bincount(play_S[known], values_S[known], n_plays) / np.maximum(count_of_play, 1)
    has_any = count_of_play > 0
    sum_G = np.bincount(group_of_play, mean_of_play, n_groups)
    plays_G = np.bincount(group_of_play, has_any, n_groups)
    others_S = plays_G[code_S] - has_any[play_S]
    sum_S = sum_G[code_S] - mean_of_play[play_S]
    return np.where(others_S > 0, sum_S / np.maximum(others_S, 1), np.nan)
