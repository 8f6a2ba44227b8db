"""The console. Both engines print progress in any case, so this tracker sends nothing."""

from __future__ import annotations

from collections.abc import Mapping

from creditflow.monitoring.trackers.base import TrackedRun, tracker


@tracker("console")
class Console:
    """A tracker without a destination."""

    def __init__(self, run: TrackedRun) -> None:
        """Open nothing."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""
