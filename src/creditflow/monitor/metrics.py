"""Metrics of trajectories: what was played, how it scored, how often it was right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from creditflow.trajectory import RIGHT, Score, Step, Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`rollout/*`: steps and tokens per trajectory, shares that failed or were truncated."""
    n_steps = [len(t.steps) for t in trajectories]
    tokens = [len(s.response_ids) for t in trajectories for s in t.steps]
    return {
        "rollout/steps_per_trajectory": float(np.mean(n_steps)),
        "rollout/response_tokens": float(np.sum(tokens)),
        "rollout/tokens": float(np.sum(tokens) + sum(len(s.prompt_ids) for t in trajectories for s in t.steps)),
        "rollout/failed_frac": float(np.mean([t.status == "failed" for t in trajectories])),
        "rollout/truncated_frac": float(np.mean([t.status == "truncated" for t in trajectories])),
        "rollout/agent_error_frac": float(np.mean(["agent_error" in t.info for t in trajectories])),
    }


def _values(step: Step) -> list[float]:
    return [score.rescaled for score in step.scores.values() if score.status == "ok"]


def _sub_reward(step: Step) -> float | None:
    """The weighted mean of the step's scores; where all weigh 0 (measured, not paid), their plain mean."""
    ok = [score for score in step.scores.values() if score.status == "ok"]
    if not ok:
        return None
    weights = [score.weight for score in ok]
    return float(np.average([score.rescaled for score in ok], weights=weights if any(weights) else None))


def step_errors(steps: Sequence[Step]) -> list[bool]:
    """For every step that has a score, of whatever weight: whether any score is short of its maximum."""
    return [min(values) < RIGHT for step in steps if (values := _values(step))]


def sub_reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`reward/sub_reward/<agent>` (mean), `reward/sub_reward_var/<agent>`, `reward/step_error_rate` (and by agent).

    By stratum too (`reward/sub_reward/verifier/wrong`: of the wrong candidates, the share that the verifier caught).
    """
    steps_of: dict[str, list[Step]] = defaultdict(list)
    for trajectory in trajectories:
        for step in trajectory.steps:
            steps_of[step.agent].append(step)
    metrics: dict[str, float] = {}
    every: list[bool] = []
    for agent, steps in sorted(steps_of.items()):
        values = [value for step in steps if (value := _sub_reward(step)) is not None]
        if not values:
            continue
        errors = step_errors(steps)
        every += errors
        metrics[f"reward/sub_reward/{agent}"] = float(np.mean(values))
        metrics[f"reward/sub_reward_var/{agent}"] = float(np.var(values))
        metrics[f"reward/step_error_rate/{agent}"] = float(np.mean(errors))
        for stratum in sorted({step.stratum for step in steps if step.stratum is not None}):
            of_stratum = [v for step in steps if step.stratum == stratum and (v := _sub_reward(step)) is not None]
            if of_stratum:
                metrics[f"reward/sub_reward/{agent}/{stratum}"] = float(np.mean(of_stratum))
    if every:
        metrics["reward/step_error_rate"] = float(np.mean(every))
    return metrics


def evaluation_metrics(trajectories: Sequence[Trajectory], n: int) -> dict[str, float]:
    """avg@n (`pass_at_1`: the mean over plays), pass@k for k = 2, 4, ... up to n, and how often steps were wrong.

    A play passes when its outcome reaches the top of its range. A play that failed, or whose outcome could not be
    scored, has not passed. pass@k is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, eq. 1).
    """
    passed: dict[str, list[bool]] = defaultdict(list)
    for trajectory in trajectories:
        passed[trajectory.uid].append(_passes(trajectory.outcome))
    metrics = {"pass_at_1": float(np.mean([np.mean(plays) for plays in passed.values()]))}
    ks = [2**i for i in range(1, 11) if 2**i < n] + ([n] if n > 1 else [])
    for k in ks:
        metrics[f"pass_at_{k}"] = float(np.mean([_pass_at_k(len(p), sum(p), k) for p in passed.values()]))
    outcomes = [t.outcome.rescaled for t in trajectories if t.outcome is not None and t.outcome.status == "ok"]
    if outcomes:
        metrics["outcome_mean"] = float(np.mean(outcomes))
    metrics["unscored_frac"] = float(np.mean([t.outcome is None or t.outcome.status != "ok" for t in trajectories]))
    for key, value in sub_reward_metrics(trajectories).items():
        metrics[key.removeprefix("reward/")] = value
    return metrics


def _passes(outcome: Score | None) -> bool:
    return outcome is not None and outcome.status == "ok" and outcome.rescaled >= RIGHT


def _pass_at_k(n: int, n_passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), as a product so that nothing overflows."""
    if n - n_passed < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - n_passed + 1, n + 1)))
