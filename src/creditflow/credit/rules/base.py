"""The input, the output and the common formula of propagation rules.

A rule turns own rewards and outcomes into the credit of each step. It reads rewards, gates and edges, and does not
depend on reward functions and baselines.

All rules except the sharing ones are one formula with different gates:

    h_t = e_t + gamma * sum over children k of gate_k * h_k / #parents(k)

`gate_k`: the factor of k's gate on the credit that it passes to its parents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from creditflow.credit.groups import BatchColumns
from creditflow.credit.options import CreditOptions
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch


@dataclass(frozen=True, slots=True)
class PropagationInput:
    """The input of a propagation rule."""

    batch: TrajectoryBatch
    options: CreditOptions
    paid_S: Floats
    """[S] `w_r * (r_t - b)`, with the expected sub-reward for a rule that `expects`; 0 for steps without pay."""
    is_paid_S: Bools
    """[S] whether the step is paid: scored, with a substitute for a failed score, or with an expected sub-reward."""
    outcome_S: Floats
    """[S] R of the step's agent: its own outcome, else that of the trajectory; 0 without one."""
    known_S: Bools
    """[S] whether R is a signal about this trajectory."""
    scored_S: Bools
    """[S] whether the step has a score, a signal about this trajectory. Never without `options.decomposed`."""
    failed_S: Bools
    """[S] whether the step's scoring failed. Never without `options.decomposed`."""
    gate_open_S: Bools
    """[S] whether the step's gate is open: the step is unscored, or its sub-reward is above its threshold."""
    masked_S: Bools
    """[S] steps left out of training, with their trajectory or with their agent."""
    columns: BatchColumns
    """Group codes and other columns that the following stages read too."""


SIGNAL, OUTCOME = np.uint8(1), np.uint8(2)
"""Bits of `Credit.reached_S`: any signal that depends on this trajectory; the outcome."""


@dataclass(frozen=True, slots=True)
class Credit:
    """The output of a rule: `credit = own + received + shared`. A rule without flow needs the first five fields."""

    own_S: Floats
    """[S] e_t: the step's own reward, with its part of the outcome under `outcome_to: answer`."""
    received_S: Floats
    """[S] discounted credit received from children."""
    shared_S: Floats
    """[S] credit given equally to every step of the trajectory."""
    withheld_S: Floats
    """[S] credit withheld by the step's own gate, from its parents."""
    reached_S: NDArray[np.uint8]
    """[S] bits SIGNAL (a score, the outcome, or credit from a child with a signal reached the step) and OUTCOME (the
    outcome did). A step can have a signal and credit 0: at origin 1, every right step has 0."""
    gate_S: Floats | None = None
    """[S] the factor on credit passed to parents, in [0, 1]; None: the rule moves no credit."""
    frozen_S: Bools | None = None
    """[S] steps upstream of a failure, which must not learn from this trajectory; None: no step is frozen."""


# ---- the reverse pass ----------------------------------------------------------------------------------------------


def parent_counts(batch: TrajectoryBatch) -> Ints:
    """[S] the number of parents of each step."""
    return np.bincount(batch.edge_child, minlength=batch.n_steps)


def shares(parents_S: Ints) -> Floats:
    """[S] the share of a step's passed credit that each parent gets: it is divided evenly."""
    return 1.0 / np.maximum(parents_S, 1)


# ---- entry of the outcome ------------------------------------------------------------------------------------------


def _outcome_to_all(inputs: PropagationInput) -> tuple[Floats, Floats]:
    return inputs.paid_S, inputs.options.w_o * inputs.outcome_S


def _outcome_to_answer(inputs: PropagationInput) -> tuple[Floats, Floats]:
    trajectory_S = inputs.batch.trajectory_of_step
    answer_S = answer_steps(inputs.batch)
    answers_N = np.bincount(trajectory_S[answer_S], minlength=inputs.batch.n_trajectories)
    part_S = inputs.options.w_o * inputs.outcome_S / np.maximum(answers_N, 1)[trajectory_S]
    return inputs.paid_S + np.where(answer_S, part_S, 0.0), np.zeros_like(inputs.paid_S)


OUTCOME_TO: dict[str, Callable[[PropagationInput], tuple[Floats, Floats]]] = {
    "all": _outcome_to_all,
    "answer": _outcome_to_answer,
}
"""`algorithm.outcome_to`: functions that return (own_S, shared_S), with the outcome added to one of them."""


def answer_steps(batch: TrajectoryBatch) -> Bools:
    """[S] the answer steps: those named by the workflow, else the last of the trajectory."""
    trajectory_S = batch.trajectory_of_step
    named_N = np.bincount(trajectory_S[batch.is_answer], minlength=batch.n_trajectories) > 0
    last_S = np.append(trajectory_S[1:] != trajectory_S[:-1], True)
    return batch.is_answer | (last_S & ~named_N[trajectory_S])


def lost_upstream(batch: TrajectoryBatch, masked_S: Bools, gate_S: Floats) -> Bools:
    """[S] steps whose credit lacks the outcome of an answer step, because its scoring failed for that agent alone.

    Without the outcome, the answer step passes on a credit of 0 through the gates `gate_S`, which is no reward.
    """
    kept_N = np.bincount(batch.trajectory_of_step, ~masked_S, batch.n_trajectories) > 0
    lost_S = answer_steps(batch) & masked_S & kept_N[batch.trajectory_of_step]
    if not lost_S.any():
        return lost_S
    from creditflow.credit import kernels

    return kernels.reach_up(batch.edge_child, batch.edge_parent, lost_S.astype(np.uint8), gate_S) > 0


def sources(inputs: PropagationInput) -> NDArray[np.uint8]:
    """[S] bits of the signals that reach a step directly: its own score, the outcome."""
    outcome_S = inputs.known_S & (inputs.options.w_o > 0)
    if inputs.options.outcome_to == "answer":
        outcome_S &= answer_steps(inputs.batch)
    return _bits(outcome_S | (inputs.scored_S & (inputs.options.w_r > 0)), outcome_S)


def _bits(signal_S: Bools, outcome_S: Bools) -> NDArray[np.uint8]:
    return signal_S * SIGNAL | outcome_S * OUTCOME


# ---- rules that decompose ------------------------------------------------------------------------------------------


def decomposed(inputs: PropagationInput, gate_S: Floats) -> Credit:
    """The formula above, with the factors `gate_S` [S] as gates."""
    from creditflow.credit import kernels

    options, edges = inputs.options, (inputs.batch.edge_child, inputs.batch.edge_parent)
    own_S, shared_S = OUTCOME_TO[options.outcome_to](inputs)
    received_S, reached_S, parents_S = np.zeros_like(own_S), sources(inputs), parent_counts(inputs.batch)
    kernels.flow_up(*edges, own_S, gate_S, shares(parents_S), options.gamma, received_S)
    if options.gamma > 0.0:
        reached_S = kernels.reach_up(*edges, reached_S, gate_S)
    return Credit(
        own_S=own_S,
        received_S=received_S,
        shared_S=shared_S,
        withheld_S=np.where(parents_S > 0, (1.0 - gate_S) * (own_S + received_S), 0.0),
        reached_S=reached_S,
        gate_S=gate_S,
        frozen_S=kernels.frozen_upstream(*edges, gate_S) if options.on_closed_gate == "freeze" else None,
    )


# ---- rules that share ----------------------------------------------------------------------------------------------


def mean_paid(inputs: PropagationInput) -> Floats:
    """[N] the mean pay of a trajectory's steps, over those that are paid; 0 if none is."""
    trajectory, n = inputs.batch.trajectory_of_step[inputs.is_paid_S], inputs.batch.n_trajectories
    count_N = np.bincount(trajectory, minlength=n)
    return np.asarray(np.bincount(trajectory, inputs.paid_S[inputs.is_paid_S], n) / np.maximum(count_N, 1))


SHARED_REWARDS: dict[str, Callable[[PropagationInput], Floats]] = {
    "outcome": lambda inputs: inputs.outcome_S,
    "outcome_plus_mean_sub_reward": lambda inputs: (
        inputs.options.w_o * inputs.outcome_S + mean_paid(inputs)[inputs.batch.trajectory_of_step]
    ),
}
"""`algorithm.shared_reward`: [S] the credit given by the sharing rules. `w_o` weighs the outcome against sub-rewards,
so it does not apply to the outcome alone."""


def shared_credit(inputs: PropagationInput, reward_S: Floats) -> Credit:
    """Give each step the credit `reward_S` [S], made of its agent's outcome and of its whole trajectory."""
    signal_S = inputs.known_S
    if inputs.options.shared_reward != "outcome":
        trajectory_S = inputs.batch.trajectory_of_step
        scored_N = np.bincount(trajectory_S[inputs.scored_S], minlength=inputs.batch.n_trajectories) > 0
        signal_S = signal_S | scored_N[trajectory_S]
    zero_S = np.zeros_like(inputs.paid_S)
    return Credit(zero_S, zero_S, reward_S, zero_S, _bits(signal_S, inputs.known_S))
