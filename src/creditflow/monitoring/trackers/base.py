"""A tracker receives the metrics of each training step, and sample trajectories if it has tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from creditflow.credit.registry import Registry

KEY = "trainer.logger"
COLUMNS = (
    *("trajectory", "index", "agent", "prompt", "response"),
    *("sub_reward", "outcome", "gate_open", "credit", "advantage"),
)
"""The columns of a table of sample trajectories, which has one row per step."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker is opened for."""

    project: str
    name: str
    folder: Path
    config: Mapping[str, Any]
    """The run's configuration, nested as in a recipe."""
    done: int = 0
    """Training steps before this start; above 0 the run continues."""


class Tracker(Protocol):
    """The interface of an open tracker. An exception ends the tracker, not the run.

    A tracker with tables also has `table(step, rows)`; its record then says `tables=True`.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a training step; all values are finite. Steps decrease after a rollback."""

    def finish(self) -> None:
        """Send the remaining metrics, and close."""


@dataclass(frozen=True, slots=True)
class TrackerKind:
    """A tracker, and the properties that other code reads."""

    open: Callable[[TrackedRun], Tracker]
    """Opens the tracker. An exception is reported as an input error with its message."""
    packages: Sequence[str] = ()
    """The packages that it needs, named as by pip."""
    tables: bool = False
    """Whether the tracker has tables."""
    verl: str | None = None
    """The name of verl's own tracker for it; empty: nothing to do on verl; None: not available on verl."""


Open = TypeVar("Open", bound=Callable[[TrackedRun], Tracker])

TRACKERS: Registry[TrackerKind] = Registry(KEY, "creditflow.monitoring.trackers", "creditflow.trackers")


def tracker(
    name: str, *, packages: Sequence[str] = (), tables: bool = False, verl: str | None = None
) -> Callable[[Open], Open]:
    """Register a function from TrackedRun to Tracker as `trainer.logger: [name]`.

    The keywords are the fields of `TrackerKind`. Raises ConfigError if the name is taken.
    """

    def register(function: Open) -> Open:
        TRACKERS.add(name, TrackerKind(function, packages, tables, verl))
        return function

    return register
