"""MLflow: the server of MLFLOW_TRACKING_URI, or a database in the run's folder. Has the report as an artifact."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from creditflow._utils.files import write_whole
from creditflow.monitoring.trackers.accelerated import AcceleratedTracker
from creditflow.monitoring.trackers.base import COLUMNS, FinalReport, TrackedRun, tracker

_RUN_ID = "mlflow_run_id"
"""File in the run's folder with the id of the run in MLflow."""


@tracker("mlflow", packages=("accelerate", "mlflow"))
class MLflow(AcceleratedTracker):
    """A run in MLflow; a continued run keeps its id."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(_inner(run), run)
        run_id: str = self.inner.active_run.info.run_id
        write_whole(run.folder / _RUN_ID, partial(Path.write_text, data=run_id))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a training step, from any thread: MLflow's active run is that of the opening one."""
        import mlflow

        mlflow.log_metrics(accepted_names(metrics), step=step, run_id=self.inner.active_run.info.run_id)

    def report(self, report: FinalReport) -> None:
        """Send the report as an artifact, and the last trajectories as a table."""
        import mlflow

        run_id: str = self.inner.active_run.info.run_id
        mlflow.log_artifact(str(report.page), run_id=run_id)
        mlflow.log_text(report.summary, "summary.md", run_id=run_id)
        columns = zip(*report.rows, strict=True) if report.rows else ([] for _ in COLUMNS)
        table = {name: list(column) for name, column in zip(COLUMNS, columns, strict=True)}
        mlflow.log_table(table, "final_trajectories.json", run_id=run_id)


def accepted_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics by names that MLflow accepts: letters, digits, blanks and _ - . : /; others become their code."""
    return {re.sub(r"[^\w\-. :/]", lambda other: f"_x{ord(other[0]):x}", key): value for key, value in metrics.items()}


def _inner(run: TrackedRun) -> Any:
    import mlflow
    from accelerate.tracking import MLflowTracker

    server = os.environ.get("MLFLOW_TRACKING_URI")
    # Without a server, use a database, since MLflow refuses its file store. Set for each run: it outlives one.
    mlflow.set_tracking_uri(server or f"sqlite:///{(run.folder / 'mlflow.db').resolve()}")
    file = run.folder / _RUN_ID
    return MLflowTracker(
        run.project,
        logging_dir=None if server else (run.folder / "mlflow").resolve().as_uri(),
        run_id=file.read_text() if run.done and file.is_file() else None,
        run_name=run.name,
    )
