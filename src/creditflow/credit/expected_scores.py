"""Expected sub-rewards, for `algorithm.propagation: posterior`.

The sub-reward of a step is replaced with its expectation given all scores of the trajectory and the outcome,

    x_t = p_t + (1 - p_t) * v_t

p_t is the probability that the step was right (did no harm) in the model of `creditflow.credit.step_posteriors`. v_t,
the sub-reward of a wrong step, is the step's own sub-reward if below 1, else the mean of its agent's sub-rewards below
1 in the batch, or 0 without any. The rates of harm and survival and the distributions of scores are learned by
expectation maximization (Dempster, Laird, Rubin 1977) over this and the last seven batches. It starts from the prior
and ends after a fixed number of rounds: an agent without scores has rates that the data do not determine, and such
rates stay near the prior.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from creditflow.credit.history import WINDOW, Observations
from creditflow.credit.step_posteriors import (
    BINS,
    SLIP,
    TRUST,
    Rates,
    bins,
    cells_of,
    counts_of,
    harm_and_scores,
    numbered,
    step_posteriors,
)
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch

_HARM, _SURVIVES = 0.3, 0.1
"""Prior probabilities that a step does harm, and that a trajectory survives a harm."""
_ROUNDS = 30
_LEARNED_STEPS = 65_536
"""Rates are learned from whole trajectories with about this many steps at most, the newest batches first."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedScores:
    """Expected sub-rewards of S steps, and the rates behind them."""

    value_S: Floats
    """[S] x_t; NaN for a masked step, and for an unscored one without a known outcome, for which there is no evidence.
    """
    harmless_S: Floats
    """[S] p_t; NaN where `value_S` is."""
    rates: Rates
    observed: Observations
    """The part of the batch from which rates are learned, for the history."""


def expected_scores(
    batch: TrajectoryBatch,
    success_S: Floats,
    known_S: Bools,
    kept_S: Bools,
    masked_S: Bools,
    sub_reward_S: Floats,
    scored_S: Bools,
    before: Sequence[Observations],
) -> ExpectedScores:
    """Learn the rates and compute the expected sub-reward of every step.

    `success_S`, `known_S`: [S] the outcome of the step's agent, from 0 to 1, and whether it is known. `kept_S`: [S]
    steps that are compared and not masked; `masked_S`: [S] masked steps. `sub_reward_S`, `scored_S`: [S] sub-rewards,
    read where scored. `before`: the observations of earlier batches.
    """
    bin_S = np.where(scored_S, bins(np.where(scored_S, sub_reward_S, 0.0)), -1)
    at = np.flatnonzero(kept_S)
    cell_S = cells_of(batch, at)
    observed = _thinned(
        batch.agent_names,
        cell_S,
        batch.agent_of_step[at],
        bin_S[at],
        np.where(known_S, success_S, -1.0)[at],
    )
    names, rates = _learned([*before, observed], batch.agent_names)
    assert names[: len(batch.agent_names)] == batch.agent_names
    harmless_S = np.full(batch.n_steps, np.nan)
    if len(at):
        agent_S = batch.agent_of_step[at]
        found = step_posteriors(rates, cell_S, agent_S, bin_S[at], success_S[at], known_S[at])
        harmless_S[at] = found.harmless_S
    harmless_S[~(scored_S | known_S)] = np.nan
    worth_S = worth_if_wrong(batch, sub_reward_S, scored_S, masked_S)
    return ExpectedScores(harmless_S + (1.0 - harmless_S) * worth_S, harmless_S, rates, observed)


def worth_if_wrong(batch: TrajectoryBatch, sub_reward_S: Floats, scored_S: Bools, masked_S: Bools) -> Floats:
    """[S] v_t: the step's own sub-reward if below 1, else its agent's mean below 1 over steps that are not masked.

    `scored_S`: [S] steps whose sub-reward counts.
    """
    agent_S, agents = batch.agent_of_step, len(batch.agent_names)
    score_S = np.where(scored_S, sub_reward_S, 1.0)
    below_S = scored_S & (bins(score_S) < BINS - 1)
    among = np.flatnonzero(below_S & ~masked_S)
    count_A = np.bincount(agent_S[among], minlength=agents)
    mean_A = np.bincount(agent_S[among], score_S[among], agents) / np.maximum(count_A, 1)
    return np.where(below_S, score_S, mean_A[agent_S])


def _thinned(names: tuple[str, ...], cell_S: Ints, agent_S: Ints, bin_S: Ints, success_S: Floats) -> Observations:
    """The observations of every k-th trajectory, with the smallest k that leaves few enough steps."""
    every = -(-len(cell_S) // _LEARNED_STEPS) or 1
    taken = np.flatnonzero(cell_S % every == 0)
    cell = numbered(cell_S[taken])
    first = np.zeros(int(cell.max()) + 1 if len(cell) else 0, dtype=np.int64)
    first[cell] = taken
    return Observations(names, cell, agent_S[taken].astype(np.int64), bin_S[taken], success_S[first])


def _learned(batches: Sequence[Observations], names: tuple[str, ...]) -> tuple[tuple[str, ...], Rates]:
    """The names of all agents, those of this batch first, and their rates."""
    some: list[Observations] = []
    steps = 0
    for one in reversed(batches[-WINDOW:]):  # newest first
        steps += len(one.cell_S)
        if some and steps > _LEARNED_STEPS:
            break
        some.append(one)
    names = tuple(dict.fromkeys((*names, *(name for one in reversed(some) for name in one.agents))))
    code_of = {name: code for code, name in enumerate(names)}
    cells = np.cumsum([0, *(len(one.success_C) for one in some)])
    cell_S = np.concatenate([one.cell_S + first for one, first in zip(some, cells, strict=False)])
    agent_S = np.concatenate([np.array([code_of[name] for name in one.agents])[one.agent_S] for one in some])
    bin_S = np.concatenate([one.bin_S for one in some])
    success_S = np.concatenate([one.success_C for one in some])[cell_S]
    known_S = success_S >= 0.0
    rates = _rates(np.zeros((len(names), 2, 1 + BINS)), np.zeros((len(names), 2)))
    for _ in range(_ROUNDS if len(cell_S) else 0):
        found = step_posteriors(rates, cell_S, agent_S, bin_S, success_S, known_S)
        harms = (found.survived_S * known_S, (1.0 - found.harmless_S) * known_S)
        survivals_A2: Floats = np.stack([np.bincount(agent_S, weight_S, len(names)) for weight_S in harms], axis=1)
        rates = _rates(counts_of(found, agent_S, bin_S, len(names)), survivals_A2)
    return names, rates


def _rates(counts_AZB: Floats, survivals_A2: Floats) -> Rates:
    """`survivals_A2`: [A, 2] the expected harms that were survived, and all harms, in trajectories with an outcome."""
    harm_A, score_AZB = harm_and_scores(counts_AZB, _HARM)
    survives_A = (survivals_A2[:, 0] + TRUST * _SURVIVES) / (survivals_A2[:, 1] + TRUST)
    return Rates(harm_A, score_AZB, survives_A, SLIP)
