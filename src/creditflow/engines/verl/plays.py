"""How scored plays travel from the workers to the trainer: through TransferQueue, in a partition of their own.

Every session of every task leaves one record there, whatever became of it, so that the trainer can count what is
missing. Knows TransferQueue; of verl's trainer and of credit nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import transfer_queue as tq

from creditflow.engines.verl.servers import LostServer
from creditflow.errors import ConfigError, CreditflowError, InputError, first_line
from creditflow.reward import ScoringReport
from creditflow.rollout import Play
from creditflow.table import batch_of, pack, unpack
from creditflow.trajectory import TRAJECTORY_STATUSES, Ints, Trajectory, TrajectoryBatch

_TRAIN, _VAL = 0, 1

Status = Literal["played", "mistake"]
_LOST_SERVER = f"{LostServer.__name__}: "
_NOT_SCORED = ScoringReport((), 0.0)


def partition(validate: bool) -> str:
    """The partition of TransferQueue that plays lie in; verl's own are `train` and `val`."""
    return "creditflow_val" if validate else "creditflow_train"


def play_id(
    validate: bool, step: int, index: int, session: int, greedy: bool = False, uid: str = ""
) -> tuple[str, str]:
    """The ids of a task's group and of one play of it: what is played, training step, place of the task, session.

    `uid`: verl's, where a task may be played by two groups of one step.
    """
    group = f"{_VAL if validate else _TRAIN}-{step}-{index}" + (f"-{uid[:8]}" if uid else "")
    return group, f"{group}-{'greedy' if greedy else session}"


def seed_of(seed: int, validate: bool, step: int, index: int, session: int) -> tuple[int, ...]:
    """Key of a play's random numbers; a task is validated with the same ones every time."""
    return (seed, _VAL, int(index), session) if validate else (seed, _TRAIN, step, int(index), session)


@dataclass(frozen=True, slots=True)
class PlayRecord:
    """What one session left."""

    status: Status
    """`mistake`: the recipe's, which ends the run."""
    message: str = ""
    play: bytes = b""
    report: str = ""
    """The scoring's report as JSON; empty where another play of the same scoring carries it."""
    counted: Mapping[str, float] = field(default_factory=dict)
    """What the worker counted of endpoints since the last record."""
    place: tuple[int, int] = (0, 0)
    """Of the task in the data, and of the play among its task's: plays are trained on in this order."""

    @classmethod
    def of(
        cls,
        trajectory: Trajectory,
        report: ScoringReport,
        place: tuple[int, int],
        counted: Mapping[str, float] | None = None,
    ) -> PlayRecord:
        """The record of a play."""
        said = report.to_json() if report.functions else ""
        return cls("played", play=pack([trajectory]), report=said, counted=counted or {}, place=place)

    @classmethod
    def without_play(cls, error: Exception, play: Play, place: tuple[int, int]) -> PlayRecord:
        """The record of what could not be played or scored to its end: a failed play, or a mistake in the recipe."""
        if isinstance(error, InputError):
            return cls("mistake", message=first_line(error))
        why = {"error": f"{type(error).__name__}: {first_line(error)}"}
        return cls.of(Trajectory(play.id, play.uid, play.task, status="failed", info=why), _NOT_SCORED, place)

    async def put(self, key: str, where: str) -> None:
        """Write it."""
        payload = torch.frombuffer(bytearray(self.play or b"\0"), dtype=torch.uint8)
        tag = {
            "record": self.status,
            "message": self.message,
            "report": self.report,
            "counted": dict(self.counted),
            "place": self.place,
        }
        await tq.async_kv_put(key=key, partition_id=where, fields={"play": payload}, tag=tag)


@dataclass(frozen=True, slots=True, eq=False)
class Plays:
    """What the sessions of a batch left, in the order of the data."""

    batch: TrajectoryBatch
    keys: tuple[str, ...]
    """[N] of the records of the batch's trajectories."""
    report: ScoringReport
    expected: int
    """Sessions that were started."""
    counted: Mapping[str, float] = field(default_factory=dict)
    """What the workers counted of endpoints, summed; latencies averaged over the workers' records."""

    @property
    def lost(self) -> int:
        """Sessions that left no play."""
        return self.expected - self.batch.n_trajectories

    @property
    def failures(self) -> list[str]:
        """Why plays failed."""
        failed = np.flatnonzero(self.batch.status_of_trajectory == TRAJECTORY_STATUSES.index("failed")).tolist()
        return [str(self.batch.trajectory_info[n].get("error", "")) for n in failed]

    @property
    def lost_to_servers(self) -> int:
        """Plays that failed because a rollout server did."""
        return sum(why.startswith(_LOST_SERVER) for why in self.failures)

    def expect_few_failures(self, max_failed_frac: float) -> None:
        """Raises CreditflowError where more of the plays failed, or left nothing, or where none made a step."""
        failures = self.failures
        n_failed = self.lost + len(failures)
        if n_failed > max_failed_frac * self.expected:
            why = failures[0] if failures else "its session left no record (Ray's logs say more)"
            raise CreditflowError(
                f"{n_failed} of {self.expected} plays failed, more than actor_rollout_ref.rollout.max_failed_frac="
                f"{max_failed_frac:g} allows; the first: {why}"
            )
        if not self.batch.n_steps:
            raise CreditflowError(f"none of {self.expected} plays made a step; the first: {self._why_no_step()}")

    def _why_no_step(self) -> str:
        info = self.batch.trajectory_info[0] if self.batch.n_trajectories else {}
        said = (info.get(key) for key in ("truncated", "agent_error", "error"))
        return str(next((why for why in said if why), "the workflow calls no agent"))

    def row_keys(self, policies: Sequence[str]) -> tuple[list[str], Ints]:
        """The keys of the rows that workers made of the batch's steps, and the [R] steps that they are, for the trained
        `policies`; as `player.sampled_steps` and verl's numbering have it.
        """
        batch = self.batch
        trained = np.isin(batch.policy_of_step, [i for i, name in enumerate(batch.policy_names) if name in policies])
        counted_T = np.concatenate([[0], np.cumsum(batch.response_mask)])
        sampled = counted_T[batch.token_offsets[1:]] > counted_T[batch.token_offsets[:-1]]
        steps = np.flatnonzero(trained & sampled)
        trajectories = batch.trajectory_of_step[steps]
        first = np.searchsorted(trajectories, trajectories)
        numbers = (np.arange(len(steps)) - first).tolist()
        return [f"{self.keys[n]}_{i}" for n, i in zip(trajectories.tolist(), numbers, strict=True)], steps


def take(where: str, expected: int, uids: Iterable[str] | None = None) -> Plays:
    """Take the records that lie in partition `where` out of it; those of other groups than `uids` are thrown away.

    Raises ConfigError, with the first one, where a play showed a mistake in the recipe.
    """
    tags: dict[str, dict[str, Any]] = (tq.kv_list(partition_id=where) or {}).get(where, {})
    wanted = None if uids is None else set(uids)
    kept = [key for key in tags if wanted is None or key.split("_")[0] in wanted]
    if mistakes := [tags[key]["message"] for key in kept if tags[key]["record"] == "mistake"]:
        raise ConfigError(mistakes[0])
    played = sorted(kept, key=lambda key: (tags[key]["place"][0], key.split("_")[0], tags[key]["place"][1]))
    table = unpack(_payloads(played, where))
    reports = [report for key in played if (report := tags[key]["report"])]
    if tags:
        tq.kv_clear(keys=list(tags), partition_id=where)
    return Plays(
        batch=batch_of(table),
        keys=tuple(played),
        report=ScoringReport.merge([ScoringReport.from_json(report) for report in reports]),
        expected=expected,
        counted=_summed([tags[key]["counted"] for key in played]),
    )


def _summed(counted: Sequence[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for one in counted:
        for key, value in one.items():
            values[key].append(value)
    return {key: sum(all_) / (len(all_) if "latency" in key else 1) for key, all_ in values.items()}


def _payloads(keys: Sequence[str], where: str) -> list[memoryview]:
    if not keys:
        return []
    column = tq.kv_batch_get(keys=list(keys), partition_id=where, select_fields=["play"])["play"]
    return [memoryview(row.numpy()) for row in column.unbind()]
