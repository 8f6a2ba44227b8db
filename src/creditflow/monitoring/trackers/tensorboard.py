"""TensorBoard files in the run's folder. It shows texts and no files, so the report is a summary with a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from creditflow.monitoring.trackers.accelerated import AcceleratedTracker
from creditflow.monitoring.trackers.base import COLUMNS, FinalReport, TrackedRun, tracker

_CELL = 200
"""Maximum characters of a cell."""


@tracker("tensorboard", packages=("accelerate", "tensorboard"))
class TensorBoard(AcceleratedTracker):
    """Writes to `tensorboard/`; a continued run drops the later steps of its earlier part."""

    def __init__(self, run: TrackedRun) -> None:
        from accelerate.tracking import TensorBoardTracker

        purged_from = run.done + 1 if run.done else None
        super().__init__(TensorBoardTracker(run.name, run.folder / "tensorboard", purge_step=purged_from), run)

    def report(self, report: FinalReport) -> None:
        """Write the summary and the last trajectories as texts in Markdown."""
        writer = self.inner.writer
        note = f"The whole report is `{report.page.name}` in the run's folder.\n\n"
        writer.add_text("report", note + report.summary, report.step)
        head = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
        writer.add_text("final_trajectories", "\n".join([*head, *map(_line, report.rows)]), report.step)


def _line(cells: Sequence[Any]) -> str:
    """A line of a Markdown table. Texts of models become code, in which nothing is a mark."""
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(value: object) -> str:
    if not isinstance(value, str):
        return f"{value:.3f}" if isinstance(value, float) else str(value)
    plain = "".join(c if c.isprintable() and c not in "`|" else " " for c in value[:_CELL])
    return f"`{plain}`" if plain.strip() else ""
