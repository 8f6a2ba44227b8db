"""The last two stages: the baseline of every step, and its advantage.

    advantage = weight * (credit - baseline - shift) / divisor

exactly 0 for steps that do not learn. See `creditflow.credit.estimators.base` for the terms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from creditflow.credit.groups import LEVEL_NAMES, POLICY, TIE_TOLERANCE, compact, group_statistics, no_groups
from creditflow.credit.records import Advantage, Credit, CreditOptions, Estimate, EstimatorInput, Groups, Rewards
from creditflow.credit.rules.base import OutcomeRule
from creditflow.credit.tokens import at_first_token, paid_by_token, token_terms, write_tokens
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.errors import ConfigError

WHITENING_EPSILON = 1e-8
"""Added to the variance before whitening, as in verl."""

MAX_STRATUM_WEIGHT = 2.0
"""Cap on stratum weights, which would multiply the noise of a small stratum. At 10, a verifier's forty wrong candidates
among six hundred dominated the updates, and learning rates above 3e-4 diverged on arithmetic_chain."""


def compare(
    rewards: Rewards, credit: Credit, options: CreditOptions, values_T: Floats | None
) -> tuple[Groups, Estimate, Floats]:
    """Compare the credit of steps within their groups, by the estimator: the stage of baselines.

    Returns the groups, the estimate with the shift and divisor of whitening, and [S] the credit that was compared:
    without the part paid token by token.
    """
    batch, estimator = rewards.batch, options.estimator
    trained_S = _trained_steps(rewards, credit, options)
    by_token_S = np.zeros(batch.n_steps)
    if rewards.token_score_T is not None and credit.paid_S is not None:
        # The part paid token by token leaves the step's credit; its parents still receive it.
        by_token_S = np.where(paid_by_token(rewards), credit.paid_S, 0.0)
    credit_S = credit.total_S - by_token_S
    groups = group_statistics(rewards, credit_S, trained_S, options) if estimator.grouped else no_groups(trained_S)
    reward_S = credit.own_S - by_token_S + credit.shared_S
    token_reward_T = _token_rewards(rewards, options) if estimator.critic else None
    inputs = EstimatorInput(rewards, options, credit, credit_S, reward_S, groups, values_T, token_reward_T)
    estimate = estimator.estimate(inputs)
    if not isinstance(estimate, Estimate):
        name = f"algorithm.adv_estimator: {options.adv_estimator}"
        raise ConfigError(f"{name}: expected the function to return Estimate, got {type(estimate).__name__}")
    return (*(_whitened(inputs, estimate) if estimator.whitened else (groups, estimate)), credit_S)


def _trained_steps(rewards: Rewards, credit: Credit, options: CreditOptions) -> Bools:
    """[S] the steps in the loss."""
    trained_S = ~rewards.masked_S
    for left_out_S in (credit.frozen_S, credit.misled_S):
        if left_out_S is not None:
            trained_S &= ~left_out_S
    if options.propagation.pays_scores and options.decomposed:
        trained_S &= ~rewards.failed_S
    return trained_S


def _whitened(inputs: EstimatorInput, estimate: Estimate) -> tuple[Groups, Estimate]:
    """Add the shift and the divisor of whitening over the policy's trained tokens."""
    batch, groups, baseline_S = inputs.batch, inputs.groups, estimate.baseline_S
    grouped = inputs.options.estimator.grouped
    if estimate.divisor_S is not None:
        raise ConfigError(
            f"algorithm.adv_estimator: {inputs.options.adv_estimator} is whitened, and so divided by its own spread: "
            "expected divisor_S None"
        )
    over_S = groups.trained_S & (groups.group_S >= 0) if grouped else groups.trained_S
    left_S = np.where(over_S & ~groups.tied_S, inputs.credit_S - baseline_S, 0.0)
    whitened = whitening(batch, left_S, token_moments(batch, estimate, groups.tied_S), over_S)
    at = np.flatnonzero(whitened.code_S >= 0)
    code, divisor_S, shift_S = whitened.code_S[at], np.ones(batch.n_steps), np.zeros(batch.n_steps)
    divisor_S[at] = np.sqrt(whitened.variance_P + WHITENING_EPSILON)[code]
    if grouped:
        shift_S[at] = whitened.mean_P[code]
        groups = replace(groups, tied_S=groups.tied_S.copy())
        groups.tied_S[at] |= whitened.tied_P[code]
    else:
        groups = whitened.as_groups(groups.trained_S)
        baseline_S = baseline_S + groups.mean_S  # which needs no shift
    return groups, replace(estimate, baseline_S=baseline_S, shift_S=shift_S, divisor_S=divisor_S)


def advantages(
    rewards: Rewards, groups: Groups, estimate: Estimate, credit_S: Floats, options: CreditOptions
) -> Advantage:
    """The advantages, from the credit that was compared [S]: the last stage."""
    batch, one_S = rewards.batch, np.ones(rewards.batch.n_steps)
    learns_S = groups.trained_S & (groups.group_S >= 0) & ~groups.tied_S
    weight_S = stratum_weights(batch, rewards.stratum_S, groups.trained_S)
    shift_S = one_S - 1.0 if estimate.shift_S is None else estimate.shift_S
    divisor_S = one_S if estimate.divisor_S is None else estimate.divisor_S
    factors = weight_S, estimate.baseline_S, shift_S, divisor_S
    result = Advantage(learns_S, *factors, credit_S, unscaled_T=estimate.unscaled_T, critic=estimate.critic)
    if estimate.critic is not None:
        credit_S, learns_S = estimate.critic.first_S, learns_S & (batch.sampled_of_step > 0)
    if estimate.unscaled_T is not None:
        credit_S = at_first_token(batch, estimate.unscaled_T, credit_S)
    advantage_S = np.where(learns_S, weight_S * ((credit_S - estimate.baseline_S - shift_S) / divisor_S), 0.0)
    result = replace(result, advantage_S=advantage_S)
    if rewards.token_score_T is None or options.estimator.critic or not options.pays_by_token:
        return result
    term_T = token_terms(rewards, groups, options, scaled=options.estimator.whitened or estimate.divisor_S is not None)
    advantage_T = np.empty(term_T.size)
    write_tokens(result, batch, options, advantage_T)
    advantage_T += np.repeat(weight_S, np.diff(batch.token_offsets)) * term_T
    advantage_S = at_first_token(batch, advantage_T, advantage_S)
    return replace(result, advantage_S=advantage_S, advantage_T=advantage_T, token_term_T=term_T)


def _token_rewards(rewards: Rewards, options: CreditOptions) -> Floats | None:
    """[T] `w_r * (rho - b) / L` at each of a step's L sampled tokens; they sum to its own reward."""
    batch, rule = rewards.batch, options.propagation
    if rewards.token_score_T is None or not isinstance(rule, OutcomeRule):
        return None
    part_S = np.where(paid_by_token(rewards), rule.w_r / np.maximum(batch.sampled_of_step, 1), 0.0)
    above_T = rewards.token_score_T - rule.sub_reward_origin
    return np.where(batch.response_mask, np.repeat(part_S, np.diff(batch.token_offsets)) * above_T, 0.0)


@dataclass(frozen=True, slots=True)
class Whitening:
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

    def as_groups(self, trained_S: Bools) -> Groups:
        """One group for each policy, with its trained steps."""
        groups, at = no_groups(trained_S), np.flatnonzero(self.code_S >= 0)
        code = self.code_S[at]
        groups.group_S[at], groups.level_S[at] = code, LEVEL_NAMES.index(POLICY)
        groups.group_size_S[at], groups.mean_S[at] = self.trajectories_P[code], self.mean_P[code]
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


def whitening(batch: TrajectoryBatch, value_S: Floats, moments_S: Floats | None, over_S: Bools) -> Whitening:
    """Statistics over the trained tokens of the steps in `over_S`, for each policy, as in verl's whitening.

    `moments_S`: [S, 5] count, mean, squares, minimum and maximum of each step's tokens; None if all tokens of a step
    have the value `value_S`. In a batch without tokens each step counts as one token.
    """
    code_S = np.full(batch.n_steps, -1)
    at = np.flatnonzero(over_S)
    code_S[at], n = compact(batch.policy_of_step[at])
    trajectories = np.unique(code_S[at] * batch.n_trajectories + batch.trajectory_of_step[at]) // batch.n_trajectories
    if moments_S is None:
        counts_S = batch.sampled_of_step if batch.response_mask.size else np.ones(batch.n_steps)
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
    return Whitening(code_S, mean_P, variance_P, tied_P, np.bincount(trajectories, minlength=n))


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
