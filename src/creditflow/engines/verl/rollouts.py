"""Transfer of scored trajectories from workers to the trainer, in a separate partition of TransferQueue.

Every session of every task writes one record, even if it failed, so that the trainer can count missing records.
Independent of verl's trainer and of credit.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transfer_queue as tq

from creditflow.data import TRAJECTORY_STATUSES, Task, Trajectory, TrajectoryBatch
from creditflow.data.table import batch_of, join, pack, read_part
from creditflow.engines.common.rollouts import expect_few_failed_rollouts
from creditflow.errors import ConfigError, InputError, first_line
from creditflow.monitoring.metrics import evaluation_metrics
from creditflow.rewards import ScoringReport
from creditflow.rollout import Rollout

_TRAIN, _VAL = 0, 1


def partition(validate: bool) -> str:
    """The TransferQueue partition of trajectories; verl's own are `train` and `val`."""
    return "creditflow_val" if validate else "creditflow_train"


def rollout_of(
    task: Task, seed: int, validate: bool, step: int, place: tuple[int, int], greedy: bool, uid: str
) -> Rollout:
    """The rollout of a task at its `place` (`RolloutRecord.place`), with ids that are unique in the run.

    `uid`: verl's id of the group, if a task may have two groups in one step. Validations of a task always use the same
    random key.
    """
    (index, session), split = place, _VAL if validate else _TRAIN
    group = f"{split}-{step}-{index}" + (f"-{uid[:8]}" if uid else "")
    key = (seed, split, *place) if validate else (seed, split, step, *place)
    return Rollout(task, group, f"{group}-{'greedy' if greedy else session}", key)


_NO_REPORT = ScoringReport((), 0.0)


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """The record of one session: a trajectory, or a mistake in the recipe, which ends the run."""

    place: tuple[int, int]
    """The index of the task in the data and of the session in its group; the training order of trajectories."""
    trajectory: bytes = b""
    report: ScoringReport = _NO_REPORT
    counted: Mapping[str, float] = field(default_factory=dict)
    """The worker's endpoint metrics since the last record."""
    mistake: str = ""

    @classmethod
    def from_error(cls, error: Exception, rollout: Rollout, place: tuple[int, int]) -> RolloutRecord:
        """Create the record of an error in a rollout or its scoring: a failed trajectory, or a mistake."""
        if isinstance(error, InputError):
            return cls(place, mistake=first_line(error))
        reason = {"error": f"{type(error).__name__}: {first_line(error)}"}
        return cls(place, pack(Trajectory(rollout.id, rollout.uid, rollout.task, status="failed", info=reason)))

    async def put(self, key: str, where: str) -> None:
        """Write the record to partition `where`."""
        record = torch.frombuffer(bytearray(pickle.dumps(self)), dtype=torch.uint8)
        await tq.async_kv_put(key=key, partition_id=where, fields={"record": record}, tag={"mistake": self.mistake})


@dataclass(frozen=True, slots=True, eq=False)
class RolloutRecords:
    """The records of a batch's sessions, in the order of the data."""

    batch: TrajectoryBatch
    keys: tuple[str, ...]
    """[N] the record key of each trajectory."""
    report: ScoringReport
    expected: int
    """The number of started sessions."""
    counted: Mapping[str, float] = field(default_factory=dict)
    """The workers' endpoint metrics: counts summed, latencies averaged over records."""

    @property
    def lost(self) -> int:
        """The number of sessions without a record."""
        return self.expected - self.batch.n_trajectories

    def expect_few_failures(self, max_failed_frac: float) -> None:
        """Raise CreditflowError if more than this share failed or left no record, or if no rollout made a step."""
        infos = self.batch.trajectory_info
        failed = np.flatnonzero(self.batch.status_of_trajectory == TRAJECTORY_STATUSES.index("failed")).tolist()
        reasons = [str(infos[n].get("error", "")) for n in failed]
        reasons += ["its session left no record (Ray's logs say more)"] * self.lost
        first = infos[0] if self.batch.n_trajectories else {}
        expect_few_failed_rollouts(reasons, self.expected, self.batch.n_steps, first, max_failed_frac)

    def metrics(self) -> dict[str, float]:
        """Accuracy, lost rollouts and endpoint metrics."""
        passed = evaluation_metrics(self.batch, n=1)["pass_at_1"]
        return {"train/pass_at_1": passed, "rollout/lost_frac": self.lost / self.expected, **self.counted}

    def steps_of_rows(self, policies: Sequence[str]) -> dict[str, int]:
        """The step of each of the workers' rows for the trained `policies`, by the row's key.

        Mirrors `runner.sampled_steps` and verl's numbering of rows.
        """
        batch = self.batch
        steps = np.flatnonzero(batch.sampled_by(*policies) & (batch.sampled_of_step > 0))
        trajectories = batch.trajectory_of_step[steps]
        first = np.searchsorted(trajectories, trajectories)
        places = zip(trajectories.tolist(), (np.arange(len(steps)) - first).tolist(), steps.tolist(), strict=True)
        return {f"{self.keys[n]}_{i}": step for n, i, step in places}


def take(
    where: str, expected: int, uids: Container[str] | None = None, unfinished: Container[str] = ()
) -> RolloutRecords:
    """Take the records of the groups `uids` from partition `where`, and remove all but those of `unfinished` groups.

    Raises ConfigError with the first mistake in the recipe that a record reports.
    """
    tags = tags_in(where)
    kept = [key for key in tags if uids is None or key.split("_")[0] in uids]
    expect_no_mistake(tags[key] for key in kept)
    column = tq.kv_batch_get(keys=kept, partition_id=where, select_fields=["record"])["record"].unbind() if kept else ()
    records = {key: pickle.loads(row.numpy()) for key, row in zip(kept, column, strict=True)}
    keys = sorted(kept, key=lambda key: (records[key].place[0], key.split("_")[0], records[key].place[1]))
    if gone := [key for key in tags if key.split("_")[0] not in unfinished]:
        tq.kv_clear(keys=gone, partition_id=where)
    return RolloutRecords(
        batch=batch_of(join([read_part(records[key].trajectory, f"record {key}") for key in keys])),
        keys=tuple(keys),
        report=ScoringReport.merge([records[key].report for key in keys]),
        expected=expected,
        counted=sum_metrics([records[key].counted for key in keys]),
    )


def tags_in(where: str) -> dict[str, dict[str, Any]]:
    """The tag of each key in partition `where`."""
    tags: dict[str, dict[str, Any]] = (tq.kv_list(partition_id=where) or {}).get(where, {})
    return tags


def expect_no_mistake(tags: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError with the first mistake in the recipe that a record reports."""
    # A record that is being written has a key before it has a tag.
    if mistake := next((tag["mistake"] for tag in tags if tag.get("mistake")), None):
        raise ConfigError(mistake)


def sum_metrics(counted: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Endpoint metrics of several workers or records: counts summed, latencies averaged."""
    values: dict[str, list[float]] = defaultdict(list)
    for numbers in counted:
        for key, value in numbers.items():
            values[key].append(value)
    return {key: sum(column) / (len(column) if "latency" in key else 1) for key, column in values.items()}
