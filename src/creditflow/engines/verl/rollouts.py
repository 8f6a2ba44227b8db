"""Transfer of scored trajectories from workers to the trainer, in a separate partition of TransferQueue.

Every session of every task writes one record, even if it failed, so that the trainer can count missing records.
Independent of verl's trainer and of credit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
import transfer_queue as tq

from creditflow.data import TRAJECTORY_STATUSES, Ints, Trajectory, TrajectoryBatch
from creditflow.data.table import batch_of, join, pack, read_part
from creditflow.engines.common.rollouts import expect_few_failed_rollouts
from creditflow.errors import ConfigError, InputError, first_line
from creditflow.monitoring import evaluation_metrics
from creditflow.rewards import ScoringReport
from creditflow.rollout import Rollout

_TRAIN, _VAL = 0, 1

Status = Literal["taken", "mistake"]


def partition(validate: bool) -> str:
    """The TransferQueue partition of trajectories; verl's own are `train` and `val`."""
    return "creditflow_val" if validate else "creditflow_train"


def rollout_ids(
    validate: bool, step: int, index: int, session: int, greedy: bool = False, uid: str = ""
) -> tuple[str, str]:
    """The ids of a task's group and of one trajectory in it, from split, training step, task index and session.

    `uid`: verl's id of the group, if a task may have two groups in one step.
    """
    group = f"{_VAL if validate else _TRAIN}-{step}-{index}" + (f"-{uid[:8]}" if uid else "")
    return group, f"{group}-{'greedy' if greedy else session}"


def random_key(seed: int, validate: bool, step: int, index: int, session: int) -> tuple[int, ...]:
    """The random key of a rollout. Validations of a task always use the same key."""
    return (seed, _VAL, int(index), session) if validate else (seed, _TRAIN, step, int(index), session)


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """The record of one session."""

    status: Status
    """`mistake`: a mistake in the recipe, which ends the run."""
    message: str = ""
    trajectory: bytes = b""
    report: str = ""
    """The report on its scores as JSON; empty for a failed trajectory."""
    counted: Mapping[str, float] = field(default_factory=dict)
    """The worker's endpoint metrics since the last record."""
    place: tuple[int, int] = (0, 0)
    """The index of the task in the data and of the session in its group; the training order of trajectories."""

    @classmethod
    def from_trajectory(
        cls,
        trajectory: Trajectory,
        report: ScoringReport,
        place: tuple[int, int],
        counted: Mapping[str, float] | None = None,
    ) -> RolloutRecord:
        """Create the record of a trajectory."""
        text = report.to_json() if report.functions else ""
        return cls("taken", trajectory=pack([trajectory]), report=text, counted=counted or {}, place=place)

    @classmethod
    def from_error(cls, error: Exception, rollout: Rollout, place: tuple[int, int]) -> RolloutRecord:
        """Create the record of an error in a rollout or its scoring: a failed trajectory, or a mistake."""
        if isinstance(error, InputError):
            return cls("mistake", message=first_line(error))
        reason = {"error": f"{type(error).__name__}: {first_line(error)}"}
        failed = Trajectory(rollout.id, rollout.uid, rollout.task, status="failed", info=reason)
        return cls.from_trajectory(failed, ScoringReport((), 0.0), place)

    async def put(self, key: str, where: str) -> None:
        """Write the record to partition `where`."""
        payload = torch.frombuffer(bytearray(self.trajectory or b"\0"), dtype=torch.uint8)
        tag = {name: getattr(self, name) for name in ("status", "message", "report", "counted", "place")}
        await tq.async_kv_put(key=key, partition_id=where, fields={"trajectory": payload}, tag=tag)


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

    @property
    def failures(self) -> list[str]:
        """The errors of failed trajectories."""
        failed = np.flatnonzero(self.batch.status_of_trajectory == TRAJECTORY_STATUSES.index("failed")).tolist()
        return [str(self.batch.trajectory_info[n].get("error", "")) for n in failed]

    def expect_few_failures(self, max_failed_frac: float) -> None:
        """Raise CreditflowError if more than this share failed or left no record, or if no rollout made a step."""
        reasons = self.failures + ["its session left no record (Ray's logs say more)"] * self.lost
        first = self.batch.trajectory_info[0] if self.batch.n_trajectories else {}
        expect_few_failed_rollouts(reasons, self.expected, self.batch.n_steps, first, max_failed_frac)

    def metrics(self) -> dict[str, float]:
        """Accuracy, lost rollouts and endpoint metrics."""
        return {
            "train/pass_at_1": evaluation_metrics(self.batch, n=1)["pass_at_1"],
            "rollout/lost_frac": self.lost / self.expected,
            **self.counted,
        }

    def row_keys(self, policies: Sequence[str]) -> tuple[list[str], Ints]:
        """The keys of the workers' rows for the trained `policies`, and the step [R] of each row.

        Mirrors `runner.sampled_steps` and verl's numbering of rows.
        """
        batch = self.batch
        steps = np.flatnonzero(batch.sampled_by(*policies) & (batch.sampled_of_step > 0))
        trajectories = batch.trajectory_of_step[steps]
        first = np.searchsorted(trajectories, trajectories)
        numbers = (np.arange(len(steps)) - first).tolist()
        return [f"{self.keys[n]}_{i}" for n, i in zip(trajectories.tolist(), numbers, strict=True)], steps


class ReceivedRecords:
    """Decoded records that are not yet taken."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[pa.RecordBatch, ScoringReport | None]] = {}
        self._taken: list[pa.RecordBatch] = []
        """Parts of the last batch, kept until the next fetch, so that no device waits until their memory is freed."""

    def fetch(self, where: str, tags: Mapping[str, Mapping[str, Any]]) -> None:
        """Fetch and decode finished records of partition `where`, except those already held. `tags`: by key."""
        new = [key for key, tag in tags.items() if key not in self._records and tag.get("status") == "taken"]
        if not new:
            return
        self._taken.clear()
        column = tq.kv_batch_get(keys=new, partition_id=where, select_fields=["trajectory"])["trajectory"]
        for key, row in zip(new, column.unbind(), strict=True):
            report = tags[key]["report"]
            self._records[key] = (
                read_part(memoryview(row.numpy()), f"record {key}"),
                ScoringReport.from_json(report) if report else None,
            )

    def take(self, keys: Sequence[str]) -> tuple[TrajectoryBatch, ScoringReport]:
        """Remove the records with these keys; returns their trajectories, in order, and their joint report."""
        records = [self._records.pop(key) for key in keys]
        reports = [report for _, report in records if report is not None]
        parts = [part for part, _ in records]
        self._taken += parts
        return batch_of(join(parts)), ScoringReport.merge(reports)

    def drop(self, keys: Iterable[str]) -> None:
        """Forget the records with these keys."""
        for key in keys:
            self._records.pop(key, None)


def take(
    where: str,
    expected: int,
    uids: Iterable[str] | None = None,
    unfinished: Iterable[str] = (),
    received: ReceivedRecords | None = None,
) -> RolloutRecords:
    """Take the records of the groups `uids` from partition `where`, and remove all but those of `unfinished` groups.

    `received`: records that were fetched before. Raises ConfigError with the first mistake in the recipe that a record
    reports.
    """
    tags, received = _tags(where), received or ReceivedRecords()
    groups = None if uids is None else set(uids)
    kept = [key for key in tags if groups is None or key.split("_")[0] in groups]
    _expect_no_mistake(tags[key] for key in kept)
    keys = sorted(kept, key=lambda key: (tags[key]["place"][0], key.split("_")[0], tags[key]["place"][1]))
    received.fetch(where, {key: tags[key] for key in keys})
    batch, report = received.take(keys)
    left = set(unfinished)
    if gone := [key for key in tags if key.split("_")[0] not in left]:
        tq.kv_clear(keys=gone, partition_id=where)
        received.drop(gone)
    return RolloutRecords(
        batch=batch,
        keys=tuple(keys),
        report=report,
        expected=expected,
        counted=sum_metrics([tags[key]["counted"] for key in keys]),
    )


def expect_no_mistake(where: str) -> None:
    """Raise ConfigError with the first mistake in the recipe that a record in partition `where` reports."""
    _expect_no_mistake(_tags(where).values())


def _tags(where: str) -> dict[str, dict[str, Any]]:
    tags: dict[str, dict[str, Any]] = (tq.kv_list(partition_id=where) or {}).get(where, {})
    return tags


def _expect_no_mistake(tags: Iterable[Mapping[str, Any]]) -> None:
    # A record that is being written has a key before it has a tag.
    if mistake := next((tag["message"] for tag in tags if tag.get("status") == "mistake"), None):
        raise ConfigError(mistake)


def sum_metrics(counted: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Endpoint metrics of several workers or records: counts summed, latencies averaged."""
    values: dict[str, list[float]] = defaultdict(list)
    for numbers in counted:
        for key, value in numbers.items():
            values[key].append(value)
    return {key: sum(column) / (len(column) if "latency" in key else 1) for key, column in values.items()}
