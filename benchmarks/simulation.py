"""Errors and blame in a simulated chain of agents: random trajectories, with credit as in training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from creditflow.credit import CreditOptions, assign
from creditflow.data import Bools, Floats, TrajectoryBatch

AGENTS = ("planner", "executor", "verifier")
"""The planner makes the first step; the others take turns after it."""
TRAJECTORIES = 8
"""Trajectories per task."""


@dataclass(frozen=True)
class Chain:
    """Parameters of a chain of steps, in which each step uses the step before."""

    steps: int
    error: float
    """Probability that a step errs."""
    tasks: int
    recovery: float = 0.0
    """Probability that a step without error makes a right output from wrong input."""


@dataclass(frozen=True, slots=True)
class ChainTrajectories:
    """N simulated trajectories of K steps."""

    own_NK: Bools
    """[N, K] whether the step itself is right."""
    recovers_NK: Bools
    """[N, K] whether a right step makes a right output from wrong input."""
    batch: TrajectoryBatch


def draw(chain: Chain, seed: int = 0) -> ChainTrajectories:
    """Draw trajectories, as a batch with exact scores, and outcomes that are those of the last step."""
    rng = np.random.default_rng(seed)
    n, k = chain.tasks * TRAJECTORIES, chain.steps
    own_NK, recovers_NK = rng.random((n, k)) >= chain.error, rng.random((n, k)) < chain.recovery
    turn_K = np.arange(k)
    batch = TrajectoryBatch.from_arrays(
        trajectory_of_step=np.repeat(np.arange(n), k),
        group_of_trajectory=np.repeat(np.arange(chain.tasks), TRAJECTORIES),
        outcome=_outputs(own_NK, recovers_NK)[:, -1].astype(np.float64),
        agent_of_step=np.tile(np.where(turn_K == 0, 0, 1 + (turn_K - 1) % 2), n),
        agent_names=AGENTS,
        scores=own_NK.ravel().astype(np.float64)[:, None],
        score_names=("verdict",),
    )
    return ChainTrajectories(own_NK, recovers_NK, batch)


def moved_outputs(drawn: ChainTrajectories) -> Floats:
    """[K] the mean number of additional wrong outputs in a trajectory due to an error of the step at this place.

    An intervention: the same trajectories, once with an error there and once without.
    """
    moved = []
    for place in range(drawn.own_NK.shape[1]):
        wrong = []
        for right in (False, True):
            own_NK = drawn.own_NK.copy()
            own_NK[:, place] = right
            wrong.append((~_outputs(own_NK, drawn.recovers_NK)).sum(axis=1).mean())
        moved.append(wrong[0] - wrong[1])
    return np.array(moved)


def amplification(drawn: ChainTrajectories, options: CreditOptions) -> Floats:
    """[K] blame on a whole trajectory due to an error at this place, in units of the blame on the step itself.

    Blame is the negative part of the advantage under `options`. NaN if none or all of the steps there err, or if an
    error adds no blame there.
    """
    right_NK = drawn.own_NK
    advantage_NK = assign(drawn.batch, options).advantage_S.reshape(right_NK.shape)
    blame_NK = np.maximum(-advantage_NK, 0.0)
    return np.array([_amplified(blame_NK, right_NK[:, place], place) for place in range(right_NK.shape[1])])


def _outputs(own_NK: Bools, recovers_NK: Bools) -> Bools:
    """[N, K] whether each step's output is right: the step is right, and its input is right or mended."""
    output_NK = own_NK.copy()
    for place in range(1, own_NK.shape[1]):
        output_NK[:, place] &= output_NK[:, place - 1] | recovers_NK[:, place]
    return output_NK


def _amplified(blame_NK: Floats, right_N: Bools, place: int) -> float:
    if right_N.all() or not right_N.any():
        return float("nan")
    on_itself = blame_NK[~right_N, place].mean() - blame_NK[right_N, place].mean()
    on_all = blame_NK[~right_N].sum(axis=1).mean() - blame_NK[right_N].sum(axis=1).mean()
    return float(on_all / on_itself) if on_itself > 0 else float("nan")
