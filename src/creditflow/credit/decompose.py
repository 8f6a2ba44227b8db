"""From scores to sub-rewards, and from outcome scores to outcomes: what there is, what is missing, and why.

Knows the cases of a missing score, and keeps them apart; not what is done with a reward afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from creditflow.credit.groups import codes_of_level, compact, leave_one_out_mean
from creditflow.errors import ShapeError
from creditflow.trajectory import NOT_MATCHED, OK, TRAJECTORY_STATUSES, Bools, Floats, TrajectoryBatch

if TYPE_CHECKING:
    from creditflow.credit.options import CreditOptions

_FAILED, _TRUNCATED = TRAJECTORY_STATUSES.index("failed"), TRAJECTORY_STATUSES.index("truncated")


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The global rewards of N trajectories."""

    value_N: Floats
    """[N] R in its own units; 0 where there is none."""
    known_N: Bools
    """[N] whether the trajectory has an outcome (that of an unscored truncated one is 0)."""
    masked_N: Bools
    """[N] whether the trajectory is left out of training as a whole."""


@dataclass(frozen=True, slots=True)
class SubRewards:
    """The own sub-rewards of S steps. A step is scored, or failed, or neither: then no function matched it."""

    value_S: Floats
    """[S] r_t in [0, 1]; where scoring failed, the mean that stands in for it; NaN where there is none."""
    scored_S: Bools
    """[S] every matching function of positive weight gave a score."""
    failed_S: Bools
    """[S] at least one of them did not."""


def outcomes(batch: TrajectoryBatch, options: CreditOptions) -> Outcomes:
    """What each trajectory earned, and which trajectories cannot be learned from.

    Masked: status `failed`; an outcome whose scoring failed (0 in its place would punish the agents for the scorer's
    fault); truncated ones if `mask_truncated`. A truncated trajectory that nobody scored has outcome 0. Where there
    is no outcome function, R contributes nothing.
    """
    status_N = batch.status_of_trajectory
    unscored_N = np.array([s is not None and s.status != "ok" for s in batch.outcome_scores], dtype=np.bool_)
    truncated_N = status_N == _TRUNCATED
    masked_N = (status_N == _FAILED) | unscored_N | (truncated_N & options.mask_truncated)
    known_N = (np.isfinite(batch.outcome) | truncated_N) & ~masked_N
    return Outcomes(np.where(known_N & ~np.isnan(batch.outcome), batch.outcome, 0.0), known_N, masked_N)


def sub_rewards(batch: TrajectoryBatch, options: CreditOptions, kept_S: Bools) -> SubRewards:
    """`r_t = sum_k weight_k * score_k / sum_k weight_k` over the matching functions of positive weight.

    Three cases that are never mixed up. No function matches (or only functions of weight 0, which measure): no own
    reward. All matching ones ok: scored. Any failed: unscored as a whole, lest a timed-out check leave the easy half of
    the score standing; r_t is then the mean over the other trajectories of its group, else over those of its agent,
    else there is none. Strata play no part in that mean, for the step has no score of its own.

    With `decomp_granularity: agent` the scored steps of an agent in a trajectory share the mean of theirs.

    `kept_S`: [S] steps of trajectories that are not masked; only they may stand in for others. Where sub-rewards play
    no part (`options.decomposed`) no step has a value.
    """
    from creditflow.credit import kernels

    sum_S, weight_S, case_S = kernels.weigh(batch.scores, batch.score_weights, batch.score_status, OK)
    scored_S, failed_S = case_S == 1, case_S == 2
    value_S = np.full(batch.n_steps, np.nan)
    if not options.decomposed:
        return SubRewards(value_S, scored_S, failed_S)
    np.divide(sum_S, weight_S, out=value_S, where=scored_S)
    if options.decomp_granularity == "agent":
        _share_among_agent(batch, value_S, scored_S)
    known_S, no_stratum_S = scored_S & kept_S, np.full(batch.n_steps, -1, dtype=np.int64)
    for level in (options.group_by, "agent"):
        fill_S = failed_S & np.isnan(value_S)
        if not fill_S.any():
            break
        code_S = codes_of_level(batch, level, no_stratum_S)
        mean_S = leave_one_out_mean(value_S, known_S, code_S, batch.trajectory_of_step)
        value_S[fill_S] = mean_S[fill_S]
    return SubRewards(value_S, scored_S, failed_S)


def counting(batch: TrajectoryBatch) -> Bools:
    """[S, K] scores that count: of a function of positive weight that matched the step, ok or not."""
    counting_SK: Bools = (batch.score_weights > 0) & (batch.score_status != NOT_MATCHED)
    return counting_SK


def _share_among_agent(batch: TrajectoryBatch, value_S: Floats, scored_S: Bools) -> None:
    scored = np.flatnonzero(scored_S)
    if scored.size:
        code, n = compact(batch.trajectory_of_step[scored], batch.agent_of_step[scored])
        value_S[scored] = (np.bincount(code, value_S[scored], n) / np.bincount(code, minlength=n))[code]


def token_rewards(batch: TrajectoryBatch, rewards: SubRewards) -> Floats:
    """[T] rho: the weighted mean of the scores at each response token, a score without token values counting
    everywhere.

    0 where the step is not scored. Raises ShapeError where a score has another number of values than the response has
    tokens.
    """
    rho_T = np.zeros(int(batch.token_offsets[-1]))
    counts_SK = counting(batch)
    for s in np.flatnonzero(rewards.scored_S & (np.diff(batch.token_offsets) > 0)):
        tokens = slice(int(batch.token_offsets[s]), int(batch.token_offsets[s + 1]))
        total = 0.0
        for k in np.flatnonzero(counts_SK[s]):
            weight = batch.score_weights[s, k]
            total += weight
            rho_T[tokens] += weight * _per_token(batch, int(s), batch.score_names[k], tokens.stop - tokens.start)
        rho_T[tokens] /= total
    return rho_T


def _per_token(batch: TrajectoryBatch, s: int, name: str, n_tokens: int) -> Floats:
    score = batch.raw_scores[s][name]
    values = np.atleast_1d(np.asarray(score.value, dtype=np.float64))
    if isinstance(score.value, tuple) and len(values) != n_tokens:
        raise ShapeError(
            f"step {batch.step_ids[s]}, score {name}: expected one value for each of {n_tokens} response tokens, "
            f"got {len(values)}"
        )
    low, high = score.range
    return np.asarray(np.broadcast_to((values - low) / (high - low), n_tokens))
