"""The base class of published rules that compare trajectories themselves, so that their credit is an advantage.

Their credit is a sum of values that are normalised within groups: `GN(x) = (x - mean) / (std + 1e-6)`. Masked steps,
and steps whose scoring failed, are in no group. A step alone in its group, or in a group of equal values, has GN 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from creditflow.credit.groups import EPSILON, TIE_TOLERANCE, cells_of, group_codes
from creditflow.credit.records import Credit, RuleInput, weight
from creditflow.credit.rules.base import ScoreRule, answer_part, bits, flow_up
from creditflow.data import Bools, Floats, Ints


@dataclass(frozen=True)
class RelativeRule(ScoreRule):
    """A rule whose credit is an advantage. It needs `algorithm.adv_estimator: relative`."""

    relative: ClassVar[bool] = True

    w_o: float = weight(1.0)
    """Weight of the outcome in returns, at least 0."""

    def returns(self, inputs: RuleInput, own_S: Floats) -> Floats:
        """[S] the own rewards and the outcome at the answer, summed along edges by the formula with every gate open."""
        own_S = own_S + answer_part(inputs.batch, self.w_o * inputs.rewards.outcome_S)
        return own_S + flow_up(inputs.batch, own_S, np.ones_like(own_S), inputs.options.gamma)


@dataclass(frozen=True)
class WeightedRule(RelativeRule):
    """A rule that adds the part of a step to the part of the whole trajectory."""

    step_weight: float = weight(1.0)
    """Weight of the part of a step, at least 0."""
    episode_weight: float = weight(1.0)
    """Weight of the part of the whole trajectory, at least 0."""

    def episode_S(self, inputs: RuleInput) -> Floats:
        """[S] `episode_weight * GN(R)` among the rollouts of the task, each with the same weight; 0 without outcome."""
        outcome_S, known_S = inputs.rewards.outcome_S, inputs.rewards.known_S
        result_S, at = np.zeros_like(outcome_S), np.flatnonzero(known_S)
        if at.size:
            code, value = codes_at(inputs, "task")[at], outcome_S[at]
            cells = cells_of(value, code, inputs.batch.trajectory_of_step[at])
            result_S[at] = _normalised(inputs, value, code, cells.mean_G, cells.spread_G)
        return self.episode_weight * result_S


def codes_at(inputs: RuleInput, level: str) -> Ints:
    """[S] group codes at `level`."""
    return group_codes(inputs.batch, level, inputs.options.max_version_lag, inputs.rewards.stratum_S)


def by_steps(inputs: RuleInput, value_S: Floats, level: str, over_S: Bools) -> Floats:
    """[S] GN of the values within the groups of `level`, over equally weighted steps; 0 outside of `over_S`."""
    result_S, at = np.zeros_like(value_S), np.flatnonzero(over_S)
    if at.size:
        code, value = codes_at(inputs, level)[at], value_S[at]
        count_G = np.bincount(code)
        mean_G = np.bincount(code, value) / np.maximum(count_G, 1)
        square_G = np.bincount(code, (value - mean_G[code]) ** 2)
        result_S[at] = _normalised(inputs, value, code, mean_G, np.sqrt(square_G / np.maximum(count_G - 1, 1)))
    return result_S


def _normalised(inputs: RuleInput, value: Floats, code: NDArray[np.int64], mean_G: Floats, spread_G: Floats) -> Floats:
    divisor_G = spread_G + EPSILON if inputs.options.norm_adv_by_std_in_grpo else np.ones_like(spread_G)
    tied_G = spread_G <= TIE_TOLERANCE * np.maximum(1.0, np.abs(mean_G))
    return np.where(tied_G[code], 0.0, (value - mean_G[code]) / divisor_G[code])


def comparable(inputs: RuleInput) -> Bools:
    """[S] the steps to compare: not masked, and without a failed score."""
    return ~inputs.rewards.masked_S & ~(inputs.rewards.failed_S & inputs.options.decomposed)


def scored(inputs: RuleInput) -> Bools:
    """[S] whether the step has a score that enters credit."""
    return inputs.rewards.scored_S & inputs.options.decomposed


def credit_of(
    inputs: RuleInput,
    own_S: Floats,
    received_S: Floats | None = None,
    shared_S: Floats | None = None,
    misled_S: Bools | None = None,
) -> Credit:
    """The Credit of a rule that compares trajectories, with a signal at every step of a trajectory that has one.

    Every score of a trajectory is part of the means that its steps are compared with.
    """
    received_S, shared_S = (np.zeros_like(own_S) if of_S is None else of_S for of_S in (received_S, shared_S))
    trajectory_S, n = inputs.batch.trajectory_of_step, inputs.batch.n_trajectories
    outcome_N = np.bincount(trajectory_S, inputs.rewards.known_S, n) > 0
    signal_N = outcome_N | (np.bincount(trajectory_S, scored(inputs), n) > 0)
    reached_S = bits(signal_N[trajectory_S], outcome_N[trajectory_S])
    return Credit(own_S, received_S, shared_S, reached_S, misled_S=misled_S)
