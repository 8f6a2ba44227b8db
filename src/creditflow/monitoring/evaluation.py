"""The results of an evaluation, task by task, so that two runs can be compared on the same tasks.

Computed from scored trajectories, independent of the engine that sampled them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator, TypeAdapter, ValidationError

from creditflow.data import Floats, TrajectoryBatch
from creditflow.errors import DataError
from creditflow.monitoring.metrics import evaluation_metrics, passes_by_task, step_errors, sub_rewards

GREEDY_KEYS = ("pass_at_1", "step_error_rate")
"""Metrics that are also reported for greedy decoding, as `*_greedy`."""
_EXAMPLES = 16
"""The number of tasks whose greedy trajectory is kept as an example."""
_TEXT, _STEPS = 2000, 64
"""The largest number of characters of a text and of steps in an example; the rest is cut."""


_Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number that may be NaN, written as null."""


@dataclass(frozen=True, slots=True)
class ExampleStep:
    """One step of an example."""

    agent: str
    response: str
    sub_reward: float | None
    """In [0, 1]; None for a step without one."""


@dataclass(frozen=True, slots=True)
class Example:
    """The greedy trajectory of one validation task, for a reader."""

    task: str
    """The task's last message."""
    outcome: float | None
    """In the outcome's own range; None without one."""
    steps: list[ExampleStep]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of one model on V validation tasks, with the field names and order of `evaluation.json`."""

    metrics: dict[str, _Number]
    """avg@n (`pass_at_1`), pass@k, sub-rewards by agent, `step_error_rate`; `*_greedy` for greedy decoding."""
    sampled: list[float]
    """[V] share of each task's sampled trajectories that passed."""
    greedy: list[float]
    """[V] the same for its greedy trajectory."""
    step_errors: list[tuple[int, int]]
    """[V] counts over each task's sampled trajectories: steps with a score below its maximum, and scored steps."""
    examples: list[Example] = field(default_factory=list)
    """The greedy trajectories of the first tasks, in task order."""

    @classmethod
    def from_batches(cls, sampled: TrajectoryBatch, greedy: TrajectoryBatch, n: int) -> Evaluation:
        """Compute from `n` sampled trajectories and one greedy trajectory per task, both in the same task order."""
        greedy_metrics = evaluation_metrics(greedy, n=1)
        metrics = evaluation_metrics(sampled, n)
        metrics |= {f"{key}_greedy": greedy_metrics[key] for key in GREEDY_KEYS if key in greedy_metrics}
        return cls(
            metrics=metrics,
            sampled=_passed_shares(sampled).tolist(),
            greedy=_passed_shares(greedy).tolist(),
            step_errors=_step_errors_by_task(sampled),
            examples=_examples(greedy),
        )

    def to_json(self) -> str:
        """One line of JSON; non-finite numbers become null."""
        return _ADAPTER.dump_json(self).decode() + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Evaluation:
        """The inverse of `to_json`. `where`: the file's name, for the message of a DataError."""
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise DataError(f"{where}: not an evaluation: {place}: {first['msg']}") from error


_ADAPTER = TypeAdapter(Evaluation)


def _passed_shares(batch: TrajectoryBatch) -> Floats:
    trajectories_G, passed_G = passes_by_task(batch)
    return passed_G / trajectories_G


def _step_errors_by_task(batch: TrajectoryBatch) -> list[tuple[int, int]]:
    task_S, tasks = batch.group_of_trajectory[batch.trajectory_of_step], len(batch.group_names)
    wrong_G, scored_G = (np.bincount(task_S[of_S], minlength=tasks).tolist() for of_S in step_errors(batch))
    return list(zip(wrong_G, scored_G, strict=True))


def _examples(batch: TrajectoryBatch) -> list[Example]:
    sub_reward_S, examples = sub_rewards(batch), []
    for n in range(min(_EXAMPLES, batch.n_trajectories)):
        first, end = np.searchsorted(batch.trajectory_of_step, [n, n + 1]).tolist()
        steps = [
            ExampleStep(
                batch.agent_names[batch.agent_of_step[s]], batch.responses[s][:_TEXT], _known(float(sub_reward_S[s]))
            )
            for s in range(first, min(end, first + _STEPS))
        ]
        examples.append(Example(batch.tasks[n].text[:_TEXT], _known(float(batch.outcome[n])), steps))
    return examples


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
