"""A run for a notebook: its record as data frames and figures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from creditflow.errors import InputError
from creditflow.runs import Ledger
from creditflow.runs.frames import (
    Library,
    as_frame,
    credit_table,
    expect_library,
    metrics_table,
    scores_table,
    steps_table,
    trajectories_table,
)

if TYPE_CHECKING:
    from creditflow.reports.figures import RunFigure


def open_run(path: str | Path, frames: Library = "pandas") -> OpenRun:
    """Open the folder of a run, which may still be in progress.

    `frames`: the library of the data frames, `pandas`, `polars` or `arrow`. Each call of a method reads the run's files
    again, so new training steps appear. Frames and figures need `pip install 'creditflow[report,pandas]'`.

    Raises InputError for another folder, or if the library is not installed, DataError for a run of another version.
    """
    library = expect_library(frames)
    Ledger.open(Path(path))
    return OpenRun(Path(path), library)


@dataclass(frozen=True, slots=True)
class OpenRun:
    """The record of a run as data frames and figures."""

    path: Path
    frames: Library = "pandas"

    @property
    def ledger(self) -> Ledger:
        """The record as it is now, for single training steps and `explain`."""
        return Ledger.open(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """The run's configuration, nested as in a recipe."""
        config = self.ledger.run.get("config")
        return config if isinstance(config, dict) else {}

    def metrics(self) -> Any:
        """One row per training step, one column per metric."""
        return as_frame(metrics_table(self.ledger), self.frames)

    def trajectories(self) -> Any:
        """One row per trajectory: task, answer, outcome, status, number of steps, sums of credit."""
        return as_frame(trajectories_table(self.ledger), self.frames)

    def steps(self, *, tokens: bool = False) -> Any:
        """One row per step: the columns of the step files. `tokens`: with the lists of a value per token."""
        return as_frame(steps_table(self.ledger, tokens=tokens), self.frames)

    def credit(self) -> Any:
        """One row per step: the terms of its credit and of its advantage."""
        return as_frame(credit_table(self.ledger), self.frames)

    def scores(self) -> Any:
        """One row per score: step, reward function, value in [0, 1], status, weight."""
        return as_frame(scores_table(self.ledger), self.frames)

    def plot_learning_curve(self, *metrics: str) -> RunFigure:
        """Metrics over training; default: pass rates and the step error rate."""
        figure: RunFigure = _figures().learning_curve(self.ledger, metrics)
        return figure

    def plot_credit(self) -> RunFigure:
        """Mean credit, and mean size of advantages, by agent and position in the trajectory."""
        figure: RunFigure = _figures().credit_by_position(self.ledger)
        return figure

    def plot_gates(self) -> RunFigure:
        """Share of open gates, and share of credit that gates withheld, by agent over training."""
        figure: RunFigure = _figures().gates(self.ledger)
        return figure

    def plot_rewards(self) -> RunFigure:
        """Mean score of each reward function, and share of its failures, over training."""
        figure: RunFigure = _figures().reward_functions(self.ledger)
        return figure


def _figures() -> Any:
    try:
        from creditflow.reports import figures
    except ModuleNotFoundError as error:
        raise InputError(f"figures: {error.name} is not installed: pip install 'creditflow[report]'") from error
    return figures
