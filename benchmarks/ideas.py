"""Rules of credit that were tried and are not in the package: for `benchmarks.study`.

`posterior`: a step is paid for the probability that it was right, given its score, how far its scorer can be trusted,
and the outcome. `conditional`: what reaches a step is measured against what reaches steps that fared alike, where a
scored descendant closed its gate and where none did.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from creditflow.credit import Credit, Flow, propagation_rule
from creditflow.credit.propagate import OUTCOME, OUTCOME_TO, PROPAGATION_RULES, SIGNAL
from creditflow.trajectory import Bools, Floats, Ints

_BINS = 4
"""A score is nothing, less than half, more, or full."""
_ROUNDS = 30
_TRUST = 20.0
"""So many steps of an agent weigh as much as what is assumed before any is seen."""
_RIGHT, _SCORES = 0.7, {True: (0.05, 0.05, 0.05, 0.85), False: (0.35, 0.3, 0.25, 0.1)}
"""Assumed before: the share of right steps, and the scores of right steps and of wrong ones."""
_SURVIVES, _SLIPS = 0.1, 0.02
"""Assumed: how often a play survives a wrong step; how often it fails without one."""


@dataclass
class _Rates:
    """Of A agents: what `posterior` learns from a batch."""

    right_A: Floats
    survives_A: Floats
    scores_AZB: Floats
    """[A, 2, bins] how wrong steps (0) and right ones (1) are scored."""


def _right(batch_N: Ints, n: int, agent_S: Ints, bin_S: Ints, passed_N: Floats, known_N: Bools) -> Floats:
    """[S] the probability that a step was right, by expectation and maximization of a noisy AND.

    A step is right with its agent's rate, and scored by a distribution that depends on whether it was. A play fails
    where a wrong step is not survived, each independently, and rarely otherwise. `bin_S`: -1 where there is no score.
    """
    agents = int(agent_S.max()) + 1
    rates = _Rates(
        np.full(agents, _RIGHT),
        np.full(agents, _SURVIVES),
        np.tile([_SCORES[False], _SCORES[True]], (agents, 1, 1)),
    )
    before = replace(rates)
    known_S, passed_S, scored_S = known_N[batch_N], passed_N[batch_N], bin_S >= 0
    for _ in range(_ROUNDS):
        right_S, survives_S = rates.right_A[agent_S], rates.survives_A[agent_S]
        wrong_S = 1.0 - right_S
        likely_SZ = np.where(scored_S[:, None], rates.scores_AZB[agent_S, :, bin_S], 1.0)
        right_S, wrong_S = right_S * likely_SZ[:, 1], wrong_S * likely_SZ[:, 0]
        right_S = right_S / (right_S + wrong_S)
        alive_S = right_S + (1.0 - right_S) * survives_S
        log_N = np.bincount(batch_N, np.log(alive_S), n)
        passes_S = (1.0 - _SLIPS) * np.exp(log_N[batch_N])
        others_S = np.minimum(passes_S / alive_S, 1.0)  # that the play ends well if this step does not end it
        here_S = np.where(passed_S > 0.5, others_S / passes_S, (1.0 - others_S) / np.maximum(1.0 - passes_S, 1e-12))
        here_S = np.where(known_S, here_S, 1.0)
        posterior_S = right_S * here_S
        survived_S = np.where(known_S, (1.0 - right_S) * survives_S * here_S, 0.0)
        wrong_S = 1.0 - posterior_S
        count_A = np.bincount(agent_S, minlength=agents)
        rates.right_A = (np.bincount(agent_S, posterior_S, agents) + _TRUST * before.right_A) / (count_A + _TRUST)
        fatal_A = np.bincount(agent_S, np.where(known_S, wrong_S, 0.0), agents)
        survived_A = np.bincount(agent_S, survived_S, agents)
        rates.survives_A = (survived_A + _TRUST * before.survives_A) / (fatal_A + _TRUST)
        cell_S, cells = agent_S[scored_S] * _BINS + bin_S[scored_S], agents * _BINS
        counts = [np.bincount(cell_S, of_S[scored_S], cells) for of_S in (wrong_S, posterior_S)]
        counts_AZB = np.stack(counts).reshape(2, agents, _BINS).swapaxes(0, 1) + _TRUST * before.scores_AZB
        rates.scores_AZB = counts_AZB / counts_AZB.sum(axis=2, keepdims=True)
    return np.asarray(np.clip(posterior_S, 0.0, 1.0), dtype=np.float64)


def _bins(score_S: Floats) -> Ints:
    """[S] which of the bins a score from 0 to 1 is in."""
    edges = (1e-9, 0.5, 1.0 - 1e-9)
    return np.searchsorted(edges, score_S, side="right")


@propagation_rule("posterior")
def posterior(flow: Flow) -> Credit:
    """`w_r * (p + (1 - p) * s - b)` and the outcome: `s`, what a wrong step of this score is worth."""
    options, batch = flow.options, flow.batch
    if not options.decomposed or options.w_r == 0:
        return PROPAGATION_RULES["none"].credit(flow)
    score_S = flow.own_S / options.w_r + options.sub_reward_origin
    bin_S = np.where(flow.scored_S, _bins(score_S), -1)
    right_S = _right(
        batch.trajectory_of_step,
        batch.n_trajectories,
        batch.agent_of_step,
        bin_S,
        flow.outcome_N,
        flow.outcome_known_N,
    )
    short_S = flow.scored_S & (bin_S < _BINS - 1)
    agents = int(batch.agent_of_step.max()) + 1
    short_A = np.bincount(batch.agent_of_step[short_S], score_S[short_S], agents) / np.maximum(
        np.bincount(batch.agent_of_step[short_S], minlength=agents), 1
    )
    worth_S = np.where(short_S, score_S, short_A[batch.agent_of_step])
    paid_S = options.w_r * (right_S + (1.0 - right_S) * worth_S - options.sub_reward_origin)
    own_S, shared_S = OUTCOME_TO[options.outcome_to](replace(flow, own_S=paid_S))
    nothing_S = np.zeros_like(own_S)
    known_S = flow.outcome_known_N[batch.trajectory_of_step]
    reached_S = (known_S | flow.scored_S) * SIGNAL | known_S * OUTCOME
    return Credit(own_S, nothing_S, shared_S, nothing_S, reached_S)


@propagation_rule("conditional")
def conditional(flow: Flow) -> Credit:
    """`threshold`, whose received part is centered apart where a scored descendant closed and where none did."""
    made = PROPAGATION_RULES["threshold"].credit(flow)
    batch = flow.batch
    closed_S = flow.scored_S & ~flow.open_S
    under_S = np.zeros(batch.n_steps, dtype=np.bool_)
    for child, parent in zip(batch.edge_child[::-1].tolist(), batch.edge_parent[::-1].tolist(), strict=True):
        under_S[parent] |= closed_S[child] | under_S[child]
    cell_S = 2 * batch.agent_of_step + under_S
    cells = 2 * (int(batch.agent_of_step.max()) + 1)
    mean_C = np.bincount(cell_S, made.received_S, cells) / np.maximum(np.bincount(cell_S, minlength=cells), 1)
    return replace(made, received_S=made.received_S - mean_C[cell_S])
