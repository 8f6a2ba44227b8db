"""The record of verifiers' traces in a trajectory: rewards, metrics and steps, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from creditflow.data import Trajectory
from creditflow.errors import DataError

RECORD = "verifiers"
"""The key of `trajectory.info`, and of the `info` of the last step of each trace."""


@dataclass(frozen=True)
class TraceRecord:
    """One run of one role."""

    agent: str
    steps: tuple[int, ...]
    """Indices of the steps that its calls made."""
    rewards: Mapping[str, tuple[float, float] | None]
    """Score and weight by name; None if the scoring did not run."""
    metrics: Mapping[str, float | None]
    trainable: bool
    """Whether the environment lets the role learn."""
    stop: str | None
    """The reason for the end of the run."""

    @property
    def reward(self) -> float:
        """The sum of the scores times their weights, as verifiers computes it."""
        return float(sum(score * weight for score, weight in filter(None, self.rewards.values())))

    def scores(self) -> dict[str, dict[str, float | None]]:
        """The scores and metrics by name, for the `info` of the last step."""
        scores = {name: None if pair is None else pair[0] for name, pair in self.rewards.items()}
        return {"rewards": scores, "metrics": dict(self.metrics)}

    def to_json(self) -> dict[str, Any]:
        """The record as JSON data."""
        return {**asdict(self), "reward": self.reward}


_RECORDS = TypeAdapter(list[TraceRecord])


def traces_of(trajectory: Trajectory) -> list[TraceRecord]:
    """The recorded traces, in the order of their ends. Raises DataError for a trajectory of another workflow."""
    records = trajectory.info.get(RECORD)
    if not isinstance(records, list):
        raise DataError(f"expected a trajectory of a verifiers:// workflow, got {trajectory.id} without its traces")
    return _RECORDS.validate_python(records)
