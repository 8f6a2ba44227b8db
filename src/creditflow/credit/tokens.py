"""From steps to tokens: what each response token's own score adds to its step's advantage.

Knows token rewards and groups; not what a step's advantage is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditflow.credit.advantage import EPSILON, sampled_tokens
from creditflow.credit.groups import (
    LEVEL_NAMES,
    POLICY,
    TIE_TOLERANCE,
    cells_of,
    codes_of_level,
    compact,
    leave_one_out_mean,
    spread_of,
)
from creditflow.trajectory import Bools, Floats, Ints, TrajectoryBatch


@dataclass(frozen=True, slots=True)
class Scale:
    """`advantage = weight * ((credit - baseline - shift) / divisor)`, and exactly 0 for steps that do not learn."""

    weight_S: Floats
    baseline_S: Floats
    shift_S: Floats
    divisor_S: Floats
    learns_S: Bools

    def steps(self, credit_S: Floats, otherwise_S: Floats | None = None) -> Floats:
        """[S] the steps' advantages; `otherwise_S` where there is no credit (NaN)."""
        raw_S = self.weight_S * ((credit_S - self.baseline_S - self.shift_S) / self.divisor_S)
        if otherwise_S is not None:
            raw_S = np.where(np.isnan(credit_S), otherwise_S, raw_S)
        return np.where(self.learns_S, raw_S, 0.0)

    def tokens(self, credit_T: Floats, batch: TrajectoryBatch, out_T: NDArray[Any]) -> None:
        """Writes the advantages of tokens that have a credit each; 0 at those that were not sampled."""
        from creditflow.credit import kernels

        factors = (self.weight_S, self.baseline_S, self.shift_S, self.divisor_S)
        kernels.scale_tokens(credit_T, factors, batch.token_offsets, batch.response_mask, self.learns_S, out_T)


def spread_over_tokens(values_S: Floats, batch: TrajectoryBatch, out_T: NDArray[Any]) -> None:
    """Writes the step's value at each response token that the policy sampled, 0 at the others."""
    from creditflow.credit import kernels

    kernels.spread_over_tokens(values_S.astype(out_T.dtype), batch.token_offsets, batch.response_mask, out_T)


def at_first_token(batch: TrajectoryBatch, values_T: Floats, otherwise: Floats | float) -> Floats:
    """[S] the value at each step's first sampled token; `otherwise` where it has none."""
    from creditflow.credit import kernels

    first_S = kernels.first_sampled(batch.token_offsets, batch.response_mask)
    return np.where(first_S >= 0, values_T[first_S] if values_T.size else np.nan, otherwise)


def token_terms(
    batch: TrajectoryBatch,
    rho_T: Floats,
    sub_reward_S: Floats,
    over_S: Bools,
    level_S: Ints,
    stratum_S: Ints,
    *,
    weight: float,
    gamma_token: float,
    scaled: bool,
) -> Floats:
    """[T] `u_j = weight / L * sum over trained j' >= j of gamma_token^(j' - j) * (rho_j' - m)`, by its spread if
    `scaled`.

    m: the mean over the group's other trajectories of their mean sub-reward; L: the mean over the group's trajectories
    of their mean trained length; the spread as that of credit, over tokens. 0 where there is no m, or no spread to
    divide by. Like PRIME (arXiv 2502.01456) a return-to-go against a leave-one-out mean, but a term of its own beside
    the step's.

    `over_S`: trained, scored steps with sampled tokens. `level_S`: the level that each step's baseline was found at,
    see Groups.
    """
    from creditflow.credit import kernels

    offsets, mask_T = batch.token_offsets, batch.response_mask
    length_S = sampled_tokens(batch).astype(np.float64)
    terms_T = np.zeros(rho_T.size)
    for level in np.unique(level_S[over_S & (level_S >= 0)]):
        code_S = _codes(batch, LEVEL_NAMES[level], stratum_S)
        at_S = over_S & (level_S == level)
        mean_S = leave_one_out_mean(sub_reward_S, over_S, code_S, batch.trajectory_of_step)
        lengths = cells_of(length_S[over_S], code_S[over_S], batch.trajectory_of_step[over_S])
        at_S &= ~np.isnan(mean_S)
        # All members of the group make its spread, also those whose own baseline was found at another level.
        member_S = over_S & ~np.isnan(mean_S)
        if not member_S.any():
            continue
        member_T = np.repeat(member_S, np.diff(offsets)) & mask_T
        step_of_T = np.repeat(np.arange(batch.n_steps), np.diff(offsets))
        above_T = np.where(member_T, rho_T - mean_S[step_of_T], 0.0)
        sums_T = kernels.discounted_sums(offsets, member_T, above_T, gamma_token)
        scale_S = np.zeros(batch.n_steps)
        scale_S[member_S] = weight / lengths.mean_G[code_S[member_S]]
        raw_T = scale_S[step_of_T] * sums_T
        if scaled:
            tokens = np.flatnonzero(member_T)
            steps = step_of_T[tokens]
            cells = cells_of(raw_T[tokens], code_S[steps], batch.trajectory_of_step[steps])
            spread = spread_of(cells, code_S[steps], raw_T[tokens] - cells.mean_G[code_S[steps]])[code_S[steps]]
            raw_T[tokens] = np.where(spread > TIE_TOLERANCE, raw_T[tokens] / (spread + EPSILON), 0.0)
        at_T = np.repeat(at_S, np.diff(offsets)) & mask_T
        terms_T[at_T] = raw_T[at_T]
    return terms_T


def _codes(batch: TrajectoryBatch, level: str, stratum_S: Ints) -> Ints:
    return compact(batch.policy_of_step)[0] if level == POLICY else codes_of_level(batch, level, stratum_S)
