"""Branches between the trainer and the workers: requests, and the records that come back.

Independent of verl's trainer and of credit. The workers write the rows of new steps as for rollouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from creditflow.data import Trajectory, TrajectoryBatch
from creditflow.data.table import batch_of, pack, unpack
from creditflow.engines.common.branches import PlannedBranch, in_order, new_tokens
from creditflow.engines.verl.rollouts import RolloutRecord, RolloutRecords, sum_metrics
from creditflow.rewards import ScoringReport


@dataclass(frozen=True, slots=True)
class BranchRequest:
    """One branch for a worker to run."""

    id: str
    record: bytes
    """The trajectory that it continues, packed."""
    at: int
    """The number of steps that it keeps."""
    key: tuple[int, ...]
    uid: str
    """verl's id of the group."""
    index: int
    """The index of its task in the data."""
    session: int
    """A number in the group that no other rollout or branch has, for the keys of its rows."""

    @classmethod
    def from_plan(cls, one: PlannedBranch, uid: str, index: int, session: int) -> BranchRequest:
        """Create the request for a planned branch."""
        return cls(one.rollout.id, pack([one.record]), one.at, one.rollout.seed, uid, index, session)

    def recorded(self) -> Trajectory:
        """The trajectory that it continues."""
        (trajectory,) = batch_of(unpack([memoryview(self.record)])).to_trajectories()
        return trajectory

    @property
    def record_key(self) -> str:
        """The beginning of the keys of its rows."""
        return f"{self.uid}_{self.session}"


class BranchRun:
    """The branches of one training step.

    `run_on_workers` runs requests of a training step and returns their records in the same order.
    """

    def __init__(
        self,
        run_on_workers: Callable[[Sequence[BranchRequest], int], Sequence[RolloutRecord]],
        rollouts: RolloutRecords,
        training_step: int,
    ) -> None:
        self._run_on_workers, self._rollouts, self._training_step = run_on_workers, rollouts, training_step
        taken = (session for _, session in rollouts.places)
        self._sessions = itertools.count(max(taken, default=-1) + 1)
        self._made: list[tuple[PlannedBranch, Trajectory]] = []
        self._key_of: dict[str, str] = {}
        self._records: list[RolloutRecord] = []
        self.tokens = 0
        """Response tokens that were sampled, without those of endpoints."""

    def run(self, planned: Sequence[PlannedBranch]) -> list[Trajectory]:
        """Run branches; returns them in the order of `planned`. Raises ConfigError for a mistake in the recipe."""
        requests = [self._request(one) for one in planned]
        records = self._run_on_workers(requests, self._training_step)
        made = [record.made() for record in records]
        for one, request, trajectory in zip(planned, requests, made, strict=True):
            one.mark(trajectory)
            self.tokens += new_tokens(trajectory, one.at)
            self._key_of[trajectory.id] = request.record_key
        self._made += zip(planned, made, strict=True)
        self._records += records
        return made

    def _request(self, one: PlannedBranch) -> BranchRequest:
        uid = self._rollouts.keys[one.place].rsplit("_", 1)[0]
        return BranchRequest.from_plan(one, uid, self._rollouts.places[one.place][0], next(self._sessions))

    @property
    def trajectories(self) -> list[Trajectory]:
        """The finished branches, tree by tree."""
        return in_order(self._made)

    @property
    def keys(self) -> set[str]:
        """The beginnings of the keys of the branches' rows."""
        return set(self._key_of.values())

    @property
    def report(self) -> ScoringReport:
        """The scoring of all branches."""
        return ScoringReport.merge([ScoringReport.from_json(one.report) for one in self._records if one.report])

    @property
    def counted(self) -> dict[str, float]:
        """The workers' endpoint metrics."""
        return sum_metrics([one.counted for one in self._records])

    def with_branches(self, trajectories: Sequence[Trajectory]) -> RolloutRecords:
        """The rollouts, whose trajectories have their decisions noted, and their branches."""
        branches = self.trajectories
        return replace(
            self._rollouts,
            batch=TrajectoryBatch.from_trajectories([*trajectories, *branches]),
            keys=(*self._rollouts.keys, *(self._key_of[one.id] for one in branches)),
        )
