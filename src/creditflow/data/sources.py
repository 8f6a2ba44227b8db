"""The sources that make tasks from an address, by scheme: entry points of plug-ins.

An entry point of group `creditflow.task_sources` names a `Source`; its name is the scheme. A source is imported when
its tasks are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from creditflow.data.addresses import TaskSplit
from creditflow.data.trajectory import Task
from creditflow.errors import DataError
from creditflow.registry import Registry

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://.*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Source:
    """One kind of address."""

    load: Callable[[Sequence[str], str, TaskSplit], list[Task]]
    """The tasks of one split from addresses that follow one another; also takes the key, for errors."""
    split_of: Callable[[str], str | None] = lambda name: None
    """The split that an address sets itself; `all` if training and validation have the same tasks."""


SOURCES: Registry[Source] = Registry("data.train_files", group="creditflow.task_sources", record=Source)


def source_of(name: str, key: str = "data.train_files") -> Source | None:
    """The source of an address; None for other names. Raises DataError for an address of an unknown scheme."""
    match = _ADDRESS.fullmatch(name)
    if match is None:
        return None
    if match[1] not in SOURCES:
        schemes = ", ".join(SOURCES.names())
        raise DataError(f"{key}: {name[:200]}: expected {schemes} before ://{SOURCES.hint(match[1])}")
    return SOURCES[match[1]]
