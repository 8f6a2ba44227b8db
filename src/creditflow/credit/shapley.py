"""What each agent of a team added to an outcome, from plays in which some of them were replaced.

A game has A players, the agents. The value of a coalition is the outcome to be expected where the agents in it act as
they did and a baseline acts for the others; that of all A is the outcome that was. Coalitions are numbers: bit a is
set where agent a is in it. Knows no play; `rollout.replay` makes them.

Shape suffixes: A agents, C coalitions, P plays, O orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import factorial
from typing import Any

import numpy as np

from creditflow.errors import BatchError
from creditflow.trajectory import Bools, Floats, Ints, TrajectoryBatch

KEY = "counterfactual"
"""Where `trajectory.info` has what training measured: `Values.to_json`."""
EXACT_UP_TO = 4
"""Agents whose coalitions are all played."""
_MOST = 62
"""Agents, of which a coalition is a number of 64 bits."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which coalitions are to be played for one trajectory."""

    agents: int
    coalition_P: Ints
    """[P] one for each play. Up to four agents: all but the whole team, again and again. Beyond: [O, A], of each of O
    orders the coalitions that an agent joins, the empty one first."""
    order_OA: Ints | None = None
    """[O, A] who joins; None where all coalitions are played."""


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """What each of A agents added to one trajectory's outcome, in units of the outcome; NaN: not known."""

    shapley_A: Floats
    """The mean over all orders in which a team can come together of what the agent adds when it joins (Shapley 1953, "A
    value for n-person games"). Their sum is the outcome minus what the baseline alone comes to."""
    shapley_se_A: Floats
    """Standard error, from how much plays of the same coalition, or orders, differ; NaN where there is one."""
    left_out_A: Floats
    """Outcome minus what the others come to without the agent."""
    left_out_se_A: Floats
    plays: int
    agents: tuple[str, ...] = ()
    """Their names."""

    @property
    def known(self) -> bool:
        """Whether all Shapley values are."""
        return bool(np.isfinite(self.shapley_A).all())

    def to_json(self) -> dict[str, Any]:
        """By column and agent; what is not known is null."""
        columns = {name: getattr(self, f"{name}_A").tolist() for name in _COLUMNS}
        named = {
            column: {agent: value if np.isfinite(value) else None for agent, value in zip(self.agents, of, strict=True)}
            for column, of in columns.items()
        }
        return {**named, "plays": self.plays}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Values:
        """The inverse of `to_json`."""
        agents = tuple(said["shapley"])
        shapley_A, shapley_se_A, left_out_A, left_out_se_A = (
            np.array([said[name][agent] for agent in agents], dtype=np.float64) for name in _COLUMNS
        )
        return cls(shapley_A, shapley_se_A, left_out_A, left_out_se_A, said["plays"], agents)


_COLUMNS = ("shapley", "shapley_se", "left_out", "left_out_se")


def least_plays(agents: int) -> int:
    """The smallest budget of `plan`."""
    return 2**agents - 1 if agents <= EXACT_UP_TO else agents**2


def plan(agents: int, budget: int, rng: np.random.Generator) -> Plan:
    """How to spend at most `budget` plays on a trajectory of so many agents.

    Up to four agents: every coalition but the whole team, as often as the budget allows. Beyond: random orders, each
    with its A rotations (each agent is then once in every place), A * A plays for each such block. Raises ValueError
    where the budget does not allow that once, or there are more than 62 agents.
    """
    if budget < (least := least_plays(agents)):
        raise ValueError(f"expected at least {least} plays for {agents} agents, got {budget}")
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
    """What plays of a plan say. `whole`: the outcome that was; `outcome_P`: NaN where a play failed.

    A failed play is left out; a value that needs a coalition of which no play is left is NaN.
    """
    made = _exact(plan, whole, outcome_P) if plan.order_OA is None else _sampled(plan.order_OA, whole, outcome_P)
    shapley_A, shapley_se_A, left_out_A, left_out_se_A = made
    return Values(shapley_A, shapley_se_A, left_out_A, left_out_se_A, len(outcome_P), agents)


def _exact(plan: Plan, whole: float, outcome_P: Floats) -> tuple[Floats, ...]:
    last = 2**plan.agents - 1
    played_P = np.isfinite(outcome_P)
    code_P, found_P = plan.coalition_P[played_P], outcome_P[played_P]
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
    """[A, C] how coalitions' values make Shapley values, and what leaving an agent out costs."""
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
    """The product, in which a value that is not there matters only where it has a weight."""
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


def of_trajectory(batch: TrajectoryBatch, n: int) -> dict[str, float]:
    """The Shapley value of each agent in trajectory `n`; one that nothing was played for (frozen, or behind an
    endpoint) is not in it, and adds nothing. Raises BatchError where values were not measured.
    """
    try:
        found = Values.from_json(batch.trajectory_info[n][KEY])
    except (KeyError, TypeError, ValueError):  # not there, or somebody else's entry of that name
        found = None
    if found is None or not found.known:
        raise BatchError(
            f"trajectory {batch.trajectory_ids[n]}: expected Shapley values, found none; they are measured in "
            "training, on the embedded engine with algorithm.propagation: shapley"
        )
    return dict(zip(found.agents, found.shapley_A.tolist(), strict=True))


def of_steps(batch: TrajectoryBatch, known_N: Bools) -> Floats:
    """[S] the Shapley value of each step's agent in its trajectory; 0 where the outcome is not known."""
    asked = np.zeros(batch.n_trajectories, dtype=np.bool_)
    asked[batch.trajectory_of_step] = True  # a play that ended before its first step has no agents
    values_N = [of_trajectory(batch, n) if ask else {} for n, ask in enumerate((asked & known_N).tolist())]
    steps = zip(batch.trajectory_of_step.tolist(), batch.agent_of_step.tolist(), strict=True)
    return np.array([values_N[n].get(batch.agent_names[a], 0.0) for n, a in steps], dtype=np.float64)
