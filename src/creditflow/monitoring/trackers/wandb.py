"""wandb, with a table of sample trajectories, and the report as an artifact."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from creditflow.monitoring.trackers.accelerated import AcceleratedTracker
from creditflow.monitoring.trackers.base import COLUMNS, FinalReport, TrackedRun, tracker


@tracker("wandb", packages=("accelerate", "wandb"))
class Wandb(AcceleratedTracker):
    """A run in wandb. Charts are over the metric `step`, since wandb's own step cannot decrease after a rollback."""

    def __init__(self, run: TrackedRun) -> None:
        from accelerate.tracking import WandBTracker

        id = hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:16]  # the same for a continued run
        super().__init__(WandBTracker(run.project, name=run.name, dir=str(run.folder), id=id, resume="allow"), run)
        self.inner.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a training step."""
        self.inner.log({**metrics, "step": step})

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Send sample trajectories, one row of COLUMNS per step."""
        self._table("trajectories", step, rows)

    def report(self, report: FinalReport) -> None:
        """Send the report as an artifact, and the last trajectories as a table."""
        import wandb

        self._table("final_trajectories", report.step, report.rows)
        artifact = wandb.Artifact(f"report-{self.inner.run.id}", type="report", description=report.summary)
        artifact.add_file(str(report.page), name="report.html")
        self.inner.run.log_artifact(artifact)

    def _table(self, name: str, step: int, rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        table = wandb.Table(columns=["step", *COLUMNS], data=[[step, *row] for row in rows])
        self.inner.log({name: table, "step": step})
