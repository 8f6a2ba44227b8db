"""Credit of recorded trajectories by the trainer of each mode, without servers and training workers.

A training step of the trainer takes the trajectories from a queue in this process, assigns credit, writes the columns
of its rows and the step file. Only the stages of verl's workers are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

from creditflow.config import Config
from creditflow.credit import Assignment
from creditflow.data import Trajectory
from creditflow.engines.verl import rollouts, rows, trainer
from creditflow.engines.verl.rollouts import ReceivedRecords, RolloutRecord, partition
from creditflow.engines.verl.runner import sampled_steps
from creditflow.rewards import ScoringReport
from creditflow.runs import RunFolder
from creditflow.runs.step_files import Recorded, read_step_file

STEP = 1
"""The training step of the trainer; it does not enter into credit."""


class Queue:
    """A replacement for `transfer_queue`: trajectories, and the columns that are written to rows."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self.tags: dict[str, Mapping[str, Any]] = {}
        self.payloads: dict[str, torch.Tensor] = {}
        self.columns: dict[str, Any] = {}
        groups: dict[str, int] = {}
        for place, trajectory in enumerate(trajectories):
            group = groups.setdefault(trajectory.uid, len(groups))
            record = RolloutRecord.from_trajectory(trajectory, ScoringReport((), 0.0), (group, place))
            key = f"u{group}_{place}"
            self.payloads[key] = torch.frombuffer(bytearray(record.trajectory), dtype=torch.uint8)
            self.tags[key] = {"status": "taken", "message": "", "report": "", "counted": {}, "place": record.place}

    @property
    def uids(self) -> set[str]:
        """The names of the groups."""
        return {key.split("_")[0] for key in self.tags}

    def kv_list(self, partition_id: str) -> dict[str, dict[str, Mapping[str, Any]]]:
        return {partition_id: self.tags} if partition_id == partition(validate=False) else {}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        (name,) = select_fields
        return {name: SimpleNamespace(unbind=lambda: [self.payloads[key] for key in keys])}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        """Do nothing: the queue is used once."""

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        self.columns |= dict(fields.items())
        return KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id=partition_id)


@contextmanager
def queue_of(trajectories: Sequence[Trajectory]) -> Iterator[Queue]:
    """Replace TransferQueue in the modules of the trainer."""
    modules: tuple[Any, ...] = (rollouts, rows, trainer)
    queue = Queue(trajectories)
    before = [module.tq for module in modules]
    for module in modules:
        module.tq = queue
    try:
        yield queue
    finally:
        for module, real in zip(modules, before, strict=True):
            module.tq = real


class WithoutWorkers:
    """A mix-in of the trainers that leaves out the stages of servers and training workers."""

    def _call_hook(self, hook: str) -> None: ...

    def prepare(self, part: KVBatchMeta, metrics: dict[str, float], timing: dict[str, float]) -> KVBatchMeta:
        return part

    def correct_rollout(self, part: KVBatchMeta, metrics: dict[str, float]) -> KVBatchMeta:
        return part

    def update(self, part: KVBatchMeta, *_: Any) -> None: ...


@dataclass(frozen=True)
class Replayed:
    """The result of a training step."""

    assignment: Assignment
    columns: dict[str, Any]
    """The columns written to the rows, by name."""

    def parts(self) -> dict[str, bytes]:
        """Everything that training reads, as bytes."""
        parts = assigned_parts(self.assignment)
        for name, column in self.columns.items():
            parts[f"column {name}"] = column.values().numpy().tobytes()
            parts[f"rows of {name}"] = column.offsets().numpy().tobytes()
        return parts


def assigned_parts(assignment: Assignment) -> dict[str, bytes]:
    """The advantages of steps and tokens and the trained steps, as bytes."""
    return {
        "advantage of steps": assignment.advantage_S.tobytes(),
        "advantage of tokens": assignment.token_advantages().tobytes(),
        "trained steps": assignment.trained_S.tobytes(),
    }


def recorded_parts(recorded: Recorded) -> dict[str, bytes]:
    """The parts of a record: the credit that the run trained on."""
    assert recorded.assignment is not None
    return assigned_parts(recorded.assignment)


def replay(recorded: Recorded, config: Config, mode: str, folder: Path) -> Replayed:
    """Run a training step of the trainer of `mode` on recorded trajectories, with the options of the record.

    `folder`: an empty folder for the step file.
    """
    assert recorded.assignment is not None
    trajectories = recorded.batch.to_trajectories()
    cls = TRAINER_REGISTRY[trainer.TRAINER_PREFIX + mode]
    replaying: Any = object.__new__(type("Replaying", (WithoutWorkers, cls), {}))
    (policy,) = recorded.batch.policy_names
    options, threshold = recorded.assignment.options, recorded.assignment.standing_threshold()
    (folder / "steps").mkdir(parents=True)
    replaying.__dict__.update(
        policy=policy, trainer_mode=mode, global_steps=STEP, partners=[], curriculum=None, needs_critic=False,
        options=options, limits=config, threshold=threshold, history=recorded.assignment.history, functions=(),
        guard=SimpleNamespace(options=lambda value: value, threshold=lambda value: value),
        folder=RunFolder(folder),
        config=SimpleNamespace(actor_rollout_ref=config.actor_rollout_ref),
    )  # fmt: skip
    with queue_of(trajectories) as queue:
        sampled = [len(sampled_steps(trajectory, [policy])) for trajectory in trajectories]
        keys = [f"{key}_{i}" for key, n_rows in zip(queue.tags, sampled, strict=True) for i in range(n_rows)]
        part = KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train")
        replaying.replay_buffer = SimpleNamespace(
            sample=lambda *_: (part, {}), selected=queue.uids, unfinished=set(), received=ReceivedRecords()
        )
        replaying._step_once({}, {}, len(queue.uids))
    assignment = read_step_file(folder / f"steps/{STEP:06d}.parquet").assignment
    assert assignment is not None
    return Replayed(assignment, queue.columns)
