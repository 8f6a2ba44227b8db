"""The common part of the trackers that accelerate implements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from creditflow._utils.sections import leaves
from creditflow.monitoring.trackers.base import TrackedRun


class AcceleratedTracker:
    """One of accelerate's trackers."""

    def __init__(self, inner: Any, run: TrackedRun) -> None:
        """Start `inner`. A new run's configuration is stored with its metrics."""
        from accelerate import PartialState

        PartialState(cpu=True)  # accelerate's log needs it, and not all of its trackers make it
        self.inner = inner
        inner.start()
        if run.done == 0:
            inner.store_init_configuration(flat(run.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a training step."""
        self.inner.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Close the tracker."""
        self.inner.finish()


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options by dotted name; values other than numbers, strings and booleans as JSON."""
    plain = (int, float, str, bool)
    return {key: value if isinstance(value, plain) else json.dumps(value, default=str) for key, value in leaves(config)}
