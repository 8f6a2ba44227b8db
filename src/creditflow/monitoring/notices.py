"""Warnings of a run: failing rollouts and reward functions, gates without effect, and a summary at the end.

Reads reports, assignments and the run's record. Stopping a run is the task of `reward.manager.expect_few_failures`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from creditflow.data import TRAJECTORY_STATUSES, TrajectoryBatch
from creditflow.monitoring.guard import FAILED_ROLLOUTS, FAILED_SCORES, WARN, GuardEvent
from creditflow.rewards.manager import FunctionReport, ScoringReport


def failure_events(report: ScoringReport, step: int, past: Iterable[Mapping[str, Any]]) -> list[GuardEvent]:
    """Return one event for each function with failed scores that no earlier event of the run names.

    `past`: the lines of the run's `events.jsonl`.
    """
    failing = [function for function in report.functions if function.failed]
    told = {row.get("metric") for row in past if row.get("rule") == FAILED_SCORES} if failing else set()
    return [
        GuardEvent(
            step,
            FAILED_SCORES,
            metric,
            "started",
            WARN,
            {"failed": float(function.failed), "scores": float(function.matched)},
            f"at training step {step}, {failure_text(function)}",
        )
        for function in failing
        if (metric := f"reward/{function.name}/failed_frac") not in told
    ]


def rollout_events(
    batch: TrajectoryBatch, step: int, past: Iterable[Mapping[str, Any]], *, validation: bool = False
) -> list[GuardEvent]:
    """Return events for the first batch with failed rollouts, and the first with rollouts counted as 0.

    The latter exceeded their time limit under `timeout_outcome: zero`. `past`: the lines of the run's `events.jsonl`.
    Validations have separate events.
    """
    told = {row.get("metric") for row in past if row.get("rule") == FAILED_ROLLOUTS}
    prefix, when = ("val/", "in the validation at") if validation else ("", "at")
    return [
        GuardEvent(
            step,
            FAILED_ROLLOUTS,
            prefix + metric,
            "started",
            WARN,
            {"failed": float(failed), "rollouts": float(batch.n_trajectories)},
            f"{when} training step {step}, {text}",
        )
        for metric, (failed, text) in failed_rollouts(batch).items()
        if prefix + metric not in told
    ]


def failed_rollouts(batch: TrajectoryBatch) -> dict[str, tuple[int, str]]:
    """Return the number of failed rollouts and a text with the first reason, by metric; likewise for late rollouts."""
    failed_N = batch.status_of_trajectory == TRAJECTORY_STATUSES.index("failed")
    late_N = np.array(["timed_out" in info for info in batch.trajectory_info], dtype=np.bool_) & ~failed_N
    found = (
        ("rollout/failed_frac", failed_N, "failed and are masked", "error"),
        ("rollout/timeout_frac", late_N, "exceeded their time limit and count as outcome 0", "agent_error"),
    )
    return {
        metric: (
            int(at_N.sum()),
            f"{at_N.sum()} of {at_N.size} rollouts {what}; the first: "
            f"{batch.trajectory_info[int(np.argmax(at_N))].get(key, '')}",
        )
        for metric, at_N, what, key in found
        if at_N.any()
    }


def rollout_summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line if rollouts failed or exceeded their time limit. `rows`: the lines of the run's `metrics.jsonl`."""
    lines = []
    for metric, what in _ROLLOUTS.items():
        shares = [(row["step"], share) for row in rows if (share := row.get(metric)) is not None]
        steps = [step for step, share in shares if share > 0]
        if steps:
            mean = sum(share for _, share in shares) / len(shares)
            lines.append(f"{mean:.1%} of rollouts {what}, in {_training_steps(len(steps))}, the first {steps[0]}")
    return lines


def idle_gate_summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line if credit moved in no training step. `rows`: the lines of the run's `metrics.jsonl`."""
    moved = [value for row in rows if (value := row.get("propagation/moved")) is not None]
    frozen = any(row.get("groups/frozen_steps") for row in rows)  # a gate that masks steps has an effect
    if not moved or any(moved) or frozen:
        return []
    return [f"the gate changed no credit in {_training_steps(len(moved))}: credit was that of propagation none"]


def failure_text(function: FunctionReport) -> str:
    """Format the number of failed scores of a function, with the first reason."""
    first = f"; the first: {function.reasons[0]}" if function.reasons else ""
    return f"reward function {function.name} failed on {function.failed} of {function.matched} scores{first}"


def failure_summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each function with failed scores in training: their number, share and training steps.

    `rows`: the lines of the run's `metrics.jsonl`.
    """
    names = dict.fromkeys(match[1] for row in rows for key in row if (match := _FAILED_FRAC.fullmatch(key)))
    lines = []
    for name in names:
        shares = [
            (row["step"], row.get(f"reward/{name}/failed_frac"), row.get(f"reward/{name}/scores")) for row in rows
        ]
        counts = [(step, round(share * scores), scores) for step, share, scores in shares if share and scores]
        failed, scores = sum(one for _, one, _ in counts), sum(scores or 0 for _, _, scores in shares)
        if failed:
            lines.append(
                f"reward function {name} failed on {failed:.0f} of {scores:.0f} scores ({failed / scores:.1%}), in "
                f"{_training_steps(len(counts))}, the first {counts[0][0]}; failed scores are masked, not counted as 0"
            )
    return lines


def _training_steps(n: int) -> str:
    return f"{n} training step{'' if n == 1 else 's'}"


_ROLLOUTS = {
    "rollout/failed_frac": "failed and were masked",
    "rollout/timeout_frac": "exceeded their time limit (actor_rollout_ref.rollout.timeout_s)",
}
_FAILED_FRAC = re.compile("reward/(.+)/failed_frac")
