"""Trackers of a run, filled from its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from creditflow.config import Recipe
from creditflow.errors import CreditflowError, first_line
from creditflow.monitoring.trackers.base import FinalReport, MakeReport, TrackedRun
from creditflow.monitoring.tracking import Trackers, final_rows, sample_rows
from creditflow.runs import Ledger
from creditflow.runs.step_files import read_step_file

_TABLE_FREQ = 10
"""Training steps between tables if `trainer.test_freq` is not positive."""


@dataclass(frozen=True)
class FolderTrackers:
    """The open trackers of a run, and its folder, from which they are filled."""

    trackers: Trackers
    folder: Path
    table_freq: int

    @classmethod
    @contextmanager
    def start(cls, recipe: Recipe, folder: Path, done: int, say: Callable[[str], None]) -> Iterator[FolderTrackers]:
        """Open the trackers of the recipe for the run in `folder`, and close them at the end.

        `done`: training steps before this start. Raises ConfigError, with the tracker's message, if one cannot be set
        up.
        """
        trainer = recipe.config.trainer
        run = TrackedRun(trainer.project_name, trainer.experiment_name or folder.name, folder, recipe.to_dict(), done)
        trackers = Trackers.start(trainer.logger, run, say)
        try:
            yield cls(trackers, folder, trainer.test_freq if trainer.test_freq > 0 else _TABLE_FREQ)
        finally:
            trackers.finish()

    def send_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a line of `metrics.jsonl`, and a table of trajectories at the first and every `table_freq`-th step."""
        self.trackers.log(step, metrics)
        repeated = all(name.startswith("val/") for name in metrics)  # an evaluation that was interrupted
        is_due = step == 1 or (step > 0 and step % self.table_freq == 0)
        if repeated or not is_due or not self.trackers.having("table"):
            return
        try:
            assignment = read_step_file(self.folder / f"steps/{step:06d}.parquet").assignment
            rows = [] if assignment is None else sample_rows(assignment)
        except Exception as error:  # a rollback removes files at any time, and a missing table must not end a run
            self.trackers.say(f"warning: the trackers get no table of step {step}: {first_line(error)}")
            return
        if rows:
            self.trackers.table(step, rows)

    def send_report(self, make_report: MakeReport) -> None:
        """Send the report of the finished run. An error is printed, since the run is complete."""
        if not self.trackers.having("report"):
            return
        try:
            ledger = Ledger.open(self.folder)
            if not ledger.steps:
                return
            page, summary = make_report(self.folder)
            assignment = ledger.read(ledger.steps[-1]).assignment
        except (CreditflowError, OSError) as error:
            self.trackers.say(f"warning: the trackers get no report: {first_line(error)}")
            return
        rows = [] if assignment is None else final_rows(assignment)
        self.trackers.report(FinalReport(ledger.steps[-1], page, summary, rows))
