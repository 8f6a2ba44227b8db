"""Shapley values: each agent's contribution to an outcome, from replays in which some agents were replaced.

The players of the game are the A agents. The value of a coalition is the expected outcome if its agents act as recorded
and a baseline acts for the others; the value of the full team is the recorded outcome. Coalitions are integers: bit a
is set if agent a is a member. `rollout.replay` runs the replays.

Shape suffixes: A agents, C coalitions, P replays, O orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import factorial
from typing import Any

import numpy as np

from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.errors import BatchError

KEY = "counterfactual"
"""The key in `trajectory.info` of the values measured in training, as `Values.to_json`."""
EXACT_UP_TO = 4
"""Largest team with replays of all its coalitions."""
_MOST = 62
"""Largest team: coalitions are integers of 64 bits."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The coalitions to replay for one trajectory."""

    agents: int
    coalition_P: Ints
    """[P] the coalition of each replay. Up to four agents: all except the full team, repeatedly. For larger teams:
    [O, A] flattened, the coalitions that the agents of each of O orders join, the empty one first."""
    order_OA: Ints | None = None
    """[O, A] the joining agents of each order; None if all coalitions are replayed."""


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """The contributions of A agents to one trajectory's outcome, in units of the outcome; NaN: unknown."""

    shapley_A: Floats
    """[A] the mean, over all joining orders of the team, of the gain from the agent's joining (Shapley 1953, "A value
    for n-person games"). The values sum to the outcome minus the value of the empty coalition."""
    shapley_se_A: Floats
    """[A] standard error, from the variance between replays of a coalition or between orders; NaN if there is one only.
    """
    left_out_A: Floats
    """[A] the outcome minus the value of the team without the agent."""
    left_out_se_A: Floats
    rollouts: int
    agents: tuple[str, ...] = ()
    """The names of the agents."""

    @property
    def known(self) -> bool:
        """Whether all Shapley values are known."""
        return bool(np.isfinite(self.shapley_A).all())

    def to_json(self) -> dict[str, Any]:
        """The values by column and agent; unknown ones are null."""
        columns = {name: getattr(self, f"{name}_A").tolist() for name in _COLUMNS}
        named = {
            column: {agent: value if np.isfinite(value) else None for agent, value in zip(self.agents, of, strict=True)}
            for column, of in columns.items()
        }
        return {**named, "rollouts": self.rollouts}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Values:
        """The inverse of `to_json`."""
        agents = tuple(said["shapley"])
        shapley_A, shapley_se_A, left_out_A, left_out_se_A = (
            np.array([said[name][agent] for agent in agents], dtype=np.float64) for name in _COLUMNS
        )
        return cls(shapley_A, shapley_se_A, left_out_A, left_out_se_A, said["rollouts"], agents)


_COLUMNS = ("shapley", "shapley_se", "left_out", "left_out_se")


def least_rollouts(agents: int) -> int:
    """The smallest budget of `plan`."""
    return 2**agents - 1 if agents <= EXACT_UP_TO else agents**2


def plan(agents: int, budget: int, rng: np.random.Generator) -> Plan:
    """Plan at most `budget` replays of a trajectory with `agents` agents.

    Up to four agents: every coalition except the full team, repeated within the budget. For larger teams: random
    orders, each with its A rotations, so that each agent takes every position once; A * A replays for each such block.
    Raises ValueError if the budget does not suffice for one pass, or for more than 62 agents.
    """
    if budget < (least := least_rollouts(agents)):
        raise ValueError(f"expected at least {least} rollouts for {agents} agents, got {budget}")
    if agents > _MOST:
        raise ValueError(f"expected at most {_MOST} agents, got {agents}")
    if agents <= EXACT_UP_TO:
        coalitions = 2**agents - 1
        return Plan(agents, np.tile(np.arange(coalitions), budget // max(coalitions, 1)))
    drawn = [rng.permutation(agents) for _ in range(budget // agents**2)]
    order_OA = np.array([np.roll(order, shift) for order in drawn for shift in range(agents)])
    joined_OA = np.cumsum(1 << order_OA, axis=1)
    return Plan(agents, np.column_stack([np.zeros(len(order_OA), np.int64), joined_OA[:, :-1]]).ravel(), order_OA)


def values(plan: Plan, whole: float, outcome_P: Floats, agents: tuple[str, ...] = ()) -> Values:
    """Compute the values from the outcomes of a plan's replays.

    `whole`: the recorded outcome; `outcome_P`: [P] outcomes of the replays, NaN for failed ones, which are left out. A
    value that needs a coalition without successful replays is NaN.
    """
    made = _exact(plan, whole, outcome_P) if plan.order_OA is None else _sampled(plan.order_OA, whole, outcome_P)
    shapley_A, shapley_se_A, left_out_A, left_out_se_A = made
    return Values(shapley_A, shapley_se_A, left_out_A, left_out_se_A, len(outcome_P), agents)


def values_of_agents(plan: Plan, whole_A: Floats, outcome_PA: Floats, agents: tuple[str, ...]) -> Values:
    """The values of each agent in the game of its outcome; with equal outcomes those of `values`.

    `whole_A`: [A] recorded outcomes, NaN for a failed one, which gives the agent the value 0: its steps are masked.
    `outcome_PA`: [P, A] outcomes of the replays.
    """
    games = [values(plan, float(whole), outcome_PA[:, a]) for a, whole in enumerate(whole_A)]
    columns = (np.array([getattr(game, f"{name}_A")[a] for a, game in enumerate(games)]) for name in _COLUMNS)
    shapley_A, shapley_se_A, left_out_A, left_out_se_A = (np.where(np.isnan(whole_A), 0.0, one_A) for one_A in columns)
    return Values(shapley_A, shapley_se_A, left_out_A, left_out_se_A, len(outcome_PA), agents)


def _exact(plan: Plan, whole: float, outcome_P: Floats) -> tuple[Floats, ...]:
    last = 2**plan.agents - 1
    seen_P = np.isfinite(outcome_P)
    code_P, found_P = plan.coalition_P[seen_P], outcome_P[seen_P]
    count_C = np.bincount(code_P, minlength=last + 1).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_C = np.bincount(code_P, found_P, last + 1) / count_C
        square_C = np.bincount(code_P, (found_P - mean_C[code_P]) ** 2, last + 1)
        error_C = np.where(count_C > 1, square_C / (count_C - 1) / count_C, np.nan)  # squared
    mean_C[last], error_C[last] = whole, 0.0
    shapley_AC, left_out_AC = _weights(plan.agents)
    return (
        shapley_AC @ mean_C,
        np.sqrt(shapley_AC**2 @ error_C),
        _times(left_out_AC, mean_C),
        np.sqrt(_times(left_out_AC**2, error_C)),
    )


def _weights(n: int) -> tuple[Floats, Floats]:
    """[A, C] the weights of coalition values in the Shapley values, and in the left-out values."""
    shapley_AC, left_out_AC = np.zeros((n, 2**n)), np.zeros((n, 2**n))
    for agent in range(n):
        for coalition in (c for c in range(2**n) if not c >> agent & 1):
            size = coalition.bit_count()
            weight = factorial(size) * factorial(n - size - 1) / factorial(n)
            shapley_AC[agent, coalition | 1 << agent] = weight
            shapley_AC[agent, coalition] = -weight
        left_out_AC[agent, -1], left_out_AC[agent, 2**n - 1 - (1 << agent)] = 1.0, -1.0
    return shapley_AC, left_out_AC


def _times(weight_AC: Floats, value_C: Floats) -> Floats:
    """[A] the product `weight_AC @ value_C`, ignoring NaN values of weight 0."""
    return np.asarray(np.where(weight_AC == 0, 0.0, weight_AC * value_C).sum(axis=1))


def _sampled(order_OA: Ints, whole: float, outcome_P: Floats) -> tuple[Floats, ...]:
    orders, n = order_OA.shape
    before_OA = outcome_P.reshape(orders, n)
    after_OA = np.column_stack([before_OA[:, 1:], np.full(orders, whole)])
    added_OA = np.take_along_axis(after_OA - before_OA, np.argsort(order_OA, axis=1), axis=1)  # by agent
    last_OA = np.where(order_OA[:, -1:] == np.arange(n), added_OA, np.nan)
    return (*_mean_and_error(added_OA), *_mean_and_error(last_OA))


def _mean_and_error(value_OA: Floats) -> tuple[Floats, Floats]:
    there_OA = np.isfinite(value_OA)
    count_A = there_OA.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_A = np.where(there_OA, value_OA, 0.0).sum(axis=0) / count_A
        square_A = np.where(there_OA, (value_OA - mean_A) ** 2, 0.0).sum(axis=0)
        error_A = np.where(count_A > 1, np.sqrt(square_A / (count_A - 1) / count_A), np.nan)
    return mean_A, error_A


def of_trajectory(batch: TrajectoryBatch, n: int, *, left_out: bool = False) -> dict[str, float]:
    """The Shapley or the left-out values of trajectory `n` by agent. Raises BatchError if they were not measured.

    A left-out value is NaN if all replays without the agent failed; then the others may still be known.
    Agents without replays (frozen, or behind an endpoint) have no entry and add nothing.
    """
    try:
        found = Values.from_json(batch.trajectory_info[n][KEY])
    except (KeyError, TypeError, ValueError):  # missing, or an entry of another format
        found = None
    if found is None or not (left_out or found.known):
        what, rule = ("left-out", "leave_one_out") if left_out else ("Shapley", "shapley")
        raise BatchError(
            f"trajectory {batch.trajectory_ids[n]}: expected {what} values, found none; they are measured in "
            f"training, on the embedded engine with algorithm.propagation: {rule}"
        )
    value_A = found.left_out_A if left_out else found.shapley_A
    return dict(zip(found.agents, value_A.tolist(), strict=True))


def of_steps(batch: TrajectoryBatch, known_S: Bools, *, left_out: bool = False) -> Floats:
    """[S] the value of each step's agent in its trajectory, see `of_trajectory`; 0 if its outcome is unknown."""
    by_trajectory = {
        n: of_trajectory(batch, n, left_out=left_out) for n in np.unique(batch.trajectory_of_step[known_S]).tolist()
    }
    steps = zip(batch.trajectory_of_step.tolist(), batch.agent_of_step.tolist(), known_S.tolist(), strict=True)
    return np.array(
        [by_trajectory[n].get(batch.agent_names[a], 0.0) if known else 0.0 for n, a, known in steps], dtype=np.float64
    )
