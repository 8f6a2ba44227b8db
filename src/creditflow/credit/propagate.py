"""Propagation rules: from a step's own reward and the outcome to the credit that it is held responsible for.

A rule sees rewards, gates and who used whose output. It does not know how rewards were measured, nor what baseline
its credit will be held against.

All rules but the shared ones are one formula (h, below) with different gates. It is evaluated position by position from
the last to the first, for all trajectories at once: at one position a trajectory has one step, whose parents are
distinct, so a slice of edges never writes to the same parent twice, and the cost is linear in steps and edges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from creditflow.credit.registry import Registry
from creditflow.trajectory import Bools, Floats, Ints, TrajectoryBatch

if TYPE_CHECKING:
    from creditflow.credit.options import CreditOptions


@dataclass(frozen=True, slots=True)
class Flow:
    """What a rule may look at."""

    batch: TrajectoryBatch
    options: CreditOptions
    own_S: Floats
    """[S] `w_r * (r_t - b)`; 0 for steps without an own reward."""
    has_own_S: Bools
    """[S] whether the step has one (scored, or a mean standing in for a score that failed)."""
    outcome_N: Floats
    """[N] R; 0 where there is none."""
    gate_S: Floats
    """[S] the factor, from 0 to 1, that the step's gate passes to its parents."""
    scored_S: Bools
    """[S] own reward by a score of its own: a signal about this play."""
    outcome_known_N: Bools
    """[N] whether R is a signal about this play."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What a rule hands out: `credit = own + received + shared`."""

    own_S: Floats
    """[S] e_t: what the step itself earned (with its part of the outcome, where `outcome_to` is `answer`)."""
    received_S: Floats
    """[S] what reached it from its children, discounted."""
    shared_S: Floats
    """[S] what every step of its trajectory was given alike."""
    stopped_S: Floats
    """[S] what its closed gate withheld from its parents; counted at the step whose gate it is."""
    reached_S: Bools
    """[S] whether anything that depends on this play reached the step: a score, the outcome, or credit from a child
    that had one. Not the same as credit being unequal to 0: at origin 1 a right step's is."""


RuleFunction = Callable[[Flow], Credit]


@dataclass(frozen=True, slots=True)
class Rule:
    """An entry of PROPAGATION_RULES."""

    credit: RuleFunction
    pays_own: bool
    """Whether it pays a step for its own score, so that a step whose scoring failed must be masked."""


PROPAGATION_RULES: Registry[Rule] = Registry("algorithm.propagation")


def propagation_rule(name: str, *, pays_own: bool = True) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function from Flow to Credit as `algorithm.propagation: name`."""

    def register(function: RuleFunction) -> RuleFunction:
        PROPAGATION_RULES.add(name, Rule(function, pays_own))
        return function

    return register


# ---- the reverse pass ----------------------------------------------------------------------------------------------


Waves = list[tuple[Ints, Ints]]


def waves(batch: TrajectoryBatch) -> Waves:
    """(children, parents) of all edges, a pair of arrays for each position of the child, the last position first.

    Both arrays hold step indices; within a pair no edge occurs twice and no parent does.
    """
    position_E = batch.index_of_step[batch.edge_child]
    if not position_E.size:
        return []
    largest = int(position_E.max())
    # A stable sort of 16-bit keys is a radix sort: several times faster, and no play has more steps than that.
    keys = (largest - position_E).astype(np.uint16) if largest < 2**16 else largest - position_E
    order = np.argsort(keys, kind="stable")
    child_E, parent_E = batch.edge_child[order], batch.edge_parent[order]
    ends = np.cumsum(np.bincount(largest - position_E))
    starts = ends - np.diff(ends, prepend=0)
    return [(child_E[a:b], parent_E[a:b]) for a, b in zip(starts, ends, strict=True) if b > a]


def _flow_up(flow: Flow, edges: Waves, own_S: Floats, gate_S: Floats) -> tuple[Floats, Floats]:
    """(received_S, stopped_S) of `h_t = e_t + gamma * sum over children k of share(k) * gate_k * h_k`.

    share(k) = 1 / #parents(k): a step divides what it hands up, so credit is neither lost nor made where paths meet.
    """
    gamma = flow.options.gamma
    parents_S = np.bincount(flow.batch.edge_child, minlength=flow.batch.n_steps)
    rate_S = gate_S / np.maximum(parents_S, 1)
    received_S = np.zeros_like(own_S)
    for child, parent in edges:
        received_S[parent] += gamma * rate_S[child] * (own_S[child] + received_S[child])
    stopped_S = np.where(parents_S > 0, (1.0 - gate_S) * (own_S + received_S), 0.0)
    return received_S, stopped_S


def _reach_up(flow: Flow, edges: Waves, source_S: Bools, gate_S: Floats) -> Bools:
    """[S] whether a step is a source, or a child passes it what comes from one."""
    reached_S = source_S.copy()
    passing_S = (gate_S > 0) & (flow.options.gamma > 0)
    for child, parent in edges:
        reached_S[parent] |= reached_S[child] & passing_S[child]
    return reached_S


# ---- where the outcome enters --------------------------------------------------------------------------------------


def _outcome_to_all(flow: Flow) -> tuple[Floats, Floats]:
    return flow.own_S, flow.options.w_o * flow.outcome_N[flow.batch.trajectory_of_step]


def _outcome_to_answer(flow: Flow) -> tuple[Floats, Floats]:
    trajectory_S = flow.batch.trajectory_of_step
    answer_S = _answer_steps(flow.batch)
    answers_N = np.bincount(trajectory_S[answer_S], minlength=flow.batch.n_trajectories)
    part_N = flow.options.w_o * flow.outcome_N / np.maximum(answers_N, 1)
    return flow.own_S + np.where(answer_S, part_N[trajectory_S], 0.0), np.zeros_like(flow.own_S)


OUTCOME_TO: dict[str, Callable[[Flow], tuple[Floats, Floats]]] = {
    "all": _outcome_to_all,
    "answer": _outcome_to_answer,
}
"""`algorithm.outcome_to`: (own_S, shared_S), the outcome being part of one or of the other."""


def _answer_steps(batch: TrajectoryBatch) -> Bools:
    """[S] the steps that the answer came from: as the workflow named them, else the last of the trajectory."""
    trajectory_S = batch.trajectory_of_step
    named_N = np.bincount(trajectory_S[batch.is_answer], minlength=batch.n_trajectories) > 0
    last_S = np.append(trajectory_S[1:] != trajectory_S[:-1], True)
    return batch.is_answer | (last_S & ~named_N[trajectory_S])


def _sources(flow: Flow) -> Bools:
    """[S] steps that a score of their own or the outcome reaches directly."""
    outcome_S = (flow.outcome_known_N & (flow.options.w_o > 0))[flow.batch.trajectory_of_step]
    if flow.options.outcome_to == "answer":
        outcome_S &= _answer_steps(flow.batch)
    return outcome_S | (flow.scored_S & (flow.options.w_r > 0))


# ---- rules that decompose ------------------------------------------------------------------------------------------


def _decomposed(flow: Flow, gate_S: Floats) -> Credit:
    own_S, shared_S = OUTCOME_TO[flow.options.outcome_to](flow)
    edges = waves(flow.batch)
    received_S, stopped_S = _flow_up(flow, edges, own_S, gate_S)
    return Credit(own_S, received_S, shared_S, stopped_S, _reach_up(flow, edges, _sources(flow), gate_S))


@propagation_rule("threshold")
def threshold(flow: Flow) -> Credit:
    """`h_t = e_t + gamma * sum over children k of h_k / #parents(k) where k is open`; where it is closed, 0."""
    return _decomposed(flow, flow.gate_S)


@propagation_rule("discounted")
def discounted(flow: Flow) -> Credit:
    """The same with every gate open."""
    return _decomposed(flow, np.ones_like(flow.gate_S))


@propagation_rule("none")
def none(flow: Flow) -> Credit:
    """Nothing flows: the step's own reward, and the outcome as `outcome_to` says."""
    own_S, shared_S = OUTCOME_TO[flow.options.outcome_to](flow)
    nothing_S = np.zeros_like(own_S)
    return Credit(own_S, nothing_S, shared_S, nothing_S, _sources(flow))


# ---- rules that share ----------------------------------------------------------------------------------------------


def _mean_own(flow: Flow) -> Floats:
    """[N] the mean of a trajectory's own rewards, over the steps that have one; 0 where none has."""
    trajectory_S = flow.batch.trajectory_of_step
    n = flow.batch.n_trajectories
    count_N = np.bincount(trajectory_S[flow.has_own_S], minlength=n)
    sum_N = np.bincount(trajectory_S[flow.has_own_S], flow.own_S[flow.has_own_S], n)
    return np.asarray(sum_N / np.maximum(count_N, 1), dtype=np.float64)


SHARED_REWARDS: dict[str, Callable[[Flow], Floats]] = {
    "outcome": lambda flow: flow.outcome_N,
    "outcome_plus_mean_sub_reward": lambda flow: flow.options.w_o * flow.outcome_N + _mean_own(flow),
}
"""`algorithm.shared_reward`: [N] what the sharing rules hand out. The outcome alone is handed out as it is: a weight
weighs two rewards against each other, and there is one."""


def _shared(flow: Flow, reward_N: Floats) -> Credit:
    trajectory_S = flow.batch.trajectory_of_step
    known_N = flow.outcome_known_N.copy()
    if flow.options.shared_reward != "outcome":
        known_N |= np.bincount(trajectory_S[flow.scored_S], minlength=len(known_N)) > 0
    nothing_S = np.zeros_like(flow.own_S)
    return Credit(nothing_S, nothing_S, reward_N[trajectory_S], nothing_S, known_N[trajectory_S])


@propagation_rule("identical", pays_own=False)
def identical(flow: Flow) -> Credit:
    """`c_t = R` for every step, as verl and Agent Lightning assign it."""
    return _shared(flow, SHARED_REWARDS[flow.options.shared_reward](flow))


@propagation_rule("uniform", pays_own=False)
def uniform(flow: Flow) -> Credit:
    """`c_t = R / #steps`: conserves R, and so pays for short plays."""
    steps_N = np.bincount(flow.batch.trajectory_of_step, minlength=flow.batch.n_trajectories)
    reward_N = SHARED_REWARDS[flow.options.shared_reward](flow)
    return _shared(flow, reward_N / np.maximum(steps_N, 1))
