"""A tracker receives the metrics of each training step, and what else its destination has room for.

These are tables of sample trajectories while training, and the report of a finished run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from creditflow.registry import Registry

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


@dataclass(frozen=True, slots=True)
class FinalReport:
    """The report of a finished run."""

    step: int
    """The last training step."""
    page: Path
    """The report, one HTML file."""
    summary: str
    """A short text in Markdown."""
    rows: Sequence[Sequence[Any]]
    """Trajectories of the last training step with their credit, one row of COLUMNS per step."""


MakeReport = Callable[[Path], tuple[Path, str]]
"""Writes the report of the run in a folder; returns the page and the summary. Reports are made in a higher package."""


class Tracker(Protocol):
    """The interface of an open tracker. An exception ends the tracker, not the run.

    Calls follow one another, but on verl `log` and `table` come from another thread than opening and the other calls.
    A tracker may also have `table(step, rows)`, which takes sample trajectories, and `report(report)`, which takes the
    report of a finished run.
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


Open = TypeVar("Open", bound=Callable[[TrackedRun], Tracker])

TRACKERS: Registry[TrackerKind] = Registry(KEY, "creditflow.monitoring.trackers", "creditflow.trackers")


def tracker(name: str, *, packages: Sequence[str] = ()) -> Callable[[Open], Open]:
    """Register a function from TrackedRun to Tracker as `trainer.logger: [name]`.

    `packages`: see `TrackerKind`. Raises ConfigError if the name is taken.
    """

    def register(function: Open) -> Open:
        TRACKERS.declare(name, TrackerKind(function, packages), function)
        return function

    return register
