"""From scores to sub-rewards, and from outcome scores to outcomes: what there is, what is missing, and why.

Knows the cases of a missing score, and keeps them apart; not what is done with a reward afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from creditflow.credit.groups import codes_of_level, leave_one_out_mean
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

    `kept_S`: [S] steps of trajectories that are not masked; only they may stand in for others. With `reward_decomp` off
    no step has a value.
    """
    counts_SK = (batch.score_weights > 0) & (batch.score_status != NOT_MATCHED)
    failed_S = (counts_SK & (batch.score_status != OK)).any(axis=1)
    scored_S = counts_SK.any(axis=1) & ~failed_S
    value_S = np.full(batch.n_steps, np.nan)
    if not options.reward_decomp:
        return SubRewards(value_S, scored_S, failed_S)
    weights_SK = np.where(counts_SK & scored_S[:, None], batch.score_weights, 0.0)
    sums_S = np.where(weights_SK > 0, weights_SK * batch.scores, 0.0).sum(axis=1)
    value_S[scored_S] = sums_S[scored_S] / weights_SK.sum(axis=1)[scored_S]
    if failed_S.any():
        known_S = scored_S & kept_S
        no_stratum_S = np.full(batch.n_steps, -1, dtype=np.int64)
        for level in (options.group_by, "agent"):
            code_S = codes_of_level(batch, level, no_stratum_S)
            mean_S = leave_one_out_mean(value_S, known_S, code_S, batch.trajectory_of_step)
            fill_S = failed_S & np.isnan(value_S)
            value_S[fill_S] = mean_S[fill_S]
    return SubRewards(value_S, scored_S, failed_S)
