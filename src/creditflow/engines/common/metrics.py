"""Metrics of training steps and evaluations, their status line, and warnings from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from creditflow._utils.progress import Reporter
from creditflow.config import trained_agents
from creditflow.credit import Assignment, BatchStats, Threshold
from creditflow.credit.analysis.linter import idle_gate
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.data import TRAJECTORY_STATUSES, TrajectoryBatch
from creditflow.engines.common.components import Components
from creditflow.monitoring.evaluation import Evaluation
from creditflow.monitoring.metrics import error_metrics, rollout_metrics, sub_reward_metrics
from creditflow.monitoring.notices import truncations
from creditflow.rewards import ScoringReport
from creditflow.runs import Ledger

_MANY_TRUNCATED = 0.1
"""The accepted share of truncated trajectories; any run has some."""


def step_metrics(
    batch: TrajectoryBatch, report: ScoringReport | None, assignment: Assignment, threshold: Threshold
) -> dict[str, float]:
    """The metrics of a training step's rollouts, rewards and credit."""
    return {
        **rollout_metrics(batch),
        **(report.metrics() if report else {}),
        **sub_reward_metrics(batch),
        **error_metrics(batch),
        **threshold.metrics(),
        **credit_metrics(assignment),
    }


def staleness_metrics(batch: TrajectoryBatch, trained: Mapping[str, int]) -> dict[str, float]:
    """The trained version of a policy minus the one that sampled a token: mean over sampled tokens, and maximum.

    `trained`: the version that each policy has before its update; steps of others are left out.
    """
    length_S = np.diff(batch.token_offsets)
    version_T = np.repeat(batch.policy_version, length_S)
    for s, spans in enumerate(batch.version_spans):
        begin, end = batch.token_offsets[s : s + 2]
        for first, version in spans:
            version_T[begin + first : end] = version
    newest_S = np.array([trained.get(name, 0) for name in batch.policy_names])[batch.policy_of_step]
    sampled_T = (batch.response_mask > 0) & np.repeat(batch.sampled_by(*trained), length_S)
    age_T = (np.repeat(newest_S, length_S) - version_T)[sampled_T]
    return {
        "rollout/staleness": float(age_T.sum() / max(age_T.size, 1)),
        "rollout/staleness_max": float(age_T.max(initial=0)),
    }


def val_metrics(evaluation: Evaluation) -> dict[str, float]:
    """The evaluation's metrics as `val/*`."""
    return {f"val/{key}": value for key, value in evaluation.metrics.items()}


def update_threshold(threshold: Threshold, evaluation: Evaluation) -> None:
    """Pass an evaluation's accuracy to the threshold."""
    threshold.update(BatchStats({}, {}, accuracy=evaluation.metrics["pass_at_1"]))


def status_line(metrics: Mapping[str, float]) -> str:
    """A one-line summary of the main metrics of a training step or an evaluation."""
    names = {
        "train/pass_at_1": "train pass@1",
        "reward/step_error_rate": "step errors",
        "val/pass_at_1": "pass@1",
        "val/pass_at_1_greedy": "greedy",
        "val/step_error_rate": "val step errors",
    }
    parts = [f"{name} {metrics[key]:.3f}" for key, name in names.items() if key in metrics]
    if "timing/step_s" in metrics:
        stages = {"rollout": "rollout", "reward": "reward", "propagation": "credit", "update": "update"}
        times = [f"{name} {metrics[key]:.1f}" for s, name in stages.items() if (key := f"timing/{s}_s") in metrics]
        parts.append(f"{metrics['timing/step_s']:.1f} s" + (f" ({', '.join(times)})" if times else ""))
    rates = {"sampling": "throughput/response_tokens_per_s", "update": "throughput/update_tokens_per_s"}
    if measured := [f"{name} {metrics[key]:,.0f}" for name, key in rates.items() if key in metrics]:
        parts.append(f"tokens/s: {', '.join(measured)}")
    tied = [value for key, value in metrics.items() if key.endswith("actor/tied_updates")]
    if tied and min(tied) == 1:
        parts.append("every group tied")
    return "  ".join(parts)


def evaluation_line(metrics: Mapping[str, float], when: str, components: Components) -> str:
    """A one-line summary of an evaluation's metrics `val/*`. `when`: the moment in the run, for display."""
    return f"{when}: {status_line(metrics)} on {components.recipe.validation_words(len(components.val_tasks))}"


def warn_of_first_step(metrics: Mapping[str, float], components: Components, folder: Path, reporter: Reporter) -> None:
    """Warn of problems that the first training step shows.

    These are agents without a signal, many truncated trajectories, and gates that changed no credit. Reads the step's
    metrics and its step file in the run's `folder`.
    """
    for agent in trained_agents(components.recipe.config):
        if metrics.get(f"credit/reach/{agent}") == 0.0:
            reporter.say(
                f"warning: no signal reached {agent} in the first step; score it, or let the outcome reach it "
                "(algorithm.outcome_to: all)"
            )
    if metrics.get("rollout/truncated_frac", 0.0) > _MANY_TRUNCATED:
        batch, longest = Ledger.open(folder).read(1).batch, components.recipe.config.data.max_response_length
        cuts = {f"{c.agent} was cut off at ": c for c in truncations(batch) if c.share > _MANY_TRUNCATED}
        for cut in cuts.values():
            reporter.say(f"warning: in the first step, {cut.text(longest)}")
        truncated_N = batch.status_of_trajectory == TRAJECTORY_STATUSES.index("truncated")
        others_N = truncated_N & [not str(i.get("truncated")).startswith(tuple(cuts)) for i in batch.trajectory_info]
        if (others := float(others_N.mean())) > _MANY_TRUNCATED:
            reporter.say(
                f"warning: {others:.0%} of the first step's trajectories were truncated{' otherwise' * bool(cuts)}: by "
                "data.max_prompt_length, data.max_response_length, the model's positions or the workflow; creditflow "
                "check shows the first"
            )
    # Without the metric no credit was assigned, or by a rule without flow.
    assignment = Ledger.open(folder).read(1).assignment if "propagation/moved" in metrics else None
    if assignment is not None and (finding := idle_gate(assignment)) is not None:
        reporter.say(f"warning: {finding.message}")
