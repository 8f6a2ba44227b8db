"""The input, the output and the common formula of propagation rules.

A rule turns own rewards and outcomes into the credit of each step. It reads rewards, gates and edges, and does not
depend on reward functions and baselines.

All rules except the sharing ones are one formula with different gates:

    h_t = e_t + gamma * in_t * sum over children k of share_k * p_k
    p_k = out_k * h_k + (1 - out_k) * s_k

`out_k`: the factor of k's gate on credit passed to parents; `in_t`: the factor of t's gate on credit received from
children; `s_k`: the substitute for k's credit behind a closed gate, 0 except under `on_closed_gate: neutral`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from creditflow.credit.gates import PASSING, RECEIVING
from creditflow.credit.groups import BatchColumns, leave_one_out_mean
from creditflow.credit.options import CreditOptions
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.errors import BatchError


@dataclass(frozen=True, slots=True)
class PropagationInput:
    """The input of a propagation rule."""

    batch: TrajectoryBatch
    options: CreditOptions
    own_S: Floats
    """[S] `w_r * (r_t - b)`, with the expected sub-reward for a rule that `expects`; 0 for steps without one."""
    has_own_S: Bools
    """[S] whether the step has an own reward: scored, with a substitute for a failed score, or with an expected one."""
    outcome_S: Floats
    """[S] R of the step's agent: its own outcome, else that of the trajectory; 0 without one."""
    gate_S: Floats
    """[S] the factor of the step's gate, in [0, 1]."""
    open_S: Bools
    """[S] whether that gate counts as open: the step is unscored, or its sub-reward is above its threshold."""
    scored_S: Bools
    """[S] whether the step has a score, a signal about this trajectory."""
    failed_S: Bools
    """[S] whether the step's scoring failed."""
    outcome_known_S: Bools
    """[S] whether R is a signal about this trajectory."""
    kept_S: Bools
    """[S] steps that are not masked, with their trajectory or with their agent."""
    stratum_S: Ints
    """[S] the stratum in force, part of the group's key; -1: none."""
    parents_S: Ints
    """[S] the number of parents of each step."""
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
    """[S] credit withheld by the step's own gate, from its parents and from itself."""
    reached_S: NDArray[np.uint8]
    """[S] bits SIGNAL (a score, the outcome, or credit from a child with a signal reached the step) and OUTCOME (the
    outcome did). A step can have a signal and credit 0: at origin 1, every right step has 0."""
    gate_out_S: Floats | None = None
    """[S] the factor of the step's gate on credit passed to parents; None: the rule moves no credit."""
    gate_in_S: Floats | None = None
    """[S] the factor of the step's gate on credit received from children; None: the rule moves no credit."""
    stand_in_S: Floats | None = None
    """[S] s_t, NaN for none; None: no step has one."""
    frozen_S: Bools | None = None
    """[S] steps upstream of a failure, which must not learn from this trajectory; None: no step is frozen."""


# ---- the reverse pass ----------------------------------------------------------------------------------------------


def parent_counts(batch: TrajectoryBatch) -> Ints:
    """[S] the number of parents of each step."""
    return np.bincount(batch.edge_child, minlength=batch.n_steps)


def _split(batch: TrajectoryBatch, parents_S: Ints) -> Floats:
    return 1.0 / np.maximum(parents_S, 1)


def _copy(batch: TrajectoryBatch, parents_S: Ints) -> Floats:
    from creditflow.credit import kernels

    child, parent = kernels.second_path(batch.edge_child, batch.edge_parent, first_edges(batch), batch.n_steps)
    if child >= 0:
        raise BatchError(
            f"step {batch.step_ids[child]}: expected one path at most to each ancestor, because algorithm.share: copy "
            f"would count every path; got two to {batch.step_ids[parent]}. Use share: split or once"
        )
    return np.ones(batch.n_steps)


SHARES: dict[str, Callable[[TrajectoryBatch, Ints], Floats]] = {"split": _split, "copy": _copy, "once": _split}
"""`algorithm.share`: [S] the share of a step's passed credit that each parent gets. `once` has no shares by edge; an
account by edge (`withheld_S`) uses those of `split`."""


def first_edges(batch: TrajectoryBatch) -> Ints:
    """[S+1] the index of each child's first edge."""
    return np.concatenate([[0], np.cumsum(parent_counts(batch))])


def first_steps(batch: TrajectoryBatch) -> Ints:
    """[S] the first step of each step's trajectory."""
    return np.arange(batch.n_steps) - batch.index_of_step


def _flow_up(
    inputs: PropagationInput, share_S: Floats, own_S: Floats, gate_out_S: Floats, gate_in_S: Floats, stand_in_S: Floats
) -> Floats:
    from creditflow.credit import kernels

    batch, options = inputs.batch, inputs.options
    if options.share == "once":
        return kernels.flow_up_once(
            batch.edge_child,
            batch.edge_parent,
            first_edges(batch),
            first_steps(batch),
            own_S,
            gate_out_S,
            gate_in_S,
            options.gamma,
        )
    received_S = np.zeros_like(own_S)
    kernels.flow_up(
        batch.edge_child,
        batch.edge_parent,
        own_S,
        gate_out_S,
        gate_in_S,
        share_S,
        stand_in_S,
        options.gamma,
        received_S,
    )
    return received_S


def _withheld(
    inputs: PropagationInput, share_S: Floats, credit_S: Floats, gate_out_S: Floats, gate_in_S: Floats
) -> Floats:
    from creditflow.credit import kernels

    batch = inputs.batch
    closed = np.flatnonzero(gate_out_S < 1.0)
    withheld_S = np.zeros_like(credit_S)
    parents = inputs.parents_S[closed]
    withheld_S[closed] = parents * share_S[closed] * ((1.0 - gate_out_S[closed]) * credit_S[closed])
    if inputs.options.gate_at in RECEIVING:
        withheld_S += kernels.withheld_by_receivers(
            batch.edge_child, batch.edge_parent, credit_S, gate_out_S, gate_in_S, share_S
        )[0]
    return withheld_S


def _neutral(
    inputs: PropagationInput, share_S: Floats, own_S: Floats, gate_out_S: Floats, gate_in_S: Floats
) -> tuple[Floats, Floats]:
    """Received credit and substitutes under `on_closed_gate: neutral`, as (received_S, stand_in_S).

    The substitute for a closed step is the mean h of the open steps of its group in other trajectories. These means
    depend on h, and trajectories may depend on one another in a cycle. They are therefore computed by sweeps: in the
    first sweep, closed gates pass nothing; in each later one, they pass the means of the previous sweep. Each
    trajectory takes the sweep with the number of steps on its own longest path. The result is exact for trajectories of
    one length without a cycle. With a cycle, the omitted terms are farther away than the trajectory is long. The length
    of unrelated trajectories does not matter.
    """
    from creditflow.credit import kernels

    batch = inputs.batch
    members_S = inputs.kept_S & inputs.open_S & ~inputs.failed_S
    codes = [inputs.columns.code_S(level) for level in (inputs.options.group_by, "agent")]
    closed = np.flatnonzero(gate_out_S < 1.0)
    longest_N = np.ones(batch.n_trajectories, dtype=np.int64)
    path_S = kernels.path_lengths(batch.edge_child, batch.edge_parent, batch.n_steps)
    np.maximum.at(longest_N, batch.trajectory_of_step, path_S)
    sweeps_S = longest_N[batch.trajectory_of_step]

    received_S = _flow_up(inputs, share_S, own_S, gate_out_S, gate_in_S, np.zeros_like(own_S))
    stand_in_S, taken = np.full_like(own_S, np.nan), (np.zeros_like(own_S), np.full_like(own_S, np.nan))
    for sweep in range(1, int(longest_N.max()) + 1):
        before_S, stand_in_S = stand_in_S, np.full_like(own_S, np.nan)
        for code_S in codes:
            at = closed[np.isnan(stand_in_S[closed])]
            stand_in_S[at] = leave_one_out_mean(own_S + received_S, members_S, code_S, batch.trajectory_of_step, at)
        received_S = _flow_up(inputs, share_S, own_S, gate_out_S, gate_in_S, np.nan_to_num(stand_in_S))
        same = np.array_equal(before_S, stand_in_S, equal_nan=True)
        take_S = sweeps_S >= sweep if same else sweeps_S == sweep
        taken[0][take_S], taken[1][take_S] = received_S[take_S], stand_in_S[take_S]
        if same:
            break
    return taken


def _reach_up(inputs: PropagationInput, gate_out_S: Floats, gate_in_S: Floats) -> NDArray[np.uint8]:
    from creditflow.credit import kernels

    source_S = sources(inputs)
    if inputs.options.gamma == 0.0:
        return source_S
    return kernels.reach_up(inputs.batch.edge_child, inputs.batch.edge_parent, source_S, gate_out_S, gate_in_S)


# ---- entry of the outcome ------------------------------------------------------------------------------------------


def _outcome_to_all(inputs: PropagationInput) -> tuple[Floats, Floats]:
    return inputs.own_S, inputs.options.w_o * inputs.outcome_S


def _outcome_to_answer(inputs: PropagationInput) -> tuple[Floats, Floats]:
    trajectory_S = inputs.batch.trajectory_of_step
    answer_S = answer_steps(inputs.batch)
    answers_N = np.bincount(trajectory_S[answer_S], minlength=inputs.batch.n_trajectories)
    part_S = inputs.options.w_o * inputs.outcome_S / np.maximum(answers_N, 1)[trajectory_S]
    return inputs.own_S + np.where(answer_S, part_S, 0.0), np.zeros_like(inputs.own_S)


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


def sources(inputs: PropagationInput) -> NDArray[np.uint8]:
    """[S] bits of the signals that reach a step directly: its own score, the outcome."""
    outcome_S = inputs.outcome_known_S & (inputs.options.w_o > 0)
    if inputs.options.outcome_to == "answer":
        outcome_S &= answer_steps(inputs.batch)
    return _bits(outcome_S | (inputs.scored_S & (inputs.options.w_r > 0)), outcome_S)


def _bits(signal_S: Bools, outcome_S: Bools) -> NDArray[np.uint8]:
    return signal_S * SIGNAL | outcome_S * OUTCOME


# ---- rules that decompose ------------------------------------------------------------------------------------------


def decomposed(inputs: PropagationInput, gate_S: Floats) -> Credit:
    """The formula above, with the factors `gate_S` [S] as gates."""
    from creditflow.credit import kernels

    options = inputs.options
    own_S, shared_S = OUTCOME_TO[options.outcome_to](inputs)
    every_S = np.ones_like(gate_S)
    gate_out_S = gate_S if options.gate_at in PASSING else every_S
    gate_in_S = gate_S if options.gate_at in RECEIVING else every_S
    share_S = SHARES[options.share](inputs.batch, inputs.parents_S)
    stand_in_S = frozen_S = None
    if options.on_closed_gate == "neutral" and (gate_out_S < 1.0).any():
        received_S, stand_in_S = _neutral(inputs, share_S, own_S, gate_out_S, gate_in_S)
    else:
        received_S = _flow_up(inputs, share_S, own_S, gate_out_S, gate_in_S, np.zeros_like(own_S))
    if options.on_closed_gate == "freeze":
        frozen_S = kernels.frozen_upstream(inputs.batch.edge_child, inputs.batch.edge_parent, gate_out_S)
    return Credit(
        own_S=own_S,
        received_S=received_S,
        shared_S=shared_S,
        withheld_S=_withheld(inputs, share_S, own_S + received_S, gate_out_S, gate_in_S),
        reached_S=_reach_up(inputs, gate_out_S, gate_in_S),
        gate_out_S=gate_out_S,
        gate_in_S=gate_in_S,
        stand_in_S=stand_in_S,
        frozen_S=frozen_S,
    )


# ---- rules that share ----------------------------------------------------------------------------------------------


def mean_own(inputs: PropagationInput) -> Floats:
    """[N] the mean of a trajectory's own rewards, over the steps that have one; 0 if none has."""
    trajectory_S = inputs.batch.trajectory_of_step
    n = inputs.batch.n_trajectories
    count_N = np.bincount(trajectory_S[inputs.has_own_S], minlength=n)
    sum_N = np.bincount(trajectory_S[inputs.has_own_S], inputs.own_S[inputs.has_own_S], n)
    return np.asarray(sum_N / np.maximum(count_N, 1), dtype=np.float64)


SHARED_REWARDS: dict[str, Callable[[PropagationInput], Floats]] = {
    "outcome": lambda inputs: inputs.outcome_S,
    "outcome_plus_mean_sub_reward": lambda inputs: (
        inputs.options.w_o * inputs.outcome_S + mean_own(inputs)[inputs.batch.trajectory_of_step]
    ),
}
"""`algorithm.shared_reward`: [S] the credit given by the sharing rules. `w_o` weighs the outcome against sub-rewards,
so it does not apply to the outcome alone."""


def shared_credit(inputs: PropagationInput, reward_S: Floats) -> Credit:
    """Give each step the credit `reward_S` [S], made of its agent's outcome and of its whole trajectory."""
    signal_S = inputs.outcome_known_S
    if inputs.options.shared_reward != "outcome":
        trajectory_S = inputs.batch.trajectory_of_step
        scored_N = np.bincount(trajectory_S[inputs.scored_S], minlength=inputs.batch.n_trajectories) > 0
        signal_S = signal_S | scored_N[trajectory_S]
    nothing_S = np.zeros_like(inputs.own_S)
    return Credit(nothing_S, nothing_S, reward_S, nothing_S, _bits(signal_S, inputs.outcome_known_S))
