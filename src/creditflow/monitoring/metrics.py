"""Metrics of a batch of trajectories: size, scores, and success rates.

Computed on columns, so that a batch of a hundred thousand steps takes milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from creditflow.credit.rewards import outcome_of
from creditflow.data import (
    NOT_MATCHED,
    OK,
    RIGHT,
    TRAJECTORY_STATUSES,
    Bools,
    Floats,
    Ints,
    Score,
    TrajectoryBatch,
)


def rollout_metrics(batch: TrajectoryBatch) -> dict[str, float]:
    """`rollout/*`: steps per trajectory, tokens, and the shares of failed and truncated trajectories."""
    response_tokens = float(batch.token_offsets[-1])
    status_N = batch.status_of_trajectory
    return {
        "rollout/steps_per_trajectory": float(np.mean(_counts(batch.trajectory_of_step, batch.n_trajectories))),
        "rollout/response_tokens": response_tokens,
        "rollout/tokens": response_tokens + float(batch.prompt_offsets[-1]),
        "rollout/failed_frac": float(np.mean(status_N == TRAJECTORY_STATUSES.index("failed"))),
        "rollout/truncated_frac": float(np.mean(status_N == TRAJECTORY_STATUSES.index("truncated"))),
        "rollout/agent_error_frac": float(np.mean(["agent_error" in info for info in batch.trajectory_info])),
        "rollout/timeout_frac": float(np.mean(["timed_out" in info for info in batch.trajectory_info])),
        **_tool_metrics(batch),
        **_environment_metrics(batch),
    }


def _tool_metrics(batch: TrajectoryBatch) -> dict[str, float]:
    calls = [call for info in batch.step_infos_with({"tool_calls"}).values() for call in info["tool_calls"]]
    if not calls:
        return {}
    return {
        "rollout/tool_calls": len(calls) / batch.n_trajectories,
        "rollout/tool_failed_frac": sum(call["status"] != "ok" for call in calls) / len(calls),
    }


def _environment_metrics(batch: TrajectoryBatch) -> dict[str, float]:
    acted = batch.step_infos_with({"action", "illegal"}).values()
    return {"rollout/illegal_frac": sum("illegal" in info for info in acted) / len(acted)} if acted else {}


def step_errors(batch: TrajectoryBatch) -> tuple[Bools, Bools]:
    """(wrong_S, scored_S): steps with a score below its maximum, and steps with any score; weights are ignored."""
    wrong_SK: Bools = batch.scored & (batch.scores < RIGHT)
    return np.any(wrong_SK, axis=1), np.any(batch.scored, axis=1)


def sub_reward_metrics(batch: TrajectoryBatch) -> dict[str, float]:
    """`reward/sub_reward/<agent>` (mean), `reward/sub_reward_var/<agent>`, `reward/step_error_rate` (and by agent).

    `reward/sub_reward_excess_var/<agent>`: the variance, minus p (1 - p) if each score is 0 or 1, with p the mean. Also
    by stratum (`reward/sub_reward/verifier/wrong`: the share of wrong candidates that the verifier caught).
    """
    sub_reward_S, (wrong_S, scored_S) = sub_rewards(batch), step_errors(batch)
    metrics: dict[str, float] = {}
    for agent, a in sorted((name, a) for a, name in enumerate(batch.agent_names)):
        mine_S = scored_S & (batch.agent_of_step == a)
        if not mine_S.any():
            continue
        metrics[f"reward/sub_reward/{agent}"] = mean = float(np.mean(sub_reward_S[mine_S]))
        metrics[f"reward/sub_reward_var/{agent}"] = variance = float(np.var(sub_reward_S[mine_S]))
        implied = mean * (1 - mean) if np.isin(sub_reward_S[mine_S], (0.0, 1.0)).all() else 0.0
        metrics[f"reward/sub_reward_excess_var/{agent}"] = variance - implied
        metrics[f"reward/step_error_rate/{agent}"] = float(np.mean(wrong_S[mine_S]))
        for stratum, i in sorted((name, i) for i, name in enumerate(batch.stratum_names)):
            of_stratum_S = mine_S & (batch.stratum_of_step == i)
            if of_stratum_S.any():
                metrics[f"reward/sub_reward/{agent}/{stratum}"] = float(np.mean(sub_reward_S[of_stratum_S]))
    if scored_S.any():
        metrics["reward/step_error_rate"] = float(np.mean(wrong_S[scored_S]))
    return metrics


def error_metrics(batch: TrajectoryBatch) -> dict[str, float]:
    """`reward/error_rate`: the share of sub-reward verdicts that failed or contradict the outcome.

    A verdict is a score with positive weight in a trajectory that did not fail. The verdicts of a trajectory contradict
    its outcome if all of them are at the maximum and the outcome is below one half, or all are below one half and the
    outcome is at the maximum. If agents have their own outcomes, this holds for each side: the steps of a trajectory
    whose agents have equal outcomes. Only trajectories with a verdict on every step count, since an unjudged step could
    explain the outcome. `reward/verdicts`: the number of verdicts. `reward/judged_trajectories`: the number of
    trajectories with verdicts, which contradict together. `reward/agreement`: see `_agreement`. Empty without verdicts.
    """
    matched_SK = (batch.score_status != NOT_MATCHED) & (batch.score_weights > 0)
    cell_S, n = batch.trajectory_of_step, batch.n_trajectories
    matched_SK &= (batch.status_of_trajectory != TRAJECTORY_STATUSES.index("failed"))[cell_S][:, None]
    verdicts = int(matched_SK.sum())
    if not verdicts:
        return {}
    ok_SK = matched_SK & (batch.score_status == OK)
    every_S = matched_SK.any(axis=1) & (ok_SK == matched_SK).all(axis=1)
    judged_N = (_counts(cell_S, n) > 0) & (_counts(cell_S[~every_S], n) == 0)
    sides = _Sides.of_batch(batch)
    short_D = sides.count(_any(ok_SK & (batch.scores < RIGHT))) > 0
    high_D = sides.count(_any(ok_SK & (batch.scores >= _HALF))) > 0
    contradicts_D = judged_N[sides.trajectory_D] & ((sides.right_D & ~high_D) | (sides.wrong_D & ~short_D))
    wrong = int((matched_SK & ~ok_SK).sum()) + int(ok_SK[contradicts_D[sides.side_S]].sum())
    judged = len(np.unique(cell_S[matched_SK.any(axis=1)]))
    weights_SK = np.where(ok_SK, batch.score_weights, 0.0)
    return {
        "reward/error_rate": wrong / verdicts,
        "reward/verdicts": float(verdicts),
        "reward/judged_trajectories": float(judged),
        **_agreement(
            batch, sides, (np.where(ok_SK, batch.scores, 0.0) * weights_SK).sum(axis=1), weights_SK.sum(axis=1)
        ),
    }


_HALF = 0.5


@dataclass(frozen=True, slots=True)
class _Sides:
    """The D sides of all trajectories: the steps whose agents have equal outcomes; one side without own outcomes."""

    side_S: Ints
    trajectory_D: Ints
    right_D: Bools
    wrong_D: Bools

    @classmethod
    def of_batch(cls, batch: TrajectoryBatch) -> _Sides:
        outcome_D, ok_N = _outcomes(batch)
        side_S, trajectory_D = batch.trajectory_of_step, np.arange(batch.n_trajectories)
        if any(batch.outcomes_of_agents):
            # NaN differs from itself, so an unknown outcome is written as a number below all.
            outcome_S = np.nan_to_num(outcomes_of_steps(batch), nan=-np.inf)
            pairs_D2, side_S = np.unique(np.stack([side_S, outcome_S], axis=1), axis=0, return_inverse=True)
            trajectory_D, outcome_D = pairs_D2[:, 0].astype(np.int64), pairs_D2[:, 1]
            ok_N = np.isfinite(outcome_D)
        return cls(side_S.reshape(-1), trajectory_D, ok_N & (outcome_D >= RIGHT), ok_N & (outcome_D < _HALF))

    def count(self, at_S: Bools) -> Floats:
        """[D] the number of steps in `at_S`."""
        return _counts(self.side_S[at_S], len(self.trajectory_D))


def _any(of_SK: Bools) -> Bools:
    return np.asarray(of_SK.any(axis=1), dtype=np.bool_)


def _agreement(batch: TrajectoryBatch, sides: _Sides, paid_S: Floats, weight_S: Floats) -> dict[str, float]:
    """`reward/agreement`: how often the right trajectory of a pair has the higher mean sub-reward.

    Computed over all pairs of a right and a wrong trajectory (or side of one) of the same task; a tie counts one half.
    This is the
    statistic of Mann and Whitney (1947, "On a test of whether one of two random variables is stochastically larger"),
    summed over tasks: 1 if verdicts always agree with the outcome, 1/2 if they are independent of it, 0 if they always
    contradict it. `reward/agreement_over`: the number of fair coin tosses with the variance that the share has under
    independence. Empty if no task has both a right and a wrong trajectory.
    """
    scored_S = weight_S > 0
    cell_S, n = sides.side_S[scored_S], len(sides.trajectory_D)
    sums_D = np.bincount(cell_S, weights=paid_S[scored_S] / weight_S[scored_S], minlength=n)
    steps_D = np.bincount(cell_S, minlength=n)
    right_D, wrong_D = sides.right_D & (steps_D > 0), sides.wrong_D & (steps_D > 0)
    mean_D = np.round(sums_D / np.maximum(steps_D, 1), 12)  # values that differ by rounding are ties
    tasks, task_D = len(batch.group_names), batch.group_of_trajectory[sides.trajectory_D]
    right_G, wrong_G = (_counts(task_D[one_D], tasks) for one_D in (right_D, wrong_D))
    pairs = float((right_G * wrong_G).sum())
    if not pairs:
        return {}
    by_task = np.argsort(task_D, kind="stable")
    ends = np.cumsum(_counts(task_D, tasks)).astype(np.int64)[:-1]
    won = sum(_won(mean_D[of[right_D[of]]], mean_D[of[wrong_D[of]]]) for of in np.split(by_task, ends))
    variance = float((right_G * wrong_G * (right_G + wrong_G + 1)).sum()) / 12
    return {"reward/agreement": won / pairs, "reward/agreement_over": _HALF**2 * pairs**2 / variance}


def _won(right: Floats, wrong: Floats) -> float:
    """Number of pairs that the right trajectory wins; ties count one half."""
    ordered = np.sort(wrong)
    below, not_above = (np.searchsorted(ordered, right, side) for side in ("left", "right"))
    return float((below + not_above).sum()) / 2


def evaluation_metrics(batch: TrajectoryBatch, n: int) -> dict[str, float]:
    """avg@n (`pass_at_1`, the mean over trajectories), pass@k for k = 2, 4, ... up to n, and step error rates.

    A trajectory passes if its outcome reaches the maximum of its range; a failed trajectory or an unscored outcome does
    not pass. pass@k is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, eq. 1).
    """
    trajectories_G, passed_G = passes_by_task(batch)
    metrics = {"pass_at_1": float(np.mean(passed_G / trajectories_G)), "trajectories": float(batch.n_trajectories)}
    counts_G = list(zip(trajectories_G.astype(int).tolist(), passed_G.astype(int).tolist(), strict=True))
    for k in [2**i for i in range(1, 11) if 2**i < n] + ([n] if n > 1 else []):
        metrics[f"pass_at_{k}"] = float(np.mean([_pass_at_k(n, c, k) for n, c in counts_G]))
    outcome_N, ok_N = _outcomes(batch)
    if ok_N.any():
        metrics["outcome_mean"] = float(np.mean(outcome_N[ok_N]))
    metrics["unscored_frac"] = float(np.mean(~ok_N))
    for key, value in sub_reward_metrics(batch).items():
        metrics[key.removeprefix("reward/")] = value
    return metrics


def passes(outcome: Score | None) -> bool:
    """Whether an outcome is scored and reaches the maximum of its range."""
    return outcome is not None and outcome.status == "ok" and outcome.rescaled >= RIGHT


def passes_by_task(batch: TrajectoryBatch) -> tuple[Floats, Floats]:
    """(trajectories_G, passed_G): number of trajectories per task, and of those that passed, in the batch's order."""
    outcome_N, ok_N = _outcomes(batch)
    group_N, tasks = batch.group_of_trajectory, len(batch.group_names)
    passed_N = ok_N & (outcome_N >= RIGHT)
    return _counts(group_N, tasks), _counts(group_N[passed_N], tasks)


def _counts(codes: Ints, n: int) -> Floats:
    return np.bincount(codes, minlength=n).astype(np.float64)


def sub_rewards(batch: TrajectoryBatch) -> Floats:
    """[S] weighted mean of the step's scores; their plain mean if all weights are 0; NaN without scores.

    A token-level score counts as in credit, with the mean over the tokens that the policy sampled.
    """
    score_SK = np.where(batch.scored, batch.scores, 0.0)
    weight_SK = np.where(batch.scored, batch.score_weights, 0.0)
    weight_SK = np.where(weight_SK.sum(axis=1, keepdims=True) > 0, weight_SK, batch.scored)
    total_S = weight_SK.sum(axis=1)
    sub_reward_S: Floats = np.full(batch.n_steps, np.nan)
    np.divide((score_SK * weight_SK).sum(axis=1), total_S, out=sub_reward_S, where=total_S > 0)
    return sub_reward_S


def _outcomes(batch: TrajectoryBatch) -> tuple[Floats, Bools]:
    """(outcome_N, ok_N): the outcome rescaled to [0, 1], NaN if it is not ok."""
    ok_N = np.array([score is not None and score.status == "ok" for score in batch.outcome_scores], dtype=np.bool_)
    ranges = [(0.0, 1.0) if score is None else score.range for score in batch.outcome_scores]
    low_N, high_N = np.array(ranges, dtype=np.float64).reshape(-1, 2).T
    return np.divide(batch.outcome - low_N, high_N - low_N, out=np.full(len(ok_N), np.nan), where=ok_N), ok_N


def outcomes_of_steps(batch: TrajectoryBatch) -> Floats:
    """[S] the outcome of each step's agent, rescaled to [0, 1]; NaN if it is not ok."""
    outcome_S = _outcomes(batch)[0][batch.trajectory_of_step]
    if any(batch.outcomes_of_agents):
        scores = [outcome_of(batch, s) for s in range(batch.n_steps)]
        outcome_S[:] = [np.nan if score is None else score.rescaled for score in scores]
    return outcome_S


def _pass_at_k(n: int, n_passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k) for n trajectories with c passes."""
    return 1.0 - math.comb(n - n_passed, k) / max(1, math.comb(n, k))
