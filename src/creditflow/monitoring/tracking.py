"""Send a run's metrics to its trackers.

The run's folder is written in any case. A tracker that cannot be set up is an input error. One that fails later is
reported and left out from then on, since a chart must not end a run of days.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

from creditflow._utils.install import pip_install
from creditflow.credit import Assignment
from creditflow.credit.rewards import outcome_of
from creditflow.errors import ConfigError, first_line
from creditflow.monitoring.trackers.base import KEY, TRACKERS, FinalReport, TrackedRun, Tracker

SHOWN = 8
"""Number of sample trajectories in a table."""
FINAL = 64
"""Number of trajectories in the table of a finished run."""
_TEXT = 2000
"""Characters of a prompt or response in a table."""


@dataclass(slots=True)
class Trackers:
    """The open trackers of a run."""

    say: Callable[[str], None]
    open: dict[str, Tracker] = field(default_factory=dict)
    """By name."""

    @classmethod
    def start(cls, names: Sequence[str], run: TrackedRun, say: Callable[[str], None]) -> Trackers:
        """Open the trackers of `run`. Raises ConfigError, with the tracker's message, if one cannot be set up."""
        trackers = cls(say)
        for name in dict.fromkeys(names):
            try:
                trackers.open[name] = TRACKERS[name].open(run)
            except Exception as error:
                trackers.finish()
                raise ConfigError(f"{KEY}: {name} cannot be set up: {first_line(error)}") from error
        return trackers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the finite metrics of a training step."""
        finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        self._each(self.open, "log", step, finite)

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Send sample trajectories to the trackers with tables, as one row of `COLUMNS` per step."""
        self._each(self.having("table"), "table", step, rows)

    def report(self, report: FinalReport) -> None:
        """Send the report of the finished run to the trackers that take one."""
        self._each(self.having("report"), "report", report)

    def having(self, method: Literal["table", "report"]) -> list[str]:
        """The open trackers with an optional method."""
        return [name for name, tracker in self.open.items() if hasattr(tracker, method)]

    def finish(self) -> None:
        """Close all trackers."""
        self._each(self.open, "finish")
        self.open.clear()

    def _each(self, names: Iterable[str], method: str, *arguments: object) -> None:
        for name in list(names):
            try:
                getattr(self.open[name], method)(*arguments)
            except Exception as error:
                failed = self.open.pop(name)
                with suppress(Exception):
                    failed.finish()
                self.say(
                    f"warning: {name} failed and is left out from now on: {first_line(error)}; metrics.jsonl has all"
                )


def expect_installed(names: Sequence[str]) -> None:
    """Raise ConfigError for trackers without installed packages."""
    for name in names:
        packages = TRACKERS[name].packages
        if not all(map(_is_installed, packages)):
            raise ConfigError(f"{KEY}: {name} is not installed: {pip_install(*packages)}")


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def sample_rows(assignment: Assignment) -> list[list[Any]]:
    """The steps of the first trajectory of each task, for at most `SHOWN` tasks, as rows of `COLUMNS`."""
    first: dict[int, int] = {}
    for trajectory, group in enumerate(assignment.batch.group_of_trajectory.tolist()):
        if len(first) < SHOWN:
            first.setdefault(group, trajectory)
    return _rows(assignment, first.values())


def final_rows(assignment: Assignment) -> list[list[Any]]:
    """The steps of the first `FINAL` trajectories, as rows of `COLUMNS`."""
    return _rows(assignment, range(min(FINAL, assignment.batch.n_trajectories)))


def _rows(assignment: Assignment, trajectories: Iterable[int]) -> list[list[Any]]:
    batch, gate_open_S, rows = assignment.batch, assignment.credit.gate_open_S, []
    for trajectory in trajectories:
        for s in (batch.trajectory_of_step == trajectory).nonzero()[0].tolist():
            outcome = outcome_of(batch, s)
            rows.append(
                [
                    batch.trajectory_ids[trajectory],
                    int(batch.index_of_step[s]),
                    batch.agent_names[batch.agent_of_step[s]],
                    batch.prompts[s][:_TEXT],
                    batch.responses[s][:_TEXT],
                    float(assignment.rewards.sub_reward_S[s]),
                    None if outcome is None else float(outcome.rescaled),
                    None if gate_open_S is None else bool(gate_open_S[s]),
                    float(assignment.credit.total_S[s]),
                    float(assignment.advantage.advantage_S[s]),
                ]
            )
    return rows
