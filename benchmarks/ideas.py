"""Experimental propagation rules outside the package, for `benchmarks.study`.

`posterior`: a step's reward is the probability that it was right, given its score, its scorer's reliability and the
outcome. `conditional`: a step's received credit is centered among steps in the same situation, with or without a scored
descendant whose gate closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from creditflow.credit import Credit, PropagationInput, propagation_rule
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.credit.rules.base import OUTCOME, OUTCOME_TO, SIGNAL
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch

_BINS = 4
"""A score is 0, below half, above half, or full."""
_ROUNDS = 30
_TRUST = 20.0
"""The weight of the prior, in steps of an agent."""
_RIGHT, _SCORES = 0.7, {True: (0.05, 0.05, 0.05, 0.85), False: (0.35, 0.3, 0.25, 0.1)}
"""Prior: the share of right steps, and the score distributions of right and wrong steps."""
_PASSES = 0.5
"""A trajectory with an outcome above this passed."""
_SURVIVES, _SLIPS = 0.1, 0.02
"""Prior: the probability that a trajectory survives a wrong step, and that it fails without one."""


@dataclass(frozen=True)
class Rates:
    """Parameters that `posterior` learns from a batch, for A agents."""

    right_A: Floats
    """The probability that a step is right."""
    survives_A: Floats
    """The probability that a trajectory survives a wrong step."""
    scores_AZB: Floats
    """[A, 2, bins] the score distributions of wrong steps (0) and right steps (1)."""

    @classmethod
    def assumed(cls, agents: int) -> Rates:
        """The prior."""
        scores_AZB = np.tile([_SCORES[False], _SCORES[True]], (agents, 1, 1))
        return cls(np.full(agents, _RIGHT), np.full(agents, _SURVIVES), scores_AZB)


@dataclass(frozen=True)
class Seen:
    """The observed S steps of N trajectories."""

    cell_S: Ints
    agent_S: Ints
    bin_S: Ints
    """Bin of the score; -1: none."""
    passed_N: Bools
    known_N: Bools
    """Whether the trajectory has an outcome."""


def expected(seen: Seen, rates: Rates) -> tuple[Floats, Floats]:
    """[S] the probabilities that a step was right, and that it was wrong and its trajectory survived it.

    A noisy AND: a step is right at its agent's rate, and its score is drawn from the distribution of right or of wrong
    steps. A trajectory fails if it does not survive one of its wrong steps, each independently, and rarely otherwise.
    """
    n, agent_S, scored_S = len(seen.passed_N), seen.agent_S, seen.bin_S >= 0
    likely_SZ = np.where(scored_S[:, None], rates.scores_AZB[agent_S, :, seen.bin_S], 1.0)
    right_S = rates.right_A[agent_S] * likely_SZ[:, 1]
    right_S = right_S / (right_S + (1.0 - rates.right_A[agent_S]) * likely_SZ[:, 0])
    survives_S = rates.survives_A[agent_S]
    alive_S = right_S + (1.0 - right_S) * survives_S
    passes_S = (1.0 - _SLIPS) * np.exp(np.bincount(seen.cell_S, np.log(alive_S), n)[seen.cell_S])
    others_S = np.minimum(passes_S / alive_S, 1.0)  # the probability that the other steps leave the trajectory alive
    here_S = np.where(seen.passed_N[seen.cell_S], others_S / passes_S, (1.0 - others_S) / (1.0 - passes_S))
    here_S = np.where(seen.known_N[seen.cell_S], here_S, 1.0)
    return np.clip(right_S * here_S, 0.0, 1.0), np.clip((1.0 - right_S) * survives_S * here_S, 0.0, 1.0)


def together(batches: Sequence[Seen]) -> Seen:
    """Concatenate the trajectories of several batches."""
    first_B = np.cumsum([0, *(len(seen.passed_N) for seen in batches)])
    return Seen(
        np.concatenate([seen.cell_S + first for seen, first in zip(batches, first_B, strict=False)]),
        *(np.concatenate([getattr(seen, f.name) for seen in batches]) for f in fields(Seen)[1:]),
    )


def learned(seen: Seen) -> Rates:
    """Fit the rates by expectation maximization, regularized by the prior."""
    agents = int(seen.agent_S.max()) + 1
    assumed = rates = Rates.assumed(agents)
    known_S, scored_S = seen.known_N[seen.cell_S], seen.bin_S >= 0
    cell_S = seen.agent_S[scored_S] * _BINS + seen.bin_S[scored_S]

    def share(part_S: Floats, whole_S: Floats, assumed_A: Floats) -> Floats:
        part_A, whole_A = (np.bincount(seen.agent_S, of_S, agents) for of_S in (part_S, whole_S))
        return np.asarray((part_A + _TRUST * assumed_A) / (whole_A + _TRUST))

    for _ in range(_ROUNDS):
        right_S, survived_S = expected(seen, rates)
        wrong_S = 1.0 - right_S
        counts = [np.bincount(cell_S, of_S[scored_S], agents * _BINS) for of_S in (wrong_S, right_S)]
        counts_AZB = np.stack(counts).reshape(2, agents, _BINS).swapaxes(0, 1) + _TRUST * assumed.scores_AZB
        rates = Rates(
            share(right_S, np.ones_like(right_S), assumed.right_A),
            share(survived_S * known_S, wrong_S * known_S, assumed.survives_A),
            counts_AZB / counts_AZB.sum(axis=2, keepdims=True),
        )
    return rates


_lately: deque[Seen] = deque(maxlen=8)
"""Recent batches, which the rates are learned from. Each run has a separate process."""
_agents: list[str] = []


def _same_codes(batch: TrajectoryBatch) -> Ints:
    """[S] agent codes that are the same in every batch."""
    _agents.extend(name for name in batch.agent_names if name not in _agents)
    return np.array([_agents.index(name) for name in batch.agent_names])[batch.agent_of_step]


def _bins(score_S: Floats) -> Ints:
    """[S] the bin of each score in [0, 1]."""
    edges = (1e-9, 0.5, 1.0 - 1e-9)
    return np.searchsorted(edges, score_S, side="right")


def posterior(inputs: PropagationInput) -> Credit:
    """`w_r * (p + (1 - p) * s - b)` and the outcome; `s` is the worth of a wrong step with this score."""
    options, batch = inputs.options, inputs.batch
    if not options.decomposed or options.w_r == 0:
        return PROPAGATION_RULES["none"].credit(inputs)
    score_S = inputs.own_S / options.w_r + options.sub_reward_origin
    bin_S = np.where(inputs.scored_S, _bins(score_S), -1)
    passed_N, known_N = np.zeros((2, batch.n_trajectories), dtype=np.bool_)
    passed_N[batch.trajectory_of_step] = inputs.outcome_S > _PASSES
    known_N[batch.trajectory_of_step] = inputs.outcome_known_S
    seen = Seen(batch.trajectory_of_step, _same_codes(batch), bin_S, passed_N, known_N)
    _lately.append(seen)
    right_S, _ = expected(seen, learned(together(_lately)))
    short_S = inputs.scored_S & (bin_S < _BINS - 1)
    agents = int(batch.agent_of_step.max()) + 1
    short_A = np.bincount(batch.agent_of_step[short_S], score_S[short_S], agents) / np.maximum(
        np.bincount(batch.agent_of_step[short_S], minlength=agents), 1
    )
    worth_S = np.where(short_S, score_S, short_A[batch.agent_of_step])
    paid_S = options.w_r * (right_S + (1.0 - right_S) * worth_S - options.sub_reward_origin)
    own_S, shared_S = OUTCOME_TO[options.outcome_to](replace(inputs, own_S=paid_S))
    nothing_S = np.zeros_like(own_S)
    reached_S = (inputs.outcome_known_S | inputs.scored_S) * SIGNAL | inputs.outcome_known_S * OUTCOME
    return Credit(own_S, nothing_S, shared_S, nothing_S, reached_S)


def conditional(inputs: PropagationInput) -> Credit:
    """`threshold`, with received credit centered separately for steps with and without a closed scored descendant."""
    made = PROPAGATION_RULES["threshold"].credit(inputs)
    batch = inputs.batch
    closed_S = inputs.scored_S & ~inputs.open_S
    under_S = np.zeros(batch.n_steps, dtype=np.bool_)
    for child, parent in zip(batch.edge_child[::-1].tolist(), batch.edge_parent[::-1].tolist(), strict=True):
        under_S[parent] |= closed_S[child] | under_S[child]
    cell_S = 2 * batch.agent_of_step + under_S
    cells = 2 * (int(batch.agent_of_step.max()) + 1)
    mean_C = np.bincount(cell_S, made.received_S, cells) / np.maximum(np.bincount(cell_S, minlength=cells), 1)
    return replace(made, received_S=made.received_S - mean_C[cell_S])


def forget() -> None:
    """Forget the recent batches of `posterior`, before batches of another run."""
    _lately.clear()


def register() -> None:
    """Register both rules for recipes of this process."""
    for rule in (posterior, conditional):
        if rule.__name__ not in PROPAGATION_RULES.names():
            propagation_rule(rule.__name__)(rule)
