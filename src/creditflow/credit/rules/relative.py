"""Common parts of the published rules that compare trajectories themselves, so that their credit is an advantage.

Their credit is a sum of values that are normalised within groups: `GN(x) = (x - mean) / (std + 1e-6)`. Masked steps,
and steps whose scoring failed, are in no group. A step alone in its group, or in a group of equal values, has GN 0.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from creditflow.credit.groups import EPSILON, TIE_TOLERANCE, cells_of, spread_of
from creditflow.credit.records import GATE_OPTIONS
from creditflow.credit.rules.base import OUTCOME, SIGNAL, Credit, PropagationInput, decomposed, lost_upstream
from creditflow.data import Bools, Floats

IGNORED = (*GATE_OPTIONS, "outcome_to", "shared_reward")
"""Options that none of these rules reads."""


def by_steps(inputs: PropagationInput, value_S: Floats, level: str, over_S: Bools) -> Floats:
    """[S] GN of the values within the groups of `level`, over equally weighted steps; 0 outside of `over_S`."""
    result_S, at = np.zeros_like(value_S), np.flatnonzero(over_S)
    if at.size:
        code, value = inputs.columns.code_S(level)[at], value_S[at]
        count_G = np.bincount(code)
        mean_G = np.bincount(code, value) / np.maximum(count_G, 1)
        square_G = np.bincount(code, (value - mean_G[code]) ** 2)
        result_S[at] = _normalised(inputs, value, code, mean_G, np.sqrt(square_G / np.maximum(count_G - 1, 1)))
    return result_S


def by_trajectories(inputs: PropagationInput, value_S: Floats, level: str, over_S: Bools) -> Floats:
    """[S] GN as in `by_steps`; every trajectory has the same weight in its group."""
    result_S, at = np.zeros_like(value_S), np.flatnonzero(over_S)
    if at.size:
        code, value = inputs.columns.code_S(level)[at], value_S[at]
        cells = cells_of(value, code, inputs.batch.trajectory_of_step[at])
        result_S[at] = _normalised(inputs, value, code, cells.mean_G, spread_of(cells, code, value, cells.mean_G))
    return result_S


def _normalised(
    inputs: PropagationInput, value: Floats, code: NDArray[np.int64], mean_G: Floats, spread_G: Floats
) -> Floats:
    divisor_G = spread_G + EPSILON if inputs.options.norm_adv_by_std_in_grpo else np.ones_like(spread_G)
    tied_G = spread_G <= TIE_TOLERANCE * np.maximum(1.0, np.abs(mean_G))
    return np.where(tied_G[code], 0.0, (value - mean_G[code]) / divisor_G[code])


def comparable(inputs: PropagationInput) -> Bools:
    """[S] the steps to compare: not masked, and without a failed score."""
    return ~inputs.masked_S & ~inputs.failed_S


def episode_part(inputs: PropagationInput) -> Floats:
    """[S] GN of the outcome among the rollouts of the task, each with the same weight; 0 without an outcome."""
    return by_trajectories(inputs, inputs.outcome_S, "task", inputs.known_S)


def flow(inputs: PropagationInput, paid_S: Floats, *, outcome_to: str) -> tuple[Floats, Floats]:
    """(own_S, received_S) of the formula in `rules.base` with every gate open, for the pay `paid_S`."""
    options = replace(inputs.options, outcome_to=outcome_to, on_closed_gate="cut")
    credit = decomposed(replace(inputs, paid_S=paid_S, options=options), np.ones_like(paid_S))
    return credit.own_S, credit.received_S


def lost(inputs: PropagationInput) -> Bools:
    """[S] the steps whose return lacks the outcome of an answer step; see `lost_upstream`."""
    return lost_upstream(inputs.batch, inputs.masked_S, np.ones(inputs.batch.n_steps))


def credit_of(
    inputs: PropagationInput,
    own_S: Floats,
    received_S: Floats | None = None,
    shared_S: Floats | None = None,
    frozen_S: Bools | None = None,
) -> Credit:
    """The Credit of a rule that compares trajectories, with a signal at every step of a trajectory that has one.

    Every score of a trajectory is part of the means that its steps are compared with.
    """
    zero_S = np.zeros_like(own_S)
    trajectory_S, n = inputs.batch.trajectory_of_step, inputs.batch.n_trajectories
    outcome_N = np.bincount(trajectory_S, inputs.known_S, n) > 0
    signal_N = outcome_N | (np.bincount(trajectory_S, inputs.scored_S, n) > 0)
    return Credit(
        own_S=own_S,
        received_S=zero_S if received_S is None else received_S,
        shared_S=zero_S if shared_S is None else shared_S,
        withheld_S=zero_S,
        reached_S=signal_N[trajectory_S] * SIGNAL | outcome_N[trajectory_S] * OUTCOME,
        frozen_S=frozen_S,
    )
