"""Token advantages: a step's advantage at its tokens, a critic's advantages, and the terms of token scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditflow.credit.groups import EPSILON, LEVEL_NAMES, TIE_TOLERANCE, cells_of, group_codes, leave_one_out_mean
from creditflow.credit.records import Advantage, CreditOptions, Groups, Rewards
from creditflow.credit.rules.base import ScoreRule
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch


def write_tokens(advantage: Advantage, batch: TrajectoryBatch, options: CreditOptions, out_T: NDArray[Any]) -> None:
    """Write the advantage of each sampled response token to `out_T` [T], 0 at the others."""
    from creditflow.credit import kernels

    critic, tokens = advantage.critic, (batch.token_offsets, batch.response_mask)
    if advantage.advantage_T is not None:
        out_T[:] = advantage.advantage_T
    elif advantage.unscaled_T is not None:
        kernels.scale_tokens(advantage.unscaled_T, advantage.factors, *tokens, advantage.learns_S, out_T)
    elif critic is not None:
        terms = (critic.values_T, critic.reward_S + critic.down_S, critic.token_reward_T)
        discounts = (options.gamma_token, options.lam_token)
        kernels.gae_tokens(*tokens, *terms, *discounts, advantage.factors, advantage.learns_S, out_T)
    else:
        kernels.spread_over_tokens(advantage.advantage_S.astype(out_T.dtype), *tokens, out_T)


def at_first_token(batch: TrajectoryBatch, values_T: Floats, otherwise: Floats | float) -> Floats:
    """[S] the value at each step's first sampled token; `otherwise` if it has none."""
    result_S, at = np.full(batch.n_steps, otherwise), np.flatnonzero(batch.sampled_of_step)
    if at.size:
        before_S = np.cumsum(batch.sampled_of_step) - batch.sampled_of_step  # sampled tokens of earlier steps
        result_S[at] = values_T[np.flatnonzero(batch.response_mask)[before_S[at]]]
    return result_S


def paid_by_token(rewards: Rewards) -> Bools:
    """[S] scored steps with sampled tokens."""
    paid_S: Bools = rewards.scored_S & (rewards.batch.sampled_of_step > 0)
    return paid_S


def token_terms(rewards: Rewards, groups: Groups, options: CreditOptions, *, scaled: bool) -> Floats:
    """[T] `u_j = w_r / L * sum over trained j' >= j of gamma_token^(j' - j) * (rho_j' - m)`, for trained, scored steps.

    If `scaled`, u is divided by its spread, computed over tokens like the spread of credit. m: the mean over the
    group's other trajectories of their mean sub-reward; L: the mean over the group's trajectories of their mean trained
    length. u is 0 without m, or without a spread to divide by. Like in PRIME (arXiv 2502.01456), u is a return-to-go
    against a leave-one-out mean; here it is a separate term, added to the step's advantage.
    """
    from creditflow.credit import kernels

    batch, rule, rho_T, gamma_token = rewards.batch, options.propagation, rewards.token_score_T, options.gamma_token
    assert rho_T is not None, "`token_level` makes a score for each token"
    assert isinstance(rule, ScoreRule), "only rules that pay scores pay them token by token"
    over_S = paid_by_token(rewards) & groups.trained_S & (groups.group_S >= 0)
    level_S, sub_reward_S, weight = groups.level_S, rewards.sub_reward_S, rule.w_r
    length_S, over = batch.sampled_of_step.astype(np.float64), np.flatnonzero(over_S)
    mean_S, part_S, divisor_S = np.zeros(batch.n_steps), np.zeros(batch.n_steps), np.ones(batch.n_steps)
    pays_S = np.zeros(batch.n_steps, dtype=np.bool_)
    levels = np.unique(level_S[over])
    for level in levels[levels >= 0].tolist():
        code_S = group_codes(batch, LEVEL_NAMES[level], options.max_version_lag, rewards.stratum_S)
        others = leave_one_out_mean(sub_reward_S, over_S, code_S, batch.trajectory_of_step, over)
        # The spread covers all members of the group, including those with a baseline at another level.
        member, others = over[~np.isnan(others)], others[~np.isnan(others)]
        if not member.size:
            continue
        lengths = cells_of(length_S[over], code_S[over], batch.trajectory_of_step[over])
        parts = weight / lengths.mean_G[code_S[member]]
        here = level_S[member] == level
        at = member[here]
        mean_S[at], part_S[at], pays_S[at] = others[here], parts[here], True
        if scaled:
            others_S, moments_S = np.zeros(batch.n_steps), np.empty((batch.n_steps, 5))
            others_S[member] = others
            sums_T = _sums_to_go(batch, rho_T, others_S, gamma_token)
            kernels.moments_of_steps(batch.token_offsets, batch.response_mask, sums_T, moments_S)
            del sums_T  # as large as the result, which is allocated next
            spread = _spread(moments_S[member], parts, code_S[member], batch.trajectory_of_step[member])[here]
            divisor_S[at], pays_S[at] = spread + EPSILON, spread > TIE_TOLERANCE
    terms_T = _sums_to_go(batch, rho_T, mean_S, gamma_token)
    zero_S = np.zeros(batch.n_steps)
    factors = (part_S, zero_S, zero_S, divisor_S)
    kernels.scale_tokens(terms_T, factors, batch.token_offsets, batch.response_mask, pays_S, terms_T)
    return terms_T


def _sums_to_go(batch: TrajectoryBatch, rho_T: Floats, mean_S: Floats, gamma_token: float) -> Floats:
    """[T] `sum over trained j' >= j of gamma_token^(j' - j) * (rho_j' - mean)`."""
    from creditflow.credit import kernels

    above_T = np.repeat(mean_S, np.diff(batch.token_offsets))
    np.subtract(rho_T, above_T, out=above_T)
    return kernels.discounted_sums(batch.token_offsets, batch.response_mask, above_T, gamma_token)


def _spread(moments_M: Floats, parts: Floats, code: Ints, trajectory: Ints) -> Floats:
    """[M] the spread over tokens of each member's group, from its steps' moments (`moments_of_steps`) times `parts`.

    Working on moments avoids arrays over all tokens.
    """
    tokens, mean, squares = moments_M[:, 0], parts * moments_M[:, 1], parts**2 * np.maximum(moments_M[:, 2], 0.0)
    cells = cells_of(mean, code, trajectory)
    tokens_C = np.bincount(cells.cell, tokens)
    mean_C = np.bincount(cells.cell, tokens * mean) / tokens_C
    n_G = np.maximum(cells.size_G, 1)
    mean_G = np.bincount(cells.group_C, mean_C, n_G.size) / n_G
    square_C = np.bincount(cells.cell, squares + tokens * (mean - mean_G[code]) ** 2) / tokens_C
    # n/(n-1) times the mean over n trajectories is their sum over n-1.
    total_G = np.bincount(cells.group_C, square_C, n_G.size)
    spread: Floats = np.sqrt(total_G / np.maximum(cells.size_G - 1, 1))[code]
    return spread
