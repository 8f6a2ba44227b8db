"""The first stage: sub-rewards from scores, outcomes from outcome scores, with the cases of a missing score apart."""

from __future__ import annotations

from typing import cast

import numpy as np

from creditflow.credit.groups import compact, group_codes, leave_one_out_mean
from creditflow.credit.records import CreditOptions, Rewards
from creditflow.data import (
    NOT_MATCHED,
    OK,
    TRAJECTORY_STATUSES,
    Bools,
    Floats,
    Ints,
    Score,
    TrajectoryBatch,
)
from creditflow.data.trajectory import RANGE_TOLERANCE, outcome_value
from creditflow.errors import BatchError, NotFiniteError, ScoreRangeError, ShapeError

_FAILED, _TRUNCATED = TRAJECTORY_STATUSES.index("failed"), TRAJECTORY_STATUSES.index("truncated")


def read_rewards(batch: TrajectoryBatch, options: CreditOptions) -> Rewards:
    """The rewards of a batch: the first stage of `assign`."""
    outcome_S, known_S, masked_S, masked_N = _outcomes(batch, options.mask_truncated)
    scores = _, scored_S, _ = _sub_rewards(batch, options, masked_S)
    by_token = options.pays_by_token and bool((scored_S & (batch.sampled_of_step > 0)).any())
    token_score_T = _token_scores(batch, scored_S) if by_token else None
    # A label, made from the prompt alone, separates groups by the quality of upstream steps. This gives scored steps
    # comparable peers. For an unscored step it would leave only the outcome's noise within each label.
    stratum_S = np.where(scored_S, batch.stratum_of_step, -1)
    return Rewards(batch, *scores, outcome_S, known_S, masked_S, masked_N, stratum_S, token_score_T)


def common_outcomes(batch: TrajectoryBatch, *, mask_truncated: bool) -> Floats:
    """[N] the common outcome of each trajectory in its original units; NaN for a masked trajectory, or without one."""
    value_N, known_N, _, _ = _common_outcomes(batch, mask_truncated)
    return np.where(known_N, value_N, np.nan)


def _common_outcomes(batch: TrajectoryBatch, mask_truncated: bool) -> tuple[Floats, Bools, Bools, Bools]:
    """[N] the outcome (0 without one), known, masked, and left out for another reason than its outcome."""
    status_N = batch.status_of_trajectory
    unscored_N = np.isnan(batch.outcome)
    # Read only these scores: a batch from a table decodes each score on access.
    for n in np.flatnonzero(unscored_N).tolist():
        score = batch.outcome_scores[n]
        unscored_N[n] = score is not None and score.status != "ok"
    truncated_N = status_N == _TRUNCATED
    left_out_N = (status_N == _FAILED) | (truncated_N & mask_truncated)
    masked_N = left_out_N | unscored_N
    known_N = (np.isfinite(batch.outcome) | truncated_N) & ~masked_N
    value_N = np.where(known_N & ~np.isnan(batch.outcome), batch.outcome, 0.0).astype(np.float64)  # it may be float32
    return value_N, known_N, masked_N, left_out_N


def _outcomes(batch: TrajectoryBatch, mask_truncated: bool) -> tuple[Floats, Bools, Bools, Bools]:
    """`outcome_S`, `known_S`, `masked_S` and `masked_N` of `Rewards`.

    Masked: trajectories of status `failed`; those whose outcome scoring failed (counting 0 would punish the agents for
    the scorer's fault); truncated ones if `mask_truncated`. An unscored truncated trajectory has outcome 0. Without an
    outcome function, R contributes nothing. For the steps of an agent with its own outcome, that one counts in
    place of the common one; then a trajectory is masked as a whole only if all of its steps are.
    """
    value_N, known_N, masked_N, left_out_N = _common_outcomes(batch, mask_truncated)
    trajectory_S = batch.trajectory_of_step
    value_S, known_S, masked_S = value_N[trajectory_S], known_N[trajectory_S], masked_N[trajectory_S]
    at, scores, place = batch.derived("own_outcomes", lambda: own_outcomes(batch))
    if at.size:
        own = np.array([outcome_value(score) for score in scores])[place]
        masked_S[at] = left_out_N[trajectory_S[at]] | np.isnan(own)
        known_S[at] = ~masked_S[at]
        value_S[at] = np.where(known_S[at], own, 0.0)
        kept_N = np.bincount(trajectory_S[~masked_S], minlength=batch.n_trajectories) > 0
        has_steps_N = np.bincount(trajectory_S, minlength=batch.n_trajectories) > 0
        masked_N = np.where(has_steps_N, ~kept_N, masked_N)
    return value_S, known_S, masked_S, masked_N


def outcome_of(batch: TrajectoryBatch, s: int) -> Score | None:
    """The outcome of step `s`'s agent: its own, else the common one of the trajectory; None without one."""
    n, agent = batch.trajectory_of_step[s], batch.agent_names[batch.agent_of_step[s]]
    common: Score | None = batch.outcome_scores[n]
    return batch.outcomes_of_agents[n].get(agent, common) if batch.outcomes_of_agents else common


def own_outcomes(batch: TrajectoryBatch) -> tuple[Ints, list[Score], Ints]:
    """The steps whose agent has its own outcome, all own outcomes, and the place of each of these steps among them."""
    code_of = {name: code for code, name in enumerate(batch.agent_names)}
    place_NA, scores = np.full((batch.n_trajectories, len(code_of)), -1), list[Score]()
    for n, own in enumerate(batch.outcomes_of_agents):
        for agent, score in own.items():
            if agent in code_of:
                place_NA[n, code_of[agent]] = len(scores)
                scores.append(score)
    place_S = place_NA[batch.trajectory_of_step, batch.agent_of_step]
    at = np.flatnonzero(place_S >= 0)
    return at, scores, place_S[at]


def _sub_rewards(batch: TrajectoryBatch, options: CreditOptions, masked_S: Bools) -> tuple[Floats, Bools, Bools]:
    """`sub_reward_S`, `scored_S` and `failed_S` of `Rewards`.

    `r_t = sum_k weight_k * score_k / sum_k weight_k` over the matching functions of positive weight. There are three
    cases. No function matches, or only functions of weight 0, which measure: no own reward. All matching functions are
    ok: scored. Any failed: the step is unscored as a whole, because the remaining scores may be the easy half. r_t is
    then the mean over the other trajectories of its group, else of its agent; if neither is known, the step has no r_t.
    This mean ignores strata, because the step has no own score.

    With `decomp_granularity: agent` the scored steps of an agent in a trajectory share their mean. Without
    `options.decomposed` no step has a value.
    """
    from creditflow.credit import kernels

    value_S, case_S = np.empty(batch.n_steps), np.empty(batch.n_steps, dtype=np.uint8)
    kernels.weigh(batch.scores, batch.score_weights, batch.score_status, OK, value_S, case_S)
    scored_S, failed_S = case_S == 1, case_S == 2
    if not options.decomposed:
        return np.full(batch.n_steps, np.nan), scored_S, failed_S
    if options.decomp_granularity == "agent":
        scored = np.flatnonzero(scored_S)
        code, n = compact(batch.trajectory_of_step[scored], batch.agent_of_step[scored])
        value_S[scored] = (np.bincount(code, value_S[scored], n) / np.bincount(code, minlength=n))[code]
    over_S = scored_S & ~masked_S
    for level in (options.group_by, "agent"):
        at = np.flatnonzero(failed_S & np.isnan(value_S))
        if not at.size:
            break
        code_S = group_codes(batch, level, options.max_version_lag)
        value_S[at] = leave_one_out_mean(value_S, over_S, code_S, batch.trajectory_of_step, at)
    return value_S, scored_S, failed_S


def counting(batch: TrajectoryBatch) -> Bools:
    """[S, K] scores of functions of positive weight that matched the step, ok or not."""
    counting_SK: Bools = (batch.score_weights > 0) & (batch.score_status != NOT_MATCHED)
    return counting_SK


def _token_scores(batch: TrajectoryBatch, scored_S: Bools) -> Floats:
    """[T] rho: the weighted mean of the scores at each response token; 0 for steps that are not scored.

    A score without token values counts at every token. Raises ShapeError if a score has not one value for each
    response token, NotFiniteError or ScoreRangeError for a token value outside its score's range, which a mean within
    the range would hide.
    """
    length_S = np.diff(batch.token_offsets)
    counts_SK = counting(batch) & (scored_S & (length_S > 0))[:, None]
    share_SK = np.where(counts_SK, batch.score_weights, 0.0)
    share_SK /= np.where(counts_SK.any(axis=1), share_SK.sum(axis=1), 1.0)[:, None]
    alike_SK, by_token = counts_SK.copy(), list[tuple[int, int]]()
    for s, k in np.argwhere(counts_SK).tolist():
        name, scores = batch.score_names[k], batch.raw_scores[s]
        if name not in scores:
            raise BatchError(f"step {batch.step_ids[s]}: expected score {name} in raw_scores, got {sorted(scores)}")
        if isinstance(scores[name].value, tuple):
            alike_SK[s, k] = False
            by_token.append((s, k))
    rho_T = np.repeat(np.where(alike_SK, share_SK * batch.scores, 0.0).sum(axis=1), length_S)
    for s, k in by_token:
        start, end = batch.token_offsets[s : s + 2]
        rho_T[start:end] += share_SK[s, k] * _per_token(batch, s, batch.score_names[k])
    return rho_T


def _per_token(batch: TrajectoryBatch, s: int, name: str) -> Floats:
    """The score of step `s` at each of its tokens, rescaled to [0, 1]."""
    score, where = batch.raw_scores[s][name], f"step {batch.step_ids[s]}, score {name}"
    row, length = cast(tuple[float, ...], score.value), batch.token_offsets[s + 1] - batch.token_offsets[s]
    if len(row) != length:
        raise ShapeError(f"{where}: expected one value for each of {length} response tokens, got {len(row)}")
    low, high = map(float, score.range)
    with np.errstate(all="ignore"):  # NaN and empty ranges are reported below
        values = np.divide(np.array(row, dtype=np.float64) - low, high - low)
    inside = (values >= -RANGE_TOLERANCE) & (values <= 1 + RANGE_TOLERANCE)  # false for NaN
    if not inside.all():
        token = int(np.argmin(inside))
        kind = ScoreRangeError if np.isfinite(row[token]) else NotFiniteError
        raise kind(f"{where}, token {token}: expected a value from {low} to {high}, got {row[token]}")
    return np.clip(values, 0.0, 1.0, out=values)
