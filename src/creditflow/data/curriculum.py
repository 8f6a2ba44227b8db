"""A curriculum: each family's tasks come from its current level, which follows the success at them.

A family is the tasks of one `data_source`; a task's level is its `extra_info["level"]`. A family begins at its lowest
level. When the last `window` tasks of its current level have all been tried and their mean success is at least
`raise_at`, the next level follows; below `lower_at`, the level before. A fifth of the tasks come from the levels
that the family has passed. Success is the outcome's place in its range, from 0 to 1, averaged over the
trajectories of a task.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from creditflow.data.batch import TrajectoryBatch
from creditflow.data.trajectory import Task
from creditflow.errors import DataError

_REVIEW = 0.2
"""The share of a family's tasks that come from the levels it has passed."""


@dataclass(frozen=True, slots=True)
class CurriculumRule:
    """When levels change; `data.curriculum` describes the fields."""

    raise_at: float
    lower_at: float
    window: int


@dataclass(slots=True)
class _Family:
    """The progress of one family."""

    pools: Mapping[int, Sequence[int]]
    """The tasks of each level, in ascending order of levels."""
    level: int
    recent: deque[float]
    """The success at the last tasks of the current level."""
    drawn: Counter[int] = field(default_factory=Counter)
    """The number of drawn tasks of each level."""
    reviewed: int = 0
    """Drawn tasks of levels that the family had passed."""


class Curriculum:
    """The order of a run's training tasks, with the state that a checkpoint keeps.

    A family's share of the drawn tasks is its share of all tasks. Within a level, each pass over its tasks has its own
    random order. Raises DataError if a level is not a whole number of 0 or more, or if no family has two levels.
    """

    def __init__(self, tasks: Sequence[Task], rule: CurriculumRule, seed: int, *, shuffle: bool = True) -> None:
        self._rule, self._seed, self._shuffle, self._n_tasks = rule, seed, shuffle, len(tasks)
        of_family: dict[str, dict[int, list[int]]] = {}
        for index, task in enumerate(tasks):
            of_family.setdefault(task.data_source, {}).setdefault(_level(task), []).append(index)
        if all(len(pools) == 1 for pools in of_family.values()):
            raise DataError(
                "data.curriculum: expected tasks of several levels, got one level of each family; give levels in an "
                "address (`level=0-3`) or in `extra_info.level` of the tasks"
            )
        self._families = {
            name: _Family(dict(sorted(pools.items())), min(pools), deque(maxlen=rule.window))
            for name, pools in sorted(of_family.items())
        }

    def draw(self, count: int) -> list[int]:
        """The indices of the next `count` tasks."""
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        families = list(self._families.values())
        shares = [sum(map(len, family.pools.values())) / self._n_tasks for family in families]
        drawn = [family.drawn.total() for family in families]
        # the family furthest behind its share
        place = max(range(len(families)), key=lambda f: shares[f] * (sum(drawn) + 1) - drawn[f])
        family, level = families[place], families[place].level
        passed = [earlier for earlier in family.pools if earlier < level]
        if passed and family.reviewed + 1 <= _REVIEW * (drawn[place] + 1):
            family.reviewed += 1
            level = min(passed, key=lambda earlier: family.drawn[earlier] / len(family.pools[earlier]))
        pool = family.pools[level]
        epoch, at = divmod(family.drawn[level], len(pool))
        family.drawn[level] += 1
        if not self._shuffle:
            return pool[at]
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, place, level, epoch))))
        return pool[int(rng.permutation(len(pool))[at])]

    def observe(self, batch: TrajectoryBatch) -> None:
        """Count the outcomes of drawn tasks, and change levels. Trajectories without an outcome count nothing."""
        success: dict[int, list[float]] = {}
        tasks: dict[int, Task] = {}
        for n, group in enumerate(batch.group_of_trajectory.tolist()):
            score = batch.outcome_scores[n]
            if score is not None and score.status == "ok":
                tasks[group] = batch.tasks[n]
                success.setdefault(group, []).append(score.rescaled)
        for group, of_group in success.items():
            family = self._families[tasks[group].data_source]
            if _level(tasks[group]) == family.level:
                family.recent.append(float(np.mean(of_group)))
        for family in self._families.values():
            self._move(family)

    def _move(self, family: _Family) -> None:
        if len(family.recent) < self._rule.window:
            return
        success, levels = float(np.mean(family.recent)), list(family.pools)
        at = levels.index(family.level)
        to = at + 1 if success >= self._rule.raise_at else at - 1 if success < self._rule.lower_at else at
        if to != at and 0 <= to < len(levels):
            family.level = levels[to]
            family.recent.clear()

    def metrics(self) -> dict[str, float]:
        """The level of each family, and the mean success at its last tasks of this level.

        A slash in a family's name becomes `_`: in the names of metrics it separates parts.
        """
        named = {name.replace("/", "_"): family for name, family in self._families.items()}
        levels = {f"curriculum/level/{name}": float(family.level) for name, family in named.items()}
        return levels | {
            f"curriculum/success/{name}": float(np.mean(family.recent))
            for name, family in named.items()
            if family.recent
        }

    def to_json(self) -> dict[str, Any]:
        """The state, which `restore` reads."""
        return {
            name: {
                "level": family.level,
                "recent": list(family.recent),
                "drawn_of_level": {str(level): count for level, count in family.drawn.items()},
                "reviewed": family.reviewed,
            }
            for name, family in self._families.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a state of `to_json`. Raises DataError if it belongs to other families or levels."""
        if set(state) != set(self._families):
            raise DataError(
                f"data.curriculum: the checkpoint has the families {', '.join(sorted(state))}, the tasks have "
                f"{', '.join(self._families)}; go on with the data of the run, or begin a new one"
            )
        for name, family in self._families.items():
            kept = state[name]
            if kept["level"] not in family.pools:
                raise DataError(
                    f"data.curriculum: the checkpoint is at level {kept['level']} of {name}, which has none"
                )
            family.level, family.reviewed = kept["level"], kept["reviewed"]
            family.recent = deque(kept["recent"], maxlen=self._rule.window)
            family.drawn = Counter({int(level): count for level, count in kept["drawn_of_level"].items()})


def _level(task: Task) -> int:
    level = task.extra_info.get("level", 0)
    if type(level) is not int or level < 0:
        raise DataError(f"extra_info.level: expected a whole number of 0 or more, got {level!r}")
    return level
