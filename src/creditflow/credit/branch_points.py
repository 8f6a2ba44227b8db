"""Draw the decisions at which trajectories branch, with known probabilities and the weights that follow from them.

A trajectory branches at one step at most. The step is drawn from a distribution over its candidates, which may depend
on anything that is recorded: the number of steps, their log-probs, the outcome. A draw that depends on later events
selects the past as well, and the gradient would be biased (by factors of .4 to 1.5 in simulations). The inverse of the
probability p removes the bias: with the weight `w = c / p`, the expected weight of every candidate is c, whatever
happened later. c may depend on the step's agent and turn, and on other trajectories. Here it is the mean probability of
that agent's turn in the other trajectories, so that w is close to 1, and exactly 1 if nothing but agent and turn
decides (stabilized weights; Robins, Hernán and Brumback 2000, "Marginal structural models and causal inference").

Shape suffixes: N trajectories, S steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.errors import ConfigError

_UNIFORM = 0.5
"""The share of the draw that ignores the measure of uncertainty, so that no probability is close to 0."""


@dataclass(frozen=True, slots=True)
class BranchPoints:
    """The decisions that were drawn for N trajectories."""

    step_N: Ints
    """[N] the row of the trajectory's decision; -1: none."""
    probability_S: Floats
    """[S] the probability of drawing each step; 0 for other steps than candidates."""
    weight_S: Floats
    """[S] the weight that a decision has at the step; 1 for other steps than candidates."""


def _random(batch: TrajectoryBatch, candidate_S: Bools, posterior_S: Floats | None) -> Floats:
    return candidate_S.astype(np.float64)


def _agents(batch: TrajectoryBatch, candidate_S: Bools, posterior_S: Floats | None) -> Floats:
    code_S = batch.trajectory_of_step.astype(np.int64) * len(batch.agent_names) + batch.agent_of_step
    count = np.bincount(code_S[candidate_S], minlength=int(code_S.max(initial=0)) + 1)
    return np.where(candidate_S, 1.0 / np.maximum(count[code_S], 1), 0.0)


def _uncertain(batch: TrajectoryBatch, candidate_S: Bools, posterior_S: Floats | None) -> Floats:
    return _with_uniform(batch, candidate_S, mean_surprisal(batch))


def _disputed(batch: TrajectoryBatch, candidate_S: Bools, posterior_S: Floats | None) -> Floats:
    if posterior_S is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.branching.at: disputed needs the posterior of each step being right, and none "
            "is given; use random, agents or uncertain"
        )
    # A step without a posterior counts as undecided.
    return _with_uniform(batch, candidate_S, 1.0 - np.abs(2.0 * np.nan_to_num(posterior_S, nan=0.5) - 1.0))


PREFERENCES: dict[str, Callable[[TrajectoryBatch, Bools, Floats | None], Floats]] = {
    "random": _random,
    "agents": _agents,
    "uncertain": _uncertain,
    "disputed": _disputed,
}
"""`rollout.branching.at`: [S] how likely a candidate is, relative to the others of its trajectory."""


def mean_surprisal(batch: TrajectoryBatch) -> Floats:
    """[S] the mean of -log-prob over the sampled tokens of each step, in nats; 0 for a step without any."""
    step_T = np.repeat(np.arange(batch.n_steps), np.diff(batch.token_offsets))[batch.response_mask]
    count_S = np.bincount(step_T, minlength=batch.n_steps)
    surprisal_S = np.bincount(step_T, -batch.logprobs[batch.response_mask], batch.n_steps)
    return np.asarray(surprisal_S / np.maximum(count_S, 1))


def _with_uniform(batch: TrajectoryBatch, candidate_S: Bools, measure_S: Floats) -> Floats:
    """A mixture of the measure and the uniform distribution over each trajectory's candidates."""
    uniform_S = _within_trajectory(batch, candidate_S.astype(np.float64))
    by_measure_S = _within_trajectory(batch, np.where(candidate_S, measure_S, 0.0))
    return (1.0 - _UNIFORM) * by_measure_S + _UNIFORM * uniform_S


def _within_trajectory(batch: TrajectoryBatch, value_S: Floats) -> Floats:
    """[S] non-negative values divided by their sum over the trajectory; 0 if that is 0."""
    total_S = np.bincount(batch.trajectory_of_step, value_S, batch.n_trajectories)[batch.trajectory_of_step]
    return np.divide(value_S, total_S, out=np.zeros_like(value_S), where=total_S > 0)


def branch_cost(batch: TrajectoryBatch, alternatives: int, continuations: int) -> Floats:
    """[S] the response tokens of a decision at each step, if new steps are as long as the recorded ones."""
    length_S = np.diff(batch.token_offsets).astype(np.float64)
    total_N = np.bincount(batch.trajectory_of_step, length_S, batch.n_trajectories)
    end_N = np.cumsum(total_N)
    from_S = end_N[batch.trajectory_of_step] - (np.cumsum(length_S) - length_S)
    after_S = from_S - length_S
    return (alternatives - 1) * from_S + alternatives * (continuations - 1) * after_S


def choose_branch_points(
    batch: TrajectoryBatch,
    candidate_S: Bools,
    at: str,
    cost_S: Floats,
    tokens_of: Callable[[float], float],
    rng: np.random.Generator,
    posterior_S: Floats | None = None,
) -> BranchPoints:
    """Draw at most one decision of each trajectory, within a budget of expected tokens.

    `candidate_S`: [S] steps at which a trajectory may branch. `at`: a name of PREFERENCES. `cost_S`: see
    `branch_cost`. `tokens_of`: the tokens that branches may take, by the response tokens of the batch. `posterior_S`:
    [S] the probability that the step was right, for `disputed`.

    A trajectory branches with the probability that is affordable for all others, which is nearly the same for each.
    Which ones branch is a systematic draw (Madow 1949), so the number of decisions varies by at most 1; their steps
    are spread evenly. Raises ConfigError for `disputed` without a posterior.
    """
    place_S = _within_trajectory(batch, PREFERENCES[at](batch, candidate_S, posterior_S))
    n = batch.trajectory_of_step
    cost_N = np.bincount(n, place_S * cost_S, batch.n_trajectories)
    tokens_N = np.bincount(n, np.diff(batch.token_offsets), batch.n_trajectories)
    # Each trajectory's rate comes from the others: its later events must not decide about the weight of its tree.
    rate_N = np.array(
        [
            _rate(tokens_of(float(tokens)), float(cost))
            for tokens, cost in zip(tokens_N.sum() - tokens_N, cost_N.sum() - cost_N, strict=True)
        ]
    )
    if batch.n_trajectories == 1:
        rate_N = np.array([_rate(tokens_of(float(tokens_N.sum())), float(cost_N.sum()))])
    probability_S = rate_N[n] * place_S
    weight_S = np.ones(batch.n_steps)
    expected_S = _mean_of_others(batch, candidate_S, place_S)
    known_S = candidate_S & (place_S > 0)
    weight_S[known_S] = expected_S[known_S] / place_S[known_S]
    weight_S[np.isclose(weight_S, 1.0, rtol=1e-12, atol=0.0)] = 1.0  # apart from rounding
    return BranchPoints(_draw(batch, probability_S, rng), probability_S, weight_S)


def _rate(tokens: float, cost: float) -> float:
    """The share of trajectories that branch: the affordable one, at most 1."""
    return min(1.0, max(tokens, 0.0) / cost) if cost > 0 else 0.0


def _mean_of_others(batch: TrajectoryBatch, candidate_S: Bools, value_S: Floats) -> Floats:
    """[S] the mean of candidates' values in other trajectories: at the same agent and turn, else agent, else any."""
    found_S = np.full(batch.n_steps, np.nan)
    every_S, n = np.zeros(batch.n_steps, dtype=np.int64), batch.trajectory_of_step.astype(np.int64)
    turns = int(batch.turn_of_step.max(initial=0)) + 1
    for code_S in (batch.agent_of_step * turns + batch.turn_of_step, batch.agent_of_step, every_S):
        codes = int(code_S.max(initial=0)) + 1
        code, value, own = code_S[candidate_S], value_S[candidate_S], (n * codes + code_S)[candidate_S]
        size = batch.n_trajectories * codes
        count_S = np.bincount(code, minlength=codes)[code_S] - np.bincount(own, minlength=size)[n * codes + code_S]
        sum_S = np.bincount(code, value, codes)[code_S] - np.bincount(own, value, size)[n * codes + code_S]
        at = np.isnan(found_S) & (count_S > 0)
        found_S[at] = sum_S[at] / count_S[at]
    return np.where(np.isnan(found_S), value_S, found_S)


def _draw(batch: TrajectoryBatch, probability_S: Floats, rng: np.random.Generator) -> Ints:
    """[N] one step at most of each trajectory, each with its probability, which sum to 1 at most."""
    n = batch.n_trajectories
    rate_N = np.bincount(batch.trajectory_of_step, probability_S, n)
    order = rng.permutation(n)
    passed = np.floor(np.cumsum(rate_N[order]) + rng.random())
    branches = order[np.diff(passed, prepend=0.0) > 0]
    # A quantile of its own for each trajectory, spread evenly: with one for all, every trajectory would branch at the
    # same step, and the tokens of a training step would vary by a factor of five.
    quantile_N = (rng.permutation(n) + rng.random(n)) / n
    step_N = np.full(n, -1)
    for trajectory in branches.tolist():
        steps = np.flatnonzero((batch.trajectory_of_step == trajectory) & (probability_S > 0))
        below = np.cumsum(probability_S[steps]) / rate_N[trajectory]
        step_N[trajectory] = steps[
            min(int(np.searchsorted(below, quantile_N[trajectory], side="right")), len(steps) - 1)
        ]
    return step_N
