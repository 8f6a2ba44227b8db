"""The sources that make tasks from an address: reasoning-gym, environments, verifiers. A new one needs one entry here.

A source is imported when its tasks are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from creditflow.data.addresses import TaskSplit
from creditflow.data.environment_tasks import environment_tasks, is_environment_address
from creditflow.data.gym_tasks import gym_tasks, is_gym_address, parse_addresses
from creditflow.data.trajectory import Task
from creditflow.data.verifiers_tasks import is_verifiers_address, parse_address, verifiers_tasks


@dataclass(frozen=True, slots=True)
class Source:
    """One kind of address."""

    schemes: str
    """Its schemes, as error messages name them."""
    matches: Callable[[str], bool]
    """Whether a name in `data.train_files` is such an address."""
    load: Callable[[Sequence[str], str, TaskSplit], list[Task]]
    """The tasks of one split from addresses that follow one another; also takes the key, for errors."""
    split_of: Callable[[str], str | None]
    """The split that an address sets itself; `all` if training and validation have the same tasks."""


def _from_environments(names: Sequence[str], key: str, split: TaskSplit) -> list[Task]:
    return [task for name in names for task in environment_tasks(name, key, split)]


SOURCES = (
    Source(
        "reasoning-gym://",
        is_gym_address,
        gym_tasks,
        lambda name: parse_addresses(name, "data.train_files")[0].split,
    ),
    Source(
        "verifiers://",
        is_verifiers_address,
        verifiers_tasks,
        lambda name: parse_address(name, "data.train_files").split,
    ),
    Source(
        "gymnasium://, openenv://, pettingzoo://, textarena://",
        is_environment_address,
        _from_environments,
        lambda name: None,
    ),
)


def source_of(name: str) -> Source | None:
    """The source of an address; None for other names."""
    return next((source for source in SOURCES if source.matches(name)), None)
