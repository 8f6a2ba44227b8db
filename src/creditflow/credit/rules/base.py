"""The base classes of propagation rules, and the formula that most of them share.

A rule turns sub-rewards and outcomes into the credit of each step. It does not depend on reward functions, baselines
and the model. Its options are the fields of its class.

    h_t = e_t + gamma * sum over children k of gate_k * h_k / #parents(k)

`gate_k`: the factor of k's gate on the credit that it passes to its parents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from creditflow.credit.records import (
    NOTHING,
    OUTCOME,
    SIGNAL,
    Credit,
    CreditOptions,
    Formulas,
    Rule,
    RuleInput,
    share,
    weight,
)
from creditflow.data import Bools, Floats, TrajectoryBatch


@dataclass(frozen=True)
class ScoreRule(Rule):
    """A rule with a pay for sub-rewards."""

    pays_scores: ClassVar[bool] = True

    w_r: float = weight(1.0)
    """Weight of sub-rewards, at least 0."""
    sub_reward_origin: float = share(1.0)
    """b in `w_r * (r - b)`, from 0 to 1. 1 charges for wrong steps; 0 pays for right ones, including needless ones."""

    def formulas(self, options: CreditOptions) -> Formulas:
        return {"own": ("paid",), "paid": ("w_r * (sub_reward - sub_reward_origin)",)}

    def pay(self, inputs: RuleInput) -> Floats:
        """[S] `w_r * (r - b)`; 0 for steps without a sub-reward."""
        sub_reward_S = inputs.rewards.sub_reward_S
        return np.where(np.isnan(sub_reward_S), 0.0, float(self.w_r) * (sub_reward_S - self.sub_reward_origin))


@dataclass(frozen=True)
class OutcomeRule(ScoreRule):
    """A rule with a pay for sub-rewards and a place for the outcome, in the terms of docs/concepts/credit.md."""

    pays_tokens: ClassVar[bool] = True

    w_o: float = weight(1.0)
    """Weight of the outcome, at least 0."""
    outcome_to: Literal["all", "answer"] = "all"
    """`all`: the outcome is added to every step's credit, neither discounted nor gated. `answer`: it is added to the
    own reward of the answer steps, and flows upstream from there. An estimator with a critic always pays it at the
    answer steps, since a sum along the trajectory would count it once for each step."""

    def at_answer(self, options: CreditOptions) -> bool:
        """Whether the outcome is paid at the answer steps."""
        return self.outcome_to == "answer" or options.estimator.critic

    def formulas(self, options: CreditOptions) -> Formulas:
        if self.at_answer(options):
            return {**super().formulas(options), "own": ("paid + w_o * outcome / answers", "paid")}
        return {**super().formulas(options), "shared": ("w_o * outcome",)}

    def paid(self, inputs: RuleInput, gate_S: Floats | None = None) -> Credit:
        """The pay for the score and the outcome.

        The own rewards flow to parents through gates with the factors `gate_S` [S]; None: no credit flows.
        """
        batch, rewards, options = inputs.batch, inputs.rewards, inputs.options
        paid_S, outcome_S, known_S = self.pay(inputs), self.w_o * rewards.outcome_S, rewards.known_S & (self.w_o > 0)
        zero_S = np.zeros_like(paid_S)
        own_S, shared_S, misled_S, passes_S = paid_S, outcome_S, None, gate_S
        if self.at_answer(options):
            own_S, shared_S = paid_S + answer_part(batch, outcome_S), zero_S
            known_S &= batch.is_answer_step
            passes_S = np.ones_like(paid_S) if gate_S is None and options.estimator.critic else gate_S
            if passes_S is not None and options.gamma > 0 and self.w_o > 0:
                upstream_S = misled(inputs, passes_S)
                misled_S = upstream_S if upstream_S.any() else None
        reached_S = bits(known_S | (rewards.scored_S & options.decomposed & (self.w_r > 0)), known_S)
        received_S = zero_S if gate_S is None else flow_up(batch, own_S, gate_S, options.gamma, reached_S)
        if gate_S is None and passes_S is not None:  # a critic's values pass the outcome, without the pay for scores
            outcome_reached_S = bits(known_S, known_S)
            flow_up(batch, zero_S, passes_S, options.gamma, outcome_reached_S)
            reached_S |= outcome_reached_S
        return Credit(own_S, received_S, shared_S, reached_S, paid_S=paid_S, gate_S=gate_S, misled_S=misled_S)


def answer_part(batch: TrajectoryBatch, outcome_S: Floats) -> Floats:
    """[S] the outcome, divided evenly among the answer steps of the trajectory; 0 at the other steps."""
    return np.where(batch.is_answer_step, outcome_S / batch.answers_of_step, 0.0)


def bits(signal_S: Bools, outcome_S: Bools) -> NDArray[np.uint8]:
    """[S] `Credit.reached_S` from the steps that any signal, and that the outcome reached."""
    return signal_S * SIGNAL | outcome_S * OUTCOME


def flow_up(
    batch: TrajectoryBatch, own_S: Floats, gate_S: Floats, gamma: float, reached_S: NDArray[np.uint8] | None = None
) -> Floats:
    """[S] the credit received from children by the formula of this module.

    Adds to `reached_S` [S] the bits that children pass through open gates.
    """
    from creditflow.credit import kernels

    received_S = np.zeros_like(own_S)
    reached_S = np.zeros(len(own_S), dtype=np.uint8) if reached_S is None else reached_S
    edges = batch.edge_child, batch.edge_parent
    kernels.flow_up(*edges, own_S, gate_S, batch.share_of_step, gamma, received_S, reached_S)
    return received_S


def misled(inputs: RuleInput, gate_S: Floats | None = None) -> Bools:
    """[S] steps whose credit lacks the outcome of an answer step, because its scoring failed for that agent alone.

    Without the outcome, the answer step passes on a credit of 0, which is no reward, through the gates `gate_S`; None:
    all are open.
    """
    batch, masked_S = inputs.batch, inputs.rewards.masked_S
    kept_N = np.bincount(batch.trajectory_of_step, ~masked_S, batch.n_trajectories) > 0
    lost_S = batch.is_answer_step & masked_S & kept_N[batch.trajectory_of_step]
    if not lost_S.any():
        return lost_S
    reached_S, one_S = lost_S.astype(np.uint8), np.ones(batch.n_steps)
    flow_up(batch, 0.0 * one_S, one_S if gate_S is None else gate_S, 1.0, reached_S)
    return reached_S > 0


def outcome_gates(credit: Credit, options: CreditOptions) -> Floats | None:
    """[S] the gates through which an outcome at the answer reaches earlier steps; None if it does not.

    Under a rule without flow, a critic's values pass along every edge.
    """
    if credit.gate_S is None and options.estimator.critic and isinstance(options.propagation, OutcomeRule):
        return np.ones_like(credit.own_S)
    return credit.gate_S


@dataclass(frozen=True)
class SharingRule(ScoreRule):
    """A rule that gives every step of a trajectory its global reward."""

    flow: ClassVar[str] = NOTHING
    pays_scores: ClassVar[bool] = False
    shares: ClassVar[bool] = True

    w_o: float = weight(1.0)
    """Weight of the outcome beside the mean sub-reward, at least 0."""
    shared_reward: Literal["outcome", "outcome_plus_mean_sub_reward"] = "outcome"
    """The global reward: the `outcome` without weights, or `outcome_plus_mean_sub_reward`, which contains the same
    information as the other rules' credit and reads the weights."""

    def formulas(self, options: CreditOptions) -> Formulas:
        return {"shared": ("outcome",)}

    def shared_S(self, inputs: RuleInput) -> Floats:
        """[S] the global reward of the step's trajectory."""
        outcome_S = inputs.rewards.outcome_S
        if self.shared_reward == "outcome":
            return outcome_S
        trajectory_S, n = inputs.batch.trajectory_of_step, inputs.batch.n_trajectories
        at = np.flatnonzero(~np.isnan(inputs.rewards.sub_reward_S))
        count_N = np.bincount(trajectory_S[at], minlength=n)
        mean_N = np.bincount(trajectory_S[at], self.pay(inputs)[at], n) / np.maximum(count_N, 1)
        return np.asarray(self.w_o * outcome_S + mean_N[trajectory_S])

    def give(self, inputs: RuleInput, reward_S: Floats) -> Credit:
        """Give each step the credit `reward_S` [S], made of its agent's outcome and of its whole trajectory."""
        known_S = signal_S = inputs.rewards.known_S
        if self.shared_reward != "outcome":
            trajectory_S, n = inputs.batch.trajectory_of_step, inputs.batch.n_trajectories
            scored_N = np.bincount(trajectory_S, inputs.rewards.scored_S & inputs.options.decomposed, n) > 0
            signal_S = signal_S | scored_N[trajectory_S]
        zero_S = np.zeros_like(reward_S)
        return Credit(zero_S, zero_S, reward_S, bits(signal_S, known_S))
