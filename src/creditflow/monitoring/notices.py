"""Warnings of a run: failing rollouts and reward functions, gates without effect, and a summary at the end.

Reads reports, assignments and the run's record. Stopping a run is the task of `reward.manager.expect_few_failures`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from creditflow.data import TRAJECTORY_STATUSES, TrajectoryBatch
from creditflow.monitoring.guard import WARN, GuardEvent

if TYPE_CHECKING:
    from creditflow.credit import Assignment
    from creditflow.rewards.manager import FunctionReport, ScoringReport


FAILED_SCORES = "failed_scores"
"""`GuardEvent.rule` of the first failure of a reward function, which is no guard rule."""
FAILED_ROLLOUTS = "failed_rollouts"
"""The same for rollouts that start to fail or to exceed their time limit."""
TIED_GROUPS = "tied_groups"
"""The same for the first training step without any advantage, in which only other terms of the loss are trained."""


class Failure(NamedTuple):
    """Failures of one kind in a batch."""

    metric: str
    """The metric that counts them."""
    numbers: dict[str, float]
    text: str
    """Their number, the effect and the first reason."""


def _first_events(
    rule: str, step: int, failures: Iterable[Failure], past: Iterable[Mapping[str, Any]], when: str = "at"
) -> list[GuardEvent]:
    """One event for each failure whose metric has no earlier event of this rule."""
    reported = {row.get("metric") for row in past if row.get("rule") == rule}
    return [
        GuardEvent(step, rule, metric, "started", WARN, numbers, f"{when} training step {step}, {text}")
        for metric, numbers, text in failures
        if metric not in reported
    ]


def failure_events(report: ScoringReport, step: int, past: Iterable[Mapping[str, Any]]) -> list[GuardEvent]:
    """Return one event for each function with failed scores that no earlier event of the run names.

    `past`: the lines of the run's `events.jsonl`.
    """
    failures = [
        Failure(
            f"reward/{function.name}/failed_frac",
            {"failed": float(function.failed), "scores": float(function.matched)},
            failure_text(function),
        )
        for function in report.functions
        if function.failed
    ]
    return _first_events(FAILED_SCORES, step, failures, past)


def rollout_events(
    batch: TrajectoryBatch, step: int, past: Iterable[Mapping[str, Any]], *, validation: bool = False
) -> list[GuardEvent]:
    """Return events for the first batch with failed rollouts, and the first with rollouts counted as 0.

    The latter exceeded their time limit under `timeout_outcome: zero`. Validations have separate
    events. `past`: the lines of the run's `events.jsonl`.
    """
    failures, when = failed_rollouts(batch), "at"
    if validation:
        failures, when = [of._replace(metric=f"val/{of.metric}") for of in failures], "in the validation at"
    return _first_events(FAILED_ROLLOUTS, step, failures, past, when)


def failed_rollouts(batch: TrajectoryBatch) -> list[Failure]:
    """Return failed and late rollouts; only those that exist."""
    infos = batch.trajectory_info
    failed_N = batch.status_of_trajectory == TRAJECTORY_STATUSES.index("failed")
    late_N = np.array(["timed_out" in info for info in infos], dtype=np.bool_) & ~failed_N
    late = "exceeded their time limit and count as outcome 0"
    failures = []
    for metric, failing_N, effect, key in (
        ("rollout/failed_frac", failed_N, "failed and are masked", "error"),
        ("rollout/timeout_frac", late_N, late, "agent_error"),
    ):
        if failed := int(failing_N.sum()):
            first = infos[int(np.argmax(failing_N))].get(key, "")
            numbers = {"failed": float(failed), "rollouts": float(len(failing_N))}
            text = f"{failed} of {len(failing_N)} rollouts {effect}; the first: {first}"
            failures.append(Failure(metric, numbers, text))
    return failures


def tied_events(
    assignment: Assignment, terms: Sequence[str], step: int, past: Iterable[Mapping[str, Any]]
) -> list[GuardEvent]:
    """Return an event for the first training step in which all advantages are 0 and another loss term is trained.

    `terms`: the other terms of the loss. Without them, no pass is computed in such a step. `past`: the lines of the
    run's `events.jsonl`.
    """
    trained = int(assignment.groups.trained_S.sum())
    if not terms or not trained or assignment.token_advantages().any():
        return []
    text = (
        f"only the {' and the '.join(terms)} term{'s are' if len(terms) > 1 else ' is'} "
        "trained: every group is tied, so all advantages are 0; easier or harder tasks, or a larger "
        "actor_rollout_ref.rollout.n, make groups differ"
    )
    return _first_events(TIED_GROUPS, step, [Failure("actor/tied_updates", {"steps": float(trained)}, text)], past)


@dataclass(frozen=True, slots=True)
class Truncations:
    """The responses of an agent that reached their limit."""

    agent: str
    truncated: int
    responses: int
    longest: int
    """Response tokens of the longest of them."""

    @property
    def share(self) -> float:
        """The share of its responses that are truncated."""
        return self.truncated / self.responses

    def text(self, max_response_length: int) -> str:
        """Name the share, the agent, and the option to raise."""
        option = f"data.max_response_length, now {max_response_length}"
        if self.longest < max_response_length:
            option = f"the limit of its calls (max_tokens, here {self.longest})"
        return (
            f"{self.share:.0%} of {self.agent}'s responses are truncated ({self.truncated} of {self.responses}): raise "
            f"{option}, or ask for shorter responses"
        )


def truncations(batch: TrajectoryBatch) -> list[Truncations]:
    """Return the agents with truncated responses, in the order of the batch."""
    reasons = {s: info["finish_reason"] for s, info in batch.step_infos_with({"finish_reason"}).items()}
    cut_S = np.isin(np.arange(batch.n_steps), [s for s, reason in reasons.items() if reason == "length"])
    lengths_S = np.diff(batch.token_offsets)
    return [
        Truncations(name, int(cut_S[of_agent_S].sum()), int(of_agent_S.sum()), int(lengths_S[of_agent_S & cut_S].max()))
        for a, name in enumerate(batch.agent_names)
        if (cut_S & (of_agent_S := batch.agent_of_step == a)).any()
    ]


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
    return [f"the gate changed no credit in {_training_steps(len(moved))}: credit was that of the rule own"]


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
        scores = {row["step"]: row.get(f"reward/{name}/scores") or 0 for row in rows}
        shares = {row["step"]: row.get(f"reward/{name}/failed_frac") or 0 for row in rows}
        failed = {step: round(shares[step] * scores[step]) for step in scores if shares[step] and scores[step]}
        if n_failed := sum(failed.values()):
            n = sum(scores.values())
            lines.append(
                f"reward function {name} failed on {n_failed:.0f} of {n:.0f} scores ({n_failed / n:.1%}), in "
                f"{_training_steps(len(failed))}, the first {min(failed)}; failed scores are masked, not counted as 0"
            )
    return lines


def _training_steps(n: int) -> str:
    return f"{n} training step{'' if n == 1 else 's'}"


_ROLLOUTS = {
    "rollout/failed_frac": "failed and were masked",
    "rollout/lost_frac": "left no record, so that the others may be a biased sample",
    "rollout/timeout_frac": "exceeded their time limit (actor_rollout_ref.rollout.timeout_s)",
}
_FAILED_FRAC = re.compile("reward/(.+)/failed_frac")
