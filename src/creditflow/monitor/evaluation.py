"""What one evaluation found, task by task, so that two runs can be compared on the same tasks.

Knows trajectories that are played and scored; not who played them, nor what they are compared with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from creditflow.errors import DataError
from creditflow.monitor.metrics import evaluation_metrics, step_errors
from creditflow.trajectory import Trajectory

GREEDY_KEYS = ("pass_at_1", "step_error_rate")
"""What is said of the greedy plays too, as `*_greedy`."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One model on V validation tasks: the names and the order of the fields are those of `evaluation.json`."""

    metrics: dict[str, float]
    """avg@n (`pass_at_1`), pass@k, sub-rewards by agent, `step_error_rate`; `*_greedy` for greedy decoding."""
    sampled: list[float]
    """[V] share of each task's sampled plays that passed."""
    greedy: list[float]
    """[V] the same for its greedy play."""
    step_errors: list[tuple[int, int]]
    """[V] of the task's sampled plays: steps with a score short of its maximum, and steps with a score."""

    @classmethod
    def of(cls, sampled: Sequence[Trajectory], greedy: Sequence[Trajectory], n: int) -> Evaluation:
        """From `n` sampled plays and one greedy play of each task; tasks in the same order in both."""
        greedy_metrics = evaluation_metrics(greedy, n=1)
        metrics = evaluation_metrics(sampled, n)
        metrics |= {f"{key}_greedy": greedy_metrics[key] for key in GREEDY_KEYS if key in greedy_metrics}
        wrong = [step_errors([step for play in plays for step in play.steps]) for plays in _by_task(sampled)]
        return cls(
            metrics=metrics,
            sampled=[evaluation_metrics(plays, n)["pass_at_1"] for plays in _by_task(sampled)],
            greedy=[evaluation_metrics(plays, n=1)["pass_at_1"] for plays in _by_task(greedy)],
            step_errors=[(sum(task), len(task)) for task in wrong],
        )

    def to_json(self) -> str:
        """As one line of JSON; a number that JSON has no word for becomes null."""
        values = asdict(self)
        values["metrics"] = {key: value if math.isfinite(value) else None for key, value in self.metrics.items()}
        return json.dumps(values) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Evaluation:
        """The inverse of `to_json`; `where` is the file's name, for the message of a DataError."""
        try:
            values = json.loads(text)
            return cls(
                metrics={key: math.nan if value is None else value for key, value in values["metrics"].items()},
                sampled=values["sampled"],
                greedy=values["greedy"],
                step_errors=[(wrong, scored) for wrong, scored in values["step_errors"]],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: not an evaluation: {error}") from error


def _by_task(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    tasks: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        tasks.setdefault(trajectory.uid, []).append(trajectory)
    return list(tasks.values())
