"""TensorBoard files in the run's folder."""

from __future__ import annotations

from creditflow.monitoring.trackers.accelerated import AcceleratedTracker
from creditflow.monitoring.trackers.base import TrackedRun, tracker


@tracker("tensorboard", packages=("accelerate", "tensorboard"), verl="tensorboard")
def tensorboard(run: TrackedRun) -> AcceleratedTracker:
    """Write to `tensorboard/`; a continued run drops the later steps of its earlier part."""
    from accelerate.tracking import TensorBoardTracker

    purged_from = run.done + 1 if run.done else None
    return AcceleratedTracker(TensorBoardTracker(run.name, run.folder / "tensorboard", purge_step=purged_from), run)
