"""The types, whitening and scale of estimators, which turn credit into advantages for the loss.

An estimator reads credit and groups. It is independent of the propagation rule and of the model.

    advantage = weight * (credit - baseline - shift) / divisor

An estimator sets baseline and divisor. With whitening, the divisor is the standard deviation over all trained tokens of
a policy, and their mean is the shift (the baseline, for an estimator without groups); otherwise the shift is 0. `gae`
computes advantages from a critic's values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from creditflow.credit.groups import LEVEL_NAMES, POLICY, TIE_TOLERANCE, BatchColumns, Groups, compact, no_groups
from creditflow.credit.options import CreditOptions
from creditflow.credit.rules.base import Credit
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.errors import ConfigError, NotFiniteError, ShapeError

WHITENING_EPSILON = 1e-8
"""Added to the variance before whitening, as in verl."""

MAX_STRATUM_WEIGHT = 2.0
"""Cap on stratum weights, which would multiply the noise of a small stratum. At 10, a verifier's forty wrong candidates
among six hundred dominated the updates, and learning rates above 3e-4 diverged on arithmetic_chain."""


@dataclass(frozen=True, slots=True)
class EstimatorInput:
    """The input of an estimator."""

    batch: TrajectoryBatch
    options: CreditOptions
    credit: Credit
    """The terms of c_t, and the gates they passed."""
    credit_S: Floats
    """[S] c_t, without the part paid token by token (`decomp_granularity: token_level`)."""
    reward_S: Floats
    """[S] own + shared: the part of credit_S that enters at the step itself."""
    trained_S: Bools
    """[S] steps in the loss; the others are excluded from every mean."""
    groups: Groups
    """The groups. For an estimator registered with `grouped=False`, no step has one."""
    values_T: Floats | None
    """[T] the critic's values; None without a critic."""
    token_reward_T: Floats | None
    """[T] rewards paid token by token, for an estimator with a critic."""


@dataclass(frozen=True, slots=True)
class CriticTerms:
    """The terms of `gae`'s advantages, before whitening.

    The advantages of tokens are computed again when needed, which costs less than keeping them.
    """

    values_T: Floats
    """[T] V_j: the critic's values. Not read at tokens that were not sampled."""
    token_reward_T: Floats
    """[T] rewards paid token by token; may be empty."""
    reward_S: Floats
    """[S] the reward at the step's last sampled token."""
    down_S: Floats
    """[S] the part received from the children's values and advantages."""
    first_S: Floats
    """[S] A_j at the step's first sampled token; 0 if it has none."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The output of an estimator. The caller sets the advantage of masked, tied and ungrouped steps to 0."""

    baseline_S: Floats
    """[S] the value to subtract from credit."""
    divisor_S: Floats | None = None
    """[S] the value to divide by; None: 1. Must be None for a whitened estimator: whitening sets the divisor."""
    unscaled_T: Floats | None = None
    """[T] token values that replace credit, if the tokens of a step differ."""
    moments_S: Floats | None = None
    """[S, 5] count, mean, sum of squared differences, minimum and maximum over each step's tokens, if they differ;
    not needed with `unscaled_T`."""
    critic: CriticTerms | None = None
    """The terms of `gae`, whose tokens differ without `unscaled_T`."""


@dataclass(frozen=True, slots=True)
class AdvantageScale:
    """`advantage = weight * ((credit - baseline - shift) / divisor)`; exactly 0 for steps that do not learn."""

    weight_S: Floats
    baseline_S: Floats
    shift_S: Floats
    divisor_S: Floats
    learns_S: Bools

    @classmethod
    def none(cls, n_steps: int) -> AdvantageScale:
        """The identity: weight and divisor 1, baseline and shift 0, every step learns."""
        zero_S, one_S = np.zeros(n_steps), np.ones(n_steps)
        return cls(one_S, zero_S, zero_S, one_S, np.ones(n_steps, dtype=np.bool_))

    def steps(self, credit_S: Floats, otherwise_S: Floats | None = None) -> Floats:
        """[S] the steps' advantages; `otherwise_S` where credit is NaN."""
        raw_S = self.weight_S * ((credit_S - self.baseline_S - self.shift_S) / self.divisor_S)
        if otherwise_S is not None:
            raw_S = np.where(np.isnan(credit_S), otherwise_S, raw_S)
        return np.where(self.learns_S, raw_S, 0.0)

    def tokens(self, credit_T: Floats, batch: TrajectoryBatch, out_T: NDArray[Any]) -> None:
        """Write [T] advantages from [T] token credits to `out_T`; 0 at tokens that were not sampled."""
        from creditflow.credit import kernels

        factors = (self.weight_S, self.baseline_S, self.shift_S, self.divisor_S)
        kernels.scale_tokens(credit_T, factors, batch.token_offsets, batch.response_mask, self.learns_S, out_T)


@dataclass(frozen=True, slots=True)
class Whitened:
    """Mean and variance over all trained tokens of each of P policies."""

    code_S: Ints
    """[S] index of the step's policy among the trained ones; -1: not trained."""
    mean_P: Floats
    variance_P: Floats
    """[P] unbiased (N - 1); NaN where N is 1."""
    tied_P: Bools
    """[P] whether all values are the same, or there is only one."""
    trajectories_P: Ints
    """[P] number of trajectories."""

    def as_groups(self) -> Groups:
        """One group for each policy, with its trained steps."""
        groups, at = no_groups(len(self.code_S)), np.flatnonzero(self.code_S >= 0)
        code = self.code_S[at]
        groups.group_S[at], groups.level_S[at] = code, LEVEL_NAMES.index(POLICY)
        groups.size_S[at], groups.mean_S[at] = self.trajectories_P[code], self.mean_P[code]
        groups.spread_S[at], groups.tied_S[at] = np.sqrt(self.variance_P)[code], self.tied_P[code]
        return groups


def token_moments(batch: TrajectoryBatch, estimate: Estimate, tied_S: Bools) -> Floats | None:
    """[S, 5] moments of the token values to whiten; None if all tokens of a step have the same value.

    Steps of a tied group count as 0, as they do if tokens do not differ.
    """
    from creditflow.credit import kernels

    if estimate.unscaled_T is None:
        return estimate.moments_S
    moments_S = np.empty((batch.n_steps, 5))
    kernels.moments_of_steps(batch.token_offsets, batch.response_mask, estimate.unscaled_T, moments_S)
    moments_S[:, [1, 3, 4]] -= estimate.baseline_S[:, None]
    moments_S[tied_S, 1:] = 0.0
    return moments_S


def whitening(columns: BatchColumns, value_S: Floats, moments_S: Floats | None, over_S: Bools) -> Whitened:
    """Statistics over the trained tokens of the steps in `over_S`, for each policy, as in verl's whitening.

    `moments_S`: [S, 5] count, mean, squares, minimum and maximum of each step's tokens; None if all tokens of a step
    have the value `value_S`. In a batch without tokens each step counts as one token.
    """
    batch = columns.batch
    code_S = np.full(batch.n_steps, -1)
    at = np.flatnonzero(over_S)
    if not at.size:
        return Whitened(code_S, np.empty(0), np.empty(0), np.empty(0, dtype=np.bool_), np.empty(0, dtype=np.int64))
    code_S[at], n = compact(batch.policy_of_step[at])
    trajectories = np.unique(code_S[at] * batch.n_trajectories + batch.trajectory_of_step[at]) // batch.n_trajectories
    if moments_S is None:
        counts_S = columns.sampled_S if batch.response_mask.size else np.ones(batch.n_steps)
        moments_S = np.stack([counts_S, value_S, np.zeros_like(value_S), value_S, value_S], axis=1)
    at = at[moments_S[at, 0] > 0]
    count, mean, squares, least, largest = moments_S[at].T
    code = code_S[at]
    count_P = np.bincount(code, count, n)
    mean_P = np.where(count_P > 0, np.bincount(code, count * mean, n) / np.maximum(count_P, 1), np.nan)
    # Squares within steps plus squares between steps: the squares about the common mean.
    square_P = np.bincount(code, squares + count * (mean - mean_P[code]) ** 2, n)
    low_P, high_P = np.full(n, np.inf), np.full(n, -np.inf)
    np.minimum.at(low_P, code, least)
    np.maximum.at(high_P, code, largest)
    tied_P = (high_P - low_P <= TIE_TOLERANCE * np.maximum(1.0, np.abs(mean_P))) | (count_P <= 1)
    variance_P = np.where(count_P > 1, square_P / np.maximum(count_P - 1, 1), np.nan)
    return Whitened(code_S, mean_P, variance_P, tied_P, np.bincount(trajectories, minlength=n))


def check_values(batch: TrajectoryBatch, values_T: NDArray[Any] | None, estimator: str) -> Floats:
    """[T] the critic's values as floats. Raises ConfigError if missing, ShapeError for the wrong shape.

    Non-finite values are found when they are used, see `refuse_values`.
    """
    if values_T is None:
        raise ConfigError(f"algorithm.adv_estimator: {estimator} expects a critic's values for each token, got none")
    values_T = np.asarray(values_T)
    if values_T.shape != batch.response_mask.shape:
        raise ShapeError(f"values: expected shape {batch.response_mask.shape}, got {values_T.shape}")
    return values_T if values_T.dtype in (np.float32, np.float64) else values_T.astype(np.float64)


def refuse_values(batch: TrajectoryBatch, values_T: Floats) -> NoReturn:
    """Raise NotFiniteError for values that led to advantages that are not finite."""
    wrong_T = batch.response_mask & ~np.isfinite(values_T)
    if not wrong_T.any():
        raise NotFiniteError(
            f"values: expected numbers that advantages can be made of, got up to {np.abs(values_T).max()}"
        )
    token = int(np.argmax(wrong_T))
    s = int(np.searchsorted(batch.token_offsets, token, side="right")) - 1
    raise NotFiniteError(
        f"step {batch.step_ids[s]}, token {token - batch.token_offsets[s]}: expected a finite value, "
        f"got {values_T[token]}"
    )


def stratum_weights(batch: TrajectoryBatch, stratum_S: Ints, trained_S: Bools) -> Floats:
    """[S] weights that give each stratum of an agent and policy the same total; 1 for steps without a stratum.

    With L strata among n trained steps, a step of a stratum of n_s steps weighs `n / (L * n_s)`: all strata have the
    same total, and the mean weight is 1. Weights are capped at MAX_STRATUM_WEIGHT; the mean is then below 1.
    """
    weight_S = np.ones(batch.n_steps)
    at = np.flatnonzero(trained_S & (stratum_S >= 0))
    if not at.size:
        return weight_S
    agent, n_agents = compact(batch.agent_of_step[at], batch.policy_of_step[at])
    stratum, n_strata = compact(agent, stratum_S[at])
    steps_of_stratum = np.bincount(stratum, minlength=n_strata)
    agent_of_stratum = np.empty(n_strata, dtype=np.int64)
    agent_of_stratum[stratum] = agent
    strata_of_agent = np.bincount(agent_of_stratum, minlength=n_agents)
    steps_of_agent = np.bincount(agent, minlength=n_agents)
    weight = steps_of_agent[agent] / (strata_of_agent[agent] * steps_of_stratum[stratum])
    weight_S[at] = np.minimum(weight, MAX_STRATUM_WEIGHT)
    return weight_S
